"""Waiting for another measuring process: announced, bounded, fair; on a clock of its own."""

from __future__ import annotations

import logging
import os

import pytest

from jcuts.base import knobs
from jcuts.tune.parent import machine_lock

fcntl = pytest.importorskip("fcntl")


@pytest.fixture(autouse=True)
def no_past(monkeypatch):
    monkeypatch.setattr(machine_lock, "_past", machine_lock._Past())


class Clock:
    """Sleeping is what makes time pass; ``at`` holds what happens at a time."""

    def __init__(self, **at):
        self.now, self.at = 0.0, at.get("at", [])

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        while self.at and self.at[0][0] <= self.now:
            self.at.pop(0)[1]()


def hold(path):
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(handle, fcntl.LOCK_EX)
    return handle


def wait(path, clock, **options):
    with machine_lock.measuring_lock(path=path, clock=clock, sleep=clock.sleep, **{"patience": 60.0, **options}) as may:
        return may


def test_waiting_is_announced_with_the_holder_and_the_knob(tmp_path, caplog):
    path = tmp_path / "lock"
    with machine_lock.measuring_lock(patience=0.0, path=path) as held:
        assert held
        with caplog.at_level(logging.WARNING):
            assert not wait(path, Clock(), patience=1.5)
            assert not caplog.records  # not worth a line yet
            assert not wait(path, Clock(), patience=10.0)
    (line,) = [r.getMessage() for r in caplog.records]
    assert f"process {os.getpid()}, since" in line and "10 s" in line and "JCUTS_LOCK_PATIENCE_S" in line


def test_the_lock_is_taken_when_it_becomes_free(tmp_path):
    path = tmp_path / "lock"
    handle = hold(path)
    clock = Clock(at=[(5.0, lambda: os.close(handle))])
    assert wait(path, clock)
    assert 5.0 <= clock.now < 6.0


def test_patience_comes_from_a_knob_and_is_short_after_a_wait_in_vain(tmp_path, monkeypatch):
    monkeypatch.setenv("JCUTS_LOCK_PATIENCE_S", "7")
    assert machine_lock.default_patience() == 7.0
    path = tmp_path / "lock"
    handle = hold(path)
    assert not machine_lock.gave_up_waiting(path)
    assert not wait(path, Clock(), patience=7.0)
    assert machine_lock.default_patience() == machine_lock.IMPATIENT_SECONDS and machine_lock.gave_up_waiting(path)
    os.close(handle)
    assert not machine_lock.gave_up_waiting(path)
    assert wait(path, Clock()) and machine_lock.default_patience() == 7.0
    with knobs.scope(lock_patience_s=0.0):
        assert machine_lock.default_patience() == 0.0


def test_who_comes_again_stands_behind_who_waits(tmp_path):
    path = tmp_path / "lock"
    order = []
    first = hold(path)
    waiting = hold(path.with_name("lock.queue"))  # another process is next in line

    def free_and_taken():
        os.close(first)
        order.append("free")

    def other_is_done():
        order.append("other")
        os.close(waiting)

    clock = Clock(at=[(1.0, free_and_taken), (4.0, other_is_done)])
    assert wait(path, clock)
    # The lock itself was free from 1 s on: the one that was in line before had it first.
    assert order == ["free", "other"] and clock.now >= 4.0


def test_an_unreadable_holder_is_another_process(tmp_path):
    path = tmp_path / "lock"
    path.write_text("nonsense")
    assert machine_lock.holder(path) == machine_lock.holder(tmp_path / "none") == "another process"


def test_an_attempt_does_not_wait_and_holds_for_what_is_inside(tmp_path):
    path = tmp_path / "lock"
    with machine_lock.try_lock(path) as may:
        assert may and machine_lock.is_mine()
        assert wait(path, Clock(), patience=0.0)  # this thread has it
        with machine_lock.try_lock(path) as again:
            assert again
        assert machine_lock.is_mine()
        with pytest.raises(BlockingIOError):
            fcntl.flock(os.open(path, os.O_RDWR), fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert not machine_lock.is_mine()
    held = hold(path)
    machine_lock._past.gave_up = False
    with machine_lock.try_lock(path) as may:
        assert not may and not machine_lock.is_mine() and not machine_lock._past.gave_up
    os.close(held)
    held = hold(path.with_name("lock.queue"))
    with machine_lock.try_lock(path) as may:
        assert not may  # another process is next in line
    os.close(held)


def test_slices_have_the_lock_one_by_one(tmp_path):
    path = tmp_path / "lock"
    with machine_lock.by_slices(), machine_lock.measuring_lock(patience=0.0, path=path) as session:
        assert session  # nobody waits for it: each slice has the lock
        with machine_lock.slice_lock(path) as first:
            assert first
            with machine_lock.slice_lock(path) as other:
                assert not other
        with machine_lock.slice_lock(path) as again:
            assert again
    assert not machine_lock.is_mine()
