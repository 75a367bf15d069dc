"""Sums over windows and products over channels in the cheaper order: where, where not, and against float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jcuts.rewrite.registry import applicable, rewritten
from jcuts.rewrite.simplify import simplify
from jcuts.trace import jaxapi
from jcuts.trace.inline import inline
from tests.evaluation import compiled, exact

RNG = np.random.default_rng(17)
NHWC, NCHW = ("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW")
PADDED_CHANNELS = ((0, 0), (1, 1), (1, 1), (0, 2))


def values(*shape, dtype=jnp.float32):
    return jnp.asarray(RNG.standard_normal(shape), dtype)


def flat(function, *args):
    return simplify(inline(jaxapi.closed_jaxpr_of(function, *args)))


def order(closed):
    """Products and pools of a program, in their order."""
    letters = {"dot_general": "P", "conv_general_dilated": "P", "reduce_window_sum": "W"}
    return "".join(letters.get(jaxapi.primitive_name(e), "") for e in closed.jaxpr.eqns)


def exchanged(function, *args, rules=("pools",)):
    """The rewritten program, after a comparison with a float64 run of the program as it was."""
    closed = flat(function, *args)
    new = rewritten(closed, rules)
    jaxapi.check(new.closed)
    results = zip(compiled(closed, *args), compiled(new.closed, *args), exact(closed, *args), strict=True)
    for x, y, r in results:
        assert x.dtype == y.dtype and x.shape == y.shape
        size, eps = np.linalg.norm(r), float(jnp.finfo(y.dtype).eps)
        plain, mine = (np.linalg.norm(np.asarray(a, np.float64) - np.asarray(r)) for a in (x, y))
        assert mine <= 2 * plain + 4 * eps * size
    return new


def pool(x, window, stride=1, padding="SAME", channel=3):
    sizes, strides = [1] * 4, [1] * 4
    for d in range(1, 4) if channel == 3 else range(2, 4):
        if d != channel:
            sizes[d], strides[d] = window, stride
    return lax.reduce_window(x, 0.0, lax.add, sizes, strides, padding)


def average(x, window=3, channel=3):
    ones = jnp.ones([1 if d in (0, channel) else n for d, n in enumerate(x.shape)])
    return pool(x, window, channel=channel) / pool(ones, window, channel=channel)


def point(x, w, numbers=NHWC):
    return lax.conv_general_dilated(x, w, (1, 1), "VALID", dimension_numbers=numbers)


@pytest.mark.parametrize("rules", [("pools",), ("dots", "pools")])
def test_a_pooled_branch_multiplies_before_it_pools(rules):
    w, bias = values(1, 1, 12, 5), values(5)
    new = exchanged(lambda x: jax.nn.relu(point(average(x), w) + bias), values(2, 7, 6, 12), rules=rules)
    assert new.counts["pools"] == 1 and order(new.closed) == "WPW"  # the first counts points
    made = [e.outvars[0].aval.shape for e in new.closed.jaxpr.eqns if jaxapi.primitive_name(e) == "reduce_window_sum"]
    assert made == [(1, 7, 6, 1), (2, 7, 6, 5)]


def test_channels_first_sums_and_numbers():
    w = values(5, 12, 1, 1)
    new = exchanged(lambda x: point(average(x, 5, channel=1), w, NCHW), values(1, 12, 7, 9))
    assert new.counts == {"pools": 1}
    matrix = values(12, 4)
    new = exchanged(lambda x: pool(x, 3) @ matrix, values(1, 6, 5, 12))
    assert order(new.closed) == "PW"
    new = exchanged(lambda x: (pool(x, 3) / 9) @ matrix, values(1, 6, 5, 12))
    assert order(new.closed) == "PW"
    new = exchanged(
        lambda x, w: lax.dot_general(pool(x, 2), w, (((3,), (1,)), ((), ()))), values(1, 6, 5, 12), values(4, 12)
    )
    assert order(new.closed) == "PW"


def test_a_transition_pools_before_it_multiplies():
    w = values(1, 1, 12, 6)
    new = exchanged(lambda x: point(jax.nn.relu(x), w), values(2, 7, 9, 12))
    assert new.counts == {}

    def transition(x):
        return pool(point(jax.nn.relu(x), w), 2, 2, "VALID") / 4

    x = values(2, 7, 9, 12)
    new = exchanged(transition, x)
    assert new.counts == {"pools": 1} and order(flat(transition, x)) == "PW" and order(new.closed) == "WP"
    assert applicable(flat(transition, x)) == ("dots", "pools")
    new = exchanged(lambda x: pool(point(x, w), 3, 2, [(0, 0), (1, 1), (2, 0), (0, 0)]), x)
    assert order(new.closed) == "WP"  # what is padded is 0 on either side


def test_the_pooled_branch_joins_its_siblings():
    ws, last = [values(12, n) for n in (4, 6)], values(12, 3)
    x, rules = values(1, 5, 4, 12), ("pools", "siblings")
    new = exchanged(lambda x: [*(x @ w for w in ws), average(x) @ last], x, rules=rules)
    assert new.counts == {"pools": 1, "siblings": 1} and order(new.closed).count("P") == 1


@pytest.mark.parametrize(
    "function",
    [
        lambda x: pool(x, 3) @ values(12, 12),  # as many channels
        lambda x: pool(x, 3, 2) @ values(12, 4),  # pooled to fewer points
        lambda x: pool(x, 3, 1, "VALID") @ values(12, 4),
        lambda x: pool(x @ values(12, 2), 2, 2, "VALID"),  # more channels before than points saved
        lambda x: pool(x @ values(12, 12), 3),
        lambda x: (y := pool(x, 3), y @ values(12, 4)),  # two users
        lambda x: pool(x @ values(12, 12) + values(12), 2, 2),
        lambda x: (pool(x, 3) / values(12)) @ values(12, 4),
        lambda x: (pool(x, 3) / values(1, 6, 6, 12)) @ values(12, 4),
        lambda x: (4 / pool(x, 3)) @ values(12, 4),
        lambda x: jnp.einsum("nhwc,hk->nkwc", pool(x, 3), values(6, 4)),
        lambda x: lax.conv_general_dilated(pool(x, 3), values(3, 3, 12, 4), (1, 1), "SAME", dimension_numbers=NHWC),
        lambda x: lax.conv_general_dilated(
            pool(x, 3), values(1, 1, 2, 6), (1, 1), "SAME", dimension_numbers=NHWC, feature_group_count=6
        ),
        lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 2, 1, 3), (1, 1, 1, 1), "SAME") @ values(12, 4),
        lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 1, 1, 1), "SAME") @ values(12, 4),
        lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 3, 3, 1), (1,) * 4, PADDED_CHANNELS) @ values(14, 4),
    ],
)
def test_others_stay(function):
    assert rewritten(flat(function, values(1, 6, 6, 12)), ("pools",)).counts == {}


def test_a_window_over_the_batch_and_a_chain():
    w = values(12, 4)
    new = exchanged(
        lambda x: lax.reduce_window(x, 0.0, lax.add, (2, 3), (1, 1), "SAME").reshape(7, 12) @ w, values(7, 12)
    )
    assert new.counts == {}  # along the channels, too
    new = exchanged(lambda x: lax.reduce_window(x, 0.0, lax.add, (2, 1), (1, 1), "SAME") @ w, values(7, 12))
    assert order(new.closed) == "PW"
    # Between two products there is one exchange: each pool and product moves once.
    first, second = values(12, 8), values(8, 4)
    new = exchanged(lambda x: pool(x @ first, 2, 2, "VALID") @ second, values(1, 6, 6, 12))
    assert new.counts == {"pools": 1} and order(new.closed) == "WPP"


@pytest.mark.parametrize(("dtype", "counts"), [("float16", {}), ("bfloat16", {"pools": 1})])
def test_sums_of_float16_might_overflow_and_stay(dtype, counts):
    x, w = values(1, 6, 6, 12, dtype=dtype), values(12, 4, dtype=dtype)
    zero = np.zeros((), dtype)
    closed = flat(lambda x: lax.reduce_window(x, zero, lax.add, (1, 3, 3, 1), (1,) * 4, "SAME") @ w, x)
    assert order(closed) == "WP" and rewritten(closed, ("pools",)).counts == counts


def test_a_division_that_repeats_what_was_pooled():
    x, counts, w = values(1, 5, 5, 6), jnp.full((3, 5, 5, 1), 9.0), values(6, 2)
    new = exchanged(lambda x, counts: lax.div(pool(x, 3), counts) @ w, x, counts)
    assert order(new.closed) == "PW"
