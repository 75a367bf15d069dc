"""The stages as one readable list: closed jaxpr in, closed jaxpr with custom calls out.

    inline      flat jaxpr, no calls                                  trace/inline.py
    simplify    dead code, constants, shared broadcasts               rewrite/simplify.py
    rewrite     products with folded factors, convolutions as dots    rewrite/registry.py (what the form asks for)
    pieces      the batch in pieces where caches are too small        chunking.py, rewrite/chunk_batch.py
    divide      convolutions by cuDNN under a workspace limit         divide.py
    group       tensor graph -> subsets with unscheduled programs     fusion/greedy.py, lower/region.py
    select      candidates per subset, choices, better partitions     search.py, region/{plans,explore}.py, tune/
    compile     winners -> object code                                codegen/cpu/compile.py, xla/object_cache.py
    rebuild     jaxpr with the winners in it, in chains on a GPU      xla/rebuild.py, xla/chains/fuse.py

Bodies of scan, while and cond go through the same list; all their subsets are tuned in one session.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jcuts.base import fingerprint, knobs
from jcuts.base.dump import open_dump
from jcuts.base.errors import JcutsError, UnsupportedError
from jcuts.base.settings import Settings, Variant
from jcuts.kernel_ir.printer import program_text
from jcuts.pipeline import batch_chunking, inplace_update, kernel_selection, microbatch_convs, weight_prep
from jcuts.pipeline.computation import CHOICES, NOT_ASKED, Computation, Fuel, Region, group
from jcuts.report.function_report import NOT_CHECKED, NOT_MEASURED, FunctionReport, RefusalReport, SubsetReport
from jcuts.rewrite.registry import Rewritten, rewritten
from jcuts.rewrite.simplify import simplify
from jcuts.rewrite.splat_constants import splat_constants
from jcuts.schedule.bound import roofline_bound as lower_bound
from jcuts.schedule.cpu import loop_candidates
from jcuts.trace import jaxapi
from jcuts.trace.canonical import canonical_digest
from jcuts.trace.inline import inline
from jcuts.trace.source import as_source
from jcuts.tune.choice import FAMILY, LIBRARY, SCREENED, UNVERIFIED
from jcuts.tune.parent import extra_kernels
from jcuts.xla import devices as xla_devices
from jcuts.xla import native_library
from jcuts.xla.chains import fuse as chains_fuse
from jcuts.xla.kernel_cache import kernel_for, source_text
from jcuts.xla.rebuild import in_order, kernel_eqns

log = logging.getLogger("jcuts.pipeline.passes")

MEMO_LIMIT, SHARED_LIMIT = 64, 12


@dataclass(frozen=True)
class Outcome:
    """What planning gives back: a closed jaxpr of the same signature, and the report."""

    closed: jaxapi.Closed
    report: FunctionReport


_memo: OrderedDict[str, Outcome] = OrderedDict()
_shared: OrderedDict[str, Any] = OrderedDict()
_memo_lock = threading.Lock()


def optimize_jaxpr(
    closed: jaxapi.Closed,
    settings: Settings,
    *,
    platform: str,
    may_measure: bool,
    examples: Sequence[Any] | None = None,
) -> Outcome:
    """Plans one function.

    Args:
        closed: the original jaxpr. settings: the user's options.
        platform: 'cpu', or 'cuda' ('gpu' is JAX's other name for it); other platforms are left to XLA.
        may_measure: True only at a concrete top-level call; otherwise cached choices, else XLA's own code.
        examples: concrete arguments, for inputs whose values matter (indices, loop bounds).
    Returns: the rewritten jaxpr and the report. Equal programs give equal outcomes in every process that shares the
        tuning database.
    Raises: UnsupportedError with ``strict=True``.
    """
    name = getattr(closed.jaxpr.debug_info, "func_name", "") or "function"
    reason = _unusable(platform)
    if reason and not (microbatch_convs.is_asked(settings) and platform in ("cpu", *xla_devices.NAMES)):
        return Outcome(closed, FunctionReport(name, settings.mode, platform, notes=(f"left to XLA: {reason}",)))
    platform = "cpu" if platform == "cpu" else "cuda"
    original = canonical_digest(closed, consts="digest")
    program = fingerprint.digest(
        original, repr(settings), platform, knobs.current().fuel, knobs.current().chunk, knobs.current().chains
    )
    with _memo_lock:
        found = _memo.get(_memo_key(program, settings))
    if found is not None and (not may_measure or settings.tune != "auto" or _is_settled(found)):
        return found
    outcome = _plan(closed, settings, platform, may_measure, name, reason, original)
    with _memo_lock:
        _memo[_memo_key(program, settings)] = outcome
        while len(_memo) > MEMO_LIMIT:
            _memo.popitem(last=False)
    return outcome


def _once(key: str, form: Variant | None, make: Callable[[], Any]) -> Any:
    """What the forms of a function have in common, made once for all of them (`levels.group` knows it again)."""
    with _memo_lock:
        known = _shared.get(key)
    if known is not None:
        return known
    made = make()
    if form is not None:
        with _memo_lock:
            _shared[key] = made
            while len(_shared) > SHARED_LIMIT:
                _shared.popitem(last=False)
    return made


def _unusable(platform: str) -> str:
    """Why no kernels can be used on a platform, or ''."""
    if platform == "cpu":
        usable, why = native_library.native_available()
        return "" if usable else why
    return xla_devices.unusable() if platform in xla_devices.NAMES else f"no kernels for platform {platform}"


def _memo_key(program: str, settings: Settings) -> str:
    """A plan depends on the tuning database, but for ``tune="off"``."""
    from jcuts.tune import session

    stored = "" if settings.tune == "off" else str(session.generation())
    return fingerprint.digest(program, stored, microbatch_convs.generation(settings))


def forget() -> None:
    """Drops memoised plans (tests; after the database changed)."""
    with _memo_lock:
        _memo.clear()
        _shared.clear()


def _is_settled(outcome: Outcome) -> bool:
    timed = not outcome.report.postponed and all(
        row.why != microbatch_convs.NOT_TIMED for row in outcome.report.divisions
    )
    return timed and all(s.origin == "measured" for s in outcome.report.subsets)


def _plan(
    closed: jaxapi.Closed,
    settings: Settings,
    platform: str,
    may_measure: bool,
    name: str,
    reason: str,
    original: str,
) -> Outcome:
    """``reason``: why there are no kernels here, '' where there are: then convolutions alone are looked at."""
    clock: dict[str, float] = {}
    dump = open_dump(name)
    dump.stage("jaxpr", lambda: str(closed.jaxpr))

    def timed(stage: str, start: float) -> None:
        clock[stage] = clock.get(stage, 0.0) + time.perf_counter() - start

    start = time.perf_counter()
    form = settings.form
    inlined = _once(f"{original} inlined", form, lambda: simplify(inline(closed)))
    timed("inline", start)
    dump.stage("flat", lambda: as_source(inlined, name))
    start = time.perf_counter()
    rewrites = Rewritten(inlined)
    rules = form.rewrites if form is not None else ()
    if rules:
        rewrites = _once(f"{original} {rules}", form, lambda: rewritten(inlined, rules))
    flat = _once(f"{original} {rules} numbers", form, lambda: splat_constants(rewrites.closed))
    timed("rewrite", start)
    if rewrites.counts:
        dump.stage("rewrites", lambda: as_source(flat, name))
    start = time.perf_counter()
    flat, pieces = (
        batch_chunking.chunk_batch(flat) if settings.mode != "no_fusion" and platform == "cpu" else (flat, None)
    )
    timed("pieces", start)
    if pieces is not None:
        dump.stage("pieces", lambda: as_source(flat, name))
    start = time.perf_counter()
    division = microbatch_convs.divide_convolutions(flat, settings, platform, may_measure=may_measure)
    flat = division.closed
    timed("divide", start)
    if division.count:
        dump.stage("divided", lambda: as_source(flat, name))
    if reason:
        notes = (f"no kernels: {reason}", *((division.note,) if division.note else ()))
        report = FunctionReport(
            name,
            settings.mode,
            platform,
            equations=len(flat.jaxpr.eqns),
            source=as_source(flat, name),
            seconds=clock,
            notes=notes,
            postponed=division.postponed,
            divisions=division.rows,
        )
        return Outcome(flat if division.count else closed, report)
    start = time.perf_counter()
    top = group(flat, settings, Fuel(), platform, wait=platform != "cpu")
    timed("group", start)
    dump.stage("subsets", lambda: "\n".join(program_text(s.program) for level in top.walk() for s in level.subsets))
    start = time.perf_counter()
    partition = _select(top, settings, may_measure, platform)
    timed("select", start)
    start = time.perf_counter()
    rebuilt = _rebuild(top, settings)
    timed("rebuild", start)
    dump.stage("rewritten", lambda: as_source(rebuilt, name))
    dump.stage("kernels", lambda: _kernel_texts(top), suffix="py")
    texts = (
        rewrites if rewrites.counts else None,
        pieces,
        division.note or None,
        partition,
        inplace_update.note(top),
        chains_fuse.note(rebuilt),
    )
    notes = tuple(str(note) for note in texts if note is not None)
    report = _report(top, rebuilt, settings, platform, name, clock, notes, division)
    unable = [r for r in report.refusals if r.reason not in CHOICES]
    if settings.strict and unable:
        first = unable[0]
        raise UnsupportedError(
            f"strict=True: {first.op} at {first.where} is left to XLA: {first.reason}",
            op=first.op,
            where=first.where,
            reason=first.reason,
        )
    changed = rewrites.counts or division.count
    untouched = not changed and not any(s.chosen for level in top.walk() for s in level.subsets)
    return Outcome(closed if untouched else rebuilt, report)


def _select(top: Computation, settings: Settings, may_measure: bool, platform: str) -> kernel_selection.Summary:
    """Chooses the partition, and a candidate or XLA for every subset."""
    if settings.form is not None and settings.form.regions == "none":
        for level in top.walk():
            level.leave_to_xla(lambda _: NOT_ASKED)
        return kernel_selection.Summary("none")
    summary = kernel_selection.select(top, settings, may_measure=may_measure, platform=platform)
    if platform != "cpu":
        weight_prep.add_weight_prep_kernels(top)
    return summary


def _rebuild(level: Computation, settings: Settings) -> jaxapi.Closed:
    units: dict[int, Sequence[int]] = {}
    replacement: dict[int, Sequence[Any]] = {}
    extra_kernels.compile_kernels(
        program for subset in level.subsets for program in inplace_update.programs(level, subset)
    )
    for subset in level.subsets:
        if subset.chosen is None:
            continue
        first = min(subset.members)
        update = inplace_update.find_inplace_update(level, subset)
        kernel = None
        if update is not None:
            try:
                kernel = kernel_for(update.placed.program)
            except JcutsError as error:
                log.warning("update left to XLA: %s", error)
                update = None
        try:
            kernel = kernel_for(subset.chosen) if kernel is None else kernel
        except JcutsError as error:
            log.warning("subset left to XLA: %s", error)
            subset.chosen, subset.origin = None, "library"
            continue
        like = level.closed.jaxpr.eqns[max(subset.members)]
        inputs, outputs, members, place = subset.inputs, subset.outputs, subset.members, None
        if update is not None:
            place = update.placed.operand, update.placed.start
            inputs = [*inputs, update.array] if place[0] == len(inputs) else inputs
            taken = [n for n in (update.number, update.zeros) if n is not None]
            outputs, members = level.closed.jaxpr.eqns[update.number].outvars, members | set(taken)
            level.updated += taken
        replacement[first] = kernel_eqns(kernel, inputs, outputs, like, place)
        units[first] = sorted(members)
    left = inplace_update.copy_kernels(level, xla_devices.machine()) if level.updated else []
    extra_kernels.compile_kernels(update.placed.program for update in left)
    for update in left:
        try:
            kernel = kernel_for(update.placed.program)
        except JcutsError as error:
            log.warning("update left to XLA: %s", error)
            continue
        eqn, operand = level.closed.jaxpr.eqns[update.number], update.placed.operand
        inputs = [eqn.invars[1]] if operand is None else [eqn.invars[1], update.array]
        units[update.number] = [n for n in (update.zeros, update.number) if n is not None]
        replacement[update.number] = kernel_eqns(kernel, inputs, eqn.outvars, eqn, (operand, update.placed.start))
        level.copied += units[update.number]
    count = len(level.closed.jaxpr.eqns)
    for number, bodies in level.bodies.items():
        eqn = level.closed.jaxpr.eqns[number]
        rebuilt = [_rebuild(body, settings) for body in bodies]
        units[count + number] = [number]
        replacement[count + number] = [jaxapi.with_inner_jaxprs(eqn, rebuilt)]
    return _chained(in_order(level.closed, units, replacement), settings)


def _chained(closed: jaxapi.Closed, settings: Settings) -> jaxapi.Closed:
    """With one call for kernels that can follow each other, where the form has chains and the GPU launches ahead."""
    wanted = knobs.current().chains and (settings.form is None or settings.form.chained)
    if not wanted or not chains_fuse.calls(closed) or xla_devices.machine().capability < chains_fuse.EARLY:
        return closed
    return chains_fuse.fuse_calls(closed)


# -- the report -----------------------------------------------------------------------------------------------------
def _report(
    top: Computation,
    rebuilt: jaxapi.Closed,
    settings: Settings,
    platform: str,
    name: str,
    clock: dict[str, float],
    notes: tuple[str, ...],
    division: microbatch_convs.Divided,
) -> FunctionReport:
    grouped: OrderedDict[str, SubsetReport] = OrderedDict()
    refusals: Counter[tuple[str, str, str]] = Counter()
    equations = 0
    for level in top.walk():
        equations += len(level.closed.jaxpr.eqns)
        for subset in level.subsets:
            one = subset_report(level, subset)
            key = f"{subset.identity} {one.chosen}"
            old = grouped.get(key)
            grouped[key] = one if old is None else _counted(old, one)
        for number, refusal in level.left_out.items():
            if microbatch_convs.is_ours(level.closed.jaxpr.eqns[number]) or number in (*level.updated, *level.copied):
                continue
            refusals[refusal.op, refusal.reason, level.graph.nodes[number].where] += 1
    kept = [subset.program for level in top.walk() for subset in level.library]
    rows = tuple(RefusalReport(op, reason, where, n) for (op, reason, where), n in sorted(refusals.items()))
    return FunctionReport(
        name,
        settings.mode,
        platform,
        tuple(grouped.values()),
        rows,
        equations,
        as_source(rebuilt, name),
        dict(clock),
        notes=notes,
        postponed=division.postponed
        or any(s.choice is not None and s.choice.is_postponed for level in top.walk() for s in level.subsets),
        divisions=division.rows,
        library={"flop": float(sum(_flop(p) for p in kept)), "bytes": float(sum(_moved(p) for p in kept))},
    )


def _counted(old: SubsetReport, new: SubsetReport) -> SubsetReport:
    from dataclasses import replace

    return replace(old, count=old.count + 1, where=list(dict.fromkeys([*old.where, *new.where])))


def subset_report(level: Computation, subset: Region) -> SubsetReport:
    """One subset for the report."""
    nodes = [level.graph.nodes[m] for m in sorted(subset.members)]
    operations = dict(Counter(n.prim for n in nodes))
    is_complex = any(n.op is not None and n.op.is_complex for n in nodes)
    fused = len(nodes) > 1
    kind = ("complex" if is_complex else "simple") + (" (fusion)" if fused else "")
    chosen = subset.chosen
    label = "xla" if chosen is None else f"{chosen.template}/{chosen.digest[:8]}"
    seconds = xla = None
    why = ""
    rejected: list[str] = []
    pul = bound = 0.0
    derived = False
    if subset.choice is not None:
        times = {m.label: m for m in subset.choice.measurements}
        xla = times[LIBRARY].seconds if LIBRARY in times else None
        derived = LIBRARY in times and times[LIBRARY].method == FAMILY
        if chosen is not None and (m := times.get(subset.choice.winner)) is not None:
            seconds, pul, bound = m.seconds, m.pul, m.bound_seconds
            xla = xla if m.is_contest else None  # another clock's time
        if chosen is None:
            seconds, why = _lost(subset)
        rejected = [f"{r.label}: {r.message}" for r in subset.choice.rejections if r.error != UNVERIFIED]
    if chosen is not None and seconds is None:  # nothing was measured: the estimates that chose it
        pul = next((score for program, score in subset.ranked if program.digest == chosen.digest), 0.0)
        bound = lower_bound(chosen).seconds
    flop, moved = _flop(subset.program), _moved(subset.program)
    where = list(dict.fromkeys(n.where for n in nodes if n.where))
    return SubsetReport(
        nodes[-1].prim,
        operations,
        where,
        "none" if not fused else "shared" if len(subset.program.phases) > 1 else "register",
        kind,
        label,
        subset.origin,
        dict(chosen.params) if chosen is not None else {},
        pul,
        bound,
        seconds,
        xla,
        1,
        flop,
        moved,
        rejected,
        why,
        derived,
        subset.source if chosen is not None else "",
    )


def _flop(program: Any) -> int:
    return sum(loop_candidates.work(p) for p in program.phases)


def _moved(program: Any) -> int:
    """Bytes of operands and results."""
    return sum(b.bytes for b in program.buffers if b.role != "local")


def _lost(subset: Region) -> tuple[float | None, str]:
    """Why XLA runs a subset: the time of the best kernel [s], if any was measured, and a sentence."""
    choice = subset.choice
    assert choice is not None  # the caller looked
    if choice.is_postponed:
        return None, choice.rejections[0].message
    if choice.is_unverified:
        return None, NOT_CHECKED
    kernels = [m for m in choice.measurements if m.label != LIBRARY]
    met = [m for m in kernels if m.method != SCREENED] or kernels
    xla = choice.seconds(LIBRARY)
    if met and xla is not None:
        best = min(met, key=lambda m: m.seconds)
        gain = xla / best.seconds
        if gain <= 1:
            return best.seconds, f"XLA is {1 / gain:.2f} times as fast as the best of {len(kernels)} kernels"
        if gain - 1 > choice.margin and not best.is_contest:  # its time is another clock's than XLA's
            return None, f"the best of {len(kernels)} kernels was only looked at ({best.method}), and did not compete"
        return best.seconds, f"the best kernel gains {gain - 1:.1%}: within the noise of {choice.margin:.1%}"
    reasons = list(dict.fromkeys(f"{r.error}: {r.message}" for r in choice.rejections))
    if reasons:
        more = f" (and {len(reasons) - 1} more reasons)" if len(reasons) > 1 else ""
        who = "cannot be compared" if any(r.label == "xla" for r in choice.rejections) else "every kernel was rejected"
        return None, f"{who}: {reasons[0]}{more}"
    return None, NOT_MEASURED if choice.origin == "library" else "no kernel was made"


def _kernel_texts(top: Computation) -> str:
    seen: dict[str, str] = {}
    for level in top.walk():
        for subset in level.subsets:
            if subset.chosen is not None and subset.chosen.digest not in seen:
                seen[subset.chosen.digest] = f"# {subset.chosen.digest}\n{source_text(subset.chosen)}"
    return "\n".join(seen.values())
