"""C = alpha A B + beta C in float64 on a CPU: OpenBLAS, XLA, jcuts, and three numba loops with block sizes 4 to 32.

    python benchmarks/mlp/gemm.py --out DIR [--dry]

Shapes, alpha and beta of the course report (3.1).  Differences are relative, in the norm of the course program:
||C - R|| / ||R|| in the infinity norm (the largest sum of a row's absolute values), R by OpenBLAS' ``dgemm``; beside
them the difference from sums in extended precision.  jcuts runs three times: what `jcuts.optimize` chooses for the
expression and for one whose sum over K is in `PARTS` parts (``mode="fusion"``: jcuts' kernels), and, for each block
size, the fastest of its best-ranked schedules whose register tile is at most block x block.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from scipy.linalg import get_blas_funcs  # noqa: E402

import jcuts  # noqa: E402
from benchmarks.cpu_kernels.layer_fusion import traced  # noqa: E402
from benchmarks.mlp.gemm_loops import TILED, Gemm, in_tiles, naive  # noqa: E402
from benchmarks.mlp.machine import described, written  # noqa: E402
from benchmarks.mlp.network import difference  # noqa: E402
from benchmarks.mlp.report_tables import ALPHA, BETA, BLOCKS, SHAPES  # noqa: E402
from benchmarks.networks.interleaved_timing import back_to_back, quartiles  # noqa: E402
from jcuts.kernel_ir.program import Program  # noqa: E402
from jcuts.lower.region import lower_region  # noqa: E402
from jcuts.pipeline.computation import machine  # noqa: E402
from jcuts.schedule.cpu import candidates as cpu_candidates  # noqa: E402
from jcuts.xla.cpu_ffi_call import call_kernel  # noqa: E402
from jcuts.xla.kernel_cache import kernel_for  # noqa: E402

PARTS = 4
"""Of the sum over K in `in_parts`."""
OURS = f"jcuts, sum in {PARTS} parts"
OPERANDS = ("course", "uniform")
TRIED = 4
"""Schedules of jcuts that are timed per block size."""
ROUNDS = 7
TURN = 0.03
"""Seconds of a turn, about: a call that is shorter is repeated."""
Call = Callable[[], Any]
_dgemm: Any = get_blas_funcs("gemm", dtype=np.float64)


@dataclass(frozen=True)
class Problem:
    """Operands and the reference by OpenBLAS."""

    a: np.ndarray
    b: np.ndarray
    c: np.ndarray

    @property
    def reference(self) -> np.ndarray:
        """alpha A B + beta C by OpenBLAS' ``dgemm``."""
        return dgemm(self)

    def exact(self) -> np.ndarray:
        """The same with products and sums in extended precision (x86: 64 bits of mantissa)."""
        wide = np.longdouble
        total = np.zeros(self.c.shape, wide)
        for k in range(self.a.shape[1]):
            total += self.a[:, k, None].astype(wide) * self.b[k]
        return ALPHA * total + BETA * self.c


def problem(shape: tuple[int, int, int], operands: str = "course") -> Problem:
    """Operands as the course program makes them (A[i, j] = i j / M and so on), or uniform in [0, 1)."""
    rows, columns, terms = shape
    if operands == "uniform":
        rng = np.random.default_rng(0)
        return Problem(rng.random((rows, terms)), rng.random((terms, columns)), rng.random((rows, columns)))
    i, j, k = np.arange(rows), np.arange(columns), np.arange(terms)
    a, b = np.outer(i, k) / rows, (np.outer(k, j) + 1) / columns
    return Problem(a, b, (np.outer(i, j) + 2) / columns)


def dgemm(given: Problem) -> np.ndarray:
    """OpenBLAS on row-major operands: the transposed product of transposed, column-major ones."""
    return _dgemm(ALPHA, given.b.T, given.a.T, BETA, given.c.T).T


def expression(a: Any, b: Any, c: Any) -> Any:
    """What the user writes."""
    return ALPHA * (a @ b) + BETA * c


def in_parts(a: Any, b: Any, c: Any) -> Any:
    """`expression` with the sum over K in `PARTS` parts, which rounds less than one sum of K terms in order."""
    width = -(-a.shape[1] // PARTS)
    total = sum(a[:, k : k + width] @ b[k : k + width] for k in range(0, a.shape[1], width))
    return ALPHA * total + BETA * c


def loop_call(loop: Gemm, given: Problem) -> Call:
    """A call of a numba loop that gives its result."""
    out = np.empty_like(given.c)

    def call() -> np.ndarray:
        loop(ALPHA, given.a, given.b, BETA, given.c, out)
        return out

    return call


def register_tile(program: Program) -> tuple[int, int]:
    """Rows and columns of a schedule's register tile [elements]."""
    params: Mapping[str, Any] = dict(program.params)
    unroll = dict(params["unroll"])
    vector = params["vector"]
    rows, columns = (unroll.get(axis, 1) * (params["lanes"] if axis == vector else 1) for axis in ("d0", "d1"))
    return rows, columns


def schedules(given: Problem) -> list[Program]:
    """All schedules of jcuts for the expression as one kernel, best-ranked first."""
    graph, _ = traced(expression, [given.a, given.b, given.c])
    program = lower_region(graph, frozenset(range(len(graph.nodes))))
    assert isinstance(program, Program), program
    return [made for made, _ in cpu_candidates.candidates(program, machine(), 1 << 30)]


def kernel_call(program: Program, given: Problem) -> Call:
    """A call of one schedule's kernel."""
    kernel = kernel_for(program)
    compiled = jax.jit(lambda *operands: call_kernel(kernel, *operands)[0])
    operands = [jnp.asarray(x) for x in (given.a, given.b, given.c)]
    return lambda: compiled(*operands)


def of_block(found: list[Program], block: int) -> list[Program]:
    """The best-ranked schedules of which `register_tile` is at most block x block, at least half of it in columns."""
    fitting = [p for p in found if max(register_tile(p)) <= block and register_tile(p)[1] * 2 >= block]
    return fitting[:TRIED]


def best_of(programs: list[Program], given: Problem) -> tuple[Program, Call] | None:
    """The fastest of some schedules by their shortest call; None of none."""
    calls = [(program, kernel_call(program, given)) for program in programs]
    shortest = [min(back_to_back(call, 1) for _ in range(5)) for _, call in calls]
    return calls[int(np.argmin(shortest))] if calls else None


def in_turns(calls: Mapping[str, Call], rounds: int) -> dict[str, list[float]]:
    """Median and quartiles of seconds per call; programs take turns."""
    counts = {name: max(1, round(TURN / min(back_to_back(call, 1) for _ in range(2)))) for name, call in calls.items()}
    found: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds):
        for name in list(calls) if turn % 2 else list(calls)[::-1]:
            found[name].append(back_to_back(calls[name], counts[name]))
    return {name: quartiles(samples) for name, samples in found.items()}


@dataclass(frozen=True)
class Effort:
    """What a study takes: turns of every program, tuning, block sizes, threads of the loops."""

    rounds: int = ROUNDS
    tune_seconds: float = 60.0
    blocks: tuple[int, ...] = BLOCKS
    parallel: bool = True


DRY = Effort(2, 0.0, BLOCKS[:2], False)


def study(shape: tuple[int, int, int], effort: Effort) -> dict[str, Any]:
    """One shape: by program, seconds and differences."""
    given, parallel = problem(shape), effort.parallel
    mine = jcuts.optimize(expression, tune_seconds=effort.tune_seconds)
    parts = jcuts.optimize(in_parts, mode="fusion", tune_seconds=effort.tune_seconds)
    plain, operands = jax.jit(expression), [jnp.asarray(x) for x in (given.a, given.b, given.c)]
    calls: dict[str, Call] = {
        "OpenBLAS dgemm": lambda: dgemm(given),
        "NumPy": lambda: expression(given.a, given.b, given.c),
        "jax.jit": lambda: plain(*operands),
        "jcuts.optimize": lambda: mine(*operands),
        OURS: lambda: parts(*operands),
        "naive": loop_call(naive(parallel), given),
    }
    about: dict[str, dict[str, Any]] = {}
    ranked = schedules(given)
    for block in effort.blocks:
        calls |= {f"{form} {block}": loop_call(in_tiles(form, block, parallel), given) for form in TILED}
        best = best_of(of_block(ranked, block), given)
        if best is not None:
            name = f"jcuts kernel {block}"
            calls[name] = best[1]
            about[name] = {"register_tile": register_tile(best[0]), "schedule": str(dict(best[0].params))}
    mine(*operands)
    decision = mine.decision(*operands)
    about["jcuts.optimize"] = {"chosen": getattr(decision, "chosen", None), "reason": getattr(decision, "reason", None)}
    results = {name: np.array(call()) for name, call in calls.items()}
    seconds = in_turns(calls, effort.rounds)
    exact, reference = given.exact(), given.reference
    rows = {
        name: about.get(name, {})
        | {"seconds": seconds[name], "difference": difference(results[name], reference)["max"]}
        | {"from_exact": infinity_difference(results[name], exact)}
        for name in calls
    }
    return {"shape": shape, "rows": rows, "uniform": uniform_differences(shape, parallel)}


def infinity_difference(found: np.ndarray, exact: np.ndarray) -> float:
    """`difference` in the infinity norm for extended precision, which NumPy's norms do not take."""
    return float(np.abs(found - exact).sum(1).max() / np.abs(exact).sum(1).max())


def uniform_differences(shape: tuple[int, int, int], parallel: bool) -> dict[str, float]:
    """Differences from OpenBLAS with operands uniform in [0, 1), where sums are rounded at every term."""
    given = problem(shape, "uniform")
    parts, operands = jcuts.optimize(in_parts, mode="fusion", tune="off"), [jnp.asarray(x) for x in astuple(given)]
    calls: dict[str, Call] = {
        OURS: lambda: parts(*operands),
        "jcuts kernel": kernel_call(schedules(given)[0], given),
        "naive": loop_call(naive(parallel), given),
    }
    return {name: difference(np.asarray(call()), given.reference)["max"] for name, call in calls.items()}


def main(given: Sequence[str] | None = None) -> None:
    """Runs the study and writes ``gemm.json``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tune-seconds", type=float, default=60.0)
    parser.add_argument("--dry", action="store_true", help="tiny matrices, nothing tuned")
    args = parser.parse_args(given)
    with jax.enable_x64(True):
        tests = measured(args.dry, args.tune_seconds)
    written(args.out / "gemm.json", described() | {"alpha": ALPHA, "beta": BETA, "tests": tests})


def measured(dry: bool, tune_seconds: float) -> dict[str, Any]:
    """Both of the report's tests, or tiny ones."""
    shapes = {"test 1": (40, 36, 37), "test 2": (40, 10, 50)} if dry else SHAPES
    found: dict[str, Any] = {}
    for name, shape in shapes.items():
        found[name] = study(shape, DRY if dry else Effort(tune_seconds=tune_seconds))
        for program, row in found[name]["rows"].items():
            print(f"{name} {program:20s} {1e3 * row['seconds'][0]:9.3f} ms  {row['difference']:.2e}", flush=True)
    return found


if __name__ == "__main__":
    main()
