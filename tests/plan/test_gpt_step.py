"""The reference training step: gradients of every layout equal the unpipelined ones; collectives are those priced."""

import re

import jax
import numpy as np
import pytest

from benchmarks.planner import gpt_step as gpt
from jcuts.plan.spec.model import Transformer


def _small(**layout):
    return gpt.Config(layers=4, hidden=32, heads=4, sequence=16, vocabulary=64, **layout)


LAYOUTS = [
    ("gpipe", {"data": 2, "pipeline": 2, "count": 3}),
    ("1f1b", {"pipeline": 4, "count": 5}),
    ("1f1b", {"data": 2, "pipeline": 2, "count": 3}),
    ("1f1b", {"tensor": 2, "pipeline": 2, "count": 2}),
    ("1f1b", {"data": 2, "tensor": 2, "count": 2, "remat": False}),
]


@pytest.mark.parametrize(("schedule", "layout"), LAYOUTS)
def test_gradients_equal_the_unpipelined_step(schedule, layout):
    config = _small(schedule=schedule, **layout)
    params = jax.jit(lambda: gpt.init(config))()
    tokens = jax.random.randint(jax.random.key(1), (config.batch, config.sequence + 1), 0, config.vocabulary)
    reference = jax.jit(jax.value_and_grad(lambda p, t: gpt.reference_loss(p, t, config)))
    want_loss, want = reference(params, tokens)
    loss, got = jax.jit(gpt.loss_and_gradients(config, gpt.make_mesh(config)))(params, tokens)
    np.testing.assert_allclose(loss, want_loss, rtol=1e-5)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(want), jax.tree.leaves(got), strict=True):
        scale = float(np.abs(a).max())
        np.testing.assert_allclose(b, a, atol=2e-5 * scale, rtol=1e-4, err_msg=jax.tree_util.keystr(path))


@pytest.mark.parametrize(
    ("layout", "priced"),
    [
        (
            {"pipeline": 4, "count": 4},
            {"collective-permute", "all-reduce"},
        ),  # all-reduce: the tied embedding and the loss
        ({"data": 4, "count": 1}, {"all-reduce"}),
        ({"tensor": 4, "count": 1}, {"all-reduce"}),
    ],
    ids=["pipeline", "data", "tensor"],
)
def test_compiled_collectives_are_those_priced(layout, priced):
    config = _small(**layout)
    params = jax.eval_shape(lambda: gpt.init(config))
    tokens = jax.ShapeDtypeStruct((config.batch, config.sequence + 1), "int32")
    text = gpt.train_step(config, gpt.make_mesh(config)).lower(params, (params, params), tokens).compile().as_text()
    found = set(
        re.findall(r"\b(all-reduce|all-gather|reduce-scatter|collective-permute|all-to-all)(?:-start)?\(", text)
    )
    assert found == priced


def test_a_layers_kept_bytes_are_those_of_its_derivative():
    """``Block.autodiff_*`` against what the traced loop over layers stacks up for its backward pass."""
    sizes = {"layers": 3, "hidden": 64, "heads": 4, "sequence": 32, "vocabulary": 128}
    config = gpt.Config(**sizes, dtype="bfloat16", remat=False)
    layers = jax.eval_shape(lambda: gpt.init(config))["layers"]
    x = jax.ShapeDtypeStruct((2, 32, 64), "bfloat16")
    loss = lambda x, w: gpt.stage(x, w, config, None).astype("float32").sum()  # noqa: E731
    traced = jax.make_jaxpr(jax.grad(loss, (0, 1)))(x, layers)
    loops = [equation for equation in traced.eqns if equation.primitive.name == "scan"]
    kept = [
        v.aval.size * v.aval.dtype.itemsize
        for loop in loops
        for v in loop.outvars
        if not loop.params["reverse"] and v.aval.shape[:2] == (3, 2)
    ]
    block = Transformer("t", **sizes, dropout=False).build().blocks[0]
    # From JAX 0.11 on the derivative of tanh keeps 1 - y * y in place of y and 1 - y: of a GELU one value less.
    fewer = 2 * 32 * 4 * 64 if jax.__version_info__ >= (0, 11) else 0
    assert sum(kept) == 3 * 2 * (sum(block.kept(True)) - fewer)
    assert sum(block.kept(False)) == block.saved_tensor + block.saved_replicated + block.saved_inner
    fused = Transformer("t", **sizes, dropout=False, flash=True).build().blocks[0]
    assert sum(block.kept(True)) - sum(fused.kept(True)) == 4 * 32 * (6 * 32 + 4)
