"""Column sums in the epilogue of convolutions: the statistics of a batch norm, and the sums of its gradient.

    python benchmarks/gpu_kernels/column_sums.py --out results --budget 150

Layers of ResNet-50 and MobileNetV2 at batch 64, 1x1 and 3x3, in float32.  "forward" gives y = convolution + bias with
mean and variance of every channel, "backward" the data gradient behind a rectifier with its sum and that of its product
with y.  Each is timed as XLA compiles it ("xla"), as the first kernels with column sums (numbers), and as the first
kernels of the convolution alone with XLA's reductions behind them ("alone ...").  Weights are arguments as they are, or
"prepared": numbers of TF32 along K, as `pipeline.weight_prep` makes them.  Results are compared with float64, sums also
with the float64 sums of the kernel's own y, in every case with XLA's errors; two runs must be equal in every bit.
Needs a GPU of compute capability 8.0; compiles in parallel first.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.gpu_kernels.paired_timing import in_turn, listed, options_of  # noqa: E402
from benchmarks.gpu_kernels.tf32_weights import TF32  # noqa: E402
from benchmarks.gpu_kernels.wgmma_tiles import build  # noqa: E402

BATCH = 64
LAYERS = (
    ("forward", 56, 64, 64, 3),
    ("forward", 56, 64, 256, 1),
    ("forward", 28, 128, 128, 3),
    ("forward", 14, 1024, 256, 1),
    ("forward", 7, 512, 2048, 1),
    ("backward", 56, 256, 64, 1),
    ("backward", 28, 128, 128, 3),
    ("backward", 14, 256, 1024, 1),
    ("forward", 112, 16, 96, 1),
    ("forward", 28, 32, 192, 1),
    ("forward", 14, 384, 64, 1),
    ("backward", 56, 24, 144, 1),
    ("backward", 14, 64, 384, 1),
)
"""(direction, side of the image, channels, features, side of the filter); the last five are MobileNetV2's."""
MEAN = 100.0
"""Of the inputs whose variance is small beside it."""
ROWS = (0, 1, 2)
WORSE = 4.0
"""Errors over XLA's up to which a result counts as equally accurate, beside `NOISE` of the largest value."""
NOISE = 2e-6


@dataclass(frozen=True)
class Layer:
    """One convolution. ``prepared``: its weights are TF32 numbers, K contiguous."""

    direction: str
    side: int
    channels: int
    features: int
    filter: int
    prepared: bool

    @property
    def name(self) -> str:
        """Unique."""
        kind = f"{self.filter}x{self.filter}"
        return f"{self.direction} {self.side}^2 {self.channels}->{self.features} {kind}" + " prepared" * self.prepared

    @property
    def along(self) -> bool:
        """Whether weights lie along K: those of data gradients do, of 1x1 without being prepared."""
        return self.prepared or self.direction == "backward"

    def convolution(self, x: Any, w: Any) -> Any:
        """The product alone; float64 by taps."""
        numbers = ("NHWC", "OHWI" if self.along else "HWIO", "NHWC")
        if x.dtype != jnp.float64:
            return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers)
        pad = self.filter // 2
        wide = jnp.pad(x, ((0, 0), (pad, pad), (pad, pad), (0, 0)))
        total: Any = 0
        for i in range(self.filter):
            for j in range(self.filter):
                tap = w[:, i, j].T if self.along else w[i, j]
                total = total + wide[:, i : i + self.side, j : j + self.side] @ tap
        return total

    def made(self, x: Any, w: Any, *more: Any) -> Any:
        """What the kernel stores at every point."""
        if self.direction == "forward":
            return self.convolution(x, w) + more[0]
        return jnp.where(more[0], self.convolution(x, w), 0)

    def sums(self, y: Any, *more: Any) -> tuple[Any, Any]:
        """What is summed of it."""
        if self.direction == "forward":
            mean = jnp.mean(y, ROWS, keepdims=True)
            return mean, jnp.mean(jnp.square(y - mean), ROWS)
        return jnp.sum(y, ROWS), jnp.sum(y * more[1], ROWS)

    def function(self, *arguments: Any) -> tuple[Any, ...]:
        """The layer."""
        y = self.made(*arguments)
        return y, *self.sums(y, *arguments[2:])

    def arguments(self, seed: int, mean: float = 0.0) -> list[np.ndarray]:
        """Fresh random ones. Args: mean: of the results."""
        rng = np.random.default_rng(seed)
        shape = (BATCH, self.side, self.side)
        x = rng.standard_normal((*shape, self.channels), dtype=np.float32)
        taps = (self.filter, self.filter)
        w = rng.standard_normal((self.features, *taps, self.channels), dtype=np.float32)
        w *= np.float32(1 / np.sqrt(self.channels * self.filter**2))
        if self.prepared:
            w = (w.view(np.uint32) & TF32).view(np.float32)
        if not self.along:
            w = np.ascontiguousarray(w.transpose(1, 2, 3, 0))
        if self.direction == "forward":
            return [x, w, np.full(self.features, mean, np.float32)]
        y = rng.standard_normal((*shape, self.features), dtype=np.float32) + np.float32(mean)
        return [x, w, rng.random(y.shape, np.float32) > 1 / 2, y]


def layers() -> list[Layer]:
    """All of them, with weights as they are and prepared."""
    return [Layer(*layer, prepared) for layer in LAYERS for prepared in (False, True)]


def schedules(layer: Layer, function: Callable[..., Any], most: int) -> list[Any]:
    """The first schedules of the ranking."""
    from jcuts.lower.reduction.column_sums import lower_region_or_column_sums
    from jcuts.lower.tensor_graph import build_graph
    from jcuts.rewrite.simplify import simplify
    from jcuts.schedule.gpu import candidates as gpu_candidates
    from jcuts.trace.inline import inline

    closed = simplify(inline(jax.make_jaxpr(function)(*layer.arguments(0))))
    graph = build_graph(closed.jaxpr)
    program: Any = lower_region_or_column_sums(graph, frozenset(range(len(graph.nodes))))
    weights = layer.arguments(0)[1].shape
    if layer.prepared:
        buffers = tuple(replace(b, tf32=b.role == "in" and b.shape == weights) for b in program.buffers)
        program = replace(program, buffers=buffers)
    return [p for p, _ in gpu_candidates.candidates(program, gpu_candidates.GpuMachine.named("H100"), most)]


def errors(layer: Layer, found: Sequence[Any], wanted: Sequence[Any], arguments: Sequence[Any]) -> list[float]:
    """Largest error of each result over its largest value, then those of the sums of the result itself."""
    with jax.enable_x64(True):
        wide = [a.astype(jnp.float64) if a.dtype == jnp.float32 else a for a in arguments[2:]]
        own = jax.jit(layer.sums)(found[0].astype(jnp.float64), *wide)
        pairs = [*zip(found, wanted, strict=True), *zip(found[1:], own, strict=True)]
        return [float(jnp.abs(a.astype(jnp.float64) - b).max() / jnp.abs(b).max()) for a, b in pairs]


def judged(layer: Layer, functions: dict[str, Callable[..., Any]], row: dict[str, Any], first: Sequence[Any]) -> None:
    """Leaves out of ``functions`` what is less accurate than XLA, or differs from one run to the next."""
    far = tuple(jnp.asarray(a) for a in layer.arguments(1, MEAN))
    for name, arguments in (("normal", first), (f"mean {MEAN:g}", far)):
        with jax.enable_x64(True):
            wide = [a.astype(jnp.float64) if a.dtype == jnp.float32 else a for a in arguments]
            wanted = jax.block_until_ready(jax.jit(layer.function)(*wide))
        kept: list[float] = []
        for key, function in list(functions.items()):
            jnp.full((1 << 26,), jnp.nan).block_until_ready()  # what results are written over
            one, other = (jax.block_until_ready(jax.jit(function)(*arguments)) for _ in range(2))
            found = errors(layer, one, wanted, arguments)
            kept = kept or found
            same = all(bool(jnp.array_equal(a, b)) for a, b in zip(one, other, strict=True))
            row["errors"].setdefault(key, {})[name] = {"errors": found, "equal": same}
            accurate = all(f <= WORSE * x + NOISE for f, x in zip(found, kept, strict=True))
            if not (same or key == "xla") or not accurate:
                row["rejected"][key] = f"{name}: equal {same}, errors {found}, XLA's {kept}"
                del functions[key]


def measured(layer: Layer, programs: dict[str, Any], folder: Path) -> dict[str, Any]:
    """One layer: XLA, kernels with sums, kernels with XLA's reductions, in turns."""
    from benchmarks.gpu_kernels import run
    from jcuts.tune.kernel_file import read_kernel
    from jcuts.xla.cpu_ffi_call import call_kernel

    row: dict[str, Any] = {"case": layer.name, "programs": {}, "rejected": {}, "errors": {}}
    first = tuple(jnp.asarray(a) for a in layer.arguments(0))
    functions: dict[str, Callable[..., Any]] = {"xla": layer.function}
    params: dict[str, Any] = {}
    for name, program in programs.items():
        path = folder / f"{program.digest}.kernel"
        if not path.exists():
            continue
        params[name] = {k: v for k, v in program.params if k not in ("cuda", "threads")}
        call = functools.partial(_called, read_kernel(path), call_kernel)
        functions[name] = functools.partial(_summed, layer, call) if name.startswith("alone") else call
    judged(layer, functions, row, first)
    size = sum(a.nbytes for a in first)
    count = int(min(8, max(2, run.ROTATED // size)))
    sets = [tuple(jax.block_until_ready(jnp.roll(a, k)) for a in first) for k in range(count)]
    compiled = {name: jax.jit(run.chain(f, count)).lower(sets).compile() for name, f in functions.items()}
    for name, spent in run.timed(compiled, sets, len(sets), sets[0][0]).items():
        error = max(row["errors"][name]["normal"]["errors"])
        row["programs"][name] = {"params": params.get(name, {}), "error": error, **spent}
    return row


def _called(kernel: Any, call: Callable[..., Any], *xs: Any) -> Any:
    """A kernel on the layer's arguments, of which the convolution alone reads the first ones."""
    return call(kernel, *xs[: len(kernel.inputs)])


def _summed(layer: Layer, call: Callable[..., Any], *xs: Any) -> Any:
    (y,) = call(*xs)
    return y, *layer.sums(y, *xs[2:])


def show(row: dict[str, Any]) -> None:
    """A table of one layer."""
    print(row["case"])
    listed(row)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    from benchmarks.gpu_kernels import run

    parser = options_of(
        __doc__, "gpu_column_sums", most=4, schedules="schedules of the ranking per layer", budget=150.0
    )
    options = parser.parse_args(arguments)
    folder = options.out / "kernels"
    folder.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    work: list[tuple[Layer, dict[str, Any]]] = []
    for layer in (layer for layer in layers() if run.wanted(layer, options.only)):
        programs = {str(k): p for k, p in enumerate(schedules(layer, layer.function, options.most))}
        programs |= {f"alone {k}": p for k, p in enumerate(schedules(layer, layer.made, options.most))}
        work.append((layer, programs))
    build([p for _, programs in work for p in programs.values()], folder, options.workers, start)
    if not options.build:
        turns = ((layer.name, functools.partial(measured, layer, programs, folder)) for layer, programs in work)
        in_turn(turns, show, options.out / "column_sums.json", options.budget, start)
    return 0


if __name__ == "__main__":
    sys.exit(main())
