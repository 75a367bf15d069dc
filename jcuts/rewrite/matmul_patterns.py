"""Def-use queries and constant evaluation on flat jaxprs, shared by the matmul rewrites."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jcuts.trace import jaxapi

CONVOLUTION = "conv_general_dilated"
DOT = "dot_general"
BETWEEN = ("broadcast_in_dim", "reshape", "squeeze", "expand_dims")


def new_value(shape: Sequence[int], like: Any) -> Any:
    """A fresh variable of a shape, in the type of another value."""
    return jaxapi.new_var(jaxapi.ShapedArray(tuple(shape), like.dtype))


class Program:
    """A flat jaxpr being rewritten: its def-use chains and constants.

    Attributes:
        consts: constant -> value.
        made: value -> its equation.
        uses: value -> how often it is used, as a result of the program, too.
    """

    def __init__(self, closed: jaxapi.Closed) -> None:
        self.closed, jaxpr = closed, closed.jaxpr
        self.consts = dict(zip(jaxpr.constvars, closed.consts, strict=True))
        self.made = {v: e for e in jaxpr.eqns for v in e.outvars}
        self.uses = Counter(a for e in jaxpr.eqns for a in e.invars if not jaxapi.is_literal(a))
        self.uses.update(v for v in jaxpr.outvars if not jaxapi.is_literal(v))

    def maker(self, atom: Any, name: str = "") -> Any:
        """The equation that defines a value with a single use; None otherwise, and for other primitives than
        ``name``.
        """
        eqn = None if jaxapi.is_literal(atom) else self.made.get(atom)
        alone = eqn is not None and self.uses[atom] == 1 and (not name or jaxapi.primitive_name(eqn) == name)
        return eqn if alone else None

    def product(self, atom: Any) -> Any:
        """The convolution or matmul that defines a value with a single use."""
        eqn = self.maker(atom)
        return eqn if eqn is not None and jaxapi.primitive_name(eqn) in (CONVOLUTION, DOT) else None

    def constant(self, values: np.ndarray | jax.Array, dtype: Any) -> Any:
        """A new constant of the program."""
        value = jaxapi.constant(values, dtype)
        made = jaxapi.new_var(jaxapi.ShapedArray(value.shape, value.dtype))
        self.consts[made] = value
        return made

    def operand(self, values: np.ndarray, product: Any, like: Any, eqn: Any) -> tuple[Any, list[Any]]:
        """Per-channel values as an operand in place of ``like``, and the equation that broadcasts them if one is
        needed.

        Args: eqn: where it is used.
        """
        place, result = channel_of(product), eqn.outvars[0].aval
        assert place is not None  # the caller asked
        narrow = [1] * result.ndim
        narrow[place[0]] = values.size
        return self.broadcast(values.reshape(narrow), result, list(like.aval.shape) != narrow, eqn)

    def broadcast(self, values: np.ndarray, result: Any, wide: bool, eqn: Any) -> tuple[Any, list[Any]]:
        """Values with a result's rank and dimensions of 1, as an operand, and the equation that broadcasts them.

        Args: wide: whether the operand must be as large as the result. eqn: where it is used.
        """
        constant = self.constant(values, result.dtype)
        if not wide or constant.aval.shape == result.shape:
            return constant, []
        made = new_value(result.shape, result)
        dimensions = tuple(range(len(result.shape)))
        params = {"shape": tuple(result.shape), "broadcast_dimensions": dimensions, "sharding": None}
        return made, [jaxapi.new_eqn([constant], [made], jax.lax.broadcast_in_dim_p, params, like=eqn)]

    def with_eqns(self, replaced: dict[int, list[Any]]) -> jaxapi.Closed:
        """The program with equations, by their id, replaced, and unused constants removed."""
        jaxpr = self.closed.jaxpr
        eqns = [new for e in jaxpr.eqns for new in replaced.get(id(e), [e])]
        used = {a for e in eqns for a in e.invars if not jaxapi.is_literal(a)}
        used.update(v for v in jaxpr.outvars if not jaxapi.is_literal(v))
        consts = {var: value for var, value in self.consts.items() if var in used}
        return jaxapi.make_closed(
            list(consts), jaxpr.invars, jaxpr.outvars, eqns, list(consts.values()), like=self.closed
        )


def channel_of(product: Any) -> tuple[int, int] | None:
    """Dimension of the result, and of the weights, that one factor per output channel belongs to."""
    if jaxapi.primitive_name(product) == CONVOLUTION:
        numbers = product.params["dimension_numbers"]
        return (numbers.out_spec[1], numbers.rhs_spec[0]) if product.params["batch_group_count"] == 1 else None
    if jaxapi.primitive_name(product) == DOT:
        (_, contracted), (_, batched) = product.params["dimension_numbers"]
        free = [d for d in range(product.invars[1].aval.ndim) if d not in (*contracted, *batched)]
        return (product.outvars[0].aval.ndim - 1, free[0]) if len(free) == 1 else None
    return None


def is_point_by_point(convolution: Any) -> bool:
    """Whether a convolution is a 1x1 matmul over features at every point: one tap, no stride, padding, groups."""
    p, weights = convolution.params, convolution.invars[1].aval
    taps = [weights.shape[d] for d in p["dimension_numbers"].rhs_spec[2:]]
    ones = (*taps, *p["window_strides"], *p["lhs_dilation"], p["feature_group_count"], p["batch_group_count"])
    return all(n == 1 for n in ones) and all(low == high == 0 for low, high in p["padding"])


def constant_of(atom: Any, made: dict[Any, Any], constants: dict[Any, Any]) -> np.ndarray | None:
    """A constant, before the broadcast to the whole result (its dimensions then are 1)."""
    chain = []
    while atom in made and jaxapi.primitive_name(made[atom]) in BETWEEN:
        chain.append(made[atom])
        atom = chain[-1].invars[0]
        if jaxapi.is_literal(atom):
            return np.asarray(atom.val) if np.ndim(atom.val) == 0 else None
    value = constants.get(atom)
    if value is None or jaxapi.is_tracer(value) or not hasattr(value, "dtype"):
        return None
    found = np.asarray(value)
    for eqn in reversed(chain):
        target = eqn.outvars[0].aval
        if jaxapi.primitive_name(eqn) == "broadcast_in_dim":
            placed = [1] * target.ndim
            for own, where in enumerate(eqn.params["broadcast_dimensions"]):
                placed[where] = found.shape[own]
            found = found.reshape(placed)
        elif math.prod(target.shape) == found.size:
            found = found.reshape(target.shape)
        else:
            return None
    return found
