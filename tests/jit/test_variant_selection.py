"""Decisions of programs that are not timed."""

from __future__ import annotations

import time
from types import SimpleNamespace

import jax
import pytest

from jcuts.jit import variant_benchmark
from jcuts.jit.decision import Decision
from jcuts.jit.end_to_end_benchmark import JCUTS, SAFER_OPTIONS, XLA
from jcuts.jit.variant_selection import VariantSelector

NOT_TIMED = Decision(JCUTS, "logits in chunks: not compared")


def selected(compile_, *, on_gpu=True):
    """What becomes of a decision. Args: compile_: stands for XLA's compiler."""
    compiler = SimpleNamespace(safer={}, evict=lambda *_: None)
    jitted = SimpleNamespace(lower=lambda *args, **kwargs: SimpleNamespace(compile=lambda: compile_(compiler.safer)))
    compiler.program = lambda *_: SimpleNamespace(call=jitted)
    call = SimpleNamespace(placement=SimpleNamespace(spans_processes=False), platform="cuda", args=(), kwargs={})
    traced = SimpleNamespace(call=call, on_gpu=on_gpu, compiler=compiler)
    return VariantSelector._compiled_or_plain(SimpleNamespace(_fn=jax.numpy.sin), traced, NOT_TIMED)


@pytest.mark.parametrize("error", [IndexError("raw_hash_map<>::at"), jax.errors.JaxRuntimeError("INTERNAL")])
def test_xla_runs_where_it_cannot_compile_the_program_with_kernels(error):
    def fails(_):
        raise error

    decision = selected(fails)
    assert decision.chosen == XLA
    assert str(error) in decision.reason


def test_a_program_that_compiles_without_fusion_of_slices_is_kept():
    tried = []

    def fails_first(options):
        tried.append(options)
        if not options:
            raise IndexError("raw_hash_map<>::at")

    assert selected(fails_first) is NOT_TIMED
    assert tried == [{}, SAFER_OPTIONS["cuda"]]


def test_a_program_that_compiles_is_kept():
    assert selected(lambda _: None) is NOT_TIMED


def test_on_a_cpu_the_call_compiles():
    def fails(_):
        raise AssertionError("compiled")

    assert selected(fails, on_gpu=False) is NOT_TIMED


@pytest.mark.parametrize(
    "slow, peaks, chosen",
    [
        ("jcuts/plain/none", {}, "jcuts"),
        ("jcuts", {}, "jcuts/plain/none"),
        ("jcuts/plain/none", {"jcuts": 1100, "jcuts/plain/none": 1000}, "jcuts/plain/none"),
        ("jcuts", {"jcuts": 1000}, "jcuts"),
    ],
)
def test_kernels_stand_against_the_rewritten_program_alone(monkeypatch, slow, peaks, chosen):
    def program(wait):
        def run(x):
            time.sleep(wait)
            return x + 1

        return run

    peaks = peaks or {"jcuts": 1000, "jcuts/plain/none": 1000}
    calls = {name: program(0.02 if name == slow else 0.001) for name in ("jcuts", "jcuts/plain/none")}
    monkeypatch.setattr(variant_benchmark, "_programs", lambda traced, names: ({n: calls[n] for n in names}, peaks))
    traced = SimpleNamespace(
        plan=lambda form, may_measure: SimpleNamespace(closed=form),
        closed=None,
        platform="cuda",
        on_gpu=False,
        arguments=SimpleNamespace(donates=False),
        copies=lambda: ((jax.numpy.zeros(4),), {}),
    )
    found = variant_benchmark.against_rewrites_alone(traced, NOT_TIMED)
    assert found.chosen == chosen
    assert found.reason.startswith(NOT_TIMED.reason)
    assert XLA not in found.seconds
