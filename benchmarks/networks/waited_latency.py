"""Latency of calls that are waited for: percentiles, and which part of a call is the host's, by command-buffer options.

    python benchmarks/networks/waited_latency.py --out FILE.json ResNet50:1:closed MobileNetV2:1:closed
    python benchmarks/networks/waited_latency.py --out FILE.json --dry MobileNetV2:1:closed   # tiny, on this CPU

Each row runs in a process of its own, tuned within ``JCUTS_TUNE_SECONDS`` (60 unless it is set).  `jax.jit` and jcuts'
program are compiled with each of `OPTIONS`; a set that this jaxlib refuses is listed as such.  All programs take turns:

    waited    seconds from a call to its result, every call waited for: p50, p90, p99
    host      seconds until the call returned, of the same calls
    stream    seconds of a call, of `STREAM` calls in a row of which only the last is waited for
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import jax  # noqa: E402
import numpy as np  # noqa: E402

from benchmarks.gpu_kernels.recurrences import in_process  # noqa: E402
from benchmarks.networks import baseline  # noqa: E402
from benchmarks.networks.workload_row import Row  # noqa: E402

GRAPHS: dict[str, Any] = {"xla_gpu_graph_min_graph_size": 1}
UPDATE = "xla_gpu_command_buffer_update_mode"
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "graphs": GRAPHS,
    "graphs, temporaries at fixed addresses": {**GRAPHS, UPDATE: "SKIP_TEMP"},
    "graphs, profiled addresses fixed": {**GRAPHS, UPDATE: "SKIP_PROFILED"},
}
"""Compiler options of XLA: how much of a command buffer is updated before it is launched again."""
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
TURN = 20
"""Calls of a program in a turn."""
LEAST = 5
"""Turns at least."""
STREAM = 20
"""Calls in a row."""
SECONDS = 4.0
"""Of timing per row."""


def programs(form: Any) -> tuple[dict[str, Callable[[], Any]], dict[str, str]]:
    """Calls by name, and the sets of options that were refused with their reason."""
    import jcuts

    ours = jcuts.optimize(form.function)
    jax.block_until_ready(ours(*form.arguments))  # tunes
    found: dict[str, Callable[[], Any]] = {"jcuts": lambda: ours(*form.arguments)}
    refused: dict[str, str] = {}
    for kind, function in (("jax.jit", form.function), ("jcuts in jax.jit", ours)):
        for label, options in OPTIONS.items():
            name = f"{kind}, {label}"
            try:
                run = jax.jit(lambda *xs, f=function: f(*xs), compiler_options=options or None)
                compiled = run.lower(*form.arguments).compile()
                jax.block_until_ready(compiled(*form.arguments))
            except Exception as error:  # whatever the compiler or the runtime raises
                refused[name] = str(error)[:300]
                continue
            found[name] = lambda compiled=compiled: compiled(*form.arguments)
    return found, refused


def timed(calls: dict[str, Callable[[], Any]], seconds: float) -> dict[str, Any]:
    """The three times of every program."""
    kept: dict[str, dict[str, list[float]]] = {n: {"waited": [], "host": [], "stream": []} for n in calls}
    end = time.perf_counter() + seconds
    turns = 0
    while turns < LEAST or time.perf_counter() < end:
        turns += 1
        for name, call in calls.items():
            times = kept[name]
            for _ in range(TURN):
                start = time.perf_counter()
                result = call()
                times["host"].append(time.perf_counter() - start)
                jax.block_until_ready(result)
                times["waited"].append(time.perf_counter() - start)
            start = time.perf_counter()
            for _ in range(STREAM):
                result = call()
            jax.block_until_ready(result)
            times["stream"].append((time.perf_counter() - start) / STREAM)
    return {
        name: {
            kind: {q: float(np.quantile(found, share)) for q, share in QUANTILES.items()} for kind, found in of.items()
        }
        for name, of in kept.items()
    }


def measure(row: Row, *, dry: bool) -> dict[str, Any]:
    """One row, in this process."""
    form = baseline.built(row, dry)
    if form.donated:
        raise SystemExit(f"{row} donates its arguments: its calls do not repeat")
    calls, refused = programs(form)
    return {**baseline.environment(), "programs": timed(calls, 0.2 if dry else SECONDS), "refused": refused}


def main() -> int:
    """The command: 0 if every row ran."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", type=Row.parse, metavar="NAME:BATCH:FORM[:DTYPE]")
    parser.add_argument("--out", type=Path, default=Path("waited_latency.json"))
    parser.add_argument("--dry", action="store_true", help="tiny networks, on whatever device is here")
    parser.add_argument("--child", type=Row.parse, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure(options.child, dry=options.dry)))
        return 0
    rows: dict[str, Any] = {}
    settings = {"JCUTS_TUNE_SECONDS": "60", "XLA_PYTHON_CLIENT_PREALLOCATE": "false", **os.environ}
    for row in options.rows:
        found = in_process([__file__, "--child", str(row), *(["--dry"] * options.dry)], settings, 4)
        rows[str(row)] = found
        for name, times in found.get("programs", {}).items():
            waited = " / ".join(f"{1e3 * times['waited'][q]:.3f}" for q in QUANTILES)
            host, stream = (1e3 * times[kind]["p50"] for kind in ("host", "stream"))
            print(
                f"{row} {name}: waited {waited} ms (p50 / p90 / p99), host {host:.3f}, stream {stream:.3f}", flush=True
            )
        print(f"{row}: {found.get('refused') or found.get('error') or ''}", flush=True)
        options.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return int(any("error" in row for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
