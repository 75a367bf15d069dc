"""Translates a plan into JAX objects: ``jax.sharding.Mesh`` and ``NamedSharding``s."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jcuts.base.errors import UsageError
from jcuts.plan.search.plan import Plan

AXES = ("stage", "data", "context", "tensor")
"""Outermost first: what talks most is innermost, on neighbouring devices."""

ROW = re.compile(
    r"(^|[^a-z])(proj|projection|out|o|down|wo|w2|fc2|c_proj|output|dense_4h_to_h)([^a-z]|$)|_out|out_|down_|_down"
)
"""Names of weights whose *inputs* the tensor axis divides (the second matrix of a pair)."""

MEMORY_KINDS = {"gpu": "device", "host": "pinned_host", "storage": "pinned_host"}


def mesh(plan: Plan, devices: Any = None) -> Mesh:
    """The JAX mesh of a plan.

    Raises: UsageError if there are fewer devices than the plan takes.
    """
    devices = list(jax.devices() if devices is None else devices)
    if len(devices) < plan.gpus:
        raise UsageError(
            f"the plan takes {plan.gpus} devices, there are {len(devices)}", need=plan.gpus, have=len(devices)
        )
    shape = (plan.pipeline, plan.data, plan.context, plan.tensor)
    return Mesh(np.array(devices[: plan.gpus]).reshape(shape), AXES)


def spec(plan: Plan, path: str, shape: Sequence[int], *, sharded: bool) -> PartitionSpec:
    """``PartitionSpec`` of one leaf.

    The tensor axis takes a matrix's columns (last extent), or its rows (last but one) when its name says that it is the
    second of a pair; the data axis (``sharded``: zero 3, or the optimiser state from zero 1) takes the largest extent
    left.  What does not divide stays whole.
    """
    parts: list[Any] = [None] * len(shape)
    if plan.tensor > 1 and len(shape) >= 2:
        wanted = len(shape) - 2 if ROW.search(path.lower()) else len(shape) - 1
        for place in (wanted, len(shape) - 1, len(shape) - 2):
            if shape[place] % plan.tensor == 0:
                parts[place] = "tensor"
                break
    replicas = plan.data * plan.context
    if sharded and replicas > 1:
        free = [i for i, part in enumerate(parts) if part is None and shape[i] % replicas == 0 and shape[i] >= replicas]
        if free:
            parts[max(free, key=lambda i: shape[i])] = ("data", "context") if plan.context > 1 else "data"
    return PartitionSpec(*parts)


def shardings(plan: Plan, tree: Any, devices: Any = None, *, optimizer: bool = False) -> Any:
    """A ``NamedSharding`` per leaf; offloaded classes get the memory kind of the host where the backend has one.

    Args: tree: parameters (or their shapes); optimizer: the tree is optimiser state, sharded from zero 1 on.
    Raises: UsageError for a plan with a pipeline, which shardings cannot express.
    """
    if plan.pipeline > 1:
        raise UsageError(
            "shardings cannot express a pipeline: see benchmarks/planner/gpt_step.py for a step that can",
            pipeline=plan.pipeline,
        )
    where = mesh(plan, devices)
    tier = plan.optimizer if optimizer else plan.parameters
    kind = MEMORY_KINDS[tier]
    kinds = {memory.kind for memory in where.devices.flat[0].addressable_memories()}
    memory = kind if tier != "gpu" and kind in kinds else None
    sharded = plan.zero >= (1 if optimizer else 3)

    def one(path: Any, leaf: Any) -> NamedSharding:
        made = spec(plan, jax.tree_util.keystr(path), leaf.shape, sharded=sharded)
        return NamedSharding(where, made, memory_kind=memory) if memory else NamedSharding(where, made)

    return jax.tree_util.tree_map_with_path(one, tree)


def batch_sharding(plan: Plan, tree: Any, devices: Any = None) -> Any:
    """The batch's leaves: first axis over data, second over context."""
    where = mesh(plan, devices)

    def one(leaf: Any) -> NamedSharding:
        parts: list[Any] = [None] * len(leaf.shape)
        if parts and leaf.shape[0] % plan.data == 0:
            parts[0] = "data"
        if len(parts) > 1 and plan.context > 1 and leaf.shape[1] % plan.context == 0:
            parts[1] = "context"
        return NamedSharding(where, PartitionSpec(*parts))

    return jax.tree.map(one, tree)


def in_shardings(plan: Plan, parameters: Any, optimizer: Any, batch: Any, devices: Any = None) -> tuple[Any, Any, Any]:
    """(parameters, optimiser state, batch), for a step ``f(parameters, optimizer, batch)``."""
    return (
        shardings(plan, parameters, devices),
        shardings(plan, optimizer, devices, optimizer=True),
        batch_sharding(plan, batch, devices),
    )


def priced_collectives(plan: Plan) -> frozenset[str]:
    """Kinds of collectives that the cost model charges a plan for, by HLO name."""
    kinds: set[str] = set()
    if plan.tensor > 1:
        kinds |= {"all-gather", "reduce-scatter"} if plan.sequence_parallel else {"all-reduce"}
    if plan.data * plan.context > 1:
        kinds |= {"all-reduce"} if plan.zero == 0 else {"reduce-scatter", "all-gather"}
    if plan.pipeline > 1:
        kinds.add("collective-permute")
    if plan.expert > 1:
        kinds.add("all-to-all")
    return frozenset(kinds)


def bytes_per_device(tree: Any, placed: Any) -> float:
    """Bytes that each device holds of a tree under given shardings."""
    total = 0.0
    for leaf, sharding in zip(jax.tree.leaves(tree), jax.tree.leaves(placed), strict=True):
        total += math.prod(sharding.shard_shape(tuple(leaf.shape))) * np.dtype(leaf.dtype).itemsize
    return total
