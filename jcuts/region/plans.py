"""All candidate kernels of an unscheduled program: every form's schedules in one ranked list."""

from __future__ import annotations

from jcuts.dfg.program import Program
from jcuts.region import choose, pack, rows, schedule
from jcuts.region.choose import Machine


def candidates(program: Program, machine: Machine, limit: int) -> list[tuple[Program, float]]:
    """Scheduled programs with their ranking score in [0, 1] (the CPU's PUL), best first, at least one."""
    if len(program.phases) > 1:
        return rows.schedules(program, machine, limit)
    plain = schedule.collapsed(program)
    direct = [(schedule.apply(plain, s), score) for s, score in choose.candidates(plain, machine, limit)]
    packed = _packed(plain, machine, limit)
    return _merge(direct, packed, limit)


def _packed(plain: Program, machine: Machine, limit: int) -> list[tuple[Program, float]]:
    lanes = choose.lanes_of(plain, machine)
    found = sorted(pack.packings(plain, lanes, machine.registers), key=lambda item: (-item[1], str(item[0])))
    urgent = pack.needs_packing(plain, machine.l1)
    keep = found[: max(2, limit // 2 if urgent else limit // 4)]
    weight = 1.0 if urgent else 0.95
    return [(pack.apply(plain, p, machine.threads), score * weight) for p, score in keep]


def _merge(
    direct: list[tuple[Program, float]], packed: list[tuple[Program, float]], limit: int
) -> list[tuple[Program, float]]:
    """The best of both, each among the first few: where they differ, only a measurement tells."""
    ranked = sorted([*direct, *packed], key=lambda item: -item[1])
    if packed and direct:
        first, second = ranked[0], (packed[0] if ranked[0] in direct else direct[0])
        ranked = [first, second, *(r for r in ranked if r is not first and r is not second)]
    return ranked[:limit]
