"""docs/where_to_add.md is what the tree says, and all that it names exists."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "where_to_add.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("where_to_add", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_path_exists(script: ModuleType) -> None:
    assert script.missing() == []


def test_every_module_has_a_docstring(script: ModuleType) -> None:
    assert script.undocumented() == []


def test_page_is_up_to_date(script: ModuleType) -> None:
    assert script.main(["--check"]) == 0


def test_check_fails_for_an_old_page(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = tmp_path / "where_to_add.md"
    old.write_text("# of another tree\n", encoding="utf-8")
    monkeypatch.setattr(script, "PAGE", old)
    assert script.main(["--check"]) == 1
    assert old.read_text(encoding="utf-8") == "# of another tree\n"
