"""Concatenations of what products and windows make, as updates of one array: which are replaced, and what is read."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from benchmarks.networks import workloads
from jcuts.rewrite import inplace_concat
from jcuts.rewrite.registry import rewritten
from jcuts.rewrite.simplify import simplify
from jcuts.trace import jaxapi
from jcuts.trace.inline import inline
from tests.evaluation import compiled, exact

RNG = np.random.default_rng(5)
NHWC = ("NHWC", "HWIO", "NHWC")
ALL = ("dots", "pools", "siblings", "slots")


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(inplace_concat, "LEAST_BYTES", 1)


def values(*shape, dtype=jnp.float32):
    return jnp.asarray(RNG.standard_normal(shape), dtype)


def conv(x, w, stride=1, padding="SAME"):
    return lax.conv_general_dilated(x, w, (stride, stride), padding, dimension_numbers=NHWC)


def unit(k, features, channels):
    w, b = values(k, k, channels, features), values(features)
    return lambda x, **more: jax.nn.relu(conv(x, w, **more) + b)


def average(x):
    window = {"window_dimensions": (1, 3, 3, 1), "window_strides": (1, 1, 1, 1), "padding": "SAME"}
    ones = jnp.ones((1, *x.shape[1:3], 1), x.dtype)
    return lax.reduce_window(x, 0.0, lax.add, **window) / lax.reduce_window(ones, 0.0, lax.add, **window)


def inception(channels):
    """A block of four branches."""
    one, five = unit(1, 12, channels), (unit(1, 4, channels), unit(5, 8, 4))
    three = unit(1, 8, channels), unit(3, 8, 8)
    last, w, b = unit(3, 16, 8), values(1, 1, channels, 4), values(4)

    def block(x):
        pooled = jax.nn.relu(conv(average(x), w) + b)
        branches = one(x), five[1](five[0](x)), last(three[1](three[0](x))), pooled
        return jnp.concatenate(branches, -1)

    return block


def checked(function, *args, rules=ALL):
    """The rewritten program, after its results were compared with a float64 run of the program as it was."""
    closed = simplify(inline(jaxapi.closed_jaxpr_of(function, *args)))
    new = rewritten(closed, rules)
    jaxapi.check(new.closed)
    results = zip(compiled(closed, *args), compiled(new.closed, *args), exact(closed, *args), strict=True)
    for x, y, r in results:
        assert x.dtype == y.dtype and x.shape == y.shape
        plain, mine = (np.linalg.norm(np.asarray(a, np.float64) - np.asarray(r)) for a in (x, y))
        assert mine <= 2 * plain + 4 * float(jnp.finfo(y.dtype).eps) * np.linalg.norm(r)
    return new


def named(closed, name):
    return [e for e in closed.jaxpr.eqns if jaxapi.primitive_name(e) == name]


def readers(closed, var):
    return [e for e in closed.jaxpr.eqns if any(a is var for a in e.invars)]


def test_an_inception_block_is_one_array_that_begins_with_the_joined_products():
    first, second = inception(16), inception(40)
    new = checked(lambda x: jnp.sin(second(first(x))), values(2, 7, 6, 16))
    assert new.counts["siblings"] == new.counts["slots"] == 2
    assert not named(new.closed, "concatenate") and len(named(new.closed, "dot_general")) == 2
    updates = named(new.closed, "dynamic_update_slice")
    assert [u.invars[1].aval.shape[-1] for u in updates] == [28, 8, 16, 4] * 2
    assert {u.outvars[0].aval.shape[-1] for u in updates} == {16 + 40}
    assert len(named(new.closed, "max")) == 10  # one for the joined products, four in branches


def test_every_update_comes_after_all_that_reads_what_it_updates():
    """Then XLA copies nothing: nobody needs an older state."""
    new = checked(lambda x: inception(40)(inception(16)(x)) * 2, values(1, 5, 5, 16)).closed
    eqns = list(new.jaxpr.eqns)
    needs = {}
    for e in eqns:
        before = [a for a in e.invars if not jaxapi.is_literal(a)]
        needs[id(e)] = {id(e)}.union(*(needs[id(m)] for m in eqns if set(m.outvars) & set(before)))
    for update in named(new, "dynamic_update_slice"):
        for reader in readers(new, update.invars[0]):
            if reader is not update:
                assert id(reader) in needs[id(update)]


def test_zeros_are_never_read():
    new = checked(lambda x: inception(16)(x) * 2, values(1, 5, 5, 16)).closed
    poisoned = []
    for e in new.jaxpr.eqns:
        is_start = jaxapi.primitive_name(e) == "broadcast_in_dim" and e.outvars[0].aval.shape[-1] == 56
        poisoned.append(e.replace(invars=[jaxapi.new_literal(np.float32(np.nan), e.invars[0].aval)]) if is_start else e)
    assert sum(a is not b for a, b in zip(new.jaxpr.eqns, poisoned, strict=True)) == 1
    x = values(1, 5, 5, 16)
    (want,), (got,) = (compiled(c, x) for c in (new, jaxapi.with_eqns(new, poisoned)))
    np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


def test_branches_that_end_in_two_and_a_maximum():
    """What is concatenated within a branch lies in the array as well; two parts may have one operand."""
    a, b, c, d = unit(1, 8, 12), unit(1, 8, 12), unit(3, 4, 8), unit(5, 4, 8)

    def block(x):
        t = b(x)
        pair = jnp.concatenate([c(t), d(t)], -1)
        pooled = lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 1, 1, 1), "SAME")
        return jnp.concatenate([a(x), pair, pooled], -1), jnp.exp(t[:, 0, 0])

    new = checked(block, values(2, 6, 5, 12))
    assert not named(new.closed, "concatenate") and len(named(new.closed, "dynamic_update_slice")) == 4
    slices = named(new.closed, "slice")
    assert all(len(readers(new.closed, s.outvars[0])) <= 1 for s in slices)


def test_strides_and_parts_without_a_joined_product():
    a, b = unit(3, 8, 12), unit(5, 4, 12)
    new = checked(lambda x: jnp.concatenate([a(x, stride=2), b(x, stride=2)], -1), values(2, 7, 7, 12))
    assert new.counts["slots"] == 1 and not named(new.closed, "slice")  # the array is the result


def test_what_stays():
    w = values(5, 4)
    for function, args in (
        (lambda x, y: jnp.concatenate([x @ w, y], -1), (values(3, 5), values(3, 2))),  # an argument is copied
        (lambda x: jnp.concatenate([x @ w, jnp.cumsum(x, 1)], -1), (values(3, 5),)),
        (lambda x: jnp.concatenate([y := x @ w, y], -1), (values(3, 5),)),
        (lambda x: jnp.concatenate([x @ w, x @ (w * 2)], -1), (values(3, 5),)),  # parts of one product
    ):
        assert "slots" not in checked(function, *args).counts
    integers = jnp.ones((5, 4), jnp.int32)
    closed = simplify(
        inline(
            jaxapi.closed_jaxpr_of(
                lambda x: jnp.concatenate([x @ integers, x @ integers[::-1]], -1), jnp.ones((3, 5), jnp.int32)
            )
        )
    )
    assert not rewritten(closed, ("slots",)).counts


def test_small_ones_stay(monkeypatch):
    monkeypatch.setattr(inplace_concat, "LEAST_BYTES", 1 << 18)
    assert "slots" not in checked(inception(16), values(2, 7, 6, 16)).counts


def test_a_network():
    fn, args = workloads.network("InceptionV3", 1, closed=True, size=75)
    closed = simplify(inline(jaxapi.closed_jaxpr_of(fn, *args)))
    new = rewritten(closed, ("scales", *ALL))
    jaxapi.check(new.closed)
    assert new.counts["slots"] == 11 and not named(new.closed, "concatenate")
