"""A list of random programs spread over processes that append to files of their own and can be interrupted."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

Item = tuple[int, str]
"""(seed, transform)"""
STUCK_SECONDS = 300.0
"""A program that runs for so long is ended and counts as an error (most take a second)."""
ALONE_SECONDS = 200.0
"""So long it may then take without jcuts, in another process: less than would end the one that waits for it."""
GRACE_SECONDS = 20.0
"""So long after the end of the time a process may finish its program."""
POLL_SECONDS = 0.5


def rows_of(path: Path | None, start: int = 0) -> list[dict[str, Any]]:
    """The rows of one progress file. Args: start: bytes that are left out."""
    if path is None or not path.exists():
        return []
    rows = []
    for line in path.read_bytes()[start:].decode().splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue  # the line that an interrupted run was writing
    return rows


def appending(path: Path) -> IO[str]:
    """The progress file, to append rows: the line that an interrupted run was writing ends first."""
    cut = path.exists() and not path.read_bytes().endswith(b"\n") and path.stat().st_size > 0
    file = path.open("a")
    if cut:
        file.write("\n")
    return file


def latest(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The last verdict of every program."""
    return list({(r["seed"], r["transform"]): r for r in rows}.values())


def files_of(base: Path) -> list[Path]:
    """The progress file and those of its shards, whatever their number was."""
    return [p for p in (base, *sorted(base.parent.glob(f"{base.stem}.shard*{base.suffix}"))) if p.exists()]


def shard_file(base: Path, number: int) -> Path:
    """Where a shard appends."""
    return base.with_name(f"{base.stem}.shard{number}{base.suffix}")


def marker_of(path: Path) -> Path:
    """Names the program that is running: the one that killed the process, if it is found at the start."""
    return path.with_suffix(".running")


def pending(items: Sequence[Item], rows: list[dict[str, Any]], retry: bool) -> list[Item]:
    """What is left to run; with ``retry`` failures are run again."""
    done = {(r["seed"], r["transform"]) for r in latest(rows) if not (retry and r["status"] in ("error", "mismatch"))}
    return [item for item in items if item not in done]


def run_shards(items: Sequence[Item], base: Path, jobs: int, deadline: float = math.inf) -> list[str]:
    """Runs items in ``jobs`` processes of this script and waits for them; gives programs that did not end in time.

    A process that dies is started again: it notes the program that killed it, and goes on with the next one.  One that
    does not get so far is left alone.

    Args: deadline: time (of the clock) from which on processes begin no program.
    """
    unfinished: list[str] = []
    lists = [base.with_name(f"{base.stem}.shard{n}.items") for n in range(jobs)]
    before = [path.stat().st_size if path.exists() else 0 for path in (shard_file(base, n) for n in range(jobs))]

    def start(n: int) -> subprocess.Popen[bytes]:
        left = pending(items[n::jobs], rows_of(shard_file(base, n), before[n]), retry=False)
        lists[n].write_text(json.dumps([list(item) for item in left]))
        return _start(base, n, lists[n])

    running = {n: start(n) for n in range(jobs)}
    died_at = dict.fromkeys(range(jobs), "")
    try:
        while running:
            time.sleep(POLL_SECONDS)
            for n, process in list(running.items()):
                marker = marker_of(shard_file(base, n))
                now = time.time()
                if process.poll() is None:
                    if now > deadline + GRACE_SECONDS and marker.exists():
                        process.kill()
                        process.wait()
                        unfinished += _taken(marker)  # it may have ended meanwhile
                        del running[n]
                    elif _age(marker) > STUCK_SECONDS:
                        process.kill()
                    continue
                del running[n]
                where = marker.read_text() if marker.exists() else ""
                if where and now > deadline:  # nobody is left to see why it died
                    unfinished.append(where)
                elif where and where != died_at[n]:
                    died_at[n] = where
                    running[n] = start(n)
                elif process.returncode:
                    print(f"shard {n} ended with status {process.returncode}; run again with the same --resume")
    except KeyboardInterrupt:  # what is done is in the files
        for process in running.values():
            process.terminate()
        raise
    finally:
        for path in lists:
            path.unlink(missing_ok=True)
    return unfinished


def _start(base: Path, number: int, items: Path) -> subprocess.Popen[bytes]:
    path = shard_file(base, number)
    if marker_of(path).exists():
        marker_of(path).touch()  # the time of what it names begins anew
    command = [sys.executable, sys.argv[0], "--items", str(items), "--resume", str(path)]
    return subprocess.Popen(command, env=os.environ.copy())


def _taken(marker: Path) -> list[str]:
    """What a marker names, which is gone then: who was cut off is not who killed its process."""
    try:
        where = marker.read_text()
    except FileNotFoundError:
        return []
    marker.unlink()
    return [where]


def _age(marker: Path) -> float:
    try:
        return time.time() - marker.stat().st_mtime
    except OSError:
        return 0.0
