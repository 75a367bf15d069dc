"""Programs as source: what is printed computes the same bits, and what cannot be printed is refused by name."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jcuts.base.errors import UsageError
from jcuts.differential import program_text
from jcuts.differential.run import flat_program
from jcuts.trace import jaxapi

RNG = np.random.default_rng(5)
X = RNG.standard_normal((6, 5)).astype(np.float32)
IMAGE = RNG.standard_normal((1, 8, 8, 3)).astype(np.float32)
FILTER = RNG.standard_normal((3, 3, 3, 4)).astype(np.float32)
TABLE = RNG.standard_normal((40, 3)).astype(np.float32)


def conv(x, w):
    y = lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return lax.reduce_window(y, -np.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def loops(x):
    total, rows = lax.scan(lambda c, row: (c + row, jnp.tanh(c)), jnp.zeros(5), x)
    last = lax.while_loop(lambda v: v[0] < 3, lambda v: (v[0] + 1, v[1] * 0.5), (0, total))
    return rows, lax.cond(total[0] > 0, lambda v: v, lambda v: -v, last[1])


CASES = {
    "elementwise": (lambda x: jax.nn.softmax(x) * np.float32(np.inf) + jnp.where(x > 0, 1.5, -0.0), (X,)),
    "convolution": (conv, (IMAGE, FILTER)),
    "gradient of a pool": (lambda x, w: jax.grad(lambda v: conv(v, w).sum())(x), (IMAGE, FILTER)),
    "loops": (loops, (X,)),
    "gather and scatter": (lambda i: jnp.zeros((40, 3)).at[i].add(jnp.asarray(TABLE)[i] * 2), (np.array([3, 7, 3]),)),
    "bfloat16": (lambda x: (x.astype(jnp.bfloat16) @ jnp.ones((5, 2), jnp.bfloat16) + 1).astype(jnp.float32), (X,)),
    "sort, split, cumulative": (lambda x: (jnp.sort(x, 1), jnp.split(x, 2), jnp.cumsum(x, 0), jnp.argmax(x, 1)), (X,)),
    "random numbers of a constant key": (lambda x: x + jax.random.normal(jax.random.key(3), (6, 5)), (X,)),
    "integers": (lambda i: (i // 3, i % 2, (i << 1) ^ 5, i.astype(bool)), (np.arange(7, dtype=np.int32),)),
}


@pytest.mark.parametrize("name", CASES)
def test_printed_programs_compute_the_same_bits(name):
    function, args = CASES[name]
    closed = flat_program(function, *args)
    text, constants = program_text.source_of(closed)
    types = [(v.aval.shape, v.aval.dtype.name) for v in closed.jaxpr.invars]
    again = program_text.retraced(text, constants, types)
    assert program_text.names_of(again) == program_text.names_of(closed)
    both = [jax.jit(lambda *xs, c=c: jaxapi.eval_closed(c, *xs))(*args) for c in (closed, again)]
    for a, b in zip(*both, strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    assert program_text.source_of(again)[0].count("bind(") == text.count("bind(")


def test_source_lines_are_in_the_text():
    text, _ = program_text.source_of(flat_program(loops, X))
    assert "test_program_text.py" in text and "(loops)" in text


def test_windows_are_parts_of_the_program():
    function, args = CASES["elementwise"]
    closed = flat_program(function, *args)
    count = len(closed.jaxpr.eqns)
    known = dict(zip(closed.jaxpr.invars, args, strict=True))
    for start, stop in ((0, 3), (3, count)):
        part = program_text.window(closed, start, stop)
        assert len(part.jaxpr.eqns) <= stop - start
        known.update(
            zip(part.jaxpr.outvars, jaxapi.eval_closed(part, *[known[v] for v in part.jaxpr.invars]), strict=True)
        )
    np.testing.assert_array_equal(known[closed.jaxpr.outvars[0]], function(*args))


def test_what_has_no_source_form_is_named():
    with pytest.raises(UsageError, match="has effects"):
        flat_program(lambda x: jax.debug.print("{}", x), X)
    with pytest.raises(UsageError, match="random keys inside"):
        flat_program(lambda key: jax.random.normal(key, (3,)), jax.random.key(0))
    pure = flat_program(lambda x: jax.pure_callback(np.sin, jax.ShapeDtypeStruct((6, 5), np.float32), x), X)
    with pytest.raises(UsageError, match=r"pure_callback.*without a source form") as caught:
        program_text.source_of(pure)
    assert caught.value.primitive == "pure_callback"


def test_conversions_that_change_nothing_are_left_out():
    closed = flat_program(lambda x: lax.convert_element_type(x, np.float32) * 2 + jnp.float32(1), X)
    assert "convert_element_type" not in program_text.names_of(closed)
