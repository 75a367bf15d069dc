"""Whole networks on one GPU: plain `jax.jit`, XLA with its best options, jcuts, and torch.compile, in one run each.

    python benchmarks/networks/on_gpu.py --out results MobileNetV2:1:closed MobileNetV2:64:args
    python benchmarks/networks/on_gpu.py --out results  # everything; what is in results already is skipped
    python benchmarks/networks/on_gpu.py --out results --gpus 4  # on four equal GPUs side by side
    python benchmarks/networks/on_gpu.py --out results --table  # the table of what is there
    python benchmarks/networks/on_gpu.py --out dry --dry MobileNetV2:2:closed  # small networks on this CPU: finds typos

Every network runs in a process of its own, with its weights as arguments or closed over; all programs take turns.
`step` waits for every call, `stream` only for the last of many.  Errors are against float64, in the first rows
of the batch.
With `--proof` a second process, which finds the tuning database, shows what a warm start costs and what the CUDA
graphs hold.  The tuning database stays in the output folder: a run that was cut goes on there.
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.networks import device_profile, roofline  # noqa: E402
from benchmarks.networks.interleaved_timing import timed  # noqa: E402
from benchmarks.networks.workload_row import FORMS, Row  # noqa: E402

NETWORKS = ("MobileNetV2", "ResNet50", "DenseNet121", "InceptionV3", "bert")
DEFAULT = [
    f"{name}:{batch}:{form}" for name in NETWORKS for batch in ((1, 8) if name == "bert" else (1, 64)) for form in FORMS
]
DRY: dict[str, Any] = {
    "size": 96,
    "bert": {"layers": 2, "width": 64, "heads": 4, "length": 32, "vocabulary": 100},
    "octave": {"size": 8, "channels": 16},
    "shift_conv": {"size": 6, "channels": 36, "expansion": 1},
}
"""Smaller sizes for a run that only finds typos: of images, and of the programs that are no keras network."""
EXACT = 4
"""Rows of the batch whose float64 results are computed."""


def workload(spec: str, dry: bool) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Function and arguments of ``NAME:BATCH:FORM`` or ``NAME:BATCH:FORM:DTYPE``."""
    from benchmarks.networks import workloads

    row = Row.parse(spec)
    closed = row.form == "closed"
    if row.name in DRY and row.name != "size":
        more = {} if row.name == "bert" else {"dtype": row.dtype}
        return getattr(workloads, row.name)(row.batch, closed=closed, **more, **(DRY[row.name] if dry else {}))
    return workloads.network(row.name, row.batch, closed=closed, dtype=row.dtype, size=DRY["size"] if dry else None)


def named(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The function under a name that the compiler's dumps show."""

    def call(*args: Any) -> Any:
        return function(*args)

    call.__name__ = call.__qualname__ = name
    return call


# -- one network ----------------------------------------------------------------------------------------------------
def measure(
    spec: str, out: Path, dry: bool, seconds: float, prefix: str = "", only: Sequence[str] = ()
) -> dict[str, Any]:
    """Tunes and times one network in one calling form; what is known so far is written as it comes.

    Args: prefix: of the files' names; only: names of the forms that compete, instead of all that are worth it.
    """
    import jax

    import jcuts
    from jcuts.base import fingerprint
    from jcuts.jit import variant_space
    from jcuts.tune import session

    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s: %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("jcuts").setLevel(logging.INFO)  # what each stage of tuning took
    platform = pretend(dry)
    if only:
        chosen = [variant_space.form_of(f"jcuts/{name}") for name in only]
        variant_space.candidate_variants = lambda closed, platform: chosen
    option = next(iter(variant_space.options(platform)), "")
    fn, args = workload(spec, dry)
    jax.block_until_ready(args)
    row: dict[str, Any] = {
        "network": spec,
        "flags": variant_space.compiler_options(f"xla:{option}", platform) or {},
        "device": str(jax.devices()[0].device_kind),
        "versions": fingerprint.versions(),
    }
    note(f"{spec}: begins")
    session.set_progress(Stages())
    ours = jcuts.optimize(named(fn, "ours"))
    start = time.perf_counter()
    jax.block_until_ready(ours(*args))
    row["first_call_seconds"] = time.perf_counter() - start
    decision, report = ours.decision(*args), ours.explain(*args)
    assert decision is not None  # it has just been called
    row |= {
        "decision": decision.to_dict(),
        "kernels": report.kernels,
        "stages": report.seconds,
        "notes": list(report.notes),
        "subsets": [subset_row(s) for s in report.subsets],
    }
    (out / f"{prefix}{label(spec)}.txt").write_text(str(report))
    note(f"{spec}: first call {row['first_call_seconds']:.1f} s; {decision.chosen}: {decision.reason}")
    save(out, row, prefix)
    competing = ours.programs(*args)
    # The guard's own programs where they are at hand: compiled already, and the very ones that it chose between.
    sides = {
        "jcuts": ours,
        "plain": competing.get("xla") or jax.jit(fn),
        "flags": competing.get(f"xla:{option}") or jax.jit(fn, compiler_options=row["flags"] or None),
    }
    calls = {side: functools.partial(call, *args) for side, call in sides.items()}
    row["times"] = timed(calls, seconds)
    save(out, row, prefix)
    closed = roofline.traced(fn, args)
    row["counts"] = roofline.summary(closed, row["device"])
    row["shares"] = roofline.shares_of(ours, args, closed, platform)
    want, against = reference(spec, fn, args, dry)
    row["errors"] = {name: error_of(first_rows(call(), want), want) for name, call in calls.items()}
    row["errors_against"] = against
    row["launches"] = device_profile.launches(calls["jcuts"])
    row["device_kernels"] = {}
    for name in ("flags", "jcuts"):
        try:
            row["device_kernels"][name] = device_profile.profiled(calls[name], out / f"profile_{label(spec)}")
        except Exception as error:
            note(f"no profile of {name}: {type(error).__name__}: {error}")
    return row | {"finished": True}


def reference(spec: str, fn: Callable[..., Any], args: tuple[Any, ...], dry: bool) -> tuple[list[Any], str]:
    """Exact results of the first rows of the batch (rows do not depend on each other), and how they were computed.

    In float64, every number widened; where that cannot be had, XLA at the highest precision.
    """
    import jax

    from jcuts.jit import variant_space

    name, batch, *rest = spec.split(":")
    few = ":".join((name, str(min(batch_of(spec), EXACT)), *rest))
    small, inputs = (fn, args) if str(batch) == few.split(":")[1] else workload(few, dry)
    judge = variant_space.Float64Judge(
        roofline.traced(small, inputs), jax.tree.leaves(inputs), 2.0, jax.default_backend()
    )
    found = judge.reference()
    if found is not None:
        return found, f"float64, {few}"
    with jax.default_matmul_precision("highest"):
        exact = jax.jit(named(small, "highest"), compiler_options=None if dry else variant_space.NO_AUTOTUNE)
        return jax.tree.leaves(exact(*inputs)), f"highest precision, {few}"


def batch_of(spec: str) -> int:
    """The batch of a workload's name."""
    return Row.parse(spec).batch


def first_rows(results: Any, like: Sequence[Any]) -> list[Any]:
    """The rows of results that a reference of a smaller batch has."""
    import jax

    return [x[: len(y)] for x, y in zip(jax.tree.leaves(results), like, strict=True)]


def save(out: Path, row: dict[str, Any], prefix: str = "") -> None:
    """Writes what is known."""
    path = out / f"{prefix}{label(row['network'])}.json"
    old = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**old, **row}, indent=1) + "\n")


class Stages:
    """Notes when tuning goes from one stage to the next, and every 20 steps of it."""

    def __init__(self) -> None:
        self.last = ("", -1)

    def update(self, stage: str, done: int, total: int, name: str) -> None:
        """What a session tells (`tune.runner.Progress`)."""
        now = (stage, done // 20)
        if now != self.last:
            note(f"  {stage} {done}/{total} {name}")
            self.last = now


def pretend(dry: bool) -> str:
    """The platform; on a dry run the CPU takes the GPU's part where whole programs compete."""
    import jax

    from jcuts.jit import variant_space

    if dry:
        variant_space.GPUS = ("cpu",)
    return jax.default_backend()


def subset_row(s: Any) -> dict[str, Any]:
    """What is kept of a subset."""
    return {
        "operations": s.operations,
        "count": s.count,
        "chosen": s.chosen,
        "seconds": s.seconds,
        "xla_seconds": s.xla_seconds,
        "bytes": s.bytes,
        "params": s.params,
        "why": s.why,
    }


def error_of(results: Sequence[Any], reference: Sequence[Any]) -> dict[str, float]:
    """Error in L2 norm relative to the reference's, and the largest over its root mean square."""
    import numpy as np

    worst = {"l2": 0.0, "max": 0.0}
    for got, want in zip(results, reference, strict=True):
        a, b = np.asarray(got).astype(np.float64), np.asarray(want).astype(np.float64)
        size = float(np.linalg.norm(b)) or 1.0
        worst["l2"] = max(worst["l2"], float(np.linalg.norm(a - b)) / size)
        worst["max"] = max(worst["max"], float(np.abs(a - b).max(initial=0.0)) / (size / b.size**0.5))
    return worst


# -- the second process: warm start and the contents of the graphs --------------------------------------------------
def prove(spec: str, out: Path, dry: bool) -> dict[str, Any]:
    """Starts warm with the compiler's dump on, and reads from it which thunks are inside command buffers."""
    folder = out / f"dump_{label(spec)}"
    os.environ["XLA_FLAGS"] = (
        f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={folder} --xla_dump_hlo_as_text "
        "--xla_dump_hlo_module_re=.*ours.*"
    )
    import jax

    import jcuts

    pretend(dry)
    fn, args = workload(spec, dry)
    jax.block_until_ready(args)
    ours = jcuts.optimize(named(fn, "ours"))
    start = time.perf_counter()
    jax.block_until_ready(ours(*args))
    spent = time.perf_counter() - start
    decision = ours.decision(*args)
    hlo = device_profile.hlo_counts(ours.chosen(*args).compile().as_text())
    found = {
        "warm_first_call_seconds": spent,
        "hlo": hlo,
        "chosen": decision and decision.chosen,
        **device_profile.launches(lambda: ours(*args)),
        "thunks": device_profile.thunks(folder),
    }
    note(f"{spec}: warm start {spent:.1f} s, {found['thunks']}")
    keep = [p for p in folder.rglob("*") if "thunk" in p.name]
    for path in folder.rglob("*"):
        if path.is_file() and (path not in keep or path.stat().st_size > 2 << 20):
            path.unlink()
    return found


# -- the command ----------------------------------------------------------------------------------------------------
def note(text: str) -> None:
    """Progress, on stderr."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def label(spec: str) -> str:
    """File name of a network."""
    return spec.replace(":", "_b")


def lane_of(number: int, options: argparse.Namespace) -> tuple[dict[str, str], list[str]]:
    """Environment and command prefix of one GPU's processes: their own lock for measuring, a share of the cores."""
    if options.gpus == 1:
        return {}, []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    device = visible[number] if len(visible) >= options.gpus else str(number)
    places = options.out / f"tmp{number}"
    places.mkdir(exist_ok=True)
    cores = sorted(os.sched_getaffinity(0))
    mine = cores[number * len(cores) // options.gpus : (number + 1) * len(cores) // options.gpus] or cores
    prefix = ["taskset", "-c", ",".join(map(str, mine))] if shutil.which("taskset") else []
    return {"CUDA_VISIBLE_DEVICES": device, "TMPDIR": str(places)}, prefix


def child(
    what: str,
    spec: str,
    options: argparse.Namespace,
    limit: float,
    lane: int = 0,
    *,
    script: str = __file__,
    cache: str = "cache",
    extra: Sequence[str] = (),
) -> dict[str, Any]:
    """One network in a fresh process. Args: cache: folder of its tuning database in the output folder."""
    more, prefix = lane_of(lane, options)
    environment = {
        "JCUTS_TUNE_SECONDS": "inf",
        **os.environ,
        "JCUTS_CACHE_DIR": str(options.out / cache),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        **more,
        **({"JAX_PLATFORMS": "cpu", "JCUTS_MAX_CANDIDATES": "1"} if options.dry else {}),
    }
    command = [
        *prefix,
        sys.executable,
        script,
        spec,
        "--out",
        str(options.out),
        "--child",
        what,
        "--seconds",
        str(options.seconds),
        *(["--dry"] if options.dry else []),
        *extra,
    ]
    log = options.out / f"{label(spec)}_{what}.log"
    with log.open("w") as errors:
        try:
            done = subprocess.run(
                command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True, timeout=limit, check=False
            )
        except subprocess.TimeoutExpired:
            print(tail(log), flush=True)
            return {"failed": f"{what} took longer than {limit:.0f} s"}
    print(tail(log), flush=True)
    if done.returncode:
        return {"failed": f"{what}: exit code {done.returncode}", "log": log.read_text()[-3000:]}
    return json.loads(done.stdout.strip().splitlines()[-1])


def tail(log: Path) -> str:
    """The notes in a log."""
    return "\n".join(line for line in log.read_text().splitlines() if line.startswith("["))


def table(out: Path) -> str:
    """The results as text: milliseconds per call back to back (and waited for one by one)."""
    lines = [
        f"{'network':22} {'plain':>15} {'best flags':>15} {'jcuts':>15} {'x plain':>8} {'x flags':>8}  "
        f"{'kernels':>11}  L2 error ours/XLA  chosen; torch.compile"
    ]
    for path in sorted(out.glob("*.json")):
        row = json.loads(path.read_text())
        if "times" not in row:
            lines.append(f"{row.get('network', path.stem):22} {str(row.get('failed'))[:150]}")
            continue
        cells = [row["times"][side] for side in ("plain", "flags", "jcuts")]
        texts = [f"{c['stream'][0] * 1e3:6.3f} ({c['step'][0] * 1e3:6.3f})" for c in cells]
        plain, flags, ours = (c["stream"][0] for c in cells)
        kernels = [row.get("device_kernels", {}).get(side, {}).get("per_step", 0) for side in ("flags", "jcuts")]
        errors = [row.get("errors", {}).get(side, {}).get("l2", float("nan")) for side in ("jcuts", "flags")]
        torch = row.get("torch", {}).get("stream")
        lines.append(
            f"{row['network']:22} {texts[0]:>15} {texts[1]:>15} {texts[2]:>15} {plain / ours:8.2f} "
            f"{flags / ours:8.2f}  {kernels[0]:4.0f} -> {kernels[1]:4.0f}  {errors[0]:.0e}/{errors[1]:.0e}  "
            f"{row['decision']['chosen']}" + (f"; torch {torch[0] * 1e3:.3f}" if torch else "")
        )
    return "\n".join(lines)


def twins(out: Path, spec: str) -> list[Path]:
    """Results of the same network in the other calling form."""
    name, batch, form, *dtype = spec.split(":")
    others = [":".join((name, batch, other, *dtype)) for other in FORMS if other != form]
    return [path for path in (out / f"{label(other)}.json" for other in others) if path.exists()]


def one(spec: str, options: argparse.Namespace, left: Callable[[], float], lane: int) -> None:
    """Runs what is missing of one network's file. Args: left: seconds of the budget."""
    path = options.out / f"{label(spec)}.json"
    for what, key in (("measure", "finished"), ("prove", "proof"), ("torch", "torch")):
        row = json.loads(path.read_text()) if path.exists() else {}
        wanted = {"measure": True, "prove": options.proof, "torch": options.torch}[what]
        if key in row or not wanted or (what == "prove" and "times" not in row):
            continue
        known = [p for p in twins(options.out, spec) if what == "torch" and "torch" in json.loads(p.read_text())]
        if known:  # torch has one calling form
            path.write_text(json.dumps({**row, "torch": json.loads(known[0].read_text())["torch"]}, indent=1) + "\n")
            continue
        if left() < (options.least if what == "measure" else 0):
            print(f"{spec}: not begun, {max(0.0, left()):.0f} s are left")
            break
        extra = ["--forms", *options.forms] if options.forms and what == "measure" else []
        found = child(what, spec, options, min(options.limit, left() + 20), lane, extra=extra)
        row = json.loads(path.read_text()) if path.exists() else {}
        row.pop("failed", None)
        row |= {"network": spec, **(found if what == "measure" else {key: found})}
        path.write_text(json.dumps(row, indent=1) + "\n")


def over_lanes(
    todo: Iterable[str],
    options: argparse.Namespace,
    run: Callable[[str, argparse.Namespace, Callable[[], float], int], None],
) -> None:
    """Deals items out to the GPUs; each takes the next. Args: run: gets item, options, seconds left, GPU."""
    waiting, lock, start = iter(todo), threading.Lock(), time.perf_counter()

    def lane(number: int) -> None:
        while True:
            with lock:
                item = next(waiting, None)
            if item is None:
                return
            run(item, options, lambda: options.budget - (time.perf_counter() - start), number)

    with ThreadPoolExecutor(options.gpus) as pool:
        list(pool.map(lane, range(options.gpus)))


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "networks", nargs="*", default=DEFAULT, help="NAME:BATCH:closed or :args, then perhaps :bfloat16"
    )
    parser.add_argument("--out", type=Path, default=Path("gpu_networks"))
    parser.add_argument("--budget", type=float, default=1e9, help="seconds; a network is not begun after them")
    parser.add_argument("--limit", type=float, default=540.0, help="seconds for one network")
    parser.add_argument("--least", type=float, default=90.0, help="seconds that must be left to begin a network")
    parser.add_argument("--seconds", type=float, default=6.0, help="of timing per network")
    parser.add_argument("--gpus", type=int, default=1, help="GPUs that take the next network each")
    parser.add_argument("--forms", nargs="*", default=[], help="forms that compete, as dots+turns/all, instead of all")
    parser.add_argument("--dry", action="store_true", help="small networks on the CPU")
    parser.add_argument("--proof", action="store_true", help="a second process: warm start, contents of the graphs")
    parser.add_argument("--torch", action="store_true", help="torch.compile as well")
    parser.add_argument("--table", action="store_true", help="only print the table")
    parser.add_argument("--child", choices=("measure", "prove", "torch"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.child:
        spec = options.networks[0]
        if options.child == "torch":
            from benchmarks.networks import torch_compile

            result = torch_compile.measure(spec, options.seconds)
        elif options.child == "prove":
            result = prove(spec, options.out, options.dry)
        else:
            result = measure(spec, options.out, options.dry, options.seconds, only=options.forms)
        print(json.dumps(result))
        return 0
    if not options.table:
        over_lanes(options.networks, options, one)
    print(table(options.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
