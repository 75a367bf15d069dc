"""Peak memory per GPU of a training step on a mesh, compiled ahead of time for a topology of GPUs that is not there.

    python benchmarks/planner/topology_memory.py --out results --gpu h100 --jobs 12   # needs JAX's CUDA plug-in
    python benchmarks/planner/topology_memory.py --out dry --dry               # four CPU devices, a small step

Twelve layouts of `gpt_step.py` over four GPUs.  `compiled` is `memory_analysis` of the program that XLA's GPU compiler
makes for a mock topology (PJRT's compile-only devices: ``target_config`` describes one GPU, ``topology`` how many);
`predicted` is `plan.cost.program_memory.jaxpr_liveness`.  Autotuning is off, as there is no device to time on.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from itertools import repeat
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

SIZES: dict[str, dict[str, Any]] = {
    "first": {"layers": 8, "hidden": 1024, "heads": 16, "sequence": 1024, "vocabulary": 32768},
    "held-out": {"layers": 8, "hidden": 1536, "heads": 12, "sequence": 512, "vocabulary": 50304},
    "held-out-bfloat16": {
        "layers": 12,
        "hidden": 768,
        "heads": 12,
        "sequence": 1024,
        "vocabulary": 50304,
        "dtype": "bfloat16",
    },
}
"""Sizes of the network; the rules of `jaxpr_liveness` were found on the first alone."""
DRY: dict[str, Any] = {"layers": 4, "hidden": 64, "heads": 4, "sequence": 32, "vocabulary": 256}
GPUS = 4
TARGETS = {"h100": Path(__file__).with_name("target_config_h100.txt")}
"""XLA's description of a GPU (``GpuTargetConfigProto`` as text)."""
FLAGS = "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"


def devices_of(gpu: str) -> list[Any]:
    """Compile-only devices of a mock topology of four GPUs in one host."""
    from jax.experimental import topologies

    more = {"target_config": TARGETS[gpu].read_text(), "topology": f"1x1x{GPUS}"}
    return list(topologies.get_topology_desc(platform="cuda", topology_name="mock", **more).devices)


def measure(index: int, sizes: dict[str, Any], gpu: str | None) -> dict[str, Any]:
    """Predicted and compiled bytes per GPU of one layout; without a GPU's name on CPU devices."""
    from benchmarks.planner import gpt_step as gpt
    from benchmarks.planner import layout_memory

    layout = layout_memory.LAYOUTS[index]
    step, state = layout_memory.traced(gpt.Config(**sizes, **layout), devices_of(gpu) if gpu else None)
    compiled = layout_memory.compiled_bytes(step.lower(*state).compile())
    predicted = layout_memory.predicted(step, state, backend="gpu" if gpu else "cpu")
    return {"layout": layout, "compiled": compiled, "predicted": int(predicted)}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gpu", choices=sorted(TARGETS), default="h100")
    parser.add_argument("--sizes", choices=sorted(SIZES), default="first")
    parser.add_argument("--jobs", type=int, default=1, help="layouts compiled at once, each in a process of its own")
    parser.add_argument("--dry", action="store_true")
    options = parser.parse_args(arguments)
    flags = f"--xla_force_host_platform_device_count={GPUS}" if options.dry else FLAGS
    os.environ["XLA_FLAGS"] = f"{flags} {os.environ.get('XLA_FLAGS', '')}".strip()
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    if options.dry:
        os.environ["JAX_PLATFORMS"] = "cpu"
    from benchmarks.planner.layout_memory import LAYOUTS

    gpu = None if options.dry else options.gpu
    sizes = DRY if options.dry else SIZES[options.sizes]
    options.out.mkdir(parents=True, exist_ok=True)
    name = "topology_memory" if options.sizes == "first" else f"topology_memory_{options.sizes}"
    found: dict[str, Any] = {"gpu": gpu or "cpu", "jax": version("jax"), "sizes": sizes, "rows": []}
    with ProcessPoolExecutor(options.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        for row in pool.map(measure, range(len(LAYOUTS)), repeat(sizes), repeat(gpu)):
            found["rows"].append(row)
            (options.out / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")
            error = row["predicted"] / row["compiled"] - 1
            print(f"{row['layout']}: {row['compiled'] / 2**20:.1f} MiB compiled, predicted {error:+.1%}", flush=True)
    errors = [abs(row["predicted"] / row["compiled"] - 1) for row in found["rows"]]
    within = sum(e <= 0.03 for e in errors)
    print(f"mean {sum(errors) / len(errors):.1%}, max {max(errors):.1%}, {within} of {len(errors)} within 3%")
    return 0


if __name__ == "__main__":
    sys.exit(main())
