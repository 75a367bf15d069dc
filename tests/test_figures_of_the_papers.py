"""The page of all figures and tables of the source documents: no row is missing, scripts and results exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from jcuts.cli.main import COMMANDS

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "figures_of_the_papers.md"
STATES = {"shown", "in part", "published only", "impossible here"}


def tables(chapter: str, *counts: int) -> list[str]:
    return [f"{chapter} {n}.{k}" for n, count in enumerate(counts, 1) for k in range(1, count + 1)]


def numbered(kind: str, count: int, *, roman: bool = False) -> list[str]:
    return [f"{kind} {('I', 'II', 'III', 'IV', 'V', 'VI')[k - 1] if roman else k}" for k in range(1, count + 1)]


EXPECTED = {
    "The thesis (DeepCuts, BigCuts)": tables("Table", 0, 1, 7, 3, 6) + tables("Figure", 0, 0, 4, 4, 4),
    "The course report (MLP)": numbered("Figure", 4) + numbered("Table", 3),
    "mu-cuDNN, first version": numbered("Table", 1, roman=True) + numbered("Figure", 14),
    "mu-cuDNN, final version": numbered("Table", 6, roman=True) + numbered("Figure", 13),
}


def rows() -> dict[str, list[list[str]]]:
    """By chapter: the cells of every row below the heading of a table with six columns."""
    found: dict[str, list[list[str]]] = {}
    chapter = ""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            chapter = line.removeprefix("## ")
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if line.startswith("|") and len(cells) == 6 and cells[0] != "number" and not cells[0].startswith("-"):
            found.setdefault(chapter, []).append(cells)
    return found


ROWS = [(chapter, *cells) for chapter, found in rows().items() for cells in found]


def test_every_figure_and_table_has_its_row():
    assert {chapter: [cells[0] for cells in found] for chapter, found in rows().items()} == EXPECTED


@pytest.mark.parametrize("row", ROWS, ids=[f"{row[0][:12]}, {row[1]}" for row in ROWS])
def test_a_row_has_a_state_and_what_it_names_exists(row):
    _, number, shows, ours, command, results, state = row
    assert state in STATES and shows and ours
    assert command or state in ("published only", "impossible here"), f"{number} is {state} without a command"
    if command:
        words = shlex.split(command.strip("`"))
        if words[0] == "jcuts":
            assert words[1] in COMMANDS
        elif words[0] == "python":
            assert (ROOT / words[1]).is_file()
        else:
            assert words[0] == "pytest" and all((ROOT / word).exists() for word in words[1:])
        for word in words:
            if word.startswith("benchmarks/"):
                assert (ROOT / word).exists(), word
    for name in re.findall(r"`([^`]+)`", results):
        assert (ROOT / "benchmarks" / "results" / name).exists(), name
    for link in re.findall(r"\]\(([^)]+)\)", ours):
        assert (PAGE.parent / link).exists(), link
    for name in re.findall(r"`((?:jcuts|benchmarks|tests)/[^`]+)`", ours):
        assert (ROOT / name).exists(), name
