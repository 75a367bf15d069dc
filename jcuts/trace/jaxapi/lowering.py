"""Lowering to StableHLO: context of a lowering rule, and inline emission of a jaxpr."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from jax._src import sharding_impls as _sharding_impls
from jax._src.interpreters import mlir as _mlir

from jcuts.trace.jaxapi.types import Closed


class LoweringSite(NamedTuple):
    """What a lowering rule knows of its module: platforms, devices, manual axes.

    Attributes:
        platforms: names such as ``cpu`` or ``cuda``; more than one only when exporting.
        devices: number of devices of the computation.  manual: whether avals are shard-local (all mesh axes are
        manual, as inside ``shard_map``).  for_export: the result will be serialised.  symbolic: shapes have
        unknown dimensions.  axis_env: names of manual axes.
    """

    platforms: tuple[str, ...]
    devices: int
    manual: bool
    for_export: bool
    symbolic: bool


def lowering_site(ctx: Any) -> LoweringSite:
    """Read a ``LoweringRuleContext``."""
    module = ctx.module_context
    platforms = tuple(ctx.platforms or module.platforms)
    axis = module.axis_context
    devices, manual = 1, False
    if isinstance(axis, _sharding_impls.ShardingContext):
        devices = axis.num_devices
    elif isinstance(axis, _sharding_impls.SPMDAxisContext):
        devices = axis.mesh.size
        manual = set(axis.manual_axes) == set(axis.mesh.axis_names)
    elif hasattr(axis, "axis_env"):
        devices = getattr(axis.axis_env, "nreps", 1)
        manual = True
    symbolic = bool(ctx.dim_var_values) or bool(module.shape_poly_state.dim_vars)
    return LoweringSite(platforms, devices, manual, bool(module.lowering_parameters.for_export), symbolic)


def lower_closed(ctx: Any, args: Sequence[Any], closed: Closed, name: str) -> Sequence[Any]:
    """Emits a closed jaxpr inline at a lowering rule's position, effect tokens included."""
    return _mlir.core_call_lowering(ctx, *args, name=name, call_jaxpr=closed)
