"""Recorded rows of baselines, joined with what `torch.compile` and jcuts take; XLA programs of a row; sittings."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks.networks.workload_row import Row

AGREEMENT = 0.02
"""Largest relative difference at which two measurements of a baseline agree."""
SITTING_GAP = 300.0
"""Most seconds between the end of a baseline's process and the start of jcuts' process in one sitting, which measures a
row's baseline and then the row under jcuts.  The files do not name their hosts: the largest gap in a recorded sitting
is 100 s, the smallest between two 526 s."""
LAUNCH_GAIN = 1.1
"""A program that CUDA graphs make this many times as fast waits for the host's launches."""


def median(program: dict[str, Any]) -> float:
    """Seconds per call back to back."""
    return program["back_to_back"]["median"]


@dataclass(frozen=True)
class XlaProgram:
    """An XLA program of a row that was timed.

    Args: seconds: per call back to back; plain: of plain `jax.jit` in the same process; name: what it is and where it
        ran, '' of plain `jax.jit` alone; waited: percentiles of calls that were waited for, where there are any.
    """

    seconds: float
    plain: float
    name: str = ""
    waited: dict[str, Any] | None = None


@dataclass(frozen=True)
class Joined:
    """All that is known of a row. Args: torch: its fastest mode."""

    baseline: dict[str, Any]
    torch: dict[str, Any] | None
    jcuts: dict[str, Any] | None

    @property
    def row(self) -> str:
        """Its name, with the statistics of batch norms where they are fresh."""
        fresh = self.baseline["statistics"] != "trained"
        return self.baseline["row"] + (f" ({self.baseline['statistics']})" if fresh else "")

    @property
    def plain(self) -> float:
        """Seconds of plain `jax.jit` alone in its process."""
        return median(self.baseline["programs"]["plain"])

    @property
    def ours(self) -> float | None:
        """Seconds of jcuts."""
        return median(self.jcuts["programs"]["jcuts"]) if self.jcuts else None

    @property
    def chosen(self) -> str:
        """The program that jcuts runs; '' where none is known."""
        return str(((self.jcuts or {}).get("decision") or {}).get("chosen", ""))

    @property
    def alone(self) -> list[XlaProgram]:
        """XLA programs of the process that never imports jcuts: plain, and with its workload's flags."""
        flags = ", ".join((self.baseline.get("flags") or {}).get("chosen", ()))
        programs = self.baseline["programs"]
        return [
            XlaProgram(median(p), self.plain, "" if n == "plain" else flags, p["waited"]) for n, p in programs.items()
        ]

    @property
    def beside(self) -> list[XlaProgram]:
        """XLA programs of jcuts' process: plain, the one that jcuts runs where it is XLA's, the others of its race.

        Those of the race have no time back to back.  Their time there includes waiting, and their ratio to plain there
        depends on the host's launches; of both estimates the longer one counts: the time there, and plain back to back
        over the ratio.
        """
        programs = self.jcuts["programs"] if self.jcuts else {}
        if "plain" not in programs:
            return []
        plain, ours = median(programs["plain"]), programs["jcuts"]
        found = [XlaProgram(plain, plain, "none (beside jcuts)", programs["plain"].get("waited"))]
        if self.chosen.startswith("xla"):
            found.append(XlaProgram(median(ours), plain, f"{self.chosen} (run by jcuts)", ours.get("waited")))
        raced = ((self.jcuts or {}).get("decision") or {}).get("seconds") or {}
        for name, seconds in raced.items():
            if name.startswith("xla:") and name != self.chosen:
                estimate = max(seconds, plain * seconds / raced["xla"])
                found.append(XlaProgram(estimate, plain, f"{name} (race of jcuts)"))
        return found

    @property
    def best(self) -> XlaProgram:
        """The fastest XLA program that was timed; alone in its process where two are equal."""
        return min([*self.alone, *self.beside], key=lambda program: program.seconds)

    @property
    def fastest_plain(self) -> float:
        """Seconds of plain `jax.jit` where it was faster: alone, or beside jcuts."""
        return min([self.plain, *(program.plain for program in self.beside)])

    @property
    def fastest_other(self) -> float:
        """Seconds of the faster of XLA and torch."""
        return min([self.best.seconds, *([median(self.torch)] if self.torch else [])])

    @property
    def beside_over_alone(self) -> float | None:
        """Plain `jax.jit` in the process of jcuts over plain `jax.jit` alone; None where either is missing."""
        return self.beside[0].plain / self.plain if self.beside else None

    @property
    def agrees(self) -> bool:
        """Whether plain `jax.jit` takes the same in both processes."""
        return self.beside_over_alone is not None and abs(self.beside_over_alone - 1) <= AGREEMENT

    @property
    def is_one_sitting(self) -> bool:
        """Whether jcuts' process ran soon after the baseline's, in the same sitting on the same machine."""
        ends = [datetime.fromisoformat(r["date"]) for r in (self.baseline, self.jcuts) if r and "date" in r]
        if len(ends) < 2:
            return False
        apart = (ends[1] - ends[0]).total_seconds()
        return apart >= 0 and apart - (self.jcuts or {}).get("process_seconds", 0.0) <= SITTING_GAP

    @property
    def is_bound_by_launches(self) -> bool:
        """Whether CUDA graphs made plain `jax.jit` clearly faster, alone in its process."""
        best = min(self.alone, key=lambda program: program.seconds)
        return "command_buffers" in best.name and self.plain >= LAUNCH_GAIN * best.seconds


# -- reading --------------------------------------------------------------------------------------------------------
def records(folder: Path) -> list[dict[str, Any]]:
    """All files of a folder."""
    return [json.loads(p.read_text(encoding="utf-8")) for p in sorted(folder.glob("*.json"))]


def fastest_mode(record: dict[str, Any]) -> dict[str, Any] | None:
    """The fastest mode of a row of torch."""
    timed = [m for m in record.get("modes", {}).values() if "back_to_back" in m]
    return min(timed, key=median) if timed else None


def older(places: Sequence[Path]) -> dict[tuple[str, str], dict[str, Any]]:
    """Rows of jcuts in results of `on_gpu.py` and `run.py`, the newest last: by (row, device)."""
    found = {}
    for place in places:
        data = json.loads(place.read_text(encoding="utf-8"))
        for r in data if isinstance(data, list) else []:
            if isinstance(r, dict) and "jcuts" in r.get("times", {}) and "device" in r:
                name, batch, form, *dtype = r["network"].split(":")
                median_ = {"back_to_back": {"median": r["times"]["jcuts"]["stream"][0]}}
                key = (str(Row(name, int(batch), form, *dtype)), r["device"])
                found[key] = {"programs": {"jcuts": median_}, "decision": r.get("decision"), "file": place.name}
    return found


def shared(record: dict[str, Any]) -> tuple[str, int, str]:
    """What rows of PyTorch, which have one calling form, have in common with others."""
    return record["workload"], record["batch"], record["dtype"]


def joined(folder: Path, results: Path | None) -> list[Joined]:
    """Rows of a folder with what PyTorch and jcuts take. Args: results: folder of older results of jcuts."""
    from_here = records(folder)
    torch = {(*shared(r), r.get("device")): fastest_mode(r) for r in from_here if r.get("record") == "torch"}
    jcuts = {(r["row"], r["device"]["kind"]): r for r in from_here if r.get("record") == "jcuts" and "programs" in r}
    before = older(sorted(results.glob("gpu_networks_*.json"))) if results else {}
    found = []
    for r in from_here:
        if r.get("record") != "baseline" or "programs" not in r:
            continue
        key = (r["row"], r["device"]["kind"])
        trained = r["statistics"] == "trained"
        ours = (jcuts.get(key) or before.get(key)) if trained else None
        found.append(Joined(r, torch.get((*shared(r), r["device"]["kind"])) if trained else None, ours))
    return sorted(found, key=lambda j: (j.baseline["workload"], j.baseline["dtype"], j.baseline["batch"], j.row))
