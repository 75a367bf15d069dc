"""Loops on a CPU: recurrences, a Kalman filter, perceptrons in a scan and a scalar loop, `jax.jit` and jcuts in turns.

    python benchmarks/cpu_kernels/loops.py --out FILE.json [NAME ...]

Each loop runs in a process of its own, tuned within ``JCUTS_TUNE_SECONDS`` (30 unless it is set) into an empty
database.  Times are medians with quartiles of calls that take turns; errors are the largest of any result, over its
largest entry, against float64.  `plain` once more in a process that has not imported jcuts says whether that changes
it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from benchmarks.networks.baseline import environment  # noqa: E402

SECONDS = 3.0
"""Of timing per loop."""
LEAST = 9
"""Calls of each program at least."""
TUNING = "30"
RNG = np.random.default_rng(0)

Case = tuple[Callable[..., Any], tuple[Any, ...]]


def normal(*shape: int, scale: float = 0.1) -> Any:
    """Random float32 numbers."""
    return (scale * RNG.standard_normal(shape)).astype(np.float32)


def gru(width: int, batch: int, steps: int) -> Case:
    """A gated recurrent unit, its input projection in the loop as users write it."""

    def run(x: Any, h: Any, w: Any, u: Any, b: Any) -> Any:
        def step(h: Any, row: Any) -> Any:
            mine, own = jnp.split(row @ w + b, 3, -1), jnp.split(h @ u, 3, -1)
            r, z = jax.nn.sigmoid(mine[0] + own[0]), jax.nn.sigmoid(mine[1] + own[1])
            h = (1 - z) * jnp.tanh(mine[2] + r * own[2]) + z * h
            return h, h

        return jax.lax.scan(step, h, x)

    weights = normal(width, 3 * width, scale=width**-0.5), normal(width, 3 * width, scale=width**-0.5)
    return run, (normal(steps, batch, width), normal(batch, width), *weights, normal(3 * width))


def lstm(width: int, batch: int, steps: int) -> Case:
    """Long short-term memory."""

    def run(x: Any, h: Any, c: Any, w: Any, u: Any, b: Any) -> Any:
        def step(carry: Any, row: Any) -> Any:
            h, c = carry
            i, f, g, o = jnp.split(row @ w + h @ u + b, 4, -1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        return jax.lax.scan(step, (h, c), x)

    weights = normal(width, 4 * width, scale=width**-0.5), normal(width, 4 * width, scale=width**-0.5)
    return run, (normal(steps, batch, width), normal(batch, width), normal(batch, width), *weights, normal(4 * width))


def kalman(states: int, steps: int) -> Case:
    """A Kalman filter with one observed value per step."""

    def run(z: Any, x: Any, p: Any, f: Any, h: Any, q: Any) -> Any:
        def step(carry: Any, z: Any) -> Any:
            x, p = carry
            x, p = f @ x, f @ p @ f.T + q
            gain = p @ h / (h @ p @ h + 0.1)
            x = x + gain * (z - h @ x)
            p = p - jnp.outer(gain, h @ p)
            return (x, p), x

        return jax.lax.scan(step, (x, p), z)

    dynamics = 0.95 * np.eye(states, dtype=np.float32) + normal(states, states, scale=0.02)
    noise = 0.01 * np.eye(states, dtype=np.float32)
    return run, (normal(steps), normal(states), np.eye(states, dtype=np.float32), dynamics, normal(states), noise)


def perceptrons(width: int, batch: int, steps: int) -> Case:
    """A residual block of two layers, again and again with the same weights."""

    def run(h: Any, w1: Any, w2: Any, b1: Any, b2: Any) -> Any:
        def step(h: Any, _: Any) -> Any:
            return jnp.tanh(h + jax.nn.gelu(h @ w1 + b1) @ w2 + b2), None

        return jax.lax.scan(step, h, None, length=steps)[0]

    weights = (normal(*shape, scale=0.3 * width**-0.5) for shape in ((width, 4 * width), (4 * width, width)))
    return run, (normal(batch, width), *weights, normal(4 * width), normal(width))


def scalar(steps: int) -> Case:
    """A recurrence of one number."""
    return lambda x: jax.lax.fori_loop(0, steps, lambda _, v: v * 0.999 + jnp.sin(v) * 0.01, x), (np.float32(1),)


CASES: dict[str, Callable[[], Case]] = {
    "GRU, 800 units, b1, 200 steps": lambda: gru(800, 1, 200),
    "GRU, 128 units, b4, 200 steps": lambda: gru(128, 4, 200),
    "LSTM, 256 units, b16, 100 steps": lambda: lstm(256, 16, 100),
    "LSTM, 64 units, b1, 500 steps": lambda: lstm(64, 1, 500),
    "Kalman filter, 4 states, 1000 steps": lambda: kalman(4, 1000),
    "Kalman filter, 16 states, 1000 steps": lambda: kalman(16, 1000),
    "MLP in a scan, width 64, b8, 200 steps": lambda: perceptrons(64, 8, 200),
    "MLP in a scan, width 256, b1, 200 steps": lambda: perceptrons(256, 1, 200),
    "scalar loop, 10000 steps": lambda: scalar(10000),
}


def timed(calls: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    """Seconds of programs that take turns: quartiles."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    end = time.perf_counter() + SECONDS
    while time.perf_counter() < end or min(map(len, found.values())) < LEAST:
        for name, call in calls.items():
            start = time.perf_counter()
            jax.block_until_ready(call())
            found[name].append(time.perf_counter() - start)
    return {
        n: dict(zip(("q1", "median", "q3"), np.quantile(t, (0.25, 0.5, 0.75)), strict=True)) for n, t in found.items()
    }


def errors(run: Callable[..., Any], args: Sequence[Any], programs: dict[str, Callable[..., Any]]) -> dict[str, float]:
    """Largest error of every program's results against float64, over the largest entry of each."""
    with jax.enable_x64(True):
        exact = [np.asarray(x) for x in jax.tree.leaves(jax.jit(run)(*(np.asarray(a, np.float64) for a in args)))]
    found = {}
    for name, program in programs.items():
        pairs = zip(jax.tree.leaves(program(*args)), exact, strict=True)
        found[name] = max(float(np.abs(np.asarray(x, np.float64) - e).max() / np.abs(e).max()) for x, e in pairs)
    return found


def measure(name: str, *, alone: bool) -> dict[str, Any]:
    """One loop, in this process. Args: alone: `jax.jit` only, without importing jcuts."""
    run, args = CASES[name]()
    args = tuple(map(jnp.asarray, args))
    plain = jax.jit(run)
    jax.block_until_ready(plain(*args))
    if alone:
        return {"seconds": timed({"plain": lambda: plain(*args)})["plain"]["median"]}
    import jcuts

    os.environ.setdefault("JCUTS_FIRST_CALL_SECONDS", "inf")  # the tuned program is timed
    ours = jcuts.optimize(run)
    start = time.perf_counter()
    jax.block_until_ready(ours(*args))
    first, decision = time.perf_counter() - start, ours.decision(*args)
    return {
        "first_call_seconds": first,
        "chosen": decision and decision.chosen,
        "seconds": timed({"plain": lambda: plain(*args), "jcuts": lambda: ours(*args)}),
        "errors_to_float64": errors(run, args, {"plain": plain, "jcuts": ours}),
        **environment(),
    }


def in_process(name: str, *, alone: bool) -> dict[str, Any]:
    """A loop's measurements from a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        settings = {"JCUTS_TUNE_SECONDS": TUNING, "JAX_PLATFORMS": "cpu", **os.environ, "JCUTS_CACHE_DIR": folder}
        words = [sys.executable, __file__, "--child", name, *(["--alone"] * alone)]
        done = subprocess.run(words, env=settings, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {'; '.join(CASES)}; all, if none is given")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure(options.child, alone=options.alone)))
        return
    rows = {}
    for name in options.names or CASES:
        row = rows[name] = in_process(name, alone=False) | {"plain_alone": in_process(name, alone=True)}
        plain, ours = (1e3 * row["seconds"][p]["median"] for p in ("plain", "jcuts"))
        alone = 1e3 * row["plain_alone"]["seconds"]
        found = ", ".join(f"{e:.1e}" for e in row["errors_to_float64"].values())
        print(
            f"{name:40} {plain:8.3f} (alone {alone:.3f}) {ours:8.3f} ms {plain / ours:5.2f}  {row['chosen']}  {found}"
        )
        if options.out:
            options.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    gains = [row["seconds"]["plain"]["median"] / row["seconds"]["jcuts"]["median"] for row in rows.values()]
    print(f"geometric mean {math.exp(sum(map(math.log, gains)) / len(gains)):.2f}")


if __name__ == "__main__":
    main()
