"""Work of one equation per sample: matrix products, memory-bound kernels, bytes kept for the backward pass."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from jcuts.plan.cost.jaxpr import bytes_of, inner, products_of
from jcuts.plan.cost.primitive_kinds import FREE, HEAVY
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


def equation_work(equation: Any, other: Any, samples: int, times: float = 1.0) -> Work:
    """The cost per sample of one equation, traced at a batch and (``other``) at twice of it; a loop's or conditional's
    is that of its body, as often as it runs."""
    name = equation.primitive.name
    if name in FREE:
        return Work()
    bodies, others = inner(equation), inner(other)
    if bodies:
        total = Work()
        for (body, count), (body_two, _) in zip(bodies, others, strict=True):
            for mine, theirs in zip(body.eqns, body_two.eqns, strict=False):
                part = equation_work(mine, theirs, samples, times * count)
                total.flops += part.flops
                total.kept += part.kept
                total.operations += part.operations
        return total
    size, double = (sum(map(bytes_of, e.outvars)) for e in (equation, other))
    per_sample = (double - size) / samples
    product, doubled = products_of(equation), products_of(other)
    if product is not None and doubled is not None and not _is_depthwise(product):
        return _product_work(product, doubled, samples, times, per_sample)
    moved = 2 * per_sample * times
    fused = name not in HEAVY
    kernels = [times * (share if fused else 1.0) for share in FUSED]
    stream = Stream(name, moved, 2 * moved, "no", kernels[0], kernels[1])
    return Work(operations=[stream], kept=per_sample * times * (0.5 if fused else 1.0))


def _is_depthwise(product: Gemm) -> bool:
    """Whether a grouped convolution is one of channels by themselves, which memory bounds, not matrix units."""
    return product.name == "convolution" and product.batch >= GROUPS > product.n


GROUPS = 16
"""Groups from which on, and features per group up to which, a convolution is no matrix product: a tile's least side."""

FUSED = (0.3, 0.6)
"""Kernels per elementwise equation, forward and backward: chains of them fuse."""


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
        return Work(flops, [Gemm("dot", m / samples, n, k, batch, copies=copies)])
    return Work(flops, [Gemm("dot", m, n, k, batch, per_sample=grows, copies=copies)], per_sample * times)
