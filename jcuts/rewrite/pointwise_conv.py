"""Lowers pointwise (1x1) convolutions to matrix products, and raises such products back to convolutions.

    y = conv(x, w), 1x1   ->  y = dot(x, reshape(w))                                    `conv1x1_to_dot`
    y = dot(x, v)         ->  y = conv(x, reshape(v)), where y was a convolution's      `dot_to_conv`

Kernels take products; XLA's own code is often better for the convolution (`pipeline.restore_convs` says where).  The
two have the same result variable, which is how a product's convolution is found again: `pointwise_convolutions` keeps
them.  Between the two the product's operands may have been renamed, rounded or transposed by other rewrites: it is
raised with the operands that it has then, and only where these still have the shapes and types of the convolution's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from jcuts.rewrite.matmul_patterns import CONVOLUTION, DOT, is_point_by_point, new_value
from jcuts.rewrite.simplify import CONTROL_FLOW
from jcuts.rewrite.tf32_weights import turned
from jcuts.trace import jaxapi

RESHAPE = "reshape"
SAME = ("precision", "preferred_element_type")
"""Parameters that a convolution and its product share."""

Convolutions = Mapping[Any, Any]
"""Result -> the pointwise convolution that computes it, in a program and in its loop bodies."""


# -- to products ----------------------------------------------------------------------------------------------------
def conv1x1_to_dot(closed: jaxapi.Closed) -> tuple[jaxapi.Closed, int]:
    """Lowers every pointwise convolution to a product; returns the program and their number."""
    eqns: list[Any] = []
    count = 0
    for eqn in closed.jaxpr.eqns:
        if is_pointwise(eqn):
            eqns.extend(_as_dot(eqn))
            count += 1
        else:
            eqns.append(eqn)
    return (jaxapi.with_eqns(closed, eqns), count) if count else (closed, 0)


def pointwise_convolutions(closed: jaxapi.Closed) -> dict[Any, Any]:
    """The convolutions that `conv1x1_to_dot` lowers, by their results, those in loop bodies too."""
    found: dict[Any, Any] = {}
    for eqn in closed.jaxpr.eqns:
        if is_pointwise(eqn):
            found[eqn.outvars[0]] = eqn
        elif jaxapi.primitive_name(eqn) in CONTROL_FLOW:
            for _, _, body in jaxapi.inner_jaxprs(eqn):
                found |= pointwise_convolutions(body)
    return found


def is_pointwise(eqn: Any) -> bool:
    """Whether an equation is a convolution that is a product of its operands as they lie."""
    if jaxapi.primitive_name(eqn) != CONVOLUTION:
        return False
    lhs, rhs = eqn.invars
    numbers = eqn.params["dimension_numbers"]
    return (
        is_point_by_point(eqn)
        and lhs.aval.size > 0
        and rhs.aval.size > 0
        # Features innermost on both sides: the product then reads and writes both as they lie.
        and numbers.lhs_spec[1] == numbers.out_spec[1] == len(numbers.lhs_spec) - 1
        and _kept_order(numbers)
    )


def _kept_order(numbers: Any) -> bool:
    """Whether batch and spatial dimensions have the same order in operand and result."""
    return (numbers.lhs_spec[0], *numbers.lhs_spec[2:]) == (numbers.out_spec[0], *numbers.out_spec[2:])


def _as_dot(eqn: Any) -> list[Any]:
    """(N, H, W, C) x (C, K) -> (N, H, W, K): all dimensions but the features are rows, without a transpose."""
    lhs, rhs = eqn.invars
    weights = new_value(_matrix(eqn), rhs.aval)
    params = {
        "dimension_numbers": (((lhs.aval.ndim - 1,), (1 if _is_swapped(eqn) else 0,)), ((), ())),
        **{name: eqn.params[name] for name in SAME},
        "out_sharding": None,
    }
    return [
        jaxapi.reshape_eqn(rhs, weights, eqn),
        jaxapi.new_eqn([lhs, weights], eqn.outvars, jax.lax.dot_general_p, params, like=eqn),
    ]


def _is_swapped(convolution: Any) -> bool:
    """Whether weights lie as (output channels, input channels)."""
    spec = convolution.params["dimension_numbers"].rhs_spec
    return spec[0] < spec[1]


def _matrix(convolution: Any) -> tuple[int, int]:
    """Shape of the weights without their taps."""
    spec, shape = convolution.params["dimension_numbers"].rhs_spec, convolution.invars[1].aval.shape
    features, made = shape[spec[1]], shape[spec[0]]
    return (made, features) if _is_swapped(convolution) else (features, made)


# -- and back -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Product:
    """A product that a convolution was lowered to.

    Attributes:
        eqn: the product. readers: all equations that read its left operand, itself among them.
    """

    eqn: Any
    readers: tuple[Any, ...]


def dot_to_conv(
    closed: jaxapi.Closed, convolutions: Convolutions, wanted: Callable[[Product], bool]
) -> tuple[jaxapi.Closed, int]:
    """Raises products back to the convolutions that they were; returns the program and their number.

    A product that is not `wanted` stays, and so does one that other rewrites changed.  Nothing else of the program is
    touched, but that reshapes of weights go which nothing reads any more.

    Args: convolutions: of `pointwise_convolutions`, of the program before they were lowered.
    """
    made = {v: e for e in closed.jaxpr.eqns for v in e.outvars}
    readers: dict[Any, list[Any]] = {}
    for eqn in closed.jaxpr.eqns:
        for atom in {a for a in eqn.invars if not jaxapi.is_literal(a)}:
            readers.setdefault(atom, []).append(eqn)
    eqns: list[Any] = []
    count, unread = 0, set()
    for eqn in closed.jaxpr.eqns:
        new, more = [eqn], 0
        if jaxapi.primitive_name(eqn) in CONTROL_FLOW:
            new, more = _in_bodies(eqn, convolutions, wanted)
        else:
            raised = _raised(eqn, convolutions, made)
            if raised is not None and wanted(Product(eqn, tuple(readers.get(eqn.invars[0], ())))):
                new, more = raised, 1
                unread.add(eqn.invars[1])
        eqns.extend(new)
        count += more
    if not count:
        return closed, 0
    return jaxapi.with_eqns(closed, _without_reshapes(eqns, unread, closed.jaxpr.outvars)), count


def _in_bodies(eqn: Any, convolutions: Convolutions, wanted: Callable[[Product], bool]) -> tuple[list[Any], int]:
    done = [dot_to_conv(body, convolutions, wanted) for _, _, body in jaxapi.inner_jaxprs(eqn)]
    count = sum(n for _, n in done)
    return ([jaxapi.with_inner_jaxprs(eqn, [body for body, _ in done])], count) if count else ([eqn], 0)


def _raised(eqn: Any, convolutions: Convolutions, made: Mapping[Any, Any]) -> list[Any] | None:
    """A product as a convolution; None for what was none, and for a product that is not the convolution's any more.

    Weights that are transposed now (`tf32_weights.turned`) are the filter as (O, H, W, I), as `turned` has filters.
    """
    convolution = convolutions.get(eqn.outvars[0]) if jaxapi.primitive_name(eqn) == DOT else None
    if convolution is None or any(jaxapi.is_literal(a) for a in eqn.invars):
        return None
    (lhs, rhs), (x, w) = eqn.invars, convolution.invars
    if not _is_alike(lhs, x) or rhs.aval.dtype != w.aval.dtype or eqn.outvars[0].aval != convolution.outvars[0].aval:
        return None
    if any(eqn.params[name] != convolution.params[name] for name in SAME):
        return None
    contraction, batch = eqn.params["dimension_numbers"]
    if batch != ((), ()) or contraction[0] != (lhs.aval.ndim - 1,):
        return None
    matrix, swapped = _matrix(convolution), _is_swapped(convolution)
    spec, new = convolution.params["dimension_numbers"].rhs_spec, convolution
    if contraction[1] == (1,) and not swapped and rhs.aval.shape == matrix[::-1]:
        order = (spec[0], *spec[2:], spec[1])
        new = turned(convolution, new_value([w.aval.shape[d] for d in order], w.aval), order)
    elif contraction[1] != ((1,) if swapped else (0,)) or rhs.aval.shape != matrix:
        return None
    filters, before = new.invars[1] if new is not convolution else new_value(w.aval.shape, w.aval), []
    source = made.get(rhs)
    if source is not None and jaxapi.primitive_name(source) == RESHAPE and _is_alike(source.invars[0], filters):
        filters = source.invars[0]
    else:
        before = [jaxapi.reshape_eqn(rhs, filters, convolution)]
    return [*before, new.replace(invars=[lhs, filters], outvars=eqn.outvars)]


def _is_alike(one: Any, other: Any) -> bool:
    return not jaxapi.is_literal(one) and (one.aval.shape, one.aval.dtype) == (other.aval.shape, other.aval.dtype)


def _without_reshapes(eqns: list[Any], unread: set[Any], results: list[Any]) -> list[Any]:
    """Equations without reshapes that made weights of products alone. Args: unread: these weights."""
    uses = Counter(a for e in eqns for a in e.invars if not jaxapi.is_literal(a))
    uses.update(v for v in results if not jaxapi.is_literal(v))
    return [e for e in eqns if jaxapi.primitive_name(e) != RESHAPE or e.outvars[0] not in unread or uses[e.outvars[0]]]
