"""Everything that jcuts shows on a GPU, as one command: tests, sanitizer, differential test, faults, pruning, speed.

    python benchmarks/gpu_checks/run_all.py --out results              # about 15 minutes on 16 cores and one GPU
    python benchmarks/gpu_checks/run_all.py --out results --quick      # about 5, smaller counts
    python benchmarks/gpu_checks/run_all.py --out results --only sanitize,faults

Each step is a script of its own, in a process of its own, and writes its JSON under OUT (``--help`` of each says more);
``OUT/gpu_prove.json`` has how each ended and how long it took.  A step that fails does not stop the others.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 1200.0


def steps(out: Path, quick: bool) -> dict[str, list[str]]:
    """Name -> command line after ``python``."""
    here = "benchmarks/"
    return {
        "doctor": ["-m", "jcuts.cli.main", "doctor"],
        "assemble": [f"{here}gpu_checks/assemble.py", "--out", str(out / "assemble"), "--each", "2" if quick else "4"],
        "tests": ["-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "tests/gpu"],
        "sanitize": [f"{here}gpu_checks/sanitizer.py", "--out", str(out), "--each", "2" if quick else "3"],
        "differential": [
            f"{here}differential/gpu.py",
            "--out",
            str(out),
            "--slices",
            "--programs",
            "300" if quick else "1000",
        ],
        "faults": [f"{here}fault_injection/gpu.py", "--out", str(out), "--kills", "6" if quick else "24"],
        "mesh": [f"{here}gpu_checks/multi_gpu.py", "--out", str(out)],
        "pruning": [f"{here}pruning/gpu.py", "--out", str(out / "pruning"), "--candidates", "60" if quick else "510"],
        "speed": [
            f"{here}gpu_kernels/run.py",
            "run",
            "--out",
            str(out / "speed"),
            "--no-tests",
            "--budget",
            "120" if quick else "400",
        ],
    }


def main() -> int:
    """Runs the steps; status 1 if one failed (2 of a step means that it does not apply here)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu_results"))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", default="", help="steps, separated by commas")
    options = parser.parse_args()
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    environment = {
        **os.environ,
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
    }
    ended: dict[str, dict[str, float | int | str]] = {}
    for name, command in steps(out, options.quick).items():
        if options.only and name not in options.only.split(","):
            continue
        start = time.perf_counter()
        with open(out / f"{name}.log", "w") as log:
            try:
                done = subprocess.run(
                    [sys.executable, *command],
                    cwd=ROOT,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    timeout=LIMIT_S,
                    check=False,
                )
                status: int | str = done.returncode
            except subprocess.TimeoutExpired:
                status = "timeout"
        ended[name] = {"status": status, "seconds": round(time.perf_counter() - start, 1), "log": f"{name}.log"}
        print(f"{name:14} status {status}  {ended[name]['seconds']} s", flush=True)
        (out / "gpu_prove.json").write_text(json.dumps(ended, indent=1) + "\n")
    return int(any(row["status"] not in (0, 2) for row in ended.values()))


if __name__ == "__main__":
    raise SystemExit(main())
