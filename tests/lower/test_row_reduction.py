"""The rows form: its phases, what stays in local buffers, and its schedules."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jcuts.base.errors import Refusal
from jcuts.kernel_ir.interpret import interpret
from jcuts.kernel_ir.program import Program
from jcuts.kernel_ir.verify import verify
from jcuts.lower.region import lower_region
from jcuts.lower.tensor_graph import build_graph
from jcuts.schedule.cpu import loop_candidates, row_reduction
from jcuts.schedule.gpu import candidates as gpu_candidates
from jcuts.trace.inline import inline
from tests import programs

X = np.random.default_rng(0).standard_normal((6, 5, 40)).astype(np.float32)


def names(program):
    return [p.name for p in program.phases]


def test_softmax_keeps_its_exponentials():
    program = programs.trace(lambda x: jax.nn.softmax(x), X).program()
    assert names(program) == ["reduce", "keep", "reduce", "map"]
    assert [(b.role, b.size) for b in program.locals] == [("local", 1), ("local", 40), ("local", 1)]
    exps = sum(n.op == "exp" for p in program.phases for n in (*p.body.nodes, *p.exit.nodes))
    assert exps == 1
    assert program.serial == tuple(g.axis for g in program.grid)


def test_along_leading_dimensions_the_lanes_are_columns():
    program = programs.trace(lambda x: jax.nn.softmax(x, axis=0), X).program()
    (lane,) = [g.axis for g in program.grid if g.axis not in program.serial]
    assert next(g.extent for g in program.grid if g.axis == lane) == 40
    for scheduled in programs.schedules(program):
        verify(scheduled)
        vectors = {a.name for p in scheduled.phases for a in p.axes if a.vector}
        assert vectors == {lane}


def test_mean_and_variance_share_the_row():
    def statistics(x):
        mean = x.mean(-1, keepdims=True)
        return (x - mean) * jax.lax.rsqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-5)

    program = programs.trace(statistics, X).program()
    assert names(program).count("reduce") == 2
    assert names(program)[-1] == "map"


def test_reductions_of_one_level_share_a_phase():
    program = programs.trace(lambda x: (x.sum(-1), x.max(-1), (x * x).sum(-1)), X).program()
    assert names(program) == ["reduce"]
    assert len(program.phases[0].accs) == 3


def test_reductions_that_no_one_reads_leave_a_map():
    def fn(x):
        rounded = jnp.round(x)
        rounded.max(-1)  # dead code, which `simplify` would drop
        return rounded

    graph = build_graph(inline(jax.make_jaxpr(fn)(X)).jaxpr)
    program = lower_region(graph, frozenset(range(len(graph.nodes))))
    assert isinstance(program, Program), program
    assert names(program) == ["map"] and program.template == "map" and not program.grid and not program.serial
    found = [p for p, _ in gpu_candidates.candidates(program, gpu_candidates.GpuMachine(132), 8)]
    assert found
    for scheduled in (program, *programs.schedules(program), *found):
        verify(scheduled)
    np.testing.assert_array_equal(interpret(program, [X])[0], np.round(X))


def test_rows_are_split_among_threads():
    big = np.zeros((64, 4096), np.float32)
    program = programs.trace(lambda x: jax.nn.softmax(x), big).program()
    one = programs.schedules(program, 1, loop_candidates.Machine(64, 32, 1))[0]
    many = programs.schedules(program, 1, loop_candidates.Machine(64, 32, 8))[0]
    assert one.tiles == 1
    assert many.tiles >= 8


@pytest.mark.parametrize("extent", [1, 2, 3, 15, 16, 17, 64, 65])
def test_every_row_length_is_right(extent):
    from jcuts.kernel_ir.interpret import interpret

    x = np.random.default_rng(extent).standard_normal((3, extent)).astype(np.float32)
    trace = programs.trace(lambda x: jax.nn.softmax(x, axis=-1) * 2, x)
    built = trace.build()
    if isinstance(built, Refusal):
        assert extent == 1, built
        return
    want = np.asarray(jax.nn.softmax(x)) * 2
    program = programs.schedules(built, 1)[0]
    np.testing.assert_allclose(interpret(program, [x])[0], want, rtol=1e-5)
    np.testing.assert_allclose(programs.run_compiled(program, [x])[0], want, rtol=1e-5)


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (lambda x: x.sum(0).max() + x.max((1, 2)).sum(), "different dimensions"),
        (lambda x: (jax.nn.softmax(x), jnp.tanh(x)[:, :, :3]), "neither as large as the rows"),
    ],
)
def test_refusals(fn, reason):
    refusal = programs.trace(fn, X).build()
    assert isinstance(refusal, Refusal)
    assert reason in refusal.reason


@pytest.mark.parametrize("axis", [(0, 1), (0, 1, 3)])
def test_long_sums_run_in_chains(axis):
    """A sum of equal numbers drifts: its error is that of the longest chain of additions."""
    x = np.full((32, 32, 6, 8), 0.1, np.float32)
    program = programs.trace(lambda x: (x - x.mean(axis, keepdims=True)) * x.mean(axis, keepdims=True), x).program()
    for scheduled in programs.schedules(program):
        verify(scheduled)
        phase = next(p for p in scheduled.phases if p.reds)
        inside = [r for r in phase.reds if not r.vector]
        vectors = max([r.chains for r in phase.reds if r.vector] + [a.unroll for a in phase.axes if a.vector])
        assert inside[-1].chains == inside[-1].unroll >= 4 and inside[-1].chains * vectors <= row_reduction.CHAINS
