"""Tensor placement in memory tiers as a mixed-integer linear program (MILP) over the tensor classes of every layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from jcuts.base import solver_banner
from jcuts.base.errors import UsageError
from jcuts.plan.cost.sharded_sizes import sizes
from jcuts.plan.cost.training_step import estimate
from jcuts.plan.search.no_plan import NoPlanError
from jcuts.plan.search.plan import TIERS, Plan, Plans
from jcuts.plan.spec.cluster import Cluster
from jcuts.plan.spec.layers import BYTES, Model
from jcuts.plan.spec.workload import Training


@dataclass(frozen=True)
class Tensor:
    """A tensor class to place: bytes per GPU, and bytes read from and written to its tier per step if it is below the
    GPU.

    ``hidden``: whether its traffic runs beside forward and backward; the optimiser's does not.
    ``buffer``: bytes of GPU memory that streaming it takes.  ``layers``: whole layers that it is divided into (0: any
    fraction).
    """

    name: str
    bytes: float
    read: float
    write: float
    hidden: bool = True
    buffer: float = 0.0
    layers: int = 0


@dataclass(frozen=True)
class Placement:
    """``fractions[tensor][tier]`` add up to 1; ``exposed``: seconds of a step that wait for tiers; ``memory``: bytes
    per GPU.  Of tensors that are divided by layers, ``layers[tensor][tier]`` of them, and ``layer_bytes[tensor]`` of
    each on a GPU."""

    fractions: dict[str, dict[str, float]]
    exposed: float
    memory: dict[str, float]
    layers: dict[str, dict[str, int]] = field(default_factory=dict)
    layer_bytes: dict[str, float] = field(default_factory=dict)


def tensors_of(model: Model, cluster: Cluster, plan: Plan, work: Training) -> tuple[list[Tensor], float, float]:
    """(tensors of a plan, bytes of GPU memory that cannot move, seconds of forward and backward to hide traffic
    behind).

    Classes: parameters, gradients, optimiser state and activations, each divided into the layers of the fullest stage,
    so that some layers of a class can go to another tier.
    """
    everything = replace(plan, parameters="gpu", gradients="gpu", optimizer="gpu", activations="gpu")
    plans = Plans.of([everything])
    found = estimate(model, cluster, plans, work)
    held = sizes(model, plans, work.autodiff)
    layers = int(np.ceil(held.layers[0]))
    count = work.batch / (plan.data * plan.micro)
    visits = float(np.ceil(count / plan.group))
    memory = found.memory
    fixed = float(memory.working[0]) + cluster.gpu.reserved
    layer = BYTES * float(held.layer_parameters[0])
    kept = float(count * held.layers[0] * held.saved_layer[0])
    size = {name: float(getattr(memory, name)[0]) for name in ("parameters", "gradients", "optimizer", "activations")}
    p, g, o = size["parameters"], size["gradients"], size["optimizer"]
    made = [
        Tensor("parameters", p, 2 * visits * p, 0.0, True, 2 * layer, layers),
        Tensor("gradients", g, (visits - 1) * g, visits * g, True, 2 * layer, layers),
        Tensor("optimizer", o, o, o, False, layer, layers),
        Tensor("activations", size["activations"], kept, kept, True, 0.0, layers),
    ]
    total = found.time
    busy = float((total.total - total.optimizer - total.overhead)[0])
    return made, fixed, busy


def place(cluster: Cluster, tensors: Sequence[Tensor], fixed: float, busy: float) -> Placement:
    """Places tensors in tiers (MILP) to minimise the exposed transfer time of a step.

        minimise  hidden wait + sum over unhidden tensors of their transfer
        hidden wait >= traffic_tier / bandwidth - overlap busy         (per tier; read and write of storage add up)
        sum over tiers x[i, tier] = 1,   sum_i x[i, tier] bytes_i <= capacity,   x >= 0
        z[i] in {0, 1}, x[i, below] <= z[i]: a tensor that leaves the GPU at all pays its streaming buffers once
        x[i, tier] layers_i whole, of a tensor that is divided by layers

    Solved by HiGHS through cvxpy.
    Args: fixed: bytes of GPU memory that stay; busy: seconds of forward and backward.
    Raises: NoPlanError if it does not fit anywhere; UsageError without tensors.
    """
    import cvxpy as cp

    if not tensors:
        raise UsageError("there is nothing to place")
    tiers = [i for i in range(3) if i == 0 or cluster.tier(i) is not None]
    capacity = [cluster.gpu.memory - fixed]
    for i in tiers[1:]:
        tier = cluster.tier(i)
        assert tier is not None  # by the selection above
        capacity.append(tier.capacity / cluster.gpus_per_node)
    size = np.array([tensor.bytes for tensor in tensors]) / 2**30  # GiB: well-scaled
    buffer = np.array([tensor.buffer for tensor in tensors]) / 2**30
    x = cp.Variable((len(tensors), len(tiers)), nonneg=True)
    z = cp.Variable(len(tensors), boolean=True)
    wait = cp.Variable(nonneg=True)
    whole = [row for row, tensor in enumerate(tensors) if tensor.layers]
    limits: list[Any] = (
        [cp.sum(x, axis=1) == 1, cp.sum(x[:, 1:], axis=1) <= z] if len(tiers) > 1 else [x[:, 0] == 1, z == 0]
    )
    if whole:
        layers = cp.Variable((len(whole), len(tiers)), integer=True)
        limits.append(cp.multiply(x[whole, :], np.array([[tensors[row].layers] for row in whole])) == layers)
    limits.append(size @ x[:, 0] + buffer @ z <= capacity[0] / 2**30)
    cost = wait
    for column, i in enumerate(tiers[1:], 1):
        tier = cluster.tier(i)
        assert tier is not None
        read, write = tier.per_gpu(cluster.gpus_per_node)
        limits.append(size @ x[:, column] <= capacity[column] / 2**30)
        inward = np.array([tensor.read / read for tensor in tensors])
        outward = np.array([tensor.write / write for tensor in tensors])
        hidden = np.array([tensor.hidden for tensor in tensors])
        slack = cluster.overlap_tiers * busy
        if i == 1:  # PCIe carries both directions at once
            limits += [
                (inward * hidden) @ x[:, column] <= slack + wait,
                (outward * hidden) @ x[:, column] <= slack + wait,
            ]
            cost = cost + np.maximum(inward, outward) * ~hidden @ x[:, column]
        else:
            limits.append(((inward + outward) * hidden) @ x[:, column] <= slack + wait)
            cost = cost + (inward + outward) * ~hidden @ x[:, column]
    # A whisper of preference for the higher tier, so that nothing moves down for free.
    order = 1e-6 * cp.sum(cp.multiply(x, np.outer(size, np.arange(len(tiers)))))
    problem = cp.Problem(cp.Minimize(cost + order), limits)
    solver_banner.keep_off_stdout()
    problem.solve(solver=cp.HIGHS, mip_rel_gap=GAP)
    if x.value is None or z.value is None or cost.value is None:
        need = float(size.sum())
        have = sum(capacity) / 2**30
        raise NoPlanError(
            f"{need:.1f} GiB of tensors do not fit into {have:.1f} GiB of tiers per GPU",
            short={"all": (need - have) * 2**30},
            change="more memory or GPUs",
        )
    found = np.clip(x.value, 0, 1)
    memory = {TIERS[i]: float(size @ found[:, column]) * 2**30 for column, i in enumerate(tiers)}
    memory["gpu"] += fixed + float(buffer @ np.round(z.value)) * 2**30
    names = [TIERS[i] for i in tiers]
    shares = {t.name: dict(zip(names, row, strict=True)) for t, row in zip(tensors, found.tolist(), strict=True)}
    return Placement(
        {name: {tier: round(share, 6) for tier, share in where.items()} for name, where in shares.items()},
        float(cost.value),
        memory,
        {t.name: {tier: round(s * t.layers) for tier, s in shares[t.name].items()} for t in tensors if t.layers},
        {t.name: t.bytes / t.layers for t in tensors if t.layers},
    )


GAP = 1e-8
"""Relative gap at which the solver stops: below the preference for higher tiers, which decides between equal times."""


def refine(model: Model, cluster: Cluster, plan: Plan, work: Training) -> Placement:
    """The best whole layers of each class per tier for a plan, all classes free."""
    tensors, fixed, busy = tensors_of(model, cluster.resized(plan.gpus), plan, work)
    return place(cluster.resized(plan.gpus), tensors, fixed, busy)
