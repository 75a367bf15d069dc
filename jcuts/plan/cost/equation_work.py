"""Work of one equation per sample: matrix products, memory-bound kernels, bytes kept for the backward pass; elementwise
chains fuse.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jcuts.plan.cost.jaxpr import bytes_of, inner, products_of
from jcuts.plan.cost.primitive_kinds import FREE, HEAVY, REDUCTIONS
from jcuts.plan.spec.layers import Gemm, Stream


@dataclass
class Work:
    """One equation's cost per sample.

    Attributes:
        flops, operations: matrix products and memory-bound kernels. kept: bytes from forward to backward pass. alive:
        bytes that exist after it. parameters: values that it is the first to use. tables: sizes of embedding tables
        that it looks up. pooled, rows: bytes that the look-ups give, pooled and not. key: equal for equal equations.
    """

    flops: float = 0.0
    operations: list[Gemm | Stream] = field(default_factory=list)
    kept: float = 0.0
    alive: float = 0.0
    parameters: float = 0.0
    tables: list[float] = field(default_factory=list)
    pooled: float = 0.0
    rows: float = 0.0
    key: tuple = ()


def equation_work(equation: Any, other: Any, samples: int, times: float = 1.0, *, fused: bool = False) -> Work:
    """The cost per sample of one equation, traced at a batch and (``other``) at twice of it; a loop's or conditional's
    is that of its body, as often as it runs.

    An elementwise equation that is ``fused`` into what reads it moves nothing (what a loop stacks up of it for the
    backward pass is counted with the stacks); any other result is written and read once, and three times as much as the
    result moves in the backward pass of an elementwise one (operand, gradient in, gradient out), four times of another.
    """
    name = equation.primitive.name
    if name in FREE:
        return Work()
    bodies, others = inner(equation), inner(other)
    if bodies:
        total = Work()
        for (body, count), (body_two, _) in zip(bodies, others, strict=True):
            variables = [(e, [v for v in e.invars if not hasattr(v, "val")], e.outvars) for e in body.eqns]
            gone = fused_equations(variables, body.outvars)
            for position, (mine, theirs) in enumerate(zip(body.eqns, body_two.eqns, strict=False)):
                part = equation_work(mine, theirs, samples, times * count, fused=position in gone)
                total.flops += part.flops
                total.kept += part.kept
                total.operations += part.operations
        return total
    size, double = (sum(map(bytes_of, e.outvars)) for e in (equation, other))
    per_sample = (double - size) / samples
    product, doubled = products_of(equation), products_of(other)
    if product is not None and doubled is not None and not _is_depthwise(product):
        return _product_work(product, doubled, samples, times, per_sample)
    result = per_sample * times
    if name in HEAVY:
        return Work(operations=[Stream(name, 2 * result, 4 * result, "no", times, times)], kept=result)
    kept = 0.5 * result
    if fused:
        return Work(kept=kept)
    return Work(operations=[Stream(name, 2 * result, 3 * result, "no", times, times)], kept=kept)


def fused_equations(program: Sequence[tuple[Any, Sequence[Any], Sequence[Any]]], results: Sequence[Any]) -> set[int]:
    """Positions of elementwise equations that are part of the kernels that read their results: every reader, seen
    through views, is elementwise or a reduction, and waits for no product, reduction or loop besides.

    Args: program: (equation, operands, results) in order, literals left out; results: what the program returns.
    """
    readers: dict[Hashable, list[int]] = {}
    level: dict[Hashable, int] = {}  # products, reductions, loops and the like that lie before a value
    ready: list[int] = []  # the level at which an equation runs
    elementwise: list[bool] = []
    for position, (equation, operands, outputs) in enumerate(program):
        for v in set(operands):
            readers.setdefault(v, []).append(position)
        ready.append(max((level.get(v, 0) for v in operands), default=0))
        name = equation.primitive.name
        buffer = name in HEAVY or bool(inner(equation)) or products_of(equation) is not None
        elementwise.append(not buffer and name not in FREE)
        level |= dict.fromkeys(outputs, ready[position] + buffer)
    kept = {v for v in results if not hasattr(v, "val")}

    def read_at(v: Hashable, at: int) -> bool:
        """Whether all that reads a value is elementwise or a reduction, at one level."""
        if v in kept or v not in readers:
            return False
        for position in readers[v]:
            name, outputs = program[position][0].primitive.name, program[position][2]
            if name in FREE:
                if not all(read_at(view, at) for view in outputs):
                    return False
            elif not (elementwise[position] or name in REDUCTIONS) or ready[position] != at:
                return False
        return True

    return {
        position
        for position, (_, _, outputs) in enumerate(program)
        if elementwise[position] and all(read_at(v, ready[position]) for v in outputs)
    }


def _is_depthwise(product: Gemm) -> bool:
    """Whether a grouped convolution is one of channels by themselves, which memory bounds, not matrix units."""
    return product.name == "convolution" and product.batch >= GROUPS > product.n


GROUPS = 16
"""Groups from which on, and features per group up to which, a convolution is no matrix product: a tile's least side."""


def _product_work(product: Gemm, doubled: Gemm, samples: int, times: float, per_sample: float) -> Work:
    """A matrix product per sample: whichever extent doubles with the batch belongs to samples."""
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
        return Work(flops, [Gemm("dot", m / samples, n, k, batch, copies=copies, bytes=product.bytes)])
    one = Gemm("dot", m, n, k, batch, per_sample=grows, copies=copies, bytes=product.bytes)
    return Work(flops, [one], per_sample * times)
