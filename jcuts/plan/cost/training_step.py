"""Cost model of a training step under each plan: compute, collectives, pipeline bubble, offload transfers, and their
overlap.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from jcuts.plan.cost import collectives
from jcuts.plan.cost.memory import GPIPE, Memory, ticks, training_memory
from jcuts.plan.cost.sharded_sizes import Floats, LayerCost, Sizes, layer_costs, sharded, sizes
from jcuts.plan.search.plan import Plans
from jcuts.plan.spec.cluster import Cluster
from jcuts.plan.spec.layers import BYTES, Model
from jcuts.plan.spec.workload import Training


@dataclass(frozen=True)
class StepTime:
    """Seconds of a training step by part; arrays over plans.  The parts add up to ``total``.

    compute: matrix products and streams of the stage that has most; recompute: those done again; tensor, context,
    expert, pipeline, embedding, gradients: exposed communication of each axis; launch: waiting for the host; bubble:
    idle pipeline; tiers: waiting for host memory and storage in forward and backward; optimizer: the update with its
    own transfers; overhead: fixed.
    """

    compute: Floats
    recompute: Floats
    tensor: Floats
    context: Floats
    expert: Floats
    pipeline: Floats
    embedding: Floats
    gradients: Floats
    launch: Floats
    bubble: Floats
    tiers: Floats
    optimizer: Floats
    overhead: Floats

    @property
    def total(self) -> Floats:
        """Seconds of the step."""
        return np.sum([getattr(self, part) for part in PARTS], axis=0)


PARTS = tuple(field.name for field in fields(StepTime))


@dataclass(frozen=True)
class Estimate:
    """Time and memory of every plan."""

    time: StepTime
    memory: Memory
    sizes: Sizes


def estimate(model: Model, cluster: Cluster, plans: Plans, work: Training) -> Estimate:
    """Predicts time and memory of plans; feasibility is checked by `search.exhaustive`.

    step = m (slot + messages) + bubble + gradients + tiers + optimiser + overhead
    slot = the fullest stage's forward, backward and recomputation of one micro-batch
    bubble = (p - 1)/v slots of an average stage
    """
    held = sizes(model, plans, work.autodiff)
    body, embed, head = layer_costs(model, cluster, plans)
    micro_batches = work.batch / (plans["data"] * plans["micro"])
    p, v = plans["pipeline"], plans["chunks"]
    share = np.maximum(held.layers / model.layers, model.heaviest)  # of the body that the fullest stage has
    first, last = _edge(embed, plans), _edge(head, plans)
    passes = _passes(body, plans, work.pruned)
    # Casts and sums of a stage's parameters in every micro-batch; under zero 3 of those that were gathered.
    speed = cluster.gpu.bandwidth * cluster.gpu.memory_efficiency
    traffic = work.micro_traffic - (1 - model.casts) * work.cast_traffic
    cast = (traffic * held.parameters + _stacked(model, plans, held, work, micro_batches)) / speed
    # Edge blocks sit in the first and the last stage; the heavier of the two sets the pace.
    heavier = np.where(p == 1, first["total"] + last["total"], np.maximum(first["total"], last["total"]))
    stage = {name: share * value for name, value in passes.items()}
    message = _messages(model, cluster, plans, held)
    bubble = (p - 1) / v * (stage["total"] + cast + message)
    compute = micro_batches * (stage["compute"] + heavier + cast)
    busy = micro_batches * (stage["total"] + heavier + cast) + bubble
    time = StepTime(
        compute=compute,
        recompute=micro_batches * stage["recompute"],
        tensor=micro_batches * stage["tensor"],
        context=micro_batches * stage["context"],
        expert=micro_batches * stage["expert"],
        pipeline=micro_batches * message,
        embedding=micro_batches * _lookups(model, cluster, plans),
        gradients=_gradients(model, cluster, plans, held, work, stage["backward"], micro_batches),
        launch=micro_batches * stage["launch"],
        bubble=bubble,
        tiers=_tiers(cluster, plans, held, work, micro_batches, busy),
        optimizer=_optimizer(model, cluster, plans, held, work),
        overhead=np.full(len(plans), work.overhead),
    )
    return Estimate(time, training_memory(model, cluster, plans, held, work), held)


def _passes(cost: LayerCost, plans: Plans, pruned: bool = False) -> dict[str, Floats]:
    """Forward, backward and recomputation of one micro-batch; the host may be slower than the device in each.

    ``pruned``: full recomputation leaves out each layer's end, which the backward pass does not need.
    """
    rc = plans["recompute"]
    ahead_comm = cost.forward_tensor + cost.forward_context + cost.forward_expert
    behind_comm = cost.backward_tensor + cost.backward_context + cost.forward_expert
    repeated = cost.forward - cost.last if pruned else cost.forward
    repeated_tensor = cost.forward_tensor - cost.last_tensor if pruned else cost.forward_tensor
    again = np.choose(rc, [np.zeros(len(plans)), cost.inner, repeated])
    again_comm = np.where(rc == 2, repeated_tensor + cost.forward_context + cost.forward_expert, 0.0)
    device = (cost.forward + ahead_comm, cost.backward + behind_comm + again + again_comm)
    host = (
        cost.forward_host,
        cost.backward_host + np.choose(rc, [np.zeros(len(plans)), cost.inner_host, cost.forward_host]),
    )
    launch = np.maximum(host[0] - device[0], 0) + np.maximum(host[1] - device[1], 0)
    full = np.where(rc == 2, 1.0, 0.0)
    return {
        "compute": cost.forward + cost.backward,
        "recompute": again,
        "tensor": cost.forward_tensor + full * repeated_tensor + cost.backward_tensor,
        "context": cost.forward_context * (1 + full) + cost.backward_context,
        "expert": cost.forward_expert * (2 + full),
        "launch": launch,
        "backward": np.maximum(device[1], host[1]),
        "total": device[0] + device[1] + launch,
    }


def _stacked(model: Model, plans: Plans, held: Sizes, work: Training, micro_batches: Floats) -> Floats:
    """Bytes that a micro-batch moves beside its kernels to keep activations in the stacks of a JAX step's loops.

        3 k                 the loop over layers: zeros fill the stack, a turn writes its part, backward reads it
        5 (k + logits)      GPipe, differentiated as a loop over ticks: zeros fill its stack, a tick's part is copied
                            into it and out of it again (no kernel fuses across the edge of a loop)

    k: bytes kept per micro-batch under the plan's recomputation.  One turn is no loop, nor are layers that differ (of a
    user's function).
    """
    if not work.autodiff:
        return np.zeros(len(plans))
    kept = held.layers * held.saved_layer
    nested = (plans["schedule"] == GPIPE) & (ticks(plans, micro_batches) > 1)
    looped = (held.layers > 1) & any(block.count > 1 for block in model.blocks)
    return np.where(looped, 3 * kept, 0.0) + np.where(nested, 5 * (kept + held.head_saved), 0.0)


def _edge(cost: LayerCost, plans: Plans) -> dict[str, Floats]:
    """An embedding or head: never recomputed."""
    device = cost.forward + cost.backward + cost.forward_tensor + cost.backward_tensor
    return {"total": np.maximum(device, cost.forward_host + cost.backward_host)}


def _messages(model: Model, cluster: Cluster, plans: Plans, held: Sizes) -> Floats:
    """Exposed seconds per micro-batch and stage: v activations ahead, v gradients behind.

    Each GPU of a tensor group sends its part; without sequence parallelism the receivers gather it (scatter/gather
    optimisation, arXiv 2104.04473, 4.1).
    """
    p, t, c = plans["pipeline"], plans["tensor"], plans["context"]
    node = cluster.gpus_per_node
    boundary = sum(block.count * block.boundary for block in model.blocks) / model.layers * plans["micro"] / c
    crosses = p * t * c * plans["data"] > node
    one = collectives.point_to_point(cluster.intra, cluster.inter, crosses, boundary / t)
    gather = collectives.all_gather(cluster.intra, cluster.inter, t, np.minimum(t, node), boundary)
    one = one + np.where(plans["sequence_parallel"] == 1, 0.0, gather)
    return np.where(p > 1, 2 * plans["chunks"] * one * (1 - cluster.overlap_pipeline), 0.0)


def _lookups(model: Model, cluster: Cluster, plans: Plans) -> Floats:
    """Seconds per micro-batch of exchanging what divided embedding tables give: all-to-alls, one forward, one backward.

    Whole tables on each rank pool before they send; rows of one table lie on several ranks, which send them unpooled.
    """
    over = plans["table"] * plans["row"]
    if not model.tables:
        return np.zeros(len(plans))
    moved = plans["micro"] * np.where(plans["row"] > 1, model.lookup_rows, model.lookup_pooled) / plans["context"]
    inside = np.maximum(np.minimum(over, cluster.gpus_per_node // np.maximum(plans["tensor"] * plans["context"], 1)), 1)
    return 2 * collectives.all_to_all(cluster.intra, cluster.inter, over, inside, moved)


def _gradients(
    model: Model, cluster: Cluster, plans: Plans, held: Sizes, work: Training, backward: Floats, micro_batches: Floats
) -> Floats:
    """Exposed seconds of reducing gradients and of gathering sharded parameters.

    zero 0: all-reduce; 1: reduce-scatter, then all-gather of updated parameters; 2: a reduce-scatter per micro-batch;
    3: besides, parameters gathered in each forward and backward (and recomputation shares the backward's).  What may
    hide does so behind the backward passes.  Parameters of experts are reduced among the data ranks that share them.
    """
    intra, inter, node = cluster.intra, cluster.inter, cluster.gpus_per_node
    t, z = plans["tensor"], plans["zero"]
    replicas = plans["data"] * plans["context"]
    inside = np.maximum(node // t, 1)
    dense = held.parameters - held.expert_parameters - held.table_parameters
    time = np.zeros(len(plans))
    hideable = np.zeros(len(plans))
    groups = [(dense, replicas, inside)]
    if model.experts > 1:
        groups.append((held.expert_parameters, replicas // plans["expert"], np.maximum(inside // plans["expert"], 1)))
    if model.tables:
        over = plans["table"] * plans["row"]
        groups.append((held.table_parameters, replicas // over, np.maximum(inside // over, 1)))
    for values, members, near in groups:
        size = work.gradient_bytes * values
        reduce = collectives.all_reduce(intra, inter, members, near, size)
        scatter = collectives.reduce_scatter(intra, inter, members, near, size)
        gather = collectives.all_gather(intra, inter, members, near, BYTES * values)
        time += np.choose(
            z, [reduce, scatter + gather, micro_batches * scatter + gather, micro_batches * (scatter + 2 * gather)]
        )
        hideable += np.choose(z, [reduce, scatter, micro_batches * scatter, micro_batches * (scatter + 2 * gather)])
    behind = np.where(z >= 2, micro_batches, 1.0) * backward
    hidden = np.minimum(cluster.overlap_gradients * hideable, behind)
    tied = 0.0
    if model.tied and model.embed is not None:
        divided = model.embed.parameters > 0
        shared = work.gradient_bytes * (model.embed.parameters / t if divided else model.embed.replicated)
        pair = collectives.all_reduce(intra, inter, 2, np.where(t * replicas * plans["pipeline"] > node, 1, 2), shared)
        tied = np.where(plans["pipeline"] > 1, pair, 0.0)
    return time - hidden + tied


def _optimizer(model: Model, cluster: Cluster, plans: Plans, held: Sizes, work: Training) -> Floats:
    """The update: its own memory traffic, and the state's way from and to its tier, which nothing hides (thesis
    4.1.2)."""
    gpu, busy = cluster.gpu, cluster.gpus_per_node
    values = sharded(model, plans, held, 1)
    time = values * work.optimizer_traffic / (gpu.bandwidth * gpu.memory_efficiency)
    for index in (1, 2):
        tier = cluster.tier(index)
        if tier is None:
            continue
        read, write = tier.per_gpu(busy)
        state = values * work.state_bytes * np.where(plans["optimizer"] == index, 1.0, 0.0)
        inward = state + values * work.gradient_bytes * (plans["gradients"] == index)
        outward = state + values * BYTES * (plans["parameters"] == index)
        time = time + _moved(index, inward / read, outward / write)
    return time


def _tiers(
    cluster: Cluster, plans: Plans, held: Sizes, work: Training, micro_batches: Floats, busy_time: Floats
) -> Floats:
    """Exposed seconds of streaming parameters, gradients and activations in forward and backward.

    With groups of g micro-batches per layer visit: parameters are read twice (forward, backward) per group; gradients
    are written once per group and, but for the first, read; activations are written and read once per micro-batch, and
    when g > 1 the running activation and its gradient are parked between layers besides.
    Source: thesis 4.1.2, with micro-batch reuse of parameters, which its formulas lack.
    """
    groups = np.ceil(micro_batches / plans["group"])
    shards = np.where(plans["zero"] == 3, plans["data"] * plans["context"], 1)
    parameters = BYTES * held.parameters / shards
    gradients = (
        work.gradient_bytes * held.parameters / np.where(plans["zero"] >= 2, plans["data"] * plans["context"], 1)
    )
    kept = micro_batches * held.layers * held.saved_layer
    parked = np.where(plans["group"] > 1, 2 * micro_batches * held.layers * held.boundary, 0.0)
    exposed = np.zeros(len(plans))
    for index in (1, 2):
        tier = cluster.tier(index)
        if tier is None:
            continue
        read, write = tier.per_gpu(cluster.gpus_per_node)
        here = {name: plans[name] == index for name in ("parameters", "gradients", "activations")}
        inward = 2 * groups * parameters * here["parameters"]
        inward = inward + (groups - 1) * gradients * here["gradients"] + (kept + parked) * here["activations"]
        outward = groups * gradients * here["gradients"] + (kept + parked) * here["activations"]
        moved = _moved(index, inward / read, outward / write)
        exposed += np.maximum(moved - cluster.overlap_tiers * busy_time, 0.0)
    return exposed


def _moved(tier: int, read: Floats, write: Floats) -> Floats:
    """PCIe carries both directions at once; a disk does one or the other."""
    return np.maximum(read, write) if tier == 1 else read + write
