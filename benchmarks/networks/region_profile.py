"""How well a profile of plain XLA's program tells the time of regions (`tune.baseline.xla_profile`), per network.

    python benchmarks/networks/region_profile.py --out results MobileNetV2:64:args GPT_training:8:args   # on a GPU
    python benchmarks/networks/region_profile.py --out dry --dry MobileNetV2:2:args                  # finds typos

Writes ``region_profile_<row>.json``: the kernels' time, the share of it that name scopes attribute to equations, and
the error of times by kind of operation against the attribution itself, over the regions of the most rewritten variant
(sum of absolute differences over the sum of times; a region counts as often as it occurs).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.networks import on_gpu, partition_gpu, roofline  # noqa: E402


def measure(spec: str, dry: bool) -> dict[str, Any]:
    """Profiles the most rewritten variant of one network."""
    import jax

    from jcuts.base import fingerprint
    from jcuts.base.settings import Settings
    from jcuts.jit import race_limits, variant_space
    from jcuts.pipeline import passes
    from jcuts.tune.baseline import xla_profile
    from jcuts.tune.baseline.hlo_attribution import equation_seconds

    fn, args = partition_gpu.workload(spec, dry)
    closed = roofline.traced(fn, args)
    leaves = [leaf for leaf in jax.tree.leaves(args) if hasattr(leaf, "shape")]
    platform = "cpu" if jax.default_backend() == "cpu" else "cuda"
    form = race_limits.most_rewritten(variant_space.candidate_variants(closed, platform))[-1]
    settings = dataclasses.replace(Settings(), form=form)
    start = time.perf_counter()
    planning = passes.start_planning(closed, settings, platform=platform, may_measure=True, examples=leaves)
    state = planning._state
    assert state is not None
    top = state.top
    planned = time.perf_counter()

    seconds, text = xla_profile.instruction_profile(xla_profile.lowered_in_scopes(top.closed, leaves).compile(), leaves)
    done = time.perf_counter()
    times = equation_seconds(text, seconds)
    by_kind = xla_profile.OperationTimes.of(top.closed, times)
    total, error = 0.0, 0.0
    for region in top.subsets:
        direct = math.fsum(times.get(number, 0.0) for number in region.members)
        kind = by_kind.seconds([top.closed.jaxpr.eqns[number] for number in sorted(region.members)]) or 0.0
        total, error = total + direct, error + abs(direct - kind)
    busy = math.fsum(seconds.values())
    return {
        "network": spec,
        "variant": str(form),
        "device": str(jax.devices()[0].device_kind),
        "versions": fingerprint.versions(),
        "kernel_seconds": busy,
        "attributed": math.fsum(times.values()) / busy if busy else None,
        "regions": len(top.subsets),
        "region_seconds": total,
        "error_by_kind": error / total if total else None,
        "spent": {"plan": planned - start, "compile and profile": done - planned},
    }


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("networks", nargs="+", metavar="ROW")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dry", action="store_true", help="small networks on this CPU, where nothing is recorded")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for spec in options.networks:
        row = measure(spec, options.dry)
        (options.out / f"region_profile_{on_gpu.label(spec)}.json").write_text(json.dumps(row, indent=1) + "\n")
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
