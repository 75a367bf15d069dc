"""What calls lose to work beside them, on a fake clock."""

from __future__ import annotations

import pytest

from jcuts.tune.parent.call_pace import FEW, KEPT, KNOWN_FROM, PATIENCE, SILENCE, CallPace

STEP = 1 / 16  # s per call: a window has four
NUMBER = KNOWN_FROM * 4


class Loop:
    """A user's loop, with the pace of its calls."""

    def __init__(self, known=True):
        self.now, self.lost, self.used = 0.0, 0.0, 0.0
        self.pace = CallPace(lambda: self.now)
        self.pace.watch(lambda: self.used)
        self.calls(1)  # the first window begins
        if known:
            self.calls(NUMBER)
            assert self.pace.seconds == STEP

    def calls(self, number, seconds=STEP):
        for _ in range(number):
            self.now += seconds
            self.lost += self.pace.called()

    def wait(self, seconds):
        self.now += seconds


def test_no_work_loses_nothing():
    loop = Loop(known=False)
    loop.calls(100)
    loop.calls(10, 10 * STEP)
    assert (loop.lost, loop.pace.outstanding()) == (0.0, 0.0)


def test_without_a_known_pace_all_of_it_counts():
    loop = Loop(known=False)
    loop.pace.begin_work()
    loop.calls(NUMBER)
    loop.pace.end_work()
    loop.calls(4)
    assert loop.lost == NUMBER * STEP
    assert loop.pace.seconds is None  # windows beside work do not tell it


def test_before_the_first_call_all_of_it_counts():
    now = [0.0]
    pace = CallPace(lambda: now[0])
    pace.begin_work()
    now[0] = 3.0
    assert pace.outstanding() == 3.0
    assert pace.called() == 3.0
    assert pace.outstanding() == 0.0


@pytest.mark.parametrize(("factor", "share"), [(1, 0), (2, 1 / 2), (4, 3 / 4)])
def test_calls_that_are_slower_beside_work_lose_the_difference(factor, share):
    loop = Loop()
    begun = loop.now
    loop.pace.begin_work()
    loop.calls(32, factor * STEP)
    loop.pace.end_work()
    assert loop.lost + loop.pace.outstanding() == share * (loop.now - begun)


def test_calls_that_are_faster_beside_work_lose_nothing():
    loop = Loop()
    loop.pace.begin_work()
    loop.calls(100, STEP / 2)
    assert loop.lost == 0.0


def test_several_processes_at_the_same_time_count_once():
    loop = Loop()
    loop.pace.begin_work()
    loop.calls(8, 2 * STEP)
    loop.pace.begin_work()
    loop.calls(8, 2 * STEP)
    loop.pace.end_work()
    loop.calls(8, 2 * STEP)
    loop.pace.end_work()
    loop.calls(8)
    assert loop.lost == 24 * STEP


def test_a_slice_counts_elsewhere():
    loop = Loop()
    loop.pace.begin_work()
    loop.calls(2)
    loop.pace.begin_slice()
    loop.pace.begin_slice()  # of a second thread
    loop.wait(5.0)
    loop.pace.end_slice()
    loop.wait(5.0)
    loop.pace.end_slice()
    loop.calls(6)
    loop.pace.end_work()
    assert (loop.lost, loop.pace.outstanding()) == (0.0, 0.0)
    loop.calls(NUMBER)
    assert loop.pace.seconds == STEP


def test_work_beside_no_calls_counts_in_full():
    loop = Loop()
    loop.pace.begin_work()
    loop.wait(20.0)
    assert loop.pace.outstanding() == 20.0
    assert loop.pace.settle() == 20.0
    assert loop.pace.outstanding() == 0.0
    loop.wait(1.0)
    loop.pace.end_work()
    loop.calls(1)
    assert loop.lost == 1.0


def test_calls_after_a_pause_make_up_for_nothing():
    loop = Loop()
    loop.pace.begin_work()
    loop.wait(20.0)
    loop.calls(100, STEP / 4)
    assert loop.lost + loop.pace.outstanding() >= 20.0 - FEW * STEP


def test_a_pause_counts_no_more_than_the_work_beside_it():
    loop = Loop()
    loop.wait(20.0)
    loop.pace.begin_work()
    loop.wait(2.0)
    loop.pace.end_work()
    loop.wait(20.0)
    loop.calls(8)
    assert loop.lost == 2.0


def test_a_loop_that_goes_on_is_not_settled():
    loop = Loop()
    loop.pace.begin_work()
    loop.wait(SILENCE / 2)
    assert loop.pace.settle() == 0.0
    slow = Loop(known=False)
    slow.calls(NUMBER, 10.0)
    slow.wait(20.0)
    assert slow.pace.settle() == 0.0


def test_pauses_do_not_change_the_pace():
    loop = Loop()
    for _ in range(20):
        loop.calls(16)
        loop.wait(5.0)
    assert loop.pace.seconds == STEP


def test_calls_that_became_cheaper_set_the_pace_also_beside_work():
    loop = Loop()
    loop.pace.begin_work()
    loop.calls(100, STEP / 4)
    assert loop.pace.seconds == STEP / 4


def test_calls_that_became_dearer_set_the_pace_in_the_end():
    loop = Loop()
    loop.pace.begin_work()
    loop.calls(100, STEP / 4)
    loop.pace.end_work()
    loop.calls(FEW * KEPT + 4, 4 * STEP)
    assert loop.pace.seconds == 4 * STEP


def test_the_pace_is_not_taken_while_the_tuning_thread_computes():
    loop = Loop(known=False)
    for _ in range(2 * NUMBER):
        loop.used += STEP
        loop.calls(1, 2 * STEP)
    assert loop.pace.seconds is None
    loop.calls(NUMBER + 4)  # a window was open
    assert loop.pace.seconds == STEP


def test_another_tuning_thread_finds_no_pace():
    loop = Loop()
    loop.pace.watch(float)
    assert loop.pace.seconds is None


def test_a_pace_is_waited_for_while_calls_come_and_not_for_long():
    assert not Loop().pace.is_worth_waiting_for()
    loop = Loop(known=False)
    assert loop.pace.is_worth_waiting_for()
    loop.wait(SILENCE)
    assert not loop.pace.is_worth_waiting_for()
    loop.pace.begin_work()  # no window is calm
    loop.calls(10)
    assert loop.pace.is_worth_waiting_for()
    loop.calls(int(PATIENCE / STEP))
    assert not loop.pace.is_worth_waiting_for()
