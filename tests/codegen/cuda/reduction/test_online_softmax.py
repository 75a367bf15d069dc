"""Online softmax of long rows: against float64 and against two passes, through the PTX machine."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.gpu_kernels import training_operations
from benchmarks.networks import modes
from jcuts.base.errors import CompileRejected
from jcuts.base.settings import Settings
from jcuts.codegen.cuda import compile as compiler
from jcuts.codegen.cuda.toolchain.image import Image
from jcuts.kernel_ir.program import Program
from jcuts.kernel_ir.verify import read
from jcuts.pipeline import kernel_selection, measured_partition
from jcuts.schedule.gpu import candidates as gpu_candidates
from jcuts.schedule.gpu.families import FAMILIES, family_of
from jcuts.schedule.gpu.kernel_time import kernel_time
from jcuts.schedule.gpu.machine import GpuMachine, scheduled
from jcuts.schedule.gpu.reduction.online_softmax import LONG_ROW, MOST, STREAMING
from jcuts.trace import jaxapi
from tests import gpu_acceptance, programs
from tests.codegen.cuda.gemm.test_mma import SM90, compiled
from tests.ptx import machine as ptx_machine

MACHINE = GpuMachine(132)
INF = float("inf")


def cross_entropy(x, labels):
    """The loss of every row and its gradient, with the sum over the gradient of the picked logit."""
    maximum = jax.lax.stop_gradient(jnp.max(x, -1, keepdims=True))
    weights = jnp.exp(x - maximum)
    total = jnp.sum(weights, -1, keepdims=True)
    picked = jnp.where(jnp.arange(x.shape[-1])[None, :] == labels[:, None], -0.25, 0.0)
    gradient = -jnp.sum(picked, -1, keepdims=True) / total * weights + picked
    return maximum + jnp.log(total), gradient


def statistics(x):
    """Sums, positions and exponentials of one row: accumulators of several kinds beside the running maximum."""
    maximum = jnp.max(x, -1, keepdims=True)
    weights = jnp.exp(x - maximum)
    return jnp.sum(weights, -1), jnp.sum(jnp.tanh(x), -1), jnp.argmax(x, -1), x - maximum


FUNCTIONS = {
    "softmax": jax.nn.softmax,
    "log softmax": jax.nn.log_softmax,
    "logsumexp": lambda x: jax.nn.logsumexp(x, -1),
    "cross-entropy": cross_entropy,
    "statistics": statistics,
    "scaled": lambda x: jax.nn.softmax(x * 0.125 + 1.0),
}


def arguments_of(name, x):
    rows, length = x.shape
    labels = np.arange(rows, dtype=np.int32) * 7919 % length
    return (x, labels) if name == "cross-entropy" else (x,)


def rows_of(shape, dtype=np.float32):
    return np.array(jnp.asarray(np.random.default_rng(0).standard_normal(shape) * 4, dtype))


def special_rows(length):
    """Rows with infinities and NaN in the first, a middle and the last points, or everywhere."""
    rows = [rows_of((length,)) for _ in range(12)]
    rows[0][:] = -INF
    rows[1][length // 2] = INF
    rows[2][-1] = np.nan
    rows[3][:] = -INF
    rows[3][length - 3] = 1.5
    rows[4][: length - 2] = -INF
    rows[5][0] = rows[5][-1] = INF
    rows[6][:] = -INF
    rows[6][1] = np.nan
    rows[7][5], rows[7][-2] = INF, -INF
    rows[8][:] = INF
    rows[9][3], rows[9][-1] = INF, np.nan
    rows[10][:] = 3e38
    rows[11][:] = np.where(np.arange(length) % 3, -3e38, -INF)
    return np.stack(rows)


def online(program, team, vector, chunks, *more, threads=0):
    params = (("team", team), ("vector", vector), ("chunks", chunks), ("online", 1), *more)
    return scheduled(program, "team", threads or team, *params)


def two_passes(program, team, vector, chunks):
    return scheduled(program, "team", team, ("team", team), ("vector", vector), ("chunks", chunks))


def results(program, operands):
    """A kernel's results, which two runs give with equal bits."""
    kernel, ptx = compiler.compile_program(program, SM90), compiler.ptx_of(program, SM90)
    (launch,) = Image.unpack(kernel.object_code).launches
    assert launch.resources.stack == 0
    found, again = (ptx_machine.run_kernel(ptx, kernel, operands) for _ in range(2))
    for one, other in zip(found, again, strict=True):
        np.testing.assert_array_equal(one, other)
    return found


def in_float64(fn, arguments):
    def wide(a):
        return jnp.asarray(np.asarray(a, np.float64) if a.dtype != np.int32 else a)

    with jax.enable_x64(True):
        found = fn(*(wide(a) for a in arguments))
        return [np.asarray(r) for r in (found if isinstance(found, tuple) else (found,))]


def ordered(traced, wanted):
    """Results in the order of the program's."""
    names = {number: var for var, number in traced.graph.of_var.items()}
    places = {var: k for k, var in enumerate(traced.closed.jaxpr.outvars)}
    return [wanted[places[names[t]]] for t in traced.graph.subset_outputs(traced.everything)]


SCHEDULES = {
    "whole vectors": ((3, 5000), 128, 4, 2),
    "odd": ((3, 4999), 256, 1, 8),
    "pairs": ((2, 4098), 512, 2, 2),
    "one row": ((1, 5000), 1024, 4, 1),
    "more threads than points": ((3, 300), 512, 4, 1),
    "one access": ((5, 1000), 256, 4, 1),
    "whole chunks": ((2, 4096), 256, 4, 4),
}


@compiled
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_results(name, schedule):
    shape, team, vector, chunks = SCHEDULES[schedule]
    arguments = arguments_of(name, rows_of(shape))
    traced = programs.trace(FUNCTIONS[name], *arguments)
    found = results(online(traced.program(), team, vector, chunks), traced.operands())
    for got, want in zip(found, ordered(traced, in_float64(FUNCTIONS[name], arguments)), strict=True):
        assert got.shape == want.shape
        assert np.abs(got.astype(np.float64) - want).max() <= 1e-6 * np.abs(want).max()


@compiled
@pytest.mark.parametrize("name", ["softmax", "cross-entropy"])
def test_streaming_stores_write_the_same(name):
    traced = programs.trace(FUNCTIONS[name], *arguments_of(name, rows_of((2, 3000))))
    made = [online(traced.program(), 128, 4, 2, *more) for more in ((), (STREAMING,))]
    for one, other in zip(*(results(program, traced.operands()) for program in made), strict=True):
        np.testing.assert_array_equal(one, other)
    plain, streaming = (compiler.ptx_of(program, SM90) for program in made)
    assert plain.count("st.global.v4.b32") == streaming.count("st.global.cs.v4.b32") > 0
    assert "st.global.cs" not in plain and "st.global.v" not in streaming


@compiled
def test_several_rows_of_a_block():
    x = rows_of((13, 210))
    traced = programs.trace(jax.nn.softmax, x)
    (got,) = results(online(traced.program(), 32, 2, 2, threads=128), traced.operands())
    (want,) = in_float64(jax.nn.softmax, (x,))
    assert np.abs(got - want).max() <= 1e-6 * want.max()


@compiled
@pytest.mark.parametrize(("length", "team", "vector", "chunks"), [(1100, 128, 4, 2), (1101, 256, 1, 4)])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_infinities_and_nan_are_those_of_two_passes(name, length, team, vector, chunks):
    traced = programs.trace(FUNCTIONS[name], *arguments_of(name, special_rows(length)))
    program = traced.program()
    found = results(online(program, team, vector, chunks), traced.operands())
    for got, want in zip(found, results(two_passes(program, team, vector, chunks), traced.operands()), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-6)


@compiled
@pytest.mark.parametrize("name", ["softmax", "log softmax", "logsumexp"])
def test_16_bit_operands(name):
    def fn(x):
        return FUNCTIONS[name](x.astype(jnp.float32)).astype(jnp.bfloat16)

    x = rows_of((3, 5000), jnp.bfloat16)
    traced = programs.trace(fn, x)
    (got,) = results(online(traced.program(), 128, 8, 1), traced.operands())
    (want,) = in_float64(FUNCTIONS[name], (x,))
    assert (np.abs(got.astype(np.float64) - want) <= 2.0**-8 * np.abs(want) + 1e-12).all()


@compiled
def test_float64():
    with jax.enable_x64(True):
        x = np.asarray(rows_of((2, 1030)), np.float64)
        traced = programs.trace(jax.nn.softmax, x)
        program = online(traced.program(), 128, 2, 2)
    (got,) = results(program, traced.operands())
    (want,) = in_float64(jax.nn.softmax, (x,))
    assert np.abs(got - want).max() <= 1e-14 * want.max()


# -- schedules --------------------------------------------------------------------------------------------------------
LONG = {
    "softmax": (4096, 32000),
    "log softmax": (1000, 50257),
    "logsumexp": (64, 131072),
    "cross-entropy": (4096, 32000),
}


def long_program(name) -> Program:
    return programs.trace(FUNCTIONS[name], *arguments_of(name, np.broadcast_to(np.float32(0), LONG[name]))).program()


@pytest.mark.parametrize("name", LONG)
def test_both_kinds_are_among_the_first_candidates(name):
    found = gpu_candidates.candidates(long_program(name), MACHINE, gpu_candidates.MOST)
    kinds = [family_of(made).name for made, _ in found]
    assert kinds.count("online_softmax") >= 3 and kinds.count("row_reduction") >= 2
    assert kinds[0] == "online_softmax"
    streaming = [STREAMING[0] in dict(made.params) for made, _ in found if family_of(made).name == "online_softmax"]
    assert set(streaming) == ({False} if name == "logsumexp" else {False, True})


@compiled
@pytest.mark.parametrize("name", LONG)
def test_no_schedule_spills(name):
    found = list(FAMILIES["online_softmax"].schedules(long_program(name), MACHINE))
    assert len(found) == MOST
    for made, _ in found:
        compiler.compile_program(made, SM90)


@pytest.mark.parametrize("length", [LONG_ROW // 4, LONG_ROW // 4 + 4])
def test_short_rows_have_no_schedule_of_it(length):
    program = programs.trace(jax.nn.softmax, np.zeros((512, length), np.float32)).program()
    found = list(FAMILIES["online_softmax"].schedules(program, MACHINE))
    assert bool(found) == (length * 4 > LONG_ROW)


def test_rows_that_the_cache_cannot_hold_are_read_from_memory_again():
    """More blocks at once, more rows between their two reads; a result per row needs no second one."""
    program = long_program("softmax")
    few, many = (kernel_time(online(program, team, 4, 4), MACHINE) for team in (1024, 128))
    moved = program.inputs[0].bytes + program.outputs[0].bytes
    assert few.compulsory == many.compulsory == moved
    assert 1.1 * few.seconds < many.seconds
    streaming = kernel_time(online(program, 512, 4, 4, STREAMING), MACHINE)
    assert streaming.seconds < kernel_time(online(program, 512, 4, 4), MACHINE).seconds
    once = programs.trace(FUNCTIONS["logsumexp"], np.broadcast_to(np.float32(0), LONG["softmax"])).program()
    one, other = (kernel_time(online(once, team, 4, 4), MACHINE).seconds for team in (1024, 128))
    assert other < 1.05 * one


@compiled
def test_schedules_of_other_programs_are_refused():
    program = online(programs.trace(lambda x: x - x.mean(-1, keepdims=True), rows_of((3, 5000))).program(), 128, 4, 2)
    with pytest.raises(CompileRejected, match="no maximum"):
        compiler.ptx_of(program, SM90)


# -- the tuner's rule -------------------------------------------------------------------------------------------------
@compiled
def test_the_tuner_accepts_a_cross_entropy(monkeypatch, tmp_path):
    for module in (kernel_selection, measured_partition):
        monkeypatch.setattr(module, "LEAST_MOVED", 0)
    form = training_operations.cross_entropy(3, 5000, False).program.form(closed=False)
    closed = jaxapi.closed_jaxpr_of(form.function, *form.arguments)
    seen = []
    for number, (problem, region) in enumerate(modes.pretended_regions(closed, Settings())):
        program = replace(read(problem.candidates[0].payload), params=())
        made = FAMILIES["online_softmax"].schedules(program, MACHINE)
        texts = [
            replace(problem.candidates[0], payload=one.to_text(), label=f"online {k}")
            for k, (one, _) in enumerate(made)
        ]
        folder = tmp_path / str(number)
        folder.mkdir()
        seen += gpu_acceptance.verdicts(replace(problem, candidates=tuple(texts)), region, folder, most=len(texts))
    assert len(seen) == MOST and [verdict for verdict in seen if verdict.rejected] == []
