"""Operations of the pruning study on a GPU: their programs as the tuner gets them, operands, and what they compute."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"  # JAX only traces, and computes what is to be compared with

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jcuts.fusion import greedy
from jcuts.fusion.match_inverted_residual import inverted_residual_groups
from jcuts.kernel_ir.program import Program
from jcuts.rewrite.tf32_weights import round_tf32
from tests import programs

Shape = tuple[int, ...]
NHWC = ("NHWC", "HWIO", "NHWC")


@dataclass(frozen=True)
class Operation:
    """One operation.

    Attributes:
        function, shapes: of its arguments; dtype: of all of them.
        kind: 'plain', 'rounded' (weights are numbers of TF32), 'block' or 'attention'.
        weights: which arguments are: scaled, so that sums are of the size of 1, and rounded where ``kind`` says so.
        tolerance: of a result, in parts of its root mean square.
    """

    function: Callable[..., Any]
    shapes: tuple[Shape, ...]
    kind: str = "plain"
    dtype: str = "float32"
    weights: tuple[int, ...] = ()
    tolerance: float = 1e-3

    @cached_property
    def arguments(self) -> list[np.ndarray]:
        """Random, the same ones everywhere."""
        rng = np.random.default_rng(0)
        found = [rng.standard_normal(shape, np.float32) for shape in self.shapes]
        for place in self.weights:
            scaled = found[place] / np.float32(np.sqrt(max(1, found[place].size // max(found[place].shape))))
            found[place] = round_tf32(scaled) if self.kind in ("rounded", "block") else scaled
        return [np.asarray(jnp.asarray(x, self.dtype)) for x in found]

    @cached_property
    def traced(self) -> programs.Traced:
        """The function as a graph, on operands that take no memory."""
        return programs.trace(self.function, *self.arguments)

    @cached_property
    def program(self) -> Program:
        """The unscheduled program."""
        traced = self.traced
        if self.kind == "rounded":
            return traced.rounded()
        if self.kind == "attention":
            return traced.attention()[1]
        if self.kind == "block":
            found = inverted_residual_groups(traced.graph, greedy.group(traced.graph).subsets, lambda program: True)
            assert len(found) == 1 and len(found[0].members) == len(traced.graph.nodes), found
            rounded = {self.shapes[place] for place in self.weights}
            buffers = tuple(replace(b, tf32=b.shape in rounded) for b in found[0].program.buffers)
            return replace(found[0].program, buffers=buffers)
        return traced.program()

    @cached_property
    def operands(self) -> list[np.ndarray]:
        """In the program's order."""
        found = self.traced.operands(self.traced.attention()[0] if self.kind == "attention" else None)
        assert [x.shape for x in found] == [b.shape for b in self.program.inputs]
        return found

    def results(self) -> list[np.ndarray]:
        """What every kernel has to compute."""
        if self.kind == "attention":
            assert self.traced.attention()[0] == self.traced.everything
        with jax.default_matmul_precision("highest"):
            return [np.asarray(x, np.float32) for x in jax.tree.leaves(jax.jit(self.function)(*self.arguments))]


def _dense(x: Any, w: Any, b: Any) -> Any:
    return jnp.maximum(x @ w + b, 0.0)


def _along(after: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda x, w, b: after(lax.dot_general(x, w, (((1,), (1,)), ((), ()))) + b)


def _relu(x: Any) -> Any:
    return jnp.maximum(x, 0.0)


def _convolution(stride: int = 1, names: tuple[str, str, str] = NHWC, groups: int = 1) -> Callable[..., Any]:
    def run(x: Any, w: Any, b: Any) -> Any:
        y = lax.conv_general_dilated(
            x, w, (stride, stride), "SAME", dimension_numbers=names, feature_group_count=groups
        )
        return _relu(y + b)

    return run


def _depthwise(stride: int = 1) -> Callable[..., Any]:
    def run(x: Any, w: Any, b: Any) -> Any:
        y = lax.conv_general_dilated(
            x, w, (stride, stride), "SAME", dimension_numbers=NHWC, feature_group_count=x.shape[-1]
        )
        return jnp.clip(y + b, 0.0, 6.0)

    return run


def _filters(x: Any, g: Any) -> Any:
    """Gradient of a depthwise 3x3 convolution's filter."""
    w = jnp.zeros((3, 3, 1, x.shape[-1]), x.dtype)
    return jax.vjp(
        lambda w: lax.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=NHWC, feature_group_count=x.shape[-1]
        ),
        w,
    )[1](g)[0]


def _norm(x: Any, g: Any, b: Any) -> Any:
    mean = x.mean(-1, keepdims=True)
    return (x - mean) * lax.rsqrt(jnp.square(x - mean).mean(-1, keepdims=True) + 1e-5) * g + b


def _batch_norm(x: Any, g: Any, b: Any) -> Any:
    mean = x.mean(0)
    return (x - mean) * lax.rsqrt(jnp.square(x - mean).mean(0) + 1e-5) * g + b


def _pool(reduce: Any, start: float, stride: int) -> Callable[[Any], Any]:
    return lambda x: lax.reduce_window(x, start, reduce, (1, 3, 3, 1), (1, stride, stride, 1), "SAME")


def _attention(q: Any, k: Any, v: Any) -> Any:
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5, -1)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(*q.shape[:2], q.shape[2] * q.shape[3])


def _block(size: int, batch: int, channels: int, wide: int, stride: int, features: int) -> Operation:
    from benchmarks.gpu_kernels.inverted_residual import function

    residual = stride == 1 and channels == features
    shapes: list[Shape] = [(batch, size, size, channels or wide)]
    if channels:
        shapes += [(wide, 1, 1, channels), (wide,)]
    shapes += [(3, 3, 1, wide), (wide,), (features, 1, 1, wide), (features,)]
    weights = (1, 5) if channels else (3,)
    return Operation(
        function(stride, True, residual, not channels), tuple(shapes), "block", weights=weights, tolerance=2e-2
    )


def _product(function: Callable[..., Any], *shapes: Shape, kind: str = "plain", dtype: str = "float32") -> Operation:
    return Operation(function, shapes, kind, dtype, (1,), 5e-2 if dtype == "bfloat16" else 1e-2)


OHWI = ("NHWC", "OHWI", "NHWC")
OPERATIONS: dict[str, Operation] = {
    # matrix units
    "gemm 1024x512x512, ReLU": _product(_dense, (1024, 512), (512, 512), (512,)),
    "gemm 2048x1024x1024 bf16": _product(lambda x, w: x @ w, (2048, 1024), (1024, 1024), dtype="bfloat16"),
    "gemm 3136x256x512 rounded": _product(_along(_relu), (3136, 256), (512, 256), (512,), kind="rounded"),
    "gemm 384x768x768 rounded, GELU": _product(_along(jax.nn.gelu), (384, 768), (768, 768), (768,), kind="rounded"),
    "gemm 64x1024x1000": _product(_dense, (64, 1024), (1024, 1000), (1000,)),
    "scores 48x384x384x64": _product(
        lambda q, k: jnp.einsum("bqd,bkd->bqk", q, k) * 0.125, (48, 384, 64), (48, 384, 64)
    ),
    "conv1x1 56x56 64 to 256": _product(_convolution(), (8, 56, 56, 64), (1, 1, 64, 256), (256,)),
    "conv1x1 14x14 576 to 96 rounded": _product(
        _convolution(1, OHWI), (32, 14, 14, 576), (96, 1, 1, 576), (96,), kind="rounded"
    ),
    "conv3x3 28x28 64 to 64": _product(_convolution(), (16, 28, 28, 64), (3, 3, 64, 64), (64,)),
    "conv3x3 14x14 128 to 128 rounded": _product(
        _convolution(1, OHWI), (32, 14, 14, 128), (128, 3, 3, 128), (128,), kind="rounded"
    ),
    "conv3x3/2 56x56 64 to 128 bf16": _product(
        _convolution(2), (16, 56, 56, 64), (3, 3, 64, 128), (128,), dtype="bfloat16"
    ),
    "conv7x7/2 224x224 3 to 64": _product(_convolution(2), (8, 224, 224, 3), (7, 7, 3, 64), (64,)),
    "conv3x3/2 224x224 3 to 32": _product(_convolution(2), (16, 224, 224, 3), (3, 3, 3, 32), (32,)),
    "block 28x28 32, 192, 32": _block(28, 32, 32, 192, 1, 32),
    "block 14x14 96, 576, 96": _block(14, 32, 96, 576, 1, 96),
    "block 112x112 32, 16": _block(112, 8, 0, 32, 1, 16),
    "attention 4x384x12x64": Operation(_attention, ((4, 384, 12, 64),) * 3, "attention", tolerance=2e-2),
    "attention 4x512x12x64 bf16": Operation(
        _attention, ((4, 512, 12, 64),) * 3, "attention", "bfloat16", tolerance=5e-2
    ),
    # windows, rows, columns, element by element
    "depthwise 14x14x576": Operation(_depthwise(), ((64, 14, 14, 576), (3, 3, 1, 576), (576,))),
    "column sum 65536x256": Operation(lambda x: x.sum(0), ((65536, 256),)),
    "full sum 2^24": Operation(lambda x: x.sum(), ((1 << 24,),), tolerance=1e-2),
    "max pool/2 112x112x64": Operation(_pool(lax.max, -np.inf, 2), ((16, 112, 112, 64),)),
    "depthwise/2 112x112x64": Operation(_depthwise(2), ((16, 112, 112, 64), (3, 3, 1, 64), (64,))),
    "row sum 8192x2048": Operation(lambda x: x.sum(1), ((8192, 2048),)),
    "softmax 16384x1000": Operation(lambda x: jax.nn.softmax(x), ((16384, 1000),)),
    "average pool 35x35x288": Operation(_pool(lax.add, 0.0, 1), ((32, 35, 35, 288),)),
    "layer norm 16384x1024": Operation(_norm, ((16384, 1024), (1024,), (1024,))),
    "batch norm 16384x512": Operation(_batch_norm, ((16384, 512), (512,), (512,))),
    "NHWC to NCHW": Operation(lambda x: jnp.transpose(x, (0, 3, 1, 2)) + 1.0, ((32, 56, 56, 64),)),
    "transpose 4096x3072": Operation(lambda x: x.T * 2.0, ((4096, 3072),)),
    "depthwise 5x5 28x28x240": Operation(_depthwise(), ((16, 28, 28, 240), (5, 5, 1, 240), (240,))),
    "scale, shift, ReLU": Operation(lambda x, a, b: jnp.maximum(x * a + b, 0), ((64, 28, 28, 512), (512,), (512,))),
    "bias, GELU": Operation(lambda x, b: jax.nn.gelu(x + b), ((4096, 4096), (4096,))),
    "depthwise 56x56x144": Operation(_depthwise(), ((32, 56, 56, 144), (3, 3, 1, 144), (144,))),
    "depthwise gradient 28x28x96": Operation(_filters, ((32, 28, 28, 96), (32, 28, 28, 96))),
}
