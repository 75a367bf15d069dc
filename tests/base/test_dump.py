"""JCUTS_DUMP: numbering, folders, headers, and faults that never stop a program."""

from __future__ import annotations

import json

from jcuts.base import knobs
from jcuts.base.dump import open_dump


def test_off_writes_nothing_and_calls_nothing():
    dump = open_dump("f")
    assert not dump.enabled
    assert dump.stage("jaxpr", lambda: 1 / 0) is None  # type: ignore[arg-type,return-value]


def test_stages_are_numbered_and_say_what_made_them(tmp_path):
    with knobs.scope(dump=tmp_path / "d"):
        dump = open_dump("train_step")
        dump.stage("jaxpr", "{ lambda ; }", seconds=0.0125)
        dump.stage("kernel", lambda: "define void @k()", suffix="ll")
        dump.stage("program", json.dumps({"a": 1}), suffix="json")
    folder = tmp_path / "d" / "train_step"
    assert sorted(p.name for p in folder.iterdir()) == ["01_jaxpr.txt", "02_kernel.ll", "03_program.json"]
    assert (folder / "01_jaxpr.txt").read_text() == "# stage jaxpr of train_step, 12.500 ms\n{ lambda ; }\n"
    assert (folder / "02_kernel.ll").read_text().startswith("; stage kernel of train_step")
    assert json.loads((folder / "03_program.json").read_text()) == {"a": 1}


def test_the_same_function_again_gets_its_own_folder(tmp_path):
    with knobs.scope(dump=tmp_path):
        for _ in range(3):
            open_dump("f").stage("jaxpr", "x")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["f", "f-2", "f-3"]


def test_names_are_never_paths(tmp_path):
    with knobs.scope(dump=tmp_path):
        open_dump("../../<lambda> at 0x1").stage("a/b", "x")
        open_dump("///").stage("s", "x")
    assert sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*.txt")) == [
        "function/01_s.txt",
        "lambda_at_0x1/01_a_b.txt",
    ]


def test_an_unusable_directory_is_logged(tmp_path, caplog):
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    with knobs.scope(dump=blocked):
        assert not open_dump("f").enabled
    with knobs.scope(dump=blocked / "below"):
        assert not open_dump("f").enabled
    assert caplog.text.count("JCUTS_DUMP") == 2


def test_a_disk_that_fills_up_is_logged(tmp_path, caplog):
    with knobs.scope(dump=tmp_path):
        dump = open_dump("f")
        (tmp_path / "f").rmdir()
        assert dump.stage("jaxpr", "x") is None
    assert "not dumped" in caplog.text
