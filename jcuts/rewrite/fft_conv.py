"""FFT convolution as a rewrite: `lax.fft` of image and filters, one batched complex GEMM, and the inverse transform.

    y = irfft2( sum over channels of rfft2(x) * rfft2(flipped w) )          (Mathieu, Henaff and LeCun, 2014)

A direct convolution takes C K products per output and tap, this one 4 C K per point of the padded image (half of a
real signal's spectrum, 4 products of a complex one each at 2 FLOP), and three transforms.  Filters of many taps gain:
41x11 and 11x11, not 7x7 (`LEAST_TAPS`).  Strides keep a part of what is computed, so that taps count by the stride.
The error is that of float32 whatever the convolution asks for.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jax import lax
from scipy import fft as scipy_fft

from jcuts.rewrite.dense_conv import DenseConv, replace_convs
from jcuts.rewrite.matmul_patterns import Program
from jcuts.trace import jaxapi

LEAST_TAPS = 96.0
"""Taps over the product of the strides from which on the transforms pay, at full float32 precision.

Measured on an H100 (benchmarks/results/gpu_kernels/transformed_convs_h100_2026-11-26b.json), over XLA's direct
convolution: 7x7 (49) and 9x9 (81) 0.5 times as fast, 11x11 (121) 1.7, 21x11 with stride 2 (116) 2.8, 41x11 (451) 8.8.
"""
LEAST_TAPS_TF32 = 256.0
"""The same where TF32 suffices: 11x11 and 21x11 with stride 2 0.5 to 0.6 times as fast, 41x11 (451) 2.1."""
LEAST_RESULTS = 1.0
"""Pixels of the result per tap: fewer are a filter gradient (MobileNetV2's step on an H100: 6 ms of transforms)."""
LEAST_CHANNELS = 16
"""Of the image and of the result: products of fewer are no work for a GEMM."""


def fft_conv(closed: jaxapi.Closed) -> tuple[jaxapi.Closed, int]:
    """Replaces the convolutions of many taps; returns the program and their number."""
    return replace_convs(closed, is_worth, _call)


def is_worth(conv: DenseConv) -> bool:
    """Whether the transform is expected to gain.

    Not where the result is smaller than the window, as in filter gradients, whose window is the output's gradient: the
    transforms have the image's size, and the direct algorithm computes few sums.
    """
    if math.prod(conv.outputs) < LEAST_RESULTS * math.prod(conv.taps):
        return False
    taps = conv.taps[0] * conv.taps[1] / (conv.strides[0] * conv.strides[1])
    return (
        taps >= (LEAST_TAPS if conv.beyond_tf32 else LEAST_TAPS_TF32)
        and min(conv.channels, conv.filters) >= LEAST_CHANNELS
    )


def convolve(conv: DenseConv, x: Any, w: Any) -> Any:
    """The convolution. Args: x, w: as they lie."""
    image = conv.padded(
        conv.image_last(x),
        (conv.padding[0][0], conv.padding[1][0]),
        (conv.padding[0][1], conv.padding[1][1]),
    )
    filters = conv.filters_last(w)[::-1, ::-1]
    gaps = [d - 1 for d in conv.dilation]
    filters = lax.pad(filters, jnp.zeros((), w.dtype), [(0, 0, gaps[0]), (0, 0, gaps[1]), (0, 0, 0), (0, 0, 0)])
    reach = filters.shape[:2]
    # A circular convolution of the padded image's size: what wraps around falls on results that are not used.
    sizes = [int(scipy_fft.next_fast_len(max(image.shape[1 + d], reach[d]), real=d == 1) or 0) for d in range(2)]
    fx = jnp.fft.rfft2(image, sizes, axes=(1, 2))
    fw = jnp.fft.rfft2(filters, sizes, axes=(0, 1))
    # [rows, columns, batch, channels] . [rows, columns, channels, filters]
    made = lax.dot_general(fx, fw, (((3,), (2,)), ((1, 2), (0, 1))), precision=lax.Precision.HIGHEST)
    whole = jnp.fft.irfft2(made, sizes, axes=(0, 1))
    ends = [reach[d] - 1 + (conv.outputs[d] - 1) * conv.strides[d] + 1 for d in range(2)]
    kept = lax.slice(
        whole, (reach[0] - 1, reach[1] - 1, 0, 0), (ends[0], ends[1], conv.batch, conv.filters), (*conv.strides, 1, 1)
    )
    return conv.result(jnp.transpose(kept, (2, 0, 1, 3)))


def _call(conv: DenseConv, _: Program) -> Any:
    return jaxapi.call_eqn(lambda x, w: convolve(conv, x, w), list(conv.eqn.invars), conv.eqn.outvars)
