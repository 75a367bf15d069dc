"""Alpha-beta (latency-bandwidth) cost model of collectives: rings and trees on one or two levels of links.

All arguments may be NumPy arrays that broadcast; bytes are per GPU before the collective (all-gather: after it).
Source: Thakur, Rabenseifner, Gropp, "Optimization of collective communication operations in MPICH" (2005).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from jcuts.plan.spec.cluster import Link

Floats = NDArray[np.float64]


def _ring(link: Link, members: ArrayLike, size: ArrayLike, passes: float) -> Floats:
    """``passes`` times around: passes (n - 1) hops, passes (n - 1)/n of the bytes; 0 for one member."""
    n = np.asarray(members, dtype=np.float64)
    size = np.asarray(size, dtype=np.float64)
    time = link.call + passes * (n - 1) * link.hop + passes * (n - 1) / n * size / link.effective
    return np.where((n > 1) & (size > 0), time, 0.0)


def _tree_all_reduce(link: Link, members: ArrayLike, size: ArrayLike) -> Floats:
    """Double binary tree: 2 log2(n) hops, every byte up and down once."""
    n = np.asarray(members, dtype=np.float64)
    size = np.asarray(size, dtype=np.float64)
    time = link.call + 2 * np.log2(np.maximum(n, 1)) * link.hop + 2 * size / link.effective
    return np.where((n > 1) & (size > 0), time, 0.0)


def _levels(members: ArrayLike, inside: ArrayLike) -> tuple[Floats, Floats]:
    """Members of one node, and nodes."""
    n = np.asarray(members, dtype=np.float64)
    near = np.minimum(np.maximum(np.asarray(inside, dtype=np.float64), 1), n)
    return near, np.ceil(n / near)


def all_reduce(intra: Link, inter: Link, members: ArrayLike, inside: ArrayLike, size: ArrayLike) -> Floats:
    """All-reduce of ``size`` bytes among ``members`` GPUs, ``inside`` of them per node.

    Within a node a ring (2 (n-1)/n S/BW); across nodes a reduce-scatter inside, the faster of ring and tree between
    nodes on the share, and an all-gather inside: what NCCL does, whose trees are between nodes only.
    """
    near, nodes = _levels(members, inside)
    flat = _ring(intra, near, size, 2)
    share = np.asarray(size, dtype=np.float64) / near
    between = np.minimum(_ring(inter, nodes, share, 2), _tree_all_reduce(inter, nodes, share))
    return flat + np.where(nodes > 1, between, 0.0)


def all_gather(intra: Link, inter: Link, members: ArrayLike, inside: ArrayLike, size: ArrayLike) -> Floats:
    """All-gather to ``size`` bytes (and reduce-scatter from them, which costs the same)."""
    near, nodes = _levels(members, inside)
    share = np.asarray(size, dtype=np.float64) / near
    return _ring(intra, near, size, 1) + _ring(inter, nodes, share, 1)


reduce_scatter = all_gather


def all_to_all(intra: Link, inter: Link, members: ArrayLike, inside: ArrayLike, size: ArrayLike) -> Floats:
    """All-to-all of ``size`` bytes per GPU: (n-1)/n leave the GPU, those for other nodes through the slower link."""
    near, nodes = _levels(members, inside)
    n = near * nodes
    size = np.asarray(size, dtype=np.float64)
    local = _ring(intra, near, size * near / n, 1)
    far = np.where(nodes > 1, inter.call + (nodes - 1) * inter.hop + (n - near) / n * size / inter.effective, 0.0)
    return local + np.where(size > 0, far, 0.0)


def point_to_point(intra: Link, inter: Link, crosses: ArrayLike, size: ArrayLike) -> Floats:
    """One message of ``size`` bytes; ``crosses`` says where it leaves the node."""
    size = np.asarray(size, dtype=np.float64)
    near = intra.call + size / intra.effective
    far = inter.call + size / inter.effective
    return np.where(size > 0, np.where(crosses, far, near), 0.0)
