"""Winograd and FFT convolution against XLA's direct convolution: time and error, before a kernel family is written.

    python benchmarks/gpu_kernels/transformed_convs.py --out results
    python benchmarks/gpu_kernels/transformed_convs.py --out results --dry     # small sizes, on a CPU

Both are written with JAX's operations: F(2x2, 3x3) and F(4x4, 3x3) by transforms and one batched product (Lavin and
Gray, Fast algorithms for convolutional neural networks, 2016), FFT convolution by `jnp.fft`.  Their products run at the
highest precision, as the direct convolution does.  Per layer: median seconds of every program in turns, error over that
of the direct convolution (relative L2 norm, against float64), and the FLOP that each needs.  What the acceptance rule
admits has an error ratio of at most the tolerance (2).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

HIGHEST = lax.Precision.HIGHEST
NAMES = ("NHWC", "HWIO", "NHWC")
TRANSFORMS = {
    2: (
        [[1, 0, -1, 0], [0, 1, 1, 0], [0, -1, 1, 0], [0, 1, 0, -1]],
        [[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]],
        [[1, 1, 1, 0], [0, 1, -1, -1]],
    ),
    4: (
        [
            [4, 0, -5, 0, 1, 0],
            [0, -4, -4, 1, 1, 0],
            [0, 4, -4, -1, 1, 0],
            [0, -2, -1, 2, 1, 0],
            [0, 2, -1, -2, 1, 0],
            [0, 4, 0, -5, 0, 1],
        ],
        [
            [1 / 4, 0, 0],
            [-1 / 6, -1 / 6, -1 / 6],
            [-1 / 6, 1 / 6, -1 / 6],
            [1 / 24, 1 / 12, 1 / 6],
            [1 / 24, -1 / 12, 1 / 6],
            [0, 0, 1],
        ],
        [[1, 1, 1, 1, 1, 0], [0, 1, -1, 2, -2, 0], [0, 1, 1, 4, 4, 0], [0, 1, -1, 8, -8, 1]],
    ),
}
"""B^T, G and A^T of F(m x m, 3 x 3)."""
LAYERS = (
    ("VGG 3x3 56x56x256 to 256", (8, 56, 56, 256), (3, 3, 256, 256)),
    ("VGG 3x3 28x28x512 to 512", (8, 28, 28, 512), (3, 3, 512, 512)),
    ("VGG 3x3 112x112x128 to 128", (8, 112, 112, 128), (3, 3, 128, 128)),
    ("7x7 56x56x64 to 64", (8, 56, 56, 64), (7, 7, 64, 64)),
    ("11x11 56x56x64 to 64", (8, 56, 56, 64), (11, 11, 64, 64)),
    ("41x11 81x300x32 to 32", (8, 81, 300, 32), (41, 11, 32, 32)),
)
DRY = (("3x3 12x12x8 to 8", (2, 12, 12, 8), (3, 3, 8, 8)), ("7x5 20x16x4 to 4", (2, 20, 16, 4), (7, 5, 4, 4)))


def direct(x: Any, w: Any) -> Any:
    """XLA's convolution."""
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=NAMES, precision=HIGHEST)


def winograd(tile: int) -> Callable[[Any, Any], Any]:
    """F(tile x tile, 3 x 3): transforms of tiles and filters, one batched product, the inverse transform."""
    into, of_filter, out = (np.asarray(m, np.float32) for m in TRANSFORMS[tile])

    def convolve(x: Any, w: Any) -> Any:
        n, high, wide, channels = x.shape
        rows, columns = -(-high // tile), -(-wide // tile)
        pad = ((0, 0), (1, rows * tile + 1 - high), (1, columns * tile + 1 - wide), (0, 0))
        padded = jnp.pad(x, pad)
        size = tile + 2
        lines = jnp.stack([padded[:, k : k + rows * tile : tile] for k in range(size)], 1)
        tiles = jnp.stack([lines[:, :, :, k : k + columns * tile : tile] for k in range(size)], 2)
        data = jnp.einsum("ai,bj,nijrqc->abnrqc", into, into, tiles, precision=HIGHEST)
        weights = jnp.einsum("ai,bj,ijco->abco", of_filter, of_filter, w, precision=HIGHEST)
        flat = data.reshape(size, size, n * rows * columns, channels)
        made = jnp.einsum("abpc,abco->abpo", flat, weights, precision=HIGHEST)
        result = jnp.einsum("ia,jb,abpo->pijo", out, out, made, precision=HIGHEST)
        result = result.reshape(n, rows, columns, tile, tile, -1).transpose(0, 1, 3, 2, 4, 5)
        return result.reshape(n, rows * tile, columns * tile, -1)[:, :high, :wide]

    return convolve


def by_fft(x: Any, w: Any) -> Any:
    """FFT convolution of the whole image: three transforms and one batched product of complex numbers."""
    high, wide = (x.shape[a] + w.shape[a - 1] - 1 for a in (1, 2))
    fx = jnp.fft.rfft2(x, (high, wide), axes=(1, 2))
    fw = jnp.fft.rfft2(w[::-1, ::-1], (high, wide), axes=(0, 1))
    made = jnp.einsum("nhwc,hwco->nhwo", fx, fw, precision=HIGHEST)
    whole = jnp.fft.irfft2(made, (high, wide), axes=(1, 2))
    top, left = ((w.shape[a] - 1) - (w.shape[a] - 1) // 2 for a in (0, 1))
    return whole[:, top : top + x.shape[1], left : left + x.shape[2]]


def programs(filters: Sequence[int]) -> dict[str, Callable[[Any, Any], Any]]:
    """Those that apply to a filter's size."""
    found: dict[str, Callable[[Any, Any], Any]] = {"direct": direct}
    if tuple(filters[:2]) == (3, 3):
        return found | {"winograd 2x2": winograd(2), "winograd 4x4": winograd(4)}
    return found | {"fft": by_fft}


def exact(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """The convolution of a few output channels in float64, on the host."""
    cpu = jax.devices("cpu")[0]
    with jax.enable_x64(True), jax.default_device(cpu):
        made = direct(jnp.asarray(x, jnp.float64), jnp.asarray(w, jnp.float64))
        return np.asarray(made)


def measure(name: str, shape: Sequence[int], filters: Sequence[int], seconds: float) -> dict[str, Any]:
    """Times and errors of one layer."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal(shape).astype(np.float32)
    w = (rng.standard_normal(filters) * np.prod(filters[:3]) ** -0.5).astype(np.float32)
    reference = exact(x[:1], w[..., :4])
    calls = {label: jax.jit(fn) for label, fn in programs(filters).items()}
    operands = jnp.asarray(x), jnp.asarray(w)
    errors, times = {}, {}
    for label, call in calls.items():
        made = np.asarray(call(*operands))[:1, ..., :4].astype(np.float64)
        errors[label] = float(np.linalg.norm(made - reference) / np.linalg.norm(reference))
        times[label] = []
    stop = time.perf_counter() + seconds
    while time.perf_counter() < stop or min(map(len, times.values())) < 5:
        for label, call in calls.items():
            start = time.perf_counter()
            for _ in range(5):
                made = call(*operands)
            jax.block_until_ready(made)
            times[label].append((time.perf_counter() - start) / 5)
    medians = {label: statistics.median(found) for label, found in times.items()}
    return {
        "layer": name,
        "seconds": medians,
        "direct_over": {label: medians["direct"] / value for label, value in medians.items()},
        "error_ratio": {label: value / errors["direct"] for label, value in errors.items()},
        "error": errors,
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of transformed_convs.json")
    parser.add_argument("--seconds", type=float, default=1.5, help="of timing per layer")
    parser.add_argument("--dry", action="store_true", help="small sizes")
    options = parser.parse_args(argv)
    found = []
    for layer in DRY if options.dry else LAYERS:
        found.append(measure(*layer, options.seconds))
        ratios = ", ".join(
            f"{label}: {found[-1]['direct_over'][label]:.2f}x, error {found[-1]['error_ratio'][label]:.1f}x"
            for label in found[-1]["seconds"]
        )
        print(f"{layer[0]}: {ratios}", flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "transformed_convs.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
