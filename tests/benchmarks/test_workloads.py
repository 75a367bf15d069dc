"""Workloads of the benchmarks: each runs tiny with finite results, both calling forms agree, carried arguments fit."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.networks.workloads import CPU_WORKLOADS, SMALL_TRAINING, WORKLOADS

RUN = [n for n, s in WORKLOADS.items() if s.group != "cnn"]
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("ResNet50_training", "MobileNetV2_96px_training")]
"""Building and compiling networks of keras takes minutes; two of them are run."""
STEPS = [n for n, s in SMALL_TRAINING.items() if n != "MobileNetV2_96px_training"]


def leaves(tree):
    return [np.asarray(x, np.float32) for x in jax.tree.leaves(tree)]


@pytest.mark.parametrize("name", ["MobileNetV2", *RUN, *STEPS, *SLOW])
def test_runs_in_all_its_forms(name):
    spec = CPU_WORKLOADS[name]
    program = spec.build(2, tiny=True)
    results = []
    for kind in spec.forms:
        form = program.form(closed=kind == "closed")
        arguments = jax.tree.map(jnp.copy, form.arguments)
        result = jax.jit(form.function, donate_argnums=form.donated)(*arguments)
        assert all(np.isfinite(x).all() for x in leaves(result))
        following = form.following(arguments, result)
        assert jax.tree.map(jnp.shape, following) == jax.tree.map(jnp.shape, form.arguments)
        assert [x.dtype for x in jax.tree.leaves(following)] == [x.dtype for x in jax.tree.leaves(form.arguments)]
        results.append(leaves(result))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["Llama_decode", "GPT_training", "UNet_block", "DLRM"])
def test_bfloat16_is_what_is_computed(name):
    program = WORKLOADS[name].build(2, dtype="bfloat16", tiny=True)
    form = program.form(closed=False)
    traced = jax.make_jaxpr(form.function)(*form.arguments)
    kinds = {e.outvars[0].aval.dtype.name for e in traced.jaxpr.eqns if e.primitive.name == "dot_general"}
    assert "bfloat16" in kinds


def test_the_registry_has_the_workloads_of_the_literature():
    assert all(name == spec.name for name, spec in CPU_WORKLOADS.items())
    inference = sum(len(s.batches) for s in list(WORKLOADS.values()) if f"{s.name}_training" in WORKLOADS)
    steps = [s for s in WORKLOADS.values() if s.name.removesuffix("_training") in WORKLOADS and s.kind == "training"]
    assert inference + len(steps) == 32


def test_a_decoding_step_writes_its_cache_at_the_position():
    program = WORKLOADS["Llama_decode"].build(2, tiny=True)
    caches, _, position = program.arguments
    written, _, after, _ = program.function(program.weights, *program.arguments)
    changed = np.any(np.asarray(written[0][0] != caches[0][0]), (0, 2, 3))
    assert changed.nonzero()[0].tolist() == [int(position)]
    assert int(after) == int(position) + 1
