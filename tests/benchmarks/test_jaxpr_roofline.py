"""Roofline from a jaxpr: hand counts of FLOP and compulsory bytes, peaks of the data file, `roofline` agrees."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from benchmarks.networks import jaxpr_roofline, roofline
from benchmarks.networks.workloads import WORKLOADS


def counts(function, *arguments):
    return jaxpr_roofline.count(jax.make_jaxpr(function)(*arguments))


def test_matrix_product_in_a_loop():
    w, x = jnp.ones((8, 8)), jnp.ones((4, 8))
    found = counts(lambda w, x: jax.lax.scan(lambda h, _: (h @ w, None), x, None, length=5)[0], w, x)
    assert found.flop["tf32_mma"] == 5 * 2 * 4 * 8 * 8
    assert found.bytes == 4 * (8 * 8 + 4 * 8 + 4 * 8)


def test_depthwise_convolution_is_no_matrix_product():
    dimensions = ("NHWC", "HWIO", "NHWC")
    x, w = jnp.ones((1, 4, 4, 6), jnp.bfloat16), jnp.ones((3, 3, 1, 6), jnp.bfloat16)
    found = counts(
        lambda x, w: jax.lax.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=dimensions, feature_group_count=6
        ),
        x,
        w,
    )
    assert found.flop == {"ffma": 2 * 16 * 6 * 9}


def test_only_rows_that_are_read_and_slices_that_are_written_count():
    table, rows = jnp.ones((1000, 4)), jnp.zeros(2, jnp.int32)
    assert counts(lambda t, r: jax.lax.dynamic_slice(t, (r[0], 0), (2, 4)), table, rows).bytes < 4 * 1000
    cache, new = jnp.ones((100, 4)), jnp.ones((1, 4))
    assert counts(lambda c, n: jax.lax.dynamic_update_slice(c, n, (3, 0)), cache, new).bytes == 4 * (400 + 4 + 4)


@pytest.mark.parametrize("name", ["DLRM", "Llama_decode", "GPT_training"])
def test_agrees_with_the_counts_beside_jcuts(name):
    form = WORKLOADS[name].build(2, tiny=True).form(closed=False)
    traced = jax.make_jaxpr(form.function)(*form.arguments)
    mine, theirs = jaxpr_roofline.count(traced), roofline.count(traced)
    assert sum(mine.flop.values()) == pytest.approx(theirs.flop, rel=0.02)
    assert mine.bytes <= theirs.bytes


def test_peaks_of_the_data_file():
    counted = jaxpr_roofline.Counts({"bf16_mma": 1e12}, 3.352e9)
    found = jaxpr_roofline.roofline(counted, "NVIDIA H100 80GB HBM3")
    assert found["compute"] == pytest.approx(1e12 / (132 * 4096 * 1.98e9))
    assert found["memory"] == pytest.approx(1e-3) and found["bound"] == found["memory"]
    assert "bound" not in jaxpr_roofline.roofline(counted, "cpu")
