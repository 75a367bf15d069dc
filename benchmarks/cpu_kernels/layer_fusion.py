"""Layer fusion on this CPU: fused chains of layers against the same layers as single kernels, and against XLA.

    python benchmarks/cpu_kernels/layer_fusion.py                     # all cases at batch 1 and 8
    python benchmarks/cpu_kernels/layer_fusion.py "ConvNeXt MLP:8" --json out.json

Single kernels and the fused one are each the best of their ranked candidates, chosen here by time; the single kernels
run in one program, so that the result between them is a temporary buffer as in a network.  Programs take turns; beside
the measured gain stands the one by which the partition search chooses what to measure.  Every result is
compared with float64.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax import lax  # noqa: E402

from benchmarks.networks.interleaved_timing import quartiles, waited  # noqa: E402
from jcuts.arch.detect import describe_cpu  # noqa: E402
from jcuts.kernel_ir.program import Program  # noqa: E402
from jcuts.lower.layer_fusion import layer_stages, lower_layers  # noqa: E402
from jcuts.lower.region import lower_region  # noqa: E402
from jcuts.lower.tensor_graph import TensorGraph, build_graph  # noqa: E402
from jcuts.pipeline.computation import machine  # noqa: E402
from jcuts.schedule.cpu import candidates as cpu_candidates  # noqa: E402
from jcuts.schedule.cpu import time_estimate  # noqa: E402
from jcuts.trace import jaxapi  # noqa: E402
from jcuts.trace.inline import inline  # noqa: E402
from jcuts.xla.cpu_ffi_call import call_kernel  # noqa: E402
from jcuts.xla.kernel_cache import kernel_for  # noqa: E402

CANDIDATES = 8
QUICK = 3
ROUNDS = 15
BATCHES = (1, 8)
Call = Callable[[], Any]
RNG = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    """Values of about the size that activations have."""
    return (RNG.standard_normal(shape) / np.sqrt(np.prod(shape[:-1]) if len(shape) > 1 else 1)).astype(np.float32)


def image(batch: int, side: int, channels: int) -> np.ndarray:
    """A batch of images."""
    return RNG.standard_normal((batch, side, side, channels)).astype(np.float32)


def conv(x: Any, w: Any, stride: int = 1, groups: int = 1) -> Any:
    """A convolution of NHWC images, padded to the same size."""
    form = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=form, feature_group_count=groups)


def pool(x: Any, size: int) -> Any:
    """Max pooling with stride 2."""
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, size, size, 1), (1, 2, 2, 1), "SAME")


def mlp(x: Any, a: Any, p: Any, b: Any, q: Any) -> Any:
    """GEMM, bias, GELU, GEMM, bias."""
    return jax.nn.gelu(x @ a + p) @ b + q


def two_convs(x: Any, a: Any, p: Any, b: Any, q: Any) -> Any:
    """Two convolutions with ReLU."""
    return jax.nn.relu(conv(jax.nn.relu(conv(x, a) + p), b) + q)


def separable(x: Any, a: Any, p: Any, b: Any, q: Any) -> Any:
    """A depthwise and a 1x1 convolution (MobileNet)."""
    return jax.nn.relu(conv(jax.nn.relu(conv(x, a, 1, x.shape[-1]) + p), b) + q)


def conv_pool(size: int, stride: int) -> Callable[..., Any]:
    """A convolution and max pooling."""
    return lambda x, a, p: pool(jax.nn.relu(conv(x, a, stride) + p), size)


def inverted_residual(stride: int) -> Callable[..., Any]:
    """1x1, depthwise, 1x1 convolutions (MobileNetV2)."""

    def block(x: Any, a: Any, p: Any, d: Any, q: Any, b: Any, r: Any) -> Any:
        wide = jnp.clip(conv(x, a) + p, 0, 6)
        y = conv(jnp.clip(conv(wide, d, stride, wide.shape[-1]) + q, 0, 6), b) + r
        return x + y if y.shape == x.shape else y

    return block


def _mlp_arguments(rows: int, width: int) -> list[np.ndarray]:
    wide = 4 * width
    return [
        RNG.standard_normal((rows, width)).astype(np.float32),
        normal(width, wide),
        normal(wide),
        normal(wide, width),
    ]


CASES: dict[str, Callable[[int], tuple[Callable[..., Any], list[np.ndarray]]]] = {
    "ConvNeXt MLP": lambda n: (mlp, [*_mlp_arguments(n * 56 * 56, 96), normal(96)]),
    "ConvNeXt MLP, stage 2": lambda n: (mlp, [*_mlp_arguments(n * 28 * 28, 192), normal(192)]),
    "ViT MLP": lambda n: (mlp, [*_mlp_arguments(n * 197, 768), normal(768)]),
    "ResNet stem and pool": lambda n: (conv_pool(3, 2), [image(n, 224, 3), normal(7, 7, 3, 64), normal(64)]),
    "ResNet 3x3, 1x1": lambda n: (
        two_convs,
        [image(n, 56, 64), normal(3, 3, 64, 64), normal(64), normal(1, 1, 64, 256), normal(256)],
    ),
    "VGG 3x3, 3x3": lambda n: (
        two_convs,
        [image(n, 224, 3), normal(3, 3, 3, 64), normal(64), normal(3, 3, 64, 64), normal(64)],
    ),
    "VGG 3x3 and pool": lambda n: (conv_pool(2, 1), [image(n, 112, 64), normal(3, 3, 64, 128), normal(128)]),
    "MobileNet separable": lambda n: (
        separable,
        [image(n, 112, 32), normal(3, 3, 1, 32), normal(32), normal(1, 1, 32, 64), normal(64)],
    ),
    "MobileNet separable, stage 2": lambda n: (
        separable,
        [image(n, 56, 128), normal(3, 3, 1, 128), normal(128), normal(1, 1, 128, 128), normal(128)],
    ),
    "MobileNetV2 block 1": lambda n: (inverted_residual(2), [image(n, 112, 16), *_block(16, 96, 24)]),
    "MobileNetV2 block 2": lambda n: (inverted_residual(1), [image(n, 56, 24), *_block(24, 144, 24)]),
}


def _block(channels: int, wide: int, made: int) -> list[np.ndarray]:
    shapes = ((1, 1, channels, wide), (wide,), (3, 3, 1, wide), (wide,), (1, 1, wide, made), (made,))
    return [normal(*shape) for shape in shapes]


@dataclass(frozen=True)
class Row:
    """One case: milliseconds as (median, first and third quartile), gains by medians.

    Attributes: gain: of the fused kernel over the single ones; predicted: the same by the model; error: of the fused
        kernel against float64, over the root mean square of the result.
    """

    case: str
    batch: int
    xla: list[float]
    single: list[float]
    fused: list[float]
    gain: float
    predicted: float
    error: float
    schedule: str


def traced(fn: Callable[..., Any], arguments: Sequence[np.ndarray]) -> tuple[TensorGraph, dict[int, np.ndarray]]:
    """The function's graph, and the values of its operands by tensor."""
    closed = inline(jaxapi.closed_jaxpr_of(fn, *arguments))
    graph = build_graph(closed.jaxpr)
    values = [*closed.consts, *arguments]
    known = zip((*closed.jaxpr.constvars, *closed.jaxpr.invars), values, strict=True)
    return graph, {graph.of_var[var]: value for var, value in known if var in graph.of_var}


def ranked(program: Program) -> list[Program]:
    """The candidates of a program on this CPU."""
    return [made for made, _ in cpu_candidates.candidates(program, machine(), CANDIDATES)]


class Layers:
    """A case: its layers as single kernels in one program, and as one kernel."""

    def __init__(self, fn: Callable[..., Any], arguments: Sequence[np.ndarray]) -> None:
        self.graph, operands = traced(fn, arguments)
        everything = frozenset(range(len(self.graph.nodes)))
        stages, fused = layer_stages(self.graph, everything), lower_layers(self.graph, everything)
        assert isinstance(stages, list) and isinstance(fused, Program), (stages, fused)
        self.stages, self.inputs = stages, self.graph.subset_inputs(everything)
        self.operands = [jnp.asarray(operands[t]) for t in self.inputs]
        parts = [program for s in stages if isinstance(program := lower_region(self.graph, s), Program)]
        assert len(parts) == len(stages)
        self.predicted = sum(map(time_estimate.seconds, parts)) / time_estimate.seconds(fused)
        self.fused, self.parts = ranked(fused), [ranked(program) for program in parts]

    def single(self, choice: Sequence[Program]) -> Call:
        """The layers as single kernels."""
        kernels = [kernel_for(program) for program in choice]

        def run(*operands: Any) -> Any:
            values = dict(zip(self.inputs, operands, strict=True))
            made: Sequence[Any] = ()
            for members, kernel in zip(self.stages, kernels, strict=True):
                made = call_kernel(kernel, *(values[t] for t in self.graph.subset_inputs(members)))
                values.update(zip(self.graph.subset_outputs(members), made, strict=True))
            return made

        compiled = jax.jit(run)
        return lambda: compiled(*self.operands)

    def one(self, program: Program) -> Call:
        """The layers as one kernel."""
        kernel = kernel_for(program)
        compiled = jax.jit(lambda *operands: call_kernel(kernel, *operands))
        return lambda: compiled(*self.operands)

    def best_single(self) -> list[Program]:
        """The best candidates of every layer, one layer after the other, in the whole chain."""
        best = [options[0] for options in self.parts]
        for place, options in enumerate(self.parts):
            tried = [[*best[:place], option, *best[place + 1 :]] for option in options]
            best = tried[_fastest([self.single(choice) for choice in tried])]
        return best


def _fastest(calls: Sequence[Call]) -> int:
    """The fastest of some programs by their shortest call, in turns."""
    times: list[list[float]] = [[] for _ in calls]
    for call in calls:
        call()
    for _ in range(QUICK):
        for call, found in zip(calls, times, strict=True):
            found += waited(call, 2)
    return min(range(len(calls)), key=lambda k: min(times[k]))


def measure(case: str, batch: int) -> Row:
    """One row."""
    fn, arguments = CASES[case](batch)
    layers = Layers(fn, arguments)
    single = layers.best_single()
    fused = layers.fused[_fastest([layers.one(program) for program in layers.fused])]
    plain, given = jax.jit(fn), [jnp.asarray(a) for a in arguments]
    calls = [lambda: plain(*given), layers.single(single), layers.one(fused)]
    times: list[list[float]] = [[], [], []]
    for call in calls:
        waited(call, 2)
    for turn in range(ROUNDS):
        for place in (0, 1, 2) if turn % 2 else (2, 1, 0):
            times[place] += waited(calls[place], 3)
    with jax.enable_x64(True):
        exact = np.asarray(fn(*[jnp.asarray(a, jnp.float64) for a in arguments]))
    (found,) = calls[2]()
    error = float(np.abs(np.asarray(found, np.float64) - exact).max() / np.sqrt(np.mean(np.square(exact))))
    xla, alone, together = ([1e3 * q for q in quartiles(samples)] for samples in times)
    tiles = str(dict(fused.params)["tiles"])
    return Row(case, batch, xla, alone, together, alone[0] / together[0], layers.predicted, error, tiles)


def rows(wanted: Sequence[str]) -> Iterator[Row]:
    """The rows asked for. Args: wanted: NAME or NAME:BATCH; all if empty."""
    for case in CASES:
        for batch in BATCHES:
            if not wanted or case in wanted or f"{case}:{batch}" in wanted:
                yield measure(case, batch)


def main() -> None:
    """Prints a row per case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = []
    print(f"{'case':32s} batch   XLA ms  single ms   fused ms   gain  predicted  over XLA    error  tiles")
    for row in rows(options.cases):
        found.append(row)
        times = f"{row.xla[0]:8.3f} {row.single[0]:10.3f} {row.fused[0]:10.3f}"
        gains = f"{row.gain:6.2f} {row.predicted:10.2f} {row.xla[0] / row.fused[0]:9.2f}"
        print(f"{row.case:32s} {row.batch:5d} {times} {gains} {row.error:8.1e}  {row.schedule}", flush=True)
    if options.json is not None:
        about = {"date": str(date.today()), "jax": jax.__version__, "cpu": describe_cpu().name, "device": "cpu"}
        options.json.write_text(json.dumps({**about, "rows": [asdict(row) for row in found]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
