"""Enumerates the program variants that compete end to end.

    xla                            plain jax.jit
    jcuts                          jcuts' kernels, program as it is
    jcuts/scales+dots/anchored     rewritten, kernels only where a reduction, window or convolution is
                                   (`base.settings.Variant`)
    ...:graphs                     any of them with compiler options

On a CPU there is one variant, times compiler options, and another where kernels lost to XLA by little.  On a GPU the
cost of a function depends on its launches and on what XLA can still fuse, which no region shows by itself: a few whole
programs compete.  Their kernels are tuned per region, and most variants share them.  The last one is what the partition
search makes of the best of them (`variant_to_search`).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jcuts.base.errors import UsageError
from jcuts.base.settings import ATTENTION, BEYOND_SUMS, CLEAR, LOOP_BODIES, SEARCHED, UNBROKEN, Settings, Variant
from jcuts.jit import end_to_end_benchmark
from jcuts.jit.accuracy.float64_check import NO_AUTOTUNE as NO_AUTOTUNE
from jcuts.jit.accuracy.float64_check import Float64Judge as Float64Judge
from jcuts.jit.accuracy.float64_check import longest_sum as longest_sum
from jcuts.jit.variant_names import form_of as form_of
from jcuts.jit.variant_names import is_xla as is_xla
from jcuts.jit.variant_names import name_of as name_of
from jcuts.jit.variant_names import shown_form as shown_form
from jcuts.microbatch.report import DivisionReport
from jcuts.pipeline import inplace_update, microbatch_convs
from jcuts.pipeline.computation import TOO_LITTLE
from jcuts.pipeline.outcome import Outcome
from jcuts.report import measured_sums
from jcuts.report.function_report import FunctionReport
from jcuts.report.gain_limits import gains_clearly, is_near_tie
from jcuts.rewrite import registry as rewrite_registry
from jcuts.rewrite.matmul_patterns import DOT
from jcuts.rewrite.simplify import simplify
from jcuts.schedule.gpu.gemm.wgmma import GROUPED
from jcuts.trace import jaxapi
from jcuts.trace.inline import inline
from jcuts.xla import devices as xla_devices

log = logging.getLogger("jcuts")

GPUS = ("gpu", "cuda")
LOOPS = ("scan", "while")
ALWAYS_ON = ("scales", "rounds", "slots")  # rewrites that take work away and add none
KERNEL_ONLY = ("slots",)  # rewrites that only kernels gain by
ONLY_COMBINED = ("pools", "siblings")  # rewrites that only race beside all others that apply
JOINED = "joins"
TURNED = "turns"
VECTORS = "vectors"
"""Like `JOINED` and `TURNED` a rewrite that costs passes over arguments in every call, for kernels that then have less
to do: the three race apart."""
LOGITS = "logits"
"""The rewrite that computes logits in chunks of tokens: it saves memory, and has forms of its own."""
RECOMPUTED = "recomputes"
"""The rewrite of backward passes of attention, for kernels that compute weights again: it races with these alone."""
PRUNE_GAIN = 0.6  # a form that gains so much less than another, in shares of what the other's kernels take, is left out
AHEAD_LONG = 0.15
"""The share that leaves a form out where the other's kernels take `LONG`: launches and borders matter less there."""
LONG = 1e-3
"""Seconds of kernels that are long."""
AHEAD_OF_NONE = 0.2  # ... the one without kernels, where XLA's time was clear without compiling its code for some
EVERY = Variant((), "every")
XLA_TIMES = 2
"""Times what XLA takes for the regions of kernels, from which on these lie among fusions of its own."""
LEAST_SHARE = 0.05  # of the subsets' time, from which on kernels that lost by little are tried in a whole program


# -- names ----------------------------------------------------------------------------------------------------------
def is_known(name: str, platform: str, uses_jcuts: bool) -> bool:
    """Whether a stored name means a program that this process can make.

    Args: uses_jcuts: whether the plain form has any kernel.
    """
    option = name.partition(":")[2]
    if option and compiler_options(name, platform) is None:
        return False
    if is_xla(name):
        return True
    try:
        form = form_of(name)
    except UsageError:
        return False
    if form is None:
        return uses_jcuts and name.startswith(end_to_end_benchmark.JCUTS)
    if form.regions in (EVERY.regions, LOOP_BODIES):
        return platform == "cpu" and not form.rewrites and form.chained
    return platform in GPUS and not set(form.rewrites) - set(rewrite_registry.RULES)


def _family(platform: str) -> str:
    return "cuda" if platform in GPUS else platform


def compiler_options(name: str, platform: str) -> dict[str, Any] | None:
    """Compiler options of a program (None for none, or for a name that this version does not know)."""
    tables = end_to_end_benchmark.OPTIONS, end_to_end_benchmark.LOOP_OPTIONS, end_to_end_benchmark.SEPARATE_OPTIONS
    known = {option: chosen for table in tables for option, chosen in table.get(_family(platform), {}).items()}
    return known.get(name.partition(":")[2])


def options(platform: str) -> tuple[str, ...]:
    """Compiler options that are tried on a platform: on a GPU the first of the list that this jaxlib accepts."""
    names = tuple(end_to_end_benchmark.OPTIONS.get(_family(platform), {}))
    if platform not in GPUS:
        return names
    return next(((name,) for name in names if accepts(name, platform)), ())


def loop_options(closed: jaxapi.Closed, platform: str) -> tuple[str, ...]:
    """Compiler options that are tried besides for programs with matrix products in loops; none for others."""
    if platform not in GPUS or not has_products_in_loops(closed):
        return ()
    return tuple(name for name in end_to_end_benchmark.LOOP_OPTIONS[_family(platform)] if accepts(name, platform))


def has_loops(closed: jaxapi.Closed) -> bool:
    """Whether a program has a `scan` or `while`."""
    return any(
        jaxapi.primitive_name(eqn) in LOOPS or any(has_loops(body) for _, _, body in jaxapi.inner_jaxprs(eqn))
        for eqn in closed.jaxpr.eqns
    )


def has_products_in_loops(closed: jaxapi.Closed, in_loop: bool = False) -> bool:
    """Whether a `scan` or `while` body of a program multiplies matrices."""
    for eqn in closed.jaxpr.eqns:
        name = jaxapi.primitive_name(eqn)
        if in_loop and name == DOT:
            return True
        if any(has_products_in_loops(body, in_loop or name in LOOPS) for _, _, body in jaxapi.inner_jaxprs(eqn)):
            return True
    return False


@functools.cache
def accepts(name: str, platform: str) -> bool:
    """Whether this jaxlib compiles with the options of a name."""
    chosen = compiler_options(f"{end_to_end_benchmark.XLA}:{name}", platform)
    try:
        with jax.default_device(jax.local_devices(backend=platform)[0]):
            jax.jit(lambda x: x + 1, compiler_options=chosen).lower(np.float32(0)).compile()
    except Exception as error:  # other versions know other options, and refuse those that they do not know
        log.info("compiler options %r are not accepted: %s", name, str(error).splitlines()[0] if str(error) else error)
        return False
    return True


# -- which compete --------------------------------------------------------------------------------------------------
def plan_variants(
    closed: jaxapi.Closed,
    platform: str,
    plan: Callable[[Variant | None], Outcome],
    worth: Sequence[Variant | None] | None = None,
) -> dict[Variant | None, Outcome]:
    """Outcomes of the forms that are worth a race, the plainest first; those that change nothing are left out.

    Args: plan: gives the pipeline's outcome for a form (tuning its subsets); worth: `candidate_variants`, if known.

    `rewrite`'s folding and rounding of constants and its updates in place take work away and add none, so they are in
    every form (and checked against float64 with it); updates not in those without kernels.  Products in place of
    convolutions, and which subsets to cut out of XLA's fusions, are raced; kernels take over what follows a product
    only beside `dots`: the library's convolutions compute that.
    Products with kernels of their own are in `all` and `anchored`, each where it beat the library with all that follows
    it; `absorbing` is the form without them.
    The rules of `WITH_ALL` race only beside all others that apply, in three programs (each costs seconds of
    compilation): left to XLA, with kernels for everything, and with kernels for all but dense products, since larger
    products are what these rules are for.
    `recomputes` has a form of its own, with kernels for attention alone, and `logits` has two; programs that append to
    a cache have one whose chains are `unbroken`.  Where `turns` takes weights that are arguments, kernels come with it,
    `vectors` and `joins`, or in the form without other rewrites.
    """
    found: dict[Variant | None, Outcome] = {}
    seen: set[str] = set()
    for form in candidate_variants(closed, platform) if worth is None else worth:
        outcome = plan(form)
        if outcome.closed is not closed and outcome.report.source not in seen:  # equal programs are one candidate
            seen.add(outcome.report.source)
            found[form] = outcome
    return found


def candidate_variants(closed: jaxapi.Closed, platform: str) -> list[Variant | None]:
    """The variants that `plan_variants` plans, in its order."""
    rules = rewrite_registry.applicable(closed := simplify(inline(closed))) if platform in GPUS else ()
    if set(rules) & {"rounds", TURNED} and xla_devices.machine().capability != GROUPED:
        rules = tuple(name for name in rules if name not in ("rounds", JOINED, TURNED))
    recomputed = RECOMPUTED in rules
    ahead = tuple(name for name in rules if name in (JOINED, TURNED, VECTORS))
    chunked = LOGITS in rules
    rules = tuple(name for name in rules if name not in (*ahead, RECOMPUTED, LOGITS))
    folded = tuple(name for name in rules if name in ALWAYS_ON)
    found: list[Variant | None] = [Variant(folded) if folded else None]
    if platform in GPUS:
        every = [folded, *((*folded, name) for name in rules if name not in (*folded, *ONLY_COMBINED))]
        with_all = bool(set(rules) & set(ONLY_COMBINED))
        if TURNED in ahead:  # kernels beside other rewrites would take time to tune, and lose
            found += [_form(folded, r) for r in ("all", "anchored", "none") if folded or r == "anchored"]
            found += [_form(rewrites, "none") for rewrites in every[1:]]
            found += [Variant((*folded, *ahead), r) for r in ("all", "anchored")]
            found.append(Variant((*every[-1], *ahead), "all"))
            found += [_form(rules, "none"), Variant((*rules, *ahead), "all")] if with_all else []
        else:
            for rewrites in every:
                found += [_form(rewrites, r) for r in ("all", "anchored", "none") if rewrites or r == "anchored"]
            found.append(Variant(every[-1], "absorbing"))
            found += [Variant(folded, UNBROKEN)] if inplace_update.appends(closed) else []
            found += [_form(rules, regions) for regions in ("none", "all", "absorbing")] if with_all else []
    found += [Variant((*folded, RECOMPUTED), ATTENTION)] if recomputed else []
    found += [Variant((*folded, LOGITS), "none"), Variant((*folded, *ahead, LOGITS))] if chunked else []
    return [form for form in dict.fromkeys(found) if form != Variant((), "none")]


def allowed(forms: Sequence[Variant | None], settings: Settings) -> list[Variant | None]:
    """The variants that the user's options allow: none with logits in chunks where these are not wanted."""
    if settings.chunk_logits is not False:
        return list(forms)
    return [form for form in forms if form is None or LOGITS not in form.rewrites]


def variant_to_search(found: Mapping[Variant | None, Outcome]) -> Variant | None:
    """The variant whose partition is searched by measured times, None if there is nothing to search.

    It has the rewrites of that variant with all regions whose regions take least together, kernel or XLA's code: the
    fastest has been one of these in nearly all networks.

    Args: found: the outcomes of all that could race.
    """
    sums: dict[Variant | None, tuple[int, float]] = {}
    for form, outcome in found.items():
        if outcome.report.subsets and _has_all_regions(form):
            times = [(s.count, measured_sums.seconds(s)) for s in outcome.report.subsets]
            sums[form] = sum(time is None for _, time in times), sum(count * (time or 0.0) for count, time in times)
    if not sums:
        return None
    best = min(sums, key=lambda form: sums[form]) or Variant()
    return Variant(best.rewrites, SEARCHED)


def variant_of_clear(found: Mapping[Variant | None, Outcome], plain_seconds: float | None) -> Variant | None:
    """The variant of clear gains, where the regions of kernels lie among fusions of XLA's; None elsewhere.

    By profiles and whole programs of training steps, a region's border costs there about what a kernel gains that is
    not much faster: XLA fuses what is left over less.  It has the rewrites of the variant with most measured gain, and
    those of the one with kernels for attention alone.

    Args: found: the outcomes of all that could race; plain_seconds: kernels of plain XLA's program by its profile [s].
    """
    whole = [form for form in found if _has_all_regions(form)]
    if plain_seconds is None or not whole:
        return None
    sums = {form: measured_sums.kernel_sums(found[form].report) for form in whole}
    best = max(sums, key=lambda form: sums[form][1])
    ours, gain = sums[best]
    clear = measured_sums.kernel_sums(found[best].report, gains_clearly)[1]
    is_among = XLA_TIMES * (ours + gain) < plain_seconds
    attention = _attention_alone(found)
    rest = plain_seconds - (0.0 if attention is None else measured_sums.kernel_sums(found[attention].report)[1])
    if not is_among or not end_to_end_benchmark.LEAST_GAIN * rest <= clear < gain:
        return None
    return Variant(_rewrites_of(best, attention), CLEAR)


def variant_with_attention(found: Mapping[Variant | None, Outcome]) -> Variant | None:
    """The variant of most measured gain with kernels for attention and its gradient besides; None where there are none.

    Args: found: the outcomes of all that could race.
    """
    attention = _attention_alone(found)
    whole = [form for form in found if _has_all_regions(form)]
    if attention is None or not whole or measured_sums.kernel_sums(found[attention].report)[1] <= 0.0:
        return None
    best = max(whole, key=lambda form: measured_sums.kernel_sums(found[form].report)[1])
    return Variant(_rewrites_of(best, attention))


def _attention_alone(found: Mapping[Variant | None, Outcome]) -> Variant | None:
    """The variant with kernels for attention alone."""
    return next((form for form in found if form is not None and form.regions == ATTENTION), None)


def _rewrites_of(*forms: Variant | None) -> tuple[str, ...]:
    """The rewrites of all of these, each once."""
    return tuple(dict.fromkeys(r for form in forms if form is not None for r in form.rewrites))


def _form(rewrites: Sequence[str], regions: str) -> Variant:
    """A form, without the rewrites that its regions have no use for."""
    return Variant(tuple(r for r in rewrites if regions != "none" or r not in KERNEL_ONLY), regions)


def near_ties(report: FunctionReport) -> bool:
    """Whether subsets that XLA won are worth a race of whole programs in which kernels run them.

    A subset alone pays for no border between it and the next one, and XLA's own code for it has neither.
    """
    every = [(s.xla_seconds or 0.0) * s.count for s in report.subsets]
    lost = [
        time
        for s, time in zip(report.subsets, every, strict=True)
        if s.chosen == end_to_end_benchmark.XLA and is_near_tie(s.seconds, s.xla_seconds)
    ]
    small = sum(r.count for r in report.refusals if r.reason == TOO_LITTLE)
    return bool(report.subsets) and (sum(lost) > LEAST_SHARE * sum(every) or small > LEAST_SHARE * report.equations)


def programs(forms: Sequence[Variant | None], extra: Sequence[str], loops: Sequence[str] = ()) -> list[str]:
    """Names in the fixed order that decides ties: the plainer program wins.

    With several forms only the first is tried without compiler options.  Args: loops: further options, for products in
    loops.
    """
    extra = (*extra, *loops)
    names = [end_to_end_benchmark.XLA, *(f"{end_to_end_benchmark.XLA}:{option}" for option in extra)]
    if forms:
        names.append(name_of(forms[0]))
        names += [name_of(form, option) for form in forms for option in extra]
        names += [name_of(form) for form in forms[1:] if not extra]
    return names


def over_workspace_limit(
    names: Sequence[str], rows: Mapping[Variant | None, Sequence[DivisionReport]], settings: Settings
) -> dict[str, str]:
    """Programs whose convolutions take more than the workspace limit, with the reason; none where no program keeps it.

    Args: names: of whole programs; rows: the convolutions of those that are jcuts'.
    """
    if not rows or not microbatch_convs.is_asked(settings):
        return {}
    # Rewrites make products of some convolutions: the longest list is the user's program's.
    plain = microbatch_convs.over_limit(max(rows.values(), key=len), settings, by_xla=True)
    ours = {form: microbatch_convs.over_limit(mine, settings, by_xla=False) for form, mine in rows.items()}
    if plain and all(ours.values()):
        return {}
    found = {}
    for name in names:
        mine = plain if is_xla(name) else ours.get(form_of(name), [])
        if mine:
            found[name] = f"it takes more workspace than is allowed, where others do not: {', '.join(mine)}"
    return found


def dominated_variants(found: Mapping[Variant | None, Outcome]) -> dict[Variant | None, str]:
    """Forms that need not race, with the reason: one of the same rewrites gains far more by measured sums.

    What XLA and kernels take in a whole program is not what they take alone, but the differences are smaller than that.

    Args: found: the outcomes of all that could race.
    """
    out: dict[Variant | None, str] = {}
    sums = {form: measured_sums.kernel_sums(outcome.report) for form, outcome in found.items()}
    for form in found:
        alike = [other for other in found if numeric_rewrites(other) == numeric_rewrites(form)]
        best = max(alike, key=lambda other: sums[other][1])
        ours, gain = sums[best]
        ahead = AHEAD_LONG if ours >= LONG else PRUNE_GAIN
        if form is not None and form.regions == "none" and _is_derived(found[best]):
            ahead = min(ahead, AHEAD_OF_NONE)
        is_beyond = form is not None and form.regions in BEYOND_SUMS
        if ours > 0.0 and gain - sums[form][1] >= ahead * ours and not is_beyond:
            out[form] = (
                f"not tried: kernels gain {sums[form][1] * 1e6:,.0f} us on XLA's code here by measured sums, "
                f"those of {name_of(best)} {gain * 1e6:,.0f} us (and take {ours * 1e6:,.0f} us)"
            )
    return out


def measured_totals(found: Mapping[Variant | None, Outcome]) -> dict[Variant | None, float]:
    """What all regions of a variant take together, kernel or XLA's code [s]; of variants with all regions."""
    sums = {f: measured_sums.total_seconds(outcome.report) for f, outcome in found.items() if _has_all_regions(f)}
    return {form: total for form, total in sums.items() if total > 0.0}


def _has_all_regions(form: Variant | None) -> bool:
    return form is None or form.regions == "all"


def dominated_names(names: Sequence[str], behind: Mapping[Variant | None, str]) -> dict[str, str]:
    """Programs of forms that are left behind, with the reason; never XLA's own, which have no form."""
    return {name: behind[form] for name in names if not is_xla(name) and (form := form_of(name)) in behind}


def numeric_rewrites(form: Variant | None) -> tuple[str, ...]:
    """The rewrites that decide which products and convolutions a program has."""
    return () if form is None else tuple(r for r in form.rewrites if r not in KERNEL_ONLY)


def _is_derived(outcome: Outcome) -> bool:
    """Whether XLA's own code for some kernel was never compiled: a program without kernels would have to."""
    return any(s.chosen != end_to_end_benchmark.XLA and s.derived for s in outcome.report.subsets)
