"""Decoding steps on a GPU: `jax.jit` with and without flags, jcuts, beside the rate of a copy; generation in a loop.

    python benchmarks/gpu_kernels/decoding.py --out FILE.json [NAME ...]
    python benchmarks/gpu_kernels/decoding.py --small [NAME ...]   # tiny sizes on the CPU: finds typos, not times

A step of `decoder_model.py` in bfloat16 at the last position of a cache of 2,048, weights as arguments, caches donated
by every program and passed on from call to call.  Each case runs in a process of its own, tuned within
``JCUTS_TUNE_SECONDS`` (60 unless it is set) into an empty database.  `back to back` is the time of one of `CALLS` calls
in a row, `waited` that of single ones, medians with quartiles of programs that take turns.  `share` is that of the rate
of a copy of 1 GiB, measured in the same process, at which the bytes are read that a step must read: all weights, and
the caches up to its position.  Errors are the largest of a logit, over the largest logit, against float64.

``--forced`` measures nothing first: kernels wherever there is a form, each with the schedule that the time model puts
first.  ``--prefetch 0 12 24`` repeats a case with so many MiB of weights prefetched ahead (``JCUTS_L2_PREFETCH_MB``),
``--prefetch alone`` with every kernel a call of its own.

Generation makes the last `COUNT` tokens of the cache greedily in one call, and must make those of one step per call;
where two logits are a tie within their rounding it may differ from there on: `margin` is the distance of both over the
largest logit.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from benchmarks.gpu_kernels import decoder_model as model  # noqa: E402
from benchmarks.gpu_kernels.recurrences import FLAGS, in_process, profile, timed  # noqa: E402
from benchmarks.gpu_kernels.training_operations import COPY, copy_rate  # noqa: E402
from benchmarks.networks.baseline import environment  # noqa: E402
from benchmarks.networks.compiled_program import Stepped, own_arguments  # noqa: E402
from benchmarks.networks.workloads.spec import Program  # noqa: E402

CALLS = 10
"""In a row; of a generation `TWICE`."""
TWICE = 2
SECONDS = 3.0
"""Of timing per case and kind."""
COUNT = 64
"""Tokens of a generation."""
ALONE = "alone"
"""In place of MiB: kernels are no chains."""
SMALL = 4096
"""Divides the size of the copy with tiny sizes."""


@dataclass(frozen=True)
class Case:
    """A decoder, its batch, whether its layers are scanned over, and how many tokens a call makes (0: one step)."""

    sizes: model.Sizes
    batch: int
    scan: bool = False
    count: int = 0

    def small(self) -> Case:
        """Tiny sizes."""
        return Case(model.small(self.sizes), self.batch, self.scan, min(self.count, 8))

    @property
    def position(self) -> int:
        """Of the first token."""
        return self.sizes.length - (self.count or 1)

    def program(self, dtype: str = "bfloat16") -> Program:
        """Function and arguments, caches first."""
        weights, caches = model.weights(self.sizes, dtype), model.caches(self.sizes, self.batch, dtype)
        if self.scan:
            weights, caches = {**weights, "layers": model.stacked(weights["layers"])}, model.stacked(caches)
        step = model.generation(self.sizes, self.count) if self.count else model.decoding_step(self.sizes)
        tokens = jnp.arange(1, 1 + self.batch, dtype=jnp.int32)
        return Program(step, None, (caches, weights, tokens, jnp.asarray(self.position, jnp.int32)), carried=1)

    def bytes(self, arguments: Sequence[Any]) -> float:
        """What must be read in a call: every weight once a token, keys and values up to each token's position."""
        caches, weights = (sum(x.nbytes for x in jax.tree.leaves(part)) for part in arguments[:2])
        read = sum((p + 1) / self.sizes.length for p in range(self.position, self.sizes.length))
        return (self.count or 1) * weights + read * caches


CASES: dict[str, Case] = {
    "8 layers of 50 M, b1": Case(model.WIDE, 1),
    "8 layers of 50 M, b8": Case(model.WIDE, 8),
    "Llama-3.2-1B, b1": Case(model.LLAMA, 1),
    "8 layers of 50 M, b1, scan": Case(model.WIDE, 1, scan=True),
    "8 layers of 50 M, b8, scan": Case(model.WIDE, 8, scan=True),
    "Llama-3.2-1B, b1, scan": Case(model.LLAMA, 1, scan=True),
    "8 layers of 50 M, b1, generation": Case(model.WIDE, 1, count=COUNT),
    "8 layers of 50 M, b8, generation": Case(model.WIDE, 8, count=COUNT),
    "Llama-3.2-1B, b1, generation": Case(model.LLAMA, 1, count=COUNT),
    "8 layers of 50 M, b1, scan, generation": Case(model.WIDE, 1, scan=True, count=COUNT),
}


# -- one case ---------------------------------------------------------------------------------------------------------
def makers(*, forced: bool = False) -> dict[str, Callable[[Any], Any]]:
    """What makes a program of a function whose first argument is donated, by the program's name. Args: forced: kernels
    of jcuts wherever there is a form, without measurements.
    """
    import jcuts

    made: dict[str, Callable[[Any], Any]] = {"jax.jit": functools.partial(jax.jit, donate_argnums=0)}
    for label, options in FLAGS.items():
        made[label] = functools.partial(jax.jit, donate_argnums=0, compiler_options=options)
    settings = {"mode": "fusion", "tune": "off"} if forced else {}
    return {**made, "jcuts": functools.partial(jcuts.optimize, donate_argnums=0, **settings)}


def measure(case: Case, seconds: float, copied: int, *, forced: bool = False) -> dict[str, Any]:
    """One case, in this process. Args: copied: numbers of the copy that gives the memory's rate; forced: as of
    `makers`.
    """
    form = case.program().form(closed=False)
    needed, rate = case.bytes(form.arguments), copy_rate(copied, seconds / 4)
    runs = {
        label: Stepped(make(form.function), form, own_arguments(form)) for label, make in makers(forced=forced).items()
    }
    first, results = {}, {}
    for label, run in runs.items():
        start = time.perf_counter()
        jax.block_until_ready(kept := run.step())
        first[label], results[label] = time.perf_counter() - start, kept[1:]  # the caches are donated by the next call
    calls = {label: run.step for label, run in runs.items()}
    times = {"back_to_back": timed(calls, TWICE if case.count else CALLS, seconds), "waited": timed(calls, 1, seconds)}
    ours = runs["jcuts"]
    decision = ours.call.decision(*ours.arguments)
    return {
        "first_call_seconds": first,
        "chosen": decision and decision.chosen,
        "reason": decision and decision.reason,
        "bytes": needed,
        "copy_bytes_per_second": rate,
        "bound_seconds": needed / rate,
        **times,
        "share": {label: needed / rate / t["median"] for label, t in times["back_to_back"].items()},
        **(generated(case, results, forced=forced) if case.count else {"errors_to_float64": errors(form, results)}),
        "kernels": {label: profile(call) for label, call in calls.items()},
        **report(ours),
        **environment(),
    }


def errors(form: Any, results: dict[str, Any]) -> dict[str, float]:
    """Largest error of each program's logits in its first call against float64, over the largest logit."""
    exact = exact_logits(form)
    return {
        n: float(np.abs(np.asarray(r[1], np.float64) - exact).max() / np.abs(exact).max()) for n, r in results.items()
    }


def exact_logits(form: Any) -> np.ndarray:
    """Logits of a step computed in float64 from the same weights and caches."""
    with jax.enable_x64(True):

        def widened(x: Any) -> Any:
            return x.astype(jnp.float64 if jnp.issubdtype(x.dtype, jnp.floating) else jnp.int64)

        return np.asarray(jax.jit(form.function)(*jax.tree.map(widened, form.arguments))[2])


def generated(case: Case, results: dict[str, Any], *, forced: bool = False) -> dict[str, Any]:
    """Whether each program's tokens of one call are those of one step per call, and what these steps take."""
    step = Case(case.sizes, case.batch, case.scan)
    form = step.program().form(closed=False)
    found: dict[str, Any] = {"generated": {}, "step_by_step_seconds": {}}
    for label, make in makers(forced=forced).items():
        program = make(form.function)
        one_by_one(program, form, case, case.count)  # compiles and tunes
        start = time.perf_counter()
        tokens, logits = one_by_one(program, form, case, case.count)
        found["step_by_step_seconds"][label] = time.perf_counter() - start
        found["generated"][label] = compared(np.asarray(results[label][0]), tokens, logits)
    return found


def one_by_one(program: Any, form: Any, case: Case, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Greedy tokens (batch, count) and logits (batch, count, vocabulary) of ``count`` calls of a step."""
    caches, weights, tokens, _ = own_arguments(form)
    positions = [jnp.asarray(p, jnp.int32) for p in range(case.position, case.position + count)]
    made, logits = [], []
    for position in positions:
        caches, tokens, values = program(caches, weights, tokens, position)
        made.append(tokens)
        logits.append(values)
    jax.block_until_ready(logits)
    return np.stack([np.asarray(t) for t in made], 1), np.stack([np.asarray(x) for x in logits], 1)


def compared(found: np.ndarray, wanted: np.ndarray, logits: np.ndarray) -> dict[str, Any]:
    """Whether tokens (batch, count) are equal; else the first that differ, and how far their logits are apart."""
    if np.array_equal(found, wanted):
        return {"equal": True}
    row, at = min(zip(*np.nonzero(found != wanted), strict=True), key=lambda place: place[1])
    scores = logits[row, at].astype(np.float64)
    margin = (scores[wanted[row, at]] - scores[found[row, at]]) / np.abs(scores).max()
    return {"equal": False, "sequence": int(row), "token": int(at), "margin": float(margin)}


def report(run: Stepped) -> dict[str, Any]:
    """The regions of jcuts' program with times, and what was left to XLA with reasons."""
    from benchmarks.networks.on_gpu import subset_row

    explained = run.call.explain(*run.arguments)
    left = [[r.op, r.reason, r.count] for r in explained.refusals]
    return {"regions": [subset_row(s) for s in explained.subsets], "left": left}


# -- the command ------------------------------------------------------------------------------------------------------
def child(name: str, ahead: str, *, small: bool, forced: bool) -> dict[str, Any]:
    """A case's measurements from a process of its own. Args: ahead: as of ``--prefetch``, or ''."""
    usual = {"JCUTS_TUNE_SECONDS": "5" if small else "60", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    settings = {**usual, **os.environ, **({"JAX_PLATFORMS": "cpu"} if small else {})}
    if ahead:
        settings |= {"JCUTS_CHAINS": "0"} if ahead == ALONE else {"JCUTS_L2_PREFETCH_MB": ahead}
    return in_process([__file__, "--child", name, *(["--small"] * small), *(["--forced"] * forced)], settings, 4)


def line(name: str, row: dict[str, Any]) -> str:
    """A case as text."""
    if "error" in row:
        return f"{name}: {row['error']}"
    parts = []
    for label, time_of in row["back_to_back"].items():
        waited, kernels = 1e3 * row["waited"][label]["median"], row["kernels"][label].get("per_step")
        text = f"{label} {1e3 * time_of['median']:.3f} ms (waited {waited:.3f}), share {row['share'][label]:.2f}"
        parts.append(text + (f", {kernels:.0f} kernels" if kernels else ""))
    found = {**row.get("generated", {}), **row.get("errors_to_float64", {})}
    accuracy = ", ".join(f"{n} {x if isinstance(x, dict) else f'{x:.1e}'}" for n, x in found.items())
    bound = f"bound {1e3 * row['bound_seconds']:.3f} ms, copy {1e-12 * row['copy_bytes_per_second']:.2f} TB/s"
    return f"{name}: {'; '.join(parts)}; {bound}; {row['chosen']}; {accuracy}"


def main() -> int:
    """The command: 0 if every case ran."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {'; '.join(CASES)}; all, if none is given")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--small", action="store_true", help="tiny sizes on the CPU")
    parser.add_argument("--forced", action="store_true", help="kernels by the time model alone")
    parser.add_argument("--prefetch", nargs="+", default=[""], metavar="MB", help=f"MiB prefetched ahead, or {ALONE!r}")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := set(options.names) - set(CASES):
        parser.error(f"no such case: {', '.join(sorted(unknown))}")
    if options.child:
        case = CASES[options.child]
        sizes = (case.small(), 0.1, COPY // SMALL) if options.small else (case, SECONDS, COPY)
        made = measure(*sizes, forced=options.forced)
        print(json.dumps(made))
        return 0
    rows: dict[str, Any] = {}
    for name, ahead in itertools.product(options.names or CASES, options.prefetch):
        label = f"{name}, prefetch {ahead}" if ahead else name
        rows[label] = child(name, ahead, small=options.small, forced=options.forced)
        print(line(label, rows[label]), flush=True)
        if options.out:
            options.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return int(any("error" in row for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
