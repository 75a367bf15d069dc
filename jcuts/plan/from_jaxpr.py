"""The cost of any JAX function, from its jaxpr: nothing is allocated, compiled or run.

Together with ``apply`` the only file of the planner that imports jax.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from jcuts.base.errors import NotJaxError, UsageError
from jcuts.plan.blocks import Block, Gemm, Model, Stream

FREE = frozenset(
    {
        "broadcast_in_dim",
        "reshape",
        "squeeze",
        "expand_dims",
        "iota",
        "stop_gradient",
        "pcast",
        "pvary",
        "axis_index",
        "sharding_constraint",
        "copy",
        "copy_p",
        "optimization_barrier",
        "name",
        "split",
        "bitcast_convert_type",
        "random_wrap",
        "random_unwrap",
        "device_put",
        "create_token",
    }
)
"""Equations that XLA turns into views, indices or nothing."""

REDUCTIONS = frozenset(
    {
        "reduce_sum",
        "reduce_max",
        "reduce_min",
        "reduce_prod",
        "reduce_and",
        "reduce_or",
        "argmax",
        "argmin",
        "cumsum",
        "cumlogsumexp",
        "cummax",
        "cumprod",
    }
)

HEAVY = (
    frozenset(
        {
            "dot_general",
            "conv_general_dilated",
            "gather",
            "scatter",
            "scatter-add",
            "scatter_add",
            "sort",
            "top_k",
            "fft",
            "cholesky",
            "triangular_solve",
            "dynamic_slice",
            "dynamic_update_slice",
            "concatenate",
            "transpose",
            "psum",
            "ppermute",
            "all_gather",
            "all_to_all",
            "reduce_scatter",
            "psum2",
            "psum_invariant",
            "rng_bit_generator",
            "random_bits",
            "threefry2x32",
            "reduce_window",
            "reduce_window_max",
            "reduce_window_sum",
            "select_and_scatter_add",
            "while",
            "scan",
            "cond",
        }
    )
    | REDUCTIONS
)
"""Equations whose results are buffers of their own; all others fuse into their consumers or producers."""

COLLECTIVES = {
    "psum": "all-reduce",
    "psum2": "all-reduce",
    "psum_invariant": "all-reduce",
    "ppermute": "collective-permute",
    "all_gather": "all-gather",
    "all_to_all": "all-to-all",
    "reduce_scatter": "reduce-scatter",
}


@dataclass
class Tally:
    """What a function does, counted equation by equation.

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
    """A ``dot_general`` or convolution as a matrix product (None for anything else)."""
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


def tally_jaxpr(jaxpr: Any, times: float = 1.0, into: Tally | None = None) -> Tally:
    """Counts a jaxpr; scans multiply, conditionals count their heaviest branch, while loops count once."""
    made = into if into is not None else Tally()
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


def tally(function: Callable, *arguments: Any) -> Tally:
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
    do not.  The equations are cut where least is alive, into at most ``cuts`` blocks of about equal work; a scan is one
    block per turn.

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
    count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))
    work: list[tuple[float, list[Gemm | Stream], float, float]] = []
    for (equation, times, live), (other, _, live_two) in zip(one, two, strict=True):
        ops, flops, made = _operations(equation, other, times, samples)
        boundary = max(live_two - live, 0.0) / samples
        work.append((flops, ops, made, boundary))
    blocks = _cut(work, count, cuts)
    return Model(name, tuple(blocks), batch=batch or samples, sample="sample", details={"parameters": count})


def _flat(jaxpr: Any, times: float = 1.0) -> Iterator[tuple[Any, float, float]]:
    """(equation, times it runs, bytes alive after it) with calls and loops opened."""
    last: dict[Any, int] = {}
    for position, equation in enumerate(jaxpr.eqns):
        for v in equation.invars:
            if not hasattr(v, "val"):
                last[v] = position
    inputs = set(jaxpr.invars) | set(jaxpr.constvars)
    alive: dict[Any, float] = {}
    for position, equation in enumerate(jaxpr.eqns):
        bodies = inner(equation)
        if bodies:
            for body, count in bodies:
                yield from _flat(body, times * count)
        for v in equation.outvars:
            alive[v] = bytes_of(v)
        for v in [v for v in alive if last.get(v, -1) <= position]:
            del alive[v]
        if not bodies:
            yield equation, times, sum(size for v, size in alive.items() if v not in inputs)


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


def _cut(work: list[tuple[float, list[Gemm | Stream], float, float]], count: float, cuts: int) -> list[Block]:
    """Blocks of about equal FLOPs; within the last tenth of each, the cut where least is alive."""
    total = sum(entry[0] for entry in work) or 1.0
    goal = total / max(1, min(cuts, sum(1 for entry in work if entry[0] > 0)))
    groups: list[tuple[float, list[Gemm | Stream], float, float]] = []
    flops, kept, ops = 0.0, 0.0, []
    boundary = 0.0
    for amount, made, saved, alive in work:
        flops, kept, ops = flops + amount, kept + saved, ops + made
        boundary = alive if alive else boundary
        if flops >= goal:
            groups.append((flops, ops, kept, boundary))
            flops, kept, ops = 0.0, 0.0, []
    if ops or not groups:
        groups.append((flops, ops, kept, boundary))
    return [
        Block(
            f"part {i}",
            1,
            tuple(ops),
            replicated=count * (flops / total if total > 1 else 1 / len(groups)),
            saved_replicated=kept,
            boundary=edge,
        )
        for i, (flops, ops, kept, edge) in enumerate(groups, 1)
    ]
