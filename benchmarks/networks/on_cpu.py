"""Whole programs on the CPU: plain `jax.jit`, XLA with its best options, jcuts, and the roofline, in one run each.

    python benchmarks/networks/on_cpu.py                      # everything (half an hour on 2 cores)
    python benchmarks/networks/on_cpu.py MobileNetV2:1 gru    # some; NAME[:BATCH][:bfloat16][:args]
    python benchmarks/networks/on_cpu.py --json out.json

Each workload runs in a process of its own, twice: the first fills the tuning database (cold code generation), the
second finds it (warm), and times both sides interleaved.  Weights closed over are compared with weights closed over.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

DEFAULT = [
    "MobileNetV2:1",
    "MobileNetV2:8",
    "MobileNetV2:1:args",
    "MobileNet:1",
    "NASNetMobile:1",
    "ResNet50:1",
    "DenseNet121:1",
    "InceptionV3:1",
    "VGG16:1",
    "MobileNetV2:1:bfloat16",
    "ResNet50:1:bfloat16",
    "encoder",
    "gru",
    "mlp_step",
]
XLA_SWEEP: dict[str, dict[str, Any]] = {
    "default": {},
    "wide vectors": {"xla_cpu_prefer_vector_width": 512},
    "fast math": {"xla_cpu_enable_fast_math": True},
}


def one(spec: str) -> dict[str, Any]:
    """Runs one workload in this process and returns its figures."""
    import jax
    import numpy as np

    import jcuts
    from benchmarks.networks import workloads
    from benchmarks.networks.result_audit import audit
    from jcuts.base import fingerprint
    from jcuts.schedule.cpu.bound import host_arch

    parts = spec.split(":")
    batch = next((int(p) for p in parts[1:] if p.isdigit()), 1)
    dtype = "bfloat16" if "bfloat16" in parts else "float32"
    closed = "args" not in parts
    fn, args = workloads.by_name(parts[0], batch, closed=closed, dtype=dtype)

    def first_call(call: Any) -> float:
        start = time.perf_counter()
        jax.block_until_ready(call(*args))
        return time.perf_counter() - start

    sides: dict[str, Any] = {}
    compile_seconds: dict[str, float] = {}
    for name, options in XLA_SWEEP.items():
        jitted = jax.jit(fn, compiler_options=options) if options else jax.jit(fn)
        try:
            compile_seconds[name] = first_call(jitted)
            sides[name] = jitted
        except Exception as error:  # an option that this jaxlib lacks
            compile_seconds[name] = -1.0
            print(f"  option set {name!r} refused: {error}", file=sys.stderr)
    os.environ.setdefault("JCUTS_FIRST_CALL_SECONDS", "inf")  # the tuned program is timed
    ours = jcuts.optimize(fn)
    compile_seconds["jcuts"] = first_call(ours)
    sides["jcuts"] = ours
    want, got = jax.tree.leaves(jax.jit(fn)(*args)), jax.tree.leaves(ours(*args))
    wide = [(np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in zip(want, got, strict=True)]
    error = max(float(np.max(np.abs(a - b), initial=0)) for a, b in wide)
    largest = max(float(np.max(np.abs(a), initial=0)) for a, _ in wide)

    samples: dict[str, list[float]] = {name: [] for name in sides}
    begin = time.perf_counter()
    rounds = 0
    while rounds < 7 or (time.perf_counter() - begin < 12 and rounds < 100):
        for name, call in sides.items():
            start = time.perf_counter()
            jax.block_until_ready(call(*args))
            samples[name].append(time.perf_counter() - start)
        rounds += 1
    medians = {name: statistics.median(s) for name, s in samples.items()}
    spread = {n: float(np.quantile(s, 0.75) - np.quantile(s, 0.25)) / medians[n] for n, s in samples.items()}
    best = min((n for n in medians if n != "jcuts"), key=lambda n: medians[n])
    faults = audit(ours, fn, args)
    report = ours.explain(*args)
    arch = host_arch()
    lower = sum(s.bound_seconds * s.count for s in report.subsets if s.chosen != "xla")
    decision = ours.decision(*args)
    return {
        "workload": spec,
        "seconds": medians,
        "spread": spread,
        "rounds": rounds,
        "best_xla": best,
        "speedup_plain": medians["default"] / medians["jcuts"],
        "speedup_best": medians[best] / medians["jcuts"],
        "share_flop": report.share("flop"),
        "share_bytes": report.share("bytes"),
        "kernels": report.kernels,
        "bound_seconds": lower,
        "first_call_seconds": compile_seconds,
        "max_abs_error": error,
        "largest": largest,
        "audit": faults,
        "decision": None if decision is None else decision.to_dict(),
        "stages": report.seconds,
        "versions": fingerprint.versions(),
        "cpu": arch.name,
        "cores": arch.cores,
    }


def child(spec: str, cache: str) -> dict[str, Any]:
    """Runs one workload in a fresh process."""
    environment = {"JCUTS_TUNE_SECONDS": "inf", **os.environ, "JCUTS_CACHE_DIR": cache}
    command = [sys.executable, __file__, "--one", spec]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"workload": spec, "failed": done.stderr[-2000:]}
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", default=DEFAULT)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one(options.one)))
        return 0
    rows = []
    for spec in options.workloads:
        with tempfile.TemporaryDirectory(prefix="jcuts-bench-") as cache:
            cold = child(spec, cache)
            warm = child(spec, cache)
        if "failed" in warm or "failed" in cold:
            print(f"{spec}: failed\n{warm.get('failed') or cold.get('failed')}")
            rows.append(warm if "failed" in warm else cold)
            continue
        warm["cold_first_call_seconds"] = cold["first_call_seconds"]["jcuts"]
        warm["warm_extra_seconds"] = warm["first_call_seconds"]["jcuts"] - warm["first_call_seconds"]["default"]
        rows.append(warm)
        print(line(warm), flush=True)
        if options.json:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps({"date": time.strftime("%Y-%m-%d"), "rows": rows}, indent=1) + "\n")
    return 0


def line(row: dict[str, Any]) -> str:
    """One row of the table."""
    ms = {n: 1e3 * s for n, s in row["seconds"].items()}
    return (
        f"{row['workload']:24} jit {ms['default']:8.2f}  best XLA {ms[row['best_xla']]:8.2f} ({row['best_xla']})"
        f"  jcuts {ms['jcuts']:7.2f} ms"
        f"  {row['speedup_plain']:5.2f}x plain {row['speedup_best']:5.2f}x best"
        f"  bound {1e3 * row['bound_seconds']:6.2f}"
        f"  flop {row['share_flop']:4.0%} bytes {row['share_bytes']:4.0%}  spread {row['spread']['jcuts']:.2f}"
        f"  cold {row['cold_first_call_seconds']:5.1f} s warm +{row['warm_extra_seconds']:4.1f} s"
        f"  {(row['decision'] or {}).get('chosen')}"
    )


if __name__ == "__main__":
    sys.exit(main())
