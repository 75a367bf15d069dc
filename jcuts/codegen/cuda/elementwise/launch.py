"""Launches of the element-wise families: register tiles (sliding windows too) and shared-memory transposes."""

from __future__ import annotations

import itertools
import math
from typing import Any

from jcuts.base.errors import CompileRejected
from jcuts.codegen.cuda.elementwise.smem_transpose import tiles_of, transposed_shape
from jcuts.codegen.cuda.elementwise.thread_tile import TileVariant, tile_indexed_axes
from jcuts.codegen.cuda.launch_writer import CudaSource, LaunchSourceWriter
from jcuts.codegen.cuda.window.sliding_window import walk_of
from jcuts.kernel_ir.program import Phase, Program


def launch_register_tiles(writer: LaunchSourceWriter) -> CudaSource:
    """One thread per register tile (or per run of them along a window), neighbours along the last axis."""
    phase = writer.only_phase()
    counts = _counts(writer.program, phase)
    pairs: Any = dict(writer.program.params).get("block", ())  # threads of a block along some axes
    shape = dict(pairs)
    if shape:
        return _blocked(writer, phase, counts, {str(k): int(v) for k, v in shape.items()})
    tiles = math.prod(counts.values())
    writer.line(1, f"thread = cuda.blockIdx.x * {writer.threads} + cuda.threadIdx.x")
    depth = 1
    if tiles % writer.threads:
        writer.line(1, f"if thread < {tiles}:")
        depth = 2
    places = writer.decode(depth, "thread", counts)
    steps = _steps(writer.program, phase)
    for axis in phase.axes:
        step = steps[axis.name]
        writer.line(depth, f"{axis.name} = {places[axis.name]}" + (f" * {step}" if step > 1 else ""))
    _variants(writer, phase, depth)
    return writer.done(-(-tiles // writer.threads))


def _blocked(writer: LaunchSourceWriter, phase: Phase, counts: dict[str, int], shape: dict[str, int]) -> CudaSource:
    """Blocks of threads that are neighbours along several axes."""
    if math.prod(shape.values()) != writer.threads or not set(shape) <= set(counts):
        raise CompileRejected(f"{writer.program.name}: a block of {writer.threads} threads shaped {shape}")
    blocks = {name: -(-count // shape.get(name, 1)) for name, count in counts.items()}
    inner = writer.decode(1, "cuda.threadIdx.x", shape)
    outer = writer.decode(1, "cuda.blockIdx.x", blocks)
    tests = []
    steps = _steps(writer.program, phase)
    for axis in phase.axes:
        place, step = outer[axis.name], steps[axis.name]
        if axis.name in shape:
            place = f"{place} * {shape[axis.name]} + {inner[axis.name]}"
            if counts[axis.name] % shape[axis.name]:
                tests.append(f"{axis.name} < {counts[axis.name] * step}")
        writer.line(1, f"{axis.name} = ({place}) * {step}" if step > 1 else f"{axis.name} = {place}")
    if tests:
        writer.line(1, f"if {' and '.join(tests)}:")
    _variants(writer, phase, 1 + bool(tests))
    return writer.done(math.prod(blocks.values()))


def _counts(program: Program, phase: Phase) -> dict[str, int]:
    """Threads along every axis."""
    walk = walk_of(program)
    tiles = {a.name: -(-a.extent // a.unroll) for a in phase.axes}
    return {n: -(-c // walk.tiles) if walk is not None and n == walk.axis else c for n, c in tiles.items()}


def _steps(program: Program, phase: Phase) -> dict[str, int]:
    """What the variable of an axis moves per thread."""
    by_tile, walk = tile_indexed_axes(phase), walk_of(program)
    steps = {a.name: 1 if a.name in by_tile else a.unroll for a in phase.axes}
    return steps if walk is None else {**steps, walk.axis: steps[walk.axis] * walk.tiles}


def _variants(writer: LaunchSourceWriter, phase: Phase, depth: int) -> None:
    """One call per combination of full tiles and remainders; one set of them per operand of a switch."""
    switch = dict(writer.program.params).get("switch")
    chosen = next((a for a in phase.axes if a.name == switch), None)
    if chosen is not None:
        for place in range(chosen.extent):
            writer.line(depth, f"{'el' if place else ''}if {chosen.name} == {place}:")
            _calls(writer, phase, depth + 1, (chosen.name, place))
    else:
        _calls(writer, phase, depth, None)


def _calls(writer: LaunchSourceWriter, phase: Phase, depth: int, fixed: tuple[str, int] | None) -> None:
    options = []
    steps = _steps(writer.program, phase)
    axes = [a for a in phase.axes if fixed is None or a.name != fixed[0]]
    for axis in axes:
        whole, rest = divmod(axis.extent, axis.unroll)
        end = whole * steps[axis.name]
        full = [(axis.unroll, f"{axis.name} < {end}" if rest else "")] if whole else []
        options.append([*full, *([(rest, f"{axis.name} >= {end}" if whole else "")] if rest else [])])
    for combination in itertools.product(*options):
        counts = tuple((a.name, n) for a, (n, _) in zip(axes, combination, strict=True))
        shape = TileVariant(counts, () if fixed is None else (fixed,))
        name = "_".join(["tile", *(str(n) for n, _ in combination), *([f"at_{fixed[1]}"] if fixed else [])])
        tests = [test for _, test in combination if test]
        if tests:
            writer.line(depth, f"if {' and '.join(tests)}:")
        writer.call(depth + bool(tests), name, shape, [a.name for a in phase.axes])


def launch_smem_transpose(writer: LaunchSourceWriter) -> CudaSource:
    """One block per tile of the transpose."""
    phase = writer.only_phase()
    shape = transposed_shape(writer.program)
    counts = {a.name: tiles_of(a, phase, shape) for a in phase.axes}
    writer.decode_block(counts)
    name = f"transposed_{shape.rows}x{shape.columns}"
    writer.call(1, name, shape, [*(a.name for a in phase.axes), "thread"])
    return writer.done(math.prod(counts.values()))
