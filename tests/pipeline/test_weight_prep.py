"""The call that turns a program's weights gets a kernel where it can have one."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.networks import modes
from jcuts.base.settings import Settings, Variant
from jcuts.kernel_ir.interpret import interpret
from jcuts.pipeline import computation, passes, weight_prep
from jcuts.rewrite import tf32_weight_args
from jcuts.rewrite.registry import rewritten
from jcuts.rewrite.simplify import simplify
from jcuts.trace import jaxapi
from jcuts.trace.inline import inline

RNG = np.random.default_rng(31)


def values(*shape):
    return jnp.asarray(RNG.standard_normal(shape), jnp.float32)


def network(w, v, u, x):
    y = lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return jax.nn.relu(y) @ v.reshape(64, 128) @ u


def level_of(*args):
    closed = simplify(inline(jaxapi.closed_jaxpr_of(network, *args)))
    return computation.group(rewritten(closed, ("turns",)).closed, Settings(), computation.Fuel(), "cuda")


ARGS = values(3, 3, 32, 64), values(1, 64, 128), values(128, 128), values(16, 32, 32, 32)


def test_the_call_becomes_one_kernel():
    level = level_of(*ARGS)
    before = list(level.subsets)
    assert weight_prep.add_weight_prep_kernels(level) == 0  # no kernel is chosen that would use it
    before[0].chosen = before[0].program
    assert weight_prep.add_weight_prep_kernels(level) == 1 and len(level.subsets) == len(before) + 1
    (subset,) = (s for s in level.subsets if s not in before)
    call = level.closed.jaxpr.eqns[0]
    assert subset.inputs == list(call.invars) and subset.outputs == list(call.outvars)
    assert not any(m in level.left_out for m in subset.members)
    operands = [np.asarray(a) for a in ARGS[:3]]
    wanted = jaxapi.eval_closed(subset.closed, *ARGS[:3])
    for got, want in zip(interpret(subset.chosen, operands), wanted, strict=True):
        np.testing.assert_array_equal(got, want)


def test_calls_that_do_anything_else_are_left_to_xla():
    w = jax.ShapeDtypeStruct((64, 32), jnp.float32)

    def shapes(function, *args):
        (eqn,) = jaxapi.closed_jaxpr_of(jax.jit(function), *args).jaxpr.eqns
        return tf32_weight_args.turned_shapes(eqn)

    def rounded(x):
        return lax.reduce_precision(x, 8, 10)

    assert shapes(lambda w: rounded(w.T), w) == [((64, 32), (32, 64))]
    assert shapes(lambda w: rounded(w), w) is None
    assert shapes(lambda w: lax.reduce_precision(w.T, 8, 12), w) is None
    assert shapes(lambda w: rounded(w.T) * 2, w) is None
    assert shapes(lambda w: rounded((2 * w).T), w) is None
    assert shapes(lambda w, v: (rounded(v.T), rounded(w.T)), w, w) is None
    assert shapes(lambda w: (rounded(w.T), rounded(w.T)), w) is None


def test_kernels_besides_tuned_ones_are_known_before_tuning():
    closed = jaxapi.closed_jaxpr_of(network, *ARGS)
    settings = Settings(form=Variant(("turns",)))
    with modes.pretended({}, lambda problem, _: [1.0] * len(problem.candidates) + [2.0]):
        planning = passes.start_planning(closed, settings, platform="cuda", may_measure=True)
        certain = [program.digest for program in planning.problems.certain]
        outcome = planning.finish()
        later = passes.start_planning(closed, settings, platform="cuda", may_measure=False)
    estimated = [s for s in outcome.report.subsets if s.origin == "estimated"]
    assert len(certain) == len(estimated) == 1
    assert str(estimated[0].chosen).endswith(certain[0][:8])
    assert later.problems is None
