"""Resumable driver of benchmark rows: one child process each, one JSON file each, within a total time budget."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MARGIN = 1.25
"""A row is taken to need this much of the longest time that a row of its workload has taken."""
REST = 4.0
"""Seconds that are kept at the end of a sitting."""


def read(path: Path) -> dict[str, Any]:
    """A file's record; nothing where there is no file."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def write(path: Path, data: dict[str, Any]) -> None:
    """Writes a file at once, so that a killed process leaves none that is half written."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    part.replace(path)


@dataclass(frozen=True)
class Outcome:
    """What became of a child. Args: code: exit status, None: ended after ``seconds``; cut: by the sitting's end."""

    begun: bool
    code: int | None = None
    cut: bool = False
    seconds: float = 0.0
    log: str = ""

    @property
    def good(self) -> bool:
        """Whether it did what it should."""
        return self.begun and self.code == 0

    @property
    def failure(self) -> dict[str, str]:
        """Why it failed by itself, and the end of its log; nothing where it did not, or was cut."""
        if self.good or self.cut or not self.begun:
            return {}
        reason = f"exit status {self.code}" if self.code is not None else f"not done after {self.seconds:.0f} s"
        return {"failed": reason, "log": self.log[-1500:]}


@dataclass
class Driver:
    """Starts child processes that write files into a folder, none that could not end within the sitting.

    Args: total: seconds of the sitting; limit: seconds of one process, after which it is ended; environment: variables
    of the children beside this process' own.
    """

    out: Path
    total: float
    limit: float
    environment: dict[str, str] = field(default_factory=dict)
    begin: float = field(default_factory=time.monotonic)
    failed: int = 0

    def left(self) -> float:
        """Seconds of the sitting that are left."""
        return self.total - (time.monotonic() - self.begin) - REST

    def needs(self, pattern: str, default: float) -> float:
        """Seconds that a row may need, from the files whose names begin so. Args: default: where there are none."""
        known = [read(p).get("process_seconds", 0.0) for p in self.out.glob(f"{pattern}*.json")]
        return MARGIN * max(known) if any(known) else default

    def run(self, name: str, command: Sequence[str], needed: float) -> Outcome:
        """Runs a child, its output in a log of that name; not where less than ``needed`` seconds are left."""
        left = self.left()
        if left < needed:
            print(f"{name}: not begun, {max(left, 0):.0f} of {needed:.0f} s are left", flush=True)
            return Outcome(begun=False)
        start = time.monotonic()
        log = self.out / f"{name}.log"
        code = child(command, log, min(self.limit, left), self.environment)
        spent = time.monotonic() - start
        cut = code is None and left < self.limit
        return Outcome(True, code, cut, spent, log.read_text(encoding="utf-8", errors="replace"))

    def run_row(self, target: Path, command: Sequence[str], needed: float) -> Outcome:
        """Runs the child that writes a row's file; its failure is the row's record."""
        outcome = self.run(target.stem, command, needed)
        self.keep(target, outcome)
        return outcome

    def keep(self, target: Path, outcome: Outcome, key: str = "process_seconds") -> None:
        """Completes a row's file after its child, and says what became of it. Args: key: of the child's seconds."""
        if not outcome.begun:
            return
        if outcome.failure:
            self.failed += 1
            write(target, {**read(target), **outcome.failure})
        if target.exists():
            write(target, {**read(target), key: round(outcome.seconds, 1)})
        record = read(target)
        what = next((f"{w}: {record[w]}" for w in ("failed", "skipped") if w in record), "measured")
        what = "cut by the end of the sitting" if outcome.cut else what
        print(f"{target.stem}: {what[:200]}, {outcome.seconds:.0f} s", flush=True)


def child(command: Sequence[str], log: Path, limit: float, environment: dict[str, str]) -> int | None:
    """Exit status of a process, None where it was ended with all its children after ``limit`` seconds."""
    with log.open("w", encoding="utf-8") as stream:
        more = {**os.environ, **environment}
        process = subprocess.Popen(command, stdout=stream, stderr=stream, start_new_session=True, env=more)
        try:
            return process.wait(timeout=limit)
        except BaseException as end:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if not isinstance(end, subprocess.TimeoutExpired):
                raise
            return None


def script(file: str, *words: object) -> list[str]:
    """Command line of a script of this folder."""
    return [sys.executable, str(Path(__file__).with_name(file)), *map(str, words)]
