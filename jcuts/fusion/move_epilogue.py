"""Prologue and epilogue fusion around GEMMs: splits prologues off, or moves an epilogue into the kernel that reads it.

A GEMM that stays with a vendor library ends where the library's call ends: its epilogue is a pass over memory of its
own, or part of the next kernel.  The greedy partition gives the epilogue to the GEMM; where that region has no kernel,
the reader may take it over:

    { dot, add, max, min } -> { depthwise }     becomes     { dot } -> { add, max, min, depthwise }

Element-wise operations before a GEMM may also become its prologue, where the kernel has the A operand in registers
(`fuse_prologues`).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence

from jcuts.base.errors import Refusal
from jcuts.fusion.dag import NodeSet
from jcuts.kernel_ir.program import Program
from jcuts.lower.region import lower_region
from jcuts.lower.tensor_graph import TensorGraph

Cover = list[tuple[NodeSet, Program]]


CHEAP = 4.0
"""Cost of one operation that a window may repeat for every use: neighbouring points of a thread share the result."""


PER_ELEMENT = ("elementwise", "layout")
"""Families of operations that a product may repeat for every element of its left operand."""


def is_library_contraction(graph: TensorGraph, members: NodeSet) -> bool:
    """Whether a region has a dense contraction or convolution, for which GPUs have library kernels."""
    return any(op is not None and op.is_complex for op in (graph.nodes[m].op for m in members))


def move_epilogues(
    graph: TensorGraph, cover: Sequence[tuple[NodeSet, Program]], has_form: Callable[[Program], bool]
) -> Cover:
    """The partition after kernels took over the epilogues of the GEMMs whose results they read.

    Args: has_form: whether a program can be a kernel here. A tail moves only if the larger kernel still has a form.
    Returns: a cover of the same operations, and of those only; products that lost their tail are in it as they are.
    """
    found = dict(cover)
    for members, _ in cover:
        if not is_library_contraction(graph, members):
            continue
        tail = _epilogue(graph, members)
        reader = only_reader(graph, tail, found)
        if not tail or reader is None or is_library_contraction(graph, reader) or not has_form(found[reader]):
            continue
        if not any(_is_root(graph, m) for m in reader):
            continue  # an element-wise kernel would only be the same pass again
        joined, rest = lower_region(graph, reader | tail, cheap=CHEAP), lower_region(graph, members - tail)
        if isinstance(joined, Refusal) or isinstance(rest, Refusal) or not has_form(joined):
            continue
        del found[reader], found[members]
        found[reader | tail], found[members - tail] = joined, rest
    return sorted(found.items(), key=lambda item: max(item[0]))


def split_prologues(
    graph: TensorGraph, cover: Sequence[tuple[NodeSet, Program]], has_form: Callable[[Program], bool]
) -> Cover:
    """The partition after GEMM regions without a kernel lost their prologues, where they have a kernel without it.

        { mul, add, max, convolution, add }     becomes     { mul, add, max } and { convolution, add }

    Copies into shared memory take operands as they are; XLA makes one pass of what stands before them.
    """
    found: Cover = []
    for members, program in cover:
        head = _prologue(graph, members) if is_library_contraction(graph, members) else frozenset()
        if not head or has_form(program):
            found.append((members, program))
            continue
        before, rest = lower_region(graph, head), lower_region(graph, members - head)
        if isinstance(before, Refusal) or isinstance(rest, Refusal) or not has_form(rest):
            found.append((members, program))
        else:
            found += [(head, before), (members - head, rest)]
    return sorted(found, key=lambda item: max(item[0]))


def fuse_prologues(
    graph: TensorGraph, cover: Sequence[tuple[NodeSet, Program]], has_form: Callable[[Program], bool]
) -> Cover:
    """The partition after GEMMs took over element-wise producers of their left operand that nothing else uses.

        { concatenate, mul, add, max } -> { dot }     becomes     { concatenate } -> { mul, add, max, dot }

    Args: has_form: whether a program can be a kernel here: what passes through registers can be changed there.
    """
    found = dict(cover)
    for members, _ in cover:
        root = next((m for m in members if _is_root(graph, m)), None)
        if root is None or members not in found or not is_library_contraction(graph, members):
            continue
        head = _prologue_producers(graph, root, members, found)
        joined = lower_region(graph, members | head, cheap=CHEAP) if head else Refusal("subset", "nothing before it")
        if isinstance(joined, Refusal) or not has_form(joined):
            continue
        owners = [s for s in found if s & head]
        rests = {s - head: lower_region(graph, s - head) for s in owners if s - head}
        if any(isinstance(rest, Refusal) for rest in rests.values()):
            continue
        for taken in (members, *owners):
            del found[taken]
        found[members | head] = joined
        found.update((s, rest) for s, rest in rests.items() if not isinstance(rest, Refusal))
    return sorted(found.items(), key=lambda item: max(item[0]))


def _prologue_producers(graph: TensorGraph, root: int, members: NodeSet, cover: dict[NodeSet, Program]) -> NodeSet:
    """Element-wise producers of a GEMM's left operand, used by nothing else, in regions without a root."""
    head: set[int] = set()
    operand = graph.nodes[root].inputs[0]
    # Producers of the operand, then those of what is taken: later equations first, so users before what they use.
    todo = [] if (made := graph.tensors[operand].producer) is None else [-made]
    while todo:
        number = -heapq.heappop(todo)
        op, users = graph.nodes[number].op, users_of(graph, number)
        feeds = users <= head or (users <= head | {root} and _makes(graph, number, operand))
        plain = op is not None and op.family in PER_ELEMENT and not escapes(graph, number)
        if number not in head and plain and users and feeds and _is_free(graph, number, members, cover):
            head.add(number)
            for made in {graph.tensors[t].producer for t in graph.nodes[number].inputs}:
                if made is not None:
                    heapq.heappush(todo, -made)
    return frozenset(head)


def _is_free(graph: TensorGraph, number: int, members: NodeSet, cover: Iterable[NodeSet]) -> bool:
    """Whether an equation is in another region, one without a root."""
    return any(number in s and s != members and not any(_is_root(graph, k) for k in s) for s in cover)


def _makes(graph: TensorGraph, member: int, tensor: int) -> bool:
    return tensor in graph.nodes[member].outputs


def _prologue(graph: TensorGraph, members: NodeSet) -> NodeSet:
    """Operations that the one root of a region depends on; empty without exactly one root."""
    roots = [m for m in members if _is_root(graph, m)]
    return graph.ancestors(members, roots[0]) if len(roots) == 1 else frozenset()


def _is_root(graph: TensorGraph, member: int) -> bool:
    op = graph.nodes[member].op
    return op is not None and op.is_root


def users_of(graph: TensorGraph, member: int) -> set[int]:
    """The equations that read an equation's results."""
    return {u for t in graph.nodes[member].outputs for u in graph.tensors[t].users}


def escapes(graph: TensorGraph, member: int) -> bool:
    """Whether an equation makes a result of the program."""
    return any(graph.tensors[t].escapes for t in graph.nodes[member].outputs)


def _epilogue(graph: TensorGraph, members: NodeSet) -> NodeSet:
    """Operations behind the one root of a region, and those that only they need; empty without exactly one root."""
    roots = [m for m in members if _is_root(graph, m)]
    if len(roots) != 1:
        return frozenset()
    tail: set[int] = set()
    for member in sorted(members):  # producers come first
        made = {graph.tensors[t].producer for t in graph.nodes[member].inputs}
        if made & (tail | set(roots)):
            tail.add(member)
    for member in sorted(members - tail, reverse=True):
        users = users_of(graph, member)
        if member not in roots and users and users <= tail and not escapes(graph, member):
            tail.add(member)
    return frozenset(tail)


def only_reader(graph: TensorGraph, tail: NodeSet, cover: dict[NodeSet, Program]) -> NodeSet | None:
    """The only region that reads an epilogue's results; None if there are several or it is a result of the program."""
    if any(escapes(graph, m) for m in tail):
        return None
    outside = {u for m in tail for u in users_of(graph, m)} - tail
    return next((s for s in cover if outside and outside <= s), None)
