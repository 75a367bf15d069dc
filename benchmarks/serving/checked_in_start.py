"""Seconds to the tuned speed of a job that starts with checked-in results, and of one that starts with nothing.

    python benchmarks/serving/checked_in_start.py --out start.json

The network and a batch of `random_batches.py`.  One process tunes and writes signed files (`jcuts tune --out --key`).
Then processes with empty caches make their first call: plain ``jax.jit``; without results; with the files unsigned, as
somebody without the key has them (kernels are checked, whole programs are compared); with the key and
``require="complete"``; and a second process of that cache.  Each gives the seconds of its first call, with imports and
without, and milliseconds per call afterwards.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
BATCH = 64
CALLS = 30
START = """
import json, sys, time
sys.path.insert(0, {here!r})
begun = time.perf_counter()
import jax, numpy as np
import random_batches
params = jax.block_until_ready(random_batches.parameters())
images = np.random.default_rng(2).standard_normal(({batch}, *random_batches.SHAPE)).astype(np.float32)
import jcuts
way = sys.argv[1]
require = "complete" if "complete" in way else None
fn = jax.jit(random_batches.network) if way == "plain" else jcuts.optimize(random_batches.network, require=require)
start = time.perf_counter()
np.asarray(fn(params, images))
first = time.perf_counter()
times = []
for _ in range({calls}):
    before = time.perf_counter()
    np.asarray(fn(params, images))
    times.append(time.perf_counter() - before)
program = "xla" if way == "plain" else fn.decision(params, images).chosen
print(json.dumps({{"way": way, "first_call_s": first - start, "from_import_s": first - begun,
                   "ms": 1000 * float(np.median(times)), "program": program}}))
"""
EXAMPLE = """
import sys
sys.path.insert(0, {here!r})
import numpy as np
from random_batches import SHAPE, network, parameters
example = parameters(), np.random.default_rng(2).standard_normal(({batch}, *SHAPE)).astype(np.float32)
"""


def start(way: str, cache: Path, **variables: str) -> dict[str, Any]:
    """The first call of a process. Args: cache: its folder; variables: of its environment."""
    code = START.format(here=str(HERE), batch=BATCH, calls=CALLS)
    usual = {"JCUTS_CACHE_DIR": str(cache), "JCUTS_FIRST_CALL_SECONDS": "inf", "JCUTS_SHIPPED": "0"}
    environment = {**os.environ, **usual, **variables}
    done = subprocess.run(
        [sys.executable, "-c", code, way], env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout)


def tuned_files(folder: Path) -> tuple[Path, Path]:
    """Files that `jcuts tune` has written, and their key."""
    key, files = folder / "team.key", folder / "tuned"
    key.write_bytes(os.urandom(32))
    (folder / "example_of_start.py").write_text(EXAMPLE.format(here=str(HERE), batch=BATCH))
    command = [sys.executable, "-m", "jcuts", "tune", "example_of_start:network", "--args", "example_of_start:example"]
    environment = {**os.environ, "JCUTS_CACHE_DIR": str(folder / "tuning")}
    subprocess.run([*command, "--out", str(files), "--key", str(key)], env=environment, cwd=folder, check=True)
    return files, key


def main() -> None:
    """Prints a row per way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="JSON file of the numbers")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files, key = tuned_files(folder)
        unsigned = {"JCUTS_DATABASES": str(files)}
        signed = {**unsigned, "JCUTS_DATABASE_KEY": str(key)}
        rows = [
            start("plain", folder / "a"),
            start("no results", folder / "b"),
            start("unsigned files", folder / "c", **unsigned),
            start("signed files, complete", folder / "d", **signed),
            start("signed files, complete, second process", folder / "d", **signed),
        ]
    for row in rows:
        times = f"first call {row['first_call_s']:6.2f} s ({row['from_import_s']:6.2f} s with imports)"
        print(f"{row['way']:40} {times}, then {row['ms']:8.3f} ms: {row['program']}")
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
