"""Golden files: ``golden("name.txt", text)`` compares with tests/golden/name.txt; ``--update-golden`` rewrites it."""

from __future__ import annotations

import difflib
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite the files of tests/golden")


@pytest.fixture
def golden(request):
    """Compares a text with its golden file, or rewrites the file with ``--update-golden``."""

    def check(name: str, text: str) -> None:
        path = FOLDER / name
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            return
        if not path.exists():
            pytest.fail(f"{path} does not exist: run pytest --update-golden and read what it writes")
        wanted = path.read_text(encoding="utf-8")
        if text != wanted:
            lines = difflib.unified_diff(wanted.splitlines(), text.splitlines(), str(path), "now", lineterm="")
            pytest.fail("\n".join(["differs from its golden file (pytest --update-golden accepts it)", *lines]))

    return check
