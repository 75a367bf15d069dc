"""Multi-tensor reduction: which sums are collected, what stays, and that totals are what they were."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.networks import modes
from benchmarks.networks.workloads import optimizers
from jcuts.base.settings import Settings
from jcuts.kernel_ir.interpret import interpret
from jcuts.lower import horizontal
from jcuts.lower.reduction import multi_tensor_sums
from jcuts.pipeline import computation, passes, weight_prep
from jcuts.rewrite.backward import multi_tensor_norm, multi_tensor_update
from jcuts.rewrite.backward.registry import backward_rewrites
from jcuts.trace import jaxapi
from tests.rewrite import test_multi_tensor_update as updates
from tests.rewrite.test_multi_tensor_update import calls_of, flat

RNG = np.random.default_rng(41)
SHAPES = [(7, 12), (12,), (1, 33), (5, 3, 11), (2,), (130,), (8, 5), (257,), (4, 1)]


def arrays(shapes=SHAPES, dtype=jnp.float32):
    return [jnp.asarray(RNG.standard_normal(s), dtype) for s in shapes]


def global_norm(xs):
    return jnp.sqrt(sum(jnp.sum(jnp.square(x.astype(jnp.float32))) for x in xs))


def rewritten(fn, *args):
    """The program before and after, the calls, and the number of sums in them; its results are checked."""
    closed = flat(fn, args)
    made, count = multi_tensor_norm.multi_tensor_norms(closed)
    jaxapi.check(made)
    operands = jax.tree.leaves(args)
    wanted, got = (jaxapi.eval_closed(program, *operands) for program in (closed, made))
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    return closed, made, calls_of(made), count


def reductions(closed):
    return [eqn for eqn in closed.jaxpr.eqns if jaxapi.primitive_name(eqn) == "reduce_sum"]


FUNCTIONS = {
    "square": lambda x: jnp.sum(jnp.square(x)),
    "power": lambda x: jnp.sum(x**2),
    "product": lambda x: jnp.sum(x * x),
    "itself": jnp.sum,
    "absolute": lambda x: jnp.sum(jnp.abs(x)),
    "polynomial": lambda x: jnp.sum(3 * x * x - x),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_all_leaves_are_one_call(name):
    args = arrays()
    _, made, (call,), count = rewritten(lambda xs: sum(map(FUNCTIONS[name], xs)), args)
    assert count == len(call.invars) == len(SHAPES) and call.outvars[0].aval.shape == (len(SHAPES),)
    assert len(made.jaxpr.eqns) == 2 and len(reductions(made)) == 1
    program = weight_prep._program(call)
    assert program is not None and len(program.phases) == len(SHAPES)
    updates.compare(call, lambda operands: interpret(program, operands))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_arrays_are_read_as_they_are(dtype):
    args = arrays(dtype=dtype)
    _, _, (call,), count = rewritten(lambda xs: (global_norm(xs), [x.astype(jnp.float32) + 1 for x in xs]), args)
    assert count == len(SHAPES) and {v.aval.dtype for v in call.invars} == {jnp.dtype(dtype)}
    program = weight_prep._program(call)
    assert program is not None
    updates.compare(call, lambda operands: interpret(program, operands))


def test_several_partial_sums_of_a_leaf(monkeypatch):
    """Blocks of 64: whole ones, and one whose end is beyond the leaf."""
    monkeypatch.setattr(multi_tensor_norm, "CHUNK", 64)
    args = arrays()
    _, _, (call,), _ = rewritten(global_norm, args)
    blocks = [-(-x.size // 64) for x in args]
    assert call.outvars[0].aval.shape == (sum(blocks),)
    assert [leaf.blocks for leaf in multi_tensor_norm.leaf_sums(call)] == blocks
    program = weight_prep._program(call)
    assert [one.blocks for one in multi_tensor_sums.partial_sums_of(program)] == blocks
    updates.compare(call, lambda operands: interpret(program, operands))


def test_padding_is_not_part_of_a_sum(monkeypatch):
    """Of a function that is 1 at 0, with a number that is an argument."""
    monkeypatch.setattr(multi_tensor_norm, "CHUNK", 64)
    _, _, (call,), _ = rewritten(lambda xs, s: sum(jnp.sum(jnp.exp(s * x)) for x in xs), arrays(), jnp.float32(0.3))
    program = weight_prep._program(call)
    updates.compare(call, lambda operands: interpret(program, operands))


@pytest.mark.parametrize("clip", ["mine", "benchmark"])
def test_a_step_with_clipping(clip):
    """The updates stay one call behind that of the norm."""
    args = updates.arguments(updates.adamw)
    step = updates.adamw
    if clip == "benchmark":
        initial, update = optimizers.adamw()
        args = args[0], initial(args[0]), args[2]

        def step(params, state, x):
            return update(params, state, jax.grad(updates.loss)(params, x))

    _, made, (call,), count = rewritten(step, *args)
    assert count == len(updates.SHAPES) and multi_tensor_norm.is_norm(call)
    both, _ = multi_tensor_update.multi_tensor_updates(made)
    first, second = calls_of(both)
    assert multi_tensor_norm.is_norm(first) and not multi_tensor_update.is_update(first)
    assert multi_tensor_update.is_update(second) and not multi_tensor_norm.is_norm(second)
    assert len(multi_tensor_update.in_place(second, both.jaxpr.invars)) == 3 * len(updates.SHAPES)


def test_a_whole_step_has_both_kernels():
    """Where no other kernel is faster than XLA, too."""
    initial, update = optimizers.adamw()
    args = arrays(), initial(arrays()), arrays()
    closed = jaxapi.closed_jaxpr_of(update, *args)
    with modes.pretended({}, lambda problem, _: [2.0] * len(problem.candidates) + [1.0]):
        outcome = passes.optimize_jaxpr(closed, Settings(), platform="cuda", may_measure=True)
    jaxapi.check(outcome.closed)
    chosen = [subset.chosen.split("/")[0] for subset in outcome.report.subsets if subset.chosen]
    assert chosen == [multi_tensor_sums.TEMPLATE, horizontal.TEMPLATE]


def test_other_terms_stay_in_the_chain():
    """Numbers, a sum that something else reads, a single value, an array that is summed twice."""

    def total(xs, y, z, one):
        kept = jnp.sum(y * y)
        terms = [jnp.sum(x * x) for x in xs]
        return 1.5 + sum(terms[:4]) + kept + sum(terms[4:]) + jnp.sum(xs[0]) + jnp.max(z) + jnp.sum(one), kept

    _, made, (call,), count = rewritten(total, arrays(), *arrays([(6, 5), (3,), (1, 1)]))
    assert count == len(SHAPES) + 1 and len(call.invars) == len(SHAPES)
    assert len(reductions(made)) == 2


def test_what_is_no_leaf_stays():
    few, many = arrays(SHAPES[: multi_tensor_norm.LEAST_LEAVES - 1]), arrays()

    def rows(xs):
        return sum(jnp.sum(jnp.reshape(x, (1, -1)) ** 2, axis=1) for x in xs)

    def differences(xs, ys):
        return sum(jnp.sum((x - y) ** 2) for x, y in zip(xs, ys, strict=True))

    def largest(xs):
        return sum(jnp.max(x) for x in xs)

    def wide(xs):
        return sum(jnp.prod(x) for x in xs)

    for fn, args in ((global_norm, (few,)), (differences, (many, arrays())), (largest, (many,)), (wide, (many,))):
        closed, made, calls, count = rewritten(fn, *args)
        assert made is closed and count == 0 and not calls
    assert rewritten(rows, many)[3] == 0
    integers = [jnp.arange(n) for n in range(3, 15)]
    assert rewritten(lambda xs: sum(map(jnp.sum, xs)), integers)[3] == 0


def test_differences_that_are_in_memory():
    """What two element-wise operations read is written in any case."""

    def fn(xs, ys):
        gradients = [jnp.cumsum(x - y, 0) for x, y in zip(xs, ys, strict=True)]
        return global_norm(gradients), [2 * g for g in gradients]

    _, _, (call,), count = rewritten(fn, arrays(), arrays())
    assert count == len(call.invars) == len(SHAPES)


def test_what_others_read_is_computed_again_where_it_is_cheap():
    """Squares, casts to wider types; not what is scaled, nor what is narrower than its operand."""

    def squares(xs):
        made = [jnp.square(jnp.cumsum(x, 0)) for x in xs]
        return sum(map(jnp.sum, made)), [m + 1 for m in made]

    def scaled(xs):
        made = [3 * jnp.cumsum(x, 0) for x in xs]
        return sum(jnp.sum(m * m) for m in made), [m + 1 for m in made]

    def narrow(xs):
        made = [jnp.cumsum(x, 0).astype(jnp.bfloat16) for x in xs]
        return global_norm(made), [m + 1 for m in made]

    for fn, maker in ((squares, "cumsum"), (scaled, "mul"), (narrow, "convert_element_type")):
        _, program, (call,), count = rewritten(fn, arrays())
        makers = {v: jaxapi.primitive_name(eqn) for eqn in program.jaxpr.eqns for v in eqn.outvars}
        assert count == len(SHAPES) and {makers[v] for v in call.invars} == {maker}


def test_two_norms_are_two_chains():
    def fn(xs, ys):
        return global_norm(xs), global_norm(ys) + 1

    assert [len(call.invars) for call in rewritten(fn, arrays(), arrays())[2]] == [len(SHAPES)] * 2


def test_many_leaves_are_several_calls():
    _, made, calls, count = rewritten(global_norm, arrays([(3, 4)] * 500))
    assert count == 500 and [len(call.invars) for call in calls] == [239, 239, 22]
    assert all(len(call.invars) + 1 <= multi_tensor_norm.MOST for call in calls)
    assert len(reductions(made)) == 3
    assert all(weight_prep._program(call) is not None for call in calls)


def test_calls_of_other_bodies_have_no_program():
    """A call of the same name that a user has written, whose sums are over something else."""

    def partial_sums(x, y):
        return jax.lax.optimization_barrier(jnp.concatenate([x.sum(0), y.sum(0)]))

    closed = jaxapi.closed_jaxpr_of(jax.jit(partial_sums), *arrays([(4, 5), (3, 7)]))
    (call,) = calls_of(closed)
    assert call.params["name"] == multi_tensor_norm.NAME and not multi_tensor_norm.is_norm(call)


def test_it_is_for_variants_with_kernels_on_gpus():
    def names(platform, **more):
        return [rewrite.name for rewrite in backward_rewrites(platform, divides=False, **more)]

    assert names("cuda").index("norms") < names("cuda").index("updates")
    assert "norms" not in names("cpu") and "norms" not in names("cuda", has_kernels=False)


@pytest.mark.parametrize("settings", [Settings(), Settings(donates=True)])
def test_norms_have_a_kernel_where_nothing_else_has(settings):
    """Not in the place of a donated argument, though one has the shape of the result: other blocks read it."""
    made, _ = multi_tensor_norm.multi_tensor_norms(flat(global_norm, (arrays([*SHAPES, (len(SHAPES) + 1,)]),)))
    (call,) = calls_of(made)
    assert any(v.aval.shape == call.outvars[0].aval.shape for v in call.invars)
    level = computation.group(made, settings, computation.Fuel(), "cuda")
    level.leave_to_xla(lambda _: "it is slower")
    assert weight_prep.add_weight_prep_kernels(level, donates=settings.donates) == 1
    (subset,) = (s for s in level.subsets if s.chosen is not None)
    assert subset.chosen.template == multi_tensor_sums.TEMPLATE and not subset.aliases
