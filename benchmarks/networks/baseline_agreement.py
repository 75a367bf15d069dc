"""Agreement of baselines: plain `jax.jit` in a process of its own against plain `jax.jit` in the comparison's process.

    python benchmarks/networks/baseline_agreement.py --out results ResNet50:64:closed ResNet50:64:args
    python benchmarks/networks/baseline_agreement.py --out dry --dry MobileNetV2:2:closed

Per row three processes: `alone` never imports jcuts, `fresh` neither, and has batch norms as keras makes them (mean 0,
variance 1), `comparison` optimises the function first and times, in turns, the baseline that jcuts raced against, the
same function compiled anew, and jcuts' program.  Each reports the medians of calls back to back, and what XLA made of
the convolutions: its targets, the algorithms that autotuning took, and which epilogues the library got.  Two baselines
agree where their medians are within 2%.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.networks.interleaved_timing import timed  # noqa: E402
from benchmarks.networks.workload_row import Row  # noqa: E402

PROCESSES = ("alone", "comparison", "fresh")
AGREEMENT = 0.02
"""Difference of two medians that counts as agreement."""


def convolutions(text: str) -> dict[str, Any]:
    """What XLA made of convolutions: calls per target, activation and algorithm, from the compiled program's HLO."""
    targets: collections.Counter[str] = collections.Counter()
    algorithms: collections.Counter[str] = collections.Counter()
    for line in text.splitlines():
        target = re.search(r'custom_call_target="(__cudnn[^"]*)"', line)
        if not target:
            continue
        mode = re.search(r'"activation_mode":"([^"]*)"', line)
        algorithm = re.search(r'"algo_id":"?(-?\d+)', line)
        math = re.search(r'"math_type":"([^"]*)"', line)
        targets[f"{target.group(1)} {mode.group(1) if mode else ''}".strip()] += 1
        algorithms[f"{algorithm.group(1) if algorithm else '?'} {math.group(1) if math else ''}".strip()] += 1
    fusions = len(re.findall(r" fusion\(", text))
    return {"targets": dict(targets), "algorithms": dict(algorithms), "fusions": fusions}


def measure(spec: str, process: str, dry: bool, seconds: float) -> dict[str, Any]:
    """One process' side of a row."""
    import jax

    from benchmarks.networks import workloads

    what = Row.parse(spec)
    fn, args = workloads.network(
        what.name,
        what.batch,
        closed=what.form == "closed",
        dtype=what.dtype,
        size=96 if dry else None,
        fresh=process == "fresh",
    )
    jax.block_until_ready(args)
    row: dict[str, Any] = {
        "process": process,
        "device": str(jax.devices()[0].device_kind),
        "versions": {"jax": jax.__version__, "python": sys.version.split()[0]},
        "flags": os.environ.get("XLA_FLAGS", ""),
    }
    calls: dict[str, Callable[[], Any]] = {}
    if process == "comparison":
        calls |= _raced(fn, args, row)
    compiled = jax.jit(lambda *xs: fn(*xs)).lower(*args).compile()
    row["plain"] = convolutions(compiled.as_text())
    calls["plain"] = lambda: compiled(*args)
    row["times"] = {name: t["stream"] for name, t in timed(calls, seconds).items()}
    if process != "comparison":
        assert "jcuts" not in sys.modules, "a baseline's process has imported jcuts"
    return row


def _raced(fn: Callable[..., Any], args: Sequence[Any], row: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """The programs of an optimised function: jcuts', and the baseline that it raced against."""
    import jax

    import jcuts

    ours = jcuts.optimize(lambda *xs: fn(*xs))
    start = time.perf_counter()
    jax.block_until_ready(ours(*args))
    row["first_call_seconds"] = time.perf_counter() - start
    decision = ours.decision(*args)
    row["decision"] = None if decision is None else decision.to_dict()
    competing = ours.programs(*args)
    found: dict[str, Callable[[], Any]] = {"jcuts": lambda: ours(*args)}
    return found | ({"raced": lambda: competing["xla"](*args)} if "xla" in competing else {})


def verdict(row: dict[str, Any]) -> str:
    """Whether the comparison's baselines take the time of the one alone: agree, DISAGREE, or not both measured."""
    alone = row.get("alone", {}).get("times", {}).get("plain")
    compared = [t[0] for s, t in row.get("comparison", {}).get("times", {}).items() if s in ("plain", "raced")]
    if alone is None or not compared:
        return "not compared"
    return "agree" if all(abs(t / alone[0] - 1.0) <= AGREEMENT for t in compared) else "DISAGREE"


def line(spec: str, row: dict[str, Any]) -> str:
    """A row as text; in brackets over the baseline alone, where it was measured."""
    sides = {f"{process} {side}": t[0] for process, r in row.items() for side, t in r["times"].items()}
    base = sides.get("alone plain")
    shown = (f"{side} {t * 1e3:.3f} ms" + (f" ({t / base:.3f})" if base else "") for side, t in sides.items())
    return f"{spec}: {', '.join(shown)}: {verdict(row)}"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line: exit status 1 where two baselines disagree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="+", help="NAME:BATCH:FORM[:DTYPE], FORM closed or args")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=4.0, help="of samples per process")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds that one process may take")
    parser.add_argument("--processes", default=",".join(PROCESSES))
    parser.add_argument("--dry", action="store_true", help="small images on this CPU: finds typos")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        print(json.dumps(measure(options.rows[0], options.child, options.dry, options.seconds)))
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    status = 0
    for spec in options.rows:
        path = options.out / f"agreement_{spec.replace(':', '_')}.json"
        row: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        for process in options.processes.split(","):
            if process not in row:
                row[process] = _child(spec, process, options)
                path.write_text(json.dumps(row, indent=1))
        print(line(spec, row), flush=True)
        status |= verdict(row) == "DISAGREE"
    return status


def _child(spec: str, process: str, options: argparse.Namespace) -> dict[str, Any]:
    """A process' side, measured there."""
    command = [sys.executable, __file__, spec, "--out", str(options.out), "--child", process]
    command += ["--seconds", str(options.seconds)] + (["--dry"] if options.dry else [])
    environment = {"JCUTS_TUNE_SECONDS": "inf", **os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"} | (
        {"JAX_PLATFORMS": "cpu"} if options.dry else {}
    )
    done = subprocess.run(command, capture_output=True, text=True, timeout=options.limit, env=environment, check=False)
    if done.returncode:
        raise RuntimeError(f"{spec}, {process}: exit status {done.returncode}\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    sys.exit(main())
