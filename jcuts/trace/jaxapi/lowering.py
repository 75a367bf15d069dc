"""Lowering to StableHLO: context of a lowering rule, and inline emission of a jaxpr."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax._src import sharding_impls as _sharding_impls
from jax._src.interpreters import mlir as _mlir

from jcuts.trace.jaxapi.types import Closed


class LoweringSite(NamedTuple):
    """What a lowering rule knows of its module: platforms, devices, manual axes.

    Attributes:
        platforms: names such as ``cpu`` or ``cuda``; more than one only when exporting.
        devices: number of devices of the computation.  manual: whether avals are shard-local (all mesh axes are
        manual, as inside ``shard_map``).  for_export: the result will be serialised.  symbolic: shapes have
        unknown dimensions.  processes: whether devices of several processes run the computation.
    """

    platforms: tuple[str, ...]
    devices: int
    manual: bool
    for_export: bool
    symbolic: bool
    processes: bool = False


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
    for_export = bool(module.lowering_parameters.for_export)
    return LoweringSite(platforms, devices, manual, for_export, symbolic, _spans_processes(axis, devices))


def _spans_processes(axis: Any, devices: int) -> bool:
    """Whether a computation's devices belong to several processes; assumed where its devices are not known."""
    if jax.process_count() == 1 or devices == 1:
        return False
    known = getattr(axis, "device_assignment", None)
    if known is None and isinstance(getattr(axis, "mesh", None), jax.sharding.Mesh):
        known = axis.mesh.devices.flat
    return known is None or len({device.process_index for device in known}) > 1


def lower_closed(ctx: Any, args: Sequence[Any], closed: Closed, name: str) -> Sequence[Any]:
    """Emits a closed jaxpr inline at a lowering rule's position, effect tokens included."""
    return _mlir.core_call_lowering(ctx, *args, name=name, call_jaxpr=closed)
