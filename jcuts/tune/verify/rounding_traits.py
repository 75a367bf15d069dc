"""Where rounding matters in a function: exact operations, discrete results, exponentiated sums, TF32 operands."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from jcuts.trace import jaxapi
from jcuts.trace.precision import asked
from jcuts.tune.verify import sum_rounding

EXACT = frozenset(
    {
        "abs",
        "argmax",
        "argmin",
        "broadcast_in_dim",
        "ceil",
        "clamp",
        "clz",
        "collapse",
        "concatenate",
        "conj",
        "convert_element_type",
        "copy",
        "copy_p",
        "cummax",
        "cummin",
        "dynamic_slice",
        "dynamic_update_slice",
        "expand_dims",
        "floor",
        "gather",
        "imag",
        "iota",
        "is_finite",
        "max",
        "min",
        "neg",
        "not",
        "optimization_barrier",
        "pad",
        "real",
        "reduce_and",
        "reduce_max",
        "reduce_min",
        "reduce_or",
        "reduce_precision",
        "reduce_window_max",
        "reduce_window_min",
        "reshape",
        "rev",
        "round",
        "scatter",
        "scatter-max",
        "scatter-min",
        "select_and_gather_add",
        "select_n",
        "sign",
        "slice",
        "sort",
        "split",
        "squeeze",
        "stop_gradient",
        "tie_in",
        "top_k",
        "transpose",
    }
)
"""Results are selected from operands, or exact whatever the operands: no rounding error arises."""
_EXPONENTIAL = frozenset({"cosh", "exp", "exp2", "expm1", "pow", "sinh"})
_DISCRETE = frozenset(
    {
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "sign",
        "floor",
        "ceil",
        "round",
        "argmax",
        "argmin",
        "sort",
        "top_k",
        "approx_top_k",
        "rem",
        "reduce_precision",
        "nextafter",
        "bitcast_convert_type",
        "select_and_scatter_add",
        "select_and_gather_add",
        "is_finite",
    }
)
"""A small change of a float operand can change the result by a finite amount."""


def is_inexact(aval: Any) -> bool:
    """Whether values are floats or complex numbers."""
    return hasattr(aval, "dtype") and jnp.issubdtype(aval.dtype, np.inexact)


def is_discrete(closed: Any) -> bool:
    """Whether the function turns floats into discrete values anywhere, its loops and branches included."""
    for eqn in closed.jaxpr.eqns:
        name = eqn.primitive.name
        floats = any(is_inexact(v.aval) for v in eqn.invars)
        if floats and name in _DISCRETE:
            return True
        if name == "convert_element_type" and floats and not is_inexact(eqn.outvars[0].aval):
            return True
        if any(is_discrete(inner) for _, _, inner in jaxapi.inner_jaxprs(eqn)):
            return True
    return False


def is_amplified(closed: Any) -> bool:
    """Whether a sum is exponentiated anywhere: what rounding adds to its large terms is then a factor of the result.

    XLA's own error in one result says little about such an element: on it the roundings may have cancelled.
    """
    reached: set[Any] = set()
    for eqn in closed.jaxpr.eqns:
        known = any(not hasattr(a, "val") and a in reached for a in eqn.invars)
        if known and eqn.primitive.name in _EXPONENTIAL:
            return True
        is_sum = (
            eqn.primitive.name in sum_rounding.SUMS and is_inexact(eqn.outvars[0].aval) and sum_rounding.terms(eqn) > 1
        )
        if known or is_sum:
            reached.update(eqn.outvars)
        if any(is_amplified(inner) for _, _, inner in jaxapi.inner_jaxprs(eqn)):
            return True
    return False


def is_wide(closed: Any) -> bool:
    """Whether the function itself makes float64 (or complex128) numbers, its loops and branches included."""
    for eqn in closed.jaxpr.eqns:
        if any(is_inexact(v.aval) and jnp.finfo(v.aval.dtype).bits == 64 for v in eqn.outvars):
            return True
        if any(is_wide(inner) for _, _, inner in jaxapi.inner_jaxprs(eqn)):
            return True
    return False


def takes_tf32(eqn: Any) -> bool:
    """Whether a GPU may round this equation's operands to TF32: a float32 product that asks for no more."""
    return (
        eqn.primitive.name in ("dot_general", "conv_general_dilated")
        and all(v.aval.dtype == np.float32 for v in eqn.invars)
        and not asked(eqn.params.get("precision"))
        and eqn.params.get("algorithm") is None
    )


def rounds_operands(closed: Any) -> bool:
    """Whether any product of the function may, its loops and branches included."""
    return any(
        takes_tf32(eqn) or any(rounds_operands(inner) for _, _, inner in jaxapi.inner_jaxprs(eqn))
        for eqn in closed.jaxpr.eqns
    )
