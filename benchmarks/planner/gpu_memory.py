"""Peak memory of training steps on one GPU: predicted from the jaxpr, compiled, and in use while the step runs.

    python benchmarks/planner/gpu_memory.py --out results          # eight layouts, each in a process of its own
    python benchmarks/planner/gpu_memory.py --out dry --dry        # small steps on this CPU: finds typos

Layouts differ in recomputation, micro-batches and format; the step is `gpt_step.py` with Adam, its state donated.
`predicted` is `plan.cost.program_memory`, which sees the jaxpr alone; `compiled` is XLA's own `memory_analysis`;
`in_use` the allocator's peak over three steps, weights and batch included.  Layouts that are there already are skipped.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

SIZES: dict[str, Any] = {"layers": 12, "hidden": 1024, "heads": 16, "sequence": 1024, "vocabulary": 32768}
DRY: dict[str, Any] = {"layers": 2, "hidden": 64, "heads": 4, "sequence": 32, "vocabulary": 256}
LAYOUTS: dict[str, dict[str, Any]] = {
    "2 x 1, recomputed": {"micro": 2, "count": 1},
    "8 x 1, recomputed": {"micro": 8, "count": 1},
    "2 x 4, recomputed": {"micro": 2, "count": 4},
    "8 x 1, GPipe, recomputed": {"micro": 8, "count": 1, "schedule": "gpipe"},
    "8 x 1, GPipe, kept": {"micro": 8, "count": 1, "schedule": "gpipe", "remat": False},
    "2 x 4, GPipe, kept": {"micro": 2, "count": 4, "schedule": "gpipe", "remat": False},
    "8 x 1, bfloat16, recomputed": {"micro": 8, "count": 1, "dtype": "bfloat16"},
    "8 x 1, GPipe, bfloat16, kept": {
        "micro": 8,
        "count": 1,
        "schedule": "gpipe",
        "remat": False,
        "dtype": "bfloat16",
    },
}
"""Micro-batch x micro-batches per step, and what is kept between forward and backward."""


def measure(name: str, dry: bool) -> dict[str, Any]:
    """One layout: predicted, compiled and used bytes."""
    import jax

    from benchmarks.planner import gpt_step as gpt
    from benchmarks.planner import layout_memory

    config = gpt.Config(**(DRY if dry else SIZES), **LAYOUTS[name])
    step = gpt.train_step(config, gpt.make_mesh(config))
    params = jax.jit(lambda: gpt.init(config))()
    moments = tuple(jax.tree.map(lambda p: p * 0, params) for _ in range(2))
    tokens = jax.random.randint(jax.random.key(1), (config.batch, config.sequence + 1), 0, config.vocabulary)
    state = (params, moments, tokens)
    predicted = layout_memory.predicted(step, state)
    compiled = step.lower(*state).compile()
    device = jax.devices()[0]
    row = {
        "layout": name,
        "config": {**(DRY if dry else SIZES), **LAYOUTS[name]},
        "predicted": int(predicted),
        "compiled": layout_memory.compiled_bytes(compiled),
        "device": str(device.device_kind),
        "versions": {"jax": jax.__version__, "python": sys.version.split()[0]},
    }
    del params, moments  # donated below: the state alone holds them
    for _ in range(3):
        _, *kept = jax.block_until_ready(compiled(*state))
        state = (*kept, tokens)
    return row | {"in_use": (device.memory_stats() or {}).get("peak_bytes_in_use")}


def line(row: dict[str, Any]) -> str:
    """A row as text, in GiB."""
    used = row["in_use"]
    shown = [f"{what} {row[what] / 2**30:.3f}" for what in ("predicted", "compiled")]
    errors = [f"{row['predicted'] / row['compiled'] - 1:+.1%} of compiled"]
    if used:
        shown.append(f"in use {used / 2**30:.3f}")
        errors.append(f"{row['predicted'] / used - 1:+.1%} of use")
    return f"{row['layout']}: {', '.join(shown)} GiB; predicted {', '.join(errors)}"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--limit", type=float, default=200.0, help="seconds that one layout may take")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        print(json.dumps(measure(options.child, options.dry)))
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "gpu_memory.json"
    rows: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
    environment = {**os.environ} | ({"JAX_PLATFORMS": "cpu"} if options.dry else {})
    for name in LAYOUTS:
        if any(row["layout"] == name for row in rows):
            continue
        command = [sys.executable, __file__, "--out", str(options.out), "--child", name]
        command += ["--dry"] if options.dry else []
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=options.limit, env=environment, check=False
        )
        if done.returncode:
            print(f"{name}: exit status {done.returncode}\n{done.stderr[-1500:]}", flush=True)
            continue
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        path.write_text(json.dumps(rows, indent=1) + "\n")
        print(line(rows[-1]), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
