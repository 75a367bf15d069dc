"""Programs over several devices: what may become a custom call without a hidden all-gather.

A custom call is opaque to XLA's partitioner, which gathers a sharded operand in full before it.  So a jaxpr whose
values are spread over devices by the partitioner is planned only where its equations are shard-local, inside
``shard_map`` (see ``local``); everything else is left to XLA as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from jcuts.trace import jaxapi


class Placement(NamedTuple):
    """Shardings of the flat dynamic arguments of a concrete call that uses several devices.

    Hashable: a parameter of the primitive and part of the key of a program.
    """

    shardings: tuple[Any, ...]

    @classmethod
    def of(cls, leaves: Sequence[Any]) -> Placement | None:
        """The placement of concrete arguments, or None if they all live on one device."""
        arrays = [leaf for leaf in leaves if isinstance(leaf, jax.Array) and not jaxapi.is_tracer(leaf)]
        if all(len(a.sharding.device_set) == 1 for a in arrays):
            return None
        return cls(tuple(leaf.sharding if leaf is not None and isinstance(leaf, jax.Array) else None
                         for leaf in leaves))


def lowering_is_partitioned(ctx: Any) -> bool:
    """Whether XLA's partitioner will spread this lowering rule's values over several devices.

    Inside ``shard_map`` over the whole mesh values are local already: false there.
    """
    site = jaxapi.lowering_site(ctx)
    return site.devices > 1 and not site.manual
