"""What a first call does with the device while Python plans."""

from __future__ import annotations

import threading

import jax.numpy as jnp
import pytest

import jcuts
from jcuts.jit import variant_planning
from jcuts.jit.background_work import BackgroundWork
from jcuts.jit.traced_call import Call, TracedCall
from jcuts.tune.baseline.xla_profile import RegionProfiler


def test_pieces_run_in_turn_and_one_that_fails_costs_only_itself():
    done = []

    def fails():
        raise ValueError("no room")

    work = BackgroundWork({"a": lambda: done.append("a"), "b": fails, "c": lambda: done.append("c")})
    work._thread.join()
    assert done == ["a", "c"] and work.quiesce(False) and work.quiesce(True)


def test_who_needs_the_device_waits_for_one_piece_and_no_more():
    begun, go_on, done = threading.Event(), threading.Event(), []

    def first():
        begun.set()
        go_on.wait(10)
        done.append("first")

    work = BackgroundWork({"first": first, "second": lambda: done.append("second")})
    begun.wait(10)
    assert not work.quiesce(False)
    threading.Timer(0.05, go_on.set).start()
    assert work.quiesce(True) and done == ["first"]


def test_who_needs_the_device_does_not_wait_for_what_leaves_it_alone():
    begun, go_on, done = threading.Event(), threading.Event(), []

    def compiles():
        begun.set()
        go_on.wait(10)
        done.append("compiled")

    pieces = {"first": lambda: done.append("first"), "compiles": compiles, "runs": lambda: done.append("ran")}
    with BackgroundWork(pieces, quiet=("compiles",)) as work:
        begun.wait(10)
        assert work.quiesce(False) and work.quiesce(True)
        go_on.set()
    assert done == ["first", "compiled"]  # whoever was told that the device is free has it


def test_what_leaves_the_device_alone_begins_beside_measurements():
    begun, go_on, ended, done = threading.Event(), threading.Event(), threading.Event(), []

    def runs():
        begun.set()
        go_on.wait(10)
        done.append("ran")

    def compiles():
        done.append("compiled")
        ended.set()

    pieces = {"runs": runs, "again": lambda: done.append("ran again"), "compiles": compiles}
    with BackgroundWork(pieces, light=("runs", "again"), quiet=("compiles",)) as work:
        begun.wait(10)
        threading.Timer(0.05, go_on.set).start()
        assert work.quiesce(True) and done[0] == "ran"
        assert ended.wait(10)
    assert done == ["ran", "compiled"]


def test_who_compiles_for_the_device_does_not_wait_for_first_runs_and_who_measures_does():
    begun, go_on, done = threading.Event(), threading.Event(), []

    def runs():
        begun.set()
        go_on.wait(10)
        done.append("ran")

    pieces = {
        "runs": runs,
        "times": lambda: done.append("timed"),
        "again": lambda: done.append("ran again"),
        "compiles": lambda: done.append("compiled"),
    }
    with BackgroundWork(pieces, light=("runs", "again"), quiet=("compiles",)) as work:
        begun.wait(10)
        assert work.quiesce(False)
        go_on.set()
        work._thread.join()
        assert work.quiesce(False) and work.quiesce(True)
    assert done == ["ran", "ran again", "compiled"]  # nothing that times anything began any more
    begun.clear(), go_on.clear(), done.clear()
    with BackgroundWork(pieces, light=("runs", "again"), quiet=("compiles",)) as work:
        begun.wait(10)
        threading.Timer(0.05, go_on.set).start()
        assert work.quiesce(True) and done[0] == "ran"
    assert "ran again" not in done and "timed" not in done


def test_what_breaks_off_leaves_nothing_behind():
    begun, go_on, done = threading.Event(), threading.Event(), []

    def first():
        begun.set()
        go_on.wait(10)

    with (
        pytest.raises(KeyboardInterrupt),
        BackgroundWork({"first": first, "second": lambda: done.append("second")}) as work,
    ):
        begun.wait(10)
        raise KeyboardInterrupt
    go_on.set()
    work._thread.join()
    assert not done
    with BackgroundWork({}) as work:
        pass
    assert work.quiesce(True)


@pytest.mark.parametrize("options", [{"static_argnums": 1}, {"static_argnames": "n"}, {"donate_argnums": 0}])
def test_plain_xla_runs_early_with_static_and_donated_arguments(monkeypatch, options):
    monkeypatch.setattr(variant_planning.autotune_cache, "publish_results", dict)
    function = jcuts.optimize(lambda x, n: x * n, **options)
    x = jnp.ones(5)
    for args, kwargs in (((x, 3), {}), ((x,), {"n": 3})):
        call = Call(
            function._arguments.signature(args, kwargs),
            args,
            kwargs,
            function._arguments.placement(args, kwargs),
            "cpu",
        )
        traced = TracedCall(
            call,
            function._closed(args, kwargs),
            tuple(function._arguments.leaves(args, kwargs)),
            function._carriers,
            function._arguments,
            function.settings,
        )
        todo = variant_planning.background_tasks(traced, None)
        assert "xla run" in todo
        for piece in todo.values():
            piece()
        profiler = RegionProfiler(traced.closed, traced.leaves)
        first = list(variant_planning.background_tasks(traced, None, profiler))[:2]
        assert first == ["profile compiled", "profile"]  # tuning waits for it
    assert x.sum() == 5  # it was a copy that was donated
