"""Sharding analysis: which programs over several devices can become custom calls without a hidden all-gather.

A custom call is opaque to XLA's partitioner, which gathers a sharded operand in full before it.  So a jaxpr whose
values are spread over devices by the partitioner is planned only where its equations are shard-local, inside
``shard_map`` (`primitive.shard_local`); everything else is left to XLA as it is.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from jcuts.trace import jaxapi


class Placement(NamedTuple):
    """Shardings of the flat dynamic arguments of a concrete call; empty when they live on one device.

    Hashable: a parameter of the primitive and part of the key of a program.
    """

    shardings: tuple[Any, ...]

    @classmethod
    def of(cls, leaves: Sequence[Any]) -> Placement:
        """The placement of concrete arguments."""
        arrays = [leaf for leaf in leaves if isinstance(leaf, jax.Array) and not jaxapi.is_tracer(leaf)]
        if all(len(a.sharding.device_set) == 1 for a in arrays):
            return cls(())
        return cls(tuple(leaf.sharding if isinstance(leaf, jax.Array) else None for leaf in leaves))

    @property
    def processes(self) -> tuple[int, ...]:
        """Numbers of the processes whose devices hold the arguments (`jax.process_index`), in order."""
        sets = [sharding.device_set for sharding in self.shardings if sharding is not None]
        return tuple(sorted({device.process_index for devices in sets for device in devices}))

    @property
    def spans_processes(self) -> bool:
        """Whether the call is one of several processes (multi-controller SPMD), which must all run the same program."""
        return jax.process_count() > 1 and len(self.processes) > 1


class OtherPlacement(Exception):
    """A program made for one placement is being lowered for another.  `jit.optimized` catches it and decides anew."""


class _Expected(threading.local):
    placement: Placement | None = None
    agreed: bool = False


expected = _Expected()
"""The placement of the call that ``api`` is making on this thread, and whether processes have agreed on its program.

JAX keeps one jaxpr for all placements of the same types and lowers it again for each: only here can a program notice
that its arguments came with other shardings than it was made for.
"""


def lowering_is_partitioned(ctx: Any) -> bool:
    """Whether XLA's partitioner will spread this lowering rule's values over several devices.

    Inside ``shard_map`` over the whole mesh values are local already: false there.
    """
    site = jaxapi.lowering_site(ctx)
    return site.devices > 1 and not site.manual
