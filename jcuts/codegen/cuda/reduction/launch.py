"""Launches of the reduction families: teams on rows, blocks on neighbouring columns."""

from __future__ import annotations

import math

from jcuts.base.errors import CompileRejected
from jcuts.codegen.cuda.launch_writer import CudaSource, LaunchSourceWriter
from jcuts.codegen.cuda.ptx.shuffle import WARP
from jcuts.codegen.cuda.reduction.column import lane_blocks, shape_of
from jcuts.codegen.cuda.reduction.column_norm import column_rows_shape, outer_axes
from jcuts.codegen.cuda.reduction.row import RowReductionTile, row_count, row_length


def launch_rows(writer: LaunchSourceWriter) -> CudaSource:
    """One team of threads per row."""
    params = dict(writer.program.params)
    shape = RowReductionTile(
        int(str(params["team"])), writer.threads, int(str(params["vector"])), int(str(params["chunks"]))
    )
    team = shape.team
    if team & (team - 1) or writer.threads % team or (team > WARP and writer.threads != team) or writer.threads % WARP:
        raise CompileRejected(f"{writer.program.name}: teams of {team} in blocks of {writer.threads} threads")
    if row_length(writer.program) % shape.vector:
        raise CompileRejected(f"{writer.program.name}: rows of {row_length(writer.program)} in steps of {shape.vector}")
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
