"""Launches of the reduction families: teams on rows, blocks on neighbouring columns."""

from __future__ import annotations

import math
from dataclasses import replace

from jcuts.arch.sm_limits import SM_90
from jcuts.base.errors import CompileRejected
from jcuts.codegen.cuda.launch_writer import CudaSource, LaunchSourceWriter
from jcuts.codegen.cuda.ptx.shuffle import WARP
from jcuts.codegen.cuda.reduction.column import lane_blocks, shape_of
from jcuts.codegen.cuda.reduction.column_norm import column_rows_shape, outer_axes
from jcuts.codegen.cuda.reduction.row import RowReductionTile, row_count, row_length
from jcuts.kernel_ir.program import Program
from jcuts.lower.patterns.row_column_sums import split_phases
from jcuts.schedule.gpu.launch_shapes import row_groups


def launch_rows(writer: LaunchSourceWriter) -> CudaSource:
    """One team of threads per row."""
    shape = _row_tile(writer, writer.program)
    team = shape.team
    per_block = writer.threads // team
    if per_block == 1:
        writer.line(1, "row = cuda.blockIdx.x")
        writer.line(1, "lane = cuda.threadIdx.x")
    else:
        writer.line(1, f"row = cuda.blockIdx.x * {per_block} + {writer.helper('div', 'cuda.threadIdx.x', team)}")
        writer.line(1, f"lane = {writer.helper('mod', 'cuda.threadIdx.x', team)}")
    for number in range(len(writer.program.phases)):
        writer.line(1, f"# phase {number}")
    name = f"row_of_{team}x{shape.vector}x{shape.chunks}"
    writer.call(1, name, shape, ["row", "lane"])
    return writer.done(-(-row_count(writer.program) // per_block))


def launch_row_column_sums(writer: LaunchSourceWriter) -> CudaSource:
    """One block per group of rows, which its teams take in turn."""
    shape = _row_tile(writer, split_phases(writer.program).rows)
    writer.line(1, "group = cuda.blockIdx.x")
    writer.line(1, f"member = {writer.helper('div', 'cuda.threadIdx.x', shape.team)}")
    writer.line(1, f"lane = {writer.helper('mod', 'cuda.threadIdx.x', shape.team)}")
    name = f"rows_and_columns_of_{shape.team}x{shape.vector}x{shape.chunks}"
    writer.call(1, name, shape, ["group", "member", "lane"])
    largest = 2 * writer.threads > SM_90.threads_per_block  # for two such blocks ptxas would spill
    return replace(writer.done(row_groups(writer.program)[1]), least=int(largest))


def _row_tile(writer: LaunchSourceWriter, rows: Program) -> RowReductionTile:
    """The tile of teams on rows. Raises CompileRejected where the schedule does not fit the rows."""
    params = {k: int(str(v)) for k, v in rows.params if k in ("team", "vector", "chunks")}
    shape = RowReductionTile(params["team"], writer.threads, params["vector"], params["chunks"])
    team = shape.team
    if team & (team - 1) or writer.threads % team or (team > WARP and writer.threads != team) or writer.threads % WARP:
        raise CompileRejected(f"{rows.name}: teams of {team} in blocks of {writer.threads} threads")
    if row_length(rows) % shape.vector:
        raise CompileRejected(f"{rows.name}: rows of {row_length(rows)} in steps of {shape.vector}")
    return shape


def launch_columns(writer: LaunchSourceWriter) -> CudaSource:
    """One block per group of neighbouring outputs, and per part of a split reduction."""
    phase = writer.only_phase()
    shape = shape_of(writer.program)
    lane = phase.axes[-1]
    counts = {a.name: -(-a.extent // a.unroll) for a in phase.axes[:-1]}
    counts[lane.name] = lane_blocks(phase, shape)
    if any(a.extent % a.unroll for a in phase.axes):
        raise CompileRejected(f"{writer.program.name}: tiles that do not divide the result")
    writer.line(1, "block = cuda.blockIdx.x")
    writer.line(1, "thread = cuda.threadIdx.x")
    places = writer.decode(1, "block", counts)
    for axis in phase.axes:
        step = shape.across if axis is lane and counts[lane.name] > 1 else axis.unroll if axis is not lane else 1
        writer.line(1, f"{axis.name} = {places[axis.name]}" + (f" * {step}" if step > 1 else ""))
    name = f"columns_of_{shape.across}x{shape.deep}"
    writer.call(1, name, shape, [*(a.name for a in phase.axes), "thread"])
    return writer.done(math.prod(counts.values()))


def launch_column_points(writer: LaunchSourceWriter) -> CudaSource:
    """One block per group of neighbouring columns."""
    shape = column_rows_shape(writer.program)
    axes = outer_axes(writer.program)
    counts = {a.name: a.extent for a in axes[:-1]}
    counts[axes[-1].name] = -(-axes[-1].extent // shape.columns)
    writer.decode_block(counts)
    for number in range(len(writer.program.phases)):
        writer.line(1, f"# phase {number}")
    name = f"{dict(writer.program.params)['cuda']}_of_{shape.across}x{shape.deep}x{shape.vector}x{shape.chunks}"
    writer.call(1, name, shape, [*(a.name for a in axes), "thread"])
    return writer.done(math.prod(counts.values()))
