"""Every transformation of the matrix against ``jax.jit``, with measuring on and off."""

from __future__ import annotations

import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jcuts
from tests.primitive.conftest import toy  # noqa: F401  (a fixture)
from tests.primitive.transform_cases import CASES, PARAMS, X, assert_same, by_jit, each_case, layer, loss


@each_case
def test_same_as_jit(name):
    assert_same(by_jit(name), CASES[name](functools.partial(jcuts.optimize, tune="off")))


@each_case
def test_same_as_jit_under_the_guard(name, toy):  # noqa: F811
    assert_same(by_jit(name), CASES[name](jcuts.optimize))


@pytest.mark.slow
@each_case
def test_same_as_jit_when_tuned(name):
    assert_same(by_jit(name), CASES[name](jcuts.optimize))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("place", ["outermost", "nested"])
def test_no_hidden_all_gather(kind, place):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(kind,))
    f = jcuts.optimize(layer, tune="off")
    with jax.set_mesh(mesh):
        x = jax.device_put(X, NamedSharding(mesh, P("data")))
        p = jax.device_put(PARAMS, NamedSharding(mesh, P()))
        lowered = f.lower(p, x) if place == "outermost" else jax.jit(lambda p, x: f(p, x) * 2).lower(p, x)
        text = lowered.compile().as_text()
        assert "all-gather" not in text
        assert f(p, x).sharding.is_equivalent_to(NamedSharding(mesh, P("data")), 2)


def test_sharded_gradient_only_reduces():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    x = jax.device_put(X, NamedSharding(mesh, P("data")))
    p = jax.device_put(PARAMS, NamedSharding(mesh, P()))
    text = jcuts.optimize(jax.grad(loss), tune="off").lower(p, x).compile().as_text()
    assert "all-gather" not in text and "all-reduce" in text


_CACHED = """
import sys, jax, jax.numpy as jnp, numpy as np, jcuts
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
hits, misses = [], []
def note(event, **_):
    if event == "/jax/compilation_cache/cache_hits": hits.append(event)
    if event == "/jax/compilation_cache/cache_misses": misses.append(event)
jax.monitoring.register_event_listener(note)
f = jcuts.optimize(lambda x: jnp.tanh(x @ x) * 2, tune="off")
print(float(f(np.ones((8, 8), np.float32)).sum()), len(hits), len(misses))
"""


def test_persistent_compilation_cache_across_processes(tmp_path):
    def run():
        env = dict(os.environ, PYTHONPATH=os.getcwd())
        out = subprocess.run(
            [sys.executable, "-c", _CACHED, str(tmp_path)],
            env=env,
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        value, hits, misses = out.stdout.split()
        return value, int(hits), int(misses)

    first, second = run(), run()
    assert first[0] == second[0]
    assert first[2] >= 1 and second[1] >= 1 and second[2] == 0


def test_lowering_text_is_stable():
    texts = {jcuts.optimize(layer, tune="off").lower(PARAMS, X).as_text() for _ in range(2)}
    assert len(texts) == 1 and "0x7f" not in texts.pop()


def test_donation_reuses_the_buffer():
    f = jcuts.optimize(lambda x: x + 1, donate_argnums=0)
    for _ in range(2):
        x = jnp.asarray(X)
        y = f(x)
        assert x.is_deleted()
        np.testing.assert_array_equal(y, X + 1)


def test_effects_run_once_per_call():
    seen = []
    f = jcuts.optimize(lambda x: (jax.debug.callback(lambda v: seen.append(float(v)), x[0, 0]), x * 2)[1])
    for n in (1, 2, 3):
        jax.block_until_ready(f(X))
        jax.effects_barrier()
        assert len(seen) == n
    assert "effects" in f.decision(X).reason
