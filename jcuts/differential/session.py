"""Parent side of the child process that runs programs: requests with a time limit; crashes and hangs are answers."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jcuts.base.errors import WorkerFailed
from jcuts.differential import program_text
from jcuts.differential.child import ERROR
from jcuts.trace import jaxapi
from jcuts.tune.parent.worker_environment import environment
from jcuts.tune.verify.inputs import save

CRASHED = "crashes"
HUNG = "hangs"
NO_REFERENCE = "no reference"
"""The child died, or took too long, before the run that was asked for: nothing is known of it."""
START_SECONDS = 120
"""Time that a child may take to import JAX and to trace the program."""


def write_folder(
    folder: Path,
    closed: jaxapi.Closed,
    sets: Sequence[tuple[str, Sequence[np.ndarray]]],
    *,
    platform: str,
    tolerance: float,
    refused: frozenset[str],
) -> None:
    """Writes what a child reads: the program's source, its constants, sets of inputs, and settings of this process."""
    text, constants = program_text.source_of(closed)
    (folder / "program.py").write_text(text, encoding="utf-8")
    for k, value in enumerate(constants):
        save(folder / f"constant{k}.npy", value)
    for n, (_, inputs) in enumerate(sets):
        for k, value in enumerate(inputs):
            save(folder / f"set{n}.in{k}.npy", value)
    about = {
        "x64": jaxapi.x64_enabled(),
        "matmul_precision": jax.config.values["jax_default_matmul_precision"],
        "types": [(tuple(v.aval.shape), v.aval.dtype.name) for v in closed.jaxpr.invars],
        "constants": [(c.shape, c.dtype.name) for c in constants],
        "primitives": program_text.names_of(closed),
        "platform": platform,
        "tolerance": tolerance,
        "refused": sorted(refused),
        "kinds": [kind for kind, _ in sets],
    }
    (folder / "about.json").write_text(json.dumps(about), encoding="utf-8")


class Session:
    """Children that run the program of a folder, one after another: a new one after a crash or a hang.

    Args: folder: of `write_folder`; limit: seconds that a run may take, compilation included; variables: of the
    environment, beside those of this process.
    """

    def __init__(self, folder: Path, platform: str, limit: float, variables: Mapping[str, str] | None = None) -> None:
        self.folder, self.limit = folder, limit
        self.environment = {**environment(platform), **(variables or {})}
        self.children = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._answers: Any = None
        self._pending = b""

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def ask(self, way: str, *, limit: float | None = None, **request: Any) -> dict[str, Any]:
        """The verdict of a run, or what became of it.

        Args: request: ``window``, ``options``, ``tune``, ``save``, ``compile`` (see `differential.child`).
        Returns: ``status`` of `differential.judge`, or ``error``, ``crashes``, ``hangs``, ``no reference``.
        """
        self._start()
        process = self._process
        assert process is not None and process.stdin is not None  # just started
        limit = self.limit if limit is None else limit
        stage: dict[str, Any] = {}
        with contextlib.suppress(BrokenPipeError):  # its end is read below
            process.stdin.write((json.dumps({"way": way, **request}) + "\n").encode())
            process.stdin.flush()
        deadline = time.monotonic() + START_SECONDS + limit
        while True:
            message = self._read(deadline)
            if message is None:
                return self._end(stage, limit)
            if "answer" in message:
                return message["answer"]
            if message["stage"] == "run" and stage.get("stage") != "run":
                deadline = time.monotonic() + limit
            stage = message

    def _start(self) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        self._stop()
        here, there = os.pipe()
        command = [sys.executable, "-m", "jcuts.differential.child", str(self.folder), str(there)]
        with (self.folder / "stderr.txt").open("wb") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=errors,
                stderr=errors,
                pass_fds=(there,),
                env=self.environment,
                start_new_session=True,
            )
        os.close(there)
        self._answers, self._pending = here, b""
        self.children += 1
        message = self._read(time.monotonic() + START_SECONDS)
        if message is None or message.get("stage") != "ready":
            with contextlib.suppress(subprocess.TimeoutExpired):  # it may be writing its last words
                self._process.wait(timeout=1)
            self._stop()
            raise WorkerFailed(f"a process to run the program in did not start: {self._last_words()}")

    def _read(self, deadline: float) -> dict[str, Any] | None:
        """The next message; None where the child has died or the time is up."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._answers, selectors.EVENT_READ)
            while b"\n" not in self._pending:
                left = deadline - time.monotonic()
                if left <= 0 or not selector.select(left):
                    return None
                data = os.read(self._answers, 1 << 16)
                if not data:
                    return None
                self._pending += data
        line, _, self._pending = self._pending.partition(b"\n")
        return json.loads(line)

    def _end(self, stage: Mapping[str, Any], limit: float) -> dict[str, Any]:
        """What a child that gives no answer any more means."""
        process = self._process
        assert process is not None  # it was asked
        ran = stage.get("stage") == "run"
        place = {"equation": stage["equation"]} if "equation" in stage else {}
        try:
            status = process.wait(timeout=1)  # a crash closes the pipe before the status is there
        except subprocess.TimeoutExpired:
            self._stop()
            return {"status": HUNG if ran else NO_REFERENCE, "message": f"hangs after {limit:g} s", **place}
        self._stop()
        name = signal.Signals(-status).name if status < 0 else f"exit status {status}"
        return {"status": CRASHED if ran else NO_REFERENCE, "message": f"the process ends with {name}", **place}

    def _last_words(self) -> str:
        text = (self.folder / "stderr.txt").read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return text[-1] if text else "it said nothing"

    def _stop(self) -> None:
        if self._process is not None:
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            if self._process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    self._process.stdin.close()
            os.close(self._answers)
            self._process = None


__all__ = ["CRASHED", "ERROR", "HUNG", "NO_REFERENCE", "Session", "write_folder"]
