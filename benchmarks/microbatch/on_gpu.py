"""Divided convolutions on a GPU: right answers, and AlexNet's conv2 under a workspace limit.

    python benchmarks/microbatch/on_gpu.py --out results/microbatch                     # everything, within --budget
    python benchmarks/microbatch/on_gpu.py --out /tmp/x --items validate alexnet --budget 120
    python benchmarks/microbatch/on_gpu.py --out /tmp/x --dry-run                       # no GPU: the tests' cuDNN

Needs jax[cuda13] and jcuts' native libraries (`make native`).  Times go into ``microbatch.sqlite`` of the cache
directory (``<out>/cache`` unless JCUTS_CACHE_DIR names one): a second run goes on where the first stopped.  Results are
``<out>/microbatch.json``, written after every step.

  validate   every algorithm of the three kernels through XLA, divided unevenly, in slices of the outputs where it is a
             transform, both layouts, captured into graphs and not, added to what is there (beta = 1), and what the
             three policies choose, against XLA's own convolution; no slice, concatenate or copy in the program
  alexnet    conv2 at batch 256 within 64 MiB: float32 HIGHEST by exact algorithms and by any of cuDNN's, TF32, half:
             whole calls against each other and against float64

Networks, DeepBench and whole training steps: `gpu_tables.py`.
"""

from __future__ import annotations

import argparse
import dataclasses
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

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from benchmarks.microbatch.conv_chains import whole  # noqa: E402

MIB = 1 << 20
LIMIT = 64 * MIB
NO_LIMIT = 1 << 45
KINDS = ("forward", "backward_data", "backward_filter")
WAYS = ("plain", "graph", "added")
ITEMS = ("validate", "alexnet")


class Run:
    """What the items share: time left, the database, the report."""

    def __init__(self, options: argparse.Namespace) -> None:
        from jcuts.microbatch.database import Database
        from jcuts.tune.cudnn.measurer import database_path, this_device

        self.options, self.start = options, time.monotonic()
        self.out: Path = options.out
        self.platform = "cpu" if options.dry_run else "cuda"
        self.database = Database(database_path())
        self.device = this_device(self.platform)
        self.left_out: list[Any] = []
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

    from jcuts.xla.cudnn import call as cudnn_call
    from jcuts.xla.cudnn.match import library_function

    function, avals = library_function(convolution, division.batch)
    result = jax.eval_shape(function, *avals)
    same = tuple(range(len(result.shape)))

    def divided(a: Any, b: Any, *onto: Any) -> Any:
        return cudnn_call.call(
            convolution,
            division,
            (a, b),
            result,
            layer=str(convolution),
            orders=[same] * 3,
            platform=run.platform,
            graph=graph,
            onto=onto[0] if onto else None,
        )

    return divided


# -- validate -------------------------------------------------------------------------------------------------------
def validate(run: Run) -> dict[str, Any]:
    """Every algorithm of every kernel, divided unevenly: error against XLA's own, and what the program holds."""
    import jax
    import numpy as np

    from jcuts.microbatch.convolution import Convolution
    from jcuts.microbatch.timings import Division
    from jcuts.tune.cudnn.measurer import Measurer
    from jcuts.xla.cudnn.match import library_function

    small = run.options.dry_run
    extent, channels, outputs = (8, 4, 16) if small else (28, 32, 48)
    rows, failures, policies = [], [], []
    cases = [
        (kind, layout, dtype, more)
        for kind in KINDS
        for layout, dtype in (("NCHW", "float32"), ("NHWC", "float16"))
        for more in ({}, {"strides": (2, 2)}, {"groups": 2, "dilation": (2, 2)})
    ]
    cases += [(kind, "NHWC", "float32", {}) for kind in KINDS]
    cases = [case for case in cases if run.options.ways or not case[-1]]
    with Measurer(run.device, run.platform, seconds=0.05) as measurer:
        for kind, layout, dtype, more in cases:
            padding = tuple((more.get("dilation", (1, 1))[0],) * 2 for _ in range(2))
            c = Convolution(
                kind, channels, outputs, (extent,) * 2, (3, 3), padding=padding, dtype=dtype, layout=layout, **more
            )
            by = {n: {(m.algorithm, m.math): m for m in [*measurer(c, n), *in_slices(measurer, c, n)]} for n in (3, 5)}
            function, avals = library_function(c, 13, jax.lax.Precision.HIGHEST)
            a, b = (noise(aval, seed) for seed, aval in enumerate(avals))
            onto = noise(jax.eval_shape(function, *avals), 2)
            expected = np.asarray(jax.jit(function)(a, b), np.float64)
            for key in sorted(set(by[3]) & set(by[5])):
                division = Division.of([by[5][key], by[5][key], by[3][key]])
                row = {
                    "kernel": kind,
                    "layout": layout,
                    "dtype": dtype,
                    **more,
                    "algorithm": key[0],
                    "math": key[1],
                    "workspace": division.workspace,
                }
                # Its own result, captured, and added to what is there (beta = 1).
                for name in run.options.ways if not more else [way for way in run.options.ways if way != "graph"]:
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
    return {"rows": rows, "policies": policies, "failures": failures, "moving": len(moved), "left_out": left_out[:60]}


def in_slices(measurer: Any, c: Any, batch: int) -> Any:
    """Transforms in slices of the outputs' channels, where those can be cut."""
    from jcuts.microbatch.convolution import MATHS
    from jcuts.microbatch.sampling_plan import Slicing
    from jcuts.microbatch.timings import MicroConfig
    from jcuts.xla.cudnn import call as cudnn_call

    names = cudnn_call.transforms(c.kind) if c.slices else ()
    wanted = [
        Slicing(MicroConfig(batch, name, math, 1.0, 0), c.slices[:1], NO_LIMIT)
        for name in names
        for math in MATHS[c.dtype]
    ]
    return measurer.slices(c, batch, wanted) if wanted else ()


def allowed(dtype: str, math: str) -> float:
    """Distance from XLA's own result with HIGHEST in L2 norm."""
    exact = dtype == "float32" and math == "float32"
    return 1e-3 if exact else 6e-2 if math.startswith("float16") else 2e-2


def by_policy(
    run: Run, c: Any, measurer: Any, operands: tuple[Any, Any], expected: Any, failures: list[Any]
) -> list[Any]:
    """The fastest divisions of 13 samples that the policies allow; but for ``undivided`` in more than one piece."""
    import jax
    import numpy as np

    from jcuts.microbatch import batch_division_dp
    from jcuts.microbatch.timings import POLICIES, Table

    table = Table(c, tuple(m for size in (1, 2, 3, 4, 5, 7, 8, 13) for m in measurer(c, size)), c.unit)
    rows = []
    for policy in POLICIES:
        sizes = [m for m in table.micros if policy == "undivided" or m.batch < 13]
        division = batch_division_dp.divide(dataclasses.replace(table, micros=tuple(sizes)), 13, policy=policy)
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
        return Convolution(kind, 4, 16, (7, 7), (5, 5), padding=((2, 2), (2, 2))), 8
    return Convolution(kind, 64, 192, (27, 27), (5, 5), padding=((2, 2), (2, 2))), 256


MODES = {
    "float32 HIGHEST, exact": ("float32", "exact", "float32"),
    "float32 HIGHEST, any algorithm of cuDNN": ("float32", "vendor", "float32"),
    "TF32": ("float32", "exact", "tf32"),
    "half, sums in float32": ("float16", "exact", "float32"),
}
"""Storage, accuracy, least precision."""


def alexnet(run: Run) -> dict[str, Any]:
    """conv2: XLA's own, cuDNN's best single call with and without the limit, and divisions, as whole calls."""
    from jcuts.microbatch import batch_division_dp
    from jcuts.microbatch.database import Database
    from jcuts.microbatch.pareto import desirable_or_none
    from jcuts.tune.cudnn.measurer import this_device

    found: dict[str, Any] = {}
    cases = [(kind, mode) for kind in run.options.kinds for mode in run.options.modes or MODES]
    for kind, mode in cases:
        if run.left < 8:
            found["stopped"] = f"{kind} {mode}: the budget was spent"
            break
        dtype, accuracy, precision = MODES[mode]
        c, batch = conv2(run, kind)
        c, limit = dataclasses.replace(c, dtype=dtype), limit_of(run)
        device = this_device(run.platform, accuracy=accuracy)
        ours = tables_of_conv2(run, c, batch, accuracy, device, Database(run.database.path))
        chosen = {
            "unlimited": batch_division_dp.undivided(ours, batch, precision=precision),
            "undivided": batch_division_dp.undivided(ours, batch, limit, precision=precision),
            "pieces of the batch": divide_or_none(whole(ours), batch, limit, precision),
            "divided": divide_or_none(ours, batch, limit, precision),
        }
        entry: dict[str, Any] = {"batch": batch, "limit": limit}
        entry.update({name: description(d) for name, d in chosen.items()})
        front = desirable_or_none(ours, batch, limit, precision=precision)
        entry["front"] = [description(d) for d in front]
        entry["whole calls"] = whole_calls(run, c, batch, chosen, precision)
        found[f"{kind} {mode}"] = entry
        run.say(f"alexnet conv2 {kind} {mode}: {entry['divided']} {entry['whole calls']}")
        run.report["items"]["alexnet"] = found
        run.save()
    return found


def tables_of_conv2(run: Run, c: Any, batch: int, accuracy: str, device: Any, database: Any) -> Any:
    """Times of cuDNN's algorithms from the whole batch down to what fits, between, and in slices of the outputs."""
    from jcuts.microbatch.sampling_plan import sizes_between
    from jcuts.tune.cudnn.measurer import Measurer, measured, measured_in_slices

    precisions = ("float32", "tf32") if c.dtype == "float32" else ("float32",)
    with Measurer(device, run.platform, seconds=run.options.seconds, accuracy=accuracy) as measurer:
        size = batch
        while size >= max(1, batch // 32):
            table = measured(c, size, database, measurer, policy="undivided", library=False)
            size //= 2
        for precision in precisions:
            for size in sizes_between(table, batch, limit_of(run), precision=precision):
                table = measured(c, size, database, measurer, policy="undivided", library=False)
        table = measured_in_slices(c, batch, (limit_of(run),), precisions, database, measurer)
        run.left_out += measurer.left_out
    return only_cudnn(table)


def whole_calls(run: Run, c: Any, batch: int, chosen: dict[str, Any], precision: str) -> dict[str, Any]:
    """Interleaved times of whole XLA programs [s], their memory, and their distance from float64."""
    import jax
    import numpy as np

    from jcuts.tune.measure import gpu_timing
    from jcuts.xla.cudnn.match import library_function

    exact = jax.lax.Precision.HIGHEST if precision == "float32" else jax.lax.Precision.DEFAULT
    library, avals = library_function(c, batch, exact if c.dtype == "float32" else None)
    functions = {"xla": library}
    for name, division in chosen.items():
        if division is not None and division not in [d for n, d in chosen.items() if n in functions]:
            functions[name] = calls(run, c, division, graph=not run.options.launched)
    inputs = [np.asarray(noise(aval, seed)) for seed, aval in enumerate(avals)]
    with jax.enable_x64(True):
        reference, _ = library_function(dataclasses.replace(c, dtype="float64"), batch)
        expected = np.asarray(jax.jit(reference)(*[x.astype(np.float64) for x in inputs]))
    answer: dict[str, Any] = {}
    for name, function in functions.items():
        compiled = jax.jit(function).lower(*inputs).compile()
        result = np.asarray(compiled(*inputs), np.float64)
        analysis = compiled.memory_analysis()
        answer[name] = {
            "off": float(np.linalg.norm(result - expected) / np.linalg.norm(expected)),
            "temporary bytes": int(analysis.temp_size_in_bytes) if analysis is not None else None,
            "operations": operations(compiled.as_text()),
        }
    if run.platform == "cuda":
        entries = {name: (function, {}) for name, function in functions.items()}
        _, samples, _ = gpu_timing.compare(entries, inputs, seconds=0.6, announce=lambda _: None)
        for name, one in samples.items():
            answer[name]["seconds"] = one.median
    return answer


# -- what they share ------------------------------------------------------------------------------------------------
def limit_of(run: Run) -> int:
    """Bytes of workspace per convolution."""
    return 64 << 10 if run.options.dry_run else LIMIT


def only_cudnn(table: Any) -> Any:
    """Without XLA's own."""
    from jcuts.microbatch.timings import Table
    from jcuts.xla.cudnn import call as cudnn_call

    return Table(table.convolution, tuple(m for m in table.micros if cudnn_call.is_cudnn(m.algorithm)))


def divide_or_none(table: Any, batch: int, limit: int | None, precision: str) -> Any:
    """The fastest division, None where nothing fits."""
    from jcuts.microbatch import batch_division_dp
    from jcuts.microbatch.errors import NoDivisionError

    try:
        return batch_division_dp.divide(table, batch, limit, precision=precision)
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
    parser.add_argument("--launched", action="store_true", help="of AlexNet's conv2: no CUDA graphs")
    parser.add_argument("--modes", nargs="+", choices=list(MODES), help="of AlexNet's conv2")
    parser.add_argument(
        "--ways",
        nargs="*",
        choices=WAYS,
        default=list(WAYS),
        help="of validate: how results are made; none: the policies only",
    )
    parser.add_argument("--seconds", type=float, default=0.15, help="of timing per convolution and batch size")
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
            run.report["left_out"] = run.left_out[:200]
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
