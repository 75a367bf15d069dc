"""Launch of a persistent recurrence: cooperative, unless one block runs all steps."""

from __future__ import annotations

from dataclasses import replace

from jcuts.codegen.cuda.launch_writer import CudaSource, LaunchSourceWriter
from jcuts.codegen.cuda.recurrence.tile import recurrence_tile


def launch_recurrence(writer: LaunchSourceWriter) -> CudaSource:
    """Block and thread number are the task record."""
    tile = recurrence_tile(writer.program)
    name, places = f"steps_{tile.blocks}x{tile.threads}", ("cuda.blockIdx.x", "cuda.threadIdx.x")
    writer.call(1, name, tile, ("block", "thread"), places)
    shared = tile.layout(writer.program)[1]
    return replace(writer.done(tile.blocks), shared=shared, cooperative=not tile.is_alone, least=1)
