"""Launches of the scans: one thread per group of columns, or one team of threads per row."""

from __future__ import annotations

from jcuts.codegen.cuda.launch_writer import CudaSource, LaunchSourceWriter
from jcuts.codegen.cuda.scan.kernel import grid_of, scan_shape, scans_of_grid


def launch_scan_columns(writer: LaunchSourceWriter) -> CudaSource:
    """One thread per group of neighbouring columns."""
    shape = scan_shape(writer.program)
    counts = scans_of_grid(writer.program, shape)
    total = grid_of(writer.program, shape)
    lane = writer.program.phases[0].axes[-1].name
    writer.line(1, f"thread = cuda.blockIdx.x * {writer.threads} + cuda.threadIdx.x")
    depth = 1
    if total % writer.threads:
        writer.line(1, f"if thread < {total}:")
        depth = 2
    places = writer.decode(depth, "thread", counts)
    for name in counts:
        step = shape.vector if name == lane else 1
        writer.line(depth, f"{name} = {places[name]}" + (f" * {step}" if step > 1 else ""))
    name = f"scan_of_{shape.vector}x{shape.unroll}"
    writer.call(depth, name, shape, list(counts))
    return writer.done(-(-total // writer.threads))


def launch_scan_rows(writer: LaunchSourceWriter) -> CudaSource:
    """One team of threads per row."""
    shape = scan_shape(writer.program)
    counts = scans_of_grid(writer.program, shape)
    total = grid_of(writer.program, shape)
    per_block = writer.threads // shape.team
    if per_block == 1:
        writer.line(1, "row = cuda.blockIdx.x")
    else:
        writer.line(1, f"row = cuda.blockIdx.x * {per_block} + {writer.helper('div', 'cuda.threadIdx.x', shape.team)}")
    writer.line(1, "thread = cuda.threadIdx.x")
    depth = 1
    if total % per_block:  # a team is a warp then: no other thread waits for it
        writer.line(1, f"if row < {total}:")
        depth = 2
    places = writer.decode(depth, "row", counts)
    for name in counts:
        writer.line(depth, f"{name} = {places[name]}")
    name = f"scan_of_{shape.team}x{shape.vector}"
    writer.call(depth, name, shape, [*counts, "thread"])
    return writer.done(-(-total // per_block))
