"""CI without a GPU: every template and schedule assembles for every architecture, without spills.

    python benchmarks/gpu_checks/assemble.py --out results --each 4            # about a minute on 16 cores
    python benchmarks/gpu_checks/assemble.py --out results --each 1 --only float32

Cases are those of ``tests/gpu/cases.py``; ``--each`` schedules of each, from the best to the last.  A schedule whose
kernel would use local memory is refused by the compiler, so none is ever run: such refusals are listed by case.  A case
of which no schedule is left is a failure.  The golden sources are compared as ``tests/codegen/cuda/test_cuda.py`` does.
``OUT/gpu_assemble.json`` has the counts.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ["JAX_PLATFORMS"] = "cpu"


def assembled(out: Path, capability: tuple[int, int], each: int, jobs: int, only: str) -> dict[str, Any]:
    """Counts for one architecture."""
    from benchmarks.gpu_checks.sanitizer import prepare
    from jcuts.codegen.cuda.toolchain.image import Image
    from jcuts.tune.kernel_file import read_kernel

    folder = out / f"sm_{capability[0]}{capability[1]}"
    folder.mkdir(parents=True, exist_ok=True)
    found = prepare(folder, each, jobs, capability, only)
    entries = json.loads((folder / "list.json").read_text())["entries"]
    by_case = [(e["case"], Image.unpack(read_kernel(Path(e["kernel"])).object_code).launches) for e in entries]
    launches = [x for _, several in by_case for x in several]
    # float64 sin, cos and tan: their library code keeps a table on the stack, nothing is spilled.
    stacks = sorted({case for case, several in by_case if any(x.resources.stack for x in several)})
    lost = {r["case"] for r in found["refused"]} - {e["case"] for e in entries}
    return {
        "cases": found["cases"],
        "schedules": found["kernels"],
        "kernels": len(launches),
        "by_template": dict(Counter(f"{e['template']}/{e['params']['cuda']}" for e in entries)),
        "refused_for_local_memory": sorted(r["case"] for r in found["refused"] if r["stack"]),
        "refused_for_other_reasons": [[r["case"], r["reason"]] for r in found["refused"] if not r["stack"]],
        "cases_without_a_kernel": sorted(lost),
        "without_form": found["skipped"],
        "kernels_with_a_stack": stacks,
        "most_registers": max((x.resources.registers for x in launches), default=0),
        "most_shared": max((x.resources.shared for x in launches), default=0),
        "seconds": found["compile_seconds"],
    }


def golden() -> dict[str, Any]:
    """The golden source tests: how many passed."""
    tests = ["tests/codegen/cuda/test_cuda.py", "-k", "golden"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    passed = re.search(r"(\d+) passed", done.stdout)
    return {"passed": int(passed[1]) if passed else 0, "status": done.returncode, "tail": done.stdout[-300:]}


def main() -> int:
    """The command line; status 1 where something does not assemble, spills, or differs from its golden source."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu_results"))
    parser.add_argument("--each", type=int, default=4)
    parser.add_argument("--jobs", type=int, default=0)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--no-golden", action="store_true", help="for runs in which all tests run as well")
    parser.add_argument("--capabilities", nargs="*", default=["8.0", "9.0"])
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("JCUTS_CACHE_DIR", str((options.out / "cache").resolve()))
    from jcuts.base.fingerprint import versions
    from jcuts.codegen.cuda import compile as compiler

    why = compiler.available()
    if why:
        print(why)
        return 2
    start = time.perf_counter()
    rows = {}
    for text in options.capabilities:
        major, minor = (int(x) for x in text.split("."))
        rows[f"sm_{major}{minor}"] = assembled(options.out, (major, minor), options.each, options.jobs, options.only)
    found = {
        "architectures": rows,
        "golden": {"passed": 0, "status": 0, "tail": ""} if options.no_golden else golden(),
        "toolkit": compiler.ptxas.toolkit(),
        "versions": versions(),
        "seconds": round(time.perf_counter() - start, 1),
    }
    (options.out / "gpu_assemble.json").write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))
    bad = any(r["cases_without_a_kernel"] or r["refused_for_other_reasons"] for r in rows.values())
    return int(bad or bool(found["golden"]["status"]))


if __name__ == "__main__":
    raise SystemExit(main())
