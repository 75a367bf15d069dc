"""What a person sees of a long first call, on a clock of its own."""

from __future__ import annotations

import logging

import pytest

from jcuts.base import knobs
from jcuts.jit import progress
from jcuts.report import rich_tables
from jcuts.tune import session


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class Bars:
    def __init__(self, title):
        self.title, self.running, self.tasks = title, False, []

    def start(self):
        self.running = True

    def stop(self):
        self.running = False

    def add_task(self, description, total):
        self.tasks.append([description, 0, total])
        return len(self.tasks) - 1

    def update(self, task, completed, total):
        self.tasks[task][1:] = [completed, total]


def test_a_log_gets_one_line_after_ten_seconds(caplog):
    clock = Clock()
    watch = progress.Watch("predict", terminal=False, clock=clock)
    with caplog.at_level(logging.INFO, logger="jcuts"):
        for clock.now, done in ((1.0, 1), (9.0, 2), (11.0, 3), (20.0, 4)):
            watch.update("compile", done, 12, "dot")
        watch.close()
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1
    for part in (
        "12 kernels for predict",
        "first call only",
        str(knobs.current().cache_dir),
        'tune="cached"',
        "JCUTS_MAX_CANDIDATES",
        "JCUTS_TOP_PERCENT",
    ):
        assert part in warnings[0]
    infos = [r.getMessage() for r in caplog.records if r.levelno == logging.INFO]
    assert infos == ["tuning predict", "tuned predict in 20.0 s"]


def test_the_line_names_only_what_is_not_set(caplog):
    clock = Clock()
    with knobs.scope(max_candidates=2), caplog.at_level(logging.WARNING, logger="jcuts"):
        watch = progress.Watch("predict", terminal=False, clock=clock)
        clock.now = 11.0
        watch.update("compile", 1, 12, "dot")
    (record,) = caplog.records
    assert 'JCUTS_TOP_PERCENT=2 or tune="cached" make' in record.getMessage()
    assert "JCUTS_MAX_CANDIDATES" not in record.getMessage()


def test_a_terminal_gets_bars_after_three_seconds_and_no_line(caplog, monkeypatch):
    made = []
    monkeypatch.setattr(rich_tables, "progress_bars", lambda title: made.append(Bars(title)) or made[-1])
    clock = Clock()
    watch = progress.Watch("predict", terminal=True, clock=clock)
    watch.update("compile", 1, 12, "dot")
    assert not made
    clock.now = 4.0
    watch.update("check", 1, 12, "dot")
    clock.now = 30.0
    watch.update("compile", 2, 12, "dot")
    (bars,) = made
    assert "predict" in bars.title and bars.running
    assert bars.tasks == [["compile", 2, 12], ["check", 1, 12]]
    watch.close()
    assert not bars.running
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


def test_real_bars_can_be_drawn():
    bars = rich_tables.progress_bars("tuning f")
    task = bars.add_task("compile", total=3)
    bars.update(task, completed=2, total=3)
    assert bars.tasks[0].completed == 2


def test_shown_sets_and_takes_away():
    with progress.shown("f"):
        assert isinstance(session.progress(), progress.Watch)
        mine = session.progress()
        with progress.shown("inner"):
            assert session.progress() is mine
        assert session.progress() is mine
    assert session.progress() is None


@pytest.mark.parametrize("value", [True, False])
def test_a_knob_keeps_it_quiet(value):
    with knobs.scope(progress=value), progress.shown("f"):
        assert (session.progress() is not None) is value
