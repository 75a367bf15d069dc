"""Enumerates the plan space: every combination of mesh axes that divides the model and the cluster, in chunks of
arrays.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, fields

import numpy as np

from jcuts.base.errors import UsageError
from jcuts.plan.search.plan import RECOMPUTE, SCHEDULES, TIERS, Plan, Plans
from jcuts.plan.spec.cluster import Cluster
from jcuts.plan.spec.layers import Model
from jcuts.plan.spec.workload import Training

CHUNK = 200_000
_NAMES = tuple(field.name for field in fields(Plan))


@dataclass(frozen=True)
class Space:
    """Bounds of the plan search.

    Attributes:
        tensor, pipeline, context, expert: largest size of an axis (None: as the model allows). micro: largest
        micro-batch. schedules, recompute, zero: allowed values. chunks: largest number of layer chunks per stage.
        offload: tiers that tensors may leave the GPU for.
    """

    tensor: int | None = None
    pipeline: int | None = None
    context: int | None = None
    expert: int | None = None
    micro: int = 64
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


def tier_choices(model: Model, cluster: Cluster, space: Space) -> list[tuple[int, int, int, int]]:
    """(parameters, gradients, optimiser, activations) as tier indices.

    Gradients live on the GPU or with the parameters: anywhere else costs more and saves nothing.
    """
    have = [0] + [TIERS.index(name) for name in space.offload if cluster.tier(TIERS.index(name)) is not None]
    made = []
    for p, g, o, a in itertools.product(sorted(have), repeat=4):
        if g in (0, p):
            made.append((p, g, o, a))
    return made


def chunks(model: Model, cluster: Cluster, gpus: int, work: Training, space: Space) -> Iterator[Plans]:
    """All plans for ``gpus`` GPUs, about ``CHUNK`` at a time."""
    tiers = np.array(tier_choices(model, cluster, space))
    held: list[np.ndarray] = []
    count = 0
    for d, t, p, c in arrangements(model, gpus, space):
        if work.batch % d:
            continue
        experts = (
            [e for e in divisors(d) if model.experts % e == 0 and e <= (space.expert or e)]
            if model.experts > 1
            else [1]
        )
        zero = [z for z in space.zero if z == 0 or d * c > 1] or [0]
        parallel = [0, 1] if t > 1 else [0]
        for micro in divisors(work.batch // d):
            if micro > space.micro:
                break
            block = _block((d, t, p, c), experts, micro, zero, parallel, tiers, model, work, space)
            held.append(block)
            count += block.shape[1]
            if count >= CHUNK:
                yield _plans(held)
                held, count = [], 0
    if held:
        yield _plans(held)


def _plans(held: list[np.ndarray]) -> Plans:
    rows = np.concatenate(held, axis=1)
    return Plans(**dict(zip(_NAMES, rows, strict=True)))


def _block(
    dims: tuple[int, int, int, int],
    experts: list[int],
    micro: int,
    zero: list[int],
    parallel: list[int],
    tiers: np.ndarray,
    model: Model,
    work: Training,
    space: Space,
) -> np.ndarray:
    """Columns of plans (rows in the order of ``Plan``'s fields) for one arrangement and micro-batch."""
    d, t, p, c = dims
    count = work.batch // (d * micro)
    schedules = _schedules(p, count, model.layers, space)
    recompute = [RECOMPUTE.index(name) for name in space.recompute]
    # A group of micro-batches shares a visit to a layer: matters only where something is streamed.
    groups = sorted({1, max(1, round(count**0.5)), count})
    placed = [
        (*choice, g) for choice in tiers.tolist() for g in (groups if choice[0] or choice[1] or choice[3] else [1])
    ]
    place = np.array(placed)
    schedule = np.array(schedules)
    grids = np.meshgrid(
        experts, zero, np.arange(len(schedule)), recompute, parallel, np.arange(len(place)), indexing="ij"
    )
    e, z, s, r, q, w = (grid.ravel() for grid in grids)
    constant = np.ones(len(e), dtype=np.int64)
    columns = [
        d * constant,
        t * constant,
        p * constant,
        c * constant,
        e,
        micro * constant,
        z,
        schedule[s, 0],
        schedule[s, 1],
        r,
        q,
        *(place[w, i] for i in range(4)),
        place[w, 4],
    ]
    return np.stack(columns)


def _schedules(p: int, count: int, layers: int, space: Space) -> list[tuple[int, int]]:
    """(schedule, chunks) that a pipeline of p stages allows; one stage has no schedule."""
    if p == 1:
        return [(1, 1)]
    made = []
    for name in space.schedules:
        code = SCHEDULES.index(name)
        if name != "interleaved":
            made.append((code, 1))
        elif count % p == 0:  # Megatron's interleaving deals micro-batches in rounds of p
            made += [(code, v) for v in range(2, space.chunks + 1) if layers % (p * v) == 0]
    return made or [(1, 1)]
