"""The time model of every kernel family: predicted time over its bound, ratios, and the order of the enumeration."""

from __future__ import annotations

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jcuts.estimate import time_model
from jcuts.estimate.kernel_pul import pul_ratios
from jcuts.schedule.gpu.enumeration import enumerate_schedules
from jcuts.schedule.gpu.families import FAMILIES, family_of
from jcuts.schedule.gpu.kernel_time import kernel_time
from jcuts.schedule.gpu.machine import GpuMachine
from tests import programs
from tests.gpu import cases

NHWC = ("NHWC", "HWIO", "NHWC")


def zeros(*shape, dtype=np.float32):
    return jnp.zeros(shape, dtype)


def conv(stride=1, groups=1):
    return lambda x, w: lax.conv_general_dilated(
        x, w, (stride, stride), "SAME", dimension_numbers=NHWC, feature_group_count=groups
    )


def pool(x):
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")


def norm(x):
    mean = x.mean(0, keepdims=True)
    return mean[0] * 2, jnp.square(x - mean).mean(0)


CASES = {
    "copy": (lambda x: jnp.tanh(x) + 1, (zeros(512, 384),)),
    "transpose": (lambda x: x.T * 2, (zeros(512, 384),)),
    "row sum": (lambda x: x.sum(1), (zeros(512, 2048),)),
    "column sum": (lambda x: x.sum(0), (zeros(4096, 256),)),
    "softmax": (lambda x: jax.nn.softmax(x), (zeros(512, 1000),)),
    "long softmax": (lambda x: jax.nn.softmax(x), (zeros(512, 5000),)),
    "column softmax": (lambda x: jax.nn.softmax(x, 0), (zeros(512, 96),)),
    "batch norm": (norm, (zeros(65536, 128),)),
    "cumulative sum": (lambda x: jnp.cumsum(x, 1), (zeros(64, 1024),)),
    "cumulative sum of columns": (lambda x: jnp.cumsum(x, 0), (zeros(512, 64),)),
    "pool": (pool, (zeros(4, 28, 28, 32),)),
    "depthwise": (conv(groups=64), (zeros(8, 28, 28, 64), zeros(3, 3, 1, 64))),
    "depthwise gradient": (
        lambda x, w, g: jax.vjp(lambda k: conv(groups=32)(x, k), w)[1](g)[0],
        (zeros(8, 28, 28, 32), zeros(3, 3, 1, 32), zeros(8, 28, 28, 32)),
    ),
    "dense": (lambda x, w: jnp.maximum(x @ w, 0), (zeros(1024, 512), zeros(512, 768))),
    "dense of 16 bits": (lambda x, w: x @ w, (zeros(1024, 512, dtype="bfloat16"), zeros(512, 768, dtype="bfloat16"))),
    "few rows": (lambda x, w: x @ w, (zeros(8, 2048), zeros(2048, 1000))),
    "one row": (lambda x, w: x @ w, (zeros(1, 2048), zeros(2048, 1000))),
    "exact": (lambda x, w: jnp.matmul(x, w, precision="highest"), (zeros(256, 512), zeros(512, 256))),
    "convolution": (conv(), (zeros(16, 28, 28, 64), zeros(3, 3, 64, 64))),
    "first layer": (conv(2), (zeros(8, 112, 112, 3), zeros(7, 7, 3, 64))),
}


def candidates(name, machine):
    function, arguments = CASES[name]
    return list(enumerate_schedules(programs.trace(function, *arguments).program(), machine))


@pytest.mark.parametrize("gpu", ["H200", "A100"])
@pytest.mark.parametrize("name", CASES)
def test_predicted_times_are_no_less_than_their_bounds(name, gpu):
    machine = GpuMachine.named(gpu)
    found = candidates(name, machine)
    assert found
    for program, _ in found[:40]:
        time = kernel_time(program, machine)
        ratios = pul_ratios(time, machine.arch)
        bound = time.bound(machine.arch, resident=time.compulsory)
        assert 0 < bound <= time.seconds < math.inf, time_model.text(time.root)
        assert all(0 < r <= 1 for r in (ratios.gm, ratios.sm, ratios.wb, ratios.r)) and 0 < ratios.pul <= 1
        assert sum(time_model.breakdown(time.root).values()) > 0 and time_model.text(time.root).count("\n") >= 1


@pytest.mark.parametrize("gpu", ["H200", "A100"])
@pytest.mark.parametrize("template", ["attention", "queries", "keys"])
def test_predicted_times_of_attention_are_no_less_than_their_bounds(template, gpu):
    """Of the forward kernel, and of those for dQ and for dK and dV; more tokens take more time."""
    machine, best = GpuMachine.named(gpu), []
    for length in (256, 1024):
        x, rows = zeros(2, length, 4, 64), zeros(2, 4, length, 1)
        if template == "attention":
            made = programs.trace(cases.attention(), x, x, x).attention()[1]
        else:
            made = programs.trace(cases.attention_backward(template), x, x, x, x, rows, rows)
            made = made.attention("attention_backward")[1]
        found = [kernel_time(program, machine) for program, _ in enumerate_schedules(made, machine)]
        assert found
        for time in found:
            assert 0 < time.bound(machine.arch, resident=time.compulsory) <= time.seconds < math.inf
        best.append(min(time.seconds for time in found))
    assert best[1] > 2 * best[0]


ONE_SCALE = (
    "copy",
    "transpose",
    "row sum",
    "softmax",
    "long softmax",
    "column softmax",
    "batch norm",
    "cumulative sum",
)
"""Whose candidates have scores on one scale: no family is rescaled, nothing is moved back for being like another."""


@pytest.mark.parametrize("name", ONE_SCALE)
def test_the_enumeration_ranks_by_the_model(name):
    machine = GpuMachine.named("H200")
    found = [(kernel_time(program, machine).seconds, score) for program, score in candidates(name, machine)]
    for (a, first), (b, second) in itertools.pairwise(sorted(found)):
        assert a == pytest.approx(b, rel=1e-6) or first > second


def test_every_family_has_a_case():
    """Others need weights along K, float64 operands, or are patterns of their own."""
    machine = GpuMachine.named("H200")
    seen = {family_of(program).name for name in CASES for program, _ in candidates(name, machine)}
    elsewhere = {
        "horizontal",
        "multi_tensor_sums",
        "weight_transpose",
        "warp_specialized",
        "implicit_gemm",
        "mma_f64",
        "inverted_residual",
        "b2b_gemm",
        "b2b_wgmma",
        "flash_attention",
        "attention_backward",
        "recurrence",
        "row_column_sums",
    }
    assert {*FAMILIES} - seen <= elsewhere, sorted(seen)


def test_another_gpu_has_other_times():
    """Half the memory bandwidth is nearly twice the time of what is bound by it."""
    import dataclasses

    machine = GpuMachine.named("H200")
    program, _ = max(candidates("copy", machine), key=lambda item: item[1])
    large = dataclasses.replace(machine.arch, bw_global=machine.arch.bw_global / 2)
    slower = dataclasses.replace(machine, arch=large)
    assert kernel_time(program, slower).seconds > kernel_time(program, machine).seconds
