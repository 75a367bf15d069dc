"""Static cost analysis of any JAX function from its jaxpr: FLOP, bytes, parameters; nothing is allocated, compiled or
run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from jcuts.base.errors import NotJaxError
from jcuts.plan.cost.primitive_kinds import COLLECTIVES, FREE, HEAVY, REDUCTIONS
from jcuts.plan.spec.layers import BYTES, Gemm


@dataclass
class OpCounts:
    """FLOP, bytes and other counts of a function, equation by equation.

    flops: matrix products and convolutions (2 per multiply-add); bytes: memory traffic when elementwise chains fuse;
    kernels: launches then; collectives: bytes given to each kind; unknown: primitives costed as elementwise for lack of
    a rule;
    unbounded: ``while`` loops, whose body is counted once.
    """

    flops: float = 0.0
    bytes: float = 0.0
    kernels: float = 0.0
    collectives: dict[str, float] = field(default_factory=dict)
    products: list[tuple[Gemm, float]] = field(default_factory=list)
    unbounded: int = 0


def bytes_of(var: Any) -> float:
    aval = var.aval
    if not hasattr(aval, "shape"):
        return 0.0
    try:
        size = np.dtype(aval.dtype).itemsize
    except TypeError:  # keys of random numbers
        size = 8
    return float(math.prod(aval.shape) * size)


def inner(equation: Any) -> list[tuple[Any, float]]:
    """(jaxpr, times it runs) of an equation's sub-programs."""
    name, params = equation.primitive.name, equation.params
    if name == "scan":
        return [(_open(params["jaxpr"]), float(params["length"]))]
    if name == "while":
        return [(_open(params["body_jaxpr"]), 1.0)]
    if name == "cond":
        branches = [_open(branch) for branch in params["branches"]]
        return [(max(branches, key=lambda b: tally_jaxpr(b).flops), 1.0)]
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        if key in params:
            return [(_open(params[key]), 1.0)]
    return []


def _open(jaxpr: Any) -> Any:
    return getattr(jaxpr, "jaxpr", jaxpr)


def trace(function: Callable, arguments: Sequence[Any]) -> Any:
    try:
        return jax.make_jaxpr(function)(*arguments).jaxpr
    except (TypeError, ValueError, jax.errors.JAXTypeError) as error:
        raise NotJaxError(f"{getattr(function, '__name__', function)} cannot be traced: {error}") from error


def products_of(equation: Any) -> Gemm | None:
    """A ``dot_general``, ``ragged_dot`` or convolution as a GEMM (None for anything else)."""
    name = equation.primitive.name
    if name == "ragged_dot_general":
        return _ragged(equation)
    if name == "dot_general":
        (contract_l, contract_r), (batch_l, batch_r) = equation.params["dimension_numbers"]
        left, right = (v.aval.shape for v in equation.invars[:2])
        batch = math.prod(left[i] for i in batch_l)
        k = math.prod(left[i] for i in contract_l)
        m = math.prod(s for i, s in enumerate(left) if i not in (*contract_l, *batch_l))
        n = math.prod(s for i, s in enumerate(right) if i not in (*contract_r, *batch_r))
        return Gemm("dot", m, n, k, batch, bytes=_width(equation))
    if name == "conv_general_dilated":
        numbers = equation.params["dimension_numbers"]
        groups = equation.params["feature_group_count"]
        filters = equation.invars[1].aval.shape
        out = equation.outvars[0].aval.shape
        features = out[numbers.out_spec[1]]
        k = filters[numbers.rhs_spec[1]] * math.prod(filters[i] for i in numbers.rhs_spec[2:])
        return Gemm("convolution", math.prod(out) / features, features / groups, k, groups, bytes=_width(equation))
    return None


def _ragged(equation: Any) -> Gemm:
    """A grouped product whose groups are of about equal size: rows of the left side (or, for a gradient of the weights,
    what is summed over) are dealt to as many products as there are groups."""
    numbers = equation.params["ragged_dot_dimension_numbers"]
    (contract_l, contract_r), (batch_l, batch_r) = numbers.dot_dimension_numbers
    left, right = (v.aval.shape for v in equation.invars[:2])
    groups = math.prod(equation.invars[2].aval.shape[-1:])
    batch = math.prod(left[i] for i in batch_l)
    k = math.prod(left[i] for i in contract_l)
    m = math.prod(s for i, s in enumerate(left) if i not in (*contract_l, *batch_l))
    free = (*contract_r, *batch_r, *numbers.rhs_group_dimensions)
    n = math.prod(s for i, s in enumerate(right) if i not in free)
    (ragged,) = numbers.lhs_ragged_dimensions
    if ragged in contract_l:
        return Gemm("ragged dot", m, n, k / groups, batch * groups, bytes=_width(equation))
    return Gemm("ragged dot", m / groups, n, k, batch * groups, bytes=_width(equation))


def _width(equation: Any) -> int:
    """Bytes of a product's values: 4 where operand and result have 32 bits (TF32), otherwise 2."""
    wide = all(np.dtype(v.aval.dtype).itemsize >= 4 for v in (equation.invars[0], equation.outvars[0]))
    return 4 if wide else BYTES


def tally_jaxpr(jaxpr: Any, times: float = 1.0, into: OpCounts | None = None) -> OpCounts:
    """Counts a jaxpr; scans multiply, conditionals count their heaviest branch, while loops count once."""
    made = into if into is not None else OpCounts()
    uses = _uses(jaxpr)
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        bodies = inner(equation)
        if bodies:
            made.unbounded += name == "while"
            for body, count in bodies:
                tally_jaxpr(body, times * count, made)
            continue
        if name in FREE:
            continue
        product = products_of(equation)
        inputs = sum(bytes_of(v) for v in equation.invars if hasattr(v, "aval"))
        outputs = sum(map(bytes_of, equation.outvars))
        if product is not None:
            work = 2.0 * product.m * product.n * product.k * product.batch
            made.flops += times * work
            made.products.append((product, times))
            made.bytes += times * (inputs + outputs)
            made.kernels += times
        elif name in COLLECTIVES:
            kind = COLLECTIVES[name]
            made.collectives[kind] = made.collectives.get(kind, 0.0) + times * inputs
        elif name in HEAVY or any(uses.get(v, 0) != 1 for v in equation.outvars):
            # Ends a fused chain: what comes in was counted where it was written; the result is written and read later.
            made.bytes += times * 2 * outputs if name not in REDUCTIONS else times * (inputs + outputs)
            made.kernels += times
    return made


def _uses(jaxpr: Any) -> dict[Any, int]:
    count: dict[Any, int] = {}
    for equation in jaxpr.eqns:
        for v in equation.invars:
            if not hasattr(v, "val"):
                count[v] = count.get(v, 0) + 1
    for v in jaxpr.outvars:
        if not hasattr(v, "val"):
            count[v] = count.get(v, 0) + 2
    return count


def tally(function: Callable, *arguments: Any) -> OpCounts:
    """Counts ``function(*arguments)``; arguments may be ``ShapeDtypeStruct`` trees.

    Raises: NotJaxError if it cannot be traced.
    """
    return tally_jaxpr(trace(function, arguments))
