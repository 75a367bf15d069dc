"""Jaxprs: inlining, canonical text, source lines, rebuilding."""

from __future__ import annotations

import gc
import hashlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jcuts.base.errors import UsageError
from jcuts.trace import canonical, jaxapi
from jcuts.trace.canonical import canonical_digest, canonical_text
from jcuts.trace.capture import capture
from jcuts.trace.inline import inline
from jcuts.trace.source import as_source, short_line

X = np.random.default_rng(0).standard_normal((4, 4)).astype(np.float32)
W = X * 0.1


def names(closed):
    return [jaxapi.primitive_name(e) for e in closed.jaxpr.eqns]


def with_calls(x):
    @jax.jit
    def inner(y):
        return jnp.where(y > 0, y @ W, jax.nn.relu(y))

    c, _ = jax.lax.scan(lambda c, _: (inner(c) + inner(c * 2), None), x, None, length=3)
    c = jax.lax.cond(c.sum() > 0, jax.nn.gelu, lambda a: a, c)
    c = jax.lax.while_loop(lambda a: a.sum() < 3, lambda a: jax.nn.relu(a) + inner(a) * 0 + 1, c)
    return jax.nn.logsumexp(jax.checkpoint(lambda a: jnp.sin(a) * jax.nn.relu(a))(c))


def test_inline_keeps_the_function():
    flat = inline(jaxapi.closed_jaxpr_of(with_calls, X))
    jaxapi.check(flat)
    np.testing.assert_allclose(jaxapi.eval_closed(flat, X)[0], with_calls(X), rtol=1e-6)
    np.testing.assert_allclose(jax.jit(lambda x: jaxapi.eval_closed(flat, x)[0])(X), with_calls(X), rtol=1e-6)


def test_inline_leaves_no_calls_anywhere():
    def walk(closed):
        for eqn in closed.jaxpr.eqns:
            yield jaxapi.primitive_name(eqn)
            for _, _, body in jaxapi.inner_jaxprs(eqn):
                yield from walk(body)

    found = set(walk(inline(jaxapi.closed_jaxpr_of(with_calls, X))))
    assert not found & {"jit", "pjit", "custom_jvp_call", "custom_vjp_call", "remat2", "checkpoint"}
    assert {"scan", "while", "cond", "dot_general"} <= found


def test_differentiated_checkpoint_stays():
    grad = jax.grad(lambda x: jax.checkpoint(lambda a: jnp.sin(jnp.sin(a)) * a)(x).sum())
    assert any(n in ("remat2", "checkpoint") for n in names(inline(jaxapi.closed_jaxpr_of(grad, X))))


def test_jit_with_its_own_sharding_stays():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    closed = jaxapi.closed_jaxpr_of(lambda x: jax.jit(jnp.sin, out_shardings=sharding)(x), X)
    assert names(inline(closed)) == names(closed)


def test_constants_are_shared_between_inlined_calls():
    big = jnp.asarray(W)
    f = jax.jit(lambda x: x @ big)
    g = jax.jit(lambda x: x * big)
    assert len(inline(jaxapi.closed_jaxpr_of(lambda x: f(x) + g(x) + f(2 * x), X)).consts) == 1


def test_user_line_survives_inlining():
    flat = inline(jaxapi.closed_jaxpr_of(with_calls, X))
    for eqn in flat.jaxpr.eqns:
        assert "test_trace.py" in jaxapi.user_frame(eqn)
    assert "with_calls" in short_line(flat.jaxpr.eqns[-1])


def test_library_function_gets_the_line_of_its_caller():
    def first(x):
        return jax.nn.relu(x)

    def second(x):
        return jax.nn.relu(x)

    for fn in (first, second):
        (eqn,) = inline(jaxapi.closed_jaxpr_of(fn, X)).jaxpr.eqns
        assert jaxapi.user_line(eqn).function.endswith(fn.__name__)


def test_named_scopes_survive_inlining():
    @jax.jit
    def inner(x):
        with jax.named_scope("inner"):
            return x * 2

    def f(x):
        with jax.named_scope("outer"):
            return inner(x)

    (eqn,) = inline(jaxapi.closed_jaxpr_of(f, X)).jaxpr.eqns
    assert jaxapi.name_stack(eqn).startswith("outer") and jaxapi.name_stack(eqn).endswith("inner")


def test_canonical_text_is_equal_for_equal_programs():
    def other_names(banana):
        with jax.named_scope("elsewhere"):
            return jnp.tanh(banana @ W) * 2

    def one(x):
        return jnp.tanh(x @ W) * 2

    assert canonical_text(jaxapi.closed_jaxpr_of(one, X)) == canonical_text(jaxapi.closed_jaxpr_of(other_names, X))


@pytest.mark.parametrize(
    "other",
    [
        lambda x: jnp.tanh(x @ W) * 3,
        lambda x: jnp.tanh(x @ W) + 2,
        lambda x: jnp.tanh(x @ W.T) * 2,
        lambda x: jnp.tanh(jnp.matmul(x, W, precision="highest")) * 2,
    ],
)
def test_canonical_text_differs_for_other_programs(other):
    base = canonical_digest(jaxapi.closed_jaxpr_of(lambda x: jnp.tanh(x @ W) * 2, X), consts="digest")
    assert canonical_digest(jaxapi.closed_jaxpr_of(other, X), consts="digest") != base


def test_canonical_text_tells_zeros_and_nans_apart():
    texts = {canonical_text(jaxapi.closed_jaxpr_of(lambda x, v=v: x + np.float32(v), X)) for v in (0.0, -0.0, np.nan)}
    assert len(texts) == 3


def test_constants_by_shape_or_content():
    a, b = (jaxapi.closed_jaxpr_of(lambda x, w=w: x @ w, X) for w in (W, 2 * W))
    assert canonical_text(a) == canonical_text(b)
    assert canonical_text(a, consts="digest") != canonical_text(b, consts="digest")
    with pytest.raises(UsageError):
        canonical_text(a, consts="names")


_PROGRAM = """
import jax, jax.numpy as jnp, numpy as np
from jcuts.trace import jaxapi
def f(x):
    c, _ = jax.lax.scan(lambda c, _: (jax.nn.relu(c) @ x, None), x, None, length=2)
    return jax.lax.cond(c.sum() > 0, jnp.sin, jnp.cos, c)
g = jax.grad(lambda x: f(x).sum())
print(jaxapi.canonical_digest(jaxapi.closed_jaxpr_of(g, np.ones((4, 4), np.float32))))
"""


def test_canonical_text_is_equal_across_processes():
    runs = {
        subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True, timeout=120).stdout
        for _ in range(2)
    }
    assert len(runs) == 1 and len(runs.pop().strip()) == 64


def test_source_text_names_lines_and_bodies():
    text = as_source(inline(jaxapi.closed_jaxpr_of(with_calls, X)), name="model")
    assert text.startswith("def model(a: f32[4,4]):")
    assert "test_trace.py" in text and "scan(" in text and "def branches_0(" in text and "return " in text


def test_capture_closes_over_static_leaves():
    def f(tree, n):
        return {"out": tree["a"] * n}

    seen = capture(f, ({"a": X}, 3), {}, is_data=lambda leaf: isinstance(leaf, np.ndarray))
    assert seen.name == "f" and len(seen.closed.jaxpr.invars) == 1
    (out,) = jaxapi.eval_closed(seen.closed, X)
    np.testing.assert_array_equal(out, X * 3)


def test_rebuild_with_other_equations():
    closed = jaxapi.closed_jaxpr_of(lambda x: jnp.sin(x) * 2, X)
    eqns = [e.replace(primitive=jax.lax.cos_p) if jaxapi.primitive_name(e) == "sin" else e for e in closed.jaxpr.eqns]
    np.testing.assert_allclose(jaxapi.eval_closed(jaxapi.with_eqns(closed, eqns), X)[0], np.cos(X) * 2, rtol=1e-6)


def test_dce_drops_what_nobody_needs():
    closed = jaxapi.closed_jaxpr_of(lambda x: (jnp.sin(x), jnp.cos(x))[0], X)
    assert names(jaxapi.dce(closed)) == ["sin"]
    effectful = jaxapi.closed_jaxpr_of(lambda x: (jax.debug.callback(print, x), jnp.sin(x))[1], X)
    assert len(jaxapi.dce(effectful).jaxpr.eqns) == 2 and jaxapi.has_effects(effectful)


def test_tracer_constants_become_arguments():
    seen = []

    @jax.jit
    def outer(w):
        tracers, closed = jaxapi.hoist_tracer_consts(jaxapi.closed_jaxpr_of(lambda x: x @ w + W, X))
        seen.append((len(tracers), len(closed.jaxpr.invars), len(closed.consts)))
        return jaxapi.eval_closed(closed, *tracers, X)[0]

    np.testing.assert_allclose(outer(X), X @ X + W, rtol=1e-5, atol=1e-6)
    assert seen == [(1, 2, 1)]


def test_canonical_text_tells_mesh_contexts_apart():
    plain = canonical_text(jaxapi.closed_jaxpr_of(jnp.sin, X))
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh):
        assert canonical_text(jaxapi.closed_jaxpr_of(jnp.sin, X)) != plain
        with jaxapi.without_mesh():
            assert canonical_text(jaxapi.closed_jaxpr_of(jnp.sin, X)) == plain


def _adding(constant):
    return jaxapi.closed_jaxpr_of(lambda x: x + constant, np.float32(0))


def test_large_constants_are_hashed_once_and_forgotten_with_the_array(monkeypatch):
    hashed = []
    monkeypatch.setattr(canonical, "_bytes", lambda a, real=canonical._bytes: (hashed.append(a.nbytes), real(a))[1])
    ours = jnp.arange(40_000, dtype=jnp.float32)
    before = len(canonical._digests)
    first = canonical.canonical_digest(_adding(ours), consts="digest")
    assert canonical.canonical_digest(_adding(ours), consts="digest") == first
    assert hashed.count(ours.nbytes) == 1 and len(canonical._digests) == before + 1
    assert canonical.canonical_digest(_adding(ours + 1), consts="digest") != first
    del ours
    gc.collect()
    assert len(canonical._digests) == before


@pytest.mark.parametrize("shape", [(), (0, 3), (300, 200)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool"])
def test_a_content_hash_is_that_of_the_bytes(shape, dtype):
    array = np.random.default_rng(0).integers(0, 2, shape).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    want = hashlib.sha256(array.tobytes()).hexdigest()
    assert canonical._content_digest(array) == canonical._content_digest(jnp.asarray(array)) == want
    array = np.asarray(array).copy()
    other = np.asfortranarray(array)
    assert canonical._content_digest(other) == want
    if array.size > 1:
        array.reshape(-1)[0] = not array.reshape(-1)[0]  # NumPy arrays change: nothing is remembered of them
        assert canonical._content_digest(array) != want
