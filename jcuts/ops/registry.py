"""Registry of op rules: one per JAX primitive, stating what an equation computes point by point (a tensor-expression
IR).

An `Op` says how one output point is obtained (`Op.pull`, for simple operations) or which reduction it takes
(`Op.reduce`, for reductions, windows, contractions and convolutions).  Rules know nothing about kernels: the same rule
serves every template and every device.  To add a primitive, write one ``@op_rule`` function in the file of its family.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from jcuts.base.errors import IRError, Refusal
from jcuts.kernel_ir.index import Index
from jcuts.kernel_ir.node import Guard, Scalar

IndexTuple = tuple[Index, ...]

FLOATS = frozenset({"float64", "float32", "bfloat16", "float16"})
SIGNED = frozenset({"int8", "int16", "int32", "int64"})
UNSIGNED = frozenset({"uint8", "uint16", "uint32", "uint64"})
DTYPES = FLOATS | SIGNED | UNSIGNED | {"bool"}


@dataclass(frozen=True)
class TensorType:
    """Shape and storage type of a tensor."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


class Context(Protocol):
    """Interface through which an op rule builds the graph of one output point (implemented by ``lower.builder``)."""

    @property
    def ranges(self) -> dict[str, int]:
        """Extent of every loop axis."""
        ...

    def input(self, number: int, index: IndexTuple, guards: tuple[Guard, ...] = (), fill: Scalar = 0) -> int:
        """The value of operand ``number`` at ``index``; ``fill`` where a guard fails."""
        ...

    def apply(self, op: str, dtype: str, *args: int, **attrs: object) -> int:
        """An element-wise operation on values."""
        ...

    def const(self, value: Scalar, dtype: str) -> int:
        """A constant."""
        ...

    def index_value(self, index: Index, dtype: str) -> int:
        """The integer value of an index expression at this point."""
        ...

    def guard_value(self, guards: tuple[Guard, ...]) -> int:
        """A bool: all guards hold."""
        ...

    def known(self, number: int) -> Scalar | None:
        """The value of a scalar constant operand, or None when it is not known."""
        ...


@dataclass(frozen=True)
class AccSpec:
    """An accumulator: how contributions combine, and in which type."""

    combine: str
    dtype: str
    index_dtype: str = ""


@dataclass(frozen=True)
class ReduceSpec:
    """A reduction per output point.

    ``reds`` are (name, extent); ``term(ctx, out_index, red_index)`` gives for each accumulator the contributed values;
    ``finish(ctx, accs, out_index)`` turns accumulator values into one value per output of the op.
    ``flop`` is FLOP per output point (an FMA counts 2).
    """

    reds: tuple[tuple[str, int], ...]
    accs: tuple[AccSpec, ...]
    term: Callable[[Context, IndexTuple, IndexTuple], list[tuple[int, ...]]]
    finish: Callable[[Context, list[int], IndexTuple], list[int]]
    flop: int


PullRule = Callable[[Context, IndexTuple], int]
PushRule = Callable[[IndexTuple, Mapping[str, int]], IndexTuple]


@dataclass(frozen=True)
class Op:
    """The semantics of one equation, point by point.

    Attributes:
        family: elementwise, layout, select (pad, concatenate, dynamic slices: guarded layout), gather, reduction,
            window, contraction, convolution, cumulative, constant.
        pull: index of an output point -> its value (simple ops).
        push: for ops that only rearrange points one to one: index of an operand-0 point -> index of the same point in
            the output; None when several or no output points come from one operand point.
        reduce: for reductions and complex ops.
        cost: element operations per output point, for estimates.
        info: numbers that templates and estimates want (window sizes, dimension roles).
    """

    prim: str
    family: str
    inputs: tuple[TensorType, ...]
    outputs: tuple[TensorType, ...]
    pull: PullRule | None = None
    push: PushRule | None = None
    reduce: ReduceSpec | None = None
    cost: float = 1.0
    info: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_root(self) -> bool:
        """True for ops with a reduction: at most one of them per phase."""
        return self.reduce is not None

    @property
    def is_complex(self) -> bool:
        """Table 3.1: direct convolution and matrix multiplication; all other ops are simple."""
        return self.family == "contraction" or (self.family == "convolution" and not self.info.get("depthwise", False))


@dataclass(frozen=True)
class Equation:
    """A jaxpr equation as op rules see it: no JAX types inside but for the parameter values."""

    prim: str
    inputs: tuple[TensorType, ...]
    outputs: tuple[TensorType, ...]
    params: Mapping[str, Any]


Rule = Callable[[Equation], "Op | Refusal"]
_RULES: dict[str, Rule] = {}


def op_rule(*names: str) -> Callable[[Rule], Rule]:
    """Registers a rule for primitives of these names."""

    def register(rule: Rule) -> Rule:
        for name in names:
            if name in _RULES:
                raise IRError(f"two op rules for primitive {name!r}")
            _RULES[name] = rule
        return rule

    return register


def describe(eqn: Equation) -> Op | Refusal:
    """The op of an equation, or a refusal with the reason why jcuts leaves it to XLA."""
    rule = _RULES.get(eqn.prim)
    if rule is None:
        return Refusal(eqn.prim, "no op rule for this primitive")
    for tensor in (*eqn.inputs, *eqn.outputs):
        if tensor.dtype not in DTYPES:
            return Refusal(eqn.prim, f"element type {tensor.dtype} has no kernel meaning")
    if any(0 in tensor.shape for tensor in (*eqn.inputs, *eqn.outputs)):
        return Refusal(eqn.prim, "a tensor without elements")
    return rule(eqn)


def supported_primitives() -> Sequence[str]:
    """Names of the primitives that have a rule."""
    return sorted(_RULES)


def elementwise_push(index: IndexTuple, ranges: Mapping[str, int]) -> IndexTuple:
    """The push rule of element-wise operations: each point keeps its index."""
    return index
