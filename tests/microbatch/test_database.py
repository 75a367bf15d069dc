"""The benchmark database: keys, writers at the same time, kill -9, damage, foreign files and devices."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from jcuts.base.errors import CacheError, UsageError
from jcuts.microbatch.benchmark import benchmark
from jcuts.microbatch.database import SCHEMA, Database, Device
from jcuts.microbatch.errors import ForeignDeviceError, MissingTimesError
from jcuts.microbatch.network import Network, Use
from jcuts.microbatch.timings import MicroConfig
from tests.microbatch.cases import convolution

ROOT = Path(__file__).resolve().parents[2]
H200 = Device("NVIDIA H200", "580.1", "cuDNN 9.19.0")
V100 = Device("Tesla V100", "535.2", "cuDNN 8.9.7")

WRITER = """
import sys
sys.path.insert(0, {root!r})
from jcuts.microbatch.database import Database, Device
from jcuts.microbatch.timings import MicroConfig
from tests.microbatch.cases import convolution
device = Device("NVIDIA H200", "580.1", "cuDNN 9.19.0")
database = Database({path!r})
for batch in range({first}, {first} + {count}):
    database.record(device, convolution(), batch, [
        MicroConfig(batch, f"A{{k}}", "float32", 1e-6 * (batch + k), 100 * k) for k in range(20)])
    print(batch, flush=True)
"""


def writer(path: Path, first: int, count: int, preamble: str = "") -> subprocess.Popen:
    code = preamble + WRITER.format(root=str(ROOT), path=str(path), first=first, count=count)
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )


def micros(batch: int, scale: float = 1.0) -> list[MicroConfig]:
    return [
        MicroConfig(batch, "GEMM", "float32", 3e-6 * batch * scale, 0),
        MicroConfig(batch, "FFT", "float32", 1e-6 * batch * scale, 1000 * batch),
    ]


def network(*batches: int, name: str = "net") -> Network:
    return Network(name, tuple(Use(f"conv{k}", convolution(), batch) for k, batch in enumerate(batches)))


def test_round_trip_by_another_reader(tmp_path):
    database = Database(tmp_path / "deep" / "times.db")
    for batch in (1, 2, 4):
        database.record(H200, convolution(), batch, micros(batch))
    database.record(H200, convolution(), 8, [])  # searched, and nothing runs
    database.record_network(network(4, 2))
    again = Database(database.path)
    assert set(again.table(H200, convolution()).micros) == {m for b in (1, 2, 4) for m in micros(b)}
    assert again.missing(H200, convolution(), (8, 4, 3)) == (3,)
    assert again.networks() == (network(4, 2),) and again.network() == network(4, 2)
    assert again.devices() == (H200,) and again.errors == []


def test_new_times_replace_old_ones_whole(tmp_path):
    database = Database(tmp_path / "t.db")
    database.record(H200, convolution(), 2, micros(2))
    database.record(H200, convolution(), 2, micros(2, 2.0)[:1])
    assert database.table(H200, convolution()).micros == (micros(2, 2.0)[0],)


def test_keys_tell_devices_and_convolutions_apart(tmp_path):
    database = Database(tmp_path / "t.db")
    database.record(H200, convolution(), 2, micros(2))
    database.record(V100, convolution(), 2, micros(2, 5.0))
    assert (
        database.table(V100, convolution()).micros[0].seconds != database.table(H200, convolution()).micros[0].seconds
    )
    for other in (convolution("backward_data"), convolution(dtype="float16"), convolution(channels=16)):
        assert other.key != convolution().key
        with pytest.raises(MissingTimesError):
            database.table(H200, other)


def test_remarks_are_kept_and_replaced_with_the_times(tmp_path):
    path = tmp_path / "times.db"
    c = convolution()
    Database(path).record(H200, c, 4, micros(4), remarks={"memory": "1000", "xla": "it crashed"})
    Database(path).record(H200, c, 2, micros(2))
    again = Database(path)
    assert dict(again.remarks(H200, c, 4)) == {"memory": "1000", "xla": "it crashed"}
    assert not again.remarks(H200, c, 2) and not again.remarks(V100, c, 4)
    merged = Database(tmp_path / "all.db")
    merged.merge([path])
    assert merged.remarks(H200, c, 4)["memory"] == "1000"
    again.record(H200, c, 4, micros(4))
    assert not Database(path).remarks(H200, c, 4)


def test_times_that_lack_memory_are_measured_again_by_others(tmp_path):
    path, c = tmp_path / "times.db", convolution()
    database = Database(path)
    database.record(H200, c, 4, micros(4), remarks={"memory": "1000"})
    assert not database.missing(H200, c, (4,)), "this process has just tried"
    later = Database(path)
    assert later.missing(H200, c, (4,)) == later.missing(H200, c, (4,), limit=1000) == (4,)
    assert not later.missing(H200, c, (4,), limit=999)
    assert later.table(H200, c).sizes == (4,)


def test_a_file_without_remarks_gets_them(tmp_path):
    path, c = tmp_path / "times.db", convolution()
    Database(path).record(H200, c, 4, micros(4))
    with contextlib.closing(sqlite3.connect(path)) as db, db:
        db.execute("DROP TABLE remarks")
    db.close()
    database = Database(path)
    assert database.table(H200, c).sizes == (4,) and not database.remarks(H200, c, 4)
    database.record(H200, c, 2, micros(2), remarks={"xla": "why"})
    assert Database(path).remarks(H200, c, 2) == {"xla": "why"}


@pytest.mark.parametrize(
    "other",
    [
        Device("NVIDIA H100", "580.1", "cuDNN 9.19.0"),
        Device("NVIDIA H200", "590.0", "cuDNN 9.19.0"),
        Device("NVIDIA H200", "580.1", "cuDNN 9.20.0"),
    ],
)
def test_a_foreign_device_is_refused(tmp_path, other):
    database = Database(tmp_path / "t.db")
    database.record(H200, convolution(), 2, micros(2))
    with pytest.raises(ForeignDeviceError, match=r"cuDNN 9.19.0") as caught:
        database.table(other, convolution())
    assert caught.value.known == (str(H200),)
    assert database.missing(other, convolution(), (1, 2)) == (1, 2)  # a benchmark there starts from nothing


def test_devices_by_name(tmp_path):
    database = Database(tmp_path / "t.db")
    with pytest.raises(ForeignDeviceError, match="no times"):
        database.device()
    database.record(H200, convolution(), 2, micros(2))
    assert database.device() == database.device("h200") == H200
    database.record(V100, convolution(), 2, micros(2))
    assert database.device("V100") == V100
    with pytest.raises(ForeignDeviceError, match="more than one"):
        database.device()
    with pytest.raises(ForeignDeviceError, match="no times of 'H100'"):
        database.device("H100")


def test_in_memory():
    database = Database(None)
    database.record(H200, convolution(), 2, micros(2))
    database.record_network(network(2))
    assert set(database.table(H200, convolution()).micros) == set(micros(2))
    assert database.network("net") == network(2)
    with pytest.raises(MissingTimesError):
        database.network("other")


def test_merge_takes_the_newer(tmp_path):
    one, two = Database(tmp_path / "1.db"), Database(tmp_path / "2.db")
    one.record(H200, convolution(), 2, micros(2, 1.0))
    two.record(V100, convolution(), 2, micros(2, 3.0))
    time.sleep(0.01)
    two.record(H200, convolution(), 2, micros(2, 2.0))
    two.record_network(network(2))
    all_ = Database(tmp_path / "all.db")
    assert all_.merge([tmp_path / "2.db", tmp_path / "1.db"]) == 2
    assert set(all_.table(H200, convolution()).micros) == set(micros(2, 2.0))
    assert all_.merge([tmp_path / "1.db"]) == 0 and all_.network() == network(2)
    assert all_.devices() == (H200, V100)
    with pytest.raises(CacheError, match="no such file"):
        all_.merge([tmp_path / "none.db"])
    (tmp_path / "bad.db").write_text("not a database, but long enough to have a header of some kind" * 20)
    with pytest.raises(CacheError):
        all_.merge([tmp_path / "bad.db"])


def test_concurrent_writers_lose_nothing(tmp_path):
    path = tmp_path / "t.db"
    writers = [writer(path, 1 + 25 * k, 25) for k in range(4)]
    for process in writers:
        _, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
    found = Database(path).table(H200, convolution())
    assert found.sizes == tuple(range(1, 101)) and len(found.micros) == 2000


def test_threads_share_one_database(tmp_path):
    database = Database(tmp_path / "t.db")
    threads = [
        threading.Thread(
            target=lambda k=k: [
                database.record(H200, convolution(), k * 10 + i, micros(k * 10 + i)) for i in range(1, 11)
            ]
        )
        for k in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert database.table(H200, convolution()).sizes == tuple(range(1, 41))


def test_kill_9_keeps_what_was_reported(tmp_path):
    path = tmp_path / "t.db"
    reported = 0
    for attempt in range(4):
        process = writer(path, 1 + reported, 100_000)
        assert process.stdout is not None
        for _ in range(3 + 5 * attempt):
            reported = int(process.stdout.readline())
        os.kill(process.pid, signal.SIGKILL)
        rest = process.communicate()[0].split()
        reported = int(rest[-1]) if rest and rest[-1].isdigit() else reported
        database = Database(path)
        table = database.table(H200, convolution())
        assert len(table.sizes) >= reported and database.errors == []
        assert all(sum(m.batch == size for m in table.micros) == 20 for size in table.sizes)  # whole or not at all
    Database(path).record(H200, convolution(), 200_000, micros(200_000))


def test_another_schema_or_program_is_refused_and_left_alone(tmp_path):
    newer, foreign, text = tmp_path / "newer.db", tmp_path / "foreign.db", tmp_path / "results.csv"
    Database(newer).record(H200, convolution(), 2, micros(2))
    with contextlib.closing(sqlite3.connect(newer)) as db, db:
        db.execute(f"PRAGMA user_version = {SCHEMA + 1}")
    with contextlib.closing(sqlite3.connect(foreign)) as db, db:
        db.execute("CREATE TABLE mine (x)")
    text.write_text("batch,seconds\n" * 100)
    for path in (newer, foreign, text):
        before = path.read_bytes()
        database = Database(path)
        with pytest.raises(CacheError):
            database.devices()
        with pytest.raises(CacheError):
            database.record(H200, convolution(), 2, micros(2))
        assert path.read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 3


def test_a_damaged_file_is_refused_by_readers_and_moved_aside_by_writers(tmp_path, caplog):
    path = tmp_path / "t.db"
    database = Database(path)
    for batch in range(1, 60):
        database.record(H200, convolution(), batch, micros(batch))
    whole = path.read_bytes()
    damaged = whole[: len(whole) // 2]
    path.write_bytes(damaged)
    with pytest.raises(CacheError, match="cannot be read"):
        Database(path).table(H200, convolution())
    assert path.read_bytes() == damaged
    fresh = Database(path)
    fresh.record(H200, convolution(), 2, micros(2))
    assert Database(path).table(H200, convolution()).sizes == (2,)
    aside = [p for p in tmp_path.iterdir() if "aside" in p.name]
    assert len(aside) == 1 and aside[0].read_bytes() == damaged
    assert len(fresh.errors) == 1 and "moved to" in caplog.text


def test_an_edited_row_is_refused(tmp_path):
    path = tmp_path / "t.db"
    Database(path).record(H200, convolution(), 2, micros(2))
    with contextlib.closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE timings SET seconds = -1")
    with pytest.raises(CacheError, match="cannot be understood"):
        Database(path).table(H200, convolution())


FULL = """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))
"""


def test_a_full_disk_keeps_times_in_memory(tmp_path):
    path = tmp_path / "t.db"
    code = """
assert database.errors and "memory only" in str(database.errors[0]), database.errors
assert database.table(device, convolution()).sizes == tuple(range(1, 101))
print("kept", flush=True)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", FULL + WRITER.format(root=str(ROOT), path=str(path), first=1, count=100) + code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0 and out.endswith("kept\n"), err
    assert 0 < len(Database(path).table(H200, convolution()).sizes) < 100  # what fitted is whole


def test_a_place_that_cannot_be_written(tmp_path, caplog):
    blocked = tmp_path / "file"
    blocked.write_text("")
    database = Database(blocked / "t.db")
    database.record(H200, convolution(), 2, micros(2))
    database.record_network(network(2))
    assert set(database.table(H200, convolution()).micros) == set(micros(2)) and database.network() == network(2)
    assert len(database.errors) == 1 and "memory only" in caplog.text


def test_bad_records_are_usage_errors(tmp_path):
    database = Database(tmp_path / "t.db")
    for bad in ([micros(3)[0]], [micros(2)[0]] * 2, [MicroConfig(2, "A", "float16", 1e-6, 0)]):
        with pytest.raises(UsageError):
            database.record(H200, convolution(), 2, bad)
    assert not (tmp_path / "t.db").exists()


class Measurer:
    """Measures like a device that needs a moment, and remembers what it was asked."""

    def __init__(self, device: Device = H200, fail_at: int | None = None) -> None:
        self.device, self.fail_at = device, fail_at
        self.asked: list[int] = []

    def __call__(self, convolution, batch):
        self.asked.append(batch)
        if batch == self.fail_at:
            raise RuntimeError("the device fell off the bus")
        time.sleep(0.002)
        return micros(batch)


def test_benchmark_measures_what_is_missing_on_several_devices(tmp_path):
    database = Database(tmp_path / "t.db")
    devices = [Measurer(), Measurer()]
    seen = []
    table = benchmark(convolution(), 16, database, devices, policy="all", progress=lambda d, n: seen.append((d, n)))
    asked = devices[0].asked + devices[1].asked
    assert sorted(asked) == list(range(1, 17)) and all(d.asked for d in devices)
    assert table.sizes == tuple(range(1, 17)) and seen[-1] == (16, 16)
    again = Measurer()
    benchmark(convolution(), 20, database, [again], policy="powerOfTwo")
    assert again.asked == [20]


def test_a_failing_device_ends_the_benchmark_and_keeps_what_was_measured(tmp_path):
    database = Database(tmp_path / "t.db")
    with pytest.raises(RuntimeError, match="fell off"):
        benchmark(convolution(), 16, database, [Measurer(fail_at=2)])
    assert database.table(H200, convolution()).sizes == (4, 8, 16)
    with pytest.raises(ForeignDeviceError, match="cannot share"):
        benchmark(convolution(), 16, database, [Measurer(), Measurer(V100)])
    with pytest.raises(UsageError):
        benchmark(convolution(), 16, database, [])
