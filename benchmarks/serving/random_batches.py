"""Latency of a server whose batches have 200 random sizes, over time: plain ``jax.jit``, ``tune="auto"``, ``"serve"``.

    python benchmarks/serving/random_batches.py --seconds 120 --out latency.json

Every way runs in a process of its own with an empty cache, one after the other: requests follow each other with a pause
between them, as many as fit into the time.  A latency is the time from the call to the result on the host.  The network
is depthwise-separable convolutions and a dense layer, in float32; weights are arguments.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jcuts

WAYS = ("plain", "plain buckets", "auto", "serve", "serve buckets")
BUCKETS = (16, 32, 64, 128, 192, 256)
SIZES = 200
WINDOWS = 6
PAUSE = 1 / 500
SHAPE = (14, 14, 16)


def network(params: dict[str, Any], images: Any) -> Any:
    """(n, 14, 14, 16) -> (n, 10)."""
    x = images
    for i in range(2):
        dims = ("NHWC", "HWIO", "NHWC")
        x = jax.lax.conv_general_dilated(
            x, params[f"depth{i}"], (1, 1), "SAME", dimension_numbers=dims, feature_group_count=x.shape[-1]
        )
        x = jax.nn.relu(jnp.einsum("nhwc,cd->nhwd", x, params[f"point{i}"]))
    return x.mean(axis=(1, 2)) @ params["dense"]


def parameters() -> dict[str, Any]:
    """The network's weights, as arrays of the device."""
    rng, width = np.random.default_rng(0), SHAPE[-1]
    shapes = {f"depth{i}": (3, 3, 1, width) for i in range(2)} | {f"point{i}": (width, width) for i in range(2)}
    shapes["dense"] = (width, 10)
    return {name: jnp.asarray(0.2 * rng.standard_normal(shape), jnp.float32) for name, shape in shapes.items()}


def function_of(way: str, tune_seconds: float | None) -> Callable[..., Any]:
    """What serves the requests of a way."""
    buckets = {"batch_buckets": BUCKETS, "batch_argnums": 1} if way.endswith("buckets") else {}
    if way == "plain":
        return jax.jit(network)
    tune = way.split()[0]
    if tune == "plain":  # under JCUTS_DISABLE: XLA's programs of the same sizes
        return jcuts.optimize(network, tune="cached", **buckets)
    return jcuts.optimize(network, tune=tune, tune_seconds=tune_seconds, **buckets)


def batch_sizes(largest: int) -> np.ndarray:
    """200 different sizes in [1, largest], in random order."""
    return 1 + np.random.default_rng(1).permutation(largest)[:SIZES]


def serve(way: str, seconds: float, tune_seconds: float | None, largest: int) -> dict[str, Any]:
    """Requests until the time is over: their times since the start, sizes and latencies [s]."""
    fn, params = function_of(way, tune_seconds), parameters()
    sizes = batch_sizes(largest)
    images = np.random.default_rng(2).standard_normal((largest, *SHAPE)).astype(np.float32)
    jax.block_until_ready(params)
    rows = []
    start = time.perf_counter()
    number = 0
    while (now := time.perf_counter()) - start < seconds:
        batch = images[: sizes[number % SIZES]]
        np.asarray(fn(params, batch))
        rows.append((now - start, len(batch), time.perf_counter() - now))
        number += 1
        time.sleep(PAUSE)
    return {"way": way, "requests": rows, "stats": jcuts.stats()}


def summary(found: dict[str, Any], seconds: float) -> list[dict[str, Any]]:
    """p50 and p99 of all requests, of the first round of sizes, and of windows of the time [ms]."""
    table = np.array(found["requests"])
    parts = {"all": table, "first round": table[:SIZES]}
    width = seconds / WINDOWS
    for k in range(WINDOWS):
        begins = table[:, 0]
        parts[f"{k * width:.0f}-{(k + 1) * width:.0f} s"] = table[(begins >= k * width) & (begins < (k + 1) * width)]
    rows = []
    for name, part in parts.items():
        if len(part):
            ms = 1000 * part[:, 2]
            p50, p99 = np.percentile(ms, (50, 99))
            rows.append({"part": name, "requests": len(ms), "p50_ms": p50, "p99_ms": p99, "most_ms": ms.max()})
    return rows


def in_process(way: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """`serve` in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "JCUTS_CACHE_DIR": folder}
        if way.startswith("plain"):
            environment["JCUTS_DISABLE"] = "1"
        out = Path(folder) / "rows.json"
        command = [sys.executable, __file__, "--way", way, "--seconds", str(arguments.seconds)]
        command += ["--largest", str(arguments.largest), "--out", str(out)]
        if arguments.tune_seconds is not None:
            command += ["--tune-seconds", str(arguments.tune_seconds)]
        subprocess.run(command, env=environment, check=True)
        return json.loads(out.read_text())


def main() -> None:
    """Prints a table of all ways; ``--way`` runs one of them in this process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=120.0, help="of every way; default: %(default)s")
    parser.add_argument("--tune-seconds", type=float, help="tuning time per signature; default: jcuts' own")
    parser.add_argument("--largest", type=int, default=256, help="largest batch; default: %(default)s")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="JSON file of the numbers")
    arguments = parser.parse_args()
    if arguments.way is not None:
        found = serve(arguments.way, arguments.seconds, arguments.tune_seconds, arguments.largest)
        arguments.out.write_text(json.dumps(found))
        return
    results = []
    for way in arguments.ways:
        found = in_process(way, arguments)
        rows = summary(found, arguments.seconds)
        programs = [row["program"] for f in found["stats"]["functions"] for row in f["signatures"]]
        results.append({"way": way, "rows": rows, "programs": {p: programs.count(p) for p in sorted(set(programs))}})
        print(f"{way}: {results[-1]['programs']}")
        for row in rows:
            times = f"p50 {row['p50_ms']:8.2f} ms, p99 {row['p99_ms']:9.2f} ms, most {row['most_ms']:9.1f} ms"
            print(f"    {row['part']:12} {row['requests']:6} requests, {times}", flush=True)
    if arguments.out is not None:
        told = {"jax": jax.__version__, "seconds": arguments.seconds, "tune_seconds": arguments.tune_seconds}
        arguments.out.write_text(json.dumps({**told, "ways": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
