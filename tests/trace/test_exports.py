"""Operands of exported programs bound to constants: the module that results is the one of closed-over arrays."""

from __future__ import annotations

import collections
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from jcuts.trace import jaxapi

pytestmark = pytest.mark.usefixtures("xla_as_shipped")


def array(*shape, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32).astype(dtype)


def instructions(fn, *args):
    text = jax.jit(fn).lower(*args).compile().as_text()
    return collections.Counter(re.findall(r"= (\S+ [a-z\-]+)\(", text))


def program(weights, x):
    """Tied weights of a product with one row, which XLA transposes when it sees a constant."""
    words, gain = weights
    h = jax.nn.silu(words[3] * gain + x)
    return h, h[None] @ words.T


@pytest.mark.parametrize("platforms", [("cpu",), ("cpu", "cuda")])
def test_compiles_to_the_same_instructions(platforms):
    weights, x = (array(64, 32), array(32, seed=1)), array(32, seed=2)
    exported = export.export(jax.jit(program), platforms=platforms)(weights, x)
    bound = jaxapi.with_constants(exported, weights)
    closed = [jnp.asarray(w) for w in weights]
    assert instructions(bound.call, x) == instructions(lambda x: program(closed, x), x)
    expected = jax.jit(lambda x: program(closed, x))(x)
    for found, wanted in zip(jax.jit(bound.call)(x), expected, strict=True):
        assert np.asarray(found).tobytes() == np.asarray(wanted).tobytes()
    again = export.deserialize(bytearray(bound.serialize()))
    assert np.asarray(again.call(x)[1]).tobytes() == np.asarray(expected[1]).tobytes()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.int8, np.bool_])
def test_dtypes(dtype):
    w, x = np.asarray(array(8) > 0 if dtype is np.bool_ else array(8) * 4).astype(dtype), array(8, seed=1)
    exported = export.export(jax.jit(lambda ws, x: x * ws[0].astype(np.float32)))((w,), x)
    np.testing.assert_array_equal(jaxapi.with_constants(exported, [w]).call(x), x * w.astype(np.float32))


def test_unused_and_missing_operands():
    unused, used, x = array(4), array(8, seed=1), array(8, seed=2)
    exported = export.export(jax.jit(lambda ws, y, x: ws[1] * x))((unused, used), x, x)
    bound = jaxapi.with_constants(exported, [unused, used])
    np.testing.assert_array_equal(bound.call(x * 2, x), used * x)
    assert [a.shape for a in bound.in_avals] == [(8,), (8,)]
    exported = export.export(jax.jit(lambda ws, x: -x))((), x)
    np.testing.assert_array_equal(jaxapi.with_constants(exported, []).call(x), -x)
