"""Builds a function's report after the last pass: one row per distinct region, one per kind of refusal."""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import replace
from typing import Any

from jcuts.base.errors import UnsupportedError
from jcuts.kernel_ir.compulsory_traffic import compulsory_bytes
from jcuts.pipeline import microbatch_convs, rebuild
from jcuts.pipeline.computation import CHOICES, Computation, Region
from jcuts.pipeline.outcome import Outcome
from jcuts.pipeline.state import State
from jcuts.report.function_report import FunctionReport
from jcuts.report.report_data import (
    NO_TIME,
    NOT_CHECKED,
    NOT_MEASURED,
    CandidateReport,
    GraphNode,
    RefusalReport,
    SubsetReport,
)
from jcuts.schedule.bound import roofline_bound as lower_bound
from jcuts.schedule.cpu import loop_candidates
from jcuts.trace.source import as_source
from jcuts.tune.choice import DERIVED, LIBRARY, OVER_BUDGET, SCREENED, UNVERIFIED
from jcuts.tune.measure import regime


def outcome_of(state: State) -> Outcome:
    """The program and the report of a function after the last pass. Raises: UnsupportedError with ``strict=True``."""
    division = state.division
    assert division is not None, "the pass 'divide' has run"
    report = FunctionReport(
        state.name,
        state.settings.mode,
        state.platform,
        source=as_source(state.closed, state.name),
        seconds=dict(state.seconds),
        notes=state.notes,
        postponed=division.postponed,
        divisions=division.rows,
    )
    if state.unusable:
        notes = (f"no kernels: {state.unusable}", *((division.note,) if division.note else ()))
        report = replace(report, equations=len(state.closed.jaxpr.eqns), notes=notes)
        return Outcome(state.closed if division.count or state.chunked_logits else state.original, report)
    top = state.top
    rows = region_rows(top)
    report = replace(
        report,
        subsets=tuple(row for row, _ in rows),
        refusals=refusal_rows(top),
        equations=sum(len(level.closed.jaxpr.eqns) for level in top.walk()),
        postponed=division.postponed or is_postponed(top),
        library=library_work(top),
        unmeasured=unmeasured(top),
        graph=partition_graph(top),
    )
    if state.settings.strict and (unable := [r for r in report.refusals if r.reason not in CHOICES]):
        first = unable[0]
        raise UnsupportedError(
            f"strict=True: {first.op} at {first.where} is left to XLA: {first.reason}",
            op=first.op,
            where=first.where,
            reason=first.reason,
        )
    changed = state.rewrites or state.gains_alone or state.chunked_logits or division.count
    untouched = not changed and not rebuild.winners(top)
    winners = tuple((region.chosen, region.kernel) for _, region in rows)
    return Outcome(
        state.original if untouched else state.closed, report, winners=winners, gains_alone=state.gains_alone
    )


def region_rows(top: Computation) -> tuple[tuple[SubsetReport, Region], ...]:
    """Every distinct region of a function and of its loop bodies, equal ones counted, with the first of each."""
    grouped: OrderedDict[str, tuple[SubsetReport, Region]] = OrderedDict()
    for level in top.walk():
        for subset in level.subsets:
            one = subset_report(level, subset)
            key = f"{subset.identity} {one.chosen}"
            old = grouped.get(key)
            grouped[key] = (one, subset) if old is None else (_counted(old[0], one), old[1])
    return tuple(grouped.values())


def partition_graph(top: Computation) -> tuple[GraphNode, ...]:
    """The function's equations with their regions; rows are those of `region_rows`.  Bodies of loops are not in it."""
    keys: dict[str, int] = {}
    for level in top.walk():
        for region in level.subsets:
            keys.setdefault(f"{region.identity} {_label(region.chosen)}", len(keys))
    found: dict[int, tuple[int, int]] = {}
    for number, region in enumerate(top.subsets):
        row = keys[f"{region.identity} {_label(region.chosen)}"]
        found.update((member, (row, number)) for member in region.members)
    nodes = []
    for node in top.graph.nodes:
        producers = (top.graph.producer(t) for t in node.inputs)
        reads = tuple(dict.fromkeys(p.number for p in producers if p is not None))
        left = top.left_out.get(node.number)
        row, number = found.get(node.number, (-1, -1))
        nodes.append(GraphNode(node.prim, node.where, row, number, "" if left is None else left.reason, reads))
    return tuple(nodes)


def _label(chosen: Any) -> str:
    return "xla" if chosen is None else f"{chosen.template}/{chosen.digest[:8]}"


def candidate_rows(choice: Any) -> tuple[CandidateReport, ...]:
    """Every candidate of a region with its time and why it lost. Args: choice: the tuner's (`tune.choice.Choice`)."""
    times = [m for m in choice.measurements if m.is_contest]
    best = min((m.seconds for m in times), default=0)
    rows = []
    for m in choice.measurements:
        lost = ""
        if m.label != choice.winner:
            if not m.is_contest:
                lost = f"only looked at ({m.method}), not in the final comparison"
            elif best and m.seconds > best:
                lost = f"{m.seconds / best:.2f} times the time of the fastest"
            else:
                lost = f"within the noise of {choice.margin:.1%} of the winner"
        rows.append(CandidateReport(m.label, m.seconds, m.bound_seconds, m.pul, m.method, lost))
    rows += [CandidateReport(r.label, None, 0, 0, "", f"{r.error}: {r.message}") for r in choice.rejections]
    return tuple(rows)


def refusal_rows(top: Computation) -> tuple[RefusalReport, ...]:
    """What XLA keeps, by operation, reason and source line; calls that other passes made are none of it."""
    refusals: Counter[tuple[str, str, str]] = Counter()
    for level in top.walk():
        for number, refusal in (*level.refused_loops.items(), *level.left_out.items()):
            if microbatch_convs.is_ours(level.closed.jaxpr.eqns[number]) or number in (*level.updated, *level.copied):
                continue
            refusals[refusal.op, refusal.reason, level.graph.nodes[number].where] += 1
    return tuple(RefusalReport(op, reason, where, n) for (op, reason, where), n in sorted(refusals.items()))


def library_work(top: Computation) -> dict[str, float]:
    """'flop' and 'bytes' of what XLA keeps without a measurement."""
    kept = [subset.program for level in top.walk() for subset in level.library]
    return {"flop": float(sum(_flop(p) for p in kept)), "bytes": float(sum(_moved(p) for p in kept))}


def is_postponed(top: Computation) -> bool:
    """Whether any region could not be measured now."""
    return any(s.choice is not None and s.choice.is_postponed for level in top.walk() for s in level.subsets)


def unmeasured(top: Computation) -> int:
    """Kernels that the tuning budget left unmeasured; those of equal regions once.

    Regions that the partition search looked at count, too: with their times the partition may be another one.
    """
    seen = [s for level in top.walk() for s in (*level.subsets, *level.subset_cache.values())]
    choices = {s.choice.problem: s.choice for s in seen if s.choice is not None}
    return sum(choice.unmeasured for choice in choices.values())


def _counted(old: SubsetReport, new: SubsetReport) -> SubsetReport:
    return replace(old, count=old.count + 1, where=list(dict.fromkeys([*old.where, *new.where])))


def subset_report(level: Computation, subset: Region) -> SubsetReport:
    """One subset for the report."""
    nodes = [level.graph.nodes[m] for m in sorted(subset.members)]
    operations = dict(Counter(n.prim for n in nodes))
    is_complex = any(n.op is not None and n.op.is_complex for n in nodes)
    fused = len(nodes) > 1
    kind = ("complex" if is_complex else "simple") + (" (fusion)" if fused else "")
    chosen = subset.chosen
    label = _label(chosen)
    seconds = xla = None
    why = ""
    rejected: list[str] = []
    score = bound = 0.0
    derived = False
    if subset.choice is not None:
        times = {m.label: m for m in subset.choice.measurements}
        xla = times[LIBRARY].seconds if LIBRARY in times else None
        derived = LIBRARY in times and times[LIBRARY].method in DERIVED
        if chosen is not None and (m := times.get(subset.choice.winner)) is not None:
            seconds, score, bound = m.seconds, m.pul, m.bound_seconds
            xla = xla if m.is_contest else None  # another clock's time
        if chosen is None:
            seconds, why = why_lost(subset)
        rejected = [
            f"{r.label}: {r.message}" for r in subset.choice.rejections if r.error not in (UNVERIFIED, OVER_BUDGET)
        ]
    if chosen is not None and seconds is None:  # nothing was measured: the estimates that chose it
        score = next((made for program, made in subset.ranked if program.digest == chosen.digest), 0.0)
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
        score,
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
        regime=_regime(subset),
        candidates=() if subset.choice is None else candidate_rows(subset.choice),
    )


def _regime(subset: Any) -> str:
    """How a region's times were taken, '' where none were."""
    choice = subset.choice
    if choice is None or choice.origin != "measured":
        return ""
    return regime.described(choice.regime, regime.platform_of(choice.schedules))


def _flop(program: Any) -> int:
    return sum(loop_candidates.work(p) for p in program.phases)


def _moved(program: Any) -> int:
    """Bytes of operands and results; of tables those of the rows that are looked up."""
    return compulsory_bytes(program)


def why_lost(subset: Region) -> tuple[float | None, str]:
    """Why XLA runs a subset: the time of the best kernel [s], if any was measured, and a sentence."""
    choice = subset.choice
    assert choice is not None  # the caller looked
    if choice.is_postponed:
        return None, choice.rejections[0].message
    if choice.is_unverified:
        return None, NOT_CHECKED
    if choice.is_cut and choice.origin == "library":
        return None, NO_TIME
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
    reasons = list(dict.fromkeys(f"{r.error}: {r.message}" for r in choice.rejections if r.error != OVER_BUDGET))
    if reasons:
        more = f" (and {len(reasons) - 1} more reasons)" if len(reasons) > 1 else ""
        who = "cannot be compared" if any(r.label == "xla" for r in choice.rejections) else "every kernel was rejected"
        return None, f"{who}: {reasons[0]}{more}"
    return None, NOT_MEASURED if choice.origin == "library" else "no kernel was made"
