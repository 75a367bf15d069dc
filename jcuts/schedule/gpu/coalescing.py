"""Coalescing statistics of cooperative loads: row reductions, column reductions, shared-memory transposes.

`traffic.py` counts from addresses for threads on their own; for these kernel families the statistics follow from the
schedule's shape: how many 128-byte lines their accesses touch per line of data, bytes in flight per thread, and how
often operands are read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from jcuts.kernel_ir.index import Index
from jcuts.kernel_ir.program import ITEM_SIZE, Program
from jcuts.schedule import fit
from jcuts.schedule.gpu.machine import ACCESS, WARP, narrowest

LINE = 128
"""Bytes."""

_FIT = fit.coefficients("gpu/reduction", "coalescing")


@dataclass(frozen=True)
class CoalescingStats:
    """Access statistics of a schedule.

    Attributes:
        lines: 128-byte lines that accesses touch, per line that they need.
        under_way: bytes of a thread in flight.
        passes: how often operands are read.
        active: fraction of the threads that have work.
    """

    lines: float
    under_way: float
    passes: float = 1.0
    active: float = 1.0


def row_access(program: Program) -> CoalescingStats:
    """Of a team of threads per row."""
    params: Any = dict(program.params)
    return _team(program, int(params["team"]), int(params["vector"]), int(params["chunks"]))


def online_row_access(program: Program) -> CoalescingStats:
    """Of a team of threads per row that takes its maximum and sum of exponentials in one pass."""
    params: Any = dict(program.params)
    return _team(program, int(params["team"]), int(params["vector"]), int(params["chunks"]), online_passes(program))


def online_passes(program: Program) -> int:
    """How often online softmax reads a row: once for two of its reductions, once for each other phase with results of
    its own.
    """
    stored = {b.name for b in program.outputs}
    return sum(bool(p.reds) or any(s.buffer in stored for s in p.stores) for p in program.phases) - 1


def column_points_access(program: Program) -> CoalescingStats:
    """Of threads that have several points of their columns at once."""
    params: Any = dict(program.params)
    return _points(program, int(params["across"]), int(params["vector"]), int(params["chunks"]))


def column_access(program: Program) -> CoalescingStats:
    """Of threads that have a vector of outputs of a column reduction."""
    params: Any = dict(program.params)
    vector = program.phases[0].axes[-1].unroll
    size = narrowest(program)
    flight = int(params.get("flight", 1)) * max(1, int(params.get("ahead", 1)))
    deep = max(1, int(params["threads"]) // int(params["across"]))
    share = math.prod(-(-r.extent // r.unroll) for r in program.phases[0].reds) / int(params.get("split", 1)) / deep
    rounds = math.ceil(share)  # of a block's rows of threads; a short share leaves the last one, or more, idle
    lines, used = _of_columns(int(params["across"]), vector, size), min(1.0, rounds / int(params.get("flight", 1)))
    return CoalescingStats(lines, flight * used * _loaded(program), active=share / rounds)


def gemv_access(program: Program) -> CoalescingStats:
    """Of threads that have a vector of columns, or of k, of a matrix that is multiplied by a vector."""
    params: Any = dict(program.params)
    phase, size = program.phases[0], narrowest(program)
    across, flight = int(params["across"]), int(params["flight"])
    deep, terms = int(params["threads"]) // across, phase.reds[0].unroll
    lines = _of_columns(deep, terms, size) if "k_major" in params else _of_columns(across, phase.axes[-1].unroll, size)
    slices = int(params.get("split", 1)) * int(params.get("cluster", 1))
    share = phase.reds[0].extent / terms / slices / (deep * flight)
    return CoalescingStats(lines, flight * _loaded(program), active=share / math.ceil(share))


def skinny_gemm_access(program: Program) -> CoalescingStats:
    """Of warps whose lanes hold tiles of k of a matrix that is multiplied by few rows."""
    params: Any = dict(program.params)
    size, (_, columns, terms), (_, deep) = narrowest(program), params["tile"], params["warps"]
    beside = terms // deep * size if "k_major" in params else int(params["segment"])  # bytes that a warp reads together
    steps = program.phases[0].reds[0].extent / terms / (int(params.get("split", 1)) * int(params.get("cluster", 1)))
    under_way = columns * terms * size / int(params["threads"])
    return CoalescingStats(max(1.0, LINE / beside), under_way, active=steps / math.ceil(steps))


def transpose_access(program: Program) -> CoalescingStats:
    """Of tiles that are transposed in shared memory."""
    params: Any = dict(program.params)
    size = narrowest(program)
    return CoalescingStats(1.0, int(params["rows"]) * int(params["columns"]) * size / int(params["threads"]))


def _team(program: Program, team: int, vector: int, chunks: int, reads: int = 0) -> CoalescingStats:
    """A team's threads lie side by side along a row, each with a vector, ``chunks`` of them at once.

    Args: reads: passes over the row; 0: one per phase, of rows that do not stay in registers.
    """
    size = narrowest(program)
    params: Any = dict(program.params)
    length = max(math.prod(r.extent for r in p.reds) for p in program.phases)
    share = -(-length // (int(params.get("split", 1)) * vector)) * vector
    pieces = -(-share // (team * vector))
    wide = max(1, ACCESS // size)  # elements of one access
    beside = min(WARP, team) * vector * size  # bytes that one row's part of a warp covers
    touched = max(1, WARP // team) * max(1.0, beside / LINE) * -(-vector // wide)
    needed = WARP * vector * size / LINE
    used = share / (pieces * team * vector)
    kept = min(chunks, pieces)
    again = float(reads or (len(program.phases) if len(program.phases) > 1 and pieces > chunks else 1))
    # What is read again comes from the L2 cache, at twice the bandwidth.
    return CoalescingStats(
        touched / needed / used * again, size * vector * kept * used, 1.0 + _FIT.reread_passes_slope * (again - 1.0)
    )


def _points(program: Program, across: int, vector: int, chunks: int) -> CoalescingStats:
    """Rows of threads along columns: every thread takes ``chunks`` points of its columns at once."""
    size = narrowest(program)
    params: Any = dict(program.params)
    length = max(math.prod(r.extent for r in p.reds) for p in program.phases) // int(params.get("split", 1))
    pieces = -(-length // (int(params["threads"]) // across))
    again = float(len(program.phases)) if pieces > chunks else 1.0
    passes = _FIT.column_passes_base + _FIT.column_passes_slope * again
    return CoalescingStats(_of_columns(across, vector, size) * again, size * vector * min(chunks, pieces), passes)


def _of_columns(across: int, vector: int, size: int) -> float:
    """Lines touched per line needed by accesses of so many threads side by side."""
    wide = max(1, ACCESS // size)
    return max(1.0, LINE / (min(across, WARP) * min(vector, wide) * size))


def _loaded(program: Program) -> float:
    """Bytes that a thread's tile of reduced points loads."""
    phase = program.phases[0]
    sizes = {b.name: ITEM_SIZE[b.dtype] for b in program.buffers}
    counts = {**{a.name: a.unroll for a in phase.axes}, **{r.name: r.unroll for r in phase.reds}}
    loads = [n for n in phase.body.nodes if n.op == "load" and n.index is not None]
    return float(sum(distinct(n.index, counts) * sizes[n.buffer] for n in loads if n.index is not None))


def distinct(index: Index, counts: dict[str, int]) -> int:
    """Different addresses of a load in a tile."""
    found = {0}
    for name, count in counts.items():
        stride = index.stride(name)
        if stride is None:
            found = {d * 100_003 + k for d in found for k in range(count)}
        elif stride and count > 1:
            found = {d + stride * k for d in found for k in range(count)}
    return len(found)
