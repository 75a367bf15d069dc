"""Progress over several processes: what is left to run, and what a process that dies leaves behind."""

from __future__ import annotations

import json
import sys
import time

from benchmarks.random_programs import shards

WORKER = """
import json, os, pathlib, sys
items = json.loads(pathlib.Path(sys.argv[2]).read_text())
out = pathlib.Path(sys.argv[4])
marker = out.with_suffix(".running")
for seed, transform in items:
    died = marker.exists() and marker.read_text() == str(seed)
    marker.write_text(str(seed))
    if seed == 5 and not died:
        os._exit(9)
    row = {"seed": seed, "transform": transform, "status": "error" if died else "ok"}
    with out.open("a") as file:
        file.write(json.dumps(row) + "\\n")
marker.unlink(missing_ok=True)
"""


def row(seed, status="ok", transform="plain"):
    return {"seed": seed, "transform": transform, "status": status}


def test_what_is_left():
    items = [(1, "plain"), (2, "plain"), (2, "grad"), (3, "plain")]
    rows = [row(1, "mismatch"), row(2), row(3, "error"), row(3)]
    assert shards.pending(items, rows, retry=False) == [(2, "grad")]
    assert shards.pending(items, rows, retry=True) == [(1, "plain"), (2, "grad")]


def test_files_of_any_number_of_shards(tmp_path):
    base = tmp_path / "run.jsonl"
    for k in (0, 11):
        shards.shard_file(base, k).write_text(json.dumps(row(k)) + '\n{"seed": 1, "tra')
    assert [r["seed"] for path in shards.files_of(base) for r in shards.rows_of(path)] == [0, 11]
    base.write_text(json.dumps(row(7)) + "\n")
    assert shards.files_of(base)[0] == base and len(shards.files_of(base)) == 3
    assert shards.rows_of(None) == [] and shards.rows_of(tmp_path / "none.jsonl") == []


def test_a_row_behind_a_line_that_was_cut_off_counts(tmp_path):
    path = tmp_path / "run.jsonl"
    for text in ("", json.dumps(row(1)) + "\n" + '{"seed": 2, "tra'):
        path.write_text(text)
        with shards.appending(path) as file:
            file.write(json.dumps(row(3, "mismatch")) + "\n")
        assert shards.rows_of(path)[-1] == row(3, "mismatch")
    assert len(shards.rows_of(path)) == 2


def test_a_process_that_dies_is_started_again(tmp_path, monkeypatch):
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    monkeypatch.setattr(sys, "argv", [str(script)])
    monkeypatch.setattr(shards, "POLL_SECONDS", 0.05)
    base = tmp_path / "run.jsonl"
    shards.shard_file(base, 1).write_text(json.dumps(row(3, "mismatch")) + "\n")  # is run again
    shards.run_shards([(seed, "plain") for seed in range(9)], base, 2)
    every = [r for path in shards.files_of(base) for r in shards.rows_of(path)]
    assert len(every) == 10
    rows = {r["seed"]: r["status"] for r in every}
    assert rows == {seed: "error" if seed == 5 else "ok" for seed in range(9)}
    assert not list(tmp_path.glob("*.items")) and not list(tmp_path.glob("*.running"))


def test_a_process_that_cannot_start_is_not_started_for_ever(tmp_path, monkeypatch, capsys):
    script = tmp_path / "worker.py"
    script.write_text("raise SystemExit(3)")
    monkeypatch.setattr(sys, "argv", [str(script)])
    monkeypatch.setattr(shards, "POLL_SECONDS", 0.05)
    base = tmp_path / "run.jsonl"
    shards.marker_of(shards.shard_file(base, 0)).write_text("4 plain")
    shards.run_shards([(4, "plain")], base, 1)
    assert "status 3" in capsys.readouterr().out


def test_what_is_stuck_at_the_end_of_the_time_is_told(tmp_path, monkeypatch):
    script = tmp_path / "worker.py"
    script.write_text(
        "import sys, time\nfrom pathlib import Path\n"
        "Path(sys.argv[4]).with_suffix('.running').write_text('7 grad')\ntime.sleep(600)\n"
    )
    monkeypatch.setattr(sys, "argv", [str(script)])
    monkeypatch.setattr(shards, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(shards, "GRACE_SECONDS", 0.0)
    assert shards.run_shards([(7, "grad")], tmp_path / "run.jsonl", 1, time.time()) == ["7 grad"]


def worker(tmp_path, monkeypatch, text):
    """Programs of one shard; a process that finds a marker says so."""
    script = tmp_path / "worker.py"
    script.write_text(
        "import json, os, sys, time\nfrom pathlib import Path\nout = Path(sys.argv[4])\n"
        "marker = out.with_suffix('.running')\nfound = marker.read_text() if marker.exists() else ''\n" + text
    )
    monkeypatch.setattr(sys, "argv", [str(script)])
    monkeypatch.setattr(shards, "POLL_SECONDS", 0.05)
    return tmp_path / "run.jsonl"


LATER = """
time.sleep(0.6)
with out.open('a') as file:
    file.write(json.dumps({'seed': 7, 'found': found}) + '\\n')
marker.unlink(missing_ok=True)
"""


def test_who_was_cut_off_is_not_who_killed_its_process(tmp_path, monkeypatch):
    base = worker(tmp_path, monkeypatch, "marker.write_text('7 grad')\ntime.sleep(600)\n")
    monkeypatch.setattr(shards, "GRACE_SECONDS", 0.0)
    assert shards.run_shards([(7, "grad")], base, 1, time.time()) == ["7 grad"]
    base = worker(tmp_path, monkeypatch, LATER)
    assert shards.run_shards([(7, "grad")], base, 1) == []
    assert [r["found"] for r in shards.rows_of(shards.shard_file(base, 0))] == [""]


def test_who_dies_when_the_time_is_over_is_told(tmp_path, monkeypatch):
    died = "marker.unlink(missing_ok=True) if found else (marker.write_text('7 grad'), time.sleep(0.3), os._exit(9))\n"
    base = worker(tmp_path, monkeypatch, died)
    assert shards.run_shards([(7, "grad")], base, 1, time.time()) == ["7 grad"]
    assert shards.marker_of(shards.shard_file(base, 0)).read_text() == "7 grad"  # the next run looks who is to blame


def test_a_process_that_follows_one_that_was_stuck_has_time(tmp_path, monkeypatch):
    stuck = "if not found:\n    marker.write_text('7 grad')\n    time.sleep(600)\n"
    base = worker(tmp_path, monkeypatch, stuck + LATER)
    monkeypatch.setattr(shards, "STUCK_SECONDS", 2.0)
    shards.run_shards([(7, "grad")], base, 1)
    assert [r["found"] for r in shards.rows_of(shards.shard_file(base, 0))] == ["7 grad"]
