"""Persistent kernels and chains under load: equal bits in thousands of runs, and after a process was killed meanwhile.

    python benchmarks/gpu_checks/persistent.py --out results                      # on a GPU, about 4 minutes
    python benchmarks/gpu_checks/persistent.py --out results --small              # tiny sizes, on a CPU, too

    replays   each program `--replays` times while another process multiplies matrices on the same GPU: all results are
              compared with the first run's, bit by bit, on the device
    kills     kill -9 of a process at a random moment of its runs; the next process has to give the same bits

Programs are loops as one cooperative launch (`docs/kernels/recurrence.md`) and a decoding step as a chain with weights
prefetched ahead (`docs/kernels/execution.md`).  Kernels are forced (``mode="fusion"``, ``tune="off"``), so that a
measurement cannot have left them out; a program without any fails.  XLA's autotuning is off: it chooses by times.
``OUT/persistent_checks.json`` has the counts.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
if "autotune_level" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_autotune_level=0"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from benchmarks.cpu_kernels import loops  # noqa: E402
from benchmarks.gpu_kernels import decoder_model as model  # noqa: E402
from benchmarks.networks.baseline import environment  # noqa: E402

EACH = 100
"""Runs between two looks at the count of differences."""
LIMIT_S = 300.0
RUNNING = "running"

Case = tuple[Callable[..., Any], tuple[Any, ...]]


def programs(*, small: bool) -> dict[str, Callable[[], Case]]:
    """Functions and arguments by name."""
    width, steps = (16, 5) if small else (800, 200)
    return {
        "GRU, one row": lambda: loops.gru(width, 1, steps),
        "GRU, 16 rows": lambda: loops.gru(width, 16, steps),
        "LSTM, 16 rows": lambda: loops.lstm(width // 2, 16, steps),
        "perceptrons": lambda: loops.perceptrons(width // 2, 1, steps),
        "scalar loop": lambda: loops.scalar(10 * steps),
        "decoding step": lambda: decoding(small=small),
    }


def decoding(*, small: bool) -> Case:
    """One step of a decoder of two layers; the caches are results, too."""
    sizes = model.small(model.WIDE) if small else replace(model.WIDE, layers=2)
    params, caches = model.weights(sizes, "bfloat16"), model.caches(sizes, 1, "bfloat16")
    return model.decoding_step(sizes), (caches, params, jnp.zeros((1,), jnp.int32), jnp.int32(sizes.length // 2))


def forced(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Callable[..., Any]:
    """A jitted function with jcuts' kernels wherever there is a form."""
    import jcuts

    ours = jcuts.optimize(function, mode="fusion", tune="off")
    lowered = ours.chosen(*arguments)
    if "jcuts" not in lowered.as_text():
        raise SystemExit("no kernel of jcuts in the program")
    return jax.jit(lambda *xs: ours(*xs))


def words(x: Any) -> Any:
    """An array as integers of its own width, so that NaNs and zeros are compared by their bits."""
    x = jnp.asarray(x)
    return jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}") if x.dtype != bool else x


@jax.jit
def differing(first: Any, again: Any) -> Any:
    """How many elements of two trees of arrays differ in their bits."""
    pairs = zip(jax.tree.leaves(first), jax.tree.leaves(again), strict=True)
    return sum(jnp.sum(words(a) != words(b)) for a, b in pairs)


def digest(results: Any) -> str:
    """Names the bits of all results."""
    return hashlib.sha256(b"".join(np.asarray(words(x)).tobytes() for x in jax.tree.leaves(results))).hexdigest()


# -- processes --------------------------------------------------------------------------------------------------------
def load() -> None:
    """Multiplies matrices until it is killed."""
    x = jnp.ones((2048, 2048), jnp.bfloat16)
    multiply = jax.jit(lambda x: jnp.tanh(x @ x))
    while True:
        for _ in range(20):
            x = multiply(x)
        x.block_until_ready()


def endless(name: str, *, small: bool) -> None:
    """Runs a program until it is killed; says when it has begun."""
    function, arguments = programs(small=small)[name]()
    run = forced(function, arguments)
    jax.block_until_ready(run(*arguments))
    print(RUNNING, flush=True)
    while True:
        for _ in range(20):
            results = run(*arguments)
        jax.block_until_ready(results)


def once(name: str, *, small: bool) -> None:
    """Prints the digest of a program's results."""
    function, arguments = programs(small=small)[name]()
    print(digest(forced(function, arguments)(*arguments)), flush=True)


def replay(name: str, count: int, seconds: float, *, small: bool) -> dict[str, Any]:
    """Runs a program again and again beside other work; at most so many seconds."""
    function, arguments = programs(small=small)[name]()
    run = forced(function, arguments)
    first = jax.block_until_ready(run(*arguments))
    start, done, differences = time.perf_counter(), 0, jnp.int32(0)
    while done < count and time.perf_counter() - start < seconds:
        for _ in range(min(EACH, count - done)):
            differences = differences + differing(first, run(*arguments))
        done += min(EACH, count - done)
        jax.block_until_ready(differences)
    finite = all(bool(jnp.isfinite(x.astype(jnp.float32)).all()) for x in jax.tree.leaves(first))
    return {"name": name, "runs": done, "differences": int(differences), "finite": finite, "digest": digest(first)}


def child(arguments: list[str], *, small: bool) -> list[str]:
    """Command line of this file."""
    return [sys.executable, __file__, *arguments, *(["--small"] if small else [])]


# -- checks -----------------------------------------------------------------------------------------------------------
def replays(names: list[str], options: argparse.Namespace) -> list[dict[str, Any]]:
    """The first check. Each program has a process of its own, as has the load."""
    neighbour = subprocess.Popen(child(["--load"], small=options.small))
    rows = []
    try:
        for name in names:
            more = ["--replay", name, "--replays", str(options.replays), "--seconds", str(options.seconds)]
            done = subprocess.run(
                child(more, small=options.small), capture_output=True, text=True, timeout=LIMIT_S, check=False
            )
            ok = done.returncode == 0 and done.stdout.strip()
            rows.append(json.loads(done.stdout.splitlines()[-1]) if ok else {"name": name, "error": done.stderr[-800:]})
            rows[-1]["neighbour_ran"] = neighbour.poll() is None
            print(rows[-1], flush=True)
    finally:
        neighbour.kill()
        neighbour.wait()
    return rows


def kills(names: list[str], options: argparse.Namespace) -> list[dict[str, Any]]:
    """The second check: results of a process of its own before and after one was killed."""
    rng, rows = random.Random(options.seed), []

    def result(name: str) -> str:
        done = subprocess.run(
            child(["--once", name], small=options.small), capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        return done.stdout.strip().splitlines()[-1] if done.returncode == 0 else f"error: {done.stderr[-400:]}"

    for name in names:
        before = result(name)
        for _ in range(options.kills):
            victim = subprocess.Popen(
                child(["--endless", name], small=options.small), stdout=subprocess.PIPE, text=True
            )
            assert victim.stdout is not None
            began = victim.stdout.readline().strip() == RUNNING
            time.sleep(rng.uniform(0.0, 0.3))
            victim.send_signal(signal.SIGKILL)
            victim.wait()
            rows.append(
                {"name": name, "running": began, "equal": not before.startswith("error") and result(name) == before}
            )
            print(rows[-1], flush=True)
    return rows


def main() -> int:
    """Both checks; exit status 1 where one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="programs (default: all)")
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--replays", type=int, default=10_000, help="runs of each program")
    parser.add_argument("--seconds", type=float, default=40.0, help="most time for the runs of each program")
    parser.add_argument("--kills", type=int, default=2, help="of each program")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--small", action="store_true", help="tiny sizes")
    for name in ("replay", "endless", "once"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    parser.add_argument("--load", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.load:
        load()
    if options.endless:
        endless(options.endless, small=options.small)
    if options.once:
        once(options.once, small=options.small)
        return 0
    if options.replay:
        print(json.dumps(replay(options.replay, options.replays, options.seconds, small=options.small)))
        return 0
    names = options.names or list(programs(small=options.small))
    found = {**environment(), "replays": replays(names, options), "kills": kills(names, options)}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "persistent_checks.json").write_text(json.dumps(found, indent=1) + "\n")
    good = all(r.get("runs") and r["differences"] == 0 for r in found["replays"])
    good = good and all(r["running"] and r["equal"] for r in found["kills"])
    print("equal bits" if good else "DIFFERENCES or errors", flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
