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


def _bytes(var: Any) -> float:
    aval = var.aval
    if not hasattr(aval, "shape"):
        return 0.0
    try:
        size = np.dtype(aval.dtype).itemsize
    except TypeError:  # keys of random numbers
        size = 8
    return float(math.prod(aval.shape) * size)


def _inner(equation: Any) -> list[tuple[Any, float]]:
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


def _trace(function: Callable, arguments: Sequence[Any]) -> Any:
    try:
        return jax.make_jaxpr(function)(*arguments).jaxpr
    except (TypeError, jax.errors.JAXTypeError) as error:
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
        inner = _inner(equation)
        if inner:
            made.unbounded += name == "while"
            for body, count in inner:
                tally_jaxpr(body, times * count, made)
            continue
        if name in FREE:
            continue
        product = products_of(equation)
        inputs = sum(_bytes(v) for v in equation.invars if hasattr(v, "aval"))
        outputs = sum(map(_bytes, equation.outvars))
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
    return tally_jaxpr(_trace(function, arguments))


# --- memory ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Footprint:
    """Bytes per device of one call: arguments, results, of which ``aliased`` reuse donated arguments, and
    temporaries."""

    arguments: float
    results: float
    aliased: float
    temporary: float

    @property
    def peak(self) -> float:
        """arguments + results - aliased + temporary, as ``compiled.memory_analysis()`` adds up."""
        return self.arguments + self.results - self.aliased + self.temporary


def footprint(function: Callable, *arguments: Any, donated: Sequence[int] = ()) -> Footprint:
    """Memory that a call needs per device, from liveness over its jaxpr.

    Values that fuse are never buffers: an elementwise result, a broadcast, a reshape.  A loop's carry is one buffer.
    Inside ``shard_map`` shapes are per device; outside, a value is divided as the ``shard_map`` that it enters or
    leaves says, and elementwise results as their operands.

    Args: donated: positions of arguments whose buffers results may take.
    Raises: NotJaxError if the function cannot be traced.
    """
    closed = _trace(function, arguments)
    given = [_Value(v.aval) for v in closed.invars]
    nodes, outs = _inlined(closed, given)
    share = _shares(nodes)
    sizes = [_bytes(v) * share.get(v, 1.0) for v in given]
    results = [(v, _bytes(v) * share.get(v, 1.0)) for v in outs if v is not None]
    ends = np.cumsum([0, *(len(jax.tree.leaves(argument)) for argument in arguments)])
    free = sum(sum(sizes[ends[i] : ends[i + 1]]) for i in donated)
    total = sum(size for _, size in results)
    return Footprint(sum(sizes), total, min(free, total), _peak(nodes, given, outs, share))


VIEWS = frozenset(
    {
        "reshape",
        "squeeze",
        "expand_dims",
        "copy",
        "pcast",
        "pvary",
        "optimization_barrier",
        "name",
        "stop_gradient",
        "transpose",
        "sharding_constraint",
        "psum",
        "psum2",
        "psum_invariant",
    }
)
"""Results that are their operand seen otherwise (a transpose becomes the layout that its producer writes; an all-reduce
works in place)."""

BUFFERS = HEAVY - {"transpose", "dynamic_slice", "concatenate"}
DEAR = frozenset(
    {
        "exp",
        "exp2",
        "expm1",
        "log",
        "log1p",
        "tanh",
        "logistic",
        "erf",
        "erfc",
        "erf_inv",
        "sin",
        "cos",
        "tan",
        "pow",
        "rsqrt",
        "sqrt",
        "div",
        "lgamma",
        "digamma",
    }
)
CALLS = frozenset(
    {
        "jit",
        "pjit",
        "closed_call",
        "core_call",
        "custom_jvp_call",
        "custom_vjp_call",
        "custom_vjp_call_jaxpr",
        "remat",
        "checkpoint",
        "remat2",
        "custom_lin",
    }
)


class _Value:
    """A value of one inlined instance of a jaxpr."""

    __slots__ = ("aval",)

    def __init__(self, aval: Any) -> None:
        self.aval = aval


@dataclass
class _Node:
    """An equation after inlining: values instead of variables (literals are left out)."""

    name: str
    equation: Any
    inputs: list[_Value]
    outputs: list[_Value]


def _inlined(jaxpr: Any, given: Sequence[_Value | None]) -> tuple[list[_Node], list[_Value | None]]:
    """(nodes, results) with calls opened; loops, conditionals and ``shard_map`` stay whole."""
    values: dict[Any, _Value | None] = dict(zip(jaxpr.invars, given, strict=True))
    values |= {v: _Value(v.aval) for v in jaxpr.constvars}
    read = lambda v: None if hasattr(v, "val") else values[v]  # noqa: E731
    nodes: list[_Node] = []
    for equation in jaxpr.eqns:
        inputs = [read(v) for v in equation.invars]
        name = equation.primitive.name
        if name in CALLS:
            body = _inner(equation)[0][0]
            inside, results = _inlined(body, inputs[len(inputs) - len(body.invars) :])
            nodes += inside
            values |= dict(zip(equation.outvars, results, strict=True))
            continue
        outputs = [_Value(v.aval) for v in equation.outvars]
        values |= dict(zip(equation.outvars, outputs, strict=True))
        nodes.append(_Node(name, equation, [v for v in inputs if v is not None], outputs))
    return nodes, [read(v) for v in jaxpr.outvars]


def _owners(nodes: list[_Node], results: Sequence[_Value | None]) -> dict[_Value, _Value | None]:
    """Maps every value to the one whose buffer it is (itself, or what it views), or to None if it fuses away."""
    users: dict[_Value, list[_Node]] = {}
    for node in nodes:
        for v in node.inputs:
            users.setdefault(v, []).append(node)
    kept = {v for v in results if v is not None}
    owner: dict[_Value, _Value | None] = {}
    for node in nodes:
        for v in node.outputs:
            mine = users.get(v, [])
            if node.name in VIEWS:
                source = node.inputs[0] if node.inputs else None
                owner[v] = owner.get(source, source) if source is not None else None
            elif node.name in ("broadcast_in_dim", "iota", "axis_index"):
                owner[v] = None
            elif node.name in BUFFERS or _inner(node.equation) or v in kept:
                owner[v] = v
            else:
                # Cheap results are computed again in each consumer; dear ones are kept when there are several.
                again = len(mine) <= 1 or node.name not in DEAR
                owner[v] = None if again and not any(_opaque(user) for user in mine) else v
    return owner


def _opaque(node: _Node) -> bool:
    """Whether a node needs its operands as buffers (a reduction fuses with what makes its operand)."""
    return (node.name in BUFFERS and node.name not in REDUCTIONS) or bool(_inner(node.equation))


def _shares(nodes: list[_Node]) -> dict[_Value, float]:
    """Part of each value that one device holds, where a ``shard_map`` tells; elementwise neighbours are divided
    alike."""
    share: dict[_Value, float] = {}
    for node in nodes:
        if node.name == "shard_map":
            body = _inner(node.equation)[0][0]
            outer = list(node.equation.invars)
            values = iter(node.inputs)
            for v, inside in zip(outer, body.invars, strict=True):
                if not hasattr(v, "val"):
                    value = next(values)
                    share.setdefault(value, _bytes(inside) / max(_bytes(value), 1.0))
            for value, inside in zip(node.outputs, body.outvars, strict=True):
                share.setdefault(value, _bytes(inside) / max(_bytes(value), 1.0))
    for _ in range(2):
        for node in nodes:
            same = (
                [v for v in (*node.inputs, *node.outputs) if v.aval.shape == node.outputs[0].aval.shape]
                if node.outputs
                else []
            )
            known = [share[v] for v in same if v in share]
            if known and node.name not in BUFFERS and not _inner(node.equation):
                for v in same:
                    share.setdefault(v, min(known))
    return share


def _live(jaxpr: Any) -> float:
    """Peak bytes of a program's temporaries; its inputs and results are accounted by the caller."""
    given = [_Value(v.aval) for v in jaxpr.invars]
    nodes, outs = _inlined(jaxpr, given)
    return _peak(nodes, given, outs, _shares(nodes))


def _peak(nodes: list[_Node], given: list[_Value], outs: Sequence[_Value | None], share: dict[_Value, float]) -> float:
    owner = _owners(nodes, outs)
    outside = set(given)
    kept = {owner.get(v, v) for v in outs if v is not None}
    last: dict[_Value, int] = {}
    roots: dict[_Value, set[_Value]] = {}  # what a value that fuses away is computed from
    for position, node in enumerate(nodes):
        mine: set[_Value] = set()
        for v in node.inputs:
            base = owner.get(v, v)
            mine |= roots.get(v, set()) if base is None else {base}
        for base in mine:
            last[base] = position
        for v in node.outputs:
            if owner[v] is None:
                roots[v] = mine
    sizes: dict[_Value, float] = {}
    alive = peak = 0.0
    for position, node in enumerate(nodes):
        opaque = _opaque(node)
        if not opaque:  # elementwise work writes into an operand that dies here; products and loops hold both
            for v in [v for v in sizes if last[v] <= position]:
                alive -= sizes.pop(v)
        for v in node.outputs:
            if owner[v] is v and v not in kept and v not in outside:
                sizes[v] = _bytes(v) * share.get(v, 1.0)
                alive += sizes[v]
                last.setdefault(v, position)
        peak = max(peak, alive + _inside(node))
        if opaque:
            for v in [v for v in sizes if last[v] <= position]:
                alive -= sizes.pop(v)
    return peak


def _inside(node: _Node) -> float:
    """Bytes that a node's own program needs beside its operands and results.

    A loop of more than one turn holds its carry twice: the body reads the old while it writes the new.
    """
    extra = 0.0
    if node.name == "scan" and node.equation.params["length"] > 1:
        # Carries keep their shape; stacked results gain an axis (versions of JAX spell the counts differently).
        inside = _inner(node.equation)[0][0].outvars
        pairs = zip(node.equation.outvars, inside, strict=True)
        extra = sum(_bytes(outer) for outer, inner in pairs if outer.aval.shape == inner.aval.shape)
    return extra + max((_live(body) for body, _ in _inner(node.equation)), default=0.0)


# --- a planner model -----------------------------------------------------------------------------------------------


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
    one, two = (list(_flat(_trace(function, [shapes, *sized(times)]))) for times in (1, 2))
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
        inner = _inner(equation)
        if inner:
            for body, count in inner:
                yield from _flat(body, times * count)
        for v in equation.outvars:
            alive[v] = _bytes(v)
        for v in [v for v in alive if last.get(v, -1) <= position]:
            del alive[v]
        if not inner:
            yield equation, times, sum(size for v, size in alive.items() if v not in inputs)


def _operations(equation: Any, other: Any, times: float, samples: int) -> tuple[list[Gemm | Stream], float, float]:
    """(operations per sample, FLOPs per sample, bytes kept per sample) of one equation."""
    name = equation.primitive.name
    if name in FREE:
        return [], 0.0, 0.0
    size, double = (sum(map(_bytes, e.outvars)) for e in (equation, other))
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
