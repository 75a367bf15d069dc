"""Products whose operands a GPU may round to TF32, and filters that meet padding."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jcuts.base.errors import AccuracyRejected
from jcuts.rewrite.tf32_weights import round_tf32
from jcuts.trace import jaxapi
from jcuts.tune import input_recipes
from jcuts.tune.baseline.xla_export import export_subset
from jcuts.tune.problem import Input, Output, Problem
from jcuts.tune.verify import reference
from jcuts.tune.verify.acceptance import check_output
from jcuts.tune.verify.expected import OutputReference
from jcuts.tune.verify.float64_eval import evaluate
from jcuts.tune.verify.inputs import NORMAL, SPECIAL, make_inputs
from jcuts.tune.verify.rounding_traits import rounds_operands

RNG = np.random.default_rng(11)
A, B = (RNG.standard_normal(shape).astype(np.float32) for shape in ((37, 53), (53, 21)))


def closed(function, *args):
    return jaxapi.closed_jaxpr_of(function, *args)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda a, b: jnp.tanh(a @ b), True),
        (lambda a, b: lax.fori_loop(0, 2, lambda _, x: x + a @ b, jnp.zeros((37, 21))), True),
        (lambda a, b: jnp.dot(a, b, precision="highest"), False),
        (lambda a, b: jnp.dot(a, b, precision="high"), False),
        (lambda a, b: a.astype(jnp.bfloat16) @ b.astype(jnp.bfloat16), False),
        (lambda a, b: a.sum() + b.sum(), False),
    ],
)
def test_which_products_may_round(function, expected):
    assert rounds_operands(closed(function, A, B)) is expected


def test_the_reference_rounds_operands_on_demand():
    program = closed(lambda a, b: jnp.maximum(a @ b, 0), A, B)
    with jax.enable_x64(True):
        wide = [x.astype(np.float64) for x in (A, B)]
        for flag, operands in ((0.0, wide), (1.0, [round_tf32(x).astype(np.float64) for x in (A, B)])):
            (got,) = evaluate(program, wide, rounded=jnp.float64(flag))
            np.testing.assert_allclose(got, np.maximum(operands[0] @ operands[1], 0), rtol=1e-13, atol=1e-13)


def test_only_exports_for_gpus_round():
    program = closed(lambda a, b: a @ b, A, B)
    assert export_subset(program, platform="cuda").rounds and not export_subset(program).rounds


def attention(q, k, v):
    return jax.nn.softmax(8 * q @ k.T, -1) @ v


def test_exponentials_of_products_are_judged_by_rounded_operands():
    q, k, v = (RNG.standard_normal(s).astype(np.float32) for s in ((33, 16), (47, 16), (47, 8)))
    program = closed(attention, q, k, v)
    on_gpu, on_cpu = export_subset(program, platform="cuda"), export_subset(program)
    assert (on_gpu.perturb, on_gpu.unsure, on_gpu.rounds) == (False, True, True)
    assert (on_cpu.perturb, on_cpu.unsure, on_cpu.rounds) == (True, False, False)
    exact = closed(lambda q, k, v: jax.nn.softmax(jnp.dot(q, k.T, precision="highest"), -1), q, k, v)
    assert export_subset(exact, platform="cuda").perturb
    discrete = closed(lambda q, k, v: jnp.argmax(attention(q, k, v), -1), q, k, v)
    assert export_subset(discrete, platform="cuda").perturb


def test_another_order_of_rounded_attention_is_right_and_a_coarser_one_is_not():
    """What a GPU's kernel does: operands cut elsewhere than in XLA's program, by as much."""
    q, k, v = (RNG.standard_normal(s).astype(np.float32) for s in ((192, 64), (160, 64), (160, 64)))
    program = closed(attention, q, k, v)
    with jax.enable_x64(True):
        wide = [x.astype(np.float64) for x in (q, k, v)]
        (want,), (moved,) = (evaluate(program, wide, rounded=jnp.float64(flag)) for flag in (0.0, 1.0))

    def rounded(bits, late):
        cutting = lambda x: lax.reduce_precision(x, 8, bits)  # noqa: E731
        scores = 8 * cutting(q) @ cutting(k).T
        weights = jnp.exp(scores - scores.max(-1, keepdims=True))
        total = weights.sum(-1, keepdims=True)
        return np.asarray(cutting(weights) @ cutting(v) / total if late else cutting(weights / total) @ cutting(v))

    spec = Output((192, 64), "float32", 160, False)
    expected = OutputReference(
        NORMAL, rounded(10, False), np.asarray(want), None, None, np.abs(np.asarray(moved - want))
    )
    check_output(0, spec, [expected], [rounded(10, True)], 2.0)
    with pytest.raises(AccuracyRejected):
        check_output(0, spec, [expected], [rounded(7, True)], 2.0)


def made(folder, library, rounds=True, function=lambda a, b: a @ b, args=(A, B), seed=5):
    """The sets of a problem, a product's by default, whose XLA side is ``library``."""
    inputs = tuple(Input(x.shape, "float32") for x in args)
    program = closed(function, *args)
    (result,) = program.jaxpr.outvars
    problem = Problem("p", inputs, (Output(result.aval.shape, "float32", 53, False),), rounds=rounds)
    with jax.enable_x64(True):

        def wide(seed, amplitude, *args):
            return evaluate(program, args, rounded=amplitude[2])

        specs = [jax.ShapeDtypeStruct(s, t) for s, t in (((), np.uint64), ((3,), np.float64))]
        export = jax.export.export(jax.jit(wide, keep_unused=True))(
            *specs, *(jax.ShapeDtypeStruct(x.shape, np.float64) for x in args)
        )
        problem = problem.with_exports(b"", bytes(export.serialize()), False, False, rounds)
        kinds = reference.make(jax, problem, jax.jit(library), folder, seed)
    return problem, kinds


def cut(a, b, bits=10):
    return lax.reduce_precision(a, 8, bits) @ lax.reduce_precision(b, 8, bits)


def test_where_xla_does_not_round_candidates_may(tmp_path):
    problem, kinds = made(tmp_path, lambda a, b: a @ b)
    expected, exact, rounded, coarse = [], [], [], []
    for n, kind in enumerate(kinds):
        x, r, unsure = (np.load(tmp_path / f"{n}.{name}0.npy") for name in ("xla", "ref", "unsure"))
        a, b = (np.load(tmp_path / f"{n}.in{k}.npy") for k in range(2))
        expected.append((OutputReference(kind, x, r), OutputReference(kind, x, r, None, None, unsure)))
        exact.append(x)
        rounded.append(np.asarray(cut(a, b)))
        coarse.append(np.asarray(cut(a, b, 6)))
    spec = problem.outputs[0]
    check_output(0, spec, [e[0] for e in expected], exact, 2.0)
    with pytest.raises(AccuracyRejected):
        check_output(0, spec, [e[0] for e in expected], rounded, 2.0)
    found = check_output(0, spec, [e[1] for e in expected], rounded, 2.0)
    assert found.candidate < 1.01 * found.xla < found.limit
    with pytest.raises(AccuracyRejected):  # but no coarser
        check_output(0, spec, [e[1] for e in expected], coarse, 2.0)


def test_a_mask_of_infinities_hides_no_precision(tmp_path):
    """Scores of an attention: what is finite of them tells whether XLA rounded."""

    def scores(a, b):
        return jnp.where(jnp.arange(37)[:, None] >= jnp.arange(21), a @ b, -jnp.inf)

    made(tmp_path, scores, function=scores)
    assert list(tmp_path.glob("*.unsure*"))
    for exact in (np.array([1.0, -np.inf]), np.array([-np.inf, -np.inf])):
        assert reference.is_finer_than_tf32(exact.astype(np.float32), exact)
        assert not reference.is_finer_than_tf32(np.array([1 + 2**-12, 2.0], np.float32), np.array([1.0, np.inf]))


@pytest.mark.parametrize(("library", "rounds"), [(cut, True), (lambda a, b: a @ b, False)])
def test_otherwise_its_own_error_stands(tmp_path, library, rounds):
    made(tmp_path, library, rounds)
    assert not list(tmp_path.glob("*.unsure*"))


def convolution(padding, holes=1):
    def function(x, w):
        return lax.conv_general_dilated(x, w, (1, 1), padding, lhs_dilation=(holes, holes))

    return closed(function, np.zeros((1, 3, 8, 8), np.float32), np.zeros((4, 3, 3, 3), np.float32))


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (convolution(((1, 1), (1, 1))), True),
        (convolution(((0, 0), (0, 0))), False),
        (convolution(((0, 0), (0, 0)), 2), True),
    ],
)
def test_filters_that_meet_padding_are_finite(program, expected):
    x, w = program.jaxpr.invars
    assert input_recipes.input_recipe(program, x) == "normal"
    assert input_recipes.input_recipe(program, w) == ("normal finite" if expected else "normal")


def test_what_a_filter_that_meets_padding_is_made_of_is_finite():
    def function(x, w, scale):
        return lax.conv_general_dilated(x, w.reshape(3, 1, 3, 3) * scale, (1, 1), "SAME", feature_group_count=3) + scale

    program = closed(function, *(np.zeros(s, np.float32) for s in ((1, 3, 8, 8), (3, 3, 3), (3, 1, 1, 1))))
    found = [input_recipes.input_recipe(program, v) for v in program.jaxpr.invars]
    assert found == ["normal", "normal finite", "normal finite"]


def test_finite_values_are_special_all_the_same():
    inputs = tuple(Input((41, 41), "float32", recipe) for recipe in ("normal finite", "normal finite tf32", "normal"))
    problem = Problem("p", inputs, (Output((41, 41), "float32", 1, False),))
    one, two, three = make_inputs(problem, SPECIAL, 3)
    assert np.isfinite(one).all() and np.isfinite(two).all() and not np.isfinite(three).all()
    assert (one == 0).any() and (np.abs(one[one != 0]) < 1e-38).any()
    assert np.array_equal(two, round_tf32(two))
    assert not np.array_equal(make_inputs(problem, NORMAL, 3)[0], one)


def product(a, b):
    return a @ b


def windows(x, w):
    return lax.conv_general_dilated(x, w, (1, 1), "VALID")


@pytest.mark.parametrize(
    ("function", "shapes", "options"),
    [
        (product, [A.shape, B.shape], {"xla_gpu_autotune_level": 0}),
        (windows, [(1, 3, 8, 8), (4, 3, 3, 3)], {}),
    ],
)
def test_only_products_run_untimed_algorithms_in_float64(monkeypatch, function, shapes, options):
    exports = export_subset(closed(function, *(np.zeros(s, np.float32) for s in shapes)))
    problem = Problem(
        "p", tuple(Input(s, "float32") for s in shapes), (Output((1,), "float32", 1, False),), device="cuda X 9.0 x1"
    ).with_exports(exports.library, exports.reference, False)
    asked = []
    monkeypatch.setattr(reference.autotune_cache, "without_autotuning", lambda: {"xla_gpu_autotune_level": 0})

    class Jax:
        export, ShapeDtypeStruct, tree, numpy = jax.export, jax.ShapeDtypeStruct, jax.tree, jax.numpy

        @staticmethod
        def jit(function, compiler_options=None):
            asked.append(compiler_options)
            return jax.jit(function)

    with jax.enable_x64(True), ThreadPoolExecutor(1) as pool:
        wide = reference._wide(Jax, problem, [None], pool)
        (found,) = wide(np.uint64(0), np.zeros(3), *(jnp.ones(s, jnp.float32) for s in shapes))
    assert asked[0] == options
    assert found.dtype == np.float64 and (np.asarray(found) == (53 if function is product else 27)).all()


def first_layer(x, w, scale, shift):
    """7x7 with stride 2, a batch norm, ReLU."""
    y = lax.conv_general_dilated(x, w, (2, 2), ((3, 3), (3, 3)), dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return jax.nn.relu(y * scale + shift)


LAYER = tuple(np.zeros(s, np.float32) for s in ((1, 32, 32, 3), (7, 7, 3, 8), (8,), (8,)))


def layer_of(rounding, x, w, scale, shift):
    """The first layer by sums in float64 of operands as a kernel takes them; denormals count."""
    x, w = (np.asarray(rounding(v), np.float64) for v in (x, w))
    seen = np.lib.stride_tricks.sliding_window_view(np.pad(x, ((0, 0), (3, 3), (3, 3), (0, 0))), (7, 7), (1, 2))
    with np.errstate(all="ignore"):
        terms = seen[:, ::2, ::2].transpose(0, 1, 2, 4, 5, 3)[..., None] * w
        y = terms.sum((3, 4, 5)) * scale.astype(np.float64) + shift
        return np.where(np.isnan(y), y, np.maximum(y, 0)).astype(np.float32)


def to_tf32(values):
    with np.errstate(all="ignore"):
        return np.where(np.abs(values) < 2.0**-137, np.copysign(0, values), round_tf32(values)).astype(np.float32)


def rounded_layer(x, w, scale, shift):
    return first_layer(*(lax.reduce_precision(v, 8, 10) for v in (x, w)), scale, shift)


@pytest.mark.parametrize("library", [first_layer, rounded_layer])
def test_a_kernel_that_rounds_operands_may_lose_a_class_to_that_and_only_there(tmp_path, library):
    apart = 0
    for seed in range(12):
        folder = tmp_path / str(seed)
        folder.mkdir()
        problem, kinds = made(folder, library, True, first_layer, LAYER, seed)
        assert (folder / "0.unsure0.npy").exists() is (library is first_layer)
        assert [n for n in range(len(kinds)) if (folder / f"{n}.rounded0.npy").exists()] in ([], [3])
        expected, blind, got = [], [], []
        for n, kind in enumerate(kinds):
            operands = [np.load(folder / f"{n}.in{k}.npy") for k in range(4)]
            r = np.load(folder / f"{n}.ref0.npy")
            as_given = library is first_layer or kind == SPECIAL
            x = layer_of((lambda v: v) if as_given else to_tf32, *operands)
            files = {k: folder / f"{n}.{k}0.npy" for k in ("unsure", "rounded")}
            unsure, rounded = (np.load(f) if f.exists() else None for f in files.values())
            expected.append(OutputReference(kind, x, r, None, None, unsure, rounded))
            blind.append(OutputReference(kind, x, r, None, None, unsure))
            got.append(layer_of(to_tf32, *operands))
        spec, at = problem.outputs[0], kinds.index(SPECIAL)
        check_output(0, spec, expected, got, 2.0)
        x, c = expected[at].xla, got[at]
        differ = np.isnan(x) != np.isnan(c)
        if not differ.any():
            continue
        apart += int(differ.sum())
        with pytest.raises(AccuracyRejected):
            check_output(0, spec, blind, got, 2.0)
        other = np.flatnonzero(~differ & np.isfinite(x) & np.isfinite(c))[::101]
        for wrong in other:
            bad = c.copy()
            bad.reshape(-1)[wrong] = np.nan
            with pytest.raises(AccuracyRejected) as caught:
                check_output(0, spec, expected, [bad if n == at else g for n, g in enumerate(got)], 2.0)
            assert caught.value.values["rule"] == "class"
    assert apart >= 3
