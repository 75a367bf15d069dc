"""``checkify``, ``jet`` and ``sparsify`` around optimised functions give what they give around ``jax.jit``."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify, jet, sparse

import jcuts
from jcuts.primitive import jet_sparse
from jcuts.primitive.call import NAME
from tests.primitive.conftest import MARK

off = functools.partial(jcuts.optimize, tune="off")
X = np.linspace(-1.0, 2.0, 12, dtype=np.float32).reshape(3, 4)


def checked(x):
    checkify.check(jnp.all(x > 0), "must be positive, got {least}", least=jnp.min(x))
    return x * 2


def in_a_loop(x):
    return jax.lax.fori_loop(0, 3, lambda i, c: jnp.log(c) * 2, x)


def twice_checked(x):
    return checked(x) + off(checked)(x - 1)


def through_a_gradient(x):
    return jax.grad(lambda y: off(checked)(y).sum())(x)


CHECKED = {
    "nan": (jnp.log, checkify.float_checks, (X,)),
    "division": (lambda x: 1 / x, checkify.div_checks, (np.float32(0.0),)),
    "index": (lambda x, i: x[i], checkify.index_checks, (X[0], 10)),
    "nan in a loop": (in_a_loop, checkify.float_checks, (X,)),
    "user": (checked, checkify.user_checks, (X,)),
    "all": (checked, checkify.all_checks, (X,)),
    "nested": (twice_checked, checkify.user_checks, (X + 1.5,)),
    "gradient": (through_a_gradient, checkify.user_checks, (X,)),
}


@pytest.mark.parametrize("outer", [lambda f: f, jax.jit], ids=["plain", "jit"])
@pytest.mark.parametrize("name", sorted(CHECKED))
def test_checkify_reports_what_jit_reports(name, outer):
    fn, errors, args = CHECKED[name]
    want, value = checkify.checkify(jax.jit(fn), errors=errors)(*args)
    got, ours = outer(checkify.checkify(off(fn), errors=errors))(*args)
    assert want.get() is not None and got.get() == want.get()
    np.testing.assert_allclose(ours, value, rtol=1e-6)
    fine = jax.tree.map(lambda x: np.abs(x) + 3 if x.dtype == np.float32 else 0, tuple(map(np.asarray, args)))
    assert checkify.checkify(off(fn), errors=errors)(*fine)[0].get() is None


def test_checkify_under_vmap():
    batched = jax.vmap(checkify.checkify(off(checked)))(X)[0]
    assert batched.get() == jax.vmap(checkify.checkify(jax.jit(checked)))(X)[0].get() is not None


def test_a_check_that_nobody_asks_for_is_an_error_as_under_jit():
    for wrap in (jax.jit, off):
        with pytest.raises(ValueError, match="not functionalized"):
            wrap(checked)(X)


def test_checked_program_is_planned_as_one_call(toy):
    f = checkify.checkify(off(lambda x: jnp.log(x) * 2), errors=checkify.float_checks)
    assert str(jax.make_jaxpr(f)(X)).count(NAME + "[") == 1
    assert MARK in jax.jit(f).lower(X).as_text()


@pytest.mark.parametrize("order", [1, 3])
def test_jet(order):
    def fn(x, y):
        return jnp.tanh(x @ y), x * 2

    primals = (X, X.T.copy())
    series = tuple([np.full_like(p, 0.1 * (k + 1)) for k in range(order)] for p in primals)
    want = jet.jet(jax.jit(fn), primals, series)
    for outer in (lambda f: f, jax.jit):
        got = outer(lambda p, s: jet.jet(off(fn), p, s))(primals, series)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), got, want)


def test_jet_is_planned_as_one_call():
    text = str(jax.make_jaxpr(lambda x: jet.jet(off(jnp.sin), (x,), ((1.0, 0.5),)))(1.0))
    assert text.count(NAME + "[") == 1


def _square(m):
    return m * 2, m @ X.T


def test_sparsify():
    matrix = sparse.BCOO.fromdense(jnp.asarray(np.where(X > 1, X, 0)))
    want = sparse.sparsify(jax.jit(_square))(matrix)
    got = sparse.sparsify(off(_square))(matrix)
    under_jit = jax.jit(sparse.sparsify(off(_square)))(matrix)
    assert isinstance(want[0], sparse.BCOO)
    for ours in (got, under_jit):
        assert isinstance(ours[0], sparse.BCOO) and ours[0].nse == want[0].nse
        np.testing.assert_allclose(ours[0].todense(), want[0].todense())
        np.testing.assert_allclose(ours[1], want[1], rtol=1e-6)
    text = str(jax.make_jaxpr(sparse.sparsify(off(_square)))(matrix))
    assert text.count(NAME + "[") == 1


def test_a_function_traced_before_sparse_was_imported(monkeypatch):
    f = off(_square)
    jax.make_jaxpr(f)(X)  # its jaxpr is kept by JAX: nothing is traced again below
    transform = sparse.transform
    for table in (transform.sparse_rules_bcoo, transform.sparse_rules_bcsr):
        for primitive in [p for p in table if p.name == NAME]:
            monkeypatch.delitem(table, primitive)
    matrix = sparse.BCOO.fromdense(jnp.asarray(X))
    np.testing.assert_allclose(sparse.sparsify(f)(matrix)[1], X @ X.T, rtol=1e-6)


def test_nothing_sparse_is_imported_for_others():
    import subprocess
    import sys

    code = f"import sys, jcuts; jcuts.optimize(len); assert {jet_sparse._SPARSE!r} not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
