"""Subset to program: which form it takes, what is fused into it, and the reasons of refusals."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jcuts.base.errors import Refusal
from jcuts.kernel_ir.interpret import interpret
from jcuts.kernel_ir.loop_transforms import collapse_program
from jcuts.kernel_ir.printer import program_text
from jcuts.kernel_ir.verify import verify
from tests import programs
from tests.ops.cases import conv

X = np.random.default_rng(0).standard_normal((6, 16)).astype(np.float32)
W = np.random.default_rng(1).standard_normal((16, 16)).astype(np.float32)
B = np.random.default_rng(2).standard_normal(16).astype(np.float32)
IMAGE = np.random.default_rng(3).standard_normal((1, 8, 8, 4)).astype(np.float32)
FILTER = np.random.default_rng(4).standard_normal((3, 3, 4, 8)).astype(np.float32)


def padded(x):
    return lax.pad(x, np.float32(0), ((0, 0, 0), (1, 1, 0), (1, 1, 0), (0, 0, 0)))


@pytest.mark.parametrize(
    ("fn", "arguments", "template", "phases"),
    [
        (lambda x, b: jnp.tanh(x) + b, (X, B), "map", 1),
        (lambda x: (x + 1, (x * 2).reshape(-1)), (X,), "map", 1),
        (lambda x, w, b: jax.nn.relu(x @ w + b), (X, W, B), "contraction", 1),
        (lambda x, w: (x + 1) @ (w * 2), (X, W), "contraction", 1),
        (lambda x, w: (x @ w).T.reshape(4, -1), (X, W), "contraction", 1),
        (lambda x, w: jnp.maximum(conv(x, w), 0), (IMAGE, FILTER), "convolution", 1),
        (lambda x, w: conv(padded(x), w, padding="VALID"), (IMAGE, FILTER), "convolution", 1),
        (lambda x: jnp.exp(x).sum(1) * 2, (X,), "reduction", 1),
        (lambda x: jnp.argmax(x, 0), (X,), "reduction", 1),
        (lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "VALID") / 4, (IMAGE,), "window", 1),
        (lambda x: jax.nn.softmax(x), (X,), "rows", 4),
        (lambda x: x - x.mean(1, keepdims=True), (X,), "rows", 2),
        (lambda x: (x.mean(0), x.max(0)), (X,), "reduction", 1),
    ],
)
def test_forms(fn, arguments, template, phases):
    program = programs.trace(fn, *arguments).program()
    verify(program)
    assert (program.template, len(program.phases)) == (template, phases), program_text(program)


def test_an_epilogue_reads_the_accumulator_and_stores_once():
    program = programs.trace(lambda x, w, b: jax.nn.relu(x @ w + b), X, W, B).program()
    (phase,) = program.phases
    assert [b.name for b in program.buffers] == ["in0", "in1", "in2", "out0"]
    assert [n.op for n in phase.exit.nodes] == ["acc", "load", "add", "const", "max"]
    assert len(phase.stores) == 1


def test_padding_becomes_guards_of_the_load():
    (phase,) = programs.trace(lambda x, w: conv(padded(x), w, padding="VALID"), IMAGE, FILTER).program().phases
    guarded = [n for n in phase.body.nodes if n.op == "load" and n.guards]
    assert len(guarded) == 1 and len(guarded[0].guards) == 2
    assert not any(n.op == "select" for n in phase.body.nodes)


@pytest.mark.parametrize(
    ("fn", "arguments", "reason"),
    [
        (lambda x, w: jnp.exp(x) @ w, (X, W), "operations would be repeated for every use by dot_general"),
        (lambda x, w: ((x * 2) @ w, x * 2), (X, W), "results|a value from before the reduction"),
        (lambda x, w: (x @ w) @ w, (X, W), "2 reductions of different kinds"),
        (lambda x: (x + 1, x[:, :4] * 2), (X,), "results of different sizes"),
        (lambda x: x.sum(0) + x.sum(1)[:1], (X,), "reductions over different dimensions"),
        (lambda x, w: jax.nn.softmax(x @ w), (X, W), "reductions of different kinds"),
        (lambda x, w: x @ w - jnp.roll(x @ w, 1, 0), (X, W), "kinds|another point|do not follow"),
        (lambda x: lax.sort(x), (X,), "no op rule"),
    ],
)
def test_refusals_say_why(fn, arguments, reason):
    import re

    trace = programs.trace(fn, *arguments)
    refusal = trace.build()
    assert isinstance(refusal, Refusal), program_text(refusal)
    assert re.search(reason, refusal.reason), refusal


def test_nothing_outside_uses_it():
    trace = programs.trace(lambda x: (x * 3, jnp.sin(x) + 1)[0], X)
    dead = [n.number for n in trace.graph.nodes if n.prim in ("sin", "add")]
    if dead:  # JAX may drop dead code while tracing
        refusal = trace.build(dead)
        assert isinstance(refusal, Refusal) and "nothing outside uses" in refusal.reason


# -- axes -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("fn", "shapes", "extents"),
    [
        (lambda x: x * 2, ((2, 3, 5),), [30]),
        (lambda x, b: x * b, ((2, 3, 5), (5,)), [6, 5]),
        (lambda x, b: x * b[:, None, None], ((2, 3, 5), (2,)), [2, 15]),
        (lambda x: x.transpose(2, 0, 1) + 1, ((2, 3, 5),), [5, 6]),
        (lambda x: x + jnp.arange(5, dtype=np.float32), ((2, 3, 5),), [6, 5]),
        (lambda x: x.reshape(-1) * 2, ((6, 5),), [30]),
        (lambda x, y: x @ y, ((2, 3, 4), (4, 6)), [6, 6]),
    ],
)
def test_axes_merge_where_every_address_allows_it(fn, shapes, extents):
    arrays = [np.random.default_rng(k).standard_normal(s).astype(np.float32) for k, s in enumerate(shapes)]
    program = collapse_program(programs.trace(fn, *arrays).program())
    assert [a.extent for a in program.phases[0].axes] == extents


def test_reductions_merge_too():
    program = collapse_program(programs.trace(lambda x: x.sum((1, 2)), np.ones((4, 5, 6), np.float32)).program())
    assert [r.extent for r in program.phases[0].reds] == [30]
    program = collapse_program(programs.trace(lambda x: x.sum((0, 2)), np.ones((4, 5, 6), np.float32)).program())
    assert [r.extent for r in program.phases[0].reds] == [4, 6]


def test_only_windows_that_share_no_element_take_costly_operations_before_them():
    def pooled(stride):
        return lambda x: jax.lax.reduce_window(
            jnp.exp(jnp.maximum(x * 2 + 1, 0)), 0.0, jax.lax.add, (1, 2, 2, 1), (1, *stride, 1), "VALID"
        )

    x = np.ones((2, 6, 8, 5), np.float32)
    apart = programs.trace(pooled((2, 2)), x)
    assert apart.program().template == "window"
    np.testing.assert_allclose(interpret(apart.program(), apart.operands())[0], 4 * np.exp(3), rtol=1e-6)
    refused = programs.trace(pooled((1, 2)), x).build()
    assert isinstance(refused, Refusal) and "would be repeated for every use" in refused.reason


@pytest.mark.parametrize("fills", [(2**53, 2**53 + 1), (2**53, 2**53), (-1, 3)])
def test_paddings_of_large_integers_are_told_apart(fills):
    with jax.enable_x64(True):

        def function(x):
            inner = lax.pad(x, np.int64(fills[0]), ((1, 1, 0), (0, 0, 0)))
            return lax.pad(inner, np.int64(fills[1]), ((2, 2, 0), (3, 3, 0))) + 1

        x = np.arange(35).reshape(5, 7)
        traced = programs.trace(function, x)
        (got,) = interpret(traced.program(), traced.operands())
        np.testing.assert_array_equal(got, np.asarray(function(x)))
