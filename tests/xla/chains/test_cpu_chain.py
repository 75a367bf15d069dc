"""Chains of CPU kernels: the same values as single calls, in loops, from several threads; damaged wiring is refused."""

from __future__ import annotations

import gc
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun

from jcuts.base import knobs
from jcuts.base.settings import Settings
from jcuts.pipeline.passes import optimize_jaxpr
from jcuts.trace import jaxapi
from jcuts.trace.inline import inline
from jcuts.xla import cpu_ffi_call, cpu_launcher, native_library
from jcuts.xla.chains import fuse
from jcuts.xla.kernel_cache import kernel_for
from tests import programs
from tests.xla.kernels import assert_threads_agree

RNG = np.random.default_rng(3)
X, W, V = (RNG.standard_normal(s).astype(np.float32) for s in ((33, 64), (64, 64), (64, 9)))


def layers(x, w, v):
    """Kernels with results of several sizes, some of which are the function's."""
    y = jax.nn.softmax(jax.nn.gelu(x @ w), axis=-1)
    z = jnp.sort(y, axis=1) @ w + x  # a sort stays with XLA: two chains
    return jnp.tanh(z) @ v, z.sum(axis=0), y


def looped(x, w, v):
    def step(carry, _):
        a, b, c = layers(carry, w, v)
        return jax.nn.relu(c) + b, a.max()

    return jax.lax.scan(step, x, None, length=5)


def calls_of(closed: jaxapi.Closed, target: str) -> int:
    return sum(
        (jaxapi.call_target(e) == target) + sum(calls_of(b, target) for _, _, b in jaxapi.inner_jaxprs(e))
        for e in closed.jaxpr.eqns
    )


def planned(fn, chains: bool) -> jaxapi.Closed:
    """The function with kernels for everything."""
    with knobs.scope(chains=chains):
        closed = inline(jaxapi.closed_jaxpr_of(fn, X, W, V))
        return optimize_jaxpr(closed, Settings(mode="fusion"), platform="cpu", may_measure=False).closed


@pytest.mark.parametrize("fn", [layers, looped])
def test_chains_compute_what_single_calls_do(fn):
    chained, single = planned(fn, True), planned(fn, False)
    assert calls_of(chained, cpu_launcher.CHAIN) >= 1 and not calls_of(single, cpu_launcher.CHAIN)
    assert calls_of(chained, cpu_launcher.TARGET) < calls_of(single, cpu_launcher.TARGET)
    run, alone = (jax.jit(jaxpr_as_fun(c)) for c in (chained, single))
    for _ in range(3):
        for got, wanted in zip(jax.tree.leaves(run(X, W, V)), jax.tree.leaves(alone(X, W, V)), strict=True):
            np.testing.assert_array_equal(got, wanted)
    assert "kernels that can follow each other run in" in str(fuse.note(chained)) and fuse.joined(chained) == 0


def test_several_threads_have_arenas_of_their_own():
    run = jax.jit(jaxpr_as_fun(planned(layers, True)))
    inputs = [X + np.float32(k) for k in range(4)]
    assert_threads_agree(run, inputs, W, V)


def test_chains_share_one_arena_which_goes_with_the_last_of_them():
    """Chains run one after the other: an arena for each would be cold memory in every call."""
    kept = native_library.load().jcuts_arena_bytes
    gc.collect()
    before = kept()
    lowered = jax.jit(jaxpr_as_fun(planned(layers, True))).lower(X, W, V)
    arenas = [int(found) for found in re.findall(r"arena_bytes = (\d+)", lowered.as_text())]
    assert len(arenas) >= 2 and min(arenas) > 0
    run = lowered.compile()
    for _ in range(2):
        jax.block_until_ready(run(X, W, V))
        assert kept() <= max(before, max(arenas) + 63)
    del run, lowered
    jax.clear_caches()  # which hold executables
    gc.collect()
    assert kept() <= before


@pytest.mark.parametrize(
    "wiring, sizes, arena",
    [
        ([2, 0, 0, 0, 0, 1, 0], [1, 0, 1], 0),  # a buffer is cut off
        ([2, 0, 0, 0, 0, 3, 0, 0], [1, 0, 1], 0),  # no such kind
        ([2, 0, 0, 0, 0, 2, 0, 64], [1, 0, 1], 64),  # beyond the arena
        ([2, 0, 0, 0, 0, 1, 0, -4], [1, 0, 1], 0),
        ([2, 0, 0, 0, 0, 1, 0, 0], [0, 0, 1], 0),  # no tile
        ([2, 0, 0, 0, 0, 1, 0, 0], [1, 0], 0),
        ([2, 0, 0, 0, 0, 1, 0, 0], [1, 0, 1], -1),
        ([2, 0, 0, 7, 0, 1, 0, 0], [1, 0, 1], 0),  # an operand that there is not
        ([9 << 40, 0, 0, 0, 0, 1, 0, 0], [1, 0, 1], 0),
    ],
)
def test_damaged_wiring_is_refused(wiring, sizes, arena):
    found = programs.trace(lambda x: jnp.tanh(x), X)
    kernel = kernel_for(programs.schedules(found.program(), 1)[0])
    cpu_launcher.ensure_registered()
    cpu_launcher.add_kernel(kernel)
    like = [jax.ShapeDtypeStruct(X.shape, X.dtype)]

    def call(x):
        return cpu_ffi_call.call_chain([kernel.digest], wiring, sizes, [x], like, arena_bytes=arena)

    with pytest.raises(Exception, match="jcuts chain"):
        jax.block_until_ready(jax.jit(call)(X))
