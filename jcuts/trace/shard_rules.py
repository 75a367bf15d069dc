"""Sharding rules per primitive: which dimensions of an equation can be split over devices without communication.

A rule states for one equation which operand dimensions correspond to a result dimension (tied: splitting one splits the
other, and a device needs its own shard only), which must be replicated, and the parameters at local shapes. Primitives
without a rule are not split.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jcuts.trace import jaxapi

# A dimension of an operand (``("in", i, d)``) or of a result (``("out", i, d)``).
Dim = tuple[str, int, int]

# A dimension of a variable.
Dimension = tuple[Any, int]

ELEMENTWISE = frozenset(
    [
        "abs",
        "acos",
        "acosh",
        "add",
        "add_any",
        "and",
        "asin",
        "asinh",
        "atan",
        "atan2",
        "atanh",
        "bessel_i0e",
        "bessel_i1e",
        "cbrt",
        "ceil",
        "clamp",
        "clz",
        "convert_element_type",
        "copy",
        "copy_p",
        "cos",
        "cosh",
        "digamma",
        "div",
        "eq",
        "erf",
        "erf_inv",
        "erfc",
        "exp",
        "exp2",
        "expm1",
        "floor",
        "ge",
        "gt",
        "integer_pow",
        "imag",
        "is_finite",
        "le",
        "lgamma",
        "log",
        "log1p",
        "logistic",
        "lt",
        "max",
        "min",
        "mul",
        "ne",
        "neg",
        "nextafter",
        "not",
        "or",
        "population_count",
        "pow",
        "real",
        "reduce_precision",
        "regularized_incomplete_beta",
        "rem",
        "round",
        "rsqrt",
        "select_n",
        "shift_left",
        "shift_right_arithmetic",
        "shift_right_logical",
        "sign",
        "sin",
        "sinh",
        "sqrt",
        "square",
        "stop_gradient",
        "sub",
        "tan",
        "tanh",
        "xor",
    ]
)
REDUCTIONS = frozenset(
    [
        "reduce_sum",
        "reduce_max",
        "reduce_min",
        "reduce_prod",
        "reduce_and",
        "reduce_or",
        "reduce_xor",
        "argmax",
        "argmin",
    ]
)
ALONG_AXIS = frozenset(["cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"])
WINDOWS = frozenset(["reduce_window_sum", "reduce_window_max", "reduce_window_min"])


class ShardRule(NamedTuple):
    """The sharding rule of one equation.  ``localise(shapes of the results on one device)`` gives its
    parameters there.
    """

    tied: list[tuple[Dim, Dim]]
    whole: list[Dim]
    localise: Callable[[Sequence[tuple[int, ...]], Sequence[tuple[int, ...]]], dict[str, Any]] | None = None


def shard_rule(eqn: jaxapi.Eqn) -> ShardRule | None:
    """The sharding rule of an equation, or None if it may not be split."""
    name = jaxapi.primitive_name(eqn)
    if eqn.effects:
        return None
    if name in ELEMENTWISE:
        return _elementwise(eqn)
    if name in REDUCTIONS:
        return _reduction(eqn)
    if name in ALONG_AXIS:
        return _same_shape(eqn, whole=(eqn.params["axis"],))
    if name == "rev":
        return _same_shape(eqn, whole=eqn.params["dimensions"])
    if name in WINDOWS:
        return _window(eqn)
    rule = _RULES.get(name)
    return None if rule is None else rule(eqn)


class DimensionClasses:
    """Dimensions of variables that equations tie together (union-find)."""

    def __init__(self, eqns: Sequence[jaxapi.Eqn], ties: Sequence[ShardRule | None]) -> None:
        self._parent: dict[Dimension, Dimension] = {}
        self._all: dict[Dimension, None] = {}
        for eqn, tied in zip(eqns, ties, strict=True):
            for a, b in () if tied is None else tied.tied:
                x, y = self.key(eqn, a), self.key(eqn, b)
                if x is not None and y is not None:
                    self._all.update(dict.fromkeys((x, y)))
                    self._parent[self.root(x)] = self.root(y)

    @staticmethod
    def key(eqn: jaxapi.Eqn, dim: Dim) -> Dimension | None:
        """The variable and dimension that a rule means; None for a literal."""
        side, i, d = dim
        atom = (eqn.invars if side == "in" else eqn.outvars)[i]
        return None if jaxapi.is_literal(atom) else (atom, d)

    def root(self, key: Dimension) -> Dimension:
        """The class of a dimension."""
        while (above := self._parent.get(key, key)) != key:
            self._parent[key] = self._parent.get(above, above)
            key = above
        return key

    def members(self, root: Dimension) -> list[Dimension]:
        """All tied dimensions of a class."""
        return [key for key in self._all if self.root(key) == root]


def _shape(atom: Any) -> tuple[int, ...]:
    return tuple(atom.aval.shape)


def _elementwise(eqn: jaxapi.Eqn) -> ShardRule | None:
    out = _shape(eqn.outvars[0])
    tied: list[tuple[Dim, Dim]] = []
    whole: list[Dim] = []
    for i, operand in enumerate(eqn.invars):
        shape = _shape(operand)
        if shape and len(shape) != len(out):
            return None
        # A dimension of size 1 may stand for one of any size: every device needs it as it is.
        tied += [(("in", i, d), ("out", 0, d)) for d, n in enumerate(shape) if n == out[d]]
        whole += [("in", i, d) for d, n in enumerate(shape) if n != out[d]]
    return ShardRule(tied, whole)


def _same_shape(eqn: jaxapi.Eqn, whole: Sequence[int]) -> ShardRule:
    tied = [(("in", 0, d), ("out", 0, d)) for d in range(len(_shape(eqn.invars[0])))]
    return ShardRule(tied, [("in", 0, d) for d in whole])


def _reduction(eqn: jaxapi.Eqn) -> ShardRule:
    axes = set(eqn.params["axes"])
    kept = [d for d in range(len(_shape(eqn.invars[0]))) if d not in axes]
    return ShardRule([(("in", 0, d), ("out", 0, i)) for i, d in enumerate(kept)], [("in", 0, d) for d in sorted(axes)])


def _broadcast(eqn: jaxapi.Eqn) -> ShardRule | None:
    if len(eqn.invars) != 1:
        return None  # symbolic sizes
    shape, target, where = _shape(eqn.invars[0]), _shape(eqn.outvars[0]), eqn.params["broadcast_dimensions"]
    tied = [(("in", 0, i), ("out", 0, d)) for i, d in enumerate(where) if shape[i] == target[d]]
    whole: list[Dim] = [("in", 0, i) for i, d in enumerate(where) if shape[i] != target[d]]
    return ShardRule(tied, whole, lambda _, outs: {"shape": outs[0]})


def _transpose(eqn: jaxapi.Eqn) -> ShardRule:
    return ShardRule([(("in", 0, d), ("out", 0, i)) for i, d in enumerate(eqn.params["permutation"])], [])


def _squeeze(eqn: jaxapi.Eqn) -> ShardRule:
    rank = len(_shape(eqn.invars[0]))
    gone = {d % rank for d in eqn.params["dimensions"]}
    kept = [d for d in range(rank) if d not in gone]
    return ShardRule([(("in", 0, d), ("out", 0, i)) for i, d in enumerate(kept)], [("in", 0, d) for d in sorted(gone)])


def _reshape(eqn: jaxapi.Eqn) -> ShardRule | None:
    if eqn.params.get("dimensions") is not None or len(eqn.invars) != 1:
        return None
    old, new = _shape(eqn.invars[0]), _shape(eqn.outvars[0])
    lead = 0
    while lead < min(len(old), len(new)) and old[lead] == new[lead]:
        lead += 1
    trail = 0
    while trail < min(len(old), len(new)) - lead and old[-1 - trail] == new[-1 - trail]:
        trail += 1
    tied = [(("in", 0, d), ("out", 0, d)) for d in range(lead)]
    tied += [(("in", 0, len(old) - 1 - t), ("out", 0, len(new) - 1 - t)) for t in range(trail)]
    whole: list[Dim] = [("in", 0, d) for d in range(lead, len(old) - trail)]
    whole += [("out", 0, d) for d in range(lead, len(new) - trail)]
    return ShardRule(tied, whole, lambda _, outs: {"new_sizes": outs[0]})


def _dot(eqn: jaxapi.Eqn) -> ShardRule:
    (left_c, right_c), (left_b, right_b) = eqn.params["dimension_numbers"]
    tied: list[tuple[Dim, Dim]] = []
    for i, (a, b) in enumerate(zip(left_b, right_b, strict=True)):
        tied += [(("in", 0, a), ("out", 0, i)), (("in", 1, b), ("out", 0, i))]
    place = len(left_b)
    for side, (contracted, batch) in enumerate(((left_c, left_b), (right_c, right_b))):
        for d in range(len(_shape(eqn.invars[side]))):
            if d not in contracted and d not in batch:
                tied.append((("in", side, d), ("out", 0, place)))
                place += 1
    return ShardRule(tied, [*(("in", 0, d) for d in left_c), *(("in", 1, d) for d in right_c)])


def _convolution(eqn: jaxapi.Eqn) -> ShardRule | None:
    if eqn.params["batch_group_count"] != 1:
        return None
    numbers = eqn.params["dimension_numbers"]
    lhs, out = numbers.lhs_spec[0], numbers.out_spec[0]
    whole: list[Dim] = [("in", 0, d) for d in range(len(_shape(eqn.invars[0]))) if d != lhs]
    whole += [("in", 1, d) for d in range(len(_shape(eqn.invars[1])))]
    whole += [("out", 0, d) for d in range(len(_shape(eqn.outvars[0]))) if d != out]
    return ShardRule([(("in", 0, lhs), ("out", 0, out))], whole)


def _window(eqn: jaxapi.Eqn) -> ShardRule:
    p, tied, whole = eqn.params, [], []
    for d, size in enumerate(p["window_dimensions"]):
        plain = size == 1 and p["window_strides"][d] == 1 and tuple(p["padding"][d]) == (0, 0)
        plain = plain and p["base_dilation"][d] == 1
        if plain:
            tied.append((("in", 0, d), ("out", 0, d)))
        else:
            whole += [("in", 0, d), ("out", 0, d)]
    return ShardRule(tied, whole)


def _concatenate(eqn: jaxapi.Eqn) -> ShardRule:
    axis = eqn.params["dimension"]
    tied, whole = [], [("out", 0, axis)]
    for i, operand in enumerate(eqn.invars):
        whole.append(("in", i, axis))
        tied += [(("in", i, d), ("out", 0, d)) for d in range(len(_shape(operand))) if d != axis]
    return ShardRule(tied, whole)


def _pad(eqn: jaxapi.Eqn) -> ShardRule:
    tied, whole = [], []
    for d, amounts in enumerate(eqn.params["padding_config"]):
        if tuple(amounts) == (0, 0, 0):
            tied.append((("in", 0, d), ("out", 0, d)))
        else:
            whole += [("in", 0, d), ("out", 0, d)]
    return ShardRule(tied, whole)


def _slice(eqn: jaxapi.Eqn) -> ShardRule:
    p, shape, tied, whole = eqn.params, _shape(eqn.invars[0]), [], []
    strides = p["strides"] or (1,) * len(shape)
    for d, size in enumerate(shape):
        if p["start_indices"][d] == 0 and p["limit_indices"][d] == size and strides[d] == 1:
            tied.append((("in", 0, d), ("out", 0, d)))
        else:
            whole += [("in", 0, d), ("out", 0, d)]
    full = {d for (_, _, d), _ in tied}

    def localise(ins: Sequence[tuple[int, ...]], _: Any) -> dict[str, Any]:
        return {"limit_indices": tuple(ins[0][d] if d in full else n for d, n in enumerate(p["limit_indices"]))}

    return ShardRule(tied, whole, localise)


def _split(eqn: jaxapi.Eqn) -> ShardRule:
    axis, rank = eqn.params["axis"], len(_shape(eqn.invars[0]))
    parts = range(len(eqn.outvars))
    tied = [(("in", 0, d), ("out", i, d)) for i in parts for d in range(rank) if d != axis]
    return ShardRule(tied, [("in", 0, axis), *(("out", i, axis) for i in parts)])


def _iota(eqn: jaxapi.Eqn) -> ShardRule | None:
    if eqn.invars:
        return None
    return ShardRule([], [("out", 0, eqn.params["dimension"])], lambda _, outs: {"shape": outs[0]})


_RULES: dict[str, Callable[[jaxapi.Eqn], ShardRule | None]] = {
    "broadcast_in_dim": _broadcast,
    "concatenate": _concatenate,
    "conv_general_dilated": _convolution,
    "dot_general": _dot,
    "iota": _iota,
    "pad": _pad,
    "reshape": _reshape,
    "slice": _slice,
    "split": _split,
    "squeeze": _squeeze,
    "transpose": _transpose,
}
