"""Winograd kernels: what is recognised, that they compute the convolution, and what becomes of NaN and infinity."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

from jcuts.arch.detect import describe_cpu
from jcuts.codegen.cpu.emit import emit_source
from jcuts.kernel_ir.interpret import interpret
from jcuts.kernel_ir.printer import program_text
from jcuts.kernel_ir.program import Program
from jcuts.kernel_ir.verify import verify
from jcuts.lower.patterns import winograd as patterns_winograd
from jcuts.schedule.cpu import candidates as cpu_candidates
from jcuts.schedule.cpu import winograd, winograd_candidates
from jcuts.schedule.cpu.bound import work_of
from jcuts.tune.measure.cpu_launch import Launcher, Schedule
from jcuts.xla.kernel_cache import kernel_for
from tests import programs
from tests.ops.cases import conv


def random(*shape, dtype=np.float32, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


def one_dimensional(x, w, padding="SAME"):
    return lax.conv_general_dilated(x, w, (1,), padding, dimension_numbers=("NHC", "HIO", "NHC"))


def block(x, w, scale, shift, rest):
    return jax.nn.relu(conv(x, w) * scale + shift + rest)


CONVOLUTIONS = {
    "same": (conv, (random(1, 7, 9, 5), random(3, 3, 5, 18))),
    "valid, two images": (lambda x, w: conv(x, w, padding="VALID"), (random(2, 9, 6, 20), random(3, 3, 20, 32))),
    "uneven padding": (lambda x, w: conv(x, w, padding=[(2, 0), (0, 3)]), (random(3, 6, 6, 4), random(3, 3, 4, 17))),
    "cropped": (lambda x, w: conv(x, w, padding=[(-1, 2), (1, -2)]), (random(1, 9, 9, 8), random(3, 3, 8, 16))),
    "block": (block, (random(1, 6, 5, 8), random(3, 3, 8, 16), random(16), random(16, seed=1), random(1, 6, 5, 16))),
    "prologue": (lambda x, w: conv(x * 2.0, w), (random(1, 6, 5, 8), random(3, 3, 8, 16))),
    # padded float64 convolutions leave taps out as XLA does, and stay direct
    "float64": (
        lambda x, w: conv(x, w, padding="VALID"),
        (random(1, 7, 8, 8, dtype=np.float64), random(3, 3, 8, 16, dtype=np.float64)),
    ),
    "bfloat16": (conv, (random(1, 5, 6, 8, dtype=ml_dtypes.bfloat16), random(3, 3, 8, 16, dtype=ml_dtypes.bfloat16))),
    "five taps": (conv, (random(1, 7, 6, 8), random(5, 5, 8, 16))),
    "two taps": (conv, (random(1, 7, 6, 8), random(2, 2, 8, 16))),
    "a row of taps": (conv, (random(1, 4, 11, 8), random(1, 3, 8, 16))),
    "one dimension": (one_dimensional, (random(2, 13, 8), random(3, 8, 16))),
    "steps": (conv, (random(1, 5, 5, 32), random(3, 3, 32, 32))),
}
TESTED = ("steps",)  # with every kind of plan, the others with two


def traced(name):
    fn, arguments = CONVOLUTIONS[name]
    with jax.enable_x64(arguments[0].dtype == np.float64):
        trace = programs.trace(fn, *arguments)
        wide = [np.asarray(a, np.float64) for a in arguments]
    with jax.enable_x64(True):
        return trace, np.asarray(fn(*map(jnp.asarray, wide)))


def all_plans(program):
    form = patterns_winograd.match(program)
    assert form is not None
    found = sorted(
        winograd_candidates._tilings(program, form, programs.MACHINE), key=lambda item: (-item[1], str(item[0]))
    )
    return form, [plan for plan, _ in found]


def some(found, every):
    """The best of each number of points; of each loop order too, if ``every``."""
    kinds = {}
    for plan in found:
        kinds.setdefault((plan.points, plan.filters_first) if every else plan.points, plan)
    return list(kinds.values())


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_interpreted_and_compiled_kernels_convolve(name):
    trace, wanted = traced(name)
    program, operands = trace.program(), trace.operands()
    form, found = all_plans(program)
    dtype = program.outputs[0].dtype
    eps = float(ml_dtypes.finfo(dtype).eps)
    terms = math.prod(r.extent for r in program.phases[0].reds)
    scale = np.maximum(np.abs(wanted), np.sqrt(np.mean(wanted**2)))
    for number, plan in enumerate(some(found, name in TESTED)):
        scheduled = winograd.apply(program, form, plan)
        verify(scheduled)
        again = Program.from_json(scheduled.to_text())
        assert again == scheduled and again.digest == scheduled.digest
        # The float32 transforms lose digits, but a 16-bit result only its own rounding.
        limit = 8 * math.sqrt(terms) * eps if dtype != "bfloat16" else eps
        (got,) = interpret(scheduled, operands)
        assert np.max(np.abs(np.asarray(got, np.float64) - wanted) / scale) <= limit
        order = (Schedule(), Schedule(1, backward=True), Schedule(1, threads=2))[number % 3]
        (run,) = Launcher(kernel_for(scheduled)).run(operands, order, poison=0xFF)  # unwritten results are NaN
        assert np.max(np.abs(np.asarray(run, np.float64) - wanted) / scale) <= limit


@pytest.mark.parametrize("points", [4, 6])
def test_what_is_not_finite_stays_where_it_is(points):
    x, w = random(1, 11, 10, 8), random(3, 3, 8, 16)
    x[0, 4, 4, 1], x[0, 9, 2, 3], x[0, 0, 9, 0] = np.nan, np.inf, 1e38
    w[1, 1, 0, 5] = 1e20
    trace = programs.trace(conv, x, w)
    program = trace.program()
    form, found = all_plans(program)
    plan = next(p for p in found if p.points == points and math.prod(n for _, n in p.tiles) <= 8)
    scheduled = winograd.apply(program, form, plan)
    (direct,) = interpret(program, trace.operands())
    (run,) = Launcher(kernel_for(scheduled)).run(trace.operands(), poison=0xFF)
    for got in (run, interpret(scheduled, trace.operands())[0]):
        np.testing.assert_array_equal(np.isnan(got), np.isnan(direct))
        np.testing.assert_array_equal(np.isinf(got), np.isinf(direct))
        assert 0 < np.isnan(got).sum() < got.size / 2


REFUSED = {
    "strided": (lambda x, w: conv(x, w, strides=(2, 2)), (random(1, 9, 9, 8), random(3, 3, 8, 16))),
    "strided along one": (lambda x, w: conv(x, w, strides=(1, 2)), (random(1, 9, 9, 8), random(3, 3, 8, 16))),
    "dilated": (lambda x, w: conv(x, w, dilation=(2, 2)), (random(1, 9, 9, 8), random(3, 3, 8, 16))),
    "transposed": (
        lambda x, w: conv(x, w, lhs=(2, 2), padding=[(1, 1), (1, 1)]),
        (random(1, 9, 9, 8), random(3, 3, 8, 16)),
    ),
    "depthwise": (lambda x, w: conv(x, w, groups=16), (random(1, 9, 9, 16), random(3, 3, 1, 16))),
    "groups": (lambda x, w: conv(x, w, groups=2), (random(1, 9, 9, 16), random(3, 3, 8, 16))),
    "one tap": (conv, (random(1, 9, 9, 8), random(1, 1, 8, 16))),
    "channels first": (
        lambda x, w: conv(x, w, layout=("NCHW", "OIHW", "NCHW")),
        (random(1, 8, 9, 9), random(16, 8, 3, 3)),
    ),
    "product": (lambda a, b: a @ b, (random(9, 8), random(8, 16))),
    "sum": (lambda x: x.sum(1), (random(9, 8),)),
    "softmax": (jax.nn.softmax, (random(9, 8),)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_programs_are_left_alone(name):
    fn, arguments = REFUSED[name]
    program = programs.trace(fn, *arguments).program()
    assert winograd_candidates.candidates(program, programs.MACHINE) == []


def test_seven_taps_have_no_points():
    program = programs.trace(conv, random(1, 9, 9, 8), random(7, 7, 8, 16)).program()
    assert winograd_candidates.candidates(program, programs.MACHINE) == []


@pytest.mark.parametrize("precision", ["high", "highest", lax.Precision.HIGHEST])
def test_precision_that_was_asked_for_is_kept(precision):
    def call(x, w):
        return lax.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), precision=precision
        )

    program = programs.trace(call, random(1, 28, 28, 64), random(3, 3, 64, 64)).program()
    assert winograd_candidates.candidates(program, programs.MACHINE) == []
    default = programs.trace(conv, random(1, 28, 28, 64), random(3, 3, 64, 64)).program()
    assert winograd_candidates.candidates(default, programs.MACHINE)


LAYERS = [
    (1, 56, 64, 64),
    (1, 28, 128, 128),
    (1, 14, 256, 256),
    (1, 7, 512, 512),
    (8, 7, 512, 512),
    (1, 224, 64, 64),
    (2, 15, 96, 80),
    (1, 12, 100, 200),
]


def layer(batch, size, channels, features):
    shapes = ((batch, size, size, channels), (3, 3, channels, features))
    return programs.trace(conv, *(np.zeros(s, np.float32) for s in shapes)).program()


@pytest.mark.parametrize("shape", LAYERS)
def test_candidates_of_large_layers(shape):
    program = layer(*shape)
    found = winograd_candidates.candidates(program, programs.MACHINE)
    assert 1 <= len(found) <= winograd_candidates.MOST
    scores = [score for _, score in found]
    assert scores[0] == max(scores) and min(scores) > 1.0
    assert len({p.digest for p, _ in found}) == len(found)
    points = [dict(p.params)["points"] for p, _ in found]
    assert len(set(points[:2])) == len(points[:2]) or len(set(points)) == 1
    for scheduled, _ in found:
        verify(scheduled)
        assert scheduled.template == "winograd" and scheduled.tiles >= programs.MACHINE.threads
        product = scheduled.phases[2]
        unroll = math.prod(a.unroll for a in product.axes)
        assert unroll <= winograd_candidates.SPILL
        params = dict(scheduled.params)
        assert params["features"] <= shape[3] and shape[3] % params["features"] == 0
        assert scheduled.scratch_bytes < 8 << 20


def test_the_direct_form_stays_first_and_both_are_measured():
    program = layer(1, 28, 128, 128)
    for limit in (2, 4, 16):
        found = cpu_candidates.candidates(program, programs.MACHINE, limit, 10.0)
        assert len(found) <= limit
        assert [p.template for p, _ in found[:2]] == ["convolution", "winograd"]
        assert all(0 < score <= 1 for _, score in found)


@pytest.mark.parametrize("shape", [(1, 28, 128, 128), (1, 7, 512, 512)])
def test_the_bound_counts_this_kernels_multiplications(shape):
    program, arch = layer(*shape), describe_cpu()
    direct = work_of(program, arch).flop["float32"]
    for scheduled, _ in winograd_candidates.candidates(program, programs.MACHINE):
        params = dict(scheduled.params)
        tiles = math.prod(-(-shape[1] // m) for m in params["outputs"]) * shape[0]
        products = 2 * params["points"] ** 2 * tiles * shape[2] * shape[3]
        flop = work_of(scheduled, arch).flop["float32"]
        assert products <= flop < direct
        checked = scheduled.phases[4]
        assert flop - products <= 4 * math.prod(a.extent for a in (*checked.axes, *checked.reds)) + 0.25 * products


def test_inputs_are_transformed_once_or_filters_are():
    program = layer(1, 28, 128, 128)
    form, found = all_plans(program)
    for plan in found[::11]:
        scheduled = winograd.apply(program, form, plan)
        filters, inputs = scheduled.phases[0], scheduled.phases[1]
        repeated = inputs if plan.filters_first else filters
        assert repeated.once == () or len(scheduled.serial) <= 2
        assert all(axis in scheduled.serial for axis in (*filters.once, *inputs.once))
        for made, name in ((filters, "filters"), (inputs, "inputs")):  # kept for later steps only if made once
            steps = {i for store in made.stores for i in store.address.axes() if i == "cs"}
            assert bool(steps) == bool(made.once and "cs" in scheduled.serial), name
        last = [a.name for a in scheduled.phases[2].axes if a.name == "cs"]
        assert list(scheduled.phases[3].last) == last


def test_plans_are_deterministic():
    program = layer(1, 14, 256, 256)
    one, two = (winograd_candidates.candidates(program, programs.MACHINE) for _ in range(2))
    assert [(p.digest, s) for p, s in one] == [(p.digest, s) for p, s in two]


def example(points):
    trace, _ = traced("block")
    program = trace.program()
    form, found = all_plans(program)
    return winograd.apply(program, form, next(p for p in found if p.points == points))


@pytest.mark.parametrize("points", [4])
def test_golden_text(points, golden):
    golden(f"winograd_{points}.txt", program_text(example(points)))


def test_golden_source(golden):
    golden("source/winograd.txt", emit_source(example(6)).text)


def test_a_failed_check_alone_runs_the_direct_form():
    program = example(6)
    names = [p.name for p in program.phases]
    assert names[:5] == [f"winograd.{n}" for n in ("filter", "input", "product", "output", "check")]
    assert [p.when for p in program.phases] == [""] * 5 + [winograd.FLAG]
    trace, _ = traced("block")
    always = replace(program, phases=(*program.phases[:5], replace(program.phases[5], when="", stores=())))
    assert np.isfinite(interpret(always, trace.operands())[0]).all()


def test_blocks_cover_every_tile():
    for counts, target in itertools.product(
        [[("a", 7), ("b", 5)], [("n", 3), ("a", 2), ("b", 2)], [("a", 56)]], (1, 4, 9, 60)
    ):
        found = dict(winograd_candidates._block(counts, target))
        assert all(1 <= found[name] <= count for name, count in counts)
        assert math.prod(found.values()) <= max(1, target)
