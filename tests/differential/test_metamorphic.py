"""Metamorphic relations of functions whose operations all run as kernels: no reference computes what they must be.

Rows are independent: permuted batches give permuted results, concatenated batches concatenated ones.  Channels have no
order: permuted with their weights they give the same sums.  Powers of two scale without rounding: results of linear
functions are equal to the last bit.  Source: HirGen, arXiv 2208.02193; Barr et al., "The oracle problem in software
testing", 2015.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jcuts

RNG = np.random.default_rng(17)
BATCH, PIECE = 12, 5
ORDER = RNG.permutation(BATCH)
NHWC = ("NHWC", "HWIO", "NHWC")


def values(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32) / np.float32(2)


def mlp(x, w, v):
    return jax.nn.softmax(jnp.tanh(x @ w) @ v, axis=-1)


def cnn(x, w, v):
    y = jnp.maximum(lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=NHWC) + 0.125, 0)
    y = lax.reduce_window(y, -np.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    return lax.conv_general_dilated(y, v, (1, 1), "VALID", dimension_numbers=NHWC)


def norm(x, w, v):
    y = (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)
    return jax.nn.gelu(y * w) + v


def linear_cnn(x, w, v):
    y = lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=NHWC)
    return lax.conv_general_dilated(y, v, (2, 2), "VALID", dimension_numbers=NHWC)


class Case(NamedTuple):
    """A function of a batch and two weights. Attributes: inner: orders a channel that both weights share."""

    function: Callable[..., Any]
    arguments: tuple[np.ndarray, np.ndarray, np.ndarray]
    inner: Callable[..., Any]


def hidden(order, w, v):
    """The channels between two layers: last of the first weights, next to last of the second."""
    return w[..., order], v[..., order, :]


def last(order, w, v):
    return w[..., order], v[..., order]


IMAGES = values(BATCH, 9, 9, 3), values(3, 3, 3, 20), values(2, 2, 20, 6)
CASES = {
    "mlp": Case(mlp, (values(BATCH, 33), values(33, 40), values(40, 10)), hidden),
    "cnn": Case(cnn, IMAGES, hidden),
    "norm": Case(norm, (values(BATCH, 50), values(50), values(50)), last),
    "linear cnn": Case(linear_cnn, IMAGES, hidden),
    "product": Case(lambda x, w, v: x @ w @ v, (values(BATCH, 33), values(33, 40), values(40, 10)), hidden),
}


@functools.cache
def kernels(name: str) -> Any:
    """The function with kernels wherever there can be one, that many being there."""
    case = CASES[name]
    optimised = jcuts.optimize(case.function, mode="fusion", tune="off")
    report = optimised.explain(*case.arguments)
    assert report.kernels >= 1 and report.share("flop") > 0.9
    return optimised


def close(got, wanted):
    """Equal but for the order of sums: tails of a tile are computed by other instructions."""
    scale = float(np.sqrt(np.mean(np.square(np.asarray(wanted)))))
    np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=2e-6 * scale)


def permuted_batch(run, case):
    x, w, v = case.arguments
    close(run(x[ORDER], w, v), np.asarray(run(x, w, v))[ORDER])


def permuted_channels(run, case):
    x, w, v = case.arguments
    order = np.random.default_rng(3).permutation(w.shape[-1])
    if case.inner is last:  # channels of the batch itself
        close(run(x[..., order], *last(order, w, v)), np.asarray(run(x, w, v))[..., order])
    else:
        close(run(x, *case.inner(order, w, v)), run(x, w, v))


def concatenated_batches(run, case):
    x, w, v = case.arguments
    parts = [np.asarray(run(part, w, v)) for part in (x[:PIECE], x[PIECE : 2 * PIECE])]
    close(np.concatenate(parts), np.asarray(run(x, w, v))[: 2 * PIECE])


def powers_of_two(run, case):
    x, w, v = case.arguments
    for power in (-20, 3):
        scale = np.float32(2.0**power)
        np.testing.assert_array_equal(run(x * scale, w, v), np.asarray(run(x, w, v)) * scale)
        np.testing.assert_array_equal(run(x, w * scale, v), np.asarray(run(x, w, v)) * scale)


RELATIONS = {r.__name__: r for r in (permuted_batch, permuted_channels, concatenated_batches, powers_of_two)}
LEFT_OUT = {"concatenated_batches": ("linear cnn", "product"), "powers_of_two": ("mlp", "cnn", "norm")}
"""Other batches are other kernels to compile; functions that are not linear do not scale."""
HOLDS = [(r, c) for r in RELATIONS for c in CASES if c not in LEFT_OUT.get(r, ())]


@pytest.mark.parametrize("relation, name", HOLDS)
def test_relation_holds(relation, name):
    RELATIONS[relation](kernels(name), CASES[name])


def broken(kind: str, case: Case) -> Callable[..., Any]:
    """The function as a cheat computes it."""
    plain = jax.jit(case.function)

    def last_row_left_out(x, w, v):
        return np.concatenate([np.asarray(plain(x, w, v))[:-1], np.zeros_like(np.asarray(plain(x[:1], w, v)))])

    def row_depends_on_its_place(x, w, v):
        y = np.array(plain(x, w, v))
        y[3] = y[3] * np.float32(1.001)
        return y

    def first_channel_left_out(x, w, v):
        w = w.copy()
        w[..., 0] = 0
        return plain(x, w, v)

    def lower_precision(x, w, v):
        short = [np.asarray(a).astype(np.float16).astype(np.float32) for a in (x, w, v)]
        return plain(*short)

    return locals()[kind]


@pytest.mark.parametrize(
    "relation, kind",
    [
        ("permuted_batch", "last_row_left_out"),
        ("permuted_batch", "row_depends_on_its_place"),
        ("concatenated_batches", "last_row_left_out"),
        ("permuted_channels", "first_channel_left_out"),
        ("powers_of_two", "lower_precision"),
    ],
)
def test_relation_catches(relation, kind):
    case = CASES["product"]
    with pytest.raises(AssertionError):
        RELATIONS[relation](broken(kind, case), case)
