"""Back-to-back GEMMs in one kernel against float64, through the PTX machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jcuts.base.errors import CompileRejected, Refusal
from jcuts.codegen.cuda import compile as compiler
from jcuts.codegen.cuda.launch_source import emit_source
from jcuts.codegen.cuda.toolchain.target import CudaTarget
from jcuts.lower.excess_precision import drop_bf16_round_trips
from jcuts.lower.patterns.b2b_gemm import lower_b2b_gemm, match_b2b_gemm
from jcuts.schedule.gpu.b2b_gemm import schedules
from jcuts.schedule.gpu.b2b_gemm.tile import B2bGemmTile
from jcuts.schedule.gpu.machine import GpuMachine
from tests import programs
from tests.codegen.cuda.assembling import assert_most_assemble
from tests.ptx import machine as ptx_machine
from tests.ptx.tensor_core import TensorFault, round_tf32

MACHINE = GpuMachine(132)
SM80, SM90 = CudaTarget((8, 0)), CudaTarget((9, 0))
compiled = pytest.mark.cuda_compilers
HALF = jnp.bfloat16
LIMITS = {4: (2e-6, 2e-3), 2: (4e-6, 3e-2)}
"""Allowed errors over the root mean square, by bytes of an operand: of most results (sums of float32), and of those for
which a hidden value, less exact here than in float64, rounds the other way."""


@dataclass(frozen=True)
class Mlp:
    """An MLP: rows of the input, its columns, hidden columns, results; weights as (columns, k)?

    ``tail``: of (result, input, a vector of the results' columns, one of the rows); ``stored``: the type of results.
    """

    rows: tuple[int, ...]
    inputs: int
    hidden: int
    results: int
    act: Callable = jax.nn.relu
    along: bool = False
    tail: Callable = lambda y, x, c, r: y + c
    dtype: type = np.float32
    stored: type = np.float32

    def arguments(self) -> list[np.ndarray]:
        """Random operands."""
        w, v = (self.inputs, self.hidden), (self.hidden, self.results)
        w, v = (w[::-1], v[::-1]) if self.along else (w, v)
        shapes = ((*self.rows, self.inputs), w, (self.hidden,), v, (self.results,), (*self.rows, 1))
        found = [np.random.default_rng([k, *s]).standard_normal(s).astype(np.float32) for k, s in enumerate(shapes)]
        found[1] /= np.sqrt(np.float32(self.inputs))
        found[3] /= np.sqrt(np.float32(self.hidden))
        return [a.astype(self.dtype) if k in (0, 1, 3) else a for k, a in enumerate(found)]

    def __call__(self, x, w, b, v, c, r, between=None):
        wide = jnp.float64 if x.dtype == jnp.float64 else jnp.float32
        w, v = (w.T, v.T) if self.along else (w, v)
        between = between or (lambda y: y.astype(self.dtype))
        hidden = between(self.act(product(x, w, wide) + b))
        found = self.tail(product(hidden, v, wide), x.astype(wide), c, r)
        return found if wide == jnp.float64 else found.astype(self.stored)


def product(x, w, wide):
    return jnp.einsum("...k,kn->...n", x, w, preferred_element_type=wide)


def program_of(layers, arguments, rounded=False):
    """The program of an MLP, with its weights known to be rounded or not."""
    traced = programs.trace(layers, *arguments)
    program = lower_b2b_gemm(traced.graph, traced.everything)
    assert not isinstance(program, Refusal), program
    shapes = {arguments[1].shape, arguments[3].shape}
    buffers = tuple(replace(b, tf32=rounded and b.shape in shapes) for b in program.buffers)
    return drop_bf16_round_trips(replace(program, buffers=buffers)), traced


def shape_of(program, *tile):
    found = match_b2b_gemm(program)
    assert not isinstance(found, Refusal), found
    return B2bGemmTile(found, *tile)


def operands_of(traced):
    numbers = [traced.graph.of_var[v] for v in traced.closed.jaxpr.invars]
    return [traced.arguments[numbers.index(k)] for k in traced.graph.subset_inputs(traced.everything)]


def results(program, traced, target=SM90):
    kernel = compiler.compile_program(program, target)
    (found,) = ptx_machine.run_kernel(compiler.ptx_of(program, target), kernel, operands_of(traced))
    return found


def wanted(layers, arguments, even=True):
    """The MLP in float64 of operands that are rounded where the kernel rounds them."""

    def rounded(x):
        x = np.asarray(x)
        x = round_tf32(x.astype(np.float32), even=even) if layers.dtype == np.float32 else x.astype(HALF)
        return jnp.asarray(x.astype(np.float64))

    with jax.enable_x64(True):
        wide = [jnp.asarray(a.astype(np.float64)) for a in arguments]
        x, w, b, v, c, r = (rounded(a) if k in (0, 1, 3) else wide[k] for k, a in enumerate(arguments))
        exact = replace(layers, tail=lambda y, _, c, r: layers.tail(y, wide[0], c, r))
        return np.asarray(exact(x, w, b, v, c, r, between=rounded))


def compare(layers, got, want):
    most, other_way = LIMITS[np.dtype(layers.dtype).itemsize]
    if layers.stored == HALF:
        most = other_way
    assert got.shape == want.shape and got.dtype == layers.stored
    error = np.abs(got.astype(np.float64) - want) / np.sqrt(np.mean(np.square(want)))
    assert np.quantile(error, 0.9) < most and error.max() < other_way, (np.quantile(error, 0.9), error.max())


def gelu(x):
    return jax.nn.gelu(x, approximate=False)


def residual(y, x, c, r):
    return x + (y + c) * 0.5


def per_row(y, x, c, r):
    return y * r + c


CASES = {
    "odd": Mlp((77,), 20, 36, 25),
    "gelu, odd": Mlp((5, 13), 12, 52, 44, gelu, along=True),
    "residual": Mlp((2, 7, 6), 24, 96, 24, gelu, tail=residual),
    "silu, a factor per row": Mlp((70,), 40, 64, 33, jax.nn.silu, tail=per_row),
    "tanh gelu, along k": Mlp((40,), 16, 40, 16, jax.nn.gelu, along=True),
    "one chunk": Mlp((33,), 8, 16, 8, jnp.tanh),
    "sigmoid": Mlp((130,), 9, 20, 17, jax.nn.sigmoid),
    "leaky": Mlp((64,), 32, 128, 72, jax.nn.leaky_relu),
}
HALVES = {
    "odd": Mlp((77,), 20, 36, 26, dtype=HALF),
    "gelu": Mlp((5, 13), 12, 52, 44, gelu, along=True, dtype=HALF, stored=HALF),
    "residual": Mlp((2, 7, 6), 24, 96, 24, gelu, tail=residual, dtype=HALF, stored=HALF),
    "silu, a factor per row": Mlp((70,), 40, 64, 34, jax.nn.silu, tail=per_row, dtype=HALF),
    "one chunk": Mlp((33,), 16, 16, 8, jnp.tanh, dtype=HALF, stored=HALF),
    "sigmoid": Mlp((130,), 10, 20, 18, jax.nn.sigmoid, dtype=HALF),
}
TILES = [
    (16, 16, (1, 1), (1, 1)),
    (32, 32, (2, 2), (1, 4)),
    (64, 64, (2, 2), (4, 1)),
    (64, 32, (4, 1), (2, 2), True),
    (32, 128, (1, 4), (2, 2)),
]


@compiled
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("layers", [*CASES.values(), *HALVES.values()], ids=[*CASES, *(f"bf16 {n}" for n in HALVES)])
def test_mlps(layers, tile):
    arguments = layers.arguments()
    program, traced = program_of(layers, arguments)
    shape = shape_of(program, *tile)
    if shape.held and not shape.fits:  # too much to hold
        shape = replace(shape, held=False)
    assert shape.fits
    compare(layers, results(schedules.of(program, shape), traced), wanted(layers, arguments))


def check_rows_stay_apart(layers, scheduled):
    """NaN and infinity in three of 77 rows of 20 columns reach no others. Args: scheduled: program -> its schedules."""
    arguments = layers.arguments()
    arguments[2] = np.abs(arguments[2]) + np.float32(9)  # 1 / 0 only where there is no column
    arguments[0][3, 5], arguments[0][40, 0], arguments[0][76, 19] = np.nan, np.inf, -np.inf
    program, traced = program_of(layers, arguments)
    with np.errstate(all="ignore"):
        want = np.asarray(layers(*arguments))
        for made in scheduled(program):
            got = results(made, traced)
            np.testing.assert_array_equal(np.isfinite(got), np.isfinite(want))
            assert not np.isfinite(got[3]).any() and np.isfinite(np.delete(got, (3, 40, 76), 0)).all()


@compiled
@pytest.mark.parametrize("dtype", [np.float32, HALF])
def test_numbers_that_are_not_finite_stay_in_their_rows(dtype):
    """Neither rows beyond the last, nor hidden columns beyond the last, whose epilogue is not finite, meet others."""
    layers = Mlp((77,), 20, 36, 26, act=lambda y: 1 / y, dtype=dtype)
    check_rows_stay_apart(layers, lambda p: [schedules.of(p, shape_of(p, *tile)) for tile in TILES[1:4]])


@compiled
def test_rounded_weights_and_older_units():
    layers = CASES["residual"]
    arguments = layers.arguments()
    program, traced = program_of(layers, arguments)
    program = schedules.of(program, shape_of(program, *TILES[1]))
    compare(layers, results(program, traced, SM80), wanted(layers, arguments, even=False))
    for place in (1, 3):
        arguments[place] = round_tf32(arguments[place])
    program, traced = program_of(layers, arguments, rounded=True)
    program = schedules.of(program, shape_of(program, *TILES[1]))
    compare(layers, results(program, traced), wanted(layers, arguments))
    kernel, ptx = compiler.compile_program(program, SM90), compiler.ptx_of(program, SM90)
    for change, fault, what in (
        (("cp.async.wait_group 0;", "cp.async.wait_group 1;"), TensorFault, "under way"),
        (("cvt.rn.tf32.f32", "mov.b32"), TensorFault, "not rounded"),
        (("bar.sync 0;", ""), ptx_machine.Fault, "race"),
    ):
        with pytest.raises(fault, match=what):
            ptx_machine.run_kernel(ptx.replace(*change), kernel, operands_of(traced))


@compiled
@pytest.mark.parametrize(
    "layers", [CASES["residual"], CASES["odd"], HALVES["residual"]], ids=["residual", "odd", "bf16"]
)
def test_what_the_ranking_proposes_is_right(layers):
    arguments = layers.arguments()
    program, traced = program_of(layers, arguments)
    found = [p for p, _ in schedules.b2b_schedules(program, MACHINE)]
    assert len(found) > 8
    for candidate in found[:: len(found) // 4]:
        compare(layers, results(candidate, traced), wanted(layers, arguments))


NETWORKS = {
    "ConvNeXt-T, 56x56": Mlp((64, 56, 56), 96, 384, 96, gelu, tail=residual),
    "ConvNeXt-T, 28x28": Mlp((64, 28, 28), 192, 768, 192, gelu, tail=residual),
    "Swin-B": Mlp((64, 49, 64), 128, 512, 128, gelu, tail=residual),
    "64 wide": Mlp((65536,), 64, 64, 64),
}


@compiled
@pytest.mark.parametrize("target", [SM80, SM90], ids=lambda t: t.arch)
@pytest.mark.parametrize("dtype", [np.float32, HALF])
@pytest.mark.parametrize("name", NETWORKS)
def test_candidates_assemble_without_local_memory(name, dtype, target):
    layers = replace(NETWORKS[name], dtype=dtype)
    program, _ = program_of(layers, [np.zeros(a.shape, a.dtype) for a in layers.arguments()], rounded=dtype != HALF)
    found = [p for p, _ in schedules.b2b_schedules(program, GpuMachine(132, capability=target.capability))]
    assert len(found) > 3
    assert_most_assemble(found[:3], target)


def test_refusals():
    layers = CASES["residual"]
    program, _ = program_of(layers, layers.arguments())
    for tile in (
        (64, 24, (2, 1), (2, 1)),
        (64, 32, (2, 1), (1, 1)),
        (16, 32, (2, 1), (2, 1)),
        (64, 96, (1, 2), (1, 2)),
    ):
        with pytest.raises(CompileRejected, match="no block"):
            emit_source(schedules.of(program, shape_of(program, *tile)))


def test_golden_source(golden):
    layers = NETWORKS["ConvNeXt-T, 56x56"]
    program, _ = program_of(layers, [np.zeros(a.shape, a.dtype) for a in layers.arguments()])
    candidate, _ = next(schedules.b2b_schedules(program, MACHINE))
    source = emit_source(candidate)
    compile(source.text, "b2b_gemm", "exec")
    text = f"# {dict(candidate.params)}, {source.shared} bytes of shared memory, {source.least} blocks beside\n"
    golden("cuda/b2b_gemm.txt", f"{text}# {source.blocks} blocks of {source.threads} threads\n{source.text}")
