"""Batching (``vmap``) rule of ``jcuts_call_p``: a call of the batched jaxpr, planned at its own, larger shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jcuts.trace import jaxapi


def batch(
    primitive: jaxapi.Primitive,
    axis_data: Any,
    args: Sequence[Any],
    dims: Sequence[Any],
    *,
    jaxpr: jaxapi.Closed,
    **params: Any,
) -> tuple[list[Any], Sequence[Any]]:
    """One call of the jaxpr batched along ``dims`` (``axis_data`` holds size, name and any ``spmd_axis_name``)."""
    batched, out_dims = jaxapi.batch_of(jaxpr, axis_data, dims)
    outs = primitive.bind(*args, jaxpr=batched, **dict(params, placement=None))
    return list(outs), list(out_dims)
