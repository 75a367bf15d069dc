"""JVP and transpose rules of ``jcuts_call_p``: calls of the derivative of the original jaxpr.

Differentiating before inlining keeps the user's custom rules: the gradient of ``relu`` at 0 is 0, where that of the
``max`` inside it would be 0.5.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from jcuts.trace import jaxapi


def _outside(params: dict[str, Any]) -> dict[str, Any]:
    # A derived call has other arguments than the user's, so their known shardings no longer apply.
    return dict(params, placement=None)


def _with_zeros(values: Sequence[Any], nonzero: Sequence[bool], avals: Sequence[Any]) -> list[Any]:
    it = iter(values)
    return [next(it) if nz else jaxapi.Zero(aval.to_tangent_aval()) for nz, aval in zip(nonzero, avals, strict=False)]


def jvp(
    primitive: jaxapi.Primitive, primals: Sequence[Any], tangents: Sequence[Any], *, jaxpr: jaxapi.Closed, **params: Any
) -> tuple[list[Any], list[Any]]:
    """Forward mode: one call of the JVP jaxpr, whose arguments are the primals and the non-zero tangents."""
    nonzero = [not isinstance(t, jaxapi.Zero) for t in tangents]
    derived, nonzero_out = jaxapi.jvp_of(jaxpr, nonzero)
    live = [t for t, nz in zip(tangents, nonzero, strict=False) if nz]
    outs = primitive.bind(*primals, *live, jaxpr=derived, **_outside(params))
    count = len(jaxpr.out_avals)
    return list(outs[:count]), _with_zeros(outs[count:], nonzero_out, jaxpr.out_avals)


def linearize(
    primitive: jaxapi.Primitive,
    is_vjp: bool,
    nonzero: Sequence[bool],
    *primals: Any,
    jaxpr: jaxapi.Closed,
    **params: Any,
) -> tuple[Any, ...]:
    """Reverse mode: a call of the forward part now, and a linear call of the tangent part that JAX transposes."""
    split = jaxapi.linearize_of(jaxpr, nonzero, is_vjp)
    forward, keep = jaxapi.without_forwarded_outputs(split.forward)
    outs = keep.restore(primitive.bind(*primals, jaxpr=forward, **_outside(params)), primals)
    primal_outs, rest = outs[: split.primal_outs], outs[split.primal_outs :]
    plain, structured_flat = iter(rest[: split.plain_residuals]), rest[split.plain_residuals :]
    pool = [*jaxpr.consts, *primals]
    residuals = [next(plain) if f is None else pool[f] for f in split.res_forward]
    structured = None if split.structured is None else split.structured.update(structured_flat).unflatten()

    def tangent(residuals: Sequence[Any], structured: Any, *tangents: Any) -> list[Any]:
        live = [jaxapi.instantiate(t) for t, nz in zip(tangents, nonzero, strict=False) if nz]
        extra = [] if structured is None else jax.tree.leaves(structured)
        results = primitive.bind(*residuals, *live, *extra, jaxpr=split.tangent, **_outside(params))
        return _with_zeros(results, split.nonzero_out, jaxpr.out_avals)

    return jaxapi.linearization((primal_outs, split.nonzero_out, residuals, structured, tangent))


def transpose(
    primitive: jaxapi.Primitive, cotangents: Sequence[Any], *args: Any, jaxpr: jaxapi.Closed, **params: Any
) -> Any:
    """The linear call backwards: one call of the transposed jaxpr; cotangents are accumulated by JAX."""

    def bind(*flat: Any, jaxpr: jaxapi.Closed) -> Sequence[Any]:
        return primitive.bind(*flat, jaxpr=jaxpr, **_outside(params))

    return jaxapi.transpose_of(jaxpr, cotangents, args, bind)
