"""Layers of any JAX function from its jaxpr: loops over layers unrolled, repeated layers found, parameters and
embedding tables given to the layer that uses them; nothing is allocated, compiled or run.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax

from jcuts.base.errors import UsageError
from jcuts.plan.cost.equation_work import Work, equation_work, fused_equations
from jcuts.plan.cost.expanded_jaxpr import Alias, Node, Value
from jcuts.plan.cost.flat_jaxpr import Flat, Piece
from jcuts.plan.cost.jaxpr import bytes_of, trace
from jcuts.plan.cost.primitive_kinds import HEAVY, REDUCTIONS
from jcuts.plan.cost.repetition import Run, runs
from jcuts.plan.spec.layers import Block, Gemm, Model, Stream

CUTS = 32
"""Blocks at most that layers which do not repeat are cut into."""


def model(
    function: Callable,
    parameters: Any,
    *inputs: Any,
    name: str = "function",
    batch: int | None = None,
    cuts: int = CUTS,
) -> Model:
    """A model for the planner from ``function(parameters, *inputs)``, its forward pass (a loss or outputs).

    Inputs' first axis is the batch; inputs without axes (a random key) have none.  The function is traced at the
    example batch and at twice of it: extents that double belong to samples, the rest to parameters; so any model is
    split into what micro-batches divide and what they do not.  A ``scan`` over layers, and layers that repeat in a
    Python loop, become a block of that many layers; what comes before and after the repeated layers is the first and
    the last stage's; layers that differ are cut into at most ``cuts`` blocks of about equal work.  A parameter, or the
    slice of it, belongs to the layer that first mixes it with data.  Parameters that are only looked up by data
    (embedding tables) may be divided by tables and rows when they hold most of the values.

    Raises: NotJaxError if it cannot be traced; UsageError without a batch axis, or for a whole training step.
    """
    samples = batch_of(inputs)
    function, parameters = arrays_only(function, parameters)
    refuse_training_step(function, parameters, inputs, name)

    def sized(times: int) -> list[Any]:
        def grow(leaf: Any) -> Any:
            if not getattr(leaf, "shape", ()):
                return leaf
            return jax.ShapeDtypeStruct((leaf.shape[0] * times, *leaf.shape[1:]), leaf.dtype)

        return [jax.tree.map(grow, value) for value in inputs]

    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), parameters)
    held = [float(math.prod(leaf.shape)) for leaf in jax.tree.leaves(shapes)]
    one, two = (Flat(trace(function, [shapes, *sized(times)]), held) for times in (1, 2))
    if [node.name for node in one.nodes] != [node.name for node in two.nodes]:
        raise UsageError("the function's equations depend on the batch size: trace it at one size and pass that model")
    work = list(_works(one, two, samples, held))
    count = sum(held)
    tables = sum(sum(entry.tables) for entry in work)
    if 2 * tables < count:  # a vocabulary: a parameter like any other
        for entry in work:
            entry.parameters += sum(entry.tables)
            entry.tables, entry.pooled, entry.rows = [], 0.0, 0.0
    spread = count - sum(entry.parameters + sum(entry.tables) for entry in work)
    flops = sum(entry.flops for entry in work)
    for entry in work:  # what no single equation holds is dealt out by work
        entry.parameters += spread * (entry.flops / flops if flops else 1 / len(work))
    made = _assemble(work, cuts)
    return replace(
        made,
        name=name,
        batch=batch or samples,
        sample="sample",
        lookup_pooled=sum(entry.pooled for entry in work),
        lookup_rows=sum(entry.rows for entry in work),
        casts=min(_cast_values(one) / count, 1.0) if count else 1.0,
        details={"parameters": count},
    )


def _cast_values(flat: Flat) -> float:
    """Parameter values that the function casts to a narrower type before it uses them."""
    pieces = {
        (piece.leaf, piece.part): piece.size
        for node in flat.nodes
        if node.name == "convert_element_type" and node.inputs and node.inputs[0] not in flat.data
        for piece in flat.sources.get(node.inputs[0], frozenset())
        if bytes_of(node.outputs[0]) < bytes_of(node.inputs[0])
    }
    return sum(pieces.values())


def arrays_only(function: Callable, parameters: Any) -> tuple[Callable, Any]:
    """(function of the arrays alone, the arrays) of a parameter tree with other leaves: an equinox module's functions
    and flags are constants, not arguments."""
    leaves, tree = jax.tree.flatten(parameters)
    places = [i for i, leaf in enumerate(leaves) if hasattr(leaf, "shape") and hasattr(leaf, "dtype")]
    if len(places) == len(leaves):
        return function, parameters

    def of_arrays(arrays: Sequence[Any], *inputs: Any) -> Any:
        filled = list(leaves)
        for place, array in zip(places, arrays, strict=True):
            filled[place] = array
        return function(jax.tree.unflatten(tree, filled), *inputs)

    return of_arrays, [leaves[place] for place in places]


def batch_of(inputs: Sequence[Any]) -> int:
    """Samples of the example inputs: their common first axis; inputs without axes (a random key, a step number) have
    none.  Raises: UsageError if there is none."""
    leaves = [(f"input {i}", leaf) for i, tree in enumerate(inputs, 1) for leaf in jax.tree.leaves(tree)]
    shapes = [(name, tuple(getattr(leaf, "shape", ()))) for name, leaf in leaves]
    batched = [(name, shape) for name, shape in shapes if shape]
    if not batched:
        raise UsageError("the inputs have no axis that is the batch: one of them needs a first axis that is")
    samples = batched[0][1][0]
    if any(shape[0] != samples for _, shape in batched):
        listed = ", ".join(f"{name} {shape}" for name, shape in batched)
        raise UsageError(
            f"inputs disagree on the batch, which is their first axis: {listed}; what has no batch axis belongs into "
            "the parameters or into the function (functools.partial)"
        )
    return samples


def is_training_step(function: Callable, parameters: Any, inputs: Sequence[Any]) -> bool:
    """Whether a function returns as many arrays of its parameters' shapes as there are parameters: gradients, or
    updated parameters.

    Raises: NotJaxError if it cannot be traced.
    """
    function, parameters = arrays_only(function, parameters)
    mine = Counter(tuple(leaf.shape) for leaf in jax.tree.leaves(parameters) if leaf.shape)
    jaxpr = trace(function, [parameters, *inputs])
    given = Counter(tuple(getattr(v.aval, "shape", ())) for v in jaxpr.outvars)
    if not mine or any(given[shape] < count for shape, count in mine.items()):
        return False
    samples = {leaf.shape[0] for leaf in jax.tree.leaves(inputs) if getattr(leaf, "shape", ())}
    return len(mine) > 1 or not any(shape[0] in samples for shape in mine)


def refuse_training_step(function: Callable, parameters: Any, inputs: Sequence[Any], name: str) -> None:
    """Raises UsageError for a function that computes gradients or updates its parameters."""
    if is_training_step(function, parameters, inputs):
        raise UsageError(
            f"{name} returns arrays of its parameters' shapes: it is a whole training step (gradients or an update), "
            "which the planner adds itself: give the loss function that it differentiates, as (loss, parameters, "
            "*inputs)",
            model=name,
        )


def _works(one: Flat, two: Flat, samples: int, held: Sequence[float]) -> Iterator[Work]:
    """The cost of every equation that depends on data."""
    alive_one, alive_two = _alive(one), _alive(two)
    left = list(held)
    seen: set[tuple] = set()
    pooled = _pooled(one)
    fused = fused_equations([(n.equation, n.inputs, n.outputs) for n in one.nodes], [v for v in one.results if v])
    for position, (node, other) in enumerate(zip(one.nodes, two.nodes, strict=True)):
        mine: set[Piece] = set()
        if any(v in one.data for v in node.inputs) and not isinstance(node.equation, Alias):
            mine = {p for v in node.inputs if v not in one.data for p in one.sources.get(v, frozenset())}
        new = [p for p in mine if (p.leaf, p.part) not in seen]
        seen |= {(p.leaf, p.part) for p in new}
        held_here = 0.0
        for piece in new:
            size = min(piece.size, left[piece.leaf])
            left[piece.leaf] -= size
            held_here += size
        if not any(v in one.data for v in node.outputs) or isinstance(node.equation, Alias):
            continue
        made = equation_work(node.equation, other.equation, samples, fused=position in fused)
        made.alive = max(alive_two[position] - alive_one[position], 0.0) / samples
        made.key = (node.name, *(v.aval.shape for v in node.inputs), *(v.aval.shape for v in node.outputs))
        if node.name == "gather" and node.inputs and node.inputs[0] not in one.data and mine:
            batching = node.equation.params["dimension_numbers"].operand_batching_dims
            count = math.prod(node.inputs[0].aval.shape[i] for i in batching)
            made.tables = [held_here / count] * count if held_here else []
            sizes = [sum(map(bytes_of, each.outputs)) for each in (node, other)]
            made.rows = (sizes[1] - sizes[0]) / samples
            made.pooled = made.rows * pooled.get(node.outputs[0], 1.0)
        else:
            made.parameters = held_here
        yield made


def _pooled(flat: Flat) -> dict[Value, float]:
    """Of what a look-up gives, the share of its bytes that is left after the reduction that alone reads it, be it
    through casts and other elementwise equations."""
    users: dict[Value, list[Node]] = {}
    for node in flat.nodes:
        for v in node.inputs:
            users.setdefault(v, []).append(node)
    made: dict[Value, float] = {}
    for node in flat.nodes:
        if node.name != "gather":
            continue
        v = first = node.outputs[0]
        while len(users.get(v, [])) == 1:
            reader = users[v][0]
            out = reader.outputs[0]
            if reader.name in REDUCTIONS:
                made[first] = math.prod(out.aval.shape) / max(math.prod(first.aval.shape), 1)
                break
            if reader.name in HEAVY or out.aval.shape != v.aval.shape:
                break
            v = out
    return made


def _alive(flat: Flat) -> list[float]:
    """Bytes of data that exist after each equation and that a later one reads, the inputs left out."""
    last: dict[Value, int] = {}
    for position, node in enumerate(flat.nodes):
        last |= dict.fromkeys(node.inputs, position)
    made, total = [], 0.0
    ends: dict[int, float] = {}
    for position, node in enumerate(flat.nodes):
        for v in node.outputs:
            if v in flat.data and last.get(v, -1) > position:
                total += bytes_of(v)
                ends[last[v]] = ends.get(last[v], 0.0) + bytes_of(v)
        total -= ends.get(position, 0.0)
        made.append(total)
    return made


def _assemble(work: list[Work], cuts: int) -> Model:
    """The model's blocks: runs of equal layers, what is between them cut into blocks of about equal work.

    Where one run does most of the work, what comes before it is the first stage's and what follows the last's.
    """
    total = sum(entry.flops for entry in work)
    found = runs([entry.key for entry in work], [entry.flops for entry in work])
    main = max(found, key=lambda run: sum(entry.flops for entry in work[run.start : run.stop]), default=None)
    if main is not None and 2 * sum(entry.flops for entry in work[main.start : main.stop]) >= total:
        before, after = work[: main.start], work[main.stop :]
        return Model(
            "",
            (_layers(work, main),),
            embed=_block("before the layers", before) if before else None,
            head=_block("after the layers", after) if after else None,
        )
    blocks: list[Block] = []
    position = 0
    for run in [*found, Run(len(work), 0, 0)]:
        blocks += _cut(work[position : run.start], cuts, total)
        if run.count:
            blocks.append(_layers(work, run))
        position = run.stop
    numbered = [replace(block, name=f"part {i}") if block.count == 1 else block for i, block in enumerate(blocks, 1)]
    return Model("", tuple(numbered))


def _layers(work: list[Work], run: Run) -> Block:
    """A block of ``run.count`` equal layers; parameters and alive bytes are their mean and the boundary's."""
    layer = _block("layer", work[run.start : run.start + run.period])
    parameters = sum(entry.parameters for entry in work[run.start : run.stop]) / run.count
    return replace(layer, count=run.count, replicated=parameters)


def _block(name: str, entries: Sequence[Work]) -> Block:
    operations: list[Gemm | Stream] = []
    for entry in entries:
        operations += entry.operations
    return Block(
        name,
        1,
        tuple(operations),
        replicated=sum(entry.parameters for entry in entries),
        saved_replicated=sum(entry.kept for entry in entries),
        boundary=entries[-1].alive,
        tables=tuple(size for entry in entries for size in entry.tables),
    )


def _cut(work: Sequence[Work], cuts: int, total: float) -> list[Block]:
    """Blocks of about equal shares of the FLOPs that are left; what follows the last product belongs to its block."""
    mine = sum(entry.flops for entry in work)
    if not work:
        return []
    share = max(1, round(cuts * mine / total)) if total else 1
    parts = max(1, min(share, sum(1 for entry in work if entry.flops > 0)))
    groups: list[list[Work]] = []
    open_: list[Work] = []
    left, done = mine, 0.0
    for entry in work:
        open_.append(entry)
        done += entry.flops
        if done > 0 and done * max(parts - len(groups), 1) >= (1 - EXACT) * left:
            groups.append(open_)
            left, done, open_ = left - done, 0.0, []
    if open_ and groups and not done:
        groups[-1] = groups[-1] + open_
    elif open_:
        groups.append(open_)
    return [_block("part", group) for group in groups]


EXACT = 2.0**-30
"""Rounding of sums of FLOPs."""
