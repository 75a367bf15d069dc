"""Artefacts across processes: networks saved by one and loaded by another without numba, compilers and database.

    python benchmarks/artifact/two_processes.py ResNet50 decoder --tune-seconds 60

The first process tunes, saves (weights beside), and writes down arguments and results.  The second has an empty cache
directory and no compiler on its path, and its imports of numba, llvmlite, cvxpy and rich fail; it compares results bit
by bit and counts the seconds from a ready backend to the first result.  Then the saving process, which loads the
artefact as well, times both programs interleaved.  One JSON line per network.
"""

from __future__ import annotations

import argparse
import importlib.abc
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
HIDDEN = ("numba", "llvmlite", "cvxpy", "rich")
WIDTH = 256
LAYERS = 4
HEADS = 4
LENGTH = 128
VOCABULARY = 2048


class Hidden(importlib.abc.MetaPathFinder):
    """Makes the compilers' imports fail, as where they are not installed."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
        """Raises: ModuleNotFoundError for one of them."""
        if fullname.partition(".")[0] in HIDDEN:
            raise ModuleNotFoundError(f"{fullname} is hidden", name=fullname)


def workload(name: str) -> tuple[Any, tuple[Any, ...], Any]:
    """A function that closes over its weights, its arguments, and the weights."""
    import jax
    import jax.numpy as jnp

    if name != "decoder":
        from jcuts.cli.demo import build

        network = build(name, 1)
        weights = jax.tree.map(jnp.asarray, network.weights)
        return lambda images: network.apply(weights, images), (jnp.asarray(network.images),), weights
    random = np.random.default_rng(0)

    def made(*shape: int) -> Any:
        return jnp.asarray(random.standard_normal(shape).astype(np.float32) / np.sqrt(shape[0]))

    shapes = {"q": (WIDTH, WIDTH), "k": (WIDTH, WIDTH), "v": (WIDTH, WIDTH), "o": (WIDTH, WIDTH)}
    shapes |= {"up": (WIDTH, 4 * WIDTH), "gate": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    weights = {
        "words": made(VOCABULARY, WIDTH),
        "layers": [{n: made(*shape) for n, shape in shapes.items()} for _ in range(LAYERS)],
    }

    def normed(x: Any) -> Any:
        return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)

    def step(caches: Any, token: Any, position: Any) -> Any:
        x, written = weights["words"][token], []
        bias = jnp.where(jnp.arange(LENGTH) <= position, 0.0, -1e9)
        for layer, (keys, values) in zip(weights["layers"], caches, strict=True):
            h = normed(x)
            q, k, v = ((h @ layer[n]).reshape(-1, HEADS, WIDTH // HEADS) for n in "qkv")
            keys = jax.lax.dynamic_update_slice(keys, k[:, None], (0, position, 0, 0))
            values = jax.lax.dynamic_update_slice(values, v[:, None], (0, position, 0, 0))
            scores = jnp.einsum("bhd,blhd->bhl", q, keys) / np.sqrt(WIDTH // HEADS) + bias
            x = x + jnp.einsum("bhl,blhd->bhd", jax.nn.softmax(scores), values).reshape(x.shape) @ layer["o"]
            h = normed(x)
            x = x + (jax.nn.silu(h @ layer["gate"]) * (h @ layer["up"])) @ layer["down"]
            written.append((keys, values))
        return written, normed(x) @ weights["words"].T

    cache = [tuple(made(1, LENGTH, HEADS, WIDTH // HEADS) for _ in range(2)) for _ in range(LAYERS)]
    return step, (cache, jnp.zeros(1, jnp.int32), jnp.asarray(LENGTH // 2, jnp.int32)), weights


def save(name: str, path: Path, tune_seconds: float) -> tuple[Any, tuple[Any, ...]]:
    """Tunes and saves a network, and writes arguments and results beside it; the tuned function and its arguments."""
    import jax

    import jcuts

    fn, args, weights = workload(name)
    tuned = jcuts.optimize(fn, tune_seconds=tune_seconds)
    results = jax.tree.leaves(tuned(*args))
    start = time.perf_counter()
    tuned.save(path, *args, weights="beside", names=weights)
    print(f"{name}: {tuned.decision(*args).chosen}; saved in {time.perf_counter() - start:.1f} s", file=sys.stderr)
    known = {f"in{n}": np.asarray(x) for n, x in enumerate(jax.tree.leaves(args))}
    np.savez(path.with_suffix(".npz"), **known, **{f"out{n}": np.asarray(x) for n, x in enumerate(results)})
    return tuned, args


def load(path: Path) -> dict[str, Any]:
    """Loads an artefact in this process, and calls it: seconds, and whether the bits are those of the other process."""
    sys.meta_path.insert(0, Hidden())
    import jax

    import jcuts

    jax.block_until_ready(jax.jit(lambda x: x + 1)(np.float32(1)))  # the backend is ready
    with np.load(path.with_suffix(".npz")) as known:
        leaves = [known[f"in{n}"] for n in range(sum(n.startswith("in") for n in known))]
        expected = [known[f"out{n}"] for n in range(sum(n.startswith("out") for n in known))]
    start = time.perf_counter()
    loaded = jcuts.load(path)
    done = time.perf_counter()
    args, _ = jax.tree.unflatten(loaded.in_tree(), leaves)
    results = jax.block_until_ready(jax.tree.leaves(loaded(*args)))
    first = time.perf_counter() - start
    bits = all(np.asarray(r).tobytes() == e.tobytes() for r, e in zip(results, expected, strict=True))
    here = sorted({name.partition(".")[0] for name in sys.modules} & set(HIDDEN))
    return {
        "bits_equal": bits,
        "load_s": done - start,
        "first_result_s": first,
        "kernels": len(loaded.manifest.kernels),
        "imported": here,
    }


def compare(tuned: Any, loaded: Any, args: tuple[Any, ...], seconds: float) -> dict[str, float]:
    """Interleaved times: medians, and the median ratio loaded / tuned of neighbouring calls."""
    import jax

    times: dict[str, list[float]] = {"tuned": [], "loaded": []}
    for fn in (tuned, loaded):
        jax.block_until_ready(fn(*args))
    end = time.perf_counter() + seconds
    order = [("tuned", tuned), ("loaded", loaded)]
    while time.perf_counter() < end or len(times["tuned"]) < 20:
        order.reverse()
        for name, fn in order:
            start = time.perf_counter()
            jax.block_until_ready(fn(*args))
            times[name].append(time.perf_counter() - start)
    ratios = [b / a for a, b in zip(times["tuned"], times["loaded"], strict=True)]
    return {
        "tuned_ms": 1e3 * statistics.median(times["tuned"]),
        "loaded_ms": 1e3 * statistics.median(times["loaded"]),
        "loaded_over_tuned": statistics.median(ratios),
        "calls": len(ratios),
    }


def other_process(path: Path) -> dict[str, Any]:
    """`load` in a process with an empty cache directory and no compiler on its path."""
    with tempfile.TemporaryDirectory() as empty:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("JCUTS_")}
        environment |= {"JCUTS_CACHE_DIR": empty, "PATH": empty}
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
        command = [sys.executable, str(Path(__file__)), "--load", str(path)]
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Prints one JSON line per network."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="networks of keras.applications, or decoder")
    parser.add_argument("--tune-seconds", type=float, default=60.0)
    parser.add_argument("--seconds", type=float, default=10.0, help="of timing")
    parser.add_argument("--load", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.load:
        print(json.dumps(load(arguments.load)))
        return
    import jcuts

    folder = Path(tempfile.mkdtemp())
    try:
        for name in arguments.names or ("ResNet50", "decoder"):
            path = folder / f"{name}.jcuts"
            tuned, args = save(name, path, arguments.tune_seconds)
            sizes = {f"{p.suffix[1:]}_bytes": p.stat().st_size for p in folder.glob(f"{name}.*") if p.suffix != ".npz"}
            row = other_process(path) | compare(tuned, jcuts.load(path), args, arguments.seconds) | sizes
            print(json.dumps({"name": name, **row}), flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
