"""Record and replay of tuning sessions: the measurements in one JSON file, and the selection repeated without a
device.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from jcuts.base.errors import CacheError, JcutsError
from jcuts.tune.choice import Choice
from jcuts.tune.problem import Problem
from jcuts.tune.select import estimate, noise_margin, select

FORMAT = 1


@dataclass
class Recording:
    """Problems (without their artifacts) and the measurements of each, from one device.

    Attributes:
        device, versions: what the times belong to.
        entries: (problem, choice) in the order tuned.
    """

    device: str = ""
    versions: str = ""
    entries: list[tuple[Problem, Choice]] = field(default_factory=list)

    def add(self, problem: Problem, choice: Choice) -> None:
        """Notes one tuned problem; exports and given inputs are left out, the recording does not need them."""
        self.entries.append((replace(problem, library=None, reference=None), choice))

    def replay(self, mode: str, *, relative_margin: float | None = None, estimates: bool = False) -> dict[str, Choice]:
        """Repeats the selection on the recorded times.

        Args:
            mode: as in `Settings`.
            relative_margin: another noise margin; None recomputes it from the recorded spreads.
            estimates: choose by the estimator instead (what would ``tune="off"`` have cost?).
        Returns: problem digest -> choice, with the recorded measurements.
        """
        found = {}
        for problem, choice in self.entries:
            if estimates:
                guess = estimate(problem, mode)
                found[problem.digest] = choice.with_winner(guess.winner, guess.winner_digest, guess.origin)
                continue
            used = noise_margin(choice.measurements) if relative_margin is None else relative_margin
            found[problem.digest] = select(problem, replace(choice, margin=used), mode)
        return found

    def loss(self, choices: dict[str, Choice]) -> float:
        """Total time of a set of choices over the best possible one, >= 1; winners without a time are left out."""
        spent = best = 0.0
        for problem, choice in self.entries:
            seconds = choice.seconds(choices[problem.digest].winner)
            if seconds is not None:
                spent += seconds
                best += min(m.seconds for m in choice.measurements)
        return spent / best if best > 0 else 1.0

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the session as JSON, atomically."""
        data: dict[str, Any] = {
            "jcuts_recording": FORMAT,
            "device": self.device,
            "versions": self.versions,
            "entries": [{"problem": p.to_json(), "choice": c.to_json()} for p, c in self.entries],
        }
        target = Path(path)
        scratch = target.with_name(f".{target.name}.{os.getpid()}")
        scratch.write_text(json.dumps(data, indent=1, sort_keys=True) + "\n")
        os.replace(scratch, target)


def load(path: str | os.PathLike[str]) -> Recording:
    """Reads a recording.

    Raises:
        CacheError: no such file, or it is not a recording of this format.
    """
    try:
        data = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise CacheError(f"cannot read the recording {path}: {error}", path=str(path)) from None
    found = data.get("jcuts_recording") if isinstance(data, dict) else None
    if found != FORMAT:
        raise CacheError(
            f"{path} is not a tuning recording of format {FORMAT} (found {found!r})", path=str(path), found=found
        )
    try:
        entries = [(Problem.from_json(e["problem"]), Choice.from_json(e["choice"])) for e in data["entries"]]
        return Recording(data["device"], data["versions"], entries)
    except (KeyError, TypeError, JcutsError) as error:
        raise CacheError(f"the recording {path} has a bad entry: {error}", path=str(path)) from None


def merge(recordings: Iterable[Recording]) -> Recording:
    """One recording with the entries of several; of one problem the last stays.

    Raises:
        CacheError: they come from different devices or versions, whose times cannot be compared.
    """
    parts = list(recordings)
    origins = {(part.device, part.versions) for part in parts}
    if len(origins) > 1:
        raise CacheError(
            f"recordings of {len(origins)} different devices or versions cannot be merged", count=len(origins)
        )
    entries = {problem.digest: (problem, choice) for part in parts for problem, choice in part.entries}
    device, versions = origins.pop() if origins else ("", "")
    return Recording(device, versions, list(entries.values()))
