"""Slices of the device for worker processes: whose turn it is, and when work counts that cannot be cut."""

from __future__ import annotations

import queue
import types

import numpy as np
import pytest

from jcuts.tune.device_slices import OpenDevice
from jcuts.tune.measure import statistics
from jcuts.tune.parent.slice_turns import SliceTurns
from jcuts.tune.worker.parent_slices import ParentSlices


class Lender(OpenDevice):
    """Lends the device when it is told to."""

    sliced = True

    def __init__(self):
        self.lends, self.given, self.beside, self.credit = False, 0, 0, True

    def try_take(self, seconds):
        return 0.1 if self.lends else None

    def give(self):
        self.given += 1

    def may_use_beside(self):
        return self.credit

    def begin_beside(self):
        self.beside += 1

    def end_beside(self):
        self.beside -= 1


class Process:
    def __init__(self):
        self.task, self.deadline, self.heard = types.SimpleNamespace(timeout=30.0), 0.0, []

    def write(self, message):
        self.heard.append(message)


SLICE = {"id": 1, "event": "slice"}
END = {"id": 1, "event": "slice end"}


def test_one_process_at_a_time():
    lender = Lender()
    turns, one, two = SliceTurns(lender), Process(), Process()
    assert turns.heard(one, SLICE)
    assert turns.heard(two, SLICE)
    assert one.deadline == float("inf")  # it is not late while it waits
    turns.grant()
    assert one.heard == two.heard == []
    lender.lends = True
    turns.grant()
    turns.grant()
    assert one.heard == [{"op": "slice", "seconds": 0.1}]
    assert two.heard == []
    assert one.deadline < float("inf")
    turns.heard(one, END)
    assert lender.given == 1
    turns.grant()
    assert len(two.heard) == 1


@pytest.mark.parametrize("holds", [True, False])
def test_a_process_that_ends_leaves_the_queue(holds):
    lender = Lender()
    turns, one, two = SliceTurns(lender), Process(), Process()
    turns.heard(one, SLICE)
    turns.heard(two, SLICE)
    lender.lends = holds
    turns.grant()
    lender.lends = True
    turns.ended(one)
    assert lender.given == holds
    turns.grant()
    assert len(two.heard) == 1


def test_other_events_are_not_about_slices():
    assert not SliceTurns(Lender()).heard(Process(), {"id": 1, "event": "running", "label": "a"})


def test_work_on_a_gpu_that_cannot_be_cut_begins_on_credit():
    lender = Lender()
    turns = SliceTurns(lender)
    lender.credit = False
    assert not turns.may_begin("cuda", {"op": "reference"})
    assert turns.may_begin("cuda", {"op": "compile"})  # needs no device
    assert turns.may_begin("cpu", {"op": "reference"})  # a process of low priority
    lender.credit = True
    assert turns.may_begin("cuda", {"op": "measure"})


def test_work_on_a_gpu_is_beside_the_program_but_for_slices():
    lender = Lender()
    turns, process, other = SliceTurns(lender), Process(), Process()
    turns.sent("cuda", process, {"op": "compile"})
    turns.sent("cpu", process, {"op": "measure"})
    assert lender.beside == 0
    turns.ended(process)
    turns.sent("cuda", process, {"op": "measure"})
    turns.sent("cuda", other, {"op": "reference"})
    assert lender.beside == 2
    turns.heard(process, SLICE)  # waits for its slice
    assert lender.beside == 1
    lender.lends = True
    turns.grant()
    assert lender.beside == 1  # the user's thread counts it
    turns.heard(process, END)
    assert lender.beside == 2
    turns.ended(other)
    turns.ended(process)
    turns.ended(process)  # its process ends too
    assert lender.beside == 0


@pytest.mark.parametrize("holds", [True, False])
def test_a_process_that_ends_with_or_before_its_slice_is_not_beside(holds):
    lender = Lender()
    turns, process = SliceTurns(lender), Process()
    turns.sent("cuda", process, {"op": "measure"})
    turns.heard(process, SLICE)
    lender.lends = holds
    turns.grant()
    turns.ended(process)
    assert lender.beside == 0
    turns.sent("cuda", process, {"op": "check"})
    assert lender.beside == 1


def test_an_open_device_counts_nothing():
    turns, process = SliceTurns(OpenDevice()), Process()
    assert turns.patience(3600.0) == 3600.0
    assert turns.may_begin("cuda", {"op": "measure"})
    turns.sent("cuda", process, {"op": "measure"})
    turns.ended(process)
    assert not turns.wait_for_credit(True)


def test_a_measuring_process_asks_and_pauses():
    told, granted, now = [], queue.SimpleQueue(), [0.0]
    slices = ParentSlices(told.append, granted, lambda: now[0])
    for _ in range(3):
        granted.put({"op": "slice", "seconds": 0.1})
    slices.begin()
    slices.begin()
    assert told == ["slice"]
    assert slices.pause() == 0.0
    now[0] = 0.1
    slices.pause()
    assert told == ["slice", "slice end", "slice"]
    slices.end()
    assert told[-1] == "slice"
    slices.end()
    assert told[-1] == "slice end"


def test_neighbouring_samples_share_a_slice(monkeypatch):
    order = []

    class Noted(OpenDevice):
        def begin(self):
            order.append("begin")

        def pause(self):
            order.append("pause")
            return 5.0

        def end(self):
            order.append("end")

    monkeypatch.setattr(statistics.device_slices, "current", Noted)
    now = [0.0]

    def run(name):
        order.append(name)
        now[0] += 1.0

    found = statistics.interleave(
        {n: lambda n=n: run(n) for n in "ab"}, seconds=0.0, least=2, most=2, clock=lambda: now[0]
    )
    assert order == ["begin", "pause", "a", "b", "pause", "b", "a", "end"]
    assert np.array(found["a"].seconds) == pytest.approx([1.0, 1.0])
