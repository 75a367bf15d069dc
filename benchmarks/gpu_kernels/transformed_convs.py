"""Winograd and FFT convolution against XLA's direct convolution: time and error, before a kernel family is written.

    python benchmarks/gpu_kernels/transformed_convs.py --out results
    python benchmarks/gpu_kernels/transformed_convs.py --out results --dry     # small sizes, on a CPU

Per layer: XLA's direct convolution at full float32 precision and at the default one (TF32); the rewrites `winograd` and
`ffts` as XLA compiles them; with ``--jcuts`` what `jcuts.optimize` makes of the layer, which is tuned for that; and as
they were before there were rewrites, F(2x2, 3x3) and F(4x4, 3x3) by einsums (Lavin and Gray, Fast algorithms for
convolutional neural networks, 2016) and FFT convolution of the whole image.  Median seconds of every program in turns,
and the error over that of the direct convolution (relative L2 norm, against float64).
"""

from __future__ import annotations

import argparse
import functools
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
    ("VGG 3x3 56x56x256 to 256", (8, 56, 56, 256), (3, 3, 256, 256), (1, 1)),
    ("VGG 3x3 28x28x512 to 512", (8, 28, 28, 512), (3, 3, 512, 512), (1, 1)),
    ("VGG 3x3 14x14x512 to 512", (8, 14, 14, 512), (3, 3, 512, 512), (1, 1)),
    ("VGG 3x3 112x112x128 to 128", (8, 112, 112, 128), (3, 3, 128, 128), (1, 1)),
    ("7x7 56x56x64 to 64", (8, 56, 56, 64), (7, 7, 64, 64), (1, 1)),
    ("9x9 56x56x64 to 64", (8, 56, 56, 64), (9, 9, 64, 64), (1, 1)),
    ("11x11 56x56x64 to 64", (8, 56, 56, 64), (11, 11, 64, 64), (1, 1)),
    ("41x11 81x300x32 to 32", (8, 81, 300, 32), (41, 11, 32, 32), (1, 1)),
    ("41x11/2 161x600x1 to 32", (8, 161, 600, 1), (41, 11, 1, 32), (2, 2)),
    ("21x11/2x1 81x300x32 to 32", (8, 81, 300, 32), (21, 11, 32, 32), (2, 1)),
)
"""(name, image, filters, strides); the last two are those of DeepSpeech2."""
DRY = (
    ("3x3 12x12x8 to 8", (2, 12, 12, 8), (3, 3, 8, 8), (1, 1)),
    ("7x5 20x16x4 to 4", (2, 20, 16, 4), (7, 5, 4, 4), (2, 1)),
)


def direct(x: Any, w: Any, strides: tuple[int, int], precision: Any = HIGHEST) -> Any:
    """XLA's convolution."""
    return lax.conv_general_dilated(x, w, strides, "SAME", dimension_numbers=NAMES, precision=precision)


def rewritten(rule: str, fn: Callable[..., Any], operands: Sequence[Any]) -> Callable[..., Any] | None:
    """A layer by one of jcuts' rewrites, wherever it can be applied; None where it cannot."""
    from unittest import mock

    from jcuts.rewrite import fft_conv, registry, winograd_conv
    from jcuts.rewrite.simplify import simplify
    from jcuts.trace import jaxapi
    from jcuts.trace.inline import inline

    flat = simplify(inline(jaxapi.closed_jaxpr_of(fn, *operands)))
    limits = {(winograd_conv, "LEAST_CHANNELS"): 0.0, (winograd_conv, "LEAST_TILES"): 1}
    limits |= {(fft_conv, "LEAST_TAPS"): 10.0, (fft_conv, "LEAST_CHANNELS"): 1}
    patches = [mock.patch.object(module, name, value) for (module, name), value in limits.items()]
    for patch in patches:
        patch.start()
    found = registry.rewritten(flat, (rule,))
    for patch in patches:
        patch.stop()
    return (lambda *args: jaxapi.eval_closed(found.closed, *args)[0]) if found.counts else None


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


def programs(operands: Sequence[Any], strides: tuple[int, int], ours: bool) -> dict[str, Callable[..., Any]]:
    """Those that apply to a layer. Args: ours: tunes it with jcuts, too."""
    whole, filters = functools.partial(direct, strides=strides), operands[1].shape
    found: dict[str, Callable[..., Any]] = {"direct": whole}
    found["direct, TF32"] = functools.partial(direct, strides=strides, precision=None)
    for rule in ("winograd", "ffts"):
        if (made := rewritten(rule, whole, operands)) is not None:
            found[rule] = made
    if filters[:2] == (3, 3) and strides == (1, 1):
        found |= {"einsums 2x2": winograd(2), "einsums 4x4": winograd(4)}
    elif strides == (1, 1):
        found["whole fft"] = by_fft
    compiled = {label: jax.jit(fn) for label, fn in found.items()}
    if ours:
        import jcuts

        compiled["jcuts"] = jcuts.optimize(whole)
    return compiled


def exact(x: np.ndarray, w: np.ndarray, strides: tuple[int, int]) -> np.ndarray:
    """The convolution of a few output channels in float64, on the host."""
    cpu = jax.devices("cpu")[0]
    with jax.enable_x64(True), jax.default_device(cpu):
        made = direct(jnp.asarray(x, jnp.float64), jnp.asarray(w, jnp.float64), strides)
        return np.asarray(made)


def measure(layer: tuple[Any, ...], seconds: float, ours: bool) -> dict[str, Any]:
    """Times and errors of one layer. Args: ours: with jcuts."""
    name, shape, filters, strides = layer
    rng = np.random.default_rng(0)
    x = rng.standard_normal(shape).astype(np.float32)
    w = (rng.standard_normal(filters) * np.prod(filters[:3]) ** -0.5).astype(np.float32)
    reference = exact(x[:1], w[..., :4], strides)
    operands = jnp.asarray(x), jnp.asarray(w)
    calls = programs(operands, strides, ours)
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
    decision = calls["jcuts"].decision(*operands) if "jcuts" in calls else None
    return {
        "layer": name,
        "decision": None if decision is None else decision.to_dict(),
        "seconds": medians,
        "direct_over": {label: medians["direct"] / value for label, value in medians.items()},
        "error_ratio": {label: value / errors["direct"] for label, value in errors.items()},
        "error": errors,
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
    }


VGG16 = (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0)
"""Filters of its 3x3 convolutions; 0 is a max pool."""


def vgg16(x: Any, weights: Sequence[Any]) -> Any:
    """VGG-16's convolutions and pools at full float32 precision."""
    left = list(weights)
    for filters in VGG16:
        if not filters:
            x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
            continue
        kernel, bias = left.pop(0)
        x = jax.nn.relu(direct(x, kernel, (1, 1)) + bias)
    return x


def network(batch: int, size: int, seconds: float) -> dict[str, Any]:
    """VGG-16 as a whole: plain `jax.jit` and `jcuts.optimize`, which races all its variants."""
    import jcuts

    rng = np.random.default_rng(1)
    channels, weights = 3, []
    for filters in VGG16:
        if filters:
            kernel = rng.standard_normal((3, 3, channels, filters)) * (2.0 / (9 * channels)) ** 0.5
            weights.append((jnp.asarray(kernel, jnp.float32), jnp.asarray(rng.standard_normal(filters), jnp.float32)))
            channels = filters
    x = jnp.asarray(rng.standard_normal((batch, size, size, 3)), jnp.float32)
    plain, ours = jax.jit(vgg16), jcuts.optimize(vgg16)
    start = time.perf_counter()
    jax.block_until_ready(ours(x, weights))
    first = time.perf_counter() - start
    jax.block_until_ready(plain(x, weights))
    times: dict[str, list[float]] = {"plain": [], "jcuts": []}
    stop = time.perf_counter() + seconds
    while time.perf_counter() < stop or len(times["plain"]) < 5:
        for label, call in (("plain", plain), ("jcuts", ours)):
            start = time.perf_counter()
            for _ in range(3):
                made = call(x, weights)
            jax.block_until_ready(made)
            times[label].append((time.perf_counter() - start) / 3)
    decision = ours.decision(x, weights)
    return {
        "network": f"VGG16 {batch}x{size}x{size}",
        "first_call_seconds": first,
        "seconds": {label: statistics.median(found) for label, found in times.items()},
        "decision": None if decision is None else decision.to_dict(),
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of transformed_convs.json")
    parser.add_argument("--seconds", type=float, default=1.5, help="of timing per layer")
    parser.add_argument("--dry", action="store_true", help="small sizes")
    parser.add_argument("--jcuts", action="store_true", help="tunes every layer, too")
    parser.add_argument("--vgg", type=int, default=0, metavar="BATCH", help="VGG-16 with jcuts at this batch, at last")
    options = parser.parse_args(argv)
    found = []
    for layer in DRY if options.dry else LAYERS:
        found.append(measure(layer, options.seconds, options.jcuts))
        ratios = ", ".join(
            f"{label}: {found[-1]['direct_over'][label]:.2f}x, error {found[-1]['error_ratio'][label]:.1f}x"
            for label in found[-1]["seconds"]
        )
        print(f"{layer[0]}: {ratios}", flush=True)
    if options.vgg:
        found.append(network(options.vgg, 32 if options.dry else 224, options.seconds))
        print(json.dumps(found[-1], indent=1), flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "transformed_convs.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
