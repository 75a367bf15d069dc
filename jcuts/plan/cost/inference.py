"""Cost model of transformer inference on many GPUs: prefill and decoding with a KV cache over data, tensor and pipeline
axes, weights streamed from a tier in parameter-resident or activation-resident order.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from jcuts.base.errors import UsageError
from jcuts.plan.cost import collectives
from jcuts.plan.cost.serving_plan import Serving, Servings
from jcuts.plan.search.plan import TIERS
from jcuts.plan.spec.cluster import GIB, Cluster
from jcuts.plan.spec.layers import BYTES, Gemm, Model

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class ServingCosts:
    """Costs of many configurations: seconds, tokens (or, without decoding, sequences) per second, bytes per tier.

    Attributes: first: seconds from the batch's arrival to its last first token (prefill); step: seconds per further
    token; parts: seconds of one prefill visit and one decoding step by what takes them; memory: bytes per GPU, and per
    node in host memory and storage; held: bytes of one GPU's weights, cache, waiting hidden states and working set.
    """

    first: Floats
    step: Floats
    decode: Floats
    per_second: Floats
    parts: dict[str, Floats]
    memory: dict[str, Floats]
    held: dict[str, Floats]

    def short(self, cluster: Cluster) -> Floats:
        """Bytes that each tier is short by, rows GPU, host, storage."""
        pairs = zip(TIERS, cluster.capacities, strict=True)
        return np.stack([np.maximum(self.memory[name] - capacity, 0.0) for name, capacity in pairs])


def serve_many(model: Model, cluster: Cluster, plans: Servings) -> ServingCosts:
    """Costs many serving configurations; each of ``data`` replicas serves ``count`` micro-batches.

        visit   = max(compute of a group, weights of a stage over the link + what else moves)
        prefill = (groups + pipeline - 1) visits            groups = ceil(count / group)
        step    = max(groups, pipeline) visits of one token
        GPU     = per micro-batch max(FLOP / speed, weights and cache read from GPU memory), plus launches, reductions
            over the tensor axis and the message to the next stage

    Weights are read once per visit of a group: parameter-resident scheduling reads them once per pass,
    activation-resident once per micro-batch; a group of more than one parks each layer's hidden states in
    ``activations``.  Within a layer a micro-batch's attention waits for its projections, so host attention adds to the
    GPU's time; transfers run beside both.  FLOP: 2 per weight and token, 4 h per cached token and layer.

    Source: scheduling policies: thesis 4.1.2; overlap and host attention: FlexGen (arXiv 2303.06865), section 4.
    """
    gpu = cluster.gpu
    t, p = plans["tensor"].astype(np.float64), plans["pipeline"]
    micro, count, group = (plans[name].astype(np.float64) for name in ("micro", "count", "group"))
    prompt, generate = plans["prompt"].astype(np.float64), plans["generate"].astype(np.float64)
    share = np.ceil(model.layers / p) / model.layers
    groups = np.ceil(count / group)
    stream = gpu.bandwidth * gpu.memory_efficiency
    weights = _stage_weights(model, p) * share_of(p, share) / t
    below = (1 - plans["weights_on_gpu"]) * weights
    cache_token = np.where(generate > 0, model.cache_bytes, 0.0) * share / t
    flops_token, attention = 2 * _weights_used(model) * share / t, 4 * model.layers * model.hidden * share / t
    launches = _launches(model, 1) * share
    hidden = BYTES * model.hidden * micro
    # Time on the GPU of one micro-batch in a stage: prefill, and one token at the mean length.
    work = micro * prompt * (flops_token + attention * prompt / 2)
    pass_ = work / (gpu.peak * gpu.gemm_efficiency) + launches * (gpu.launch + gpu.kernel_gap)
    mean = prompt + generate / 2
    products = micro * flops_token / (gpu.skinny or gpu.peak * gpu.gemm_efficiency)
    on_gpu = np.where(plans["host_attention"], 0.0, micro * mean * cache_token)
    once = np.maximum(products, weights / stream) + on_gpu / stream + launches * max(gpu.launch, gpu.kernel_gap)
    sent = [_communication(model, cluster, plans, share, size) for size in (hidden * prompt, hidden)]
    # Transfers of one visit of a group.
    up = _moved(cluster, plans["weights"], below, 0.0)
    kept = group * micro * prompt * cache_token
    cache_in = np.where(plans["host_attention"], 0.0, group * micro * mean * cache_token)
    parked = np.where(group > 1, group * hidden * np.ceil(model.layers / p), 0.0)
    act = [_moved(cluster, plans["activations"], parked * n, parked * n) for n in (prompt, 1.0)]
    cache_down, cache_up = _moved(cluster, plans["cache"], 0.0, kept), _moved(cluster, plans["cache"], cache_in, 0.0)
    apart = plans["activations"] != plans["weights"]  # other tiers: at the same time
    first_move = np.where(apart, np.maximum(up, act[0]), up + act[0])
    step_move = np.where(apart, np.maximum(up, act[1]), up + act[1])
    host = np.where(plans["host_attention"], group * micro * mean * cache_token / (_scan(cluster) or np.inf), 0.0)
    visit = np.maximum.reduce([group * (pass_ + sent[0]), first_move, cache_down])
    turn = np.maximum(step_move + cache_up, group * (once + sent[1]) + host)
    first = (groups + p - 1) * visit
    step = np.where(generate > 0, np.maximum(groups, p) * turn, 0.0)
    decode = step * np.maximum(generate - 1, 0)
    seconds = first + decode
    made = plans["data"] * count * micro * np.maximum(generate, 1)
    parts = {
        "prefill compute": groups * group * pass_,
        "prefill transfers": groups * np.maximum(first_move, cache_down),
        "prefill messages": groups * group * sent[0],
        "weights per step": groups * up,
        "gpu per step": groups * group * once,
        "messages per step": groups * group * sent[1],
        "host per step": groups * host,
        "cache per step": groups * cache_up,
    }
    memory, held = _memory(model, cluster, plans, weights, cache_token, parked * prompt / np.ceil(model.layers / p))
    return ServingCosts(first, step, decode, made / seconds, parts, memory, held)


def _stage_weights(model: Model, p: NDArray) -> Floats:
    """Bytes of all weights; of a pipeline those of its layers and of the larger of the two ends, as if all stages had
    it."""
    edges = [block.total_parameters for block in (model.embed, model.head) if block is not None]
    body = sum(block.count * block.total_parameters for block in model.blocks)
    return BYTES * np.where(p == 1, model.total_parameters, body + max(edges, default=0.0) * p)


def share_of(p: NDArray, share: Floats) -> Floats:
    """Share of a pipeline's weights in its fullest stage."""
    return np.where(p == 1, 1.0, share)


def _communication(model: Model, cluster: Cluster, plans: Servings, share: Floats, size: Floats) -> Floats:
    """Seconds per micro-batch and stage: two all-reduces per layer over the tensor axis, one message to the next
    stage."""
    t, node = plans["tensor"], cluster.gpus_per_node
    reduce = collectives.all_reduce(cluster.intra, cluster.inter, t, np.minimum(t, node), size)
    crosses = t * plans["pipeline"] > node
    send = collectives.point_to_point(cluster.intra, cluster.inter, crosses, size / t)
    return 2 * model.layers * share * reduce + np.where(plans["pipeline"] > 1, send, 0.0)


def _moved(cluster: Cluster, where: NDArray, read: Floats | float, write: Floats | float) -> Floats:
    """Seconds to move bytes in and out of each plan's tier: PCIe does both at once, a disk one or the other."""
    time = np.zeros(where.shape)
    for index in (1, 2):
        tier = cluster.tier(index)
        if tier is None:
            continue
        inward, outward = tier.per_gpu(cluster.gpus_per_node)
        here = (
            np.maximum(read / inward, np.zeros(1) + write / outward) if index == 1 else read / inward + write / outward
        )
        time = np.where(where == index, here, time)
    return time


def _scan(cluster: Cluster) -> float:
    return cluster.host.scan if cluster.host is not None else 0.0


def _memory(
    model: Model, cluster: Cluster, plans: Servings, weights: Floats, cache_token: Floats, parked: Floats
) -> tuple[dict[str, Floats], dict[str, Floats]]:
    """(bytes per GPU, and per node in the tiers; bytes of one GPU's tensors by class, wherever they lie).

    GPU = resident weights + two layers' buffers + working set + cache + hidden states that wait + reserved
    """
    t = plans["tensor"].astype(np.float64)
    layer = BYTES * max(block.total_parameters for block in model.blocks) / t
    resident = plans["weights_on_gpu"]
    tokens = plans["prompt"] + plans["generate"]
    cache = plans["micro"] * plans["count"] * tokens * cache_token
    # Hidden state and the feed-forward's inside of the micro-batch at work.
    working = BYTES * plans["micro"] * plans["prompt"] * model.hidden * (1 + 4 / t)
    buffers = 2 * layer * (1 - resident)
    on_gpu = resident * weights + buffers + working + cluster.gpu.reserved + np.where(plans["cache"] == 0, cache, 0.0)
    streamed = (plans["cache"] != 0) & ~plans["host_attention"].astype(bool)
    layers = np.ceil(model.layers / plans["pipeline"])
    on_gpu = on_gpu + np.where(streamed, 2 * plans["micro"] * tokens * cache_token / layers, 0.0)
    waiting = np.where(plans["activations"] == 0, np.maximum(parked - BYTES * model.hidden * plans["micro"], 0.0), 0.0)
    parking = parked * np.ceil(plans["count"] / plans["group"])
    classes = {
        "weights": weights,
        "KV cache": cache,
        "hidden states": np.where(plans["activations"] == 0, waiting, parking),
        "working": working + buffers,
    }
    made = {"gpu": on_gpu + waiting}
    for index, name in enumerate(TIERS[1:], 1):
        held = np.where(plans["weights"] == index, (1 - resident) * weights, 0.0)
        held = held + np.where(plans["cache"] == index, cache, 0.0)
        held = held + np.where(plans["activations"] == index, parking, 0.0)
        made[name] = held * cluster.gpus_per_node
    return made, classes


@dataclass(frozen=True)
class ServingCost:
    """Seconds of prefill, per decoding step and of all of them, generated tokens/s (without decoding: sequences/s),
    bytes per tier, what does not fit (empty: all does), and bytes of one GPU's tensors by class."""

    plan: Serving
    prefill: float
    step: float
    decode: float
    tokens_per_second: float
    parts: dict[str, float]
    memory: dict[str, float]
    short: str
    held: dict[str, float]

    def to_json(self) -> dict[str, object]:
        """A JSON object."""
        made: dict[str, object] = {field.name: getattr(self, field.name) for field in fields(self)}
        return made | {"plan": asdict(self.plan), "policy": self.plan.policy}

    @property
    def bound(self) -> str:
        """What the time is spent on: of the prefill, or of a decoding step where there is one."""
        stage = "per step" if self.decode > self.prefill else "prefill"
        name = max((part for part in self.parts if stage in part), key=lambda part: self.parts[part])
        words = name.replace(" per step", "").replace("prefill ", "")
        tier = self.plan.weights if words in ("weights", "transfers") else self.plan.cache
        return f"{tier} link" if words in ("weights", "transfers", "cache") else words


def serve(model: Model, cluster: Cluster, plan: Serving) -> ServingCost:
    """Costs one serving configuration; see ``serve_many``.

    Raises: UsageError for a model without a decoder, or a tier that the cluster lacks.
    """
    check(model, plan.generate)
    for name in ("weights",) * (plan.weights_on_gpu < 1) + ("cache", "activations"):
        tier = getattr(plan, name)
        if tier != "gpu" and cluster.tier(TIERS.index(tier)) is None:
            raise UsageError(f"cluster {cluster.name} has no [{tier}]: nothing can live there", tier=tier)
    if plan.host_attention and (plan.cache != "host" or not _scan(cluster)):
        raise UsageError("host_attention needs the cache on the host and a cluster whose [host] has scan_gbs")
    return costs_at(model, cluster, Servings.of([plan]), [0])[0]


def check(model: Model, generate: int) -> None:
    """Raises UsageError for a model that cannot generate, or has no tokens at all."""
    if not model.hidden:
        raise UsageError(
            f"{model.name} is no transformer that the planner knows: --serve needs a preset (jcuts plan --list) or a "
            "TOML file of a transformer; a function's layers do not say what its key-value cache is",
            model=model.name,
        )
    if generate and not model.cache_bytes:
        raise UsageError(
            f"{model.name} is no transformer decoder: it has no prefill and decoding (its forward pass: "
            "--serve PROMPT 0)",
            model=model.name,
        )


def costs_at(model: Model, cluster: Cluster, plans: Servings, positions: Iterable[int]) -> list[ServingCost]:
    """The costs of some configurations as records."""
    positions = list(positions)
    chosen = Servings({name: column[positions] for name, column in plans.columns.items()})
    found = serve_many(model, cluster, chosen)
    short = found.short(cluster)
    made = []
    for i in range(len(positions)):
        lacks = [f"{TIERS[k]} memory short by {short[k, i] / GIB:.1f} GiB" for k in range(3) if short[k, i]]
        numbers = (found.first[i], found.step[i], found.decode[i], found.per_second[i])
        parts = {name: float(np.broadcast_to(value, found.first.shape)[i]) for name, value in found.parts.items()}
        memory, held = (
            {name: float(np.broadcast_to(value, found.first.shape)[i]) for name, value in amounts.items()}
            for amounts in (found.memory, found.held)
        )
        first, step, decode, speed = map(float, numbers)
        made.append(ServingCost(chosen.plan(i), first, step, decode, speed, parts, memory, ", ".join(lacks), held))
    return made


def _weights_used(model: Model) -> float:
    """Weights that a token meets: of a mixture only the chosen experts, and not the embedding tables."""
    blocks = [(block.count, block) for block in model.blocks] + ([(1, model.head)] if model.head else [])
    total = 0.0
    for count, block in blocks:
        for op in block.operations:
            if isinstance(op, Gemm) and op.per_sample == "m":
                total += count * op.m / model.sequence * op.n * op.k * op.copies
    return total


def _launches(model: Model, each: float) -> float:
    return each * sum(block.count * len(block.operations) for block in model.blocks)


def largest_batch(model: Model, cluster: Cluster, plan: Serving, *, limit: int = 4096) -> ServingCost | None:
    """The plan with the largest micro-batch that fits (None if not even one sequence does)."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if serve(model, cluster, replace(plan, micro=middle)).short:
            high = middle - 1
        else:
            low = middle
    return serve(model, cluster, replace(plan, micro=low)) if low else None
