"""Builds and matches fused inverted residuals (MBConv): expand 1x1 GEMM, depthwise, project 1x1 GEMM in one program.

The expand GEMM may be missing: then the depthwise windows read an operand.

    wide = epilogue1(x[pixel, :] @ expand)     phase 1, into a local buffer
    deep = epilogue2(depthwise(wide))          phase 2, into a local buffer
    out  = exit(deep[pixel, :] @ project)      phase 3

The phases are those of three programs that `lower.region` made, joined by their buffers
(`fusion.match_inverted_residual`).  The kernel (`codegen.cuda.inverted_residual.kernel`) never holds a whole local
buffer: it goes through their channels in chunks.  The epilogues may read vectors along channels.  Operands of all sums
are float32, or all of them bfloat16.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jcuts.base.errors import Refusal
from jcuts.kernel_ir.index import Index
from jcuts.kernel_ir.node import Guard, Node
from jcuts.kernel_ir.program import Axis, Phase, Program
from jcuts.lower.patterns.few_channel_conv import pads_to_guards
from jcuts.lower.patterns.gemm import COLUMNS, ROWS, K, gemm_operands
from jcuts.lower.patterns.gemm_pair import TYPES, GemmPair, gemm_of_phase, is_dense, reads_vectors_along

TEMPLATE = "block"
MOST_TAPS = 49
Place = tuple[int, int]
"""(row, column)."""


@dataclass(frozen=True, eq=False)
class DepthwiseConv:
    """The depthwise convolution: output (y, x) of channel e reads rows ``y * step + start + tap`` of the image.

    Attributes:
        image: (images, rows, columns, channels) of the array it slides over, ``image_buffer``; outputs: rows, columns.
        step, start: rows and columns. taps: place of each in the window; weights: address of each by ``channel``.
        channel: the axis of channels; phase: with the exit graph that follows.
    """

    image: tuple[int, int, int, int]
    outputs: Place
    step: Place
    start: Place
    taps: tuple[Place, ...]
    weights: tuple[Index, ...]
    image_buffer: str
    filters: str
    channel: str
    phase: Phase

    @functools.cached_property
    def receptive_field(self) -> Place:
        """Rows and columns that a window covers."""
        return 1 + max(row for row, _ in self.taps), 1 + max(column for _, column in self.taps)


@dataclass(frozen=True, eq=False)
class InvertedResidual(GemmPair):
    """A matched inverted residual: its two GEMMs, and the stage between them.

    ``expand`` is None where there is no product before the windows.
    """

    window: DepthwiseConv

    @property
    def multiply_adds(self) -> float:
        """Multiply-adds of both GEMMs and the depthwise convolution."""
        images, rows, columns, channels = self.window.image
        pixels, outputs = images * rows * columns, images * math.prod(self.window.outputs)
        return float(channels * (pixels * self.in_channels + outputs * (self.out_channels + len(self.window.taps))))


def match_inverted_residual(program: Program) -> InvertedResidual | Refusal:
    """Matches a program to a fused inverted residual, or refuses it with the reason why it cannot be one kernel."""
    if len(program.phases) not in (2, 3):
        return Refusal("block", f"{len(program.phases)} phases, a block has 2 or 3")
    *first, second, third = program.phases
    window = _window(program, second)
    if isinstance(window, Refusal):
        return window
    project = gemm_of_phase(program, third)
    images, _, _, channels = window.image
    shape = project.phases[0].ranges() if project is not None else {}
    outputs = images * math.prod(window.outputs)
    if project is None or (shape[ROWS], shape[K]) != (outputs, channels):
        return Refusal("block", "no product of the windows' channels")
    if gemm_operands(project)[0].buffer != second.stores[0].buffer or len(second.stores) != 1:
        return Refusal("block", "the phases do not read what the one before makes")
    local = {b.name for b in program.buffers if b.role == "local"}
    if any(node.op == "load" and node.buffer in local for node in third.exit.nodes):
        return Refusal("block", "a value between the products is needed behind them")
    if not reads_vectors_along(second, window.channel):
        return Refusal("block", "an operand between the products is no vector along channels")
    types = {
        program.buffer(name).dtype for name in (window.image_buffer, window.filters, gemm_operands(project)[1].buffer)
    }
    if len(types) > 1:
        return Refusal("block", "operands of several types")
    if not first:
        return InvertedResidual(program, None, project, window)
    expand = _match_expand_gemm(program, first[0], window, _conv_input(second, window.channel))
    if isinstance(expand, Refusal):
        return expand
    if {gemm_operands(expand)[0].dtype} != types:
        return Refusal("block", "operands of several types")
    return InvertedResidual(program, expand, project, window)


def _match_expand_gemm(program: Program, phase: Phase, window: DepthwiseConv, image: str) -> Program | Refusal:
    """Matches the expand GEMM before the depthwise windows."""
    expand = gemm_of_phase(program, phase)
    if expand is None:
        return Refusal("block", "no products of rows of one array and all terms of another")
    shape = expand.phases[0].ranges()
    if (shape[ROWS], shape[COLUMNS]) != (math.prod(window.image[:3]), window.image[3]):
        return Refusal("block", "the products do not go along the image's pixels and channels")
    if phase.stores[0].buffer != image:
        return Refusal("block", "the phases do not read what the one before makes")
    if not is_dense(expand.phases[0].stores[0].address, window.image[3]) or len(phase.stores) != 1:
        return Refusal("block", "a value between the products is not stored as it lies in memory")
    if not reads_vectors_along(expand.phases[0], COLUMNS):
        return Refusal("block", "an operand between the products is no vector along channels")
    return expand


# -- the window -----------------------------------------------------------------------------------------------------
def _conv_input(phase: Phase, channel: str) -> str:
    """The buffer that windows slide over: more than a tap and a channel decide what is read."""
    taps = {channel, *(r.name for r in phase.reds)}
    loads = [n for n in phase.body.nodes if n.op == "load" and n.index is not None and not n.index.axes() <= taps]
    return loads[0].buffer if len(loads) == 1 else ""


def _window(program: Program, phase: Phase) -> DepthwiseConv | Refusal:
    no = Refusal("block", "what lies between the products is no depthwise convolution")
    phase = pads_to_guards(phase)
    last = [a.name for a in phase.axes if phase.stores[0].address.stride(a.name) == 1]
    name = _conv_input(phase, last[0]) if last else ""
    if len(phase.accs) != 1 or (phase.accs[0].combine, phase.accs[0].dtype) != ("add", "float32") or not name:
        return no
    product = phase.body.nodes[phase.accs[0].values[0]]
    loads = [phase.body.nodes[a] for a in product.args]
    loads = [phase.body.nodes[n.args[0]] if n.op == "widen" else n for n in loads]
    if product.op != "mul" or any(n.op != "load" or n.dtype not in TYPES or n.index is None for n in loads):
        return no
    image, weights = sorted(loads, key=lambda node: node.buffer != name)
    shape = program.buffer(name).shape
    if len(shape) != 4 or weights.buffer == name or weights.guards or min(shape[1:3]) < 2:
        return no
    moves = _spatial_axes(image, phase, shape)
    channel = [
        a for a in phase.axes if a.extent == shape[3] and image.index is not None and image.index.stride(a.name) == 1
    ]
    if moves is None or len(channel) != 1 or any(s.guards for s in phase.stores):
        return no
    start = _start(image, moves, (shape[1], shape[2], shape[3]), phase.ranges())
    found = _outputs(phase, moves, channel[0], shape)
    assert weights.index is not None
    if start is None or found is None or {a.name for a in phase.axes if a is not channel[0]} & weights.index.axes():
        return no
    outputs, step = found
    points = itertools.product(*(range(r.extent) for r in phase.reds))
    where = [dict(zip((r.name for r in phase.reds), point, strict=True)) for point in points]
    taps = tuple((_at(moves[0], at), _at(moves[1], at)) for at in where)
    if len(taps) > MOST_TAPS:
        return no
    addresses = tuple(weights.index.substitute({n: Index(v) for n, v in at.items()}, phase.ranges()) for at in where)
    return DepthwiseConv(shape, outputs, step, start, taps, addresses, name, weights.buffer, channel[0].name, phase)  # type: ignore[arg-type]


def _spatial_axes(image: Node, phase: Phase, shape: tuple[int, ...]) -> tuple[Index, Index] | None:
    """Row and column of the image by axes and reductions."""
    _, rows, columns, channels = shape
    row, column = Index(), Index()
    for axis in (*phase.axes, *phase.reds):
        stride = image.index.stride(axis.name) if image.index is not None else None
        if stride is None or stride < 0:
            return None
        if stride in (0, 1) or stride % (rows * columns * channels) == 0:
            continue
        if stride % (columns * channels) == 0:
            row = row + Index.axis(axis.name) * (stride // (columns * channels))
        elif stride % channels == 0:
            column = column + Index.axis(axis.name) * (stride // channels)
        else:
            return None
    return row, column


def _start(
    image: Node, moves: tuple[Index, Index], shape: tuple[int, int, int], ranges: Mapping[str, int]
) -> Place | None:
    """Where the first window begins; None where guards say something else than that the image has an end."""
    assert image.index is not None
    starts: list[int | None] = [None, None]
    for guard in image.guards:
        moved = Index(0, guard.index.terms)
        if moved not in moves or image.value != 0:
            return None
        place = moves.index(moved)
        if starts[place] not in (None, guard.index.const):
            return None
        starts[place] = guard.index.const
    rows, columns, channels = shape
    const = image.index.const
    if starts[1] is None:
        starts[1] = (const // channels) % columns
    if starts[0] is None:
        starts[0] = (const - starts[1] * channels) // (columns * channels)
    first, second = starts
    assert first is not None and second is not None
    if const != (first * columns + second) * channels:
        return None
    for move, begin, extent in zip(moves, (first, second), (rows, columns), strict=True):
        mine = [g for g in image.guards if Index(0, g.index.terms) == move]
        if not _is_border_guard(mine, move + begin, extent, ranges):
            return None
    return first, second


def _is_border_guard(guards: Sequence[Guard], index: Index, extent: int, ranges: Mapping[str, int]) -> bool:
    """Whether guards say that an index lies in the image, where it may lie outside, and nothing more."""
    low, high = index.bounds(ranges)
    below = {g.low for g in guards if g.low is not None}
    above = {g.high for g in guards if g.high is not None}
    inside = (low is not None and low >= 0) or below == {0}
    inside = inside and ((high is not None and high < extent) or above == {extent - 1})
    return inside and below <= {0} and above <= {extent - 1}


def _outputs(
    phase: Phase, moves: tuple[Index, Index], channel: Axis, shape: tuple[int, ...]
) -> tuple[Place, Place] | None:
    """Rows and columns of the outputs, and their strides; None where they are stored in another order."""
    down = [a for a in phase.axes if moves[0].stride(a.name)]
    across = [a for a in phase.axes if moves[1].stride(a.name)]
    if len(down) > 1 or len(across) > 1:
        return None
    rows, columns = (a[0].extent if a else 1 for a in (down, across))
    steps = [(move.stride(a[0].name) or 1) if a else 1 for move, a in zip(moves, (down, across), strict=True)]
    images = [a for a in phase.axes if a is not channel and a not in down and a not in across]
    if len(images) > 1 or (images[0].extent if images else 1) != shape[0]:
        return None
    place = Index.axis(channel.name)
    for axes, factor in ((across, 1), (down, columns), (images, rows * columns)):
        for axis in axes:
            place = place + Index.axis(axis.name) * (factor * shape[3])
    if phase.stores[0].address != place:
        return None
    return (rows, columns), (steps[0], steps[1])


def _at(index: Index, where: Mapping[str, int]) -> int:
    return sum((index.stride(name) or 0) * value for name, value in where.items())
