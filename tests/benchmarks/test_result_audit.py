"""Planted cheats in what the network benchmarks time: each is caught, honest programs pass."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jcuts
from benchmarks.networks.result_audit import audit, fresh

RNG = np.random.default_rng(11)
ARGUMENTS = tuple(jnp.asarray(RNG.standard_normal(s), jnp.float32) for s in ((40, 24), (24, 16), (16,)))


def function(x, w, b):
    return jax.nn.softmax(jnp.maximum(x @ w + b, 0)), jnp.argmax(x @ w, axis=1)


HONEST = jax.jit(function)


class KeptResult:
    """Returns what it computed first."""

    def __init__(self):
        self.kept = None

    def __call__(self, *args):
        self.kept = self.kept or HONEST(*args)
        return self.kept


class KeptByIdentity:
    """Remembers the result of the very arguments that it was given before."""

    def __init__(self):
        self.known = {}

    def __call__(self, *args):
        key = tuple(map(id, args))
        if key not in self.known:
            self.known[key] = args, HONEST(*args)
        return self.known[key][1]


class KeptCopy(KeptResult):
    """Returns a copy of it."""

    def __call__(self, *args):
        return jax.tree.map(jnp.copy, super().__call__(*args))


def without_a_tenth(x, w, b):
    y, best = HONEST(x, w, b)
    return y.at[-len(y) // 10 :].set(0), best


def stale_tenth(x, w, b):
    """A tile that holds what was there before."""
    y, best = HONEST(x, w, b)
    return y.at[:4].set(HONEST(*ARGUMENTS)[0][:4]), best


@jax.jit
def in_bfloat16(x, w, b):
    y, _ = function(*(v.astype(jnp.bfloat16) for v in (x, w, b)))
    return y.astype(jnp.float32), function(x, w, b)[1]


def nan_for_one(x, w, b):
    y, best = HONEST(x, w, b)
    return y.at[3, 3].set(jnp.nan), best


def other_indices(x, w, b):
    y, best = HONEST(x, w, b)
    return y, best[::-1]


def writing(x, w, b):
    result = HONEST(x, w, b)
    jax.block_until_ready(result)
    memory = np.asarray(x)
    memory.flags.writeable or _writeable(memory)[...].fill(0)
    return result


def _writeable(array):
    """The memory behind a read-only view, as a kernel sees it."""
    import ctypes

    pointer = ctypes.cast(array.ctypes.data, ctypes.POINTER(ctypes.c_float))
    return np.ctypeslib.as_array(pointer, array.shape)


CHEATS = {
    "kept result": (KeptResult, "earlier call"),
    "kept by the identity of arguments": (KeptByIdentity, "earlier call"),
    "copy of a kept result": (KeptCopy, "of float64"),
    "a tenth of the tiles left out": (lambda: without_a_tenth, "of float64"),
    "a stale tile": (lambda: stale_tenth, "of float64"),
    "lower precision": (lambda: in_bfloat16, "of float64"),
    "a NaN": (lambda: nan_for_one, "NaN where plain jax.jit has none"),
    "other integers": (lambda: other_indices, "output 1 differs in"),
    "another type": (lambda: lambda *a: jax.tree.map(lambda y: y.astype(jnp.bfloat16), HONEST(*a)), "its results are"),
    "arguments overwritten": (lambda: writing, "writes into its arguments"),
}


@pytest.mark.parametrize("name", CHEATS)
def test_cheats_are_caught(name):
    make, reason = CHEATS[name]
    faults = audit(make(), function, ARGUMENTS)
    assert any(reason in fault for fault in faults), faults


def test_honest_programs_pass():
    assert audit(HONEST, function, ARGUMENTS) == []
    doubled = lambda x: (x * 2, x.sum())  # noqa: E731
    assert audit(jax.jit(doubled, donate_argnums=(0,)), doubled, ARGUMENTS[:1], donates=True) == []
    assert audit(jcuts.optimize(function, mode="fusion", tune="off"), function, ARGUMENTS) == []


def test_fresh_arguments_are_other_values_of_the_same_types():
    given = (ARGUMENTS, {"n": np.arange(5, dtype=np.int32), "h": jnp.ones(3, jnp.bfloat16)})
    made = fresh(given, 1)
    assert jax.tree.structure(tuple(given)) == jax.tree.structure(made)
    for a, b in zip(jax.tree.leaves(given), jax.tree.leaves(made), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
    assert not np.array_equal(made[0][0], ARGUMENTS[0]) and np.array_equal(made[1]["n"], np.arange(5))
    np.testing.assert_array_equal(made[0][0], fresh(given, 1)[0][0])
