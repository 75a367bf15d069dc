"""Decoding steps of the benchmark at tiny sizes: equal to a full forward pass; generation equal to single steps."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jcuts
from benchmarks.gpu_kernels import decoder_model as model
from benchmarks.gpu_kernels import decoding

SIZES = [pytest.param(model.small(s), id=name) for name, s in (("heads", model.WIDE), ("grouped", model.LLAMA))]
LENGTH = 12


def arguments(s: model.Sizes, *, scan: bool, batch: int = 2):
    """Weights and caches that hold nothing."""
    weights = model.weights(s, "float32")
    caches = jax.tree.map(jnp.zeros_like, model.caches(s, batch, "float32"))
    if scan:
        weights, caches = {**weights, "layers": model.stacked(weights["layers"])}, model.stacked(caches)
    return weights, caches


@pytest.mark.parametrize("s", SIZES)
@pytest.mark.parametrize("scan", [False, True])
def test_steps_equal_a_full_forward_pass(s, scan):
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, s.vocabulary, (2, LENGTH)), jnp.int32)
    listed, empty = arguments(s, scan=False)
    _, wanted = model.apply(s, listed, empty, tokens, jnp.arange(LENGTH))
    weights, caches = arguments(s, scan=scan)
    step = jax.jit(model.decoding_step(s), donate_argnums=0)
    for at in range(LENGTH):
        caches, following, logits = step(caches, weights, tokens[:, at], jnp.asarray(at, jnp.int32))
        np.testing.assert_allclose(logits, wanted[:, at], rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(following, np.argmax(logits, -1))


@pytest.mark.parametrize("s", SIZES)
@pytest.mark.parametrize("scan", [False, True])
def test_generation_equals_single_steps(s, scan):
    weights, caches = arguments(s, scan=scan)
    first, start = jnp.asarray([3, 7], jnp.int32), jnp.asarray(2, jnp.int32)
    _, found = jax.jit(model.generation(s, LENGTH))(caches, weights, first, start)
    step, tokens, wanted = jax.jit(model.decoding_step(s)), first, []
    for at in range(LENGTH):
        caches, tokens, _ = step(caches, weights, tokens, start + at)
        wanted.append(tokens)
    np.testing.assert_array_equal(found, np.stack(wanted, 1))


@pytest.mark.parametrize("s", SIZES)
def test_optimized_step_passes_donated_caches_on(s):
    step = model.decoding_step(s)
    ours, plain = jcuts.optimize(step, donate_argnums=0, tune="off"), jax.jit(step, donate_argnums=0)
    (weights, a), (_, b) = arguments(s, scan=False), arguments(s, scan=False)
    x = y = jnp.asarray([3, 7], jnp.int32)
    for at in range(3):
        a, x, found = ours(a, weights, x, jnp.asarray(at, jnp.int32))
        b, y, wanted = plain(b, weights, y, jnp.asarray(at, jnp.int32))
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["8 layers of 50 M, b1", "8 layers of 50 M, b1, scan, generation"])
def test_a_case_counts_what_it_must_read(name):
    case = decoding.CASES[name].small()
    arguments = case.program("float32").arguments
    caches, weights = (sum(x.nbytes for x in jax.tree.leaves(part)) for part in arguments[:2])
    positions = range(case.sizes.length - (case.count or 1), case.sizes.length)
    wanted = sum(weights + caches * (p + 1) / case.sizes.length for p in positions)
    assert case.bytes(arguments) == pytest.approx(wanted)


def test_weights_are_those_of_the_models():
    shapes = jax.eval_shape(lambda: model.weights(model.WIDE, "bfloat16"))
    per_layer = sum(x.size for x in jax.tree.leaves(shapes["layers"][0]))
    assert per_layer == pytest.approx(50e6, rel=0.01)
    whole = sum(x.size for x in jax.tree.leaves(jax.eval_shape(lambda: model.weights(model.LLAMA, "bfloat16"))))
    assert whole == pytest.approx(1.24e9, rel=0.01)


def test_tokens_that_differ_are_reported_with_their_margin():
    logits = np.zeros((1, 3, 4), np.float32)
    logits[0, 1] = [4.0, 3.0, 0.0, 0.0]
    equal = decoding.compared(np.asarray([[1, 0, 2]]), np.asarray([[1, 0, 2]]), logits)
    assert equal == {"equal": True}
    other = decoding.compared(np.asarray([[1, 1, 3]]), np.asarray([[1, 0, 2]]), logits)
    assert other == {"equal": False, "sequence": 0, "token": 1, "margin": 0.25}


def test_a_case_runs(monkeypatch, tmp_path):
    monkeypatch.setenv("JCUTS_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(decoding, "CALLS", 1)
    case = dataclasses.replace(decoding.CASES["Llama-3.2-1B, b1"].small(), batch=2)
    form = case.program("float32").form(closed=False)
    result = jax.jit(form.function)(*form.arguments)
    assert decoding.errors(form, {"jax.jit": result[1:]})["jax.jit"] < 1e-5
    generating = dataclasses.replace(case, count=4)
    made = generating.program("float32")
    tokens = jax.jit(made.function)(*made.arguments)[1]
    found, logits = decoding.one_by_one(jax.jit(form.function), form, generating, 4)
    assert decoding.compared(np.asarray(tokens), found, logits) == {"equal": True}
