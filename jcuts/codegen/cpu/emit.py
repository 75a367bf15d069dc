"""CPU loop-nest emitter: kernel program -> numba source (the loops in Python), one LLVM intrinsic per register-tile
variant.

The source is readable (and what golden tests compare); the intrinsics hold the register tiles.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from jcuts.codegen.cpu.tile_body import Shape
from jcuts.kernel_ir.program import Phase, Program


@dataclass
class Source:
    """Numba source text and the tile variants that it calls, by name: (phase number, shape)."""

    text: str
    variants: dict[str, tuple[int, Shape]] = field(default_factory=dict)


class _Writer:
    def __init__(self) -> None:
        self.lines: list[str] = []
        self.depth = 0

    def line(self, text: str) -> None:
        self.lines.append("    " * self.depth + text)


def emit_source(program: Program) -> Source:
    """The kernel as numba source."""
    out = _Writer()
    variants: dict[str, tuple[int, Shape]] = {}
    out.line("def kernel(buffers, tile_begin, tile_end, scratch):")
    out.depth += 1
    out.line("for tile in range(tile_begin, tile_end):")
    out.depth += 1
    _grid(program, out)
    for axis in program.serial:
        out.line(f"for {axis} in range({axis}_lo, {axis}_hi):")
        out.depth += 1
    bases = [f"{g.axis}_lo" for g in program.grid]
    for number, phase in enumerate(program.phases):
        out.line(f"# phase {number}")
        depth = out.depth
        _conditions(number, phase, out)
        _phase(program, number, phase, bases, out, variants)
        out.depth = depth
    return Source("\n".join(out.lines) + "\n", variants)


def _conditions(number: int, phase: Phase, out: _Writer) -> None:
    """The phase's ``once``, ``last`` and ``when``."""
    tests = [f"{axis} == {axis}_lo" for axis in phase.once] + [f"{axis} == {axis}_hi - 1" for axis in phase.last]
    if phase.when:
        tests.append(f"flag_{number}(buffers, scratch) != 0")
    if tests:
        out.line(f"if {' and '.join(tests)}:")
        out.depth += 1


def _grid(program: Program, out: _Writer) -> None:
    """tile number -> block bounds of every grid axis."""
    stride = 1
    for grid in reversed(program.grid):
        index = "tile" if stride == 1 else f"(tile // {stride})"
        if stride * grid.blocks != program.tiles:
            index = f"({index} % {grid.blocks})"
        out.line(f"{grid.axis}_lo = {index} * {grid.block}")
        out.line(f"{grid.axis}_hi = min({grid.axis}_lo + {grid.block}, {grid.extent})")
        stride *= grid.blocks


def _phase(
    program: Program, number: int, phase: Phase, bases: list[str], out: _Writer, variants: dict[str, tuple[int, Shape]]
) -> None:
    grid = {g.axis: g for g in program.grid}
    loops = [axis for axis in phase.axes if axis.name not in program.serial]

    def call(counts: dict[str, int], active: int) -> None:
        shape = Shape(tuple((a.name, counts[a.name]) for a in phase.axes), active)
        name = (
            "tile_" + "_".join([str(number), *(str(c) for _, c in shape.counts)]) + (f"_of_{active}" if active else "")
        )
        variants[name] = (number, shape)
        args = [*bases, *(a.name for a in phase.axes if f"{a.name}" not in bases)]
        out.line(f"{name}({', '.join(['buffers', 'scratch', *args])})")

    def nest(level: int, counts: dict[str, int], active: int) -> None:
        if level == len(loops):
            call(counts, active)
            return
        axis = loops[level]
        width = program.lanes if axis.vector else 1
        step = axis.unroll * width
        whole, rest = divmod(axis.extent, step)
        split = axis.name in grid
        low, high = (f"{axis.name}_lo", f"{axis.name}_hi") if split else ("0", str(axis.extent))
        if whole:
            stop = f"min({high}, {whole * step})" if rest and split else (high if split else str(whole * step))
            if whole == 1 and not split:
                out.line(f"{axis.name} = 0")
                nest(level + 1, {**counts, axis.name: axis.unroll}, active)
            else:
                out.line(f"for {axis.name} in range({low}, {stop}, {step}):")
                out.depth += 1
                nest(level + 1, {**counts, axis.name: axis.unroll}, active)
                out.depth -= 1
        if rest:
            if split:
                out.line(f"if {high} == {axis.extent}:")
                out.depth += 1
            out.line(f"{axis.name} = {whole * step}")
            count = -(-rest // width)
            dead = rest - (count - 1) * width if axis.vector and rest % width else 0
            nest(level + 1, {**counts, axis.name: count}, dead if axis.vector else active)
            if split:
                out.depth -= 1

    serial = {a.name: 1 for a in phase.axes if a.name in program.serial}
    nest(0, serial, 0)


def variant_arguments(program: Program, phase: Phase) -> list[str]:
    """Names of the integer arguments of a tile variant, in order."""
    bases = [f"{g.axis}_lo" for g in program.grid]
    return [*bases, *(a.name for a in phase.axes)]
