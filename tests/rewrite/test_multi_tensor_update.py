"""Multi-tensor apply: which updates are collected, in place of what, and that no value changes."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jcuts.base.settings import Settings
from jcuts.codegen.cuda import compile as compiler
from jcuts.codegen.cuda.toolchain.target import CudaTarget
from jcuts.kernel_ir.interpret import interpret
from jcuts.lower import horizontal
from jcuts.pipeline import computation, weight_prep
from jcuts.rewrite.backward import multi_tensor_update
from jcuts.rewrite.backward.registry import backward_rewrites
from jcuts.rewrite.simplify import simplify
from jcuts.trace import jaxapi
from jcuts.trace.inline import inline
from tests.ptx import machine as ptx_machine

RNG = np.random.default_rng(37)
SHAPES = [(7, 12), (12,), (12, 33), (33,), (33, 8), (8,), (8, 5), (5,)]


def values(*shape):
    return jnp.asarray(RNG.standard_normal(shape), jnp.float32)


def loss(params, x):
    for w, b in zip(params[::2], params[1::2], strict=True):
        x = jnp.tanh(x @ w + b)
    return jnp.mean(jnp.square(x))


def sgd(params, momenta, x):
    gradients = jax.grad(loss)(params, x)
    momenta = [0.9 * m + g for m, g in zip(momenta, gradients, strict=True)]
    return [p - 0.01 * m for p, m in zip(params, momenta, strict=True)], momenta


def adamw(params, state, x):
    """With clipping by the global norm, bias correction by a step count, and decoupled decay."""
    first, second, count = state
    value, gradients = jax.value_and_grad(loss)(params, x)
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in gradients))
    factor = jnp.minimum(1.0, 1.0 / (norm + 1e-6))
    gradients, count = [g * factor for g in gradients], count + 1
    first = [0.9 * m + 0.1 * g for m, g in zip(first, gradients, strict=True)]
    second = [0.99 * v + 0.01 * g * g for v, g in zip(second, gradients, strict=True)]
    a, b = 1 - 0.9**count, 1 - 0.99**count

    def changed(p, m, v):
        return p - 3e-4 * ((m / a) / (jnp.sqrt(v / b) + 1e-8) + 0.1 * p)

    params = [changed(p, m, v) for p, m, v in zip(params, first, second, strict=True)]
    return params, (first, second, count), value


def lion(params, momenta, x):
    gradients = jax.grad(loss)(params, x)
    signs = [jnp.sign(0.9 * m + 0.1 * g) for m, g in zip(momenta, gradients, strict=True)]
    momenta = [0.99 * m + 0.01 * g for m, g in zip(momenta, gradients, strict=True)]
    return [p - 1e-3 * (s + 0.1 * p) for p, s in zip(params, signs, strict=True)], momenta


def arguments(step):
    params = [values(*s) for s in SHAPES]
    zeros = [abs(values(*s)) for s in SHAPES]
    state = (zeros, [abs(values(*s)) for s in SHAPES], jnp.int32(3)) if step is adamw else zeros
    return params, state, values(9, 7)


def flat(step, args):
    return simplify(inline(jaxapi.closed_jaxpr_of(step, *args)))


def calls_of(closed):
    return [eqn for eqn in closed.jaxpr.eqns if jaxapi.primitive_name(eqn) in ("jit", "pjit")]


@pytest.mark.parametrize("step, results", [(sgd, 16), (adamw, 24), (lion, 16)])
def test_all_leaves_are_one_call_in_place(step, results):
    args = arguments(step)
    closed = flat(step, args)
    made, count = multi_tensor_update.multi_tensor_updates(closed)
    (call,) = calls_of(made)
    assert count == len(call.outvars) == results
    for got, want in zip(
        jaxapi.eval_closed(made, *jax.tree.leaves(args)),
        jaxapi.eval_closed(closed, *jax.tree.leaves(args)),
        strict=True,
    ):
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)  # a call is compiled: its products are fused
    pairs = multi_tensor_update.in_place(call, made.jaxpr.invars)
    order = {v: k for k, v in enumerate(made.jaxpr.invars)}, {v: k for k, v in enumerate(made.jaxpr.outvars)}
    assert len(pairs) == results  # every result has the memory of the argument at its own place
    assert all(order[0][call.invars[a]] == order[1][call.outvars[b]] for a, b in pairs.items())


def test_gradients_that_are_arguments_are_not_overwritten():
    """A momentum and a gradient of the same shape: the new momentum has the memory of the old one."""

    def update(params, momenta, gradients):
        momenta = [0.9 * v + g for v, g in zip(momenta, gradients, strict=True)]
        return [p - 0.1 * v for p, v in zip(params, momenta, strict=True)], momenta

    leaves = [jnp.ones(shape) for shape in (*SHAPES, *SHAPES)]
    made, _ = multi_tensor_update.multi_tensor_updates(flat(update, (leaves, leaves, leaves)))
    (call,) = calls_of(made)
    pairs = multi_tensor_update.in_place(call, made.jaxpr.invars, made.jaxpr.outvars)
    order = {v: k for k, v in enumerate(made.jaxpr.invars)}, {v: k for k, v in enumerate(made.jaxpr.outvars)}
    assert len(pairs) == 2 * len(leaves)
    assert all(order[0][call.invars[k]] == order[1][call.outvars[n]] for k, n in pairs.items())


@pytest.mark.parametrize("step", [sgd, adamw, lion])
def test_the_program_of_all_leaves(step):
    """Shapes of several axes are collapsed; one phase per leaf."""
    args = arguments(step)
    made, _ = multi_tensor_update.multi_tensor_updates(flat(step, args))
    call, program = calls_of(made)[0], weight_prep._program(calls_of(made)[0])
    assert program is not None and len(program.phases) == len(SHAPES)
    assert sorted(phase.axes[0].extent for phase in program.phases) == sorted(np.prod(s) for s in SHAPES)
    compare(call, lambda operands: interpret(program, operands))


@pytest.mark.cuda_compilers
@pytest.mark.parametrize("step", [sgd, adamw])
def test_the_kernel_of_all_leaves(step):
    """With four points of a thread where they divide a leaf, in place where the function's arguments are."""
    made, _ = multi_tensor_update.multi_tensor_updates(flat(step, arguments(step)))
    call, program = calls_of(made)[0], weight_prep._program(calls_of(made)[0])
    assert program is not None
    kernel = compiler.compile_program(program, CudaTarget((9, 0)))
    ptx = compiler.ptx_of(program, CudaTarget((9, 0)))
    compare(call, lambda operands: ptx_machine.run_kernel(ptx, kernel, operands))
    for block in re.split(r"^\$", ptx, flags=re.MULTILINE):  # a load behind a store would wait for memory once more
        accesses = re.findall(r"(ld|st)\.global", block)
        assert accesses == sorted(accesses)


def compare(call, run):
    operands = [np.asarray(0.5 + RNG.random(v.aval.shape), v.aval.dtype) for v in call.invars]
    (inside,) = (body for _, _, body in jaxapi.inner_jaxprs(call))
    for got, want in zip(run(operands), jaxapi.eval_closed(inside, *operands), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-6, atol=2e-6)


def test_what_reads_one_array_is_one_phase():
    """Three results in one launch, the third of which reads what the first and the second overwrite."""
    shapes = [(n, 4) for n in range(2, 10)]
    args = tuple([values(*s) for s in shapes] for _ in range(4))

    def step(a, b, c, g):
        def sums(*xs):
            return [sum(x) for x in zip(*xs, strict=True)]

        gradients = [jnp.cumsum(x, axis=0) for x in g]
        return sums(a, gradients), [2 * x for x in b], sums(a, b, c)

    made, count = multi_tensor_update.multi_tensor_updates(flat(step, args))
    (call,) = calls_of(made)
    program = weight_prep._program(call)
    assert program is not None and len(program.phases) == len(shapes) and count == 3 * len(shapes)
    assert len(multi_tensor_update.in_place(call, made.jaxpr.invars)) == count
    compare(call, lambda operands: interpret(program, operands))


def test_what_something_else_reads_stays():
    """A new parameter that the loss of the next batch reads is no leaf, nor what it is made of; nor are too few."""

    def two_batches(params, momenta, x):
        params, momenta = sgd(params, momenta, x)
        return params, momenta, loss(params, 2 * x)

    def few(params, momenta, x):
        (w, b, *rest), momenta = sgd(params, momenta, x)
        return w, b, momenta[0], sum(map(jnp.sum, rest))

    args = arguments(sgd)
    made, count = multi_tensor_update.multi_tensor_updates(flat(two_batches, args))
    assert count == 0 and not calls_of(made)
    assert multi_tensor_update.multi_tensor_updates(flat(few, args))[1] == 0


def test_operands_of_other_shapes_are_no_updates():
    """A bias that is broadcast, a scan's stack, a function without state."""

    def forward(xs, bias):
        return [jnp.tanh(x + bias) * x for x in xs]

    closed = flat(forward, ([values(6, 4) for _ in range(9)], values(4)))
    assert multi_tensor_update.multi_tensor_updates(closed)[1] == 0


def test_many_leaves_are_several_calls():
    shapes = [(3, 4)] * 60
    args = [values(*s) for s in shapes], [values(*s) for s in shapes], [values(*s) for s in shapes]

    def step(params, momenta, gradients):
        momenta = [0.9 * m + g for m, g in zip(momenta, gradients, strict=True)]
        return [p - 0.1 * m for p, m in zip(params, momenta, strict=True)], momenta

    calls = calls_of(multi_tensor_update.multi_tensor_updates(flat(step, args))[0])
    assert [len(call.outvars) for call in calls] == [96, 24]
    assert all(len(call.invars) + len(call.outvars) <= multi_tensor_update.MOST for call in calls)


def test_it_is_for_variants_with_kernels_on_gpus():
    def names(platform, **more):
        return [rewrite.name for rewrite in backward_rewrites(platform, divides=False, **more)]

    assert "updates" in names("cuda") and "updates" not in names("cpu")
    assert "updates" not in names("cuda", has_kernels=False)


@pytest.mark.parametrize("donates", [True, False])
def test_donated_arguments_are_overwritten(donates):
    args = arguments(sgd)
    made, _ = multi_tensor_update.multi_tensor_updates(flat(sgd, args))
    level = computation.group(made, Settings(), computation.Fuel(), "cuda")
    level.subsets[0].chosen = level.subsets[0].program  # somebody needs kernels
    (call,) = calls_of(made)
    assert weight_prep.add_weight_prep_kernels(level, donates=donates) == 1
    (subset,) = (s for s in level.subsets if s.chosen is not None and s.chosen.template == horizontal.TEMPLATE)
    assert subset.aliases == (multi_tensor_update.in_place(call, made.jaxpr.invars) if donates else {})


def test_updates_have_a_kernel_where_nothing_else_has():
    args = arguments(sgd)
    made, _ = multi_tensor_update.multi_tensor_updates(flat(sgd, args))
    level = computation.group(made, Settings(), computation.Fuel(), "cuda")
    level.leave_to_xla(lambda _: "it is slower")
    assert weight_prep.add_weight_prep_kernels(level, donates=True) == 1
    assert [s.chosen.template for s in level.subsets if s.chosen is not None] == [horizontal.TEMPLATE]
