"""Rules of XLA's GPU compiler for buffers, each on the smallest program that shows it."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jcuts.plan.cost.program_memory import jaxpr_liveness

N = 2048
BYTES = N * N * 4


def _matrix(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


def _live(function, *arguments, **options):
    return jaxpr_liveness.footprint(function, *arguments, **options).live


def test_a_product_has_a_workspace():
    found = _live(lambda x, y: (x @ y).sum(), _matrix(N, N), _matrix(N, N))
    assert [b.bytes for b in found if b.primitive == "workspace"] == [jaxpr_liveness.workspace()]
    on_cpu = _live(lambda x, y: (x @ y).sum(), _matrix(N, N), _matrix(N, N), backend="cpu")
    assert all(b.primitive != "workspace" for b in on_cpu)


def _stacked(x, again):
    stack = lax.scan(lambda c, _: (c, c @ c), x, length=4)[1]
    return jnp.where(again > 0, stack, jnp.zeros_like(stack)).sum()


def test_zeros_that_are_read_after_the_loop_keep_their_buffer():
    found = _live(_stacked, _matrix(N, N), _matrix())
    assert [b.bytes for b in found if b.shape == (4, N, N)] == [4 * BYTES] * 2
    folded = _live(lambda x: _stacked(x, 1.0), _matrix(N, N))  # the condition is a constant: nothing reads the zeros
    assert [b.bytes for b in folded if b.shape == (4, N, N)] == [4 * BYTES]


def test_scores_in_16_bits_are_kept_in_place_of_their_exponentials():
    def loss(x, y):
        weights = jnp.exp((x @ y).astype(jnp.float32))
        return (weights / weights.sum(-1, keepdims=True)).astype(x.dtype) @ x

    found = _live(loss, _matrix(N, N, dtype="bfloat16"), _matrix(N, N, dtype="bfloat16"))
    assert all(b.dtype != "float32" or b.bytes < BYTES for b in found)


@pytest.mark.parametrize("carried", ["scatter", "product"])
def test_a_carry_that_is_updated_in_part_stays_in_place(carried):
    def step(c, x):
        return (c.at[0].set(x) if carried == "scatter" else c @ c), None

    found = _live(lambda c, xs: lax.scan(step, c, xs)[0].sum(), _matrix(N, N), _matrix(4, N))
    assert any(b.primitive == "carry" for b in found) == (carried == "product")
