"""Logits in chunks: spellings of the loss that match, values and gradients against JAX's own and float64, refusals."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.networks.workloads import WORKLOADS
from jcuts.rewrite.cross_entropy.head import Sizes, chunk_cross_entropy, chunk_heads
from jcuts.rewrite.registry import rewritten
from jcuts.rewrite.simplify import simplify
from jcuts.trace import jaxapi
from jcuts.trace.inline import inline
from jcuts.tune.verify.float64_eval import evaluate

BATCH, LENGTH, WIDTH, VOCABULARY = 3, 26, 8, 139
TOKENS = BATCH * LENGTH
SMALL = Sizes(least_bytes=1, chunk_bytes=1, least_rows=7)
"""Chunks of 7 rows: they divide neither the tokens (78) nor the length (26)."""


def take(logits, labels, axis=-1):
    return jnp.take_along_axis(logits, jnp.expand_dims(labels, axis), axis).squeeze(axis)


def per_token(logits, labels):
    """As `optax.softmax_cross_entropy_with_integer_labels`."""
    return jax.nn.logsumexp(logits, -1) - take(logits, labels)


def soft(logits, targets):
    """As `optax.softmax_cross_entropy`."""
    return -(targets * jax.nn.log_softmax(logits)).sum(-1)


def smoothed(labels, share):
    """As `optax.smooth_labels` of one-hot labels."""
    return (1.0 - share) * jax.nn.one_hot(labels, VOCABULARY) + share / VOCABULARY


def subtracted_maximum(h, w, labels):
    """As Keras and many by hand: log-softmax and a one-hot product."""
    logits = h @ w
    logits = logits - jax.lax.stop_gradient(logits.max(-1, keepdims=True))
    log_p = logits - jnp.log(jnp.exp(logits).sum(-1, keepdims=True))
    return -jnp.sum(jax.nn.one_hot(labels, VOCABULARY, dtype=log_p.dtype) * log_p, -1).mean()


def indexed(h, w, labels):
    logits = (h @ w).reshape(-1, VOCABULARY)
    labels = labels.reshape(-1)
    return (jax.nn.logsumexp(logits, -1) - logits[jnp.arange(TOKENS), labels]).mean()


def indexed_by_constant(h, w, labels):
    log_p = jax.nn.log_softmax((h @ w).reshape(-1, VOCABULARY))
    return -log_p[np.arange(TOKENS), labels.reshape(-1)].mean()


def with_z_loss(h, w, labels):
    logits = h @ w
    log_z = jax.nn.logsumexp(logits, -1)
    return (log_z - take(logits, labels)).mean() + 1e-3 * jnp.square(log_z).mean()


def masked_tokens(h, w, labels):
    weights = (labels % 3 != 0).astype(h.dtype)
    return (per_token(h @ w, labels) * weights).sum() / weights.sum()


def mean_per_sequence(h, w, labels):
    weights = (labels % 3 != 0).astype(h.dtype)
    return ((per_token(h @ w, labels) * weights).sum(-1) / weights.sum(-1)).mean()


def masked_vocabulary(h, w, labels):
    logits = jnp.where(jnp.arange(VOCABULARY) < 100, h @ w, -jnp.inf)
    return per_token(logits, labels % 100).mean()


def by_vmap(h, w, labels):
    one = lambda row, label: -jax.nn.log_softmax(row @ w)[label]  # noqa: E731
    return jax.vmap(jax.vmap(one))(h, labels).mean()


def vocabulary_first(h, w, labels):
    logits = w.T @ h.reshape(-1, WIDTH).T
    return (jax.nn.logsumexp(logits, 0) - take(logits, labels.reshape(-1), 0)).mean()


def focal(h, w, labels):
    loss = per_token(h @ w, labels)
    return ((1 - jnp.exp(-loss)) ** 2 * loss).mean()


def distilled(h, w, labels):
    teacher = jax.lax.stop_gradient(jax.nn.softmax((h * 0.3) @ (w + 1)))
    return soft(h @ w, teacher).mean() + 0 * labels.sum()


ONE_LOOP = {
    "integer labels": lambda h, w, y: per_token(h @ w, y).mean(),
    "log-softmax": lambda h, w, y: -take(jax.nn.log_softmax(h @ w), y).mean(),
    "one-hot": lambda h, w, y: soft(h @ w, jax.nn.one_hot(y, VOCABULARY)).mean(),
    "label smoothing": lambda h, w, y: soft(h @ w, smoothed(y, 0.1)).mean(),
    "subtracted maximum": subtracted_maximum,
    "merged rows": lambda h, w, y: per_token((h @ w).reshape(-1, VOCABULARY), y.reshape(-1)).sum() / TOKENS,
    "indexed": indexed,
    "indexed by a constant": indexed_by_constant,
    "z-loss": with_z_loss,
    "masked tokens": masked_tokens,
    "mean per sequence": mean_per_sequence,
    "masked vocabulary": masked_vocabulary,
    "padded vocabulary": lambda h, w, y: per_token((h @ w)[..., :100], y % 100).mean(),
    "soft cap": lambda h, w, y: per_token(3 * jnp.tanh(h @ w / 3), y).mean(),
    "temperature": lambda h, w, y: per_token(h @ w / 0.7, y).mean(),
    "loss scaling": lambda h, w, y: 1024.0 * per_token(h @ w, y).mean(),
    "einsum, tied": lambda h, w, y: per_token(jnp.einsum("bsd,vd->bsv", h, w.T), y).mean(),
    "bias": lambda h, w, y: per_token(h @ w + w[0] * 2, y).mean(),
    "vmap": by_vmap,
    "vocabulary first": vocabulary_first,
    "focal": focal,
}


def arguments(scale=1.0, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    h = scale * rng.standard_normal((BATCH, LENGTH, WIDTH))
    w = rng.standard_normal((WIDTH, VOCABULARY))
    labels = rng.integers(0, VOCABULARY, (BATCH, LENGTH)).astype(np.int32)
    return jnp.asarray(h, dtype), jnp.asarray(w, dtype), labels


def flat(fn, *args):
    return simplify(inline(jaxapi.closed_jaxpr_of(fn, *args)))


def run(closed, *args):
    return [np.asarray(x) for x in jax.jit(lambda *args: jaxapi.eval_closed(closed, *args))(*jax.tree.leaves(args))]


def exact(closed, *args):
    with jax.enable_x64(True):
        wide = [np.asarray(x, np.float64) if jnp.issubdtype(x.dtype, np.floating) else x for x in jax.tree.leaves(args)]
        return [np.asarray(x) for x in jax.jit(partial(evaluate, closed))(wide)]


def wide_values(closed):
    """Values outside loops that are as large as the logits."""
    return [v for e in closed.jaxpr.eqns for v in e.outvars if v.aval.size >= TOKENS * 100]


def loops(closed):
    return sum(jaxapi.primitive_name(e) in ("while", "scan") for e in closed.jaxpr.eqns)


def assert_as_exact(closed, changed, *args, factor=4.0):
    """Errors to float64 are at most a few times those of the program as it was, or a few roundings of a sum."""
    results = zip(exact(closed, *args), run(closed, *args), run(changed, *args), strict=True)
    for right, whole, chunked in results:
        assert chunked.dtype == whole.dtype
        epsilon = float(jnp.finfo(whole.dtype).eps) if jnp.issubdtype(whole.dtype, jnp.inexact) else 0.0
        largest = np.abs(right).max(initial=0.0)
        own = np.abs(whole.astype(np.float64) - right).max(initial=0.0)
        error = np.abs(chunked.astype(np.float64) - right).max(initial=0.0)
        assert error <= factor * own + 16 * epsilon * largest


def shifted(h, w, labels):
    """All tokens' logits, of which the last of a sequence is unused."""
    return per_token((h @ w)[:, :-1], labels[:, 1:]).mean()


def shifted_with_bias(h, w, labels):
    logits = h @ w + w[1]
    return per_token(logits[:, :-1].reshape(-1, VOCABULARY), labels[:, 1:].reshape(-1)).mean()


def shifted_short(h, w, labels):
    logits = (h.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16))[:, :-1]
    return per_token(logits.astype(jnp.float32), labels[:, 1:]).mean()


@pytest.mark.parametrize("fn", [shifted, shifted_with_bias, shifted_short])
def test_slices_of_rows_move_to_the_hidden_state(fn):
    args = arguments()
    closed = flat(jax.value_and_grad(fn, argnums=(0, 1)), *args)
    changed, count, reasons = chunk_heads(closed, SMALL)
    jaxapi.check(changed)
    assert (count, reasons) == (1, [])
    assert not wide_values(changed)
    assert_as_exact(closed, changed, *args, factor=4.0 if fn is not shifted_short else 1.5)


@pytest.mark.parametrize("name", ONE_LOOP)
def test_spellings_are_one_loop_with_the_same_gradients(name):
    args = arguments(seed=len(name))
    closed = flat(jax.value_and_grad(ONE_LOOP[name], argnums=(0, 1)), *args)
    changed, count, reasons = chunk_heads(closed, SMALL)
    jaxapi.check(changed)
    assert (count, reasons) == (1, [])
    assert wide_values(closed)
    assert not wide_values(changed)
    # 26 rows of a sequence are three chunks of 7 and a remainder of 5, in a loop of its own over the sequences.
    assert loops(changed) <= 2
    assert_as_exact(closed, changed, *args)


@pytest.mark.parametrize("name", ["integer labels", "one-hot", "masked tokens"])
def test_the_loss_alone(name):
    args = arguments()
    closed = flat(ONE_LOOP[name], *args)
    changed, count, _ = chunk_heads(closed, SMALL)
    assert count == 1
    assert not wide_values(changed)
    assert_as_exact(closed, changed, *args)


@pytest.mark.parametrize("name", ["integer labels", "log-softmax", "one-hot"])
def test_gradient_that_depends_on_the_loss_computes_the_logits_again(name):
    args = arguments()
    closed = flat(jax.value_and_grad(lambda *args: jnp.sqrt(ONE_LOOP[name](*args)), argnums=(0, 1)), *args)
    changed, count, _ = chunk_heads(closed, Sizes(1, 1, 13))
    assert (count, loops(changed)) == (1, 2)
    assert not wide_values(changed)
    products = [e for e in closed.jaxpr.eqns if jaxapi.primitive_name(e) == "dot_general"]
    inner = [
        e
        for loop in changed.jaxpr.eqns
        for _, _, body in jaxapi.inner_jaxprs(loop)
        for e in body.jaxpr.eqns
        if jaxapi.primitive_name(e) == "dot_general"
    ]
    assert (len(products), len(inner)) == (3, 4)
    assert_as_exact(closed, changed, *args)


def test_two_products():
    args = arguments()
    closed = flat(jax.value_and_grad(distilled, argnums=(0, 1)), *args)
    changed, count, _ = chunk_heads(closed, SMALL)
    assert count >= 1
    assert not wide_values(changed)
    assert_as_exact(closed, changed, *args)


def test_accuracy_and_largest_logits_beside_the_loss():
    def fn(h, w, labels):
        logits = h @ w
        metrics = (logits.argmax(-1) == labels).mean(), jax.lax.top_k(logits, 3)
        return per_token(logits, labels).mean(), metrics

    args = arguments()
    closed = flat(jax.value_and_grad(fn, argnums=(0, 1), has_aux=True), *args)
    changed, count, _ = chunk_heads(closed, SMALL)
    assert count == 1
    assert not wide_values(changed)
    assert_as_exact(closed, changed, *args)
    places = [i for i, v in enumerate(closed.jaxpr.outvars) if v.aval.dtype == np.int32]
    assert len(places) == 1
    np.testing.assert_array_equal(run(changed, *args)[places[0]], run(closed, *args)[places[0]])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_short_floats_accumulate_gradients_in_float32(dtype):
    def fn(h, w, labels):
        return per_token((h @ w).astype(jnp.float32), labels).mean()

    args = arguments(dtype=dtype)
    closed = flat(jax.value_and_grad(fn, argnums=(0, 1)), *args)
    changed, count, _ = chunk_heads(closed, SMALL)
    assert count == 1
    assert_as_exact(closed, changed, *args, factor=1.5)
    (loop, *_) = [e for e in changed.jaxpr.eqns if jaxapi.inner_jaxprs(e)]
    assert any(v.aval.shape == (WIDTH, VOCABULARY) and v.aval.dtype == np.float32 for v in loop.outvars)


def test_large_logits_do_not_overflow():
    args = arguments(scale=1e4)
    closed = flat(jax.value_and_grad(ONE_LOOP["integer labels"], argnums=(0, 1)), *args)
    changed, count, _ = chunk_heads(closed, SMALL)
    assert count == 1
    assert all(np.isfinite(x).all() for x in run(changed, *args))
    assert_as_exact(closed, changed, *args)


@pytest.mark.parametrize("shift", [-VOCABULARY // 2, -2 * VOCABULARY, VOCABULARY // 2])
@pytest.mark.parametrize("name", ["integer labels", "indexed", "one-hot"])
def test_labels_out_of_range_are_treated_as_by_jax(name, shift):
    h, w, labels = arguments()
    args = h, w, labels + np.int32(shift)
    closed = flat(jax.value_and_grad(ONE_LOOP[name], argnums=(0, 1)), *args)
    changed, count, _ = chunk_heads(closed, SMALL)
    assert count == 1
    for whole, chunked in zip(run(closed, *args), run(changed, *args), strict=True):
        np.testing.assert_array_equal(np.isnan(whole), np.isnan(chunked))
        np.testing.assert_allclose(chunked, whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tokens", [0, 1])
def test_nothing_to_divide(tokens):
    h, w, labels = arguments()
    args = h[0, :tokens], w, labels[0, :tokens]
    closed = flat(jax.value_and_grad(lambda h, w, y: per_token(h @ w, y).sum(), argnums=(0, 1)), *args)
    changed, count, _ = chunk_heads(closed, SMALL)
    assert changed is closed
    assert count == 0


def returned(h, w, labels):
    return per_token(h @ w, labels).mean(), h @ w


def normalised_over_tokens(h, w, labels):
    return per_token(jax.nn.softmax(h @ w, axis=1), labels).mean(), 0.0


def no_softmax(h, w, labels):
    return jnp.exp(h @ w).mean() + labels.sum(), 0.0


def no_exponential(h, w, labels):
    return jnp.square(h @ w).mean() + labels.sum(), 0.0


@pytest.mark.parametrize(
    ("fn", "wanted"),
    [
        (returned, ["a wide value is a result of the program"]),
        (normalised_over_tokens, ["reduce_max uses a wide value and does not work row by row"]),
        (no_softmax, ["no softmax over the product's result"]),
        (no_exponential, []),
    ],
)
def test_refusals(fn, wanted):
    args = arguments()
    closed = flat(jax.value_and_grad(fn, argnums=(0, 1), has_aux=True), *args)
    changed, count, reasons = chunk_heads(closed, SMALL)
    assert changed is closed
    assert (count, reasons) == (0, wanted)


def test_small_logits_stay_whole():
    closed = flat(jax.value_and_grad(ONE_LOOP["integer labels"], argnums=(0, 1)), *arguments())
    changed, count = chunk_cross_entropy(closed)
    assert changed is closed
    assert count == 0


def test_gradient_accumulation_in_a_scan():
    def fn(h, w, labels):
        def body(total, one):
            value, grads = jax.value_and_grad(ONE_LOOP["log-softmax"], argnums=1)(one[0], w, one[1])
            return (total[0] + value, total[1] + grads), None

        return jax.lax.scan(body, (jnp.zeros(()), jnp.zeros_like(w)), (h, labels))[0]

    rng = np.random.default_rng(0)
    h = jnp.asarray(rng.standard_normal((2, 2048, 4)), np.float32)
    w = jnp.asarray(rng.standard_normal((4, 9000)), np.float32)
    args = h, w, rng.integers(0, 9000, (2, 2048)).astype(np.int32)
    closed = flat(fn, *args)
    changed = rewritten(closed, ["logits"])
    assert changed.counts == {"logits": 1}
    assert_as_exact(closed, changed.closed, *args)


def test_rematerialised_head():
    def fn(h, w, labels):
        return jax.value_and_grad(jax.checkpoint(ONE_LOOP["log-softmax"]), argnums=(0, 1))(h, w, labels)

    rng = np.random.default_rng(0)
    h, w = rng.standard_normal((2048, 4)), rng.standard_normal((4, 9000))
    args = h.astype(np.float32), w.astype(np.float32), rng.integers(0, 9000, 2048).astype(np.int32)
    closed = flat(fn, *args)
    changed = rewritten(closed, ["logits"])
    assert changed.counts == {"logits": 2}
    assert_as_exact(closed, changed.closed, *args)
    assert peak(changed.closed, args) < peak(closed, args)


def peak(closed, args):
    compiled = jax.jit(lambda *args: jaxapi.eval_closed(closed, *args)).lower(*args).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def test_training_step_of_gpt():
    workload = WORKLOADS["GPT_training"].build(3, dtype="float32", tiny=True)
    args = tuple(jnp.asarray(x) for x in jax.tree.leaves(workload.arguments))
    closed = flat(workload.function, *workload.arguments)
    seed = next(e for e in closed.jaxpr.eqns if e.outvars and e.outvars[0].aval.shape == (3, 8, 40))
    changed, count, reasons = chunk_heads(closed, Sizes(jaxapi.nbytes(seed.outvars[0]), 1, 3))
    assert count == 1, reasons
    assert not [v for e in changed.jaxpr.eqns for v in e.outvars if v.aval.shape == (3, 8, 40)]
    assert_as_exact(closed, changed, *args)
