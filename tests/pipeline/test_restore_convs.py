"""A plan for a GPU in which kernels take some products of 1x1 convolutions: the others are convolutions again."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jcuts.base import knobs
from jcuts.base.settings import Settings, Variant
from jcuts.kernel_ir.interpret import interpret
from jcuts.pipeline import computation, kernel_selection, rebuild
from jcuts.pipeline import passes as pipeline_passes
from jcuts.pipeline.restore_convs import is_faster
from jcuts.rewrite.matmul_patterns import CONVOLUTION, DOT
from jcuts.rewrite.pointwise_conv import Product
from jcuts.schedule import fit
from jcuts.schedule.gpu import candidates as gpu_candidates
from jcuts.trace import jaxapi
from jcuts.xla import devices as xla_devices
from jcuts.xla.rebuild import traced_eqns

NHWC = ("NHWC", "HWIO", "NHWC")
HOPPER = (9, 0)
DOTS = Variant(("dots",))


def conv(x, w, padding="VALID", precision=None):
    return lax.conv_general_dilated(x, w, (1, 1), padding, dimension_numbers=NHWC, precision=precision)


def block(x, w, v, d):
    """Two pointwise convolutions and a 3x3 one, as ResNet's bottleneck has them."""
    return conv(jax.nn.relu(conv(jax.nn.relu(conv(x, w)), d, "SAME")), v) + x


def step(x, w, v, d):
    return jax.value_and_grad(lambda *args: jnp.sum(block(*args) ** 2), argnums=(0, 1, 2, 3))(x, w, v, d)


def arguments(dtype="float32"):
    rng = np.random.default_rng(0)
    shapes = ((2, 7, 5, 32), (1, 1, 32, 48), (1, 1, 48, 32), (3, 3, 48, 48))
    return [jnp.asarray(rng.standard_normal(s) / 8, dtype) for s in shapes]


def count(closed, name):
    return sum(jaxapi.primitive_name(e) == name for e in closed.jaxpr.eqns)


def products(subset):
    return [e for e in subset.closed.jaxpr.eqns if jaxapi.primitive_name(e) == DOT]


@pytest.fixture
def planned(monkeypatch):
    """Plans for a GPU; kernels, which are interpreted, take the first products of the program."""

    def eqns(program, inputs, outputs, like, place=None, aliases=None):
        types = tuple(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in outputs)
        run = lambda *xs: tuple(interpret(program, [np.asarray(x) for x in xs]))  # noqa: E731
        return traced_eqns(lambda *xs: list(jax.pure_callback(run, types, *xs)), inputs, outputs, like)

    def choose_partition(top, settings, platform):
        form = settings.form
        if form is not None and form.regions == "none":
            return chosen(top, settings, platform)
        for level in top.walk():
            computation.add_candidates(level.subsets, platform)
        return kernel_selection.Partition(top, settings, platform)

    chosen = kernel_selection.choose_partition
    monkeypatch.setattr(pipeline_passes.xla_devices, "unusable", lambda: "")
    monkeypatch.setattr(rebuild, "kernel_for", lambda program: program)
    monkeypatch.setattr(rebuild, "kernel_eqns", eqns)
    monkeypatch.setattr(kernel_selection, "choose_partition", choose_partition)

    def plan(function, *args, kernels=0, form=DOTS, capability=HOPPER, **scope):
        def resolve(partition, problems, choices):
            regions = sorted((s for s in partition.regions if products(s)), key=lambda s: max(s.members))
            for subset in regions[:kernels]:
                subset.chosen = subset.program

        machine = gpu_candidates.GpuMachine(132, capability=capability)
        monkeypatch.setattr(xla_devices, "machine", lambda: machine)
        monkeypatch.setattr(xla_devices, "this", lambda: xla_devices.Gpu("H100", capability, 132))
        monkeypatch.setattr(kernel_selection, "resolve", resolve)
        closed = jaxapi.closed_jaxpr_of(function, *args)
        settings = dataclasses.replace(Settings(tune="off"), form=form)
        pipeline_passes.forget()
        with knobs.scope(**scope):
            outcome = pipeline_passes.optimize_jaxpr(closed, settings, platform="cuda", may_measure=False)
        pipeline_passes.forget()
        jaxapi.check(outcome.closed)
        return closed, outcome

    return plan


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kernels", [1, 2, 3])
def test_products_outside_of_regions_are_the_convolutions_that_they_were(planned, kernels, dtype):
    args = arguments(dtype)
    closed, outcome = planned(step, *args, kernels=kernels, restore_convs="all")
    assert count(closed, CONVOLUTION) == 9  # three forward, three gradients of data and of weights each
    new = outcome.closed
    assert count(new, "pure_callback") == kernels and count(new, DOT) == 0
    assert count(new, CONVOLUTION) == 9 - kernels
    assert f"{4 - kernels} products of 1x1 convolutions" in " ".join(outcome.report.notes)
    before = [str(e.params) for e in closed.jaxpr.eqns if jaxapi.primitive_name(e) == CONVOLUTION]
    after = [str(e.params) for e in new.jaxpr.eqns if jaxapi.primitive_name(e) == CONVOLUTION]
    assert set(after) <= set(before)
    off = planned(step, *args, kernels=kernels, restore_convs="off")[1].closed
    assert count(off, DOT) == 4 - kernels and count(off, CONVOLUTION) == 5
    tolerance = 1e-4 if dtype == "float32" else 3e-2
    wanted = jaxapi.eval_closed(closed, *args)
    for made in (new, off):
        for x, y in zip(jaxapi.eval_closed(made, *args), wanted, strict=True):
            x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
            assert np.abs(x - y).max() <= tolerance * np.abs(y).max()


def test_where_no_kernel_takes_a_product_the_program_is_the_users_own(planned):
    args = arguments()
    for form in (DOTS, Variant(("dots",), "none")):
        closed, outcome = planned(step, *args, form=form, restore_convs="all")
        assert outcome.closed is closed  # nothing to race
        assert count(closed, CONVOLUTION) == 9
    jaxpr = planned(step, *args, form=None)[1]
    assert planned(step, *args, restore_convs="all")[1].report.source == jaxpr.report.source


def types(dtype, *shapes):
    return [jax.ShapeDtypeStruct(s, dtype) for s in shapes]


LARGE_BLOCK = ((64, 28, 28, 512), (1, 1, 512, 128), (1, 1, 128, 512), (3, 3, 128, 128))  # 6.6e9 operations
MIDDLE_BLOCK = ((64, 14, 14, 64), (1, 1, 64, 384), (1, 1, 384, 64), (3, 3, 384, 384))  # 0.6e9
SMALL_BLOCK = ((1, 28, 28, 512), (1, 1, 512, 128), (1, 1, 128, 512), (3, 3, 128, 128))  # 0.1e9


@pytest.mark.parametrize(
    ("function", "shapes", "restored"),
    [
        (block, LARGE_BLOCK, 2),
        (block, MIDDLE_BLOCK, 0),
        (block, SMALL_BLOCK, 0),
        (step, LARGE_BLOCK, 4),
        (step, MIDDLE_BLOCK, 4),
        (step, SMALL_BLOCK, 0),
    ],
)
def test_large_products_are_restored_and_those_whose_operand_a_convolution_reads(planned, function, shapes, restored):
    closed, outcome = planned(function, *types("float32", *shapes), restore_convs="auto")
    total = 2 if function is block else 4
    assert count(outcome.closed, DOT) == total - restored
    assert count(closed, CONVOLUTION) - count(outcome.closed, CONVOLUTION) == total - restored


@pytest.mark.parametrize(
    "case",
    [{"form": Variant(("dots",), "none")}, {"capability": (8, 0)}, {"restore_convs": "off"}, {}],
)
def test_products_of_variants_without_kernels_and_on_older_gpus_stay(planned, case):
    _, outcome = planned(step, *types("float32", *LARGE_BLOCK), **({"restore_convs": "auto"} | case if case else {}))
    assert count(outcome.closed, DOT) == 4 and not any("again" in note for note in outcome.report.notes)


def test_precisions_and_types_without_measurements_stay():
    def product(rows, dtype="float32", precision=None, readers=()):
        x, w = types(dtype, (rows, 1024), (1024, 1024))
        (eqn,) = jaxapi.closed_jaxpr_of(lambda x, w: lax.dot(x, w, precision=precision), x, w).jaxpr.eqns
        return Product(eqn, (eqn, *readers))

    (other,) = jaxapi.closed_jaxpr_of(conv, *types("float32", (1, 3, 3, 4), (3, 3, 4, 4))).jaxpr.eqns
    fitted = fit.coefficients("gpu/conv", "xla_convolution")
    large, small = (int(n) >> 21 for n in (fitted.surely_operations, fitted.least_operations))  # rows
    assert is_faster(product(large)) and is_faster(product(large, "bfloat16"))
    assert not is_faster(product(large - 1)) and is_faster(product(large - 1, readers=[other]))
    assert is_faster(product(small, readers=[other])) and not is_faster(product(small - 1, readers=[other]))
    assert not is_faster(product(large, precision=lax.Precision.HIGHEST))
    assert not is_faster(product(large, "int8"))
