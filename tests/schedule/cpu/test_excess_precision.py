"""CPU kernels keep a bfloat16 sum in float32 until it is stored, as XLA's fusions do."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jcuts
from jcuts.arch.detect import describe_cpu
from jcuts.schedule.cpu import candidates
from jcuts.schedule.cpu.bound import machine_of
from tests import programs


def _conv(groups, stride=1):
    def apply(x, w, s, b):
        layout = ("NHWC", "HWIO", "NHWC")
        y = lax.conv_general_dilated(
            x, w, (stride, stride), "SAME", dimension_numbers=layout, feature_group_count=groups
        )
        return jnp.clip(y.astype(jnp.float32) * s + b, 0.0, 6.0)

    return apply


def _dot(x, w, s, b):
    return (x @ w).astype(jnp.float32) * s + b


CASES = {
    "pointwise": (_conv(1), (1, 9, 11, 24), (1, 1, 24, 35)),
    "depthwise": (_conv(33), (2, 9, 11, 33), (3, 3, 1, 33)),
    "strided": (_conv(1, 2), (1, 13, 9, 5), (3, 3, 5, 19)),
    "dot": (_dot, (37, 71), (71, 29)),
}


def _arguments(name, seed):
    _, image, weights = CASES[name]
    made = np.random.default_rng(seed)
    x, w = (made.standard_normal(shape).astype(jnp.bfloat16) for shape in (image, weights))
    s, b = (made.standard_normal(weights[-1]).astype(np.float32) for _ in range(2))
    return x, w, s, b


def _reference(name, arguments):
    with jax.enable_x64(True):
        exact = [np.asarray(a).astype(np.float64) for a in arguments]
        x, w, s, b = exact
        if name == "dot":
            return (x @ w) * s + b
        y = _conv_float64(name, x, w)
        return np.clip(y * s + b, 0.0, 6.0)


def _conv_float64(name, x, w):
    stride, groups = (2 if name == "strided" else 1), (x.shape[-1] if name == "depthwise" else 1)
    return np.asarray(
        lax.conv_general_dilated(
            x,
            w,
            (stride, stride),
            "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=groups,
            precision=lax.Precision.HIGHEST,
        )
    )


@pytest.mark.parametrize("name", CASES)
def test_sums_are_not_rounded_before_what_follows_them(name):
    arguments = _arguments(name, 3)
    wanted = _reference(name, arguments)
    fast = jcuts.optimize(CASES[name][0], mode="fusion", tune="off")
    found = np.asarray(fast(*arguments), np.float64)
    assert any(s.chosen != "xla" for s in fast.explain(*arguments).subsets)
    scale = np.abs(wanted).max()
    assert np.abs(found - wanted).max() <= 2e-6 * scale  # rounding the sum to bfloat16 errs by up to 4e-3


@pytest.mark.parametrize("name", CASES)
def test_every_candidate_is_one_without_the_round_trip(name):
    program = programs.trace(CASES[name][0], *map(jnp.asarray, _arguments(name, 4))).program()
    found = candidates.candidates(program, machine_of(describe_cpu(), 64, 32, 2), 64)
    assert found
    for made, _ in found:
        nodes = made.phases[-1].exit.nodes
        assert not any(n.op == "convert" and n.dtype == "float32" and nodes[n.args[0]].op != "load" for n in nodes)
