"""Memory model: peak bytes per GPU, and bytes per node in each offload tier."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from jcuts.plan.cost.sharded_sizes import Floats, Sizes, sharded
from jcuts.plan.search.plan import SCHEDULES, Plans
from jcuts.plan.spec.cluster import Cluster
from jcuts.plan.spec.layers import BYTES, Model
from jcuts.plan.spec.workload import Training

GPIPE = SCHEDULES.index("gpipe")


@dataclass(frozen=True)
class Memory:
    """Bytes; arrays over plans.  The parts add up to ``gpu``; ``host`` and ``storage`` are per node."""

    parameters: Floats
    gradients: Floats
    optimizer: Floats
    activations: Floats
    working: Floats
    gpu: Floats
    host: Floats
    storage: Floats

    def tier(self, index: int) -> Floats:
        """0 GPU, 1 host, 2 storage."""
        return (self.gpu, self.host, self.storage)[index]


def in_flight(plans: Plans, micro_batches: NDArray, autodiff: bool = False) -> Floats:
    """Micro-batches whose activations the first pipeline stage holds at once.

    GPipe: all, with one stage too (one loop of forward passes, then the backward ones); 1F1B: p; interleaved:
    p (1 + (p-1)/(p v)) (Narayanan et al., arXiv 2104.04473, 2.2).  With one stage otherwise: one, or with tensors
    offloaded, the group that shares a layer's parameters.

    ``autodiff``: GPipe is a loop over m + p - 1 ticks, which stacks up every tick's; a tick's own are there once more.
    """
    p, v = plans["pipeline"].astype(np.float64), plans["chunks"]
    flown = np.choose(plans["schedule"], [micro_batches, p, p + (p - 1) / v])
    flown = np.where((p == 1) & (plans["schedule"] != GPIPE), 1.0, flown)
    flown = np.minimum(np.maximum(flown, plans["group"]), micro_batches)
    if not autodiff:
        return flown
    turns = ticks(plans, micro_batches)
    return np.where(plans["schedule"] == GPIPE, turns + (turns > 1), flown)


def ticks(plans: Plans, micro_batches: NDArray) -> Floats:
    """Iterations of the loop over micro-batches, idle ones of a stage (pipeline bubble) included."""
    return micro_batches + plans["pipeline"] - 1.0


def training_memory(model: Model, cluster: Cluster, plans: Plans, held: Sizes, work: Training) -> Memory:
    """Sizes of every tensor class where the plan puts it, plus what a stage works with.

    GPU = parameters + gradients + optimiser state (sharded by zero) + kept activations x micro-batches in flight
          + one layer's working set + buffers for what is streamed + reserved
    """
    micro_batches = np.maximum(work.batch // np.maximum(plans["data"] * plans["micro"], 1), 1)
    amounts = {
        "parameters": BYTES * sharded(model, plans, held, 3),
        "gradients": work.gradient_bytes * sharded(model, plans, held, 2),
        "optimizer": work.state_bytes * sharded(model, plans, held, 1),
    }
    replicas = (plans["data"] * plans["context"]).astype(np.float64)
    flown = in_flight(plans, micro_batches, work.autodiff)
    amounts["activations"] = flown * (held.layers * held.saved_layer + held.embed_saved)
    # Streamed tensors need two buffers: the one in use and the one on its way.
    layer = BYTES * held.layer_parameters
    buffers = {
        "parameters": 2 * layer,
        "gradients": work.gradient_bytes * held.layer_parameters,
        "optimizer": 2 * (work.state_bytes / BYTES) * layer / np.where(plans["zero"] >= 1, replicas, 1.0),
        "activations": 2 * held.saved_layer + 2 * held.boundary,
    }
    on_gpu, below = {}, {1: np.zeros(len(plans)), 2: np.zeros(len(plans))}
    for name, amount in amounts.items():
        where = plans[name]
        on_gpu[name] = np.where(where == 0, amount, np.minimum(buffers[name], amount))
        # A tier keeps every micro-batch's activations, not only those in flight on the GPU.
        stored = amount if name != "activations" else np.maximum(flown, plans["group"]) * held.layers * held.saved_layer
        for tier in (1, 2):
            below[tier] += np.where(where == tier, stored, 0.0) * cluster.gpus_per_node
    # One layer at work: its gradients, and under full recomputation the activations that it makes again; with zero 3
    # the gathered parameters of the layer and the next.  The last stage holds logits too: of one micro-batch, under
    # GPipe of all.
    again = np.where(plans["recompute"] == 2, held.full_layer, held.boundary)
    gathered = np.where(plans["zero"] == 3, 2 * layer, 0.0)
    alone = np.where(
        plans["pipeline"] == 1,
        held.head_saved,
        np.maximum(held.head_saved - (flown - 1) * held.layers * held.saved_layer, 0),
    )
    last = np.where(plans["schedule"] == GPIPE, flown * held.head_saved, alone)
    working = again + 2 * held.boundary + gathered + last
    gpu = sum(on_gpu.values()) + working + cluster.gpu.reserved
    return Memory(working=working, gpu=gpu, host=below[1], storage=below[2], **on_gpu)
