"""All candidate kernels of an unscheduled program: every form's schedules in one ranked list."""

from __future__ import annotations

from jcuts.dfg.program import Program
from jcuts.region import choose, pack, rows, schedule
from jcuts.region.choose import Machine

KEEP_UP = 0.8  # share of the best remaining score that a kind of candidate needs to get a turn


def candidates(program: Program, machine: Machine, limit: int) -> list[tuple[Program, float]]:
    """Scheduled programs with their ranking score in [0, 1] (the CPU's PUL), best first, at least one."""
    if len(program.phases) > 1:
        return rows.schedules(program, machine, limit)
    plain = schedule.collapsed(program)
    direct = [(schedule.apply(plain, s), score) for s, score in choose.candidates(plain, machine, 4 * limit)]
    packed = _packed(plain, machine, limit)
    return _merge(direct, packed, limit)


def _packed(plain: Program, machine: Machine, limit: int) -> list[tuple[Program, float]]:
    lanes = choose.lanes_of(plain, machine)
    found = sorted(pack.packings(plain, lanes, machine.registers), key=lambda item: (-item[1], str(item[0])))
    urgent = pack.needs_packing(plain, machine.l1)
    keep = found[: max(2, limit // 2 if urgent else limit // 4)]
    weight = 1.05 if urgent else 0.95
    return [(pack.apply(plain, p, machine.threads), min(1.0, score * weight)) for p, score in keep]


def _merge(
    direct: list[tuple[Program, float]], packed: list[tuple[Program, float]], limit: int
) -> list[tuple[Program, float]]:
    """Best first, taking turns between loop orders and packing.

    Scores compare register tiles well, but loop orders and packing differ by cache behaviour that only a measurement
    tells: the first few candidates must not all be of one kind.
    """
    kinds: dict[object, list[tuple[Program, float]]] = {}
    for program, score in sorted([*direct, *packed], key=lambda item: (-item[1], item[0].digest)):
        params = dict(program.params)
        kinds.setdefault(("packed" in params, params.get("order"), params.get("vector")), []).append((program, score))
    queues = sorted(kinds.values(), key=lambda queue: (-queue[0][1], queue[0][0].digest))
    ranked: list[tuple[Program, float]] = []
    while queues and len(ranked) < limit:
        # A kind whose next candidate is far behind has had its turns.
        best = max(queue[0][1] for queue in queues)
        for queue in queues:
            if queue[0][1] >= KEEP_UP * best:
                ranked.append(queue.pop(0))
        queues = [queue for queue in queues if queue]
    return ranked[:limit]
