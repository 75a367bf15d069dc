"""List scheduling of a jaxpr for the fewest chains of kernel calls, and the chains of that order.

Other equations come as early as possible; then all kernels that are ready.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from jcuts.base.errors import IRError
from jcuts.trace import jaxapi
from jcuts.xla.chains.dataflow import Dataflow, is_kernel


@dataclass
class Chain:
    """Kernel calls that become one call, in order.

    Attributes:
        calls: equations.
        made: the values that they make (roots).
        outdated: values that a call has overwritten.
    """

    calls: list[Any] = field(default_factory=list)
    made: set[Any] = field(default_factory=set)
    outdated: set[Any] = field(default_factory=set)


def order_for_chains(eqns: Sequence[Any], reads: Dataflow) -> list[Any]:
    """The equations, reordered, with chains in place of kernel calls.

    A chain ends before a kernel that overwrites a value somebody else reads, and before one that reads what has been
    overwritten: XLA makes the copies that this takes, between calls.
    """
    found: list[Any] = []
    chain = Chain()
    for eqn in _order(eqns, reads):
        if not is_kernel(eqn):
            chain = Chain()
            found.append(eqn)
            continue
        operands = [a for a in reads.operands(eqn) if not jaxapi.is_literal(a)]
        updated = reads.overwritten_value(eqn)
        spoils = updated in chain.made and any(reader is not eqn for reader in reads.readers.get(updated, []))
        if not chain.calls or spoils or chain.outdated & set(operands):
            chain = Chain()
            found.append(chain)
        chain.calls.append(eqn)
        chain.made |= {v for v in eqn.outvars if not jaxapi.is_dropvar(v)}
        if updated is not None:
            chain.outdated.add(updated)
    return found


def _order(eqns: Sequence[Any], reads: Dataflow) -> list[Any]:
    """Topological order: alternately all ready equations that are not kernels, then all ready kernels."""
    needs = _needs(eqns, reads)
    users: list[list[int]] = [[] for _ in eqns]
    for k, mine in enumerate(needs):
        for maker in mine:
            users[maker].append(k)
    missing = [len(mine) for mine in needs]
    kinds = [is_kernel(eqn) for eqn in eqns]
    ready: tuple[list[int], list[int]] = ([], [])
    for k, count in enumerate(missing):
        if not count:
            ready[kinds[k]].append(k)  # ascending: a heap
    order: list[Any] = []
    kernels = False
    while any(ready):
        while ready[kernels]:
            k = heapq.heappop(ready[kernels])
            order.append(eqns[k])
            for user in users[k]:
                missing[user] -= 1
                if not missing[user]:
                    heapq.heappush(ready[kinds[user]], user)
        kernels = not kernels
    if len(order) < len(eqns):
        raise IRError("equations depend on each other in a cycle")
    return order


def _needs(eqns: Sequence[Any], reads: Dataflow) -> list[set[int]]:
    """Predecessors of every equation: producers of its operands, and the last equation with effects."""
    makers = {v: k for k, e in enumerate(eqns) for v in e.outvars if not jaxapi.is_dropvar(v)}
    needs: list[set[int]] = []
    last_effect: int | None = None
    for k, eqn in enumerate(eqns):
        mine = {makers[a] for a in reads.operands(eqn) if not jaxapi.is_literal(a) and a in makers}
        if eqn.effects:
            mine |= set() if last_effect is None else {last_effect}
            last_effect = k
        needs.append(mine)
    return needs
