"""What the device takes between two marks, with a device and a launcher of this file's own."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import jax
import jax.export
import numpy as np
import pytest
from jax import lax

from jcuts.base.errors import NativeError
from jcuts.tune.measure import cuda_driver, cuda_event_timer, gpu_problem, gpu_timing
from jcuts.tune.measure import statistics as measure_statistics
from jcuts.tune.problem import Input, Output, Problem


class Device:
    """Notes what is put on its stream."""

    def __init__(self):
        self.done = []

    def function(self, ptx, name):
        assert b".entry " + name.encode() in ptx
        return name

    @contextlib.contextmanager
    def current(self):
        self.done.append("push")
        yield
        self.done.append("pop")

    def launch(self, function, stream, nanoseconds):
        self.done.append((function, stream, nanoseconds.value))


class Events:
    def __init__(self, device):
        self.device = device

    def record(self, number, stream):
        self.device.done.append((number, stream))

    def elapsed(self):
        return 3e-6


@pytest.fixture
def watch(monkeypatch):
    device, hooks, clock = Device(), [], [0.0]
    monkeypatch.setattr(cuda_driver, "device", lambda: device)
    monkeypatch.setattr(cuda_driver, "Events", Events)
    monkeypatch.setattr(cuda_event_timer.cuda_launcher, "set_hook", hooks.append)
    monkeypatch.setattr(cuda_event_timer.time, "perf_counter", lambda: clock[0])
    made = cuda_event_timer.Stopwatch()
    made.clock, made.hook = clock, hooks[0]
    return made


def program(watch, host, marks=(0, 1)):
    """A call whose marks the host passes so many seconds apart."""

    def run():
        for number in marks:
            watch.clock[0] += host * number
            watch.hook(number, 77)

    return run


def test_events_stand_around_a_program_behind_a_kernel_that_waits(watch):
    assert watch.seconds(program(watch, 10e-6)) == 3e-6
    wait = ("wait", 77, int(cuda_event_timer.LEAST_DELAY * 1e9))
    assert watch.device.done == ["push", wait, (0, 77), "pop", "push", (1, 77), "pop"]


def test_the_wait_outlasts_the_host(watch):
    assert watch.seconds(program(watch, 1e-3)) == 3e-6
    waits = [x[2] for x in watch.device.done if x[0] == "wait"]
    assert waits == [int(cuda_event_timer.LEAST_DELAY * 1e9), int(2 * cuda_event_timer.AHEAD * 1e6)]
    watch.seconds(program(watch, 1e-3))  # it stays so
    assert len([x for x in watch.device.done if x[0] == "wait"]) == 3
    watch.seconds(program(watch, 1.0))  # but not for ever
    assert watch.delay == cuda_event_timer.MOST_DELAY
    delays = [watch.delay for _ in range(8) if watch.seconds(program(watch, 10e-6))]  # nor after one busy moment
    assert delays == [cuda_event_timer.MOST_DELAY / 2 ** (k + 1) for k in range(6)] + [cuda_event_timer.LEAST_DELAY] * 2


@pytest.mark.parametrize("marks", [(), (0,), (1,)])
def test_a_program_without_marks_has_no_time(watch, marks):
    watch.seconds(program(watch, 1e-6))
    with pytest.raises(NativeError, match="no marks"):
        watch.seconds(program(watch, 1e-6, marks))


def test_what_the_driver_refuses_inside_is_raised_outside(watch, monkeypatch):
    def refuse(*_):
        raise NativeError("cuEventRecord failed", code=700)

    monkeypatch.setattr(watch.events, "record", refuse)
    with pytest.raises(NativeError, match="cuEventRecord"):
        watch.seconds(program(watch, 1e-6))


def test_without_a_gpu_there_is_no_stopwatch():
    assert cuda_event_timer.stopwatch() is None


def test_callables_may_tell_what_they_took():
    runs = {"a": iter([2.0, 4.0, 6.0]).__next__, "b": iter([1.0, 1.0, 1.0]).__next__}
    found = measure_statistics.interleave(runs, seconds=0.0, least=3, most=3, inner={"a": 2, "b": 1}, told=True)
    assert found["a"].seconds == (1.0, 2.0, 3.0) and found["b"].median == 1.0
    found = measure_statistics.race({"a": lambda: 2.0, "b": lambda: 9.0}, seconds=1.0, told=True)
    assert found["a"].median == 2.0 and found["b"].median == 9.0


def test_small_chains_run_once_before_any_is_timed(monkeypatch):
    ran = []
    problem = Problem("p", (Input((4, 8), "float32"),) * 2, (Output((4, 8), "float32"),), space="s")
    real = gpu_problem._run_once
    monkeypatch.setattr(gpu_problem, "_run_once", lambda *a: ran.append(real(*a)))
    monkeypatch.setattr(gpu_problem, "_ahead", {})
    told = []
    problems = {"a": (problem, jax.jit(lambda x, y: x + y)), "b": (problem, jax.jit(lambda x, y: np.sin(x)))}
    assert gpu_problem.compile_ahead(problems, told.append) == 1 and not ran
    assert gpu_problem.run_ahead(told.append) == 1 and set(gpu_problem._ahead) == {"a"}
    assert ran == [None] and set(told) == {""}
    monkeypatch.setattr(gpu_problem, "SMALL_BYTES", 100)
    gpu_problem.compile_ahead(problems, told.append)
    assert gpu_problem.run_ahead(told.append) == 0 and len(ran) == 1


def grouped(x, w):
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", feature_group_count=16)


def test_chains_whose_calls_compile_are_short_and_run_ahead_although_they_are_large(monkeypatch):
    operands = Input((1, 16, 6, 6), "float32"), Input((16, 1, 3, 3), "float32")
    plain = Problem("p", operands, (Output((1, 16, 6, 6), "float32"),), space="s")
    shapes = [jax.ShapeDtypeStruct(i.shape, i.dtype) for i in operands]
    exported = jax.export.export(jax.jit(grouped))(*shapes)
    problem = replace(plain, identity="g", library=bytes(exported.serialize()), reference=b"")
    assert gpu_problem.executions(plain) == gpu_timing.CHAIN and gpu_problem.executions(problem) == gpu_timing.LEAST
    monkeypatch.setattr(gpu_problem, "LARGE_BYTES", 100)
    assert gpu_problem.executions(problem) == gpu_problem.FEWEST
    monkeypatch.undo()
    ran = []
    monkeypatch.setattr(gpu_problem, "_run_once", lambda compiled, _: ran.append(compiled))
    monkeypatch.setattr(gpu_problem, "_ahead", {})
    monkeypatch.setattr(gpu_problem, "SMALL_BYTES", 0)
    few = {path: (problem, jax.jit(exported.call)) for path in "abc"} | {"d": (plain, jax.jit(exported.call))}
    needs = gpu_problem._needs
    monkeypatch.setattr(gpu_problem, "_needs", lambda *a: needs(*a) + gpu_timing.MOST_BYTES)  # one after the other
    assert gpu_problem.compile_ahead(few, lambda _: None) == 4
    gpu_problem.wait_ahead(lambda _: None)
    assert not ran and gpu_problem.run_ahead(lambda _: None) == 3
    assert len(ran) == 3 and gpu_problem._ahead["d"] not in ran
    flops = [gpu_problem._ahead[path].cost_analysis()["flops"] for path in "ad"]
    assert flops[1] > 1.5 * flops[0]
    monkeypatch.setattr(gpu_problem, "_needs", needs)
    ran.clear()
    assert gpu_problem.compile_ahead(few, lambda _: None) == 4
    gpu_problem.wait_ahead(lambda _: None)
    assert len(ran) == 3 and gpu_problem._ahead["d"] not in ran  # there is room: each as soon as it is compiled
    assert gpu_problem.run_ahead(lambda _: None) == 3 and len(ran) == 3
