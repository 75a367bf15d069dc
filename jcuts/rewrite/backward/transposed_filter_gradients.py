"""Rewrites filter gradients of transposed convolutions (`jax.lax.conv_transpose`) as those of strided convolutions.

    conv(x dilated, dy)        becomes        rev(conv(dy, x as dilated filter))

A transposed convolution is the data gradient of a strided one with input and output exchanged.  Automatic
differentiation slides dy, a filter as large as the output, over the dilated x; no routine of cuDNN is that convolution,
and XLA writes the dilated array.  With o for a tap of the filter, out[o] = sum over j of x[j] dy[s j + low - o]: dy is
the image, x a filter with dilation s, and the taps come out in reverse.  That is how automatic differentiation writes
the filter gradient of a strided convolution, which XLA recognises (`MatchBackwardFilter`).

The sums have the same terms.  Groups stay as they are.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jax import lax

from jcuts.trace import jaxapi
from jcuts.trace.inline import inline

CONVOLUTION = "conv_general_dilated"


def transposed_filter_gradients(closed: jaxapi.Closed) -> tuple[jaxapi.Closed, int]:
    """Exchanges the operands of filter gradients of transposed convolutions; the program and their number."""
    made = {v: eqn for eqn in closed.jaxpr.eqns for v in eqn.outvars}
    eqns, count = [], 0
    for eqn in closed.jaxpr.eqns:
        found = is_ungrouped(eqn) and _is_filter_gradient(eqn) and unreversed(eqn, made) is None
        eqns.append(_exchanged(eqn) if found else eqn)
        count += found
    if not count:
        return closed, 0
    return jaxapi.dce(inline(jaxapi.with_eqns(closed, eqns))), count


def is_ungrouped(eqn: Any) -> bool:
    """Whether an equation is a convolution of floating-point arrays without groups, in steps of one."""
    if jaxapi.primitive_name(eqn) != CONVOLUTION or eqn.params.get("out_sharding") is not None:
        return False
    lhs, rhs = (a.aval for a in eqn.invars)
    if lhs.dtype != rhs.dtype or not jnp.issubdtype(lhs.dtype, jnp.floating):
        return False
    groups = eqn.params["feature_group_count"], eqn.params["batch_group_count"]
    steps = all(s == 1 for s in eqn.params["window_strides"])
    return groups == (1, 1) and steps and 0 not in (*lhs.shape, *rhs.shape, *eqn.outvars[0].aval.shape)


def unreversed(eqn: Any, made: dict[Any, Any]) -> Any:
    """The filter of a convolution before its reversal (`jax.lax.rev`); None where it is none.

    Args: made: value -> its equation.
    """
    window, (_, _, *spatial) = eqn.invars[1], eqn.params["dimension_numbers"].rhs_spec
    reverse = None if jaxapi.is_literal(window) else made.get(window)
    if reverse is None or jaxapi.primitive_name(reverse) != "rev":
        return None
    return reverse.invars[0] if sorted(reverse.params["dimensions"]) == sorted(spatial) else None


def extents(eqn: Any) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Spatial extents of a convolution's operands and of its result."""
    numbers = eqn.params["dimension_numbers"]
    avals = (*(a.aval for a in eqn.invars), eqn.outvars[0].aval)
    image, window, result = (
        tuple(int(aval.shape[d]) for d in spec[2:]) for aval, spec in zip(avals, numbers, strict=True)
    )
    return image, window, result


def _is_filter_gradient(eqn: Any) -> bool:
    """Whether a dilated image lies under a filter that is larger than the result.

    A transposed convolution itself, and the data gradient of a strided one, have results larger than their filters.
    """
    params, (image, window, result) = eqn.params, extents(eqn)
    dilated = any(s > 1 and size > 1 for s, size in zip(params["lhs_dilation"], image, strict=True))
    if not dilated or any(d != 1 for d in params["rhs_dilation"]):
        return False
    return all(w >= r for w, r in zip(window, result, strict=True)) and math.prod(window) > math.prod(result)


def _exchanged(eqn: Any) -> Any:
    """The equation with its second operand as the image and its first as the filter.

    The image is cut where its padding would be negative and XLA would not recognise the convolution: in front, and
    behind by a stride or more (less is a rest that a strided convolution does not read).
    """
    params, (_, _, result) = eqn.params, extents(eqn)
    numbers, strides = params["dimension_numbers"], params["lhs_dilation"]
    cuts = [(0, 0, 0)] * eqn.invars[1].aval.ndim
    padding = []
    for place, taps, stride, (low, high) in zip(numbers.rhs_spec[2:], result, strides, params["padding"], strict=True):
        before, after = taps - 1 - low, taps - 1 - high
        cut = min(before, 0), after if after <= -stride else 0
        cuts[place] = (*cut, 0)
        padding.append((before - cut[0], after - cut[1]))
    batch, feature, *spatial = numbers.out_spec
    exchanged = lax.ConvDimensionNumbers(numbers.rhs_spec, numbers.lhs_spec, (feature, batch, *spatial))

    def strided(x: Any, cotangent: Any) -> Any:
        image = padded(cotangent, cuts)
        taps = lax.conv_general_dilated(
            image,
            x,
            (1,) * len(spatial),
            padding,
            rhs_dilation=strides,
            dimension_numbers=exchanged,
            precision=exchanged_precision(params["precision"]),
            preferred_element_type=params["preferred_element_type"],
        )
        return lax.rev(taps, spatial)

    return jaxapi.call_eqn(strided, eqn.invars, eqn.outvars).replace(source_info=eqn.source_info)


def padded(x: Any, config: list[tuple[int, int, int]]) -> Any:
    """A value padded with zeros and cut (`jax.lax.pad`); itself where there is nothing to do."""
    return lax.pad(x, jnp.zeros((), x.dtype), config) if any(map(any, config)) else x


def exchanged_precision(precision: Any) -> Any:
    """The precision of a product whose operands are exchanged."""
    return precision[::-1] if isinstance(precision, tuple) else precision
