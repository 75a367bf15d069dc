"""Peak memory per GPU of a training step on a mesh, compiled ahead of time for a topology of GPUs that is not there.

    python benchmarks/planner/topology_memory.py --out results --gpu h100      # needs JAX's CUDA plug-in
    python benchmarks/planner/topology_memory.py --out dry --dry               # four CPU devices, a small step

Twelve layouts of `gpt_step.py` over four GPUs.  `compiled` is `memory_analysis` of the program that XLA's GPU compiler
makes for a mock topology (PJRT's compile-only devices: ``target_config`` describes one GPU, ``topology`` how many);
`predicted` is `plan.cost.jaxpr_liveness`.  Autotuning is off, as there is no device to time on.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

SIZES: dict[str, Any] = {"layers": 8, "hidden": 1024, "heads": 16, "sequence": 1024, "vocabulary": 32768}
DRY: dict[str, Any] = {"layers": 4, "hidden": 64, "heads": 4, "sequence": 32, "vocabulary": 256}
LAYOUTS: tuple[dict[str, Any], ...] = (
    {"micro": 2, "count": 1},
    {"micro": 4, "count": 1, "data": 4},
    {"micro": 4, "count": 1, "tensor": 4},
    {"micro": 2, "count": 2, "data": 2, "tensor": 2},
    {"micro": 2, "count": 4, "pipeline": 4},
    {"micro": 2, "count": 4, "pipeline": 2, "data": 2, "schedule": "gpipe"},
    {"micro": 4, "count": 1, "data": 2, "remat": False},
    {"micro": 2, "count": 4, "pipeline": 2, "tensor": 2, "schedule": "gpipe"},
    {"micro": 2, "count": 4, "pipeline": 2, "data": 2, "schedule": "gpipe", "remat": False},
    {"micro": 2, "count": 4, "data": 4, "schedule": "gpipe", "remat": False},
    {"micro": 2, "count": 4, "pipeline": 2, "data": 2},
    {"micro": 4, "count": 2, "tensor": 2, "pipeline": 2},
)
"""Those of `tests/plan/cost/test_jaxpr.py`."""
GPUS = 4
TARGETS = {"h100": Path(__file__).with_name("target_config_h100.txt")}
"""XLA's description of a GPU (``GpuTargetConfigProto`` as text)."""
FLAGS = "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"


def devices_of(gpu: str) -> list[Any]:
    """Compile-only devices of a mock topology of four GPUs in one host."""
    from jax.experimental import topologies

    more = {"target_config": TARGETS[gpu].read_text(), "topology": f"1x1x{GPUS}"}
    return list(topologies.get_topology_desc(platform="cuda", topology_name="mock", **more).devices)


def measure(layout: dict[str, Any], sizes: dict[str, Any], devices: Sequence[Any]) -> dict[str, Any]:
    """Predicted and compiled bytes per GPU of one layout."""
    import jax

    from benchmarks.planner import gpt_step as gpt
    from jcuts.plan.cost import jaxpr_liveness

    config = gpt.Config(**sizes, **layout)
    step = gpt.train_step(config, gpt.make_mesh(config, list(devices)))
    params = jax.eval_shape(lambda: gpt.init(config))
    tokens = jax.ShapeDtypeStruct((config.batch, config.sequence + 1), "int32")
    state = (params, (params, params), tokens)
    said = step.lower(*state).compile().memory_analysis()
    compiled = said.argument_size_in_bytes + said.output_size_in_bytes - said.alias_size_in_bytes
    predicted = jaxpr_liveness.footprint(step, *state, donated=(0, 1)).peak
    return {"layout": layout, "compiled": compiled + said.temp_size_in_bytes, "predicted": int(predicted)}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gpu", choices=sorted(TARGETS), default="h100")
    parser.add_argument("--dry", action="store_true")
    options = parser.parse_args(arguments)
    if options.dry:
        os.environ |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count={GPUS}"}
    else:
        os.environ["XLA_FLAGS"] = f"{FLAGS} {os.environ.get('XLA_FLAGS', '')}".strip()
    import jax

    devices = jax.devices() if options.dry else devices_of(options.gpu)
    sizes = DRY if options.dry else SIZES
    options.out.mkdir(parents=True, exist_ok=True)
    found = {"gpu": "cpu" if options.dry else options.gpu, "jax": jax.__version__, "sizes": sizes, "rows": []}
    for layout in LAYOUTS:
        row = measure(layout, sizes, devices)
        found["rows"].append(row)
        (options.out / "topology_memory.json").write_text(json.dumps(found, indent=1) + "\n")
        error = row["predicted"] / row["compiled"] - 1
        print(f"{layout}: {row['compiled'] / 2**20:.1f} MiB compiled, predicted {error:+.1%}", flush=True)
    errors = [abs(row["predicted"] / row["compiled"] - 1) for row in found["rows"]]
    within = sum(e <= 0.03 for e in errors)
    print(f"mean {sum(errors) / len(errors):.1%}, max {max(errors):.1%}, {within} of {len(errors)} within 3%")
    return 0


if __name__ == "__main__":
    sys.exit(main())
