"""Search over serving configurations, vectorised: meshes, scheduling policies, micro-batches, tiers; throughput ranked
under latency targets.
"""

from __future__ import annotations

import itertools
import time as clock
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from jcuts.base.errors import UsageError
from jcuts.plan.cost.inference import ServingCost, ServingCosts, check, costs_at, serve_many
from jcuts.plan.cost.serving_plan import Serving, Servings
from jcuts.plan.search.no_plan import NoPlanError
from jcuts.plan.search.plan import TIERS
from jcuts.plan.search.plan_space import divisors
from jcuts.plan.search.ranked import LEAST, RESOLUTION
from jcuts.plan.spec.cluster import GIB, Cluster
from jcuts.plan.spec.layers import Model

MICRO = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 512)
COUNTS = (1, 2, 3, 4, 8, 16)
TENTHS = 10
"""Sequences per micro-batch, micro-batches in flight per replica, and steps of the share of weights on the GPU that are
tried."""


@dataclass(frozen=True)
class Demand:
    """What is to be served.

    Attributes:
        prompt, generate: tokens in and out per sequence. micro: sequences per micro-batch (None: search). batches:
        micro-batches of the whole batch over all replicas (None: search). weights, activations: the tier that all of
        them live in (None: search). token_latency, first_token: seconds at most (None: any). rank: ``throughput`` or
        ``latency``, which is what comes first.
    """

    prompt: int
    generate: int
    micro: int | None = None
    batches: int | None = None
    weights: str | None = None
    activations: str | None = None
    token_latency: float | None = None
    first_token: float | None = None
    rank: str = "throughput"


@dataclass(frozen=True)
class Served:
    """Result: the best configuration of each mesh and policy, best first; ``considered`` and ``fitting`` ones."""

    ranked: tuple[ServingCost, ...]
    considered: int
    fitting: int
    seconds: float


def search(model: Model, cluster: Cluster, demand: Demand, *, top: int = 10) -> Served:
    """Ranks serving configurations on all GPUs of a cluster, one of each (data, tensor, pipeline) and policy.

    Ties: less memory over all tiers, then fewer GPUs per replica.
    Raises: UsageError for a model that cannot be served or a tier that the cluster lacks; NoPlanError if nothing fits
        or no configuration meets the latency targets, with the nearest.
    """
    check(model, demand.generate)
    if len(cluster.groups) > 1:
        raise UsageError(f"cluster {cluster.name} has unequal nodes: serve on each kind alone", cluster=cluster.name)
    begun = clock.perf_counter()
    plans = space(model, cluster, demand)
    found = serve_many(model, cluster, plans)
    short = found.short(cluster)
    fits = ~short.any(0)
    if not fits.any():
        i = int(np.argmin(short.sum(0)))
        lacks = ", ".join(f"{TIERS[k]} memory by {short[k, i] / GIB:.1f} GiB" for k in range(3) if short[k, i])
        raise NoPlanError(
            f"{model.name} cannot be served on {cluster.gpus} GPUs of {cluster.name} ({len(plans)} plans tried): the "
            f"nearest is short of {lacks}",
            short={TIERS[k]: float(short[k, i]) for k in range(3) if short[k, i]},
            change="more GPUs or memory",
        )
    quick = fits & (found.step <= (demand.token_latency or np.inf)) & (found.first <= (demand.first_token or np.inf))
    if not quick.any():
        raise NoPlanError(
            f"{model.name} on {cluster.gpus} GPUs of {cluster.name}: no plan meets the latency targets: at best "
            f"{found.first[fits].min():.3g} s to the first token and {found.step[fits].min() * 1000:.3g} ms per token",
            short={},
            change="a looser target",
        )
    best = _best_of_each(model, cluster, demand, plans, found, np.flatnonzero(quick), top)
    ranked = costs_at(model, cluster, plans, best)
    if demand.batches:  # replicas that do not divide them run some empty
        ranked = [_of_batches(cost, demand.batches) for cost in ranked]
    return Served(tuple(ranked), len(plans), int(np.count_nonzero(fits)), clock.perf_counter() - begun)


def _of_batches(cost: ServingCost, batches: int) -> ServingCost:
    """The speed of what was asked for, where replicas' micro-batches are more than that."""
    plan = cost.plan
    return replace(cost, tokens_per_second=cost.tokens_per_second * batches / (plan.count * plan.data))


def _best_of_each(
    model: Model, cluster: Cluster, demand: Demand, plans: Servings, found: ServingCosts, where: NDArray, top: int
) -> list[int]:
    """Positions of the best configuration of every mesh and policy."""
    whole = found.first + found.decode
    keys = [whole if demand.batches else 1 / found.per_second, found.step if demand.generate else found.first]
    if demand.rank == "latency":
        keys.reverse()
    memory = np.sum([found.memory[name] for name in TIERS], axis=0)
    levels = [np.round(np.log(np.maximum(key[where], LEAST)) * RESOLUTION) for key in (*keys, memory)]
    order = where[np.lexsort((plans["tensor"][where] * plans["pipeline"][where], *reversed(levels)))]
    made: dict[tuple, int] = {}
    streamed = (plans["weights_on_gpu"] < 1) | (plans["activations"] != 0)
    kind = np.where(~streamed, 0, np.where(plans["group"] == 1, 1, 2))
    for i in order.tolist():
        made.setdefault((*(int(plans[name][i]) for name in ("data", "tensor", "pipeline")), int(kind[i])), i)
        if len(made) == top:
            break
    return list(made.values())


def space(model: Model, cluster: Cluster, demand: Demand) -> Servings:
    """Every combination of mesh, micro-batches, group, weights on the GPU, and tiers.

    Raises: UsageError for a tier that the cluster does not have.
    """
    have = [name for index, name in enumerate(TIERS) if not index or cluster.tier(index) is not None]
    for name in (demand.weights, demand.activations):
        if name is not None and name not in have:
            raise UsageError(f"cluster {cluster.name} has no [{name}]: it has {', '.join(have)}", tier=name)
    scans = cluster.host is not None and cluster.host.scan > 0
    caches = have if demand.generate else ["gpu"]
    rows = []
    for data, tensor, pipeline in _meshes(model, cluster.gpus):
        weights = _weights(have, demand, -(-model.layers // pipeline))
        counts = [-(-demand.batches // data)] if demand.batches else COUNTS
        for micro, count in itertools.product([demand.micro] if demand.micro else MICRO, counts):
            for group, (fraction, tier), cache in itertools.product(divisors(count), weights, caches):
                waits = [demand.activations] if demand.activations else have if fraction < 1 else ["gpu"]
                for wait in waits if group > 1 else [wait_alone(demand)]:
                    attention = cache == "host" and scans
                    tiers = (TIERS.index(tier), TIERS.index(cache), TIERS.index(wait))
                    rows.append((data, tensor, pipeline, micro, count, group, fraction, *tiers, attention))
    names = ("data", "tensor", "pipeline", "micro", "count", "group", "weights_on_gpu", "weights", "cache")
    names += ("activations", "host_attention")
    columns = {name: np.array(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)}
    columns |= {name: np.full(len(rows), getattr(demand, name)) for name in ("prompt", "generate")}
    return Servings({field.name: columns[field.name] for field in fields(Serving)})


def wait_alone(demand: Demand) -> str:
    """Where a micro-batch alone keeps its hidden state: nowhere but on the GPU, if not said otherwise."""
    return demand.activations or "gpu"


def _weights(have: list[str], demand: Demand, layers: int) -> list[tuple[float, str]]:
    """(share on the GPU, tier of the rest): whole ones of a stage's layers, as many as each tenth has."""
    below = [name for name in have if name != "gpu"]
    if demand.weights == "gpu" or not below:
        return [(1.0, "host")]
    if demand.weights is not None:
        return [(0.0, demand.weights)]
    kept = sorted({tenth * layers // TENTHS for tenth in range(TENTHS)})
    return [(1.0, below[0]), *((count / layers, tier) for count in kept for tier in below)]


def _meshes(model: Model, gpus: int) -> list[tuple[int, int, int]]:
    """(data, tensor, pipeline) with product ``gpus``; the tensor axis divides heads, stages have layers."""
    return [
        (gpus // (t * p), t, p)
        for t in divisors(gpus)
        if model.tensor_limit % t == 0
        for p in divisors(gpus // t)
        if p <= model.layers
    ]
