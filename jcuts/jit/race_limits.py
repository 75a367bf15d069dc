"""Which program variants are planned and race where tuning time is limited: each costs one whole compilation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from jcuts.base import knobs
from jcuts.base.settings import ATTENTION, BEYOND_SUMS, UNBROKEN, Variant
from jcuts.jit import end_to_end_benchmark, variant_space
from jcuts.jit.decision import XLA
from jcuts.jit.paired_timing import ms
from jcuts.jit.variant_names import form_of, is_xla
from jcuts.jit.variant_space import LOGITS, LONG, RECOMPUTED, numeric_rewrites

IN_LOOPS = frozenset(name for options in end_to_end_benchmark.LOOP_OPTIONS.values() for name in options)
"""Compiler options for products in loops: whatever kernels gain, they decide how the products that are left run."""

SEPARATE = next(iter(end_to_end_benchmark.SEPARATE_OPTIONS["cuda"]))
"""Compiler options of programs whose attention is recomputed."""

TOO_LATE = "not tried: the time for tuning is limited"
"""Why a program did not race that would have without a limit."""


MEMORY_SHARE = 1 / 4
"""Share of the device's memory up to which a program may need more than plain XLA."""


def over_memory(peaks: Mapping[str, int], limit: int | None) -> dict[str, str]:
    """Programs that need too much more memory than plain XLA, and why they may not win.

    Args: peaks: bytes of each; limit: bytes of the device, None where they are not known, and not scarce either.
    """
    plain, over = peaks.get(XLA), knobs.current().memory_over
    if plain is None or limit is None:
        return {}
    most = max(plain * (1 + over), limit * MEMORY_SHARE)
    return {
        name: f"needs {_gigabytes(peak)} of memory where plain jax.jit needs {_gigabytes(plain)}: more than "
        f"{100 * over:g}% over (JCUTS_MEMORY_OVER)"
        for name, peak in peaks.items()
        if peak > most and not is_xla(name)
    }


def _gigabytes(count: float) -> str:
    """Bytes for messages."""
    return f"{count / 10**9:.2f} GB"


def with_separate(names: Sequence[str], platform: str) -> list[str]:
    """Names of programs, and those with recomputed attention once more, without XLA's multi-output fusion.

    On a GPU only, where this jaxlib accepts the options.
    """
    found = []
    for name in names:
        found.append(name)
        form, _, option = name.partition(":")
        if option not in variant_space.options(platform) or is_xla(name) or platform not in variant_space.GPUS:
            continue
        made = form_of(name)
        if made is not None and RECOMPUTED in made.rewrites and variant_space.accepts(SEPARATE, platform):
            found.append(f"{form}:{SEPARATE}")
    return found


def most_rewritten(forms: Sequence[Variant | None]) -> list[Variant | None]:
    """Variants that are planned where tuning time is limited: the plainest, and those with the most rewrites.

    Of twelve networks at their headline batch, tuned without a limit on an H100, the latter were the fastest or as fast
    within the noise; at batch 1 the plainest sometimes was.  The variant with kernels for attention alone has few
    problems.  Logits in chunks save memory, and time at best as a by-product: who has time tries them.
    """
    forms = [form for form in forms if form is None or LOGITS not in form.rewrites]
    always = (ATTENTION, UNBROKEN)
    counts = [len(form.rewrites) for form in forms if form is not None and form.regions not in always]
    most = max(counts, default=0)
    return [
        form
        for number, form in enumerate(forms)
        if not number or (form is not None and (len(form.rewrites) == most or form.regions in always))
    ]


def beyond_race_limit(
    names: Sequence[str],
    gains: Mapping[Variant | None, float],
    totals: Mapping[Variant | None, float] = MappingProxyType({}),
) -> dict[str, str]:
    """Programs that do not race at first where tuning time is limited, with the reason (then see `affordable`).

    Every program costs a compilation of the whole function and a first run, for which libraries compile in turn.  The
    one that is expected to be the fastest races, with those of `clear` gains and `unbroken` chains, and the one of
    attention alone where the former has no attention, all with compiler options where there are any
    (`SEPARATE_OPTIONS` before others); the first with those for products in loops
    (`end_to_end_benchmark.LOOP_OPTIONS`), too; plain XLA always.

    Args: gains: what the kernels of each variant gain on XLA's code for their regions by measured sums [s]; totals:
        what all regions take together (`variant_space.measured_totals`) [s].
    """
    ours = [name for name in names if not is_xla(name)]
    with_options = {name.partition(":")[0] for name in ours if ":" in name}
    racing = [name for name in ours if name not in with_options]  # the others are the same programs without options
    separate = {name.partition(":")[0] for name in racing if name.partition(":")[2] == SEPARATE}
    racing = [name for name in racing if name.partition(":")[0] not in separate or name.endswith(f":{SEPARATE}")]
    forms = {name: form_of(name) or Variant() for name in racing}
    beyond = [name for name, made in forms.items() if made.regions in BEYOND_SUMS]
    alone = [name for name, made in forms.items() if made.regions == ATTENTION]
    best = _fastest([name for name in racing if name not in (*beyond, *alone)], gains, totals)
    few = beyond if any(RECOMPUTED in forms[name].rewrites for name in beyond) else [*beyond, *alone]
    form = best.partition(":")[0]
    kept = {best, *(f"{form}:{option}" for option in IN_LOOPS), *few}
    return {name: TOO_LATE for name in ours if name not in kept}


def affordable(
    late: Mapping[str, str],
    seconds: float,
    each: float,
    gains: Mapping[Variant | None, float],
    totals: Mapping[Variant | None, float] = MappingProxyType({}),
    raced: Mapping[str, float] = MappingProxyType({}),
) -> list[str]:
    """Programs to race in the tuning time that is left, the one that is expected to be the fastest first.

    Of a variant that has raced, other compiler options come last.  Where one of the same products and convolutions has
    raced, a variant's time is expected to differ from it by what its kernels gain more.

    Args: late: those that the limit left out; seconds: that are left; each: what one takes [s]; gains, totals: as of
        `beyond_race_limit`; raced: seconds of the programs that have raced.
    """
    with_options = {name.partition(":")[0] for name in late if ":" in name}
    left = [name for name, why in late.items() if why == TOO_LATE and name not in with_options]
    ours = {name: time for name, time in raced.items() if not is_xla(name)}
    known = {name: _expected(name, ours, gains) for name in left}
    forms = {form_of(name) for name in ours}
    found: list[str] = []
    while left and (len(found) + 1) * each <= seconds:
        fresh = [name for name in left if form_of(name) not in forms] or left
        timed = {name: time for name in fresh if (time := known[name]) is not None}
        found.append(min(timed, key=timed.__getitem__) if timed else _fastest(fresh, gains, totals) or fresh[0])
        left.remove(found[-1])
    return found


def _expected(name: str, raced: Mapping[str, float], gains: Mapping[Variant | None, float]) -> float | None:
    """Seconds that a program is expected to take by those of the same products that have raced, None without any."""
    form = form_of(name)
    alike = [other for other in raced if numeric_rewrites(form_of(other)) == numeric_rewrites(form)]
    if not alike:
        return None
    best = min(alike, key=raced.__getitem__)
    return raced[best] - gains.get(form, 0.0) + gains.get(form_of(best), 0.0)


def _fastest(
    names: Sequence[str], gains: Mapping[Variant | None, float], totals: Mapping[Variant | None, float]
) -> str:
    """The program that is expected to be the fastest, '' of none.

    Of those with the same products and convolutions it is the one whose kernels gain most on XLA's code.  Where
    products differ so does XLA's code: those that are compared then have the regions that take least together.
    """
    leaders: dict[tuple[str, ...], str] = {}
    for name in sorted(names, key=lambda name: -gains.get(form_of(name), 0.0)):
        leaders.setdefault(numeric_rewrites(form_of(name)), name)
    least: dict[tuple[str, ...], float] = {}
    for form, total in totals.items():
        key = numeric_rewrites(form)
        least[key] = min(total, least.get(key, total))
    if leaders and leaders.keys() <= least.keys():
        return leaders[min(leaders, key=lambda key: least[key])]
    return next(iter(leaders.values()), "")


def too_little_gain(
    names: Sequence[str], gains: Mapping[Variant | None, float], plain_seconds: float | None
) -> dict[str, str]:
    """Programs whose kernels gain less by measured sums than it takes to win, with the reason.

    In a whole program they gain less than that: XLA fuses less of what surrounds them.  Where kernels are short,
    launches decide, which no profile of kernels shows.

    Args: plain_seconds: kernels of plain XLA's program by its profile [s], None without one; loops have no such sums.
    """
    if plain_seconds is None or plain_seconds < LONG:
        return {}
    least = end_to_end_benchmark.LEAST_GAIN * plain_seconds
    return {
        name: f"not tried: by measured sums its kernels gain {ms(gain)} of {ms(plain_seconds)}"
        for name in names
        if not is_xla(name) and (gain := gains.get(form_of(name), 0.0)) < least
    }


def in_place_of_refused(
    refused: Mapping[str, str],
    raced: Sequence[str],
    late: Mapping[str, str],
    gains: Mapping[Variant | None, float],
    totals: Mapping[Variant | None, float] = MappingProxyType({}),
) -> list[str]:
    """Programs to race where none of those with kernels was right: the next best of what the limit left out.

    Args: refused: programs that are out; raced: all that took part; late: those that the limit left out.
    """
    ours = [name for name in raced if not is_xla(name)]
    if not ours or not late or any(name not in refused for name in ours):
        return []
    after = beyond_race_limit(list(late), gains, totals)
    return [name for name in late if name not in after]
