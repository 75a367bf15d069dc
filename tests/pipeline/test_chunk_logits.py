"""The pass that computes logits in chunks: when it does, the option, and whole functions through `jcuts.optimize`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jcuts
from jcuts.base.errors import UsageError
from jcuts.base.settings import Settings, Variant
from jcuts.jit.race_limits import most_rewritten
from jcuts.jit.variant_space import allowed, candidate_variants
from jcuts.pipeline.chunk_logits import chunk_logits, is_settled, largest_product
from jcuts.rewrite.cross_entropy.head import CHUNK_BYTES, LEAST_BYTES
from jcuts.rewrite.simplify import simplify
from jcuts.trace import jaxapi
from jcuts.trace.inline import inline
from jcuts.xla import devices as xla_devices

WIDTH = 4
VOCABULARY = 16384


def step(h, w, labels):
    def loss(h, w):
        logits = h @ w
        return (jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, labels[:, None], -1)[:, 0]).mean()

    return jax.value_and_grad(loss, argnums=(0, 1))(h, w)


def arguments(megabytes):
    tokens = (megabytes << 20) // (4 * VOCABULARY)
    rng = np.random.default_rng(megabytes)
    h, w = rng.standard_normal((tokens, WIDTH)), rng.standard_normal((WIDTH, VOCABULARY))
    labels = rng.integers(0, VOCABULARY, tokens).astype(np.int32)
    return h.astype(np.float32), w.astype(np.float32), labels


def traced(megabytes):
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arguments(megabytes)]
    return jaxapi.closed_jaxpr_of(step, *shapes)


def is_chunked(megabytes, platform, **options):
    closed = simplify(inline(traced(megabytes)))
    changed, note = chunk_logits(closed, Settings(**options), platform)
    assert (changed is closed) == (note is None)
    if note is not None:
        assert str(note) == "logits of 1 product in chunks"
        assert largest_product(changed) < largest_product(closed)
    return note is not None


@pytest.fixture
def memory(monkeypatch):
    def set_to(size):
        monkeypatch.setattr(xla_devices, "memory_bytes", lambda platform: size)

    set_to(1 << 40)
    return set_to


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_the_option_decides(memory, platform):
    assert LEAST_BYTES == 2 * CHUNK_BYTES == 64 << 20
    assert is_chunked(48, platform, chunk_logits=True)
    assert not is_chunked(16, platform, chunk_logits=True)
    assert not is_chunked(96, platform, chunk_logits=False)
    assert is_chunked(96, platform, chunk_logits=True, mode="no_fusion")
    assert is_settled(traced(48), Settings(chunk_logits=True), platform)
    assert not is_settled(traced(96), Settings(chunk_logits=False), platform)


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_logits_that_a_device_holds_with_ease_stay_whole_in_the_plain_program(memory, platform):
    assert not is_chunked(96, platform)
    assert not is_settled(traced(96), Settings(), platform)


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_logits_that_take_much_of_the_memory_are_chunked_without_a_race(memory, platform):
    memory(8 * (80 << 20))
    assert is_chunked(96, platform)
    assert is_settled(traced(96), Settings(), platform)
    assert not is_settled(traced(48), Settings(), platform)
    memory(None)
    assert not is_settled(traced(96), Settings(), platform)


def test_the_reason_is_told_where_the_user_asks():
    def fn(h, w):
        logits = h @ w
        return jax.nn.logsumexp(logits, -1).mean(), logits

    closed = simplify(inline(jaxapi.closed_jaxpr_of(fn, *arguments(48)[:2])))
    changed, note = chunk_logits(closed, Settings(chunk_logits=True), "cpu")
    assert changed is closed
    assert str(note) == "logits stay whole: a wide value is a result of the program"


def test_variants_race_on_a_gpu_unless_they_are_not_wanted():
    forms = candidate_variants(traced(96), "cuda")
    assert Variant(("logits",), "none") in forms and Variant(("logits",)) in forms
    assert not any(form and "logits" in form.rewrites for form in most_rewritten(forms))  # who has time tries them
    assert allowed(forms, Settings()) == forms
    assert [form for form in allowed(forms, Settings(chunk_logits=False)) if form and form.rewrites] == []


@pytest.mark.parametrize("value", ["yes", 2])
def test_other_values_are_refused(value):
    with pytest.raises(UsageError, match="must be True, False or None"):
        jcuts.optimize(step, chunk_logits=value)


def test_a_whole_function_takes_less_memory_and_gives_the_same():
    args = arguments(64)
    chunked = jcuts.optimize(step, chunk_logits=True, tune="off")
    for right, ours in zip(jax.tree.leaves(jax.jit(step)(*args)), jax.tree.leaves(chunked(*args)), strict=True):
        np.testing.assert_allclose(ours, right, rtol=1e-4, atol=1e-6)
    assert "logits of 1 product in chunks" in str(chunked.explain(*args))

    def fn(*args):
        return jcuts.optimize(step, chunk_logits=True, mode="no_fusion", tune="off")(*args)

    temporary = [jax.jit(f).lower(*args).compile().memory_analysis().temp_size_in_bytes for f in (step, fn)]
    assert temporary[1] < temporary[0]
