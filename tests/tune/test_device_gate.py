"""Hand-over of the device between calls and measurements: the account on a fake clock, the gate with two threads."""

from __future__ import annotations

import contextlib
import threading
import time

import pytest

from jcuts.tune import device_gate, device_slices
from jcuts.tune.device_gate import DeviceGate, GateSlices
from jcuts.tune.device_slices import Stopped
from jcuts.tune.parent import call_pace
from jcuts.tune.share_account import ShareAccount


class Clock:
    """Seconds that pass only when a test says so."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def add(self, seconds):
        self.now += seconds


def gate_of(share=0.1, *, idle=False, lock=lambda: contextlib.nullcontext(True)):
    """A gate whose process is busy with something else all the time, unless it is idle."""
    clock = Clock()
    gate = DeviceGate(ShareAccount(lambda: share, clock), clock, (lambda: 0.0) if idle else clock, lock)
    gate.account.begin()
    return gate, clock


def until(condition):
    while not condition():
        time.sleep(1e-4)


def test_share_of_a_run():
    clock = Clock()
    account = ShareAccount(lambda: 0.05, clock)
    assert (account.elapsed(), account.used(), account.credit()) == (0.0, 0.0, 0.0)
    clock.add(5.0)
    account.begin()
    clock.add(10.0)
    account.begin()  # the run has begun
    assert account.elapsed() == 10.0
    assert account.credit() == pytest.approx(0.5)
    account.charge(0.2)
    account.charge(-1.0)
    assert account.used() == pytest.approx(0.02)
    assert account.credit() == pytest.approx(0.3)


def test_nobody_waits_where_nothing_is_measured():
    gate, clock = gate_of()
    clock.add(100.0)
    gate.before_call(lambda: pytest.fail("waited for the step"))
    gate.after_call(lambda: False)
    assert gate.account.waited == 0.0


@pytest.mark.parametrize(("share", "overrun"), [(0.05, 0.0), (0.2, 0.0), (0.05, 0.13)])
def test_the_share_holds_after_every_call(share, overrun):
    gate, clock = gate_of(share)
    over = threading.Event()

    def measure():
        try:
            while True:
                seconds = gate.take(1.0)
                if seconds is not None:
                    assert seconds <= device_gate.MOST
                    clock.add(seconds + overrun)  # a round of samples goes on beyond the slice's end
                    gate.give()
        except Stopped:
            over.set()

    threading.Thread(target=measure, daemon=True).start()
    waits, steps, foreseen = [], 0, 0.0
    while gate.slices < 12:
        until(lambda: gate.wanted)
        clock.add(0.1)
        before = gate.account.waited
        gate.before_call(lambda: None)
        gate.after_call(lambda: False)
        steps += 1
        if gate.account.waited > before:
            waits.append(gate.account.waited - before)
            # What the first slice takes beyond its end is not known before.
            assert gate.account.used() * gate.account.elapsed() <= share * gate.account.elapsed() + overrun - foreseen
            foreseen = overrun
    gate.stop()
    assert over.wait(60)
    assert max(waits) <= device_gate.MOST + overrun + 1e-9
    assert gate.account.used() <= share
    assert steps > len(waits)  # most calls gave nothing


def test_the_step_is_waited_for_before_a_slice_begins():
    gate, clock = gate_of()
    told = []
    taken = threading.Thread(target=lambda: (told.append(gate.take(1.0)), told.append("measured"), gate.give()))
    taken.start()
    until(lambda: gate.wanted)
    clock.add(10.0)
    gate.before_call(lambda: told.append("ready"))
    taken.join()
    assert told[0] == "ready"
    assert told[2] == "measured"
    assert gate.account.waited == 0.0  # by the fake clock; waiting for the step is no part of it


def test_an_idle_process_is_not_asked():
    gate, clock = gate_of(idle=True)
    gate.before_call(lambda: None)
    gate.after_call(lambda: False)
    clock.add(device_gate.IDLE_AFTER)
    assert gate.take(0.0) == device_gate.MOST
    gate.give()
    assert gate.account.waited == 0.0


def test_slices_are_no_longer_than_is_asked():
    gate, clock = gate_of(idle=True)
    gate.longest = device_gate.LEAST
    clock.add(1.0)
    gate.take(0.0)  # the first look
    clock.add(1.0)
    assert gate.take(0.0) == device_gate.LEAST
    gate.give()


def test_a_call_that_meets_an_idle_slice_waits_for_its_end():
    gate, clock = gate_of(idle=True)
    gate.before_call(lambda: None)
    gate.after_call(lambda: False)
    clock.add(device_gate.IDLE_AFTER)
    assert gate.take(0.0) is not None
    call = threading.Thread(target=lambda: gate.before_call(lambda: None))
    call.start()
    until(lambda: gate._calls == 1)
    time.sleep(0.01)  # it may be in the wait by now; the result is the same if not
    clock.add(0.15)
    gate.give()
    call.join(60)
    assert not call.is_alive()
    assert gate.account.waited in (0.0, pytest.approx(0.15))


@pytest.mark.parametrize("why", ["called just now", "device busy", "call under way", "other work"])
def test_no_slice_without_an_offer_while_somebody_uses_the_device(why):
    gate, clock = gate_of(idle=why != "other work")
    gate.before_call(lambda: None)
    if why != "call under way":
        gate.after_call(lambda: why == "device busy")
    if why != "called just now":
        clock.add(device_gate.IDLE_AFTER)
    assert gate.take(0.0) is None


def test_without_the_lock_of_the_machine_the_slice_is_given_back():
    gate, clock = gate_of(idle=True, lock=lambda: contextlib.nullcontext(False))
    clock.add(device_gate.IDLE_AFTER)
    assert gate.take(0.0) is None
    gate.before_call(lambda: pytest.fail("offered"))  # the lock is not asked for again at once
    gate.after_call(lambda: False)
    assert gate.account.waited == 0.0


def test_stop_ends_who_waits():
    gate, _ = gate_of()
    told = []

    def measure():
        try:
            with device_slices.using(GateSlices(gate)), device_slices.measuring():
                told.append("measured")
        except Stopped:
            told.append("stopped")

    thread = threading.Thread(target=measure)
    thread.start()
    until(lambda: gate.wanted)
    gate.stop()
    thread.join(60)
    assert told == ["stopped"]


def test_blocks_inside_of_each_other_are_one_slice():
    gate, clock = gate_of(idle=True)
    clock.add(device_gate.IDLE_AFTER)
    with device_slices.using(GateSlices(gate)):
        with device_slices.measuring():
            with device_slices.measuring():
                assert device_slices.pause() == 0.0
            assert gate._held
            assert gate.slices == 1
        assert not gate._held
    assert not device_slices.current().sliced


def test_a_measurement_pauses_when_its_slice_is_over():
    gate, clock = gate_of(idle=True)
    clock.add(device_gate.IDLE_AFTER)
    with device_slices.using(GateSlices(gate)), device_slices.measuring():
        device_slices.pause()
        assert gate.slices == 1
        clock.add(device_gate.MOST)
        device_slices.pause()
        assert gate.slices == 2


def make_calls(gate, clock, seconds, number):
    for _ in range(number):
        gate.before_call(lambda: None)
        clock.add(seconds)
        gate.after_call(lambda: False)


def calling_gate(share=0.1):
    """A gate that knows that a call takes 0.1 s."""
    gate, clock = gate_of(share)
    slices = GateSlices(gate)
    make_calls(gate, clock, 0.1, 31)
    return gate, clock, slices


def test_work_beside_calls_is_charged_by_what_they_lose():
    gate, clock, slices = calling_gate()
    slices.begin_beside()
    make_calls(gate, clock, 0.1, 30)
    assert gate.account.waited == pytest.approx(0.0)
    slices.begin_beside()  # a second process
    make_calls(gate, clock, 0.2, 30)
    slices.end_beside()
    slices.end_beside()
    make_calls(gate, clock, 0.1, 30)
    assert gate.account.waited == pytest.approx(3.0)


def test_a_slice_beside_work_counts_once():
    gate, clock, slices = calling_gate(share=1.0)
    slices.begin_beside()
    make_calls(gate, clock, 0.1, 30)

    def measure():
        seconds = gate.take(60.0)
        clock.add(seconds)
        gate.give()

    thread = threading.Thread(target=measure, daemon=True)
    thread.start()
    until(lambda: gate.wanted)
    while not gate.slices:
        make_calls(gate, clock, 0.1, 1)
    thread.join(60)
    make_calls(gate, clock, 0.1, 30)
    slices.end_beside()
    assert gate.account.waited == pytest.approx(device_gate.MOST)


def test_work_beside_a_loop_that_makes_no_calls_counts_in_full():
    gate, clock, slices = calling_gate()
    slices.begin_beside()
    clock.add(50.0)  # an evaluation
    assert not slices.may_use_beside()
    slices.end_beside()
    assert gate.account.waited == pytest.approx(50.0)
    make_calls(gate, clock, 0.1, 30)
    assert gate.account.waited == pytest.approx(50.0)


def test_what_is_not_charged_yet_is_no_credit():
    gate, clock, slices = calling_gate()
    assert slices.may_use_beside()
    slices.begin_beside()
    clock.add(0.8)
    assert gate.account.waited == 0.0
    assert not slices.may_use_beside()


def test_work_beside_calls_waits_until_their_pace_is_known():
    gate, clock = gate_of()
    slices = GateSlices(gate)
    make_calls(gate, clock, 0.1, 2)
    assert not slices.may_use_beside()
    make_calls(gate, clock, 0.1, 30)
    assert slices.may_use_beside()


def test_work_waits_for_a_pace_only_while_calls_come():
    gate, clock = gate_of()
    slices = GateSlices(gate)
    make_calls(gate, clock, 0.1, 2)
    clock.add(call_pace.SILENCE)
    assert slices.may_use_beside()
