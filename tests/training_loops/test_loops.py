"""Training loops of flax, optax, equinox and keras by `jcuts.optimize` in place of `jax.jit`."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import jcuts
from tests.training_loops import loops

STEPS = 4


@pytest.fixture(scope="module", params=loops.LOOPS)
def loop(request):
    return loops.LOOPS[request.param]()


def run(call, state, count=STEPS, seed=0):
    losses = []
    for images, labels in loops.batches(count, seed=seed):
        state, loss = call(state, images, labels)
        losses.append(float(loss))
    return state, losses


def copied(tree):
    return jax.tree.map(
        lambda x: x + 0 if hasattr(x, "dtype") and not jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x, tree
    )


def assert_alike(got, wanted):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("donated", [False, True])
def test_kernels_train_as_jit_does(loop, donated):
    """Every fusable region runs as a kernel; the last batch has another shape."""
    made = loop
    options = {"donate_argnums": 0} if donated else {}
    wanted = run(jax.jit(made.step), made.state)
    call = jcuts.optimize(made.step, mode="fusion", tune="off", **options)
    got = run(call, copied(made.state))
    np.testing.assert_allclose(got[1], wanted[1], rtol=1e-4)
    assert_alike(got[0], wanted[0])
    rows = call.stats()["signatures"]
    assert len(rows) == 2  # one per shape of a batch
    assert not any(row["fallback"] for row in rows)


def test_a_rate_that_changes_needs_no_other_program():
    made = loops.nnx()
    call = jcuts.optimize(made.step, mode="fusion", tune="off")
    params, optimiser = made.state
    (images, labels), *_ = loops.batches(2)
    for rate in (0.1, 0.05, 0.01):
        optimiser.hyperparams["learning_rate"] = jax.numpy.asarray(rate)
        (params, optimiser), _ = call((params, optimiser), images, labels)
    assert len(call.stats()["signatures"]) == 1


def test_a_run_goes_on_from_a_checkpoint_with_the_same_numbers(tmp_path):
    """orbax writes the state after two steps; two more from what it reads are those of the run that went on."""
    checkpoint = pytest.importorskip("orbax.checkpoint")
    made = loops.linen()
    call = jcuts.optimize(made.step, mode="fusion", tune="off")
    state, _ = run(call, made.state, seed=1)
    with checkpoint.StandardCheckpointer() as writer:
        writer.save(tmp_path / "state", state)
    with checkpoint.StandardCheckpointer() as reader:
        read = reader.restore(tmp_path / "state", jax.tree.map(lambda x: x, state))
    wanted, got = run(call, state, seed=2), run(call, read, seed=2)
    assert got[1] == wanted[1]
    for a, b in zip(jax.tree.leaves(got[0]), jax.tree.leaves(wanted[0]), strict=True):
        np.testing.assert_array_equal(a, b)
