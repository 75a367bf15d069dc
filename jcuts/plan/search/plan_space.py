"""Enumerates the plan space: every combination of mesh axes that divides the model and the cluster, in chunks of
arrays.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from jcuts.base.errors import UsageError
from jcuts.plan.search.plan import RECOMPUTE, SCHEDULES, TIERS, Plans
from jcuts.plan.spec.cluster import Cluster
from jcuts.plan.spec.layers import Model
from jcuts.plan.spec.workload import Training

CHUNK = 200_000
CLASSES = ("parameters", "gradients", "optimizer", "activations")
"""Tensor classes, each of which lives in one tier."""


@dataclass(frozen=True)
class Space:
    """Bounds of the plan search.

    Attributes:
        tensor, pipeline, context, expert: largest size of an axis (None: as the model allows). micro: largest
        micro-batch (None: any). Micro-batches share a visit to a layer one by one, all together, or in groups of the
        square root of their number. schedules, recompute, zero: allowed values. chunks: largest number of layer
        chunks per stage. offload: tiers that tensors may leave the GPU for.
    """

    tensor: int | None = None
    pipeline: int | None = None
    context: int | None = None
    expert: int | None = None
    micro: int | None = None
    chunks: int = 8
    schedules: tuple[str, ...] = SCHEDULES
    recompute: tuple[str, ...] = RECOMPUTE
    zero: tuple[int, ...] = (0, 1, 2, 3)
    offload: tuple[str, ...] = ("host", "storage")

    def __post_init__(self) -> None:
        for name, known in (
            ("schedules", SCHEDULES),
            ("recompute", RECOMPUTE),
            ("offload", TIERS[1:]),
            ("zero", (0, 1, 2, 3)),
        ):
            for value in getattr(self, name):
                if value not in known:
                    raise UsageError(f"{name}: {value!r} is unknown: choose from {known}", name=name, value=value)
        if not (self.schedules and self.recompute and self.zero):
            raise UsageError("a search space needs at least one schedule, one recomputation and one zero level")


def divisors(count: int) -> list[int]:
    """Divisors in rising order."""
    return [n for n in range(1, count + 1) if count % n == 0]


def arrangements(model: Model, gpus: int, space: Space) -> list[tuple[int, int, int, int]]:
    """(data, tensor, pipeline, context) with product ``gpus``; the tensor axis divides heads, stages have layers."""
    made = []
    for t in divisors(gpus):
        if t > min(model.tensor_limit, space.tensor or gpus) or model.tensor_limit % t:
            continue
        for p in divisors(gpus // t):
            if p > min(model.layers, space.pipeline or gpus):
                continue
            for c in divisors(gpus // (t * p)):
                if c <= min(model.context_limit, space.context or gpus) and model.context_limit % c == 0:
                    made.append((gpus // (t * p * c), t, p, c))
    return made


def tier_choices(cluster: Cluster, space: Space) -> list[tuple[int, int, int, int]]:
    """(parameters, gradients, optimiser, activations) as tier indices: every combination of the tiers there are."""
    have = [0] + [TIERS.index(name) for name in space.offload if cluster.tier(TIERS.index(name)) is not None]
    return list(itertools.product(sorted(have), repeat=4))  # type: ignore[arg-type]


def chunks(
    model: Model, cluster: Cluster, gpus: int, work: Training, space: Space, *, replicas: int = 0
) -> Iterator[Plans]:
    """All plans for ``gpus`` GPUs, about ``CHUNK`` at a time.

    ``replicas``: of an uneven cluster, ``gpus`` is one replica's, of which so many take what micro-batches they can:
    the batch need not be a multiple of them, and interleaving is left out.
    """
    tiers = np.array(tier_choices(cluster, space))
    held: list[dict[str, NDArray[np.int64]]] = []
    count = 0
    for d, t, p, c in arrangements(model, gpus, space):
        if (replicas and d > 1) or work.batch % d:
            continue
        data = replicas or d
        for micro in divisors(work.batch // d):
            if space.micro is not None and micro > space.micro:
                break
            micro_batches = -(-work.batch // (data * micro))
            block = _block(Mesh(data, t, p, c, micro), micro_batches, tiers, model, space, even=not replicas)
            held.append(block)
            count += len(block["data"])
            if count >= CHUNK:
                yield _plans(held)
                held, count = [], 0
    if held:
        yield _plans(held)


@dataclass(frozen=True)
class Mesh:
    """Sizes of the axes and the micro-batch of a block of plans."""

    data: int
    tensor: int
    pipeline: int
    context: int
    micro: int


def _plans(held: list[dict[str, NDArray[np.int64]]]) -> Plans:
    return Plans(**{name: np.concatenate([block[name] for block in held]) for name in held[0]})


def _table_axes(model: Model, data: int) -> list[tuple[int, int]]:
    """(table, row) sizes for embedding tables: table-wise as far as there are tables, row-wise beyond."""
    if not model.tables:
        return [(1, 1)]
    return [
        (table, over // table)
        for over in divisors(data)
        for table in divisors(over)
        if table <= len(model.tables) and over % table == 0
    ]


def _block(
    mesh: Mesh, micro_batches: int, tiers: NDArray, model: Model, space: Space, *, even: bool = True
) -> dict[str, NDArray[np.int64]]:
    """Plans of one arrangement and micro-batch, an array per field of ``Plan``."""
    schedules = _schedules(mesh.pipeline, micro_batches if even else 0, model.layers, space)
    recompute = [RECOMPUTE.index(name) for name in space.recompute]
    experts = [1]
    if model.experts > 1 and even:
        experts = [e for e in divisors(mesh.data) if model.experts % e == 0 and e <= (space.expert or e)]
    zero = [z for z in space.zero if z == 0 or mesh.data * mesh.context > 1] or [0]
    parallel = [0, 1] if mesh.tensor > 1 else [0]
    # A group of micro-batches shares a visit to a layer: matters only where something is streamed.
    groups = sorted({1, max(1, round(micro_batches**0.5)), micro_batches})
    placed = [
        (*choice, g) for choice in tiers.tolist() for g in (groups if choice[0] or choice[1] or choice[3] else [1])
    ]
    place, schedule = np.array(placed), np.array(schedules)
    tables = np.array(_table_axes(model, mesh.data if even else 1))
    grids = np.meshgrid(
        experts,
        zero,
        np.arange(len(schedule)),
        recompute,
        parallel,
        np.arange(len(place)),
        np.arange(len(tables)),
        indexing="ij",
    )
    e, z, s, r, q, w, b = (grid.ravel() for grid in grids)
    made = {name: np.full(len(e), size, dtype=np.int64) for name, size in vars(mesh).items()}
    made |= {"expert": e, "zero": z, "schedule": schedule[s, 0], "chunks": schedule[s, 1], "recompute": r}
    made |= {"sequence_parallel": q, "table": tables[b, 0], "row": tables[b, 1]}
    return made | {name: place[w, i] for i, name in enumerate((*CLASSES, "group"))}


def _schedules(p: int, count: int, layers: int, space: Space) -> list[tuple[int, int]]:
    """(schedule, chunks) that a pipeline of p stages allows; one stage has no schedule."""
    if p == 1:
        return [(1, 1)]
    made = []
    for name in space.schedules:
        code = SCHEDULES.index(name)
        if name != "interleaved":
            made.append((code, 1))
        elif count and count % p == 0:  # Megatron's interleaving deals micro-batches in rounds of p
            made += [(code, v) for v in range(2, space.chunks + 1) if layers % (p * v) == 0]
    return made or [(1, 1)]
