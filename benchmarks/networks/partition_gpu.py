"""The partition search on a GPU: greedy against searched partitions of networks, as whole programs in one process.

    python benchmarks/networks/partition_gpu.py --out results ResNet50:1:closed InceptionV3:1:closed
    python benchmarks/networks/partition_gpu.py --out results --plan bert:1:closed   # planning alone, without a GPU
    python benchmarks/networks/partition_gpu.py --out dry --dry MobileNetV2:2:closed  # small, on this CPU: finds typos

Writes ``partition_<row>.json``: what the search explored and measured, seconds that it took, the sum of regions before
and after, the regions that differ, and on a GPU the times of both programs.  ``--plan`` pretends that an H200 is here
and that kernels take what the model predicts, times a factor that their programs determine: it shows what the search
costs in planning, and that it ends the same way each time, but says nothing about networks.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
import json
import logging
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.networks import interleaved_timing, modes, on_gpu, roofline  # noqa: E402


class Lines(logging.Handler):
    """Keeps what the log says of partitions."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Takes a line."""
        if "partition" in (text := record.getMessage()):
            self.texts.append(text)

    @classmethod
    def listening(cls) -> Lines:
        """One that hears what jcuts says."""
        lines = cls()
        logging.getLogger("jcuts").setLevel(logging.INFO)
        logging.getLogger("jcuts").addHandler(lines)
        return lines


def differences(greedy: Any, searched: Any) -> dict[str, list[dict[str, Any]]]:
    """Regions of only one of two reports."""

    def regions(report: Any) -> dict[str, dict[str, Any]]:
        return {f"{s.operations} {s.chosen} {s.count}": on_gpu.subset_row(s) for s in report.subsets}

    one, other = regions(greedy), regions(searched)
    return {
        "greedy only": [row for key, row in one.items() if key not in other],
        "searched only": [row for key, row in other.items() if key not in one],
    }


def workload(spec: str, dry: bool) -> tuple[Any, tuple[Any, ...]]:
    """Function and arguments of a row: of `on_gpu.py`, else of the registry of workloads (nothing is donated)."""
    from benchmarks.networks import baseline
    from benchmarks.networks.workload_row import Row

    row = Row.parse(spec)
    if row.name in (*on_gpu.NETWORKS, *on_gpu.DRY):
        return on_gpu.workload(spec, dry)
    form = baseline.built(row, dry)
    return form.function, tuple(form.arguments)


# -- on a GPU ---------------------------------------------------------------------------------------------------------
def measure(spec: str, dry: bool, seconds: float) -> dict[str, Any]:
    """Tunes a network, and times the searched program beside the greedy one where they differ."""
    import jax

    import jcuts
    from jcuts.base.settings import Settings
    from jcuts.pipeline import passes
    from jcuts.tune import session

    lines = Lines.listening()
    platform = on_gpu.pretend(dry)
    session.set_progress(on_gpu.Stages())
    fn, args = workload(spec, dry)
    jax.block_until_ready(args)
    ours = jcuts.optimize(on_gpu.named(fn, "ours"))
    start = time.perf_counter()
    jax.block_until_ready(ours(*args))
    row: dict[str, Any] = {
        "network": spec,
        "device": str(jax.devices()[0].device_kind),
        "first_call_seconds": time.perf_counter() - start,
        "log": lines.texts,
    }
    decision, programs = ours.decision(*args), ours.programs(*args)
    assert decision is not None  # it has just been called
    row["decision"] = decision.to_dict()
    forms, pairs = searched_pairs(programs)
    if dry and not pairs:  # a CPU's variants are all searched
        pairs = dict(zip(forms, reversed(forms), strict=True))
    calls = {name: functools.partial(on_gpu_call, programs[name], args) for pair in pairs.items() for name in pair}
    row["pairs"] = pairs
    row["times"] = interleaved_timing.timed(calls, seconds) if calls else {}
    closed = roofline.traced(fn, args)

    def report(form: Any) -> Any:
        settings = dataclasses.replace(Settings(), form=form)
        return passes.optimize_jaxpr(closed, settings, platform=platform, may_measure=False).report

    row["differences"] = {
        name: differences(report(forms[greedy]), report(forms[name])) for greedy, name in pairs.items()
    }
    return row


def searched_pairs(programs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Forms of jcuts' programs by name; of those with searched regions, by the name of the same one with greedy ones.

    Args: programs: those that raced, by name; a searched one whose greedy form did not race is in no pair.
    """
    from jcuts.base.settings import SEARCHED
    from jcuts.jit import variant_space

    forms = {name: variant_space.form_of(name) for name in programs if not variant_space.is_xla(name)}
    pairs: dict[str, str] = {}
    for name, form in forms.items():
        if form is not None and form.regions == SEARCHED:
            greedy = variant_space.name_of(dataclasses.replace(form, regions="all"), name.partition(":")[2])
            pairs |= {greedy: name} if greedy in programs else {}
    return forms, pairs


def on_gpu_call(program: Any, args: Sequence[Any]) -> Any:
    """One call of a whole program."""
    return program(*args)


# -- planning alone ---------------------------------------------------------------------------------------------------
def plan(spec: str, dry: bool, recorded: Sequence[Path] = ()) -> dict[str, Any]:
    """Plans the greedy and the searched variant of a network for a pretended H200, and the searched one once more."""
    from jcuts.base.settings import Settings
    from jcuts.jit import variant_space
    from jcuts.pipeline import computation, passes

    lines = Lines.listening()
    fn, args = workload(spec, dry)
    closed = roofline.traced(fn, args)
    tuned: dict[str, Any] = {}

    def outcome(form: Any, may_measure: bool = True) -> tuple[float, Any]:
        if not may_measure:  # another process
            passes.forget()
            for remembered in (computation._rankings, computation._grouped):
                remembered.clear()
        settings = dataclasses.replace(Settings(), form=form)
        start = time.perf_counter()
        found = passes.optimize_jaxpr(closed, settings, platform="cuda", may_measure=may_measure)
        return time.perf_counter() - start, found

    times = RecordedTimes(spec, recorded) if recorded else made_up
    with modes.pretended(tuned, times):
        worth = variant_space.candidate_variants(closed, "cuda")
        spent = {form: outcome(form) for form in worth if form is None or form.regions == "all"}
        known = len(tuned)
        form = variant_space.variant_to_search({f: found for f, (_, found) in spent.items()})
        if form is None:
            return {"network": spec, "searched": None, "finished": True}
        greedy = next(f for f in spent if (f.rewrites if f else ()) == form.rewrites)
        cold, searched = outcome(form)
        warm, again = outcome(form, may_measure=False)
    return {
        "network": spec,
        "part": "planning",
        "searched": str(form),
        "greedy_seconds": {str(f or "plain"): seconds for f, (seconds, _) in spent.items()},
        "region_gigabytes": {str(f or "plain"): gigabytes(found.report) for f, (_, found) in spent.items()},
        "problems": known,
        "recorded": times.found if isinstance(times, RecordedTimes) else 0,
        "further_problems": len(tuned) - known,
        "search_seconds": cold,
        "stages": searched.report.seconds,
        "warm_seconds": warm,
        "notes": [n for n in searched.report.notes if "partition" in str(n)],
        "restored": regions(again.report) == regions(searched.report),
        "differences": differences(spent[greedy][1].report, searched.report),
        "log": lines.texts,
        "finished": True,
    }


def gigabytes(report: Any) -> float:
    """What the regions of a report read and write, each operand and result once [GB]."""
    return sum(s.count * s.bytes for s in report.subsets) / 1e9


def regions(report: Any) -> Counter[str]:
    """Regions of a report, with what is chosen for them."""
    return Counter({f"{s.operations} {s.chosen}": s.count for s in report.subsets})


def predicted(problem: Any) -> list[float]:
    """What the model predicts of a problem's candidates [s]: of all the same."""
    from jcuts.kernel_ir.verify import read
    from jcuts.schedule.gpu import time_estimate
    from jcuts.schedule.gpu.machine import GpuMachine

    machine = GpuMachine.named("H200")
    return [time_estimate.seconds(read(c.payload), machine) for c in problem.candidates]


def made_up(problem: Any, region: Any) -> list[float]:
    """Times of a problem's candidates and of XLA: the model's, times a factor from one half to two."""
    times = [t * factor(c.digest) for t, c in zip(predicted(problem), problem.candidates, strict=True)]
    return [*times, min(times, default=1e-6) * factor(problem.digest)]


class RecordedTimes:
    """Times of a problem's candidates and of XLA as files of results have them, where they have its region.

    Args: spec: the network; paths: results of `on_gpu.py`, the later ones count.
    """

    def __init__(self, spec: str, paths: Sequence[Path]) -> None:
        self.known: dict[tuple[Any, ...], tuple[float, float]] = {}
        for row in (row for path in paths for row in json.loads(path.read_text())):
            for s in row.get("subsets", ()) if row.get("network") == spec else ():
                if s["seconds"] and s["xla_seconds"]:
                    self.known[key_of(s["operations"], s["bytes"])] = s["seconds"], s["xla_seconds"]
        self.errors: dict[str, list[float]] = {}
        self.found = 0

    def __call__(self, problem: Any, region: Any) -> list[float]:
        """Seconds of every candidate, and of XLA."""
        times = predicted(problem)
        operations = Counter(e.primitive.name for e in region.closed.jaxpr.eqns)
        moved = sum(b.bytes for b in region.program.buffers if b.role != "local")
        errors = self.errors.setdefault(region.program.template, [])
        known = self.known.get(key_of(operations, moved))
        if known is not None and times:
            self.found += 1
            errors.append(known[0] / times[0])
            return [*(known[0] for _ in times), known[1]]
        usual = statistics.median(errors or [e for found in self.errors.values() for e in found] or [1.0])
        return [*(t * usual for t in times), times[0] * usual * 1.5 if times else 1e-6]


def key_of(operations: dict[str, int], moved: int) -> tuple[Any, ...]:
    """What tells regions of one network apart in results."""
    return (*sorted(operations.items()), moved)


def factor(text: str) -> float:
    """A number from 0.5 to 2 that a text determines."""
    return 2.0 ** (int(hashlib.sha256(text.encode()).hexdigest()[:6], 16) / 0x800000 - 1.0)


# -- the command ------------------------------------------------------------------------------------------------------
def line(row: dict[str, Any]) -> str:
    """One network as text."""
    if "failed" in row:
        return f"{row.get('network')}: {row['failed']}"
    if row.get("part") == "planning":
        return (
            f"{row['network']}: {row['searched']}: planned {sum(row['greedy_seconds'].values()):.2f} s, searched "
            f"{row['search_seconds']:.2f} s, restored {row['warm_seconds']:.2f} s ({row['restored']}); "
            f"{row['further_problems']} problems beyond {row['problems']} ({row['recorded']} recorded); "
            f"{'; '.join(row['notes'])}"
        )
    times = "; ".join(
        f"{name} stream {t['stream'][0] * 1e3:.4f} step {t['step'][0] * 1e3:.4f} ms"
        for name, t in row.get("times", {}).items()
    )
    return f"{row['network']}: {row['decision']['chosen']}; {times}; {'; '.join(row['log'])}"


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("networks", nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=3.0, help="of timing, per network")
    parser.add_argument("--budget", type=float, default=900.0, help="seconds for everything")
    parser.add_argument("--plan", action="store_true", help="planning alone, for a pretended GPU")
    parser.add_argument("--recorded", type=Path, nargs="+", default=[], help="results with times, for --plan")
    parser.add_argument("--dry", action="store_true", help="small networks on this CPU")
    parser.add_argument("--child", choices=("measure", "plan"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.child:
        logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s: %(message)s", datefmt="%H:%M:%S")
        spec = options.networks[0]
        if options.child == "plan":
            row = plan(spec, options.dry, options.recorded)
        else:
            row = measure(spec, options.dry, options.seconds)
        print(json.dumps(row), flush=True)
        return
    options.gpus = 1
    what = "plan" if options.plan else "measure"
    start = time.perf_counter()
    for spec in options.networks:
        row: dict[str, Any] = {"network": spec}
        left = options.budget - (time.perf_counter() - start)
        extra = ["--recorded", *map(str, options.recorded)] if options.recorded else []
        if left > 5:
            row |= on_gpu.child(what, spec, options, left, script=__file__, extra=extra)
        else:
            row["failed"] = "no time is left"
        (options.out / f"partition_{on_gpu.label(spec)}.json").write_text(json.dumps(row, indent=1) + "\n")
        print(line(row), flush=True)


if __name__ == "__main__":
    try:
        main()
    except subprocess.SubprocessError as error:
        sys.exit(str(error))
