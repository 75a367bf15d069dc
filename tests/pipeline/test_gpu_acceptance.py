"""GPU kernels of whole training steps pass the acceptance rule that rejects kernels on a GPU: checked without one."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.networks import modes
from jcuts.base.settings import ATTENTION, Settings, Variant
from jcuts.pipeline import kernel_selection, measured_partition
from jcuts.trace import jaxapi
from tests import gpu_acceptance

RNG = np.random.default_rng(53)


def weights(*shape):
    return (RNG.standard_normal(shape) / 3).astype(np.float32)


def affine(size):
    return np.ones(size, np.float32), np.zeros(size, np.float32)


def normed(y, parameters, axes, epsilon=1e-3):
    scale, bias = parameters
    mean, variance = jnp.mean(y, axes, keepdims=True), jnp.var(y, axes, keepdims=True)
    return (y - mean) * jax.lax.rsqrt(variance + epsilon) * scale + bias


def conv(x, w, stride=1, groups=1, padding="SAME"):
    layout = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(
        x, w, (stride, stride), padding, dimension_numbers=layout, feature_group_count=groups
    )


def cross_entropy(logits, labels):
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1))


def step(loss):
    """A training step: SGD with momentum."""

    def stepped(params, momenta, *batch):
        value, gradients = jax.value_and_grad(loss)(params, *batch)
        momenta = jax.tree.map(lambda m, g: 0.9 * m + g, momenta, gradients)
        return jax.tree.map(lambda p, m: p - 0.1 * m, params, momenta), momenta, value

    return stepped


def mobile_network(params, images, labels):
    """Inverted residuals with batch norms, over numbers of rows that are no powers of two; keras' padding."""
    batch_norm = lambda y, parameters: normed(y, parameters, (0, 1, 2))  # noqa: E731
    y = jnp.clip(batch_norm(conv(images, params["stem"], 2), params["stem_norm"]), 0, 6)
    for block in params["blocks"]:
        z = jnp.clip(batch_norm(conv(y, block["expand"]), block["norms"][0]), 0, 6)
        z = jnp.clip(batch_norm(conv(z, block["depthwise"], groups=z.shape[-1]), block["norms"][1]), 0, 6)
        y = y + batch_norm(conv(z, block["project"]), block["norms"][2])
    padded = jnp.pad(y, ((0, 0), (0, 1), (0, 1), (0, 0)))
    y = jnp.clip(conv(padded, params["last"], 2, y.shape[-1], "VALID"), 0, 6)
    return cross_entropy(jnp.mean(y, (1, 2)) @ params["head"], labels)


def mobile_step():
    narrow, wide = 16, 48
    block = {
        "expand": weights(1, 1, narrow, wide),
        "depthwise": weights(3, 3, 1, wide),
        "project": weights(1, 1, wide, narrow),
        "norms": [affine(wide), affine(wide), affine(narrow)],
    }
    params = {
        "stem": weights(3, 3, 4, narrow),
        "stem_norm": affine(narrow),
        "blocks": [block, jax.tree.map(np.copy, block)],
        "last": weights(3, 3, 1, narrow),
        "head": weights(narrow, 10),
    }
    momenta = jax.tree.map(np.zeros_like, params)
    return step(mobile_network), (params, momenta, weights(4, 18, 18, 4), np.array([1, 2, 3, 4]))


def mlp(params, x, target):
    """Layer norms and a GELU, over a width that is no power of two."""
    y = normed(x, params["first"], -1, 1e-5)
    y = x + jax.nn.gelu(y @ params["up"]) @ params["down"]
    return jnp.mean(jnp.square(normed(y, params["last"], -1, 1e-5) - target))


def mlp_step():
    width, hidden = 96, 200
    params = {"first": affine(width), "up": weights(width, hidden), "down": weights(hidden, width)}
    params["last"] = affine(width)
    return step(mlp), (params, jax.tree.map(np.zeros_like, params), weights(130, width), weights(130, width))


def attention(params, tokens, labels):
    """Embeddings, causal attention and a head."""
    x = params["embedding"][tokens]
    q, k, v = ((x @ params[name]).reshape(*x.shape[:2], 3, -1) for name in "qkv")
    scores = jnp.einsum("bshe,bthe->bhst", q, k) / np.sqrt(q.shape[-1])
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -jnp.inf)
    y = x + jnp.einsum("bhst,bthe->bshe", jax.nn.softmax(scores), v).reshape(x.shape) @ params["o"]
    logits = normed(y, params["norm"], -1, 1e-5) @ params["embedding"].T
    return cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))


def attention_step():
    width = 48
    params = {name: weights(width, width) for name in "qkvo"}
    params |= {"norm": affine(width), "embedding": weights(70, width)}
    tokens, labels = RNG.integers(0, 70, (2, 2, 72))  # a mask is made of positions in the kernels that read it
    return step(attention), (params, jax.tree.map(np.zeros_like, params), tokens, labels)


def in_bfloat16(made):
    function, args = made
    narrow = lambda x: jnp.asarray(x, jnp.bfloat16) if x.dtype == np.float32 else x  # noqa: E731
    return function, jax.tree.map(narrow, args)


RECOMPUTED = Variant(("recomputes",), ATTENTION)
STEPS = {
    "mobile network": (mobile_step, None, 9),
    "mlp": (mlp_step, None, 9),
    "attention": (attention_step, None, 9),
    "attention, recomputed": (attention_step, RECOMPUTED, 3),
    "mlp in bfloat16": (lambda: in_bfloat16(mlp_step()), None, 9),
}
"""The step, the variant of it, and how many regions it has at least."""


@pytest.mark.cuda_compilers
@pytest.mark.parametrize("name", STEPS)
def test_kernels_of_a_training_step_are_accepted(name, monkeypatch, tmp_path):
    for module in (kernel_selection, measured_partition):
        monkeypatch.setattr(module, "LEAST_MOVED", 0)
    make, form, least = STEPS[name]
    function, args = make()
    problems = modes.pretended_regions(jaxapi.closed_jaxpr_of(function, *args), Settings(form=form))
    assert len(problems) >= least
    found = []
    for number, (problem, region) in enumerate(problems):
        folder = tmp_path / str(number)
        folder.mkdir()
        found += gpu_acceptance.verdicts(problem, region, folder)
    assert len(found) >= len(problems) - 1
    assert [verdict for verdict in found if verdict.rejected] == []
