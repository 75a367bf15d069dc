"""Sizes and shapes: functions of at most 80 lines, files of at most 400, one constant per assignment, lint exceptions.

Every list of exceptions has exactly those that are too large today, so that it only shrinks.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import subprocess
import sys
import tomllib
from collections import defaultdict
from pathlib import Path

import pytest

from scripts.import_graph import long_files, long_functions, read_graph

ROOT = Path(__file__).resolve().parents[1]
LONG_FUNCTIONS = {"jcuts.jit.end_to_end_benchmark.benchmark_variants"}
LONG_FILES: set[str] = set()
RULES = ("C901", "PLR0913", "PLR0915")
"""Complexity, arguments and statements of a function."""


def test_functions_have_at_most_80_lines():
    assert {name for name, _ in long_functions(read_graph())} == LONG_FUNCTIONS


def test_files_have_at_most_400_lines():
    assert {name for name, _ in long_files(read_graph())} == LONG_FILES


def test_one_assignment_defines_one_constant():
    found = []
    for folder in ("jcuts", "benchmarks", "scripts"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for statement in ast.parse(path.read_text(encoding="utf-8")).body:
                if isinstance(statement, ast.Assign):
                    several = len(statement.targets) > 1 or isinstance(statement.targets[0], ast.Tuple)
                    found += [f"{path.relative_to(ROOT)}:{statement.lineno}"] * several
    assert found == []


@pytest.mark.skipif(importlib.util.find_spec("ruff") is None, reason="the linter is not installed")
def test_exceptions_of_the_linter_are_needed():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["ruff"]["lint"]
    excepted = {file: set(rules) for file, rules in settings["per-file-ignores"].items()}
    assert all(rules <= set(RULES) for rules in excepted.values())
    limits = {
        "lint.mccabe.max-complexity": settings["mccabe"]["max-complexity"],
        "lint.pylint.max-args": settings["pylint"]["max-args"],
        "lint.pylint.max-statements": settings["pylint"]["max-statements"],
    }
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--isolated", "--no-cache", "--exit-zero", "--output-format", "json"]
        + ["--extend-exclude", "build,dist,.venv", "--select", ",".join(RULES)]
        + [word for name, limit in limits.items() for word in ("--config", f"{name}={limit}")]
        + ["jcuts", "benchmarks", "scripts", "tests"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    needed: dict[str, set[str]] = defaultdict(set)
    for found in json.loads(done.stdout):
        needed[Path(found["filename"]).relative_to(ROOT).as_posix()].add(found["code"])
    assert excepted == dict(needed)
