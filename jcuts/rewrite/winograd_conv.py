"""Winograd convolution F(4x4, 3x3) as a rewrite: tile transforms and one batched GEMM in place of a 3x3 convolution.

    V = B^T d B per input tile and channel        U = G g G^T per pair of channels        (`base.toom_cook`)
    M[k] = V[k] . U[k],  k = 1 .. 36              y = A^T M A per output tile and filter

A tile of 4x4 outputs takes 36 products per pair of channels in place of 144 (Lavin and Gray, Fast algorithms for
convolutional neural networks, 2016, section 4.1).  What remains are FMAs, at full float32 precision: the rewrite is for
convolutions that ask for more than TF32, for which there is no tensor core.  The transforms move 36 numbers per 16
inputs and outputs, twice; they pay from `LEAST_CHANNELS` on.  Weights that are constants are transformed in float64.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jcuts.base import toom_cook
from jcuts.rewrite.dense_conv import DenseConv, replace_convs
from jcuts.rewrite.matmul_patterns import Program
from jcuts.trace import jaxapi

TAPS = 3
POINTS = 6
"""Values of a tile along a dimension."""
LEAST_CHANNELS = 64.0
"""C K / (C + K) from which on the products that are saved outweigh the transforms.

Measured on an H100 (benchmarks/results/gpu_kernels/transformed_convs_h100_2026-11-26b.json), over XLA's direct
convolution: 128 to 128 channels (64) 1.35 times as fast, 256 (128) 2.4, 512 (256) 2.2 to 2.8.
"""
LEAST_TILES = 64
"""Rows of each product, from which on it fills a tile of a GEMM kernel."""


def winograd_conv(closed: jaxapi.Closed) -> tuple[jaxapi.Closed, int]:
    """Replaces the 3x3 convolutions at full float32 precision; returns the program and their number."""
    return replace_convs(closed, is_worth, _call)


def is_worth(conv: DenseConv) -> bool:
    """Whether the transform applies, and is expected to gain."""
    applies = conv.taps == (TAPS, TAPS) and conv.strides == conv.dilation == (1, 1) and conv.beyond_tf32
    product = conv.channels * conv.filters / (conv.channels + conv.filters)
    return applies and product >= LEAST_CHANNELS and conv.batch * int(np.prod(_tiles(conv))) >= LEAST_TILES


def convolve(conv: DenseConv, x: Any, weights: Any) -> Any:
    """The convolution. Args: x: the image as it lies; weights: transformed, [36, channels, filters]."""
    a_t, _, b_t = (np.array(m, np.float64) for m in toom_cook.matrices(POINTS, TAPS))
    made, (rows, columns) = POINTS - TAPS + 1, _tiles(conv)
    low = (conv.padding[0][0], conv.padding[1][0])
    sizes = ((rows + 1) * made, (columns + 1) * made)
    high = tuple(size - extent - before for size, extent, before in zip(sizes, conv.image, low, strict=True))
    padded = conv.padded(conv.image_last(x), low, (high[0], high[1]))
    precision = conv.eqn.params["precision"]
    # A tile of 6 is a block of 4 and the first 2 of the next one.
    blocks = padded.reshape(conv.batch, rows + 1, made, columns + 1, made, conv.channels)
    lines = jnp.concatenate([blocks[:, :-1], blocks[:, 1:, : POINTS - made]], 2)
    tiles = jnp.concatenate([lines[:, :, :, :-1], lines[:, :, :, 1:, : POINTS - made]], 4)
    tile = tiles.transpose(2, 4, 0, 1, 3, 5)
    data = tile_transform(b_t, tile.reshape(POINTS * POINTS, -1), precision)
    flat = data.reshape(POINTS * POINTS, -1, conv.channels)
    products = lax.dot_general(flat, weights, (((2,), (1,)), ((0,), (0,))), precision=precision)
    outputs = tile_transform(a_t, products.reshape(POINTS * POINTS, -1), precision)
    whole = outputs.reshape(made, made, conv.batch, rows, columns, conv.filters).transpose(2, 3, 0, 4, 1, 5)
    whole = whole.reshape(conv.batch, rows * made, columns * made, conv.filters)
    high_, wide = conv.outputs
    return conv.result(whole[:, :high_, :wide])


def tile_transform(matrix: np.ndarray, values: Any, precision: Any) -> Any:
    """matrix . V . matrix^T of many V, as one product with the Kronecker square of the matrix.

    Args: values: [entries of V, row by row; number].
    """
    square = np.kron(matrix, matrix).astype(np.float32)
    return lax.dot_general(square, values, (((1,), (0,)), ((), ())), precision=precision)


def transformed_weights(conv: DenseConv, w: Any) -> Any:
    """G g G^T of all pairs of channels: [36, channels, filters]; in float64 where they are NumPy arrays."""
    of_filter = np.array(toom_cook.matrices(POINTS, TAPS)[1], np.float64)
    if isinstance(w, np.ndarray):
        _, rhs, _ = conv.eqn.params["dimension_numbers"]
        wide = w.astype(np.float64).transpose(rhs[2], rhs[3], rhs[1], rhs[0])
        found = np.einsum("ai,bj,ijco->abco", of_filter, of_filter, wide).astype(np.float32)
        return found.reshape(POINTS * POINTS, conv.channels, conv.filters)
    values = conv.filters_last(w).reshape(TAPS * TAPS, -1)
    made = tile_transform(of_filter, values, conv.eqn.params["precision"])
    return made.reshape(POINTS * POINTS, conv.channels, conv.filters)


def _call(conv: DenseConv, program: Program) -> Any:
    """The call that computes what a convolution computes."""
    x, w = conv.eqn.invars
    known = None if jaxapi.is_literal(w) else program.consts.get(w)
    if known is not None and not jaxapi.is_tracer(known):
        constant = program.constant(transformed_weights(conv, np.asarray(known)), np.float32)
        return jaxapi.call_eqn(lambda x, u: convolve(conv, x, u), [x, constant], conv.eqn.outvars)
    return jaxapi.call_eqn(lambda x, w: convolve(conv, x, transformed_weights(conv, w)), [x, w], conv.eqn.outvars)


def _tiles(conv: DenseConv) -> tuple[int, int]:
    made = POINTS - TAPS + 1
    return -(-conv.outputs[0] // made), -(-conv.outputs[1] // made)
