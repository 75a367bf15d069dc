"""Enumerates the GPU schedules of a program over all kernel families, best estimate first.

Forms (schedule parameter ``cuda``) and where their schedules come from: *point* (`elementwise`, `window`), *team*
(rows, here), *columns*, *column_rows*, *moments*, *scan_rows*, *scan_columns* (`reduction.column`), *transposed*
(`elementwise`), *product* (`gemm`, `conv.implicit_gemm`, `warp_specialized`), *patch* (`conv.few_channels`), *block*
(`inverted_residual`), *attention* (`attention`).  A schedule is data in the program: ``params`` name the form, the
threads of a block and how work is shared; ``unroll`` of the axes is the register tile.  Programs that no form fits get
no candidate and stay with XLA: integer products, convolutions with groups; on GPUs older than compute capability 8.0
every sum of more than a few values per output that is not one of rows or columns.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from jcuts.kernel_ir.loop_transforms import collapse_program
from jcuts.kernel_ir.program import Phase, Program
from jcuts.lower import welford
from jcuts.lower.attention import TEMPLATE as ATTENTION
from jcuts.lower.excess_precision import drop_bf16_round_trips
from jcuts.lower.patterns.gemm import ROWS, as_gemm, gemm_operands
from jcuts.lower.patterns.inverted_residual import TEMPLATE as BLOCK
from jcuts.schedule import fit
from jcuts.schedule.gpu import contraction
from jcuts.schedule.gpu.attention import schedules as attention_schedules
from jcuts.schedule.gpu.conv import few_channels
from jcuts.schedule.gpu.elementwise.schedules import maps
from jcuts.schedule.gpu.gemm import mma as gemm_mma
from jcuts.schedule.gpu.inverted_residual import schedules as inverted_residual_schedules
from jcuts.schedule.gpu.machine import (
    RESIDENT,
    TAPS,
    Candidate,
    GpuMachine,
    fastest_memory,
    loads_of,
    narrowest,
    scheduled,
    vectors,
)
from jcuts.schedule.gpu.reduction import column as reduction_column
from jcuts.schedule.gpu.window.cost import CLOCK
from jcuts.schedule.gpu.window.schedules import windows

MULTIPLIERS = 128
"""Products per cycle of a multiprocessor without matrix units."""
TEAMS = (8, 16, 32, 64, 128, 256, 512, 1024)
"""Cooperating threads of a row."""
_CANDIDATES = fit.coefficients("gpu/reduction", "candidates")
_ROW = fit.coefficients("gpu/reduction", "row")
LEAST = 4
"""Candidates that are left whatever the percentage says."""
MOST = 8
"""The most of those that are near the best, at `SHARE` percent."""
SHARE = _CANDIDATES.pruned_percent
NEAR = _CANDIDATES.near_score_ratio
"""Scores, over the best one, of what is near it: estimates of the best are off by so much."""
PLAIN = _CANDIDATES.simt_compute_factor
"""What sums by threads on their own take, over their products at the peak (measured)."""
FEW = _CANDIDATES.simt_memory_limit
"""The same over the memory's time, up to which they are tried beside matrix units."""

ROW_ACCESS = {32: _ROW.access_32_bytes, 16: 1.0, 8: _ROW.access_8_bytes, 4: _ROW.access_4_bytes}
"""Share of the bandwidth, by bytes of an access."""
ROW_TEAMS = {256: _ROW.threads_256_factor, 512: _ROW.threads_512_factor, 1024: _ROW.threads_1024_factor}
"""Factor on a score, by cooperating threads of a row."""


def candidates(program: Program, machine: GpuMachine, limit: int, percent: float = 100) -> list[Candidate]:
    """Scheduled programs with a ranking score in (0, 1], best first; none where the GPU has no form for the program.

    Pruned: to those near the best, at least `LEAST` and at most `MOST` of them, and to at most ``limit``; all, up to
    ``limit``, where ``percent`` is 100.
    """
    best: dict[str, Candidate] = {}
    for found, score in _all(drop_bf16_round_trips(program), machine):
        old = best.get(found.digest)
        if old is None or old[1] < score:
            best[found.digest] = (found, min(1.0, max(_CANDIDATES.score_floor, score)))
    ranked = sorted(best.values(), key=lambda item: (-item[1], item[0].digest))
    near = sum(score >= NEAR * ranked[0][1] for _, score in ranked)
    most = len(ranked) if percent >= 100 else min(near, round(MOST * percent / SHARE))
    return ranked[: min(limit, max(LEAST, most))]


def _all(program: Program, machine: GpuMachine) -> Iterator[Candidate]:
    if program.template == "scan":
        yield from reduction_column.scans(program, machine)
        return
    if program.template == ATTENTION:
        if machine.multiplies:
            yield from attention_schedules.products(program, machine)
        return
    if program.template == BLOCK:
        if machine.multiplies:
            yield from inverted_residual_schedules.products(program, machine)
        return
    phase = program.phases[0]
    if len(program.phases) > 1:
        if {g.axis for g in program.grid} == set(program.serial):
            yield from _row_reduction_teams(program, machine, 1)
        else:
            plain = collapse_program(program)
            yield from reduction_column.column_softmax(plain, machine)
            if welford.match_welford(plain) is not None:
                yield from reduction_column.welford(plain, machine)
        return
    if not phase.reds:
        yield from maps(collapse_program(program), machine)
        return
    length = math.prod(r.extent for r in phase.reds)
    made = as_gemm(program) if program.template in ("contraction", "convolution") else None
    if made is not None and not machine.multiplies:
        if made.phases[0].ranges()[ROWS] == 1:
            yield from _gemv(made, machine)
            return
        made = None
    exact = as_gemm(program, exact=True) if program.template in ("contraction", "convolution") else None
    if exact is not None and machine.multiplies and exact.phases[0].ranges()[ROWS] > 1:
        found = list(gemm_mma.ffma_schedules(exact, machine))
        if found:
            yield from (*found, *(_simt_reduction(program, machine, found[0][1]) if length <= TAPS else ()))
            return
    if made is not None and (found := list(contraction.contraction_schedules(made, machine))):
        if made.phases[0].ranges()[ROWS] == 1:  # bound by memory: plain sums may be as fast, and are exact
            found = found[: gemm_mma.MOST // 2]
            sums = list(_gemv(made, machine))
            found += [(p, score / sums[0][1] * found[0][1]) for p, score in sums]
        elif length <= TAPS:  # few terms: a thread may take them all, without rounding them
            found += _simt_reduction(program, machine, found[0][1])
        yield from found
        return
    patched = program.template == "convolution" and machine.multiplies
    if patched and (found := list(few_channels.products(program, machine))):
        if length <= TAPS:
            found += _simt_reduction(program, machine, max(score for _, score in found))
        yield from found
        return
    if program.template == "reduction":
        if _along_rows(phase):
            yield from _row_reduction(program, machine)
        else:
            yield from reduction_column.columns(collapse_program(program), machine)
    elif _is_k_major_reduction(phase):
        yield from reduction_column.columns(collapse_program(program), machine)
    elif length <= TAPS:
        yield from windows(collapse_program(program), machine)


def _simt_reduction(program: Program, machine: GpuMachine, best: float) -> list[Candidate]:
    """Sums of few terms by threads on their own, the best two, where products do not decide. Args: best: score."""
    phase = program.phases[0]
    products = math.prod(x.extent for x in (*phase.axes, *phase.reds))
    moved = sum(b.bytes for b in (*program.inputs, *program.outputs))
    if PLAIN * products / (machine.sms * MULTIPLIERS * CLOCK) > FEW * moved / fastest_memory():
        return []
    found = sorted(windows(collapse_program(program), machine), key=lambda item: (-item[1], item[0].digest))[:2]
    return [(p, score / found[0][1] * best * gemm_mma.AGAIN) for p, score in found]


def _gemv(program: Program, machine: GpuMachine) -> Iterator[Candidate]:
    """A matrix times one vector as a sum of rows or of columns: the best few schedules."""
    sums = (
        _row_reduction(program, machine)
        if gemm_operands(program)[1].along_terms
        else reduction_column.columns(program, machine)
    )
    yield from sorted(sums, key=lambda found: (-found[1], found[0].digest))[: gemm_mma.MOST // 2]


# -- element-wise ---------------------------------------------------------------------------------------------------
# -- reductions -----------------------------------------------------------------------------------------------------
def _along_rows(phase: Phase) -> bool:
    """Whether the reduced points of an output lie next to each other (else neighbouring outputs do)."""
    last = phase.reds[-1].name
    strides = [n.index.stride(last) for n in loads_of(phase) if n.index is not None and n.index.stride(last) != 0]
    return not phase.axes or any(s == 1 for s in strides) or not strides


def _is_k_major_reduction(phase: Phase) -> bool:
    """Long sums whose operands all lie along the last output axis: gradients of depthwise filters."""
    if not phase.axes or math.prod(r.extent for r in phase.reds) <= TAPS:
        return False
    lane = phase.axes[-1].name
    return all(n.index is not None and n.index.stride(lane) == 1 for n in loads_of(phase))


def _row_reduction(program: Program, machine: GpuMachine) -> Iterator[Candidate]:
    phase = program.phases[0]
    yield from _row_reduction_teams(program, machine, 1)
    length = math.prod(r.extent for r in phase.reds)
    rows = math.prod(a.extent for a in phase.axes)
    if any(acc.index_dtype for acc in phase.accs):
        return
    wanted = machine.threads / max(1, rows)
    counts = {min(4096, int(min(wanted, length / per_thread)) // 256 * 2) for per_thread in (16, 64)}
    counts |= {k * machine.sms for k in (2, 4, 8) if rows * 16 <= machine.sms and length >= 4096 * k * machine.sms}
    for count in sorted(counts):
        if count > 1:
            yield from _row_reduction_teams(program, machine, count)


def _row_reduction_teams(program: Program, machine: GpuMachine, split: int) -> Iterator[Candidate]:
    rows, length = _row_shape(program)
    size = narrowest(program)
    for vector in vectors(length, size):
        share = -(-length // (split * vector)) * vector
        for team in TEAMS:
            pieces = -(-share // (team * vector))
            kept = pieces * vector
            if team > 8 and share < team * vector / 2:
                continue
            most = RESIDENT if len(program.phases) > 1 else max(RESIDENT, 256 // size)
            chunks = pieces if kept <= most else max(1, (8 if len(program.phases) > 1 else 16) // vector)
            threads = max(team, 256 if team <= 32 else team)
            # Measured on an H200: 32 elements per thread in teams of 128 to 256 keep most loads in flight.
            fill = min(1.0, rows * split * team / machine.threads)
            loops = -(-pieces // chunks)
            depth = min(1.0, kept / RESIDENT) if kept <= most else _ROW.looped_depth * min(1.0, 16 / loops)
            # Measured as well: accesses of 8 bytes are as fast, two of 16 side by side leave lines half used.
            access = ROW_ACCESS.get(vector * size, _ROW.access_narrow)
            lost = share / (pieces * team * vector)
            score = _ROW.access_base + _ROW.access_slope * access
            score *= _ROW.occupancy_base + _ROW.occupancy_slope * fill
            score *= _ROW.depth_base + _ROW.depth_slope * depth
            score *= lost
            score *= ROW_TEAMS.get(team, 1.0) * (_ROW.split_factor if split > 1 else 1.0)
            if len(program.phases) > 1 and kept > RESIDENT:
                score *= _ROW.reread_factor  # the row is read again by every phase
            more = (("split", split),) if split > 1 else ()
            yield (
                scheduled(program, "team", threads, ("team", team), ("vector", vector), ("chunks", chunks), *more),
                score,
            )


def _row_shape(program: Program) -> tuple[int, int]:
    if len(program.phases) == 1:
        phase = program.phases[0]
        return math.prod(a.extent for a in phase.axes), math.prod(r.extent for r in phase.reds)
    rows = math.prod(g.extent for g in program.grid)
    return rows, max(
        math.prod([*(r.extent for r in p.reds), *(a.extent for a in p.axes if a.name not in program.serial)])
        for p in program.phases
    )


# -- helpers --------------------------------------------------------------------------------------------------------
