"""Static cost analysis of any JAX function from its jaxpr: FLOP, bytes, parameters; nothing is allocated, compiled or
run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from jcuts.base.errors import NotJaxError, UsageError
from jcuts.plan.cost.primitive_kinds import COLLECTIVES, FREE, HEAVY, REDUCTIONS
from jcuts.plan.spec.layers import Block, Gemm, Model, Stream


@dataclass
class OpCounts:
    """FLOP, bytes and other counts of a function, equation by equation.

    flops: matrix products and convolutions (2 per multiply-add); bytes: memory traffic when elementwise chains fuse;
    kernels: launches then; collectives: bytes given to each kind; unknown: primitives costed as elementwise for lack of
    a rule;
    unbounded: ``while`` loops, whose body is counted once.
    """

    flops: float = 0.0
    bytes: float = 0.0
    kernels: float = 0.0
    collectives: dict[str, float] = field(default_factory=dict)
    products: list[tuple[Gemm, float]] = field(default_factory=list)
    unbounded: int = 0


def bytes_of(var: Any) -> float:
    aval = var.aval
    if not hasattr(aval, "shape"):
        return 0.0
    try:
        size = np.dtype(aval.dtype).itemsize
    except TypeError:  # keys of random numbers
        size = 8
    return float(math.prod(aval.shape) * size)


def inner(equation: Any) -> list[tuple[Any, float]]:
    """(jaxpr, times it runs) of an equation's sub-programs."""
    name, params = equation.primitive.name, equation.params
    if name == "scan":
        return [(_open(params["jaxpr"]), float(params["length"]))]
    if name == "while":
        return [(_open(params["body_jaxpr"]), 1.0)]
    if name == "cond":
        branches = [_open(branch) for branch in params["branches"]]
        return [(max(branches, key=lambda b: tally_jaxpr(b).flops), 1.0)]
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        if key in params:
            return [(_open(params[key]), 1.0)]
    return []


def _open(jaxpr: Any) -> Any:
    return getattr(jaxpr, "jaxpr", jaxpr)


def trace(function: Callable, arguments: Sequence[Any]) -> Any:
    try:
        return jax.make_jaxpr(function)(*arguments).jaxpr
    except (TypeError, ValueError, jax.errors.JAXTypeError) as error:
        raise NotJaxError(f"{getattr(function, '__name__', function)} cannot be traced: {error}") from error


def products_of(equation: Any) -> Gemm | None:
    """A ``dot_general`` or convolution as a GEMM (None for anything else)."""
    name = equation.primitive.name
    if name == "dot_general":
        (contract_l, contract_r), (batch_l, batch_r) = equation.params["dimension_numbers"]
        left, right = (v.aval.shape for v in equation.invars[:2])
        batch = math.prod(left[i] for i in batch_l)
        k = math.prod(left[i] for i in contract_l)
        m = math.prod(s for i, s in enumerate(left) if i not in (*contract_l, *batch_l))
        n = math.prod(s for i, s in enumerate(right) if i not in (*contract_r, *batch_r))
        return Gemm("dot", m, n, k, batch)
    if name == "conv_general_dilated":
        numbers = equation.params["dimension_numbers"]
        groups = equation.params["feature_group_count"]
        filters = equation.invars[1].aval.shape
        out = equation.outvars[0].aval.shape
        features = out[numbers.out_spec[1]]
        k = filters[numbers.rhs_spec[1]] * math.prod(filters[i] for i in numbers.rhs_spec[2:])
        return Gemm("convolution", math.prod(out) / features, features / groups, k, groups)
    return None


def tally_jaxpr(jaxpr: Any, times: float = 1.0, into: OpCounts | None = None) -> OpCounts:
    """Counts a jaxpr; scans multiply, conditionals count their heaviest branch, while loops count once."""
    made = into if into is not None else OpCounts()
    uses = _uses(jaxpr)
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        bodies = inner(equation)
        if bodies:
            made.unbounded += name == "while"
            for body, count in bodies:
                tally_jaxpr(body, times * count, made)
            continue
        if name in FREE:
            continue
        product = products_of(equation)
        inputs = sum(bytes_of(v) for v in equation.invars if hasattr(v, "aval"))
        outputs = sum(map(bytes_of, equation.outvars))
        if product is not None:
            work = 2.0 * product.m * product.n * product.k * product.batch
            made.flops += times * work
            made.products.append((product, times))
            made.bytes += times * (inputs + outputs)
            made.kernels += times
        elif name in COLLECTIVES:
            kind = COLLECTIVES[name]
            made.collectives[kind] = made.collectives.get(kind, 0.0) + times * inputs
        elif name in HEAVY or any(uses.get(v, 0) != 1 for v in equation.outvars):
            # Ends a fused chain: what comes in was counted where it was written; the result is written and read later.
            made.bytes += times * 2 * outputs if name not in REDUCTIONS else times * (inputs + outputs)
            made.kernels += times
    return made


def _uses(jaxpr: Any) -> dict[Any, int]:
    count: dict[Any, int] = {}
    for equation in jaxpr.eqns:
        for v in equation.invars:
            if not hasattr(v, "val"):
                count[v] = count.get(v, 0) + 1
    for v in jaxpr.outvars:
        if not hasattr(v, "val"):
            count[v] = count.get(v, 0) + 2
    return count


def tally(function: Callable, *arguments: Any) -> OpCounts:
    """Counts ``function(*arguments)``; arguments may be ``ShapeDtypeStruct`` trees.

    Raises: NotJaxError if it cannot be traced.
    """
    return tally_jaxpr(trace(function, arguments))


def model(
    function: Callable, parameters: Any, *inputs: Any, name: str = "function", batch: int | None = None, cuts: int = 32
) -> Model:
    """A model for the planner from ``function(parameters, *inputs)``, its forward pass (a loss or outputs).

    Inputs' first axis is the batch.  The function is traced at the example batch and at twice of it: extents that
    double belong to samples, the rest to parameters; so any model is split into what micro-batches divide and what they
    do not.  The equations are cut into at most ``cuts`` blocks of about equal work, each with the parameters that it is
    first to use; of a loop every equation counts as often as it turns, and its parameters are dealt out by work.

    Raises: NotJaxError if it cannot be traced; UsageError without a batch axis.
    """
    leaves = jax.tree.leaves(inputs)
    if not leaves or any(not getattr(leaf, "shape", ()) for leaf in leaves):
        raise UsageError("every input needs a first axis that is the batch")
    samples = leaves[0].shape[0]
    if any(leaf.shape[0] != samples for leaf in leaves):
        raise UsageError(f"inputs disagree on the batch: first axes are {[leaf.shape[0] for leaf in leaves]}")

    def sized(times: int) -> list[Any]:
        grow = lambda leaf: jax.ShapeDtypeStruct((leaf.shape[0] * times, *leaf.shape[1:]), leaf.dtype)  # noqa: E731
        return [jax.tree.map(grow, value) for value in inputs]

    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), parameters)
    one, two = (list(_flat(trace(function, [shapes, *sized(times)]))) for times in (1, 2))
    if len(one) != len(two):
        raise UsageError("the function's equations depend on the batch size: trace it at one size and pass that model")
    held = [math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes)]
    count, seen = sum(held), set()
    work: list[_Work] = []
    for (equation, times, live, used), (other, _, live_two, _) in zip(one, two, strict=True):
        ops, flops, made = _operations(equation, other, times, samples)
        boundary = max(live_two - live, 0.0) / samples
        # Whoever first mixes a parameter with data holds it; what loops use belongs to all of their turns.
        mine = {leaf for leaf in used if leaf < len(held)} - seen if times == 1 else set()
        seen |= mine
        work.append(_Work(flops, ops, made, boundary, float(sum(held[leaf] for leaf in mine))))
    blocks = _cut(work, count, cuts)
    return Model(name, tuple(blocks), batch=batch or samples, sample="sample", details={"parameters": count})


@dataclass
class _Work:
    """One equation: FLOPs and operations per sample, bytes kept and alive per sample, parameters that it holds."""

    flops: float
    operations: list[Gemm | Stream]
    kept: float
    alive: float
    parameters: float


def _flat(
    jaxpr: Any, times: float = 1.0, source: dict[Any, frozenset[int]] | None = None
) -> Iterator[tuple[Any, float, float, frozenset[int]]]:
    """(equation, times it runs, bytes alive after it, arguments that it mixes with others) with calls and loops opened.

    ``source``: the arguments (by position) that a variable is made of, where it is made of one or a few alone.
    """
    source = {v: frozenset({i}) for i, v in enumerate(jaxpr.invars)} if source is None else source
    last: dict[Any, int] = {}
    for position, equation in enumerate(jaxpr.eqns):
        for v in equation.invars:
            if not hasattr(v, "val"):
                last[v] = position
    inputs = set(jaxpr.invars) | set(jaxpr.constvars)
    alive: dict[Any, float] = {}
    for position, equation in enumerate(jaxpr.eqns):
        bodies = inner(equation)
        read = [v for v in equation.invars if not hasattr(v, "val")]
        used = frozenset().union(*(source.get(v, frozenset()) for v in read))
        if len(read) == 1 and used:  # a view, a cast, a slice: still the argument
            source |= dict.fromkeys(equation.outvars, used)
            used = frozenset()
        for body, count in bodies:
            given = equation.invars[len(equation.invars) - len(body.invars) :]
            pairs = zip(body.invars, given, strict=True)
            passed = {v: source[g] for v, g in pairs if not hasattr(g, "val") and g in source}
            yield from _flat(body, times * count, passed)
        for v in equation.outvars:
            alive[v] = bytes_of(v)
        for v in [v for v in alive if last.get(v, -1) <= position]:
            del alive[v]
        if not bodies:
            yield equation, times, sum(size for v, size in alive.items() if v not in inputs), used


def _operations(equation: Any, other: Any, times: float, samples: int) -> tuple[list[Gemm | Stream], float, float]:
    """(operations per sample, FLOPs per sample, bytes kept per sample) of one equation."""
    name = equation.primitive.name
    if name in FREE:
        return [], 0.0, 0.0
    size, double = (sum(map(bytes_of, e.outvars)) for e in (equation, other))
    per_sample = (double - size) / samples
    product, doubled = products_of(equation), products_of(other)
    if product is not None and doubled is not None:
        flops = 2.0 * product.m * product.n * product.k * product.batch * times / samples
        copies = max(1, round(times))
        m, n, k, batch, grows = product.m, product.n, product.k, product.batch, "m"
        if doubled.batch > batch:
            batch, grows = batch / samples, "batch"
        elif doubled.m > m:
            m = m / samples
        elif doubled.n > n:  # the batch is on the right: the same product, transposed
            m, n = n / samples, m
        elif doubled.k > k:
            k = k / samples
        else:
            return [Gemm("dot", m / samples, n, k, batch, copies=copies)], flops, 0.0
        return [Gemm("dot", m, n, k, batch, per_sample=grows, copies=copies)], flops, per_sample * times
    moved = 2 * per_sample * times
    return (
        [
            Stream(
                name,
                moved,
                2 * moved,
                "no",
                times if name in HEAVY else 0.3 * times,
                times if name in HEAVY else 0.6 * times,
            )
        ],
        0.0,
        (per_sample * times if name in HEAVY else 0.5 * per_sample * times),
    )


def _cut(work: list[_Work], count: float, cuts: int) -> list[Block]:
    """Blocks of about equal shares of the FLOPs that are left; what follows the last product belongs to its block.

    Parameters that no single equation holds are dealt out by FLOPs.
    """
    total = sum(entry.flops for entry in work) or 1.0
    parts = max(1, min(cuts, sum(1 for entry in work if entry.flops > 0)))
    left = total
    groups: list[_Work] = []
    open_ = _Work(0.0, [], 0.0, 0.0, 0.0)
    boundary = 0.0
    for entry in work:
        open_.flops += entry.flops
        open_.kept += entry.kept
        open_.parameters += entry.parameters
        open_.operations = open_.operations + entry.operations
        boundary = open_.alive = entry.alive or boundary
        if open_.flops > 0 and open_.flops >= (1 - 1e-9) * left / max(parts - len(groups), 1):
            groups.append(open_)
            left -= open_.flops
            open_ = _Work(0.0, [], 0.0, boundary, 0.0)
    if groups and not open_.flops:
        groups[-1].operations = groups[-1].operations + open_.operations
        groups[-1].kept += open_.kept
        groups[-1].parameters += open_.parameters
    else:
        groups.append(open_)
    spread = count - sum(group.parameters for group in groups)
    return [
        Block(
            f"part {i}",
            1,
            tuple(group.operations),
            replicated=group.parameters + spread * (group.flops / total if total > 1 else 1 / len(groups)),
            saved_replicated=group.kept,
            boundary=group.alive,
        )
        for i, group in enumerate(groups, 1)
    ]
