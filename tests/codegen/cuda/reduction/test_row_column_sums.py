"""Row reductions with column sums: gradients of norms against float64, through the PTX machine."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jcuts.base.errors import CompileRejected, Refusal
from jcuts.codegen.cuda import compile as compiler
from jcuts.codegen.cuda.split_kernels import split_into_kernels
from jcuts.codegen.cuda.toolchain.image import Image
from jcuts.kernel_ir.interpret import interpret
from jcuts.kernel_ir.program import Program
from jcuts.kernel_ir.verify import verify
from jcuts.lower.patterns.row_column_sums import register_values, split_phases
from jcuts.lower.reduction.row_column_sums import lower_region_or_sums
from jcuts.schedule.gpu import candidates as gpu_candidates
from jcuts.schedule.gpu.families import family_of
from jcuts.schedule.gpu.kernel_time import kernel_time
from jcuts.schedule.gpu.launch_shapes import row_groups
from jcuts.schedule.gpu.machine import GpuMachine, scheduled
from tests import programs
from tests.codegen.cuda.gemm.test_mma import SM90, compiled
from tests.ptx import machine as ptx_machine

MACHINE = GpuMachine(132)
SHAPES = [(2, 48), (1, 3, 48), (37, 100), (65, 768), (20, 1024), (7, 3, 36), (41, 7)]


def layer_norm(x, scale, offset):
    x = x - jnp.mean(x, -1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * scale + offset


def rms_norm(x, scale, offset):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * scale + offset


def gradient_of(norm):
    return lambda x, scale, offset, g: jax.vjp(norm, x, scale, offset)[1](g)


def row_sums(x, scale, offset, g):
    """A row reduction, whose one phase has a barrier of its own, beside column sums; results of its own."""
    total = jnp.sum(x, -1, keepdims=True)
    return x * total, jnp.sum(x * g, tuple(range(x.ndim - 1))) * scale, jnp.sum(jnp.tanh(total) * x, 0)


def softmax_sums(x, scale, offset, g):
    """Exponentials that several phases read, and their column sums."""
    y = jax.nn.softmax(x)
    return y * g, jnp.sum(y, 0) + offset


def only_column_sums(x, scale, offset, g):
    """Nothing as large as the rows is a result; a maximum of rows."""
    return jnp.sum((x - jnp.max(x, -1, keepdims=True)) * g, 0), jnp.sum(jnp.abs(x), 0) * scale


OTHERS = {"row sums": row_sums, "softmax": softmax_sums, "only column sums": only_column_sums}
FUNCTIONS = {"layer norm": gradient_of(layer_norm), "RMS norm": gradient_of(rms_norm)}


def arguments_of(shape, dtype=np.float32):
    rng = np.random.default_rng(0)
    x, g = (rng.standard_normal(shape) for _ in range(2))
    scale, offset = (rng.standard_normal(shape[-1]) for _ in range(2))
    return tuple(jnp.asarray(a, dtype) for a in (x + 0.5, scale, offset, g))


def program_of(fn, arguments) -> Program:
    traced = programs.trace(fn, *arguments)
    built = lower_region_or_sums(traced.graph, traced.everything)
    assert isinstance(built, Program), str(built)
    verify(built)
    assert Program.from_json(built.to_text()).digest == built.digest
    return built


def in_float64(fn, arguments):
    with jax.enable_x64(True):
        return [np.asarray(r) for r in fn(*(jnp.asarray(np.asarray(a, np.float64)) for a in arguments))]


def schedule(program, team, threads, vector, blocks):
    pieces = -(-split_phases(program).columns // (team * vector))
    params = (("team", team), ("vector", vector), ("chunks", pieces), ("sums", len(program.phases[-1].accs)))
    return scheduled(program, "team_columns", threads, *params, ("blocks", blocks))


def ordered(traced, results):
    """Results in the order of the region's."""
    names = {number: var for var, number in traced.graph.of_var.items()}
    places = {var: k for k, var in enumerate(traced.closed.jaxpr.outvars)}
    return [results[places[names[t]]] for t in traced.graph.subset_outputs(traced.everything)]


def check(fn, arguments, team, threads, vector, blocks, limit=3e-6):
    traced = programs.trace(fn, *arguments)
    program = schedule(program_of(fn, arguments), team, threads, vector, blocks)
    kernel, ptx = compiler.compile_program(program, SM90), compiler.ptx_of(program, SM90)
    image = Image.unpack(kernel.object_code)
    assert len(image.launches) == 2 and image.launches[0].grid[0] == row_groups(program)[1] <= blocks
    found, again = (ptx_machine.run_kernel(ptx, kernel, traced.operands()) for _ in range(2))
    for got, other, want in zip(found, again, ordered(traced, in_float64(fn, arguments)), strict=True):
        np.testing.assert_array_equal(got, other)
        assert got.shape == want.shape
        assert np.abs(got.astype(np.float64) - want).max() <= limit * np.abs(want).max()


@compiled
@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradients_of_norms(shape, name, blocks):
    width = shape[-1]
    team = 8 if width < 50 else 32 if width == 100 else 64 if width == 768 else 128
    vector = 4 if width % 4 == 0 else 1
    check(FUNCTIONS[name], arguments_of(shape), team, max(team, 64), vector, blocks)


@compiled
@pytest.mark.parametrize(
    ("team", "threads", "vector"), [(8, 64, 4), (16, 128, 2), (32, 32, 4), (32, 128, 1), (64, 64, 2), (256, 256, 1)]
)
def test_every_mapping_of_threads(team, threads, vector):
    check(FUNCTIONS["RMS norm"], arguments_of((29, 132)), team, threads, vector, 4)


@compiled
@pytest.mark.parametrize(("team", "threads"), [(8, 64), (64, 64)])
@pytest.mark.parametrize("name", OTHERS)
def test_other_reductions_of_rows_and_results_behind_column_sums(name, team, threads):
    check(OTHERS[name], arguments_of((23, 68)), team, threads, 4, 3)


@compiled
@pytest.mark.parametrize("name", FUNCTIONS)
def test_bfloat16_is_summed_in_float32(name):
    """The offset's gradient is the sum of what is stored in bfloat16: rounded once, when it is stored."""
    arguments = arguments_of((300, 64), jnp.bfloat16)
    check(FUNCTIONS[name], arguments, 8, 64, 8, 3, limit=2e-2)
    traced = programs.trace(FUNCTIONS[name], *arguments)
    program = schedule(program_of(FUNCTIONS[name], arguments), 8, 64, 8, 3)
    kernel, ptx = compiler.compile_program(program, SM90), compiler.ptx_of(program, SM90)
    found = ptx_machine.run_kernel(ptx, kernel, traced.operands())
    want = np.asarray(arguments[3], np.float64).sum(0)
    errors = [np.abs(f.astype(np.float64) - want).max() / np.abs(want).max() for f in found if f.shape == want.shape]
    assert min(errors) <= 2.0**-8


@compiled
def test_schedules_that_do_not_fit_are_refused():
    program = program_of(FUNCTIONS["layer norm"], arguments_of((40, 1536)))
    with pytest.raises(CompileRejected, match="spills are not run"):
        compiler.compile_program(schedule(program, 8, 64, 4, 2), SM90)
    made = schedule(program, 64, 64, 4, 2)
    for name, value in (("team", 48), ("threads", 128), ("vector", 3), ("chunks", 1), ("sums", 1)):
        params = tuple((k, value if k == name else v) for k, v in made.params)
        with pytest.raises(CompileRejected):
            compiler.compile_program(replace(made, params=params), SM90)


@compiled
@pytest.mark.parametrize("shape", [(16384, 768), (4096, 4096)], ids=str)
def test_the_first_schedules_keep_everything_in_registers(shape):
    for fn in FUNCTIONS.values():
        kernel = compiler.compile_program(best_of(program_of(fn, arguments_of(shape)))[0][0], SM90)
        first, second = Image.unpack(kernel.object_code).launches
        assert first.resources.stack == second.resources.stack == 0


def best_of(program):
    return gpu_candidates.candidates(program, MACHINE, 8)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_summand_is_no_result(name):
    arguments = arguments_of((37, 100))
    program = program_of(FUNCTIONS[name], arguments)
    shapes = sorted(b.shape for b in program.outputs)
    assert shapes == [(37, 100), (100,), (100,)]
    kept = [b for b in program.locals if b.shape == (37, 100)]
    assert len(kept) == 1 and register_values(program) == 6  # x, g, scale; dx, two sums
    first, second = (part.program for part in split_into_kernels(schedule(program, 32, 64, 4, 3))[0])
    assert sum(b.shape == (37, 100) for b in first.outputs) == 1 and {b.shape for b in second.outputs} == {(100,)}


def test_what_only_the_second_kernel_reads_takes_no_registers():
    def updated(x, scale, offset, g):
        dx, dscale, doffset = FUNCTIONS["layer norm"](x, scale, offset, g)
        return dx, scale - 0.1 * dscale, offset - 0.1 * doffset

    program = program_of(updated, arguments_of((37, 100)))
    assert len(program.inputs) == 4 and register_values(program) == 6


@pytest.mark.parametrize("shape", [(2, 48), (37, 100)], ids=str)
@pytest.mark.parametrize("name", [*FUNCTIONS, *OTHERS])
def test_programs_and_their_kernels_compute_what_the_function_does(name, shape):
    fn = {**FUNCTIONS, **OTHERS}[name]
    arguments = arguments_of(shape)
    traced = programs.trace(fn, *arguments)
    program, operands = program_of(fn, arguments), traced.operands()
    wanted = ordered(traced, in_float64(fn, arguments))
    for got, want in zip(interpret(program, operands), wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5 * np.abs(want).max())
    parts, _ = split_into_kernels(schedule(program, 8, 64, 1, 2))
    memory = dict(zip((b.name for b in program.inputs), operands, strict=True))
    for part in parts:
        verify(part.program)
        made = interpret(part.program, [memory[b.name] for b in part.program.inputs])
        memory |= dict(zip((b.name for b in part.program.outputs), made, strict=True))
    for buffer, want in zip(program.outputs, wanted, strict=True):
        np.testing.assert_allclose(memory[buffer.name], want, rtol=1e-4, atol=1e-5 * np.abs(want).max())


def test_schedules_are_ranked_by_their_traffic():
    program = program_of(FUNCTIONS["layer norm"], arguments_of((16384, 768)))
    found = best_of(program)
    assert len(found) == 8
    for made, score in found:
        assert family_of(made).name == "row_column_sums" and 0 < score <= 1
        assert kernel_time(made, MACHINE).compulsory == sum(b.bytes for b in (*program.inputs, *program.outputs))
        share, groups = row_groups(made)
        assert (groups - 1) * share < 16384 <= groups * share and groups <= dict(made.params)["blocks"]
    many = schedule(program, 64, 64, 4, 16384)
    assert kernel_time(many, MACHINE).seconds > 1.5 * kernel_time(schedule(program, 64, 64, 4, 1056), MACHINE).seconds


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, s, o, g: (jnp.sum(x, 0), jnp.sum(x, 1) * jnp.sum(g, 1).max()),  # rows that are reduced again
        lambda x, s, o, g: (jnp.sum(x * jnp.sum(g, 0), -1), x),  # rows of what depends on column sums
        lambda x, s, o, g: (jnp.max(x, 0), jnp.sum(g, 1)),  # no sum
        lambda x, s, o, g: (jnp.sum((x - jnp.sum(x, 0)) * jnp.sum(x, -1, keepdims=True), 0), x),  # sums of sums
    ],
)
def test_other_regions_are_refused(fn):
    traced = programs.trace(fn, *arguments_of((12, 20)))
    assert isinstance(lower_region_or_sums(traced.graph, traced.everything), Refusal)


def test_rows_that_no_block_keeps_are_refused():
    for width, fits in ((4096, True), (8192, False)):
        traced = programs.trace(FUNCTIONS["layer norm"], *arguments_of((3, width)))
        assert isinstance(lower_region_or_sums(traced.graph, traced.everything), Program) is fits
