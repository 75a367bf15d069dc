"""Files that cannot be written, and models that are none, are one clear line before anything is searched."""

from __future__ import annotations

import pytest

from jcuts.cli import output_files
from jcuts.cli.main import main

PLAN = ["plan", "--cluster", "dgx-a100", "--gpus", "8"]


def refused(capsys, *arguments):
    assert main(list(arguments)) == 2
    told = capsys.readouterr()
    assert told.out == "" and told.err.startswith("jcuts: ") and told.err.count("\n") == 1
    return told.err


@pytest.mark.parametrize("option", ["--html", "--json"])
@pytest.mark.parametrize(("where", "why"), [("none/page", "there is no folder"), (".", "it is a folder")])
def test_a_plan_that_cannot_be_written_is_not_searched(capsys, tmp_path, monkeypatch, option, where, why):
    monkeypatch.setattr("jcuts.cli.plan._workload", lambda *_: pytest.fail("it was searched"), raising=False)
    assert why in refused(capsys, *PLAN, "--model", "llama3-70b", option, str(tmp_path / where))


def test_no_permission(monkeypatch, tmp_path, capsys):
    (tmp_path / "old.json").write_text("")
    monkeypatch.setattr(output_files.os, "access", lambda *_: False)
    for name in ("old.json", "new.json"):
        assert "permission denied" in refused(capsys, *PLAN, "--model", "llama3-70b", "--json", str(tmp_path / name))


@pytest.mark.parametrize("prefix", ["./", "", "folder/../"])
def test_a_model_in_a_file_by_its_path(capsys, tmp_path, monkeypatch, prefix):
    (tmp_path / "folder").mkdir()
    (tmp_path / "net_in_a_file.py").write_text("def net(x):\n    return x\n")
    monkeypatch.chdir(tmp_path)
    assert "must be a function of no arguments" in refused(capsys, *PLAN, "--model", f"{prefix}net_in_a_file.py:net")


@pytest.mark.parametrize("option", ["--html", "--json"])
def test_an_explanation_that_cannot_be_written_is_not_made(capsys, tmp_path, monkeypatch, option):
    (tmp_path / "explained.py").write_text("def fn():\n    raise SystemExit('it was called')\n")
    monkeypatch.chdir(tmp_path)
    told = refused(capsys, "explain", "explained:fn", option, str(tmp_path / "none" / "page"))
    assert "there is no folder" in told
