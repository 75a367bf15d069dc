"""Online softmax: which programs of rows are a maximum and the sum of exponentials that follows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jcuts.lower.reduction.online_softmax import match_online_softmax
from tests import programs
from tests.codegen.cuda.reduction.test_online_softmax import FUNCTIONS, arguments_of

X = np.random.default_rng(0).standard_normal((6, 40)).astype(np.float32)
LONG = np.zeros((2, 40000), np.float32)  # its exponentials are not kept for the next phase


def exponentials(shift, *, combine=jnp.sum, power=jnp.exp):
    """A maximum of rows and a reduction over what is made of it. Args: shift: what is subtracted from the maximum."""

    def fn(x):
        maximum = jnp.max(x, -1, keepdims=True)
        return combine(power(x - shift(x, maximum)), -1, keepdims=True)

    return fn


def other_sums(x):
    """Beside the sum of exponentials one that does not depend on the maximum, on another level."""
    maximum = jnp.max(x, -1, keepdims=True)
    return jnp.sum(jnp.exp(x - maximum), -1), jnp.sum(x * x, -1), jnp.max(jnp.abs(x), -1)


def mixed_sums(x):
    """A second sum of the same phase that depends on the maximum in another way."""
    maximum = jnp.max(x, -1, keepdims=True)
    return jnp.sum(jnp.exp(x - maximum), -1), jnp.sum(jnp.cos(x - maximum), -1)


def different_values(x):
    maximum = jnp.max(jnp.abs(x), -1, keepdims=True)
    return jnp.sum(jnp.exp(x - maximum), -1)


OTHERS = {
    "a minimum": lambda x: jnp.sum(jnp.exp(x - jnp.min(x, -1, keepdims=True)), -1),
    "different values": different_values,
    "another function": exponentials(lambda x, m: m, power=jnp.exp2),
    "an exponential of something else": exponentials(lambda x, m: m * 2),
    "a maximum plus 1": exponentials(lambda x, m: m + 1),
    "at least 0": exponentials(lambda x, m: jnp.maximum(m, 0)),
    "an infinity where it is not finite": exponentials(lambda x, m: jnp.where(jnp.isfinite(m), m, jnp.inf)),
    "a maximum of exponentials": exponentials(lambda x, m: m, combine=jnp.max),
    "the negative": lambda x: jnp.sum(jnp.exp(jnp.max(x, -1, keepdims=True) - x), -1),
    "a sum that needs the maximum": mixed_sums,
    "columns": lambda x: jax.nn.softmax(x, 0),
    "a layer norm": lambda x: (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5),
    "16-bit arithmetic": lambda x: jax.nn.softmax(x.astype(jnp.bfloat16)),
    "one reduction": lambda x: x.sum(-1),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("length", [40, 40000])
def test_it_is_found(name, length):
    traced = programs.trace(FUNCTIONS[name], *arguments_of(name, np.zeros((2, length), np.float32)))
    program = traced.program()
    found = match_online_softmax(program)
    assert found is not None
    first, second = program.phases[found.first], program.phases[found.second]
    assert first.accs[found.maximum].combine == "max" and len(found.sums) == 1
    assert found.centre in {s.buffer for s in first.stores} and second.accs[found.sums[0]].combine == "add"


def test_sums_of_the_same_row_may_stay_beside_it():
    program = programs.trace(other_sums, X).program()
    found = match_online_softmax(program)
    assert found is not None
    accs = [a.combine for n in (found.first, found.second) for a in program.phases[n].accs]
    assert sorted(accs) == ["add", "add", "max", "max"]
    assert program.phases[found.first].accs[found.maximum].combine == "max"


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("x", [X, LONG], ids=["short", "long"])
def test_it_is_not_found(name, x):
    assert match_online_softmax(programs.trace(OTHERS[name], x).program()) is None
