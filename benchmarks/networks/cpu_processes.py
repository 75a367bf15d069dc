"""Worker processes of the CPU baselines driven over pipes, and how quiet the machine is: known work, processor time."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
COMMAND = Path(__file__).with_name("cpu_baseline.py")
SETTLE = 0.1
"""Seconds after a turn in which a runtime's threads stop to spin."""
OTHERS = 0.10
"""A turn beside which other processes used this share of all cores is taken again."""


# -- the machine ----------------------------------------------------------------------------------------------------
def calibrate(blocks: int = 48) -> float:
    """Seconds that a fixed amount of hashing takes on all cores at once."""
    data = bytes(1 << 20)

    def work() -> None:
        for _ in range(blocks):
            hashlib.sha256(data).digest()

    threads = [threading.Thread(target=work) for _ in range(cores())]
    start = time.perf_counter()
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return time.perf_counter() - start


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def busy() -> float:
    """Seconds of processor time that all processes have used since the machine started."""
    fields = Path("/proc/stat").read_text(encoding="utf-8").split("\n", 1)[0].split()[1:]
    values = [int(f) for f in fields[:8]]  # user, nice, system, idle, iowait, irq, softirq, steal
    return (sum(values) - values[3] - values[4]) / os.sysconf("SC_CLK_TCK")


def await_quiet(deadline: float) -> None:
    """Waits until other processes leave the processor alone for half a second. Args: deadline: of `time.monotonic`."""
    while time.monotonic() < deadline:
        start, used = time.perf_counter(), busy()
        time.sleep(0.5)
        if (busy() - used) / ((time.perf_counter() - start) * cores()) <= OTHERS:
            return


# -- worker processes -----------------------------------------------------------------------------------------------
class Worker:
    """A worker process and its pipe."""

    def __init__(self, job: dict[str, Any], log: Path, cache: Path) -> None:
        self.log = log
        environment = {"JCUTS_TUNE_SECONDS": "inf", **os.environ, "JCUTS_CACHE_DIR": str(cache), "JAX_PLATFORMS": "cpu"}
        environment["PYTHONPATH"] = str(ROOT)
        command = [sys.executable, str(COMMAND), "--worker", json.dumps(job)]
        with log.open("a", encoding="utf-8") as errors:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
            )

    def answer(self, limit: float) -> dict[str, Any]:
        """The next answer; a process that ends or says nothing for ``limit`` seconds is ended, and has failed."""
        watch = threading.Timer(limit, self.process.kill)
        watch.start()
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        late = not watch.is_alive()
        watch.cancel()
        if line:
            return json.loads(line)
        self.process.wait()
        tail = self.log.read_text(encoding="utf-8").strip().splitlines()[-1:] or [""]
        reason = f"no answer in {limit:.0f} s" if late else f"ended with {self.process.returncode}: {tail[0]}"
        return {"failed": reason[:400]}

    def turn(self, seconds: float, limit: float) -> dict[str, Any]:
        """Asks for a turn and says how quiet the machine was around it."""
        assert self.process.stdin is not None
        before, start, used = calibrate(), time.perf_counter(), busy()
        mine = time.process_time()
        try:
            self.process.stdin.write(json.dumps({"do": "turn", "seconds": seconds}) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:  # it has ended between two turns
            return {"failed": f"ended with {self.process.wait()} between two turns"}
        found = self.answer(limit)
        wall, total = time.perf_counter() - start, busy() - used
        others = max(0.0, total - found.get("cpu", 0.0) - (time.process_time() - mine)) / (wall * cores())
        time.sleep(SETTLE)
        return found | {"calibration": [before, calibrate()], "others": others}

    def end(self) -> None:
        """Ends the process."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
