"""Sinks element-wise results into the region that reads them, where fewer bytes pass through memory then.

    { dot, select -> g, mul -> g * s } -> { add }     becomes     { dot, select -> g } -> { mul, add }

The greedy partition merges an equation into the region of its producer, even where both the operand and the result are
written then: a residual that only the backward pass reads, a gradient times a scale beside the gradient itself, a
product that another kernel only sums.  The reader computes it from what is in memory anyway.  A mask of what is in
memory anyway goes to its reader at any traffic: it would be kept from the forward pass to the backward one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jcuts.base.errors import Refusal
from jcuts.fusion.dag import NodeSet
from jcuts.fusion.move_epilogue import (
    PER_ELEMENT,
    Cover,
    escapes,
    is_library_contraction,
    only_reader,
    users_of,
)
from jcuts.kernel_ir.program import ITEM_SIZE, Program
from jcuts.lower.patterns.column_sums import TEMPLATE as COLUMN_SUMS
from jcuts.lower.patterns.row_column_sums import TEMPLATE as ROW_COLUMN_SUMS
from jcuts.lower.reduction.row_column_sums import lower_region_or_sums
from jcuts.lower.tensor_graph import TensorGraph

MASK = "bool"
LEAST_BYTES = 1 << 16
"""Fewer bytes are not worth two other kernels."""


def sink_outputs(
    graph: TensorGraph, cover: Sequence[tuple[NodeSet, Program]], has_form: Callable[[Program], bool]
) -> Cover:
    """The partition after regions took over element-wise operations of the regions whose results they read.

    Args: has_form: whether a program can be a kernel here. Operations move only if no region loses its form.
    Returns: a cover of the same operations; but for masks, bytes read and written are never more than before.
    """
    found = dict(cover)
    todo = set(found)
    while todo:
        before = set(found)
        for members in sorted(todo, key=max, reverse=True):
            while members in found and (moved := _move_one(graph, members, found, has_form)) is not None:
                members = moved
        todo = set(found) - before  # what a region has taken over may let others of its operations move
    return sorted(found.items(), key=lambda item: max(item[0]))


def _move_one(
    graph: TensorGraph, members: NodeSet, found: dict[NodeSet, Program], has_form: Callable[[Program], bool]
) -> NodeSet | None:
    """Moves the operations of one result, or of all that one region reads, out of a region.

    Returns: what is left of it; None where nothing moves.
    """
    readers: dict[NodeSet, list[int]] = {}
    for number in sorted(members, reverse=True):
        reader = only_reader(graph, frozenset({number}), found) if _is_plain(graph, number) else None
        if reader is not None and reader != members and not _is_operand(graph, number, reader):
            readers.setdefault(reader, []).append(number)
    for reader, numbers in readers.items():
        for group in ([number] for number in numbers):
            if (rest := _moved(graph, members, reader, group, found, has_form)) is not None:
                return rest
    for reader, numbers in readers.items():
        if len(numbers) > 1 and (rest := _moved(graph, members, reader, numbers, found, has_form)) is not None:
            return rest
    return None


def _moved(
    graph: TensorGraph,
    members: NodeSet,
    reader: NodeSet,
    numbers: Sequence[int],
    found: dict[NodeSet, Program],
    has_form: Callable[[Program], bool],
) -> NodeSet | None:
    """Moves the operations of some results to their reader; gives what is left, None where that saves nothing."""
    cone = _cone(graph, numbers, members)
    rest, joined = members - cone, reader | cone
    if not rest:
        return None
    saved = traffic(graph, members, reader) - traffic(graph, rest, joined)
    if saved < LEAST_BYTES and not _is_mask_of_stored(graph, numbers, members, rest, reader):
        return None
    first, second = lower_region_or_sums(graph, rest), lower_region_or_sums(graph, joined)
    if isinstance(first, Refusal) or isinstance(second, Refusal):
        return None
    if any(has_form(old) and not has_form(new) for old, new in ((found[members], first), (found[reader], second))):
        return None
    if any(
        old.template in (COLUMN_SUMS, ROW_COLUMN_SUMS) and old.template != new.template
        for old, new in ((found[members], first), (found[reader], second))
    ):
        return None
    del found[members], found[reader]
    found[rest], found[joined] = first, second
    return rest


def _is_plain(graph: TensorGraph, number: int) -> bool:
    """Whether an equation is element-wise."""
    op = graph.nodes[number].op
    return op is not None and op.family in PER_ELEMENT


def _is_mask_of_stored(
    graph: TensorGraph, numbers: Sequence[int], members: NodeSet, rest: NodeSet, reader: NodeSet
) -> bool:
    """Whether results are masks of at least `LEAST_BYTES` whose reader finds what they are made of in memory: what the
    region stores in any case, what it reads itself, and arguments.
    """
    made = [t for number in numbers for t in graph.nodes[number].outputs]
    if any(graph.tensors[t].type.dtype != MASK or _bytes(graph, t) < LEAST_BYTES for t in made):
        return False
    there = set(graph.subset_outputs(members)) | set(graph.subset_inputs(reader))
    operands = graph.subset_inputs(members - rest)
    return all(t in there or graph.tensors[t].producer is None for t in operands)


def _is_operand(graph: TensorGraph, number: int, reader: NodeSet) -> bool:
    """Whether a region's product reads what an equation makes: its operands are copied to shared memory as they are."""
    if not is_library_contraction(graph, reader):
        return False
    users = users_of(graph, number)
    roots = [m for m in reader if (op := graph.nodes[m].op) is not None and op.is_complex]
    return any(users & (graph.ancestors(reader, root) | {root}) for root in roots)


def _cone(graph: TensorGraph, numbers: Sequence[int], members: NodeSet) -> NodeSet:
    """Equations with the element-wise ones of their region that nothing else needs."""
    cone = set(numbers)
    for other in sorted((m for m in members if m < max(numbers)), reverse=True):  # users come before what they use
        users = users_of(graph, other)
        if users and users <= cone and _is_plain(graph, other) and not escapes(graph, other):
            cone.add(other)
    return frozenset(cone)


def traffic(graph: TensorGraph, *regions: NodeSet) -> int:
    """Bytes that regions read and write, each operand and result once."""
    return sum(
        _bytes(graph, tensor)
        for region in regions
        for tensor in (*graph.subset_inputs(region), *graph.subset_outputs(region))
    )


def _bytes(graph: TensorGraph, tensor: int) -> int:
    kind = graph.tensors[tensor].type
    return kind.size * ITEM_SIZE[kind.dtype]
