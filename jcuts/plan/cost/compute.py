"""Roofline-style time of one layer block on one GPU: GEMMs by shape, memory-bound kernels by bytes, host launches.

Every function takes arrays, one entry per (micro-batch, tensor, context, expert, sequence-parallel) combination.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from jcuts.plan.spec.cluster import Gpu
from jcuts.plan.spec.layers import BYTES, Block, Gemm

Floats = NDArray[np.float64]

TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.93), (128, 64, 0.82), (64, 128, 0.82), (64, 64, 0.70))
"""Output tiles of a GEMM library and their speed relative to the largest: a smaller tile reads its operands more often
(128 x 128 has 3/4 of the arithmetic intensity of 256 x 128).  The factors are stated, not measured.  Tile sizes:
NVIDIA, "Matrix multiplication background user's guide"."""


@dataclass(frozen=True)
class Shape:
    """Divisors of a block's dimensions under a plan: arrays of equal length."""

    micro: Floats
    tensor: Floats
    context: Floats
    expert: Floats
    sequence_parallel: NDArray[np.bool_]
    experts: int = 1


def gemm_time(
    gpu: Gpu, m: ArrayLike, n: ArrayLike, k: ArrayLike, batch: ArrayLike = 1.0, *, width: int = BYTES
) -> Floats:
    """Seconds of ``batch`` GEMMs (m x k) (k x n) of values of ``width`` bytes: 16 bits, or 32 at half the speed (TF32).

        waves = ceil(batch ceil(m/tm) ceil(n/tn) / SMs),   t = waves SMs 2 tm tn (k + ramp) / (eff(tile) eff peak)

    the best tile; never below operands and result once through memory.
    Args: extents >= 1 (fractions are allowed: averages); Returns: seconds > 0.
    """
    m, n, k, batch = (np.asarray(value, dtype=np.float64) for value in (m, n, k, batch))
    best = np.full(np.broadcast_shapes(m.shape, n.shape, k.shape, batch.shape), np.inf)
    work = 2.0 * gpu.multiprocessors * (k + gpu.gemm_ramp) / (gpu.peak * gpu.gemm_efficiency) * (width / BYTES)
    for rows, columns, speed in TILES:
        tiles = np.ceil(m / rows) * np.ceil(n / columns) * batch
        best = np.minimum(best, np.ceil(tiles / gpu.multiprocessors) * (rows * columns / speed) * work)
    moved = width * batch * (m * k + k * n + m * n)
    return np.maximum(best, moved / (gpu.bandwidth * gpu.memory_efficiency))


@dataclass(frozen=True)
class BlockTime:
    """Seconds of one layer's passes on the device, and kernels that the host launches for them."""

    forward: Floats
    backward: Floats
    inner: Floats
    """Forward of the attention core: what selective recomputation repeats."""
    last: Floats
    """Forward from the last row-divided product on: what a backward pass does not need."""
    kernels_forward: Floats
    kernels_backward: Floats
    kernels_inner: Floats


def block_time(block: Block, gpu: Gpu, shape: Shape) -> BlockTime:
    """Costs every operation of a block; see ``Gemm`` and ``Stream`` for how axes divide them."""
    size = shape.micro.shape
    forward, backward, inner, last = np.zeros(size), np.zeros(size), np.zeros(size), np.zeros(size)
    launches = [0.0, 0.0, 0.0]
    speed = gpu.bandwidth * gpu.memory_efficiency
    for op in block.operations:
        if isinstance(op, Gemm):
            one, two = _gemm(op, gpu, shape)
            count, count_back = float(op.copies), float(op.copies * op.gradient)
        else:
            divided = np.ones(size)
            if op.tensor == "yes":
                divided = shape.tensor
            elif op.tensor == "sequence":
                divided = np.where(shape.sequence_parallel, shape.tensor, 1.0)
            amount = shape.micro / (divided * shape.context * speed)
            count, count_back = op.kernels, op.kernels_backward
            one = op.forward * amount
            two = op.backward * amount
        one = one + count * gpu.kernel_gap
        forward += one
        backward += two + count_back * gpu.kernel_gap
        launches[0] += count
        launches[1] += count_back
        last = one.copy() if isinstance(op, Gemm) and op.tensor == "k" else np.where(last > 0, last + one, 0.0)
        if op.inner:
            inner += one
            launches[2] += count
    kernels = [np.full(size, value) for value in launches]
    return BlockTime(forward, backward, inner, last, *kernels)


def _gemm(op: Gemm, gpu: Gpu, shape: Shape) -> tuple[Floats, Floats]:
    """(forward, backward) seconds."""
    t, c = shape.tensor, shape.context
    ones = np.ones(shape.micro.shape)
    m, n, k, batch = op.m / c, op.n * ones, op.k * ones, op.batch * ones
    if op.per_sample == "batch":
        batch = batch * shape.micro
    else:
        m = m * shape.micro
    if op.tensor == "n":
        n = n / t
    elif op.tensor == "k":
        k = k / t
    elif op.tensor == "batch":
        batch = batch / t
    if op.expert:  # tokens of all data ranks of the expert axis meet at the GPU that holds their expert
        local = np.maximum(shape.experts / shape.expert, 1.0)
        batch, m = batch * local, m / local
    one = op.copies * gemm_time(gpu, m, n, k, batch, width=op.bytes)
    two = op.copies * gemm_time(gpu, m, k, n, batch, width=op.bytes)
    if op.gradient > 1:
        two = two + op.copies * gemm_time(gpu, k, n, m, batch, width=op.bytes)
    return one, two
