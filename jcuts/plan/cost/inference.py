"""Cost model of transformer inference: prefill and decoding with a KV cache, batch as a variable, weights streamed from
a tier.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace

import numpy as np

from jcuts.base.errors import UsageError
from jcuts.plan.cost import collectives
from jcuts.plan.search.plan import TIERS
from jcuts.plan.spec.cluster import Cluster
from jcuts.plan.spec.layers import BYTES, Gemm, Model


@dataclass(frozen=True)
class Serving:
    """A serving configuration on ``tensor`` GPUs (tensor parallelism).

    Attributes:
        prompt, generate: tokens in and out per sequence.
        micro: sequences that run through a layer together; count: such micro-batches per layer visit (they share its
        weights).
        weights_on_gpu: fraction of the weights that stays; the rest streams from ``weights``.
        cache: tier of the key-value cache; host_attention: the host computes attention over a cache that it keeps, so
            that the cache never crosses the link.
    """

    prompt: int
    generate: int
    micro: int
    count: int = 1
    weights_on_gpu: float = 1.0
    weights: str = "host"
    cache: str = "gpu"
    host_attention: bool = False
    tensor: int = 1

    def __post_init__(self) -> None:
        for name in ("prompt", "generate", "micro", "count", "tensor"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name}={getattr(self, name)} must be at least 1", **{name: getattr(self, name)})
        if not 0 <= self.weights_on_gpu <= 1:
            raise UsageError(f"weights_on_gpu={self.weights_on_gpu} must be in [0, 1]", value=self.weights_on_gpu)
        for name, known in (("weights", TIERS[1:]), ("cache", TIERS)):
            if getattr(self, name) not in known:
                raise UsageError(f"{name}={getattr(self, name)!r} is unknown: choose one of {known}", name=name)

    @property
    def batch(self) -> int:
        """Sequences in flight."""
        return self.micro * self.count


@dataclass(frozen=True)
class ServingCost:
    """Seconds of prefill and of all decoding steps, generated tokens/s, bytes per tier, and what does not fit (empty:
    all does)."""

    plan: Serving
    prefill: float
    decode: float
    tokens_per_second: float
    parts: dict[str, float]
    memory: dict[str, float]
    short: str

    def to_json(self) -> dict[str, object]:
        """A JSON object."""
        made: dict[str, object] = {field.name: getattr(self, field.name) for field in fields(self)}
        return made | {"plan": asdict(self.plan)}


def serve(model: Model, cluster: Cluster, plan: Serving) -> ServingCost:
    """Costs one serving configuration.

        prefill = max(compute, weights over the link, cache written below)
        step    = max(weights over the link + cache over the link, GPU + attention on the host)
        GPU     = per micro-batch max(FLOP / speed, weights and cache read from GPU memory), plus launches and
        reductions

    Within a layer a micro-batch's attention waits for its projections, so host attention adds to the GPU's time;
    transfers run beside both.  FLOP: 2 per weight and token, 4 h per cached token and layer.
    Raises: UsageError for a model without a cache (not a transformer) or a tier that the cluster lacks.
    """
    if not model.cache_bytes:
        raise UsageError(f"{model.name} is no transformer: it has no prefill or decoding", model=model.name)
    gpu, t = cluster.gpu, plan.tensor
    weights = BYTES * model.total_parameters / t
    below = (1 - plan.weights_on_gpu) * weights
    cache_token = model.cache_bytes / t
    tokens = plan.prompt + plan.generate
    flops_token = 2 * _weights_used(model) / t
    attention = 4 * sum(block.count for block in model.blocks) * model.hidden / t
    stream = gpu.bandwidth * gpu.memory_efficiency
    # --- prefill: like a forward pass of the training model
    work = plan.batch * plan.prompt * (flops_token + attention * plan.prompt / 2)
    compute = work / (gpu.peak * gpu.gemm_efficiency) + plan.count * _launches(model, gpu.launch + gpu.kernel_gap)
    reductions = 2 * model.layers
    hidden_bytes = BYTES * model.hidden * plan.micro
    reduce = [
        float(
            plan.count
            * reductions
            * collectives.all_reduce(cluster.intra, cluster.inter, t, cluster.gpus_per_node, size)
        )
        for size in (hidden_bytes * plan.prompt, hidden_bytes)
    ]
    down, up_cache = 0.0, 0.0
    if plan.cache != "gpu":
        read, write = _speed(cluster, plan.cache)
        down = plan.batch * plan.prompt * cache_token / write
        up_cache = 0.0 if plan.host_attention else plan.batch * (plan.prompt + plan.generate / 2) * cache_token / read
    up = below / _speed(cluster, plan.weights)[0] if below else 0.0
    prefill = max(compute + reduce[0], up, down)
    # --- one decoding step at the mean length
    mean = plan.prompt + plan.generate / 2
    products = plan.micro * flops_token / (gpu.skinny or gpu.peak * gpu.gemm_efficiency)
    on_gpu = plan.micro * mean * cache_token if not plan.host_attention else 0.0
    once = max(products, weights / stream) + on_gpu / stream + _launches(model, max(gpu.launch, gpu.kernel_gap))
    host = 0.0
    if plan.host_attention:
        if plan.cache != "host" or cluster.host is None or not cluster.host.scan:
            raise UsageError("host_attention needs the cache on the host and a cluster whose [host] has scan_gbs")
        host = plan.batch * mean * cache_token / cluster.host.scan
    step = max(up + up_cache, plan.count * once + reduce[1] + host)
    decode = step * (plan.generate - 1)
    # --- memory
    layer = BYTES * max(block.total_parameters for block in model.blocks) / t
    cache = plan.batch * tokens * cache_token
    memory: dict[str, float] = dict.fromkeys(map(str, TIERS), 0.0)
    # Hidden state and the feed-forward's inside of the micro-batch at work.
    working = BYTES * plan.micro * plan.prompt * model.hidden * (1 + 4 / t)
    resident = plan.weights_on_gpu * weights
    memory["gpu"] = resident + 2 * layer * (1 - plan.weights_on_gpu) + working + gpu.reserved
    memory[plan.weights] += below * t
    memory[plan.cache] += cache * (1 if plan.cache == "gpu" else t)
    if plan.cache != "gpu":
        memory["gpu"] += 0.0 if plan.host_attention else 2 * plan.micro * tokens * cache_token / model.layers
    seconds = prefill + decode
    parts = {
        "prefill compute": compute,
        "weights per step": up,
        "gpu per step": plan.count * once,
        "host per step": host,
        "cache per step": up_cache,
    }
    return ServingCost(
        plan, prefill, decode, plan.batch * plan.generate / seconds, parts, memory, _short(cluster, memory)
    )


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


def _speed(cluster: Cluster, tier: str) -> tuple[float, float]:
    found = cluster.tier(TIERS.index(tier))
    if found is None:
        raise UsageError(f"cluster {cluster.name} has no [{tier}]: nothing can live there", tier=tier)
    return found.per_gpu(cluster.gpus_per_node)


def _short(cluster: Cluster, memory: dict[str, float]) -> str:
    lacks = []
    for index, name in enumerate(TIERS):
        tier = cluster.tier(index) if index else None
        capacity = cluster.gpu.memory if not index else tier.capacity if tier else 0.0
        if memory[name] > capacity:
            lacks.append(f"{name} memory short by {(memory[name] - capacity) / 2**30:.1f} GiB")
    return ", ".join(lacks)


def search(model: Model, cluster: Cluster, plans: Iterable[Serving]) -> list[ServingCost]:
    """Feasible configurations, most tokens/s first."""
    costs = [serve(model, cluster, plan) for plan in plans]
    return sorted((cost for cost in costs if not cost.short), key=lambda cost: -cost.tokens_per_second)


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


def space(model: Model, cluster: Cluster, prompt: int, generate: int, tensor: int = 1) -> list[Serving]:
    """Serving configurations: weight fractions in steps of 10 %, cache tiers, micro-batches 1..512, up to 16 of them
    per layer visit.
    """
    made = []
    tiers = [name for index, name in enumerate(TIERS[1:], 1) if cluster.tier(index) is not None]
    scans = cluster.host is not None and cluster.host.scan > 0
    for fraction in np.linspace(0, 1, 11) if tiers else [1.0]:
        for weights in tiers[:] if fraction < 1 else tiers[:1] or ["host"]:
            for cache in ["gpu", *tiers]:
                for micro in (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 512):
                    for count in (1, 2, 3, 4, 8, 16):
                        attention = cache == "host" and scans
                        made.append(
                            Serving(
                                prompt,
                                generate,
                                micro,
                                count,
                                float(round(fraction, 2)),
                                weights,
                                cache,
                                attention,
                                tensor,
                            )
                        )
    return made
