"""Products of one operand as one product: which are joined, which are not, and that results are those of float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jcuts
from benchmarks.networks import workloads
from jcuts.rewrite import horizontal_matmul
from jcuts.rewrite.horizontal_matmul import MOST
from jcuts.rewrite.registry import RULES, applicable, rewritten
from jcuts.rewrite.simplify import simplify
from jcuts.trace import jaxapi
from jcuts.trace.inline import inline
from tests.evaluation import compiled, exact

RNG = np.random.default_rng(11)
NHWC, NCHW = ("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW")
ONLY = ("siblings",)


def values(*shape, dtype=jnp.float32):
    return jnp.asarray(RNG.standard_normal(shape), dtype)


def flat(function, *args):
    return simplify(inline(jaxapi.closed_jaxpr_of(function, *args)))


def count(closed, *names):
    return sum(jaxapi.primitive_name(e) in names for e in closed.jaxpr.eqns)


def joined(function, *args, rules=ONLY):
    """The rewritten program, after its results were compared with a float64 run of the program as it was."""
    closed = flat(function, *args)
    new = rewritten(closed, rules)
    jaxapi.check(new.closed)
    results = zip(compiled(closed, *args), compiled(new.closed, *args), exact(closed, *args), strict=True)
    for x, y, r in results:
        assert x.dtype == y.dtype and x.shape == y.shape
        r, eps = np.asarray(r), float(jnp.finfo(y.dtype).eps)
        plain, mine = (np.linalg.norm(np.asarray(a, np.float64) - r) for a in (x, y))
        assert mine <= 2 * plain + 4 * eps * np.linalg.norm(r)
    return new


def conv(x, w, numbers=NHWC, stride=1, padding="SAME", **more):
    return lax.conv_general_dilated(x, w, (stride,) * (x.ndim - 2), padding, dimension_numbers=numbers, **more)


def test_three_products_of_different_widths_with_biases_and_an_activation():
    x, ws = values(2, 7, 13), [values(13, n) for n in (5, 3, 11)]
    biases = [values(n) for n in (5, 3, 11)]

    def branches(x):
        return [jnp.maximum(x @ w + b, 0.0) * 0.5 for w, b in zip(ws, biases, strict=True)]

    new = joined(branches, x)
    assert new.counts == {"siblings": 1} and "siblings 1 times" in str(new) and applicable(flat(branches, x)) == ONLY
    names = [jaxapi.primitive_name(e) for e in new.closed.jaxpr.eqns if "broadcast" not in jaxapi.primitive_name(e)]
    assert names == ["dot_general", "add", "max", "mul", "slice", "slice", "slice"]
    assert sorted(c.size for c in new.closed.consts) == [19, 13 * 19]  # the old weights are gone


def test_what_differs_comes_after_the_slices():
    x, ws, bias = values(6, 9), [values(9, n) for n in (4, 4, 2)], values(4)

    def branches(x):
        a, b, c = (x @ w for w in ws)
        return jnp.tanh(a + bias), jnp.tanh(b - bias), c

    new = joined(branches, x).closed
    assert count(new, "dot_general") == 1 and count(new, "slice") == 3 and count(new, "tanh") == 2

    def scaled(x):
        a, b, c = (x @ w for w in ws)
        return jnp.exp(a * 0.25 + bias), jnp.exp(b * 0.5), jnp.exp(c * 0.25)

    new = joined(scaled, x).closed
    assert count(new, "mul") == 1 and count(new, "exp") == 3  # three factors become a vector, one addition stays apart


def test_what_most_columns_have_in_common_is_done_to_all():
    """With constants that change nothing for the others."""
    x, ws, biases = values(6, 9), [values(9, n) for n in (4, 5, 2)], [values(n) for n in (4, 5)]

    def branches(x):
        a, b, c = (x @ w for w in ws)
        return jnp.maximum(a + biases[0], 0.0), jnp.maximum(b + biases[1], 0.0), jnp.cumsum(c, 0), c

    new = joined(branches, x).closed
    assert count(new, "dot_general") == count(new, "add") == count(new, "max") == 1
    bounds = [c for c in new.consts if np.isinf(np.asarray(c)).any()]
    assert [np.isinf(np.asarray(c)).reshape(-1, 11)[0].tolist() for c in bounds] == [[False] * 9 + [True] * 2]

    def narrow(x):
        a, b, c = (x @ w for w in ws)
        return jnp.maximum(a, 0.0), jnp.exp(b), jnp.exp(c)

    new = joined(narrow, x).closed
    assert count(new, "max") == 1 and new.jaxpr.eqns[-1].outvars[0].aval.shape != (6, 11)  # of four columns in eleven


def test_infinities_and_nan_pass_through_a_neutral_maximum():
    x = jnp.asarray([[jnp.nan, 1.0], [jnp.inf, 1.0], [-jnp.inf, 1.0], [-2.0, 1.0]], jnp.float32)
    w, v = values(2, 6), jnp.eye(2, dtype=jnp.float32)[:, :1]
    closed = flat(lambda x: (jnp.maximum(x @ w, 0.0), jnp.sum(x @ v, 1)), x[:, :2])
    new = rewritten(closed, ONLY).closed
    assert count(new, "dot_general") == count(new, "max") == 1
    for a, b in zip(compiled(closed, x), compiled(new, x), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def _half_branches(back):
    """Three products in bfloat16, two with a norm in float32, and their operand."""
    half = jnp.bfloat16
    x, ws = values(2, 4, 4, 8, dtype=half), [values(8, n, dtype=half) for n in (5, 3, 4)]
    pairs = [(values(n), values(n)) for n in (5, 3)]

    def branches(x):
        found = []
        for w, (s, t) in zip(ws[:2], pairs, strict=True):
            y = (x @ w).astype(jnp.float32) * s + t
            found.append(jnp.maximum(y.astype(half), 0) if back else jnp.sin(y))
        return *found, lax.reduce_window(x @ ws[2], half(0), lax.add, (1, 3, 3, 1), (1, 1, 1, 1), "SAME")

    return branches, x


def test_a_norm_in_a_wider_type_is_done_to_siblings_without_one():
    branches, x = _half_branches(True)
    new = joined(branches, x).closed
    assert count(new, "dot_general") == count(new, "mul") == count(new, "add") == count(new, "max") == 1
    assert count(new, "convert_element_type") == 2
    cut = [e for e in new.jaxpr.eqns if jaxapi.primitive_name(e) == "slice"]
    assert [e.outvars[0].aval.dtype for e in cut] == [jnp.bfloat16] * 3
    flat_results = compiled(flat(branches, x), x)
    np.testing.assert_array_equal(*(np.asarray(r[2], np.float32) for r in (flat_results, compiled(new, x))))


def test_what_does_not_come_back_from_a_wider_type_stays_behind_the_cut():
    branches, x = _half_branches(False)
    new = joined(branches, x).closed
    assert count(new, "dot_general") == 1 and count(new, "mul", "add") == 4
    cut = [e for e in new.jaxpr.eqns if jaxapi.primitive_name(e) == "slice"]
    assert [e.outvars[0].aval.dtype for e in cut] == [jnp.bfloat16] * 3


def test_a_sibling_that_stays_in_the_wider_type_is_not_rounded_with_those_that_come_back():
    half, wide = jnp.bfloat16, jnp.float32
    x = jnp.asarray(RNG.integers(-3, 4, (2, 4, 4, 8)), half)  # products are exact
    ws = [jnp.asarray(RNG.integers(-3, 4, (8, n)), half) for n in (8, 2, 3)]
    first, second = values(8), values(2)

    def branches(x):
        a, b, c = (x @ w for w in ws)
        a = jnp.maximum((a.astype(wide) * first).astype(half), 0).astype(wide)
        return jnp.sin(a), jnp.abs(b.astype(wide) * second), jnp.tanh(jnp.maximum(c, 0).astype(wide))

    new = joined(branches, x).closed
    assert count(new, "dot_general") == 1
    for r, s in zip(compiled(flat(branches, x), x), compiled(new, x), strict=True):
        np.testing.assert_allclose(r, s, rtol=1e-6)


def test_siblings_of_eight_bits():
    x, ws = values(4, 8, dtype=jnp.float8_e4m3fn), [values(8, n, dtype=jnp.float8_e4m3fn) for n in (8, 3, 2)]

    def branches(x):
        a, b, c = (lax.dot(x, w, preferred_element_type=jnp.float8_e4m3fn) for w in ws)
        return *((y.astype(jnp.float32) * 2).astype(y.dtype) for y in (a, b)), -c

    new = rewritten(flat(branches, x), ONLY).closed
    assert count(new, "dot_general") == count(new, "mul") == 1
    for r, s in zip(compiled(flat(branches, x), x), compiled(new, x), strict=True):
        np.testing.assert_array_equal(np.asarray(r, np.float32), np.asarray(s, np.float32))


def test_what_holds_all_numbers_of_another():
    kinds = [jnp.dtype(k) for k in ("float8_e4m3fn", "float8_e5m2", "bfloat16", "float16", "float32", "float64")]
    held = {(a.name, b.name) for a in kinds for b in kinds if a != b and horizontal_matmul._holds(a, b)}
    assert held == {
        *(("float64", k.name) for k in kinds[:5]),
        *(("float32", k.name) for k in kinds[:4]),
        *((k, f) for k in ("float16", "bfloat16") for f in ("float8_e4m3fn", "float8_e5m2")),
    }


def test_a_sibling_that_stays_wide_is_not_rounded_with_those_that_come_back():
    """Of which one goes to the wider type again, as does the one that had waited."""
    half = jnp.bfloat16
    x, ws = values(2, 4, 4, 8, dtype=half), [values(8, n, dtype=half) for n in (4, 12, 3)]
    norms = [values(n) for n in (4, 12)]

    def branches(x):
        a, b = ((x @ w).astype(jnp.float32) * s for w, s in zip(ws, norms, strict=False))
        return a, *(jnp.maximum(v.astype(half), half(0)).astype(jnp.float32) for v in (b, x @ ws[2]))

    flat_results = compiled(flat(branches, x), x)
    for a, b in zip(flat_results, compiled(joined(branches, x).closed, x), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_a_sibling_that_is_concatenated_comes_last():
    x, ws, filters = values(1, 4, 4, 9), [values(9, n) for n in (4, 5)], values(3, 3, 5, 3)
    new = joined(lambda x: jnp.concatenate([jnp.tanh(x @ ws[0]), conv(jnp.tanh(x @ ws[1]), filters)], -1), x).closed
    slices = [e for e in new.jaxpr.eqns if jaxapi.primitive_name(e) == "slice"]
    assert [e.params["limit_indices"][-1] for e in slices] == [5, 9]
    assert [jaxapi.primitive_name(r) for s in slices for r in new.jaxpr.eqns if s.outvars[0] in r.invars] == [
        "conv_general_dilated",
        "concatenate",
    ]


def test_followers_that_read_more_than_constants_stay():
    x, v, w, bias = values(6, 6), values(6, 4), values(6, 4), values(4)
    new = joined(lambda x: ((x @ v + bias) * (x @ w + bias), x), x).closed
    assert count(new, "dot_general", "add") == 2 and count(new, "mul") == 1
    new = joined(lambda x: (x @ v + x[:, :4], x @ w + x[:, :4]), x).closed
    assert count(new, "dot_general") == 1 and count(new, "add") == 2
    new = joined(lambda x: ((y := x @ v) + bias, y, x @ w + bias), x).closed  # the first is a result, too
    assert count(new, "dot_general") == 1 and count(new, "add") == 2


def test_a_shared_right_operand():
    x, ws = values(9, 4), [values(n, 9) for n in (3, 7)]
    new = joined(lambda x: [w @ x for w in ws], x)
    assert new.counts == {"siblings": 1} and count(new.closed, "dot_general") == 1
    assert new.closed.jaxpr.eqns[0].outvars[0].aval.shape == (10, 4)


def test_heads_and_batches():
    x = values(2, 5, 6)
    heads, biases = [values(6, n, 7) for n in (3, 1, 2)], [values(n, 7) for n in (3, 1, 2)]
    new = joined(lambda x: [jnp.einsum("bld,dhk->blhk", x, w) + b for w, b in zip(heads, biases, strict=True)], x)
    assert new.counts == {"siblings": 1} and count(new.closed, "add") == 1
    batched = [values(2, 6, n) for n in (3, 4)]
    assert joined(lambda x: [jnp.einsum("bld,bdk->blk", x, w) for w in batched], x).counts == {"siblings": 1}
    sums = [values(6, 5, n) for n in (3, 4)]
    assert joined(lambda x: [jnp.einsum("bld,dlk->bk", x, w) for w in sums], x).counts == {"siblings": 1}


@pytest.mark.parametrize(
    ("shape", "numbers", "kernels", "options"),
    [
        ((2, 7, 5, 3), NHWC, [(3, 2, 3, 4), (3, 2, 3, 5), (3, 2, 3, 1)], {}),
        ((2, 3, 7, 5), NCHW, [(4, 3, 3, 2), (5, 3, 3, 2)], {"stride": 2}),
        ((2, 3, 7, 5), NCHW, [(4, 3, 1, 1), (5, 3, 1, 1)], {}),
        ((1, 9, 6, 4), NHWC, [(1, 1, 4, 3), (1, 1, 4, 8)], {"stride": 2, "padding": "VALID"}),
        ((2, 9, 4), ("NWC", "WIO", "NWC"), [(3, 4, 3), (3, 4, 2)], {"rhs_dilation": (2,)}),
        ((2, 5, 5, 3), ("NHWC", "HWIO", "NCHW"), [(3, 3, 3, 4), (3, 3, 3, 5)], {}),
    ],
)
def test_convolutions(shape, numbers, kernels, options):
    x, ws = values(*shape), [values(*k) for k in kernels]
    features = numbers[2].index("C")
    biases = [values(*[w.shape[numbers[1].index("O")] if d == features else 1 for d in range(x.ndim)]) for w in ws]

    def branches(x):
        made = [conv(x, w, numbers, **options) for w in ws]
        return [jax.nn.relu(y + b) for y, b in zip(made, biases, strict=True)]

    new = joined(branches, x)
    assert new.counts == {"siblings": 1}
    assert count(new.closed, "conv_general_dilated", "add", "max") == 3


def test_pointwise_convolutions_are_joined_with_and_without_dots():
    x, parts = values(2, 5, 3, 4), [(values(1, 1, 4, n), values(n), values(n)) for n in (3, 6)]

    def branches(x):
        return [jax.nn.relu(conv(x, w) * gain + shift) for w, gain, shift in parts]

    new = joined(branches, x, rules=("scales", "dots", "siblings"))
    assert new.counts == {"scales": 2, "dots": 2, "siblings": 1}
    assert count(new.closed, "dot_general", "add", "max") == 3
    assert joined(branches, x, rules=("scales", "siblings")).counts == {"scales": 2, "siblings": 1}
    assert applicable(flat(branches, x)) == ("scales", "dots", "siblings")


X, V, W = values(6, 6), values(6, 6), values(6, 6)
IMAGE, FILTERS = values(1, 6, 6, 4), [values(3, 3, 4, n) for n in (4, 8)]


@pytest.mark.parametrize(
    "function",
    [
        lambda: (X @ V) @ W,  # one depends on the other
        lambda: [X @ V, lax.dot(X, W, precision=lax.Precision.HIGHEST)],
        lambda: [X @ V, lax.dot(X, W, preferred_element_type=jnp.float64)],
        lambda: [X @ V, lax.dot_general(X, W, (((0,), (0,)), ((), ())))],
        lambda: [X @ V, W @ X],
        lambda: [X @ V, (X + 1.0) @ W],
        lambda: [X[:, 0] @ V[0], X[:, 1] @ V[1]],
    ],
)
def test_products_that_are_no_siblings(function):
    with jax.enable_x64(True):
        closed = flat(lambda _: function(), X)
    # X is an argument, V and W are constants.
    jaxpr = closed.jaxpr
    opened = [v for v, c in zip(jaxpr.constvars, closed.consts, strict=True) if c is X]
    pairs = [(v, c) for v, c in zip(jaxpr.constvars, closed.consts, strict=True) if c is not X]
    assert opened and pairs
    given = jaxapi.make_closed(
        [v for v, _ in pairs], opened, jaxpr.outvars, jaxpr.eqns, [c for _, c in pairs], like=closed
    )
    assert rewritten(given, ONLY).counts == {}


@pytest.mark.parametrize(
    "options",
    [
        {"stride": 2},
        {"padding": "VALID"},
        {"rhs_dilation": (2, 2), "padding": "VALID"},
        {"precision": lax.Precision.HIGHEST},
        {"feature_group_count": 4},
        {"lhs_dilation": (2, 1), "padding": [(1, 1), (1, 1)]},
    ],
)
def test_convolutions_that_are_no_siblings(options):
    second = values(3, 3, 1, 8) if "feature_group_count" in options else FILTERS[1]
    closed = flat(lambda x: (conv(x, FILTERS[0]), conv(x, second, **options)), IMAGE)
    assert rewritten(closed, ONLY).counts == {}
    if "feature_group_count" in options:
        assert rewritten(flat(lambda x: [conv(x, second + n, **options) for n in range(2)], IMAGE), ONLY).counts == {}


def test_weights_that_are_arguments_are_not_joined():
    closed = flat(lambda x, v, w: (x @ v, x @ w), X, V, W)
    assert rewritten(closed, ONLY).counts == {}
    closed = flat(lambda x, v: (x @ v, x @ W), X, V)
    assert rewritten(closed, ONLY).counts == {}


def test_limits(monkeypatch):
    ws = [values(3, 2) for _ in range(MOST + 3)]
    x = values(4, 3)
    new = joined(lambda x: [x @ w for w in ws], x)
    assert new.counts == {"siblings": 2} and count(new.closed, "dot_general") == 2
    monkeypatch.setattr("jcuts.rewrite.horizontal_matmul.FOLD_LIMIT", 2 * ws[0].nbytes)
    assert joined(lambda x: [x @ w for w in ws[:5]], x).counts == {"siblings": 2}  # 2, 2, 1
    monkeypatch.setattr("jcuts.rewrite.horizontal_matmul.FOLD_LIMIT", ws[0].nbytes)
    assert joined(lambda x: [x @ w for w in ws[:5]], x).counts == {}


def test_types():
    x, ws = values(5, 8, dtype=jnp.bfloat16), [values(8, n, dtype=jnp.bfloat16) for n in (2, 3)]
    closed = flat(lambda x: [(x @ w).astype(jnp.float32) for w in ws], x)
    new = rewritten(closed, ONLY)
    jaxapi.check(new.closed)
    assert new.counts == {"siblings": 1} and count(new.closed, "convert_element_type") == 1
    for a, b in zip(compiled(closed, x), compiled(new.closed, x), strict=True):
        np.testing.assert_array_equal(a, b)
    mixed = [values(8, 2), values(8, 3, dtype=jnp.bfloat16)]
    assert rewritten(flat(lambda x: [lax.dot(x, w) for w in mixed], x), ONLY).counts == {}


def test_loop_bodies():
    gates, state, inputs = [0.3 * values(6, 6) for _ in range(3)], values(2, 6), values(5, 2, 4)
    given = [values(4, 6) for _ in range(3)]

    def cell(h, x):
        i, f, o = (jnp.tanh(x @ a + h @ b) for a, b in zip(given, gates, strict=True))
        h = f * h + i * o
        return h, h

    def rnn(h, xs):
        return lax.scan(cell, h, xs)

    new = joined(rnn, state, inputs)
    assert new.counts == {"siblings": 2} and count(new.closed, "scan") == 1
    assert sorted(c.shape for c in new.closed.consts) == [(4, 18), (6, 18)]

    def nested(h, xs):
        return lax.fori_loop(0, 2, lambda _, h: rnn(h, xs)[0], h)

    assert joined(nested, state, inputs).counts == {"siblings": 2}
    assert (
        rewritten(
            flat(lambda h, xs, given, gates: [cell_of(given, gates, h, xs)], state, inputs, given, gates), ONLY
        ).counts
        == {}
    )


def cell_of(given, gates, h, xs):
    def cell(h, x):
        return sum(jnp.tanh(x @ a + h @ b) for a, b in zip(given, gates, strict=True)), None

    return lax.scan(cell, h, xs)[0]


def test_scales_reach_the_constants_of_a_scan():
    w, s, x = values(6, 6), values(6), values(3, 6)
    new = joined(
        lambda x: lax.scan(lambda x, _: (jnp.tanh((x @ w) * s), None), x, None, length=3)[0], x, rules=("scales",)
    )
    assert new.counts == {"scales": 1}


def test_conditions_and_unbounded_loops_keep_their_operands():
    def choose(x):
        return lax.cond(x[0, 0] > 0, lambda x: (x @ V, x @ W), lambda x: (x, x), x)

    assert joined(choose, X).counts == {}
    assert joined(lambda x: lax.while_loop(lambda x: x[0, 0] < 9, lambda x: x @ V + x @ W + 9.0, x), X).counts == {}


def test_gradients_of_optimised_functions_and_programs_with_gradients():
    def loss(x):
        return jnp.sum(jnp.tanh(x @ V) * (x @ W))

    np.testing.assert_allclose(jax.grad(jcuts.optimize(loss, tune="off"))(X), jax.grad(loss)(X), rtol=1e-5, atol=1e-5)
    assert joined(jax.value_and_grad(loss), X).counts == {"siblings": 1}


def test_bert_has_one_group_per_layer():
    function, args = workloads.bert(2, 9, layers=12, width=24, heads=3, vocabulary=31, closed=True)
    before = flat(function, *args)
    new = rewritten(before, tuple(RULES))
    assert new.counts["siblings"] == 12
    assert count(before, "dot_general") - count(new.closed, "dot_general") == 24
    assert count(before, "add") - count(new.closed, "add") == 24 and count(new.closed, "slice") == 36
    for a, b in zip(compiled(before, *args), compiled(new.closed, *args), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
    function, args = workloads.bert(2, 9, layers=1, width=24, heads=3, vocabulary=31)
    assert applicable(flat(function, *args)) == ()


@pytest.mark.parametrize(
    ("name", "size", "groups", "fewer"),
    [
        pytest.param("InceptionV3", 75, 10, 19, marks=pytest.mark.slow),
        pytest.param("ResNet50", 32, 4, 4, marks=pytest.mark.slow),
    ],
)
def test_networks(name, size, groups, fewer):
    pytest.importorskip("keras")
    function, (x,) = workloads.network(name, 1, size=size)
    before = flat(function, x)
    for rules in (tuple(RULES), ("scales", "siblings"), ("scales", "dots", "siblings")):
        new = rewritten(before, rules)
        products = [count(c, "dot_general", "conv_general_dilated") for c in (before, new.closed)]
        pooled = new.counts.get("pools", 0)  # each joins the siblings of its block
        assert pooled == (9 if name == "InceptionV3" and "pools" in rules else 0)
        assert new.counts["siblings"] == groups and products[0] - products[1] == fewer + pooled
        jaxapi.check(new.closed)
    run = jax.jit(lambda x: [jaxapi.eval_closed(c, x)[0] for c in (before, new.closed)])
    np.testing.assert_allclose(*run(x), rtol=1e-3, atol=1e-6)
