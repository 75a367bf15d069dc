"""Hash-consed data-flow graph (SSA, pure) of one output point (thesis 3.3): nodes are values, loads name addresses.

The graph is hash-consed: asking twice for the same operation on the same arguments, or for a load of the same
address, returns the same node.  That is the thesis' "merge the load nodes that access the same memory location".
`Graph.copy_into` instantiates it for another output point (register tiling copies the per-output graph once per
point of the tile; what does not depend on the point merges by itself).
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field

from jcuts.base.errors import IRError
from jcuts.kernel_ir.index import Index, Ranges

Scalar = bool | int | float


@dataclass(frozen=True)
class Guard:
    """Predicate ``low <= index <= high``; one bound may be None."""

    index: Index
    low: int | None
    high: int | None

    def always(self, ranges: Ranges) -> bool:
        """True when the ranges of the axes already imply it."""
        low, high = self.index.bounds(ranges)
        return (self.low is None or (low is not None and low >= self.low)) and (
            self.high is None or (high is not None and high <= self.high)
        )

    def never(self, ranges: Ranges) -> bool:
        """True when the ranges of the axes exclude it."""
        low, high = self.index.bounds(ranges)
        return (self.low is not None and high is not None and high < self.low) or (
            self.high is not None and low is not None and low > self.high
        )

    def __str__(self) -> str:
        left = "" if self.low is None else f"{self.low} <= "
        right = "" if self.high is None else f" <= {self.high}"
        return f"{left}{self.index}{right}"


@dataclass(frozen=True)
class Node:
    """One SSA value of a data-flow graph.

    ``op`` is 'const', 'load', 'index' (an index expression as a number), 'guard' (a conjunction as a bool), 'acc' (an
    accumulator, in exit graphs), or the name of a `jax.lax` element operation.  ``dtype`` is the storage type's name;
    bfloat16 and float16 arithmetic is carried in float32; bfloat16 is rounded where it is stored or converted, float16
    after every operation.
    """

    op: str
    dtype: str
    args: tuple[int, ...] = ()
    buffer: str = ""
    index: Index | None = None
    guards: tuple[Guard, ...] = ()
    value: Scalar | None = None
    attrs: tuple[tuple[str, object], ...] = ()

    def key(self) -> tuple[object, ...]:
        """Identity for hash-consing: distinguishes -0.0 from 0.0 and handles NaN."""
        value: object = self.value
        if isinstance(value, float):
            value = "nan" if math.isnan(value) else value.hex()
        return (
            self.op,
            self.dtype,
            self.args,
            self.buffer,
            self.index,
            self.guards,
            type(self.value),
            value,
            self.attrs,
        )

    def attr(self, name: str, default: object = None) -> object:
        """One attribute by name."""
        return dict(self.attrs).get(name, default)

    @property
    def declared(self) -> bool:
        """Whether the user's function itself requests the rounding that this conversion undoes: then it must not be
        removed.
        """
        return bool(self.attr("declared"))


@dataclass
class Graph:
    """Hash-consed data-flow graph: nodes in topological order (arguments before users)."""

    nodes: list[Node] = field(default_factory=list)
    _seen: dict[tuple[object, ...], int] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._seen = {node.key(): number for number, node in enumerate(self.nodes)}

    def add(self, node: Node) -> int:
        """The number of this node, new or merged with an equal one."""
        key = node.key()
        number = self._seen.get(key)
        if number is None:
            for arg in node.args:
                if not 0 <= arg < len(self.nodes):
                    raise IRError(f"node {node.op} uses value {arg}, which is not defined yet")
            number = len(self.nodes)
            self.nodes.append(node)
            self._seen[key] = number
        return number

    def const(self, value: Scalar, dtype: str) -> int:
        """A constant of the given storage type."""
        return self.add(Node("const", dtype, value=value))

    def load(self, buffer: str, address: Index, dtype: str, guards: tuple[Guard, ...] = (), fill: Scalar = 0) -> int:
        """An element of ``buffer`` (row-major offset), or ``fill`` where a guard fails (nothing is read there)."""
        return self.add(
            Node("load", dtype, buffer=buffer, index=address, guards=guards, value=fill if guards else None)
        )

    def apply(self, op: str, dtype: str, *args: int, **attrs: object) -> int:
        """An element-wise operation."""
        return self.add(Node(op, dtype, args=tuple(args), attrs=tuple(sorted(attrs.items()))))

    def copy_into(
        self,
        target: Graph,
        wanted: Iterable[int],
        replace: Mapping[str, Index],
        ranges: Ranges,
        accs: Mapping[int, int] | None = None,
    ) -> list[int]:
        """Instantiates ``wanted`` and its transitive arguments in ``target``, with axes replaced.

        Args: replace: axis -> expression; ranges: extents of the axes in those expressions; accs: node number of an
            'acc' node here -> node number in target.
        Returns: the numbers of the copies, in the order of ``wanted``.
        """
        wanted = list(wanted)
        numbers: dict[int, int] = {}
        for number in self.needed(wanted):
            node = self.nodes[number]
            if accs is not None and node.op == "acc":
                numbers[number] = accs[number]
                continue
            index = node.index
            if index is not None:
                index = index.substitute(replace, ranges)
                if index.values():
                    index = index.renumber(numbers)
            guards = tuple(
                Guard(g.index.substitute(replace, ranges).renumber(numbers), g.low, g.high) for g in node.guards
            )
            guards = tuple(g for g in guards if not g.always(ranges))
            args = tuple(numbers[a] for a in node.args)
            if node.op == "load" and any(g.never(ranges) for g in guards):
                numbers[number] = target.const(node.value if node.value is not None else 0, node.dtype)
                continue
            value = node.value if (node.op != "load" or guards) else None
            if node.op == "guard" and (not guards or any(g.never(ranges) for g in guards)):
                numbers[number] = target.const(not guards, "bool")
                continue
            if node.op == "select" and target.nodes[args[0]].op == "const":
                numbers[number] = args[1] if target.nodes[args[0]].value else args[2]
                continue
            numbers[number] = target.add(Node(node.op, node.dtype, args, node.buffer, index, guards, value, node.attrs))
        return [numbers[w] for w in wanted]

    def needed(self, wanted: Iterable[int], known: Container[int] = ()) -> list[int]:
        """Backward slice: numbers of the nodes that ``wanted`` depends on, in order (thesis 3.3.3).

        Args: known: nodes whose values are there: neither they nor what they alone need is asked for.
        """
        stack, seen = list(wanted), set()
        while stack:
            number = stack.pop()
            if number in seen or number in known:
                continue
            seen.add(number)
            node = self.nodes[number]
            stack.extend(node.args)
            for index in (node.index, *(g.index for g in node.guards)):
                if index is not None:
                    stack.extend(index.values())
        return sorted(seen)
