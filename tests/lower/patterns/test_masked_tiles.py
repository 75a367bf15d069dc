"""Tiles that masks of positions make 0: which positions, for which operands, and what is not known."""

from __future__ import annotations

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jcuts.base.errors import Refusal
from jcuts.lower.patterns.attention import match
from jcuts.lower.patterns.attention_backward import match_backward
from jcuts.lower.patterns.masked_tiles import LIMITS, masked_backward, masked_forward
from tests import programs
from tests.gpu.cases import attention_backward

B, Q, K, H, D = 1, 20, 24, 2, 16
ROWS, KEYS = np.arange(Q)[:, None], np.arange(K)


def places(scores):
    return (jax.lax.broadcasted_iota(jnp.int32, scores.shape, d) for d in (2, 3))


def chosen(keep, fill):
    def mask(scores, m):
        return jnp.where(keep(*places(scores)), scores, fill)

    return mask


def added(keep, fill):
    def mask(scores, m):
        return scores + jnp.where(keep(*places(scores)), 0.0, fill).astype(scores.dtype)

    return mask


def causal(rows, keys):
    return keys <= rows + 4


def window(rows, keys):
    return (keys <= rows) & (keys > rows - 5)


def strictly_later(rows, keys):
    return rows < keys


KNOWN = {
    "causal": (chosen(causal, -jnp.inf), causal),
    "added": (added(causal, -1e9), causal),
    "small": (added(causal, -1e4), causal),
    "window": (chosen(window, -1e9), window),
    "later": (chosen(strictly_later, -1e30), strictly_later),
}


def forward(mask, dtype=jnp.float32):
    def fn(q, k, v, m):
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.dtype.type(0.25)
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(mask(scores, m), -1), v)

    q, k = (np.zeros((B, n, H, D), dtype) for n in (Q, K))
    _, program = programs.trace(fn, q, k, k, np.zeros((Q, K), np.float32)).attention()
    known = match(program)
    assert not isinstance(known, Refusal)
    return masked_forward(known)


def backward(mask, side, dtype=jnp.float32):
    q, k = (np.zeros((B, n, H, D), dtype) for n in (Q, K))
    row = np.zeros((B, H, Q, 1), np.float32)
    made = programs.trace(attention_backward(side, mask), q, k, k, q, row, row, np.zeros((Q, K), np.float32))
    known = match_backward(made.attention("attention_backward")[1])
    assert not isinstance(known, Refusal)
    return masked_backward(known)


def masked_by(found, axes):
    """Whether the positions say that each is masked. Args: axes: the values of rows and of columns."""
    values = dict(zip("mn", axes, strict=True))
    hit = np.zeros(np.broadcast_shapes(*(a.shape for a in axes)), bool)
    for position in found.positions:
        hit |= position.const + sum(values[atom.name] * factor for atom, factor in position.terms) >= 0
    return hit


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", KNOWN)
def test_positions_are_those_of_the_mask(name, dtype):
    mask, keep = KNOWN[name]
    masked = ~np.asarray(keep(ROWS, KEYS))
    found = forward(mask, dtype)
    np.testing.assert_array_equal(masked_by(found, (ROWS, KEYS)), masked)
    assert found.score < -1e3 and not found.row_loads
    for side, axes in (("queries", (ROWS, KEYS)), ("keys", (KEYS, ROWS))):
        found = backward(mask, side, dtype)
        np.testing.assert_array_equal(masked_by(found, axes), masked)
        stats = found.row_loads if side == "queries" else found.column_loads
        assert len(stats) == 2 and not (found.row_loads if side == "keys" else found.column_loads)


def test_small_masks_ask_for_small_operands():
    large, small = forward(KNOWN["added"][0]), forward(KNOWN["small"][0])
    assert (large.operands, large.loads) == LIMITS[0] and small.operands < large.operands
    # No product of such operands brings a masked score near those of others.
    assert D * small.operands**2 * 0.25 - 1e4 < small.score < -1e3


UNKNOWN = {
    "no mask": lambda scores, m: scores,
    "bias": lambda scores, m: scores + m,
    "bias and mask": lambda scores, m: KNOWN["causal"][0](scores, m) + m,
    "small": added(causal, -20.0),
    "parity": chosen(lambda rows, keys: (rows + keys) % 2 == 0, -jnp.inf),
    "multiplied": lambda scores, m: scores * jnp.where(causal(*places(scores)), 1.0, 0.0).astype(scores.dtype),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_not_known_to_be_0_is_computed(name):
    assert forward(UNKNOWN[name]) is None
    for side in ("queries", "keys"):
        assert backward(UNKNOWN[name], side) is None


def test_weights_within_the_limits_are_0_in_float32():
    """The limits themselves, at the corners of what they allow."""
    for name, (operands, loads) in itertools.product(("added", "small"), LIMITS):
        found = backward(KNOWN[name][0], "queries")
        if operands > found.operands:
            continue
        fill = -1e9 if name == "added" else -1e4
        with np.errstate(under="ignore"):
            assert np.exp(np.float32(D * operands**2 * 0.25 + fill + loads)) == 0.0
    assert math.isinf(backward(KNOWN["added"][0], "queries").score)
