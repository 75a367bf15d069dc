"""Kernels that write into an array at a position that is an argument, on a GPU (run with ``-m gpu``)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jcuts
from jcuts.base import knobs
from jcuts.lower.sliced_output import write_into_slice
from jcuts.schedule.gpu import candidates as gpu_candidates
from jcuts.xla import devices as xla_devices
from jcuts.xla.cpu_ffi_call import call_kernel
from jcuts.xla.kernel_cache import kernel_for
from tests import programs

pytestmark = pytest.mark.gpu
LENGTH = 37
POSITIONS = (0, 5, LENGTH - 1, -4, LENGTH + 9)
"""Some of them outside: clamped, as XLA clamps them."""


def normal(*shape, seed=0, dtype="bfloat16"):
    return jnp.asarray(np.random.default_rng([seed, *shape]).standard_normal(shape), dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("batch", [1, 3])
def test_every_schedule_writes_its_line_alone(batch, dtype):
    """The same bits as the kernel whose result is an array of its own; everything else stays."""
    x, w = normal(batch, 1, 1284, dtype=dtype), normal(1284, 384, dtype=dtype)
    traced = programs.trace(lambda x, w: x @ w, x, w)
    machine, ran = xla_devices.machine(), 0
    for program, _ in gpu_candidates.candidates(traced.program(), machine, 24):
        found = write_into_slice(program, (batch, LENGTH, 384), (0, "int32", 0))
        if found is None:
            continue
        alone, placed = kernel_for(program), kernel_for(found.program)
        (line,) = jax.jit(lambda *xs, k=alone: call_kernel(k, *xs))(*traced.operands())
        run = jax.jit(lambda c, at, *xs, k=placed: call_kernel(k, *xs, c, at, place=(2, 0))[0], donate_argnums=0)
        for position in POSITIONS:
            cache = normal(batch, LENGTH, 384, seed=1, dtype=dtype)
            want = lax.dynamic_update_slice(cache, line, (0, position, 0))
            got = run(cache, jnp.int32(position), *traced.operands())
            np.testing.assert_array_equal(np.asarray(got), np.asarray(want))
        ran += 1
    assert ran >= 4


def layer(cache, x, w, cos, sin, at):
    """A layer of a decoder: joint projection, rotary embedding, appends, attention up to the position."""
    keys, values = cache
    heads, depth = keys.shape[2:]
    q, k, v = (y.reshape(x.shape[0], 1, heads, depth) for y in jnp.split(x @ w["qkv"], 3, -1))

    def rotary(y):
        a, b = jnp.split(y, 2, -1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    keys = lax.dynamic_update_slice(keys, rotary(k), (0, at, 0, 0))
    values = lax.dynamic_update_slice(values, v, (0, at, 0, 0))
    scores = jnp.einsum("bqhd,bkhd->bhqk", rotary(q), keys).astype(jnp.float32) * depth**-0.5
    weights = jax.nn.softmax(jnp.where(jnp.arange(keys.shape[1]) <= at, scores, -jnp.inf), -1).astype(x.dtype)
    out = jnp.einsum("bhqk,bkhd->bqhd", weights, values).reshape(x.shape)
    return (keys, values), x + out @ w["out"]


@pytest.mark.parametrize("batch", [1, 4])
def test_steps_of_a_decoder_agree_with_jit(batch, tmp_path):
    """Caches are donated and passed on; what is tuned may be any variant, and is right."""
    heads, depth, width = 8, 64, 512
    w = {"qkv": normal(width, 3 * width) * width**-0.5, "out": normal(width, width, seed=1) * width**-0.5}
    cos, sin = normal(depth // 2, seed=2), normal(depth // 2, seed=3)
    step = jcuts.optimize(layer, donate_argnums=0)
    plain = jax.jit(layer)
    mine, theirs = (tuple(normal(batch, 256, heads, depth, seed=s) for s in (4, 5)) for _ in range(2))
    with knobs.scope(cache_dir=tmp_path, max_candidates=3):
        for at in (3, 4, 255):
            x = normal(batch, 1, width, seed=at)
            mine, got = step(mine, x, w, cos, sin, jnp.int32(at))
            theirs, want = plain(theirs, x, w, cos, sin, jnp.int32(at))
            for a, b in zip(jax.tree.leaves((mine, got)), jax.tree.leaves((theirs, want)), strict=True):
                np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), atol=0.06)
