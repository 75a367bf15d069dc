"""Per-device layer times and tensor sizes of a model under a plan's mesh axes.

Few combinations of (micro, tensor, context, expert, sequence-parallel) occur among many plans: each is costed once and
gathered, which is what makes the exhaustive search fast.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from jcuts.plan.cost import collectives
from jcuts.plan.cost.compute import Shape, block_time
from jcuts.plan.search.plan import Plans
from jcuts.plan.spec.cluster import Cluster
from jcuts.plan.spec.layers import Block, Model

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class LayerCost:
    """Seconds per micro-batch of all layers together (``body``) or of one edge block; arrays over plans.

    ``*_tensor``, ``*_context`` and ``*_expert`` are those axes' communication of the same pass; ``*_host`` what the
    host needs to launch it; ``last`` and ``last_tensor`` the end of a layer that a backward pass does not need.
    """

    forward: Floats
    backward: Floats
    inner: Floats
    last: Floats
    forward_tensor: Floats
    last_tensor: Floats
    backward_tensor: Floats
    forward_context: Floats
    backward_context: Floats
    forward_expert: Floats
    forward_host: Floats
    backward_host: Floats
    inner_host: Floats


def layer_costs(model: Model, cluster: Cluster, plans: Plans) -> tuple[LayerCost, LayerCost, LayerCost]:
    """(all layers of the body, embedding, head) for every plan."""
    names = ("micro", "tensor", "context", "expert", "sequence_parallel")
    columns = np.stack([np.asarray(plans[name], dtype=np.int64) for name in names])
    code = np.zeros(columns.shape[1], dtype=np.int64)
    for column in columns:
        code = code * (int(column.max(initial=0)) + 1) + column
    _, first, back = np.unique(code, return_index=True, return_inverse=True)
    micro, tensor, context, expert = (columns[row][first].astype(np.float64) for row in range(4))
    shape = Shape(micro, tensor, context, expert, columns[4][first].astype(bool), model.experts)
    body = _sum([_block(block, cluster, shape, block.count) for block in model.blocks])
    nothing = LayerCost(*(np.zeros(len(first)) for _ in LayerCost.__dataclass_fields__))
    embed = _block(model.embed, cluster, shape, 1) if model.embed else nothing
    head = _block(model.head, cluster, shape, 1) if model.head else nothing
    return tuple(LayerCost(*(part[back] for part in _parts(cost))) for cost in (body, embed, head))  # type: ignore[return-value]


def _parts(cost: LayerCost) -> list[Floats]:
    return [getattr(cost, name) for name in LayerCost.__dataclass_fields__]


def _sum(costs: list[LayerCost]) -> LayerCost:
    return LayerCost(*(np.sum(parts, axis=0) for parts in zip(*map(_parts, costs), strict=True)))


def _block(block: Block, cluster: Cluster, shape: Shape, count: int) -> LayerCost:
    gpu, intra, inter, node = cluster.gpu, cluster.intra, cluster.inter, cluster.gpus_per_node
    time = block_time(block, gpu, shape)
    t, c, e = shape.tensor, shape.context, shape.expert
    moved = block.boundary * shape.micro / c
    reduce = collectives.all_reduce(intra, inter, t, np.minimum(t, node), moved)
    gather = collectives.all_gather(intra, inter, t, np.minimum(t, node), moved)
    # With sequence parallelism an all-reduce becomes an all-gather and a reduce-scatter, and the backward pass gathers
    # the divided inputs once more for the weights' gradients (arXiv 2205.05198, section 4.2.2).
    ahead = block.reductions * np.where(shape.sequence_parallel, 2 * gather, reduce)
    behind = ahead + np.where(shape.sequence_parallel, block.reductions * gather, 0.0)
    inside = np.maximum(np.minimum(c, node // t), 1)
    keys = collectives.all_gather(intra, inter, c, inside, block.context_bytes * shape.micro / t)
    near = np.maximum(np.minimum(e, node // np.maximum(t * c, 1)), 1)
    sent = block.exchange_bytes * shape.micro / (c * np.where(shape.sequence_parallel, t, 1.0))
    exchange = block.exchanges * collectives.all_to_all(intra, inter, e, near, sent)
    calls = block.reductions * (t > 1) + block.exchanges * (e > 1)
    parts = (
        time.forward,
        time.backward,
        time.inner,
        time.last,
        ahead,
        ahead / max(block.reductions, 1),
        behind,
        keys,
        2 * keys,
        exchange,
        (time.kernels_forward + calls) * gpu.launch,
        (time.kernels_backward + calls) * gpu.launch,
        time.kernels_inner * gpu.launch,
    )
    return LayerCost(*(count * part for part in parts))


@dataclass(frozen=True)
class Sizes:
    """Bytes per GPU of the fullest pipeline stage; arrays over plans.

    parameters: values held before ZeRO, of which experts and embedding tables; saved_layer: bytes kept per layer and
    micro-batch under the plan's recomputation; full_layer: bytes that one layer's forward pass makes; boundary: bytes
    between layers.
    """

    layers: Floats
    parameters: Floats
    layer_parameters: Floats
    expert_parameters: Floats
    table_parameters: Floats
    saved_layer: Floats
    full_layer: Floats
    boundary: Floats
    head_saved: Floats
    embed_saved: Floats


def stage_layers(model: Model, plans: Plans) -> NDArray[np.int64]:
    """Layers of the fullest stage: whole layers, distributed over pipeline x chunks."""
    places = plans["pipeline"] * plans["chunks"]
    return -(-model.layers // places) * plans["chunks"]


def table_share(model: Model, plans: Plans) -> Floats | float:
    """Share of all embedding tables that a GPU holds: whole tables over the table axis, rows over the row axis."""
    if not model.tables:
        return 1.0
    counts, back = np.unique(plans["table"], return_inverse=True)
    return np.array([model.largest_share(int(count)) for count in counts])[back] / plans["row"]


def replicas(plans: Plans) -> tuple[Floats, Floats, Floats]:
    """GPUs that hold the same dense parameters, the same experts, the same embedding-table rows."""
    every = (plans["data"] * plans["context"]).astype(np.float64)
    return every, every / plans["expert"], every / (plans["table"] * plans["row"])


def sharded(model: Model, plans: Plans, held: Sizes, level: int) -> Floats:
    """Parameter values per GPU of what ZeRO ``level`` shards: each kind over the GPUs that hold the same."""
    dense, experts, tables = (np.where(plans["zero"] >= level, count, 1.0) for count in replicas(plans))
    if model.experts == 1 and not model.tables:
        return held.parameters / dense
    rest = np.maximum(held.parameters - held.expert_parameters - held.table_parameters, 0.0)
    return rest / dense + held.expert_parameters / experts + held.table_parameters / tables


def sizes(model: Model, plans: Plans, autodiff: bool = False) -> Sizes:
    """Parameters and activations per GPU.

    Activations per layer and sample: saved_replicated (divided by t only with sequence parallelism) + saved_tensor / t
    + saved_inner / t; selective recomputation drops saved_inner, full keeps the boundary alone.  ``autodiff``: as JAX
    keeps them; a layer that is made again is fused, and is counted as ever.
    """
    t, c = plans["tensor"].astype(np.float64), plans["context"].astype(np.float64)
    layers = stage_layers(model, plans).astype(np.float64)
    total = model.layers
    per = 1.0 / total
    held = (
        sum(b.count * b.parameters for b in model.blocks) * per / t
        + sum(b.count * b.replicated for b in model.blocks) * per
    )
    experts = sum(b.count * b.expert_parameters for b in model.blocks) * per / (t * plans["expert"])
    deal = np.asarray(table_share(model, plans))
    tables = sum(b.count * sum(b.tables) for b in model.blocks) * per * deal
    largest = np.max(
        [
            b.parameters / t + b.replicated + b.expert_parameters / (t * plans["expert"]) + sum(b.tables) * deal
            for b in model.blocks
        ],
        0,
    )
    edges = [b for b in (model.embed, model.head) if b is not None]
    edge = [b.parameters / t + b.replicated + sum(b.tables) * deal for b in edges]
    edge_tables = sum(sum(b.tables) for b in edges) * deal
    first = edge[0] if model.embed is not None else 0.0
    last = edge[-1] if model.head is not None else 0.0
    alone = np.where(
        plans["pipeline"] == 1, first + (0.0 if model.tied and len(edge) == 2 else last), np.maximum(first, last)
    )
    share = plans["micro"] / c
    spread = np.where(plans["sequence_parallel"] == 1, t, 1.0)
    spans = np.array([1 / t, 1 / spread, 1 / t])  # of what a GPU keeps: divided, replicated, of the attention core
    counts = np.array([b.count for b in model.blocks]) * per
    mean = [counts @ np.array([b.kept(form) for b in model.blocks]) for form in (False, autodiff)]
    boundary = sum(b.count * b.boundary for b in model.blocks) * per
    edge_bytes = share * boundary / spread
    full, whole = (share * (part @ spans) for part in mean)
    kept = np.choose(plans["recompute"], [whole, whole - share * mean[1][2] / t, edge_bytes])
    head = (
        share * (model.head.saved_tensor / t + model.head.saved_replicated / spread)
        if model.head
        else np.zeros(len(plans))
    )
    first_kept = np.zeros(len(plans))
    if model.embed is not None:
        first_kept = share * (model.embed.saved_tensor / t + model.embed.saved_replicated / spread)
    return Sizes(
        layers=layers,
        parameters=np.maximum(layers * (held + experts + tables), largest) + alone,
        layer_parameters=held + experts,
        expert_parameters=layers * experts,
        table_parameters=layers * tables + edge_tables,
        saved_layer=kept,
        full_layer=full,
        boundary=edge_bytes,
        head_saved=head,
        embed_saved=first_kept,
    )
