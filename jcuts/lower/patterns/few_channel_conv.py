"""Matches convolutions with few input channels (a network's first layer) to an implicit GEMM whose k runs along filter
rows.

With three channels the K of one tap is too short for a copy, but in a line of the image (all channels of a row of
pixels) the k of one filter row are one contiguous run.  An output ``(.., y, x)`` reads its k-th element from

    line y * down + term_k.line + start.line, element x * across + term_k.element + start.element

and reads zero where line or element lie outside the image (padding).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from jcuts.kernel_ir.index import Index, unflatten
from jcuts.kernel_ir.loop_transforms import map_indices
from jcuts.kernel_ir.node import Graph, Guard, Node
from jcuts.kernel_ir.program import ITEM_SIZE, Axis, Phase, Program, Red
from jcuts.lower.patterns.gemm import COLUMNS, LEAST_TERMS, ROWS, TYPES, K, _factors, _is_plain

MOST_TERMS = 320
"""Largest K whose filters a block may hold in shared memory; it is unrolled."""
Place = tuple[int, int]
"""(line, element of the line)."""
_Place = tuple[Index, Index]


@dataclass(frozen=True)
class FewChannelConv:
    """How a few-channel convolution reads its image; the axis of neighbouring outputs is m, that of the filters n (as
    in `lower.patterns.gemm`).

    Attributes:
        image, filters: buffers of type ``dtype``. base: the address of an image by the axes ``others``.
        lines, length: of an image. vertical: the axis along which lines move (None: there is one row of outputs).
        start: place of the first output's window, perhaps outside the image. step: what the next row and the next
            output move. terms: position of every k in its window.
        weights: address of a filter element, by k and n.
    """

    image: str
    filters: str
    dtype: str
    base: Index
    others: tuple[Axis, ...]
    vertical: Axis | None
    outputs: int
    columns: int
    lines: int
    length: int
    start: Place
    step: Place
    terms: tuple[Place, ...]
    weights: Index

    @property
    def item(self) -> int:
        """Bytes of an element."""
        return ITEM_SIZE[self.dtype]

    @property
    def rows(self) -> int:
        """Rows of outputs."""
        return 1 if self.vertical is None else self.vertical.extent

    @property
    def images(self) -> int:
        """Number of images."""
        return math.prod(a.extent for a in self.others)

    @cached_property
    def reach(self) -> Place:
        """Extent of a window: lines and elements."""
        return 1 + max(line for line, _ in self.terms), 1 + max(element for _, element in self.terms)


def as_few_channel_conv(program: Program) -> Program | None:
    """The program with canonical axes, unscheduled; None if it is not a few-channel convolution."""
    if len(program.phases) != 1 or dict(program.params).get("precision"):
        return None
    phase = pads_to_guards(program.phases[0])
    loads = _operands(phase)
    if loads is None:
        return None
    image, _ = loads
    column = next(a for a in phase.axes if phase.stores[0].address.stride(a.name) == 1)
    kinds = _kinds(program, image, phase)
    rows = None if kinds is None else [a for a in phase.axes if a is not column and kinds[a.name] == "element"]
    if not rows or len(rows) != 1 or {ROWS, COLUMNS, K} & {a.name for a in (*phase.axes, *phase.reds)}:
        return None
    names = {rows[0].name: ROWS, column.name: COLUMNS}
    made = map_indices(phase, lambda index: index.substitute({a: Index.axis(n) for a, n in names.items()}, {}))
    axes = tuple(Axis(names.get(a.name, a.name), a.extent) for a in phase.axes)
    reds = tuple(Red(r.name, r.extent) for r in phase.reds)
    found = replace(program, phases=(replace(made, axes=axes, reds=reds),), params=())
    return found if _patches(found) is not None else None


def conv_geometry(program: Program) -> FewChannelConv:
    """How the outputs of a program that `as_few_channel_conv` returned read their image."""
    found = _patches(program)
    assert found is not None
    return found


def pads_to_guards(phase: Phase) -> Phase:
    """The phase with zero padding (`pad` operations on a factor, converted or not) turned into guards on the loads."""
    if len(phase.accs) != 1 or len(phase.accs[0].values) != 1:
        return phase
    nodes = phase.body.nodes
    product = nodes[phase.accs[0].values[0]]
    if product.op != "mul":
        return phase
    body, args = Graph(), []
    for number in product.args:
        node, widened = nodes[number], None
        if node.op == "widen":
            node, widened = nodes[node.args[0]], node
        if node.op == "select":
            holds, load, zero = (nodes[a] for a in node.args)
            zero = nodes[zero.args[0]] if zero.op == "convert" else zero
            known = (holds.op, load.op, zero.op, zero.value, load.value) == ("guard", "load", "const", 0, 0)
            node = load if known and holds.guards == load.guards else node
        if node.op != "load":
            return phase
        args.append(body.add(node))
        if widened is not None:
            args[-1] = body.add(replace(widened, args=(args[-1],)))
    return replace(phase, body=body, accs=(replace(phase.accs[0], values=(body.apply("mul", "float32", *args),)),))


def _operands(phase: Phase) -> tuple[Node, Node] | None:
    """(image, filters): two loads whose product is summed, of which one does not depend on the columns."""
    loads = _factors(phase)
    columns = [a.name for a in phase.axes if phase.stores[0].address.stride(a.name) == 1]
    if loads is None or len(columns) != 1 or loads[0].dtype not in TYPES:
        return None
    if not all(_is_plain(phase.body, n) for n in phase.body.nodes[phase.accs[0].values[0]].args):
        return None  # a prologue: patches are copied as they are
    image, filters = loads if loads[0].index is not None and columns[0] not in loads[0].index.axes() else loads[::-1]
    assert image.index is not None and filters.index is not None
    if columns[0] in image.index.axes() or filters.guards or any(s.guards for s in phase.stores):
        return None
    outer = [a.name for a in phase.axes if a.name != columns[0]]
    strides = [image.index.stride(a) for a in (*outer, *(r.name for r in phase.reds))]
    fixed = [filters.index.stride(a.name) for a in phase.reds]
    if any(s is None or s <= 0 for s in strides) or any(s is None for s in fixed):
        return None
    return (image, filters) if not {*outer} & filters.index.axes() else None


def _kinds(program: Program, image: Node, phase: Phase) -> dict[str, str] | None:
    """What every axis of the image indexes: whole images, lines, or elements of a line."""
    shape = next(b.shape for b in program.inputs if b.name == image.buffer)
    if len(shape) != 4 or image.index is None:
        return None
    length = shape[2] * shape[3]
    found = {}
    for axis in (*phase.axes, *phase.reds):
        stride = image.index.stride(axis.name)
        assert stride is not None
        kind = "element" if stride % length else "line" if stride % (shape[1] * length) else "image"
        found[axis.name] = kind
    return found


def _patches(program: Program) -> FewChannelConv | None:
    phase = program.phases[0]
    loads, terms = _operands(phase), math.prod(r.extent for r in phase.reds)
    if loads is None or not LEAST_TERMS <= terms <= MOST_TERMS:
        return None
    image, filters = loads
    kinds = _kinds(program, image, phase)
    if kinds is None or image.index is None or filters.index is None:
        return None
    shape = next(b.shape for b in program.inputs if b.name == image.buffer)
    lines, length = shape[1], shape[2] * shape[3]
    ranges = phase.ranges()
    strides = {name: image.index.stride(name) or 0 for name in ranges}
    others = tuple(a for a in phase.axes if kinds[a.name] == "image" and strides[a.name])
    vertical = [a for a in phase.axes if kinds[a.name] == "line"]
    if len(vertical) > 1 or any(kinds[r.name] == "image" for r in phase.reds):
        return None
    line = _sum({n: s // length for n, s in strides.items() if kinds[n] == "line"})
    element = _sum({n: s for n, s in strides.items() if kinds[n] == "element"})
    start = _start(image, (line, element), (lines, shape[2], shape[3]), ranges)
    if start is None:
        return None
    places = []
    for point in itertools.product(*(range(r.extent) for r in phase.reds)):
        at = dict(zip((r.name for r in phase.reds), point, strict=True))
        places.append((_at(line, at), _at(element, at)))
    return FewChannelConv(
        image=image.buffer,
        filters=filters.buffer,
        dtype=image.dtype,
        base=_sum({a.name: strides[a.name] for a in others}),
        others=others,
        vertical=vertical[0] if vertical else None,
        outputs=ranges[ROWS],
        columns=ranges[COLUMNS],
        lines=lines,
        length=length,
        start=start,
        step=(strides[vertical[0].name] // length if vertical else 1, strides[ROWS]),
        terms=tuple(places),
        weights=_weights(filters.index, phase),
    )


def _start(node: Node, moving: _Place, shape: tuple[int, int, int], ranges: Mapping[str, int]) -> Place | None:
    """Where the first window begins; None where guards say something else than that the image has an end."""
    assert node.index is not None
    lines, pixels, channels = shape
    ends: list[Guard | None] = [None, None]
    for guard in node.guards:
        moved = Index(0, guard.index.terms)
        upright = moved == moving[0]
        if not upright and not _within(moving[1] - moved * channels, channels, ranges):
            return None
        if ends[not upright] is not None:
            return None
        ends[not upright] = guard
    const, length = node.index.const, pixels * channels
    first, second = ends
    if first is not None:
        line = first.index.const
    else:
        line = (const - (second.index.const * channels if second is not None else const % length)) // length
    place = line, const - line * length
    if second is not None and place[1] != second.index.const * channels:
        return None
    for guard, index, extent, scale in (
        (first, moving[0] + place[0], lines, 1),
        (second, moving[1] + place[1], length, channels),
    ):
        low, high = index.bounds(ranges)
        named = (guard is not None and guard.low == 0, guard is not None and guard.high == extent // scale - 1)
        if (not named[0] and (low is None or low < 0)) or (not named[1] and (high is None or high >= extent)):
            return None
        if guard is not None and (guard.low not in (0, None) or guard.high not in (extent // scale - 1, None)):
            return None
    return place


def _within(index: Index, extent: int, ranges: Mapping[str, int]) -> bool:
    low, high = index.bounds(ranges)
    return low is not None and high is not None and low >= 0 and high < extent


def _weights(index: Index, phase: Phase) -> Index:
    """The address of a filter by k, which counts the points of the reductions, and n."""
    steps = [index.stride(r.name) or 0 for r in phase.reds]
    nested = all(steps[k] == steps[k + 1] * phase.reds[k + 1].extent for k in range(len(steps) - 1))
    extents = tuple(r.extent for r in phase.reds)
    ranges = {**phase.ranges(), K: math.prod(extents)}
    if nested:
        where = {r.name: Index() for r in phase.reds}
        return index.substitute(where, ranges) + Index.axis(K) * steps[-1]
    where = dict(zip((r.name for r in phase.reds), unflatten(Index.axis(K), extents, ranges), strict=True))
    return index.substitute(where, ranges)


def _sum(coefficients: Mapping[str, int]) -> Index:
    total = Index()
    for name, coefficient in coefficients.items():
        total = total + Index.axis(name) * coefficient
    return total


def _at(index: Index, where: Mapping[str, int]) -> int:
    return sum((index.stride(name) or 0) * value for name, value in where.items())
