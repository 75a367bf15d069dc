"""Launch of the split-K GEMV: one block per group of columns and slice of K; a cluster's slices are neighbours."""

from __future__ import annotations

import math
from dataclasses import replace

from jcuts.base.errors import CompileRejected
from jcuts.codegen.cuda.gemv.kernel import gemv_tile
from jcuts.codegen.cuda.launch_writer import CudaSource, LaunchSourceWriter
from jcuts.codegen.cuda.reduction.column import GROUP, lane_blocks


def launch_gemv(writer: LaunchSourceWriter) -> CudaSource:
    """The slice of K is the fastest digit of the block number: blocks of a cluster have neighbouring numbers."""
    phase, tile = writer.only_phase(), gemv_tile(writer.program)
    lane = phase.axes[-1]
    if lane.extent % lane.unroll:
        raise CompileRejected(f"{writer.program.name}: {lane.unroll} columns of a thread do not divide {lane.extent}")
    counts = {a.name: a.extent // a.unroll for a in phase.axes[:-1] if a.name != GROUP}
    counts[lane.name] = lane_blocks(phase, tile)
    counts |= {a.name: a.extent for a in phase.axes if a.name == GROUP}
    writer.decode_block(counts)
    values = [f"{a.name} * {tile.across}" if a is lane else a.name for a in phase.axes]
    names = [a.name for a in phase.axes]
    layout = "k_major" if tile.is_k_major else "n_major"
    writer.call(1, f"gemv_{layout}_{tile.across}x{tile.deep}", tile, [*names, "thread"], [*values, "thread"])
    return replace(writer.done(math.prod(counts.values())), cluster=tile.cluster)
