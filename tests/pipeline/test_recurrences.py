"""Scans that are one kernel on a GPU: regions of every cover, in place of their bodies'."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jcuts.base.settings import Settings, Variant
from jcuts.pipeline import computation, kernel_selection, loop_bodies
from jcuts.pipeline.report_rows import refusal_rows
from jcuts.pipeline.verify import verify_partition, verify_programs
from jcuts.rewrite.simplify import simplify
from jcuts.trace import jaxapi
from jcuts.trace.inline import inline
from tests.lower.recurrence.cells import gru, normal

SETTINGS = Settings()


@pytest.fixture
def grouped(monkeypatch):
    """A function's level on a GPU that has a schedule for everything."""
    monkeypatch.setattr(loop_bodies, "has_gpu_kernel", lambda program: True)
    monkeypatch.setattr(loop_bodies, "add_candidates", lambda regions, platform: None)

    def make(function, *arguments, fuse=True):
        closed = simplify(inline(jaxapi.closed_jaxpr_of(function, *arguments)))
        level = computation.group(closed, SETTINGS, computation.Fuel(), "cuda")
        loop_bodies.take_recurrences(level, fuse=fuse)
        for one in level.walk():
            for region in one.subsets:
                region.ranking = lambda program=region.program: [(program, 1.0)]
        verify_partition(level)
        verify_programs(level)
        return level

    return make


def before_and_behind(x, h, u):
    function, _ = gru()
    h, hs = function(jax.nn.softmax(x), h, u)
    return h, jax.nn.softmax(hs @ u)


def templates(level):
    return [region.program.template for region in level.subsets]


def test_a_scan_is_a_region_in_place_of_its_body(grouped):
    _, arguments = gru(width=64, batch=2, steps=3)
    level = grouped(before_and_behind, *arguments)
    assert "recurrence" in templates(level) and len(level.loops) == 1
    assert level.walk() == [level]
    assert len(grouped(before_and_behind, *arguments, fuse=False).walk()) == 2


@pytest.mark.parametrize("regions", ["all", "anchored", "absorbing"])
def test_it_stays_in_every_cover(grouped, regions):
    _, arguments = gru(width=64, batch=2, steps=3)
    level = grouped(before_and_behind, *arguments)
    level.set_partition(level.fused)
    kernel_selection._leave_on_gpu([level], regions)
    assert templates(level).count("recurrence") == 1
    verify_partition(level)


def test_a_form_without_kernels_has_none(grouped):
    _, arguments = gru(width=64, batch=2, steps=3)
    level = grouped(before_and_behind, *arguments)
    chosen = kernel_selection.choose_partition(level, Settings(form=Variant((), "none")), "cuda")
    assert not chosen.regions and chosen.origin == "none"


def test_loops_that_are_no_kernel_keep_their_bodies(grouped):
    def sorts(h, xs):
        return jax.lax.scan(lambda h, x: (jnp.sort(jnp.tanh(h @ h + x)), None), h, xs)

    level = grouped(sorts, normal(48, 48), normal(3, 48, 48))
    assert not level.loops and len(level.walk()) == 2


def test_a_loop_in_a_loop(grouped):
    def nested(h, u):
        def outer(h, _):
            return jax.lax.scan(lambda h, _: (jnp.tanh(h @ u), None), h, None, length=3)[0], None

        return jax.lax.scan(outer, h, None, length=2)[0]

    level = grouped(nested, normal(2, 40), normal(40, 40))
    assert not level.loops  # loops in loops have no form
    assert [bool(inner.loops) for inner in level.walk()] == [False, True]


def test_an_unused_result_is_none_of_the_kernel(grouped):
    function, arguments = gru(width=64, batch=2, steps=3)
    level = grouped(lambda *args: function(*args)[1], *arguments)
    (region,) = level.loops.values()
    assert [b.shape for b in region.program.outputs] == [(3, 2, 64)]
    assert np.prod([b.size for b in region.program.outputs]) == 3 * 2 * 64


def test_why_a_scan_is_no_kernel_is_reported(monkeypatch):
    def sorts(x):
        return jax.lax.scan(lambda c, row: (jnp.sort(c + row), None), x[0], x)[0]

    def sums(x):
        return jax.lax.scan(lambda c, row: (jnp.tanh(c + row), None), x[0], x)[0]

    monkeypatch.setattr(loop_bodies, "has_gpu_kernel", lambda program: False)
    for function, reason in ((sorts, "sort"), (sums, loop_bodies.NO_ROOM)):
        closed = simplify(inline(jaxapi.closed_jaxpr_of(function, np.ones((5, 4), np.float32))))
        level = computation.group(closed, SETTINGS, computation.Fuel(), "cuda")
        loop_bodies.take_recurrences(level, fuse=True)
        (row,) = [r for r in refusal_rows(level) if r.op == "scan"]
        assert reason in row.reason and __name__.rpartition(".")[2] in row.where
