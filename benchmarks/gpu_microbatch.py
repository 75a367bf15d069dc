"""Divided convolutions on a GPU: right answers, and AlexNet's conv2 under a workspace limit.

    python benchmarks/gpu_microbatch.py --out results/microbatch                     # everything, within --budget
    python benchmarks/gpu_microbatch.py --out /tmp/x --items validate alexnet --budget 120
    python benchmarks/gpu_microbatch.py --out /tmp/x --dry-run                       # no GPU: the tests' cuDNN

Needs jax[cuda13] and jcuts' native libraries (`make native`).  Times go into ``microbatch.sqlite`` of the cache
directory (``<out>/cache`` unless JCUTS_CACHE_DIR names one): a second run goes on where the first stopped.  Results are
``<out>/microbatch.json``, written after every step.

  validate   every algorithm of the three kernels through XLA, divided unevenly, both layouts, captured into graphs and
             not, against XLA's own convolution; no slice, concatenate or copy in the optimised program
  alexnet    conv2 at batch 256 within 64 MiB, float32 HIGHEST and TF32: whole calls against each other

Networks, DeepBench and whole training steps: `gpu_microbatch_tables.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

MIB = 1 << 20
LIMIT = 64 * MIB
KINDS = ("forward", "backward_data", "backward_filter")
LOOSE = 60.0
"""Factor of the tolerance that admits Winograd's algorithm with 5x5 windows in float32, which XLA itself may choose."""
BETWEEN = (12, 20, 24, 28, 40, 48)
"""Sizes of conv2 that are measured beside powers of two."""
ITEMS = ("validate", "alexnet")


class Run:
    """What the items share: time left, the database, the report."""

    def __init__(self, options: argparse.Namespace) -> None:
        from jcuts.microbatch.database import Database
        from jcuts.tune.convolutions import database_path, this_device

        self.options, self.start = options, time.monotonic()
        self.out: Path = options.out
        self.platform = "cpu" if options.dry_run else "cuda"
        self.database = Database(database_path())
        self.device = this_device(self.platform)
        self.report: dict[str, Any] = {"device": str(self.device), "dry_run": options.dry_run, "items": {}}

    @property
    def left(self) -> float:
        """Seconds until the budget is spent."""
        return self.options.budget - (time.monotonic() - self.start)

    def save(self) -> None:
        """Writes the report as it is."""
        self.report["seconds"] = round(time.monotonic() - self.start, 1)
        partial = self.out / "microbatch.json.new"
        partial.write_text(json.dumps(self.report, indent=1, default=str), encoding="utf-8")
        partial.replace(self.out / "microbatch.json")

    def say(self, text: str) -> None:
        """One line of progress."""
        print(f"[{time.monotonic() - self.start:6.1f} s] {text}", flush=True)


def operations(text: str) -> dict[str, int]:
    """Opcodes of an optimised program that move data, and custom calls."""
    import re

    found = re.findall(r"[)}\]] (slice|concatenate|copy|copy-start|transpose|dynamic-slice|pad|custom-call)\(", text)
    return {name: found.count(name) for name in sorted(set(found))}


def noise(aval: Any, seed: int) -> Any:
    """Normal numbers of a type, on the device."""
    import jax

    return jax.random.normal(jax.random.key(seed), aval.shape, "float32").astype(aval.dtype)


def calls(run: Run, convolution: Any, division: Any, *, graph: bool) -> Callable[[Any, Any], Any]:
    """The divided convolution as a traceable function of its operands."""
    import jax

    from jcuts.xla import cudnn
    from jcuts.xla.convolutions import library_function

    function, avals = library_function(convolution, division.batch)
    result = jax.eval_shape(function, *avals)
    same = tuple(range(len(result.shape)))

    def divided(a: Any, b: Any, *onto: Any) -> Any:
        return cudnn.call(
            convolution, division, (a, b), result, layer=str(convolution), orders=[same] * 3, platform=run.platform,
            graph=graph, onto=onto[0] if onto else None,
        )  # fmt: skip

    return divided


# -- validate -------------------------------------------------------------------------------------------------------
def validate(run: Run) -> dict[str, Any]:
    """Every algorithm of every kernel, divided unevenly: error against XLA's own, and what the program holds."""
    import jax
    import numpy as np

    from jcuts.microbatch.convolution import Convolution
    from jcuts.microbatch.table import Division
    from jcuts.tune.convolutions import Measurer
    from jcuts.xla.convolutions import library_function

    small = run.options.dry_run
    extent, channels, outputs = (8, 4, 6) if small else (28, 32, 48)
    rows, failures, policies = [], [], []
    cases = [
        (kind, layout, dtype, more)
        for kind in KINDS
        for layout, dtype in (("NCHW", "float32"), ("NHWC", "float16"))
        for more in ({}, {"strides": (2, 2)}, {"groups": 2, "dilation": (2, 2)})
    ]
    cases += [(kind, "NHWC", "float32", {}) for kind in KINDS]
    with Measurer(run.device, run.platform, seconds=0.05) as measurer:
        for kind, layout, dtype, more in cases:
            padding = tuple((more.get("dilation", (1, 1))[0],) * 2 for _ in range(2))
            c = Convolution(kind, channels, outputs, (extent,) * 2, (3, 3), padding=padding, dtype=dtype,
                            layout=layout, **more)  # fmt: skip
            by = {n: {(m.algorithm, m.math): m for m in measurer(c, n)} for n in (3, 5)}
            function, avals = library_function(c, 13, jax.lax.Precision.HIGHEST)
            a, b = (noise(aval, seed) for seed, aval in enumerate(avals))
            onto = noise(jax.eval_shape(function, *avals), 2)
            expected = np.asarray(jax.jit(function)(a, b), np.float64)
            for key in sorted(set(by[3]) & set(by[5])):
                division = Division.of([by[5][key], by[5][key], by[3][key]])
                row = {"kernel": kind, "layout": layout, "dtype": dtype, **more, "algorithm": key[0], "math": key[1],
                       "workspace": division.workspace}  # fmt: skip
                # Its own result, captured, and added to what is there (beta = 1).
                for name in ("plain", "graph", "added") if not more else ("plain",):
                    try:
                        options = None if run.platform == "cpu" else {"xla_gpu_graph_min_graph_size": 1}
                        program = jax.jit(calls(run, c, division, graph=name == "graph"), compiler_options=options)
                        operands = (a, b, onto) if name == "added" else (a, b)
                        wanted = expected + np.asarray(onto, np.float64) if name == "added" else expected
                        compiled = program.lower(*operands).compile()
                        found = [np.asarray(compiled(*operands), np.float64) for _ in range(3)]
                        off = max(float(np.linalg.norm(f - wanted) / np.linalg.norm(wanted)) for f in found)
                        row[name] = {"off": off, "operations": operations(compiled.as_text())}
                        if not off < allowed(dtype, key[1]):
                            failures.append({**row, "why": f"off by {off:.2g}"})
                    except Exception as error:
                        failures.append({**row, "as": name, "why": str(error)[:600]})
                rows.append(row)
            if not more:
                policies += by_policy(run, c, measurer, (a, b), expected, failures)
            run.say(f"validate {c} {layout}: {len(set(by[3]) & set(by[5]))} algorithms, {len(failures)} failures")
            if run.left < 0:
                break
        left_out = measurer.left_out
    moved = [row for row in rows if set(row.get("plain", {}).get("operations", {})) - {"custom-call"}]
    return {
        "rows": rows, "policies": policies, "failures": failures, "moving": len(moved), "left_out": left_out[:60]
    }  # fmt: skip


def allowed(dtype: str, math: str) -> float:
    """Distance from XLA's own result with HIGHEST in L2 norm."""
    exact = dtype == "float32" and math == "float32"
    return 1e-3 if exact else 6e-2 if math.startswith("float16") else 2e-2


def by_policy(
    run: Run, c: Any, measurer: Any, operands: tuple[Any, Any], expected: Any, failures: list[Any]
) -> list[Any]:
    """The fastest divisions of 13 samples that the policies allow, within half of what the fastest call takes."""
    import jax
    import numpy as np

    from jcuts.microbatch import wr
    from jcuts.microbatch.table import POLICIES, Table

    table = Table(c, tuple(m for size in range(1, 14) for m in measurer(c, size)), c.unit)
    free = wr.undivided(table, 13)
    rows = []
    for policy in POLICIES:
        division = wr.divide(table, 13, free.workspace // 2 if free else None, policy=policy)
        found = np.asarray(jax.jit(calls(run, c, division, graph=False))(*operands), np.float64)
        off = float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
        rows.append([str(c), c.layout, policy, str(division), off])
        if not off < max(allowed(c.dtype, part.math) for part in division.parts):
            failures.append({"policy": rows[-1], "why": f"off by {off:.2g}"})
    return rows


# -- alexnet --------------------------------------------------------------------------------------------------------
def conv2(run: Run, kind: str = "forward") -> tuple[Any, int]:
    """AlexNet's conv2 (one column, 5x5 from 64 to 192 channels over 27x27) and its batch."""
    from jcuts.microbatch.convolution import Convolution

    if run.options.dry_run:
        return Convolution(kind, 4, 8, (7, 7), (5, 5), padding=((2, 2), (2, 2))), 8
    return Convolution(kind, 64, 192, (27, 27), (5, 5), padding=((2, 2), (2, 2))), 256


def alexnet(run: Run) -> dict[str, Any]:
    """conv2: XLA's own, cuDNN's best single call with and without the limit, and the division, as whole calls."""
    from jcuts.microbatch import wr
    from jcuts.microbatch.database import Database
    from jcuts.microbatch.desirable import desirable_or_none
    from jcuts.tune.convolutions import Measurer, measured

    found: dict[str, Any] = {}
    cases = [(kind, 1.0) for kind in run.options.kinds] + [(kind, LOOSE) for kind in run.options.kinds]
    for kind, tolerance in cases:
        c, batch = conv2(run, kind)
        with Measurer(run.device, run.platform, seconds=0.4, tolerance=tolerance) as measurer:
            database = run.database if tolerance == 1 else Database(None)
            for size in BETWEEN if batch == 256 else ():
                measured(c, size, database, measurer, policy="undivided", library=False)
            table = measured(c, batch, database, measurer, library=False)
        name = kind if tolerance == 1 else f"{kind}, transforms admitted,"
        for precision in ("float32", "tf32") if tolerance == 1 else ("float32",):
            ours = only_cudnn(table)
            entry: dict[str, Any] = {"batch": batch, "limit": limit_of(run)}
            chosen = {
                "unlimited": wr.undivided(ours, batch, precision=precision),
                "undivided": wr.undivided(ours, batch, limit_of(run), precision=precision),
                "divided": divide_or_none(ours, batch, limit_of(run), precision),
            }
            entry.update({name: description(d) for name, d in chosen.items()})
            front = desirable_or_none(ours, batch, limit_of(run), precision=precision)
            entry["front"] = [description(d) for d in front]
            entry["whole calls"] = whole_calls(run, c, batch, chosen, precision)
            found[f"{name} {precision}"] = entry
            run.say(f"alexnet conv2 {name} {precision}: {entry['divided']} {entry['whole calls']}")
            run.report["items"]["alexnet"] = found
            run.save()
    return found


def whole_calls(run: Run, c: Any, batch: int, chosen: dict[str, Any], precision: str) -> dict[str, Any]:
    """Interleaved times of whole XLA programs [s], their memory, and their distance from each other."""
    import jax
    import numpy as np

    from jcuts.tune import gpu_timing
    from jcuts.xla.convolutions import library_function

    exact = jax.lax.Precision.HIGHEST if precision == "float32" else jax.lax.Precision.DEFAULT
    library, avals = library_function(c, batch, exact)
    functions = {"xla": library}
    for name, division in chosen.items():
        if division is not None:
            functions[name] = calls(run, c, division, graph=run.options.graph)
    inputs = [np.asarray(noise(aval, seed)) for seed, aval in enumerate(avals)]
    answer: dict[str, Any] = {}
    expected = None
    for name, function in functions.items():
        compiled = jax.jit(function).lower(*inputs).compile()
        result = np.asarray(compiled(*inputs), np.float64)
        expected = result if expected is None else expected
        analysis = compiled.memory_analysis()
        answer[name] = {
            "off": float(np.linalg.norm(result - expected) / np.linalg.norm(expected)),
            "temporary bytes": int(analysis.temp_size_in_bytes) if analysis is not None else None,
            "operations": operations(compiled.as_text()),
        }
    if run.platform == "cuda":
        entries = {name: (function, {}) for name, function in functions.items()}
        _, samples, _ = gpu_timing.compare(entries, inputs, seconds=1.0, announce=lambda _: None)
        for name, one in samples.items():
            answer[name]["seconds"] = one.median
    return answer


# -- what they share ------------------------------------------------------------------------------------------------
def limit_of(run: Run) -> int:
    """Bytes of workspace per convolution."""
    return 64 << 10 if run.options.dry_run else LIMIT


def only_cudnn(table: Any) -> Any:
    """Without XLA's own."""
    from jcuts.microbatch.table import Table
    from jcuts.xla import cudnn

    return Table(table.convolution, tuple(m for m in table.micros if cudnn.is_cudnn(m.algorithm)))


def divide_or_none(table: Any, batch: int, limit: int | None, precision: str) -> Any:
    """The fastest division, None where nothing fits."""
    from jcuts.microbatch import wr
    from jcuts.microbatch.errors import NoDivisionError

    try:
        return wr.divide(table, batch, limit, precision=precision)
    except NoDivisionError:
        return None


def description(division: Any) -> dict[str, Any] | None:
    """A division as JSON."""
    if division is None:
        return None
    return {"division": str(division), "seconds": division.seconds, "workspace": division.workspace}


def prepare(out: Path, dry_run: bool) -> None:
    """Settles the environment of a run, before JAX is imported; a dry one computes by the tests' cuDNN on the CPU."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the measuring process needs room
    os.environ.setdefault("JCUTS_CACHE_DIR", str((out / "cache").resolve()))
    if not dry_run:
        return
    fake = (out / "libhost_cudnn.so").resolve()
    compiler = os.environ.get("CXX") or shutil.which("g++") or "c++"
    source = str(ROOT / "tests" / "xla" / "fake_cudnn.cc")
    subprocess.run([compiler, "-std=c++17", "-O2", "-shared", "-fPIC", source, "-o", str(fake)], check=True)
    os.environ.update(JCUTS_CUDNN=str(fake), JAX_PLATFORMS="cpu")


def main() -> int:
    """Runs the items that were asked for, in order, and writes the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--items", nargs="+", choices=ITEMS, default=list(ITEMS))
    parser.add_argument("--budget", type=float, default=480.0, help="seconds in all; what is left undone is said")
    parser.add_argument("--graph", action="store_true", help="let XLA capture the calls into CUDA graphs")
    parser.add_argument("--dry-run", action="store_true", help="no GPU: the tests' cuDNN, tiny shapes")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS, help="of AlexNet's conv2")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    prepare(options.out, options.dry_run)
    run = Run(options)
    run.say(f"{run.device}")
    work = {"validate": validate, "alexnet": alexnet}
    failed = False
    for item in options.items:
        if run.left < 10:
            run.report["items"].setdefault(item, {"skipped": "the budget was spent"})
            continue
        try:
            run.report["items"][item] = work[item](run)
            failed |= bool(run.report["items"][item].get("failures"))
        except Exception as error:  # the other items are still worth having
            failed = True
            run.report["items"].setdefault(item, {})["error"] = traceback.format_exc()
            run.say(f"{item} failed: {error}")
        run.save()
    run.say(f"written {run.out / 'microbatch.json'}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
