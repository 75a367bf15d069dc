"""Gradients of depthwise convolutions, max pools, norms and embeddings, and optimisers: `jax.jit`, `jcuts.optimize`,
and the bound that the memory's bandwidth sets.

    python benchmarks/gpu_kernels/training_operations.py --out training_operations.json [--seconds 2] [CASE ...]
    python benchmarks/gpu_kernels/training_operations.py --dry --out dry.json      # tiny sizes, on any device

A case counts the bytes that any program has to move: every argument and result once, and what a reduction over the
whole array makes it read a second time (sums of a batch norm, a global norm of gradients), where that is larger than
the L2 cache.  The bound is these bytes over the rate of a copy of 1 GiB, measured in the same process.  Arguments that
a loop carries are donated, as in training.  Results are compared with `jax.jit`'s (relative L2 distance).

Times are of calls back to back; on a GPU also of kernels alone, as the profiler sees them ("busy"): an optimiser that
is called by itself, with 600 arrays, takes the host longer than the device.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.networks.baseline import environment  # noqa: E402
from benchmarks.networks.compiled_program import Stepped, own_arguments  # noqa: E402
from benchmarks.networks.interleaved_timing import interleaved, ratio  # noqa: E402
from benchmarks.networks.workloads.optimizers import adamw, sgd  # noqa: E402
from benchmarks.networks.workloads.spec import Program  # noqa: E402

COPY = 1 << 28
"""Numbers of the array whose copy gives the memory's rate."""
L2 = 50 << 20
"""Bytes of the L2 cache of an H100 or H200 (NVIDIA H100 white paper, table 3): a smaller array is read once."""
DRY = 8
"""Divides the extents of a dry run."""


@dataclass(frozen=True)
class Case:
    """A function and its arguments. Args: again: bytes that have to be read a second time."""

    program: Program
    again: int = 0

    def bytes(self) -> int:
        """Bytes of arguments, of results, and of what is read again."""
        import jax

        form = self.program.form(closed=False)
        results = jax.eval_shape(form.function, *form.arguments)
        return self.again + sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((form.arguments, results)))


def second_reading(*arrays: Any) -> int:
    """Bytes of the arrays that are too large to stay in L2 between two passes."""
    sizes = [x.size * x.dtype.itemsize for x in arrays]
    return sum(sizes) if sum(sizes) > L2 else 0


def normal(*shape: int, key: int = 0, dtype: str = "float32") -> Any:
    """Normal numbers."""
    import jax

    return jax.random.normal(jax.random.key(key), shape, dtype)


def depthwise(size: int, channels: int, stride: int, dry: bool) -> Case:
    """Both gradients of a 3x3 depthwise convolution of 64 images."""
    import jax

    batch, channels = (2, channels // DRY) if dry else (64, channels)
    size = size // DRY if dry else size
    numbers = ("NHWC", "HWIO", "NHWC")

    def layer(x: Any, w: Any) -> Any:
        return jax.lax.conv_general_dilated(
            x, w, (stride, stride), "SAME", feature_group_count=channels, dimension_numbers=numbers
        )

    x, w = normal(batch, size, size, channels), normal(3, 3, 1, channels, key=1)
    out = jax.eval_shape(layer, x, w)
    return Case(Program(lambda x, w, g: jax.vjp(layer, x, w)[1](g), None, (x, w, normal(*out.shape, key=2))))


def max_pool(size: int, window: int, stride: int, padding: str, dry: bool) -> Case:
    """The gradient of a max pool of 64 images of 64 channels."""
    import jax

    batch, size = (2, size // DRY) if dry else (64, size)

    def pooled(x: Any) -> Any:
        whole, by = (1, window, window, 1), (1, stride, stride, 1)
        return jax.lax.reduce_window(x, -jax.numpy.inf, jax.lax.max, whole, by, padding)

    x = normal(batch, size, size, 64)
    out = jax.eval_shape(pooled, x)
    return Case(Program(lambda x, g: jax.vjp(pooled, x)[1](g)[0], None, (x, normal(*out.shape, key=1))))


def batch_norm(size: int, channels: int, backward: bool, dry: bool) -> Case:
    """A batch norm of 64 images with ReLU behind it, or its gradient: sums first, then the values."""
    import jax
    import jax.numpy as jnp

    batch, size = (2, size // DRY) if dry else (64, size)

    def layer(x: Any, scale: Any, offset: Any) -> Any:
        mean, variance = jnp.mean(x, (0, 1, 2)), jnp.var(x, (0, 1, 2))
        return jax.nn.relu((x - mean) * jax.lax.rsqrt(variance + 1e-3) * scale + offset)

    x, g = normal(batch, size, size, channels), normal(batch, size, size, channels, key=1)
    scale, offset = 1 + 0.1 * normal(channels, key=2), normal(channels, key=3)
    if not backward:
        return Case(Program(layer, None, (x, scale, offset)), second_reading(x))
    gradient = lambda x, s, t, g: jax.vjp(layer, x, s, t)[1](g)  # noqa: E731
    return Case(Program(gradient, None, (x, scale, offset, g)), second_reading(x, g))


def row_norm(rows: int, width: int, centred: bool, dry: bool) -> Case:
    """The gradient of a layer norm or (not ``centred``) of a root-mean-square norm: a row stays on the chip."""
    import jax
    import jax.numpy as jnp

    rows, width = (rows // DRY**2, width // DRY) if dry else (rows, width)

    def layer(x: Any, scale: Any, offset: Any) -> Any:
        x = x - jnp.mean(x, -1, keepdims=True) if centred else x
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * scale + offset

    arguments = normal(rows, width), normal(width, key=1), normal(width, key=2), normal(rows, width, key=3)
    return Case(Program(lambda x, s, t, g: jax.vjp(layer, x, s, t)[1](g), None, arguments))


def embedding(vocabulary: int, width: int, tokens: int, dry: bool) -> Case:
    """The gradient of an embedding's table: rows of tokens that occur as in a text (the larger, the seldomer)."""
    import jax
    import jax.numpy as jnp

    vocabulary, tokens = (vocabulary // DRY**2, tokens // DRY**2) if dry else (vocabulary, tokens)
    drawn = jax.random.uniform(jax.random.key(1), (tokens,))
    ids = jnp.minimum(vocabulary**drawn - 1, vocabulary - 1).astype(jnp.int32)
    table = jax.ShapeDtypeStruct((vocabulary, width), "float32")

    def gradient(ids: Any, g: Any) -> Any:
        return jax.linear_transpose(lambda t: t[ids], table)(g)[0]

    return Case(Program(gradient, None, (ids, normal(tokens, width))))


def segment_sum(rows: int, width: int, segments: int, dry: bool) -> Case:
    """Sums of rows by segment, their numbers in no order."""
    import jax

    rows, segments = (rows // DRY**2, segments // DRY**2) if dry else (rows, segments)
    ids = jax.random.randint(jax.random.key(1), (rows,), 0, segments)
    return Case(Program(lambda x, i: jax.ops.segment_sum(x, i, segments), None, (normal(rows, width), ids)))


def cross_entropy(tokens: int, vocabulary: int, dry: bool) -> Case:
    """Mean cross-entropy of integer labels and its gradient: logits once for the sums, once for the gradient."""
    import jax
    import jax.numpy as jnp

    tokens, vocabulary = (tokens // DRY**2, vocabulary // DRY) if dry else (tokens, vocabulary)

    def loss(logits: Any, labels: Any) -> Any:
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1).mean()

    labels = jax.random.randint(jax.random.key(1), (tokens,), 0, vocabulary)
    logits = normal(tokens, vocabulary)
    return Case(Program(jax.value_and_grad(loss), None, (logits, labels)))


def leaves(count: int, total: int) -> list[Any]:
    """Parameters: matrices of a network and, every other one, vectors."""
    rows = round((2 * total / count / 4) ** 0.5)
    return [normal(rows, 4 * rows, key=k) if k % 2 == 0 else normal(4 * rows, key=k) for k in range(count)]


def optimizer(rule: tuple[Callable[..., Any], Callable[..., Any]], clips: bool, dry: bool) -> Case:
    """An update of 100 million parameters in 200 leaves, in place."""
    import jax

    initial, update = rule
    params = leaves(16, 1 << 14) if dry else leaves(200, 100_000_000)
    gradients = jax.tree.map(lambda p: 1e-3 * p, params)
    arguments = params, initial(params), gradients
    return Case(Program(update, None, arguments, carried=2), second_reading(*gradients) if clips else 0)


CASES: dict[str, Callable[[bool], Case]] = {
    "depthwise 3x3/1, 112, 32": functools.partial(depthwise, 112, 32, 1),
    "depthwise 3x3/2, 112, 96": functools.partial(depthwise, 112, 96, 2),
    "depthwise 3x3/1, 56, 144": functools.partial(depthwise, 56, 144, 1),
    "depthwise 3x3/1, 28, 192": functools.partial(depthwise, 28, 192, 1),
    "max pool 3x3/2, 112": functools.partial(max_pool, 112, 3, 2, "SAME"),
    "max pool 2x2/2, 112": functools.partial(max_pool, 112, 2, 2, "VALID"),
    "batch norm, 56, 256": functools.partial(batch_norm, 56, 256, False),
    "batch norm gradient, 56, 256": functools.partial(batch_norm, 56, 256, True),
    "layer norm gradient, 65536 x 768": functools.partial(row_norm, 65536, 768, True),
    "RMS norm gradient, 16384 x 4096": functools.partial(row_norm, 16384, 4096, False),
    "embedding gradient, 32000 x 768, 16384": functools.partial(embedding, 32000, 768, 16384),
    "segment sum, 1048576 x 64 to 65536": functools.partial(segment_sum, 1 << 20, 64, 1 << 16),
    "cross-entropy, 4096 x 32000": functools.partial(cross_entropy, 4096, 32000),
    "SGD with momentum": functools.partial(optimizer, sgd(), False),
    "AdamW, clipped": functools.partial(optimizer, adamw(), True),
}


def copy_rate(numbers: int, seconds: float) -> float:
    """Bytes per second, read and written, of a copy."""
    import jax
    import jax.numpy as jnp

    x = jnp.ones(numbers, "float32")
    copy = jax.jit(lambda x: x * 1.5)
    copy(x)
    times = interleaved({"copy": lambda: copy(x)}, seconds)
    return 2 * x.nbytes / times["copy"]["back_to_back"]["median"]


def distance(found: Any, wanted: Any) -> float:
    """Relative L2 distance, of the result that is farthest off."""
    import jax
    import jax.numpy as jnp

    def apart(a: Any, b: Any) -> float:
        return float(jnp.linalg.norm((a - b).ravel()) / jnp.maximum(jnp.linalg.norm(b.ravel()), 1e-30))

    return max(map(apart, jax.tree.leaves(found), jax.tree.leaves(wanted)))


def profile(call: Callable[[], Any]) -> dict[str, Any]:
    """Kernels per call on the GPU, and the largest by name."""
    from benchmarks.networks.device_profile import profiled

    with tempfile.TemporaryDirectory() as folder:
        return profiled(call, Path(folder) / "profile", most=8)


def measure(case: Case, rate: float, seconds: float, mode: Any) -> dict[str, Any]:
    """Times of both programs, their share of the bound, and how far their results are apart."""
    import jax

    import jcuts

    form = case.program.form(closed=False)
    programs = {
        "jax.jit": jax.jit(form.function, donate_argnums=form.donated),
        "jcuts": jcuts.optimize(form.function, mode=mode, donate_argnums=form.donated),
    }
    runs = {name: Stepped(call, form, own_arguments(form)) for name, call in programs.items()}
    results = {name: run.step() for name, run in runs.items()}
    apart = distance(results["jcuts"], results["jax.jit"])
    del results  # donated with the next call
    times = interleaved({name: run.step for name, run in runs.items()}, seconds)
    bound = case.bytes() / rate
    profiles = {name: profile(run.step) for name, run in runs.items()} if jax.default_backend() == "gpu" else {}
    busy = {name: float(found["busy_seconds"]) for name, found in profiles.items()}
    decision = programs["jcuts"].decision(*form.arguments)
    return {
        "bytes": case.bytes(),
        "bound_seconds": bound,
        "over_bound": {name: row["back_to_back"]["median"] / bound for name, row in times.items()},
        "busy_seconds": busy,
        "kernels": {name: found["largest"] for name, found in profiles.items()},
        "busy_over_bound": {name: seconds / bound for name, seconds in busy.items()},
        "speed-up": ratio(times, "jax.jit", "jcuts"),
        "chosen": decision and decision.chosen,
        "distance": apart,
        "times": times,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {'; '.join(CASES)}; all by default")
    parser.add_argument("--out", type=Path, default=Path("training_operations.json"))
    parser.add_argument("--seconds", type=float, default=2.0, help="of timing per program")
    parser.add_argument("--mode", default="mixed", help="of jcuts.optimize (%(default)s)")
    parser.add_argument("--dry", action="store_true", help="tiny sizes")
    options = parser.parse_args(argv)
    if unknown := set(options.cases) - set(CASES):
        parser.error(f"no such case: {', '.join(sorted(unknown))}")
    rate = copy_rate(COPY >> (12 if options.dry else 0), options.seconds / 4)
    found = {"copy_bytes_per_second": rate, "dry": options.dry, "mode": options.mode, **environment(), "rows": {}}
    for name in options.cases or CASES:
        row = found["rows"][name] = measure(CASES[name](options.dry), rate, options.seconds, options.mode)
        options.out.write_text(json.dumps(found, indent=1) + "\n")
        over = ", ".join(f"{n} {x:.2f}" for n, x in row["over_bound"].items())
        busy = ", ".join(f"{n} {x:.2f}" for n, x in row["busy_over_bound"].items())
        print(
            f"{name}: {row['speed-up']:.2f}x ({row['chosen']}); times of the bound: {over}; "
            f"kernels alone: {busy or '-'}; {row['distance']:.1e} apart",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
