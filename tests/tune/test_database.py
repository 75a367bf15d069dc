"""The tuning database: round trips, damage, two writers, kill -9, no space, no permission."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from pathlib import Path

import pytest

from jcuts.base.errors import CacheError
from jcuts.tune.choice import Choice, Measurement, Rejection
from jcuts.tune.database import Store

ROOT = Path(__file__).resolve().parents[2]
WRITER = """
import sys
sys.path.insert(0, {root!r})
from jcuts.tune.choice import Choice, Measurement
from jcuts.tune.database import Store
store = Store({path!r}, device="cpu", versions="v1")
for i in range({count}):
    times = tuple(Measurement(f"k{{j}}", 1e-3 + i, 1e-3, 2e-3, 5, "loop") for j in range(20))
    store.put(Choice(f"{prefix}{{i}}", "k0", "d", "measured", times))
    print(i, flush=True)
"""


def make_choice(problem: str = "p", seconds: float = 1e-3) -> Choice:
    return Choice(
        problem,
        "k0",
        "digest0",
        "measured",
        (
            Measurement("k0", seconds, seconds, seconds, 7, "loop"),
            Measurement("xla", 2 * seconds, 1e-3, 3e-3, 7, "loop"),
        ),
        (Rejection("k1", "AccuracyRejected", "too far", {"error": 3.0}),),
        margin=0.02,
    )


def make_store(path: Path | None, device: str = "cpu", versions: str = "v1") -> Store:
    return Store(path, device=device, versions=versions)


def run_writer(path: Path, count: int, prefix: str = "p", preamble: str = "", **kwargs) -> subprocess.Popen:
    code = textwrap.dedent(preamble) + WRITER.format(root=str(ROOT), path=str(path), count=count, prefix=prefix)
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **kwargs
    )


def test_round_trip_in_another_store(tmp_path):
    path = tmp_path / "deep" / "tuning.db"
    choice = make_choice()
    make_store(path).put(choice)
    again = make_store(path)
    assert again.lookup("p") == choice
    assert again.errors == []
    assert choice.speedup == 2.0


def test_keys_hold_device_and_versions(tmp_path):
    path = tmp_path / "tuning.db"
    make_store(path).put(make_choice())
    assert make_store(path, device="other").lookup("p") is None
    assert make_store(path, versions="v2").lookup("p") is None
    assert len(make_store(path, device="other").ls()) == 1
    assert make_store(path, device="other").ls(all_devices=False) == []


def test_memory_only_store():
    store = make_store(None)
    before = store.generation()
    store.put(make_choice())
    assert store.lookup("p") == make_choice()
    assert store.generation() != before
    assert store.clear() == 1 and store.lookup("p") is None


def test_generation_sees_other_writers(tmp_path):
    path = tmp_path / "tuning.db"
    one, two = make_store(path), make_store(path)
    one.put(make_choice())
    before = one.generation()
    two.put(make_choice("q"))
    assert one.generation() != before


def test_measurements_and_rejections_are_rows(tmp_path):
    path = tmp_path / "tuning.db"
    make_store(path).put(make_choice())
    with contextlib.closing(sqlite3.connect(path)) as db, db:
        rows = db.execute("SELECT label, seconds, rejected FROM measurements ORDER BY label").fetchall()
    assert rows == [("k0", 1e-3, None), ("k1", None, "AccuracyRejected"), ("xla", 2e-3, None)]


def test_partitions(tmp_path):
    store = make_store(tmp_path / "t.db")
    assert store.partition("f") is None
    store.put_partition("f", {"levels": [[[0, 1], [2]]]})
    other = make_store(store.path)
    assert other.partition("f") == {"levels": [[[0, 1], [2]]]} and other.guard("f") is None
    assert [row.kind for row in other.ls()] == ["partition"]
    other.export(tmp_path / "out.json")
    third = make_store(tmp_path / "third.db")
    assert third.import_(tmp_path / "out.json") == 1
    assert third.partition("f") == {"levels": [[[0, 1], [2]]]}
    assert third.clear() == 1 and third.partition("f") is None


def test_guard_decisions(tmp_path):
    store = make_store(tmp_path / "tuning.db")
    assert store.guard("f") is None
    store.put_guard("f", {"keep": True, "ratio": 1.5})
    store.put_guard("f", {"keep": False})
    assert make_store(store.path).guard("f") == {"keep": False}


def test_export_import_merge(tmp_path):
    one, two = make_store(tmp_path / "1.db"), make_store(tmp_path / "2.db")
    one.put(make_choice("p", 1.0))
    time.sleep(0.01)
    two.put(make_choice("p", 2.0))  # newer
    two.put_guard("f", {"keep": True})
    assert one.export(tmp_path / "1.json") == 1
    assert two.export(tmp_path / "2.json") == 2
    assert json.loads((tmp_path / "1.json").read_text())["entries"][0]["value"]["winner"] == "k0"
    fresh = make_store(tmp_path / "3.db")
    assert fresh.merge([tmp_path / "2.json", tmp_path / "1.json"]) == 2
    assert fresh.lookup("p") == make_choice("p", 2.0)
    assert fresh.guard("f") == {"keep": True}
    assert fresh.import_(tmp_path / "1.json") == 0  # older entries do not win
    assert fresh.lookup("p") == make_choice("p", 2.0)


@pytest.mark.parametrize(
    "text",
    [
        "not json",
        "{}",
        '{"jcuts_tuning": 99, "entries": []}',
        '{"jcuts_tuning": 1, "entries": [{"kind": "choice"}]}',
        '{"jcuts_tuning": 1, "entries": [{"kind": "choice", "key": "p", "device": "d", "versions": "v", "created": 1, '
        '"value": {}}]}',
    ],
)
def test_bad_import_is_refused_and_changes_nothing(tmp_path, text):
    store = make_store(tmp_path / "tuning.db")
    store.put(make_choice())
    (tmp_path / "bad.json").write_text(text)
    with pytest.raises(CacheError):
        store.import_(tmp_path / "bad.json")
    assert [row.key for row in store.ls()] == ["p"]


def test_import_of_a_missing_file(tmp_path):
    with pytest.raises(CacheError) as caught:
        make_store(None).import_(tmp_path / "none.json")
    assert caught.value.values["path"].endswith("none.json")


@pytest.mark.parametrize("damage", ["garbage", "truncated", "foreign version", "foreign application", "flipped"])
def test_damaged_database_is_moved_aside(tmp_path, damage, caplog):
    path = tmp_path / "tuning.db"
    first = make_store(path)
    for i in range(50):
        first.put(make_choice(f"p{i}"))
    data = bytearray(path.read_bytes())
    if damage == "garbage":
        path.write_bytes(b"this is not a database at all" * 100)
    elif damage == "truncated":
        path.write_bytes(data[: len(data) // 2])
    elif damage == "flipped":
        data[4096:8192] = b"\xff" * 4096
        path.write_bytes(data)
    else:
        with contextlib.closing(sqlite3.connect(path)) as db, db:
            db.execute("PRAGMA user_version = 77" if damage == "foreign version" else "PRAGMA application_id = 5")
        data = bytearray(path.read_bytes())
    before = path.read_bytes()
    store = make_store(path)
    assert store.lookup("p0") is None
    store.put(make_choice("new"))
    assert make_store(path).lookup("new") == make_choice("new")
    aside = [p for p in tmp_path.iterdir() if "aside" in p.name]
    assert len(aside) == 1 and aside[0].read_bytes() == before
    assert len(store.errors) == 1 and isinstance(store.errors[0], CacheError)
    assert "moved to" in caplog.text


def test_damage_while_open(tmp_path):
    path = tmp_path / "tuning.db"
    store = make_store(path)
    store.put(make_choice())
    path.write_bytes(b"garbage" * 1000)
    store.put(make_choice("q"))
    assert store.lookup("q") == make_choice("q")
    assert make_store(path).lookup("q") == make_choice("q")


def test_empty_file_is_a_fresh_database(tmp_path):
    path = tmp_path / "tuning.db"
    path.touch()
    store = make_store(path)
    assert store.lookup("p") is None
    store.put(make_choice())
    assert make_store(path).lookup("p") == make_choice()
    assert store.errors == []


def test_edited_row(tmp_path):
    path = tmp_path / "tuning.db"
    store = make_store(path)
    store.put(make_choice())
    with contextlib.closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE choices SET choice = '{\"winner\": 3}'")
    assert store.lookup("p") is None
    assert "not a tuning choice" in store.errors[0].message


def test_unusable_folder_falls_back_to_memory(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    store = make_store(tmp_path / "file" / "tuning.db")
    for i in range(3):
        store.put(make_choice(f"p{i}"))
    assert store.lookup("p1") == make_choice("p1")
    assert len([r for r in caplog.records if "memory only" in r.message]) == 1


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs root to become another user")
def test_read_only_database_is_still_read(request):
    # Not `tmp_path`: pytest's folders are root's alone, and another user has to get at the file.
    folder = Path(tempfile.mkdtemp(prefix="jcuts-read-only-"))
    request.addfinalizer(lambda: shutil.rmtree(folder))
    path = folder / "tuning.db"
    make_store(path).put(make_choice("old"))
    os.chmod(path, 0o444)
    os.chmod(folder, 0o555)
    code = f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
from jcuts.tune.choice import Choice
from jcuts.tune.database import Store
os.setuid(65534)
store = Store({str(path)!r}, device="cpu", versions="v1")
assert store.lookup("old").winner == "k0"
store.put(Choice("new", "k0", "d", "measured"))
assert store.lookup("new").winner == "k0"
assert len(store.errors) == 1, store.errors
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "memory only" in done.stderr
    assert make_store(path).lookup("new") is None


def test_full_disk_keeps_the_old_entries(tmp_path):
    path = tmp_path / "tuning.db"
    make_store(path).put(make_choice("old"))
    limit = f"""
    import resource
    resource.setrlimit(resource.RLIMIT_FSIZE, ({64 * 1024}, {64 * 1024}))
    """
    writer = run_writer(path, 100, preamble=limit)
    out, err = writer.communicate(timeout=60)
    assert writer.returncode == 0, err
    assert out.split()[-1] == "99"  # went on to the end
    assert err.count("memory only") == 1
    store = make_store(path)
    assert store.lookup("old") == make_choice("old")
    assert store.errors == []
    store.put(make_choice("after"))
    assert make_store(path).lookup("after") == make_choice("after")


def test_two_processes_and_threads_write(tmp_path):
    path = tmp_path / "tuning.db"
    writers = [run_writer(path, 10, prefix=f"w{n}_") for n in range(2)]
    store = make_store(path)
    threads = [
        threading.Thread(target=lambda n=n: [store.put(make_choice(f"t{n}_{i}")) for i in range(5)]) for n in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for writer in writers:
        assert writer.communicate(timeout=60) and writer.returncode == 0
    assert len(make_store(path).ls()) == 30
    assert store.errors == []


def test_kill_nine_loses_nothing_committed(tmp_path):
    path = tmp_path / "tuning.db"
    for round_ in range(5):
        writer = run_writer(path, 10_000, prefix=f"r{round_}_")
        assert writer.stdout is not None
        last = -1
        for line in writer.stdout:
            last = int(line)
            if last >= 3 * round_ + 1:
                break
        writer.send_signal(signal.SIGKILL)
        writer.communicate(timeout=60)
        store = make_store(path)
        keys = {row.key for row in store.ls()}
        assert {f"r{round_}_{i}" for i in range(last + 1)} <= keys
        assert store.errors == []
