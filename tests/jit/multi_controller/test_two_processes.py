"""Two processes of one job, two host devices each: one tunes, both run the same program, with plain JAX's losses."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

SCRIPT = Path(__file__).with_name("training_process.py")
CASES = ("data parallel", "sharded head")


def run(folder: Path, environments: list[Mapping[str, str]]) -> list[dict[str, Any]]:
    """What the processes of a job wrote. Args: environments: variables of each, beside this process' own."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    common = {**os.environ, "JCUTS_TUNE_SECONDS": "inf", "JCUTS_MAX_CANDIDATES": "1", "JCUTS_PROGRESS": "0"}
    jobs = []
    for rank, more in enumerate(environments):
        command = [sys.executable, str(SCRIPT), str(rank), str(len(environments)), str(port), str(folder)]
        mine = {"JCUTS_CACHE_DIR": str(folder / f"cache{rank}"), **more}
        with (folder / f"{rank}.log").open("w") as log:
            jobs.append(subprocess.Popen(command, stdout=log, stderr=log, env={**common, **mine}))
    try:
        for job in jobs:
            job.wait(timeout=300)
    finally:
        for job in jobs:
            job.kill()
            job.wait()
    logs = "\n".join((folder / f"{rank}.log").read_text()[-3000:] for rank in range(len(jobs)))
    assert [job.returncode for job in jobs] == [0] * len(jobs), logs
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(len(jobs))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the processes that agree have their databases."""
    return tmp_path_factory.mktemp("agree")


@pytest.fixture(scope="module")
def both(folder: Path) -> list[dict[str, Any]]:
    """Two processes that agree."""
    return run(folder, [{}, {}])


@pytest.mark.parametrize("case", CASES)
def test_all_processes_run_the_same_program_with_kernels(both: list[dict[str, Any]], case: str) -> None:
    first, second = (found[case] for found in both)
    assert first["chosen"] == second["chosen"] == "jcuts"
    assert first["kernels"] == second["kernels"] > 0
    assert first["collectives"] == second["collectives"] != []
    assert first["jcuts"] == second["jcuts"]  # to the last bit


@pytest.mark.parametrize("case", CASES)
def test_losses_are_those_of_plain_jax(both: list[dict[str, Any]], case: str) -> None:
    for found in both:
        np.testing.assert_allclose(found[case]["jcuts"], found[case]["plain"], rtol=2e-5)
        assert found[case]["plain"][-1] < found[case]["plain"][0]


def test_one_process_tunes(both: list[dict[str, Any]]) -> None:
    assert both[0]["measured"] > 0
    assert both[1]["measured"] == 0
    assert both[0]["devices"] != both[1]["devices"]


@pytest.mark.usefixtures("both")
def test_processes_that_cannot_agree_run_plain_xla(folder: Path, tmp_path: Path) -> None:
    tuned = {"JCUTS_CACHE_DIR": str(folder / "cache0")}
    found = run(tmp_path, [tuned, {"JCUTS_DISABLE": "1"}])
    for case in CASES:
        for mine in found:
            assert mine[case]["chosen"] == "xla"
            assert "different programs" in mine[case]["reason"]
            assert mine[case]["kernels"] == 0
            assert mine[case]["jcuts"] == mine[case]["plain"]
