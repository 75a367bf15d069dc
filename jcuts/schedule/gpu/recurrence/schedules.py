"""Schedules of persistent recurrences: one block where a step is small, else a block per SM, and a grid barrier a stage
or carried values with flags.

Blocks are never more than the GPU has SMs, one on each: all must be resident at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from jcuts.kernel_ir.program import ITEM_SIZE, Buffer, Phase, Program
from jcuts.lower.recurrence.program import TEMPLATE
from jcuts.schedule.gpu.machine import SHARED, WARP, Candidate, GpuMachine, scheduled
from jcuts.schedule.gpu.recurrence import tensor_core
from jcuts.schedule.gpu.recurrence.exchange import exchanged
from jcuts.schedule.gpu.recurrence.parameters import EXCHANGE, FLAGS, HELD, MMA, REPLICAS
from jcuts.schedule.gpu.recurrence.residency import PARTIAL, residents, shared_layout, terms_at_once, terms_of_thread
from jcuts.schedule.gpu.recurrence.stage_product import columns_in, columns_of, is_short, mma_stages
from jcuts.schedule.gpu.recurrence.step_time import estimated_time, points_of, products_of

FORM = "recurrence"
"""The value of the schedule parameter ``cuda``."""
THREADS = (128, 256, 512)
"""Of a block of a grid."""
MOST_UNROLLED = 256
"""Of a block whose threads have loops over few terms of their own: they are unrolled, and want registers."""
ALONE = (32, 128, 256, 512)
"""Of a block that runs all steps."""
FLIGHT = (4, 16, 64)
"""Terms of a product that a thread loads at once."""
COLUMNS = (1, 2, 4, 8, 16)
"""Columns of a block of a grid."""
MOST_SUMS = 64
"""Sums of a thread: rows times products side by side."""
OTHER_REGISTERS = 96
"""Of a thread, beside operands that stay there."""
REPLICATED = (1, 4)
"""Replicas of what blocks exchange with flags."""
MOST_ALONE = 1 << 16
"""Products of a step, at most, that one block is tried for."""


def recurrence_schedules(program: Program, machine: GpuMachine) -> list[Candidate]:
    """Schedules of a loop, best first, with the share of the best's speed."""
    if program.template != TEMPLATE:
        return []
    found = [(made, estimated_time(made, machine).seconds) for made in _space(program, machine)]
    found.sort(key=lambda pair: (pair[1], -int(str(dict(pair[0].params)["flight"])), pair[0].digest))
    return [(made, found[0][1] / seconds) for made, seconds in found]


def _space(program: Program, machine: GpuMachine) -> Iterator[Program]:
    few = any(p.reds and is_short(p) for p in program.phases)
    most = MOST_UNROLLED if few else THREADS[-1]
    grids = _grids(program, machine, most)
    if all(map(_has_few_sums, program.phases)):
        for blocks in grids:
            for threads in ALONE if blocks == 1 else THREADS:
                if threads <= most and all(_fits(phase, blocks, threads) for phase in program.phases):
                    yield from _scheduled(program, machine, blocks, threads)
    for marked in tensor_core.on_tensor_cores(program, machine):
        for blocks in grids:
            for threads in tensor_core.block_sizes(marked, blocks):
                others = _added_by_threads(marked, blocks, threads)
                if all(_has_few_sums(phase) and _fits(phase, blocks, threads) for phase in others):
                    yield from _scheduled(marked, machine, blocks, threads)


def _grids(program: Program, machine: GpuMachine, most: int) -> list[int]:
    """Blocks of a grid: one where a step is small, and one for so many columns each, at most ``most``."""
    products = sum(products_of(phase) for phase in program.phases)
    small = products <= MOST_ALONE and sum(buffer.bytes for buffer in program.locals) <= SHARED
    widest = max(columns_in(phase) for phase in program.phases)
    found = [n for columns in COLUMNS if 1 < (n := -(-widest // columns)) <= machine.sms] or [machine.sms]
    found = [1, *found] if small else found
    return [n for n in found if max(columns_of(phase, n) for phase in program.phases) <= most]


def _has_few_sums(phase: Phase) -> bool:
    """Whether a thread's registers hold the sums of all rows."""
    return is_short(phase) or _sums(phase) <= MOST_SUMS


def _scheduled(marked: Program, machine: GpuMachine, blocks: int, threads: int) -> Iterator[Program]:
    """Schedules that differ in the terms that threads load at once, and in how blocks exchange what is carried."""
    if sum(_partial_bytes(phase, blocks, threads) for phase in _added_by_threads(marked, blocks, threads)) > PARTIAL:
        return
    flights = _flights(marked, blocks, threads)
    for flight in flights:
        parameters = _parameters(marked, machine, blocks, threads, flight)
        if parameters is not None:
            yield scheduled(marked, FORM, threads, *parameters)
    for parameters in _with_flags(marked, machine, blocks, threads, flights[-1]):
        yield scheduled(marked, FORM, threads, *parameters)


def _with_flags(
    program: Program, machine: GpuMachine, blocks: int, threads: int, flight: int
) -> Iterator[list[tuple[str, object]]]:
    """Parameters of schedules without a grid barrier: weights in shared memory, and in registers."""
    carried = exchanged(program, blocks) if blocks > 1 else []
    parameters = _parameters(program, machine, blocks, threads, flight, carried) if carried else None
    if parameters is None:
        return
    parameters.append((EXCHANGE, FLAGS))
    yield from _replicated(parameters)
    registers = min(machine.limits.registers_per_thread, machine.limits.registers_per_sm // threads)
    if 0 < _held_words(program, blocks, threads, flight) <= registers - OTHER_REGISTERS:
        yield from _replicated([(k, v) for k, v in parameters if k != "resident"] + [(HELD, 1)])


def _replicated(parameters: list[tuple[str, object]]) -> Iterator[list[tuple[str, object]]]:
    """Schedules with so many replicas of what is exchanged."""
    for replicas in REPLICATED:
        yield [*parameters, *([(REPLICAS, replicas)] if replicas > 1 else [])]


def _held_words(program: Program, blocks: int, threads: int, flight: int) -> int:
    """Words of operands that do not change, of a thread; 0 where its terms are several trips."""
    phases, total = dict(enumerate(program.phases)), 0
    for one in residents(program, blocks):
        terms = terms_of_thread(phases[one.phase], blocks, threads)
        if terms > terms_at_once(phases[one.phase], blocks, threads, flight):
            return 0
        total += terms
    return total


def _added_by_threads(marked: Program, blocks: int, threads: int) -> list[Phase]:
    """Phases whose products threads add up, and not tensor cores."""
    numbers = {stage.number for stage in mma_stages(marked, blocks, threads)}
    return [phase for n, phase in enumerate(marked.phases) if not is_short(phase) and n not in numbers]


def _partial_bytes(phase: Phase, blocks: int, threads: int) -> int:
    """Shared memory of a phase's partial sums: a line of the block's columns for every warp, or row of threads."""
    across = columns_of(phase, blocks)
    lines = threads // WARP if WARP % across == 0 else threads // across
    return ITEM_SIZE["float32"] * _sums(phase) * lines * across


def _fits(phase: Phase, blocks: int, threads: int) -> bool:
    """Whether a block has a thread for every point of its columns."""
    return is_short(phase) or points_of(phase) // columns_in(phase) * columns_of(phase, blocks) <= threads


def _flights(marked: Program, blocks: int, threads: int) -> list[int]:
    """Terms that threads load at once, those that make a difference."""
    products = _added_by_threads(marked, blocks, threads)
    found = {tuple(terms_at_once(p, blocks, threads, flight) for p in products): flight for flight in reversed(FLIGHT)}
    return sorted(found.values())


def _parameters(
    marked: Program, machine: GpuMachine, blocks: int, threads: int, flight: int, carried: Sequence[Buffer] = ()
) -> list[tuple[str, object]] | None:
    """Of a schedule besides its threads; of what does not change as much is resident as shared memory holds.

    None where it does not hold what must be there. Args: carried: what is exchanged with flags.
    """
    most, count = machine.limits.smem_per_block_bytes - PARTIAL, len(residents(marked, blocks))
    counted = replace(marked, params=(*marked.params, ("threads", threads)))
    while (size := shared_layout(counted, blocks, resident=count, exchanged=carried)[1]) > most and count:
        count -= 1
    split = [("split", blocks)] if blocks > 1 else []
    kind = [(name, value) for name, value in marked.params if name == MMA]
    made = [("flight", flight), *split, *([("resident", count)] if count else []), *kind]
    return made if size <= most else None


def _sums(phase: Phase) -> int:
    """Sums of a thread that has all rows of a column."""
    return len(phase.accs) * points_of(phase) // columns_in(phase)
