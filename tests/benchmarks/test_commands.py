"""Every benchmark starts as a plain command from any folder: imports and parser of all of them, in one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = sorted(p for p in (ROOT / "benchmarks").rglob("*.py") if "__main__" in p.read_text(encoding="utf-8"))
WITHOUT_PARSER = {
    "differential/transform_matrix.py",
    "microbatch/step_processes.py",
    "vecmath/accuracy.py",
    "vecmath/fit_polynomials.py",
}
"""Scripts without options, or whose arguments are positions: only imported."""

# As `python FILE --help` does it: the script's folder first in the path, the repository's root not in it.
EACH = """
import contextlib, io, json, os, runpy, sys
before = [p for p in sys.path[1:] if p]
for script, parsed in json.loads(sys.argv[1]):
    for name in [n for n in sys.modules if n.split(".")[0] in ("benchmarks", "tests")]:
        del sys.modules[name]
    sys.path[:], sys.argv = [os.path.dirname(script), *before], [script, "--help"]
    text, status = io.StringIO(), 0
    try:
        with contextlib.redirect_stdout(text):
            runpy.run_path(script, run_name="__main__" if parsed else "imported")
    except SystemExit as end:
        status = end.code
    except BaseException as error:
        status = f"{type(error).__name__}: {error}"
    print("RESULT", json.dumps([script, status or 0, text.getvalue().startswith("usage: ")]), flush=True)
"""


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """By script: status and whether it printed its usage."""
    asked = [(str(p), p.relative_to(ROOT / "benchmarks").as_posix() not in WITHOUT_PARSER) for p in COMMANDS]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", EACH, json.dumps(asked)],
        capture_output=True,
        text=True,
        cwd=tmp_path_factory.mktemp("elsewhere"),
        env=environment,
        check=False,
    )
    rows = [json.loads(line.removeprefix("RESULT ")) for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    return {script: (status, usage) for script, status, usage in rows} | {"stderr": done.stderr}


@pytest.mark.parametrize("script", COMMANDS, ids=lambda p: p.relative_to(ROOT / "benchmarks").as_posix())
def test_help(ended, script):
    name = script.relative_to(ROOT / "benchmarks").as_posix()
    assert str(script) in ended, ended["stderr"]
    status, usage = ended[str(script)]
    if isinstance(status, str) and status.startswith("ModuleNotFoundError: No module named 'mpmath'"):
        pytest.skip(status)
    assert status == 0
    assert usage == (name not in WITHOUT_PARSER)


def test_there_are_commands():
    assert len(COMMANDS) >= 40
    assert {p.relative_to(ROOT / "benchmarks").as_posix() for p in COMMANDS} >= WITHOUT_PARSER
