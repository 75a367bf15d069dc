"""Cost of accepting GPU kernels: where the float64 references and the checks of a workload's regions spend their time.

    python benchmarks/gpu_kernels/verification_cost.py --out results ResNet50_training:64:args:float32 --problems 12

Runs the request handlers of the measuring processes (`tune.worker.requests`: ``compile``, ``reference``, ``check``) in
this process, one problem after the other, under `cProfile`; the first candidate of each problem, as planned for an
H200.  Writes wall and processor time per handler and the functions that take most.  ``--xla-option
xla_gpu_autotune_level=1`` compiles XLA's side with options besides its own.  Measuring processes have
``OPENBLAS_NUM_THREADS=1``: set it here, too.  Needs a GPU; ``--dry`` makes the references of tiny shapes on a CPU.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.networks import baseline, modes, roofline  # noqa: E402
from benchmarks.networks.workload_row import Row  # noqa: E402

MOST = 25
"""Functions of a profile that are written."""


def regions(row: Row, dry: bool) -> list[tuple[Any, Any]]:
    """Problems of a workload with their candidates, and one region of each."""
    from jcuts.base.settings import Settings

    form = baseline.built(row, dry)
    return modes.pretended_regions(roofline.traced(form.function, form.arguments), Settings())


class Handlers:
    """Request handlers under a profile each.

    Attributes: seconds: wall and processor time of every call, by handler.
    """

    def __init__(self) -> None:
        self.profiles: dict[str, cProfile.Profile] = {}
        self.seconds: dict[str, list[tuple[float, float]]] = {}

    def __call__(self, name: str, handler: Callable[..., dict[str, Any]], request: dict[str, Any]) -> dict[str, Any]:
        """Runs a handler; its answer."""
        profile = self.profiles.setdefault(name, cProfile.Profile())
        wall, cpu = time.perf_counter(), time.process_time()
        profile.enable()
        try:
            return handler(request, lambda _: None)
        finally:
            profile.disable()
            spent = time.perf_counter() - wall, time.process_time() - cpu
            self.seconds.setdefault(name, []).append(spent)

    def summary(self) -> dict[str, Any]:
        """Times, and the functions that take most of them by their own time [s]."""
        found = {}
        for name, profile in self.profiles.items():
            rows = pstats.Stats(profile).stats.items()  # type: ignore[attr-defined]
            most = sorted(rows, key=lambda row: -row[1][2])[:MOST]
            found[name] = {
                "calls": len(self.seconds[name]),
                "wall": sum(w for w, _ in self.seconds[name]),
                "processor": sum(c for _, c in self.seconds[name]),
                "functions": [
                    {"function": f"{Path(file).name}:{line}:{what}", "calls": calls, "own": own, "all": every}
                    for (file, line, what), (_, calls, own, every, _) in most
                ],
            }
        return found


def add_options(options: Sequence[str]) -> None:
    """Compiler options for XLA's side of references, as NAME=VALUE, beside those that it has."""
    from jcuts.tune.baseline import autotune_cache

    pairs = (option.partition("=") for option in options)
    more = {name: int(value) if value.lstrip("-").isdigit() else value for name, _, value in pairs}
    read = autotune_cache.read_shared_results

    def with_more(place: str, timed: bool = True, narrow: bool = False) -> dict[str, Any]:
        return read(place, timed, narrow) | more

    setattr(autotune_cache, "read_shared_results", with_more)  # noqa: B010  # the handlers look it up by this name


def accept(problem: Any, region: Any, folder: Path, handlers: Handlers, dry: bool) -> dict[str, Any]:
    """References and check of a problem's first candidate; what the handlers say of their parts."""
    from jcuts.tune.baseline import autotune_cache
    from jcuts.tune.baseline.xla_export import with_exports
    from jcuts.tune.worker import requests

    problem = replace(problem, device="") if dry else problem
    full = with_exports(problem, region.closed, platform="cuda", runs_on="cpu" if dry else "")
    path, label = folder / "problem.json", full.candidates[0].label
    path.write_text(json.dumps(full.to_json()))
    request = {"problem": str(path), "folder": str(folder), "label": label, "kernel": str(folder / "0.kernel")}
    place = "" if dry else str(autotune_cache.folder())
    more = {"seed": 0, "autotuned": place, "timed": False, "grouped": full.has_grouped_convolution}
    made = handlers("reference", requests.reference, request | more)
    found = {"region": full.name, "kinds": made["kinds"], "reference": made["parts"]}
    if not dry:
        handlers("compile", requests.compile_, request | {"out": request["kernel"]})
        found["check"] = handlers("check", requests.check, request | {"kinds": made["kinds"]})["parts"]
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("row", type=Row.parse, help="NAME:BATCH:FORM[:DTYPE]")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--problems", type=int, default=12, help="drawn at random")
    parser.add_argument("--budget", type=float, default=300.0, help="seconds")
    parser.add_argument("--xla-option", action="append", default=[], metavar="NAME=VALUE", help="of XLA's side")
    parser.add_argument("--dry", action="store_true", help="references of tiny shapes on a CPU")
    options = parser.parse_args(argv)
    from jcuts.base.errors import CandidateRejected

    add_options(options.xla_option)
    end = time.monotonic() + options.budget
    drawn = regions(options.row, options.dry)
    random.Random(0).shuffle(drawn)
    handlers, found = Handlers(), []
    for problem, region in drawn[: options.problems]:
        if time.monotonic() > end:
            break
        with tempfile.TemporaryDirectory() as folder:
            try:
                found.append(accept(problem, region, Path(folder), handlers, options.dry))
            except CandidateRejected as error:
                found.append({"region": problem.name, "rejected": str(error)})
        print(json.dumps(found[-1]), flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    target = options.out / f"verification_{options.row.stem}.json"
    record = {
        "row": str(options.row),
        "dry": options.dry,
        "xla_options": options.xla_option,
        "problems": found,
        "handlers": handlers.summary(),
    }
    target.write_text(json.dumps(record | baseline.environment(), indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
