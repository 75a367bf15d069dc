"""Times of XLA's programs: in a loop, or call by call."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jcuts.tune.measure import cpu_timing

LAYOUT = ("NHWC", "HWIO", "NHWC")


def _gradient(x, g):
    """Of the weights: XLA:CPU computes this convolution 20 times as slowly in a loop."""
    w = jnp.zeros((3, 3, x.shape[-1], g.shape[-1]), jnp.float32)
    return jax.vjp(lambda w: jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=LAYOUT), w)[1](g)[0]


def _announced(label):
    pass


@pytest.mark.parametrize(
    ("function", "shapes", "result"),
    [(lambda x: jnp.tanh(x) * 2, [(33, 65)], (33, 65)), (lambda x, y: x @ y, [(65, 33), (33, 47)], (65, 47))],
)
def test_short_programs_run_in_a_loop(function, shapes, result, monkeypatch):
    monkeypatch.setattr(cpu_timing, "_calls", None)  # nothing is called one by one
    operands = [np.ones(shape, np.float32) for shape in shapes]
    entries = {"xla": (function, {}), "twice": (lambda *x: function(*x) * 2, {})}
    found, samples = cpu_timing.compare(
        entries, [operands], [(result, "float32")], seconds=0.05, first="xla", announce=_announced
    )
    assert found == "loop"
    assert samples.keys() == entries.keys()
    assert all(s.median > 0 for s in samples.values())


def test_what_is_slower_in_a_loop_is_not_timed_there():
    x, g = np.ones((8, 16, 16, 16), np.float32), np.ones((8, 16, 16, 32), np.float32)
    _, samples = cpu_timing.compare(
        {"xla": (_gradient, {}), "sum": (lambda x, g: jnp.broadcast_to(x.sum() + g.sum(), (3, 3, 16, 32)), {})},
        [[x, g]],
        [((3, 3, 16, 32), "float32")],
        seconds=0.05,
        first="xla",
        announce=_announced,
    )
    run = jax.jit(cpu_timing.looped(_gradient))
    n, blank = 4, (jnp.zeros((3, 3, 16, 32)),)
    jax.block_until_ready(run(n, blank, x, g))
    in_a_loop = min(cpu_timing._clocked(lambda: jax.block_until_ready(run(n, blank, x, g))) for _ in range(3)) / n
    assert samples.keys() == {"xla", "sum"}
    assert samples["xla"].median < in_a_loop / 2
