"""The backward pass of attention with recomputed weights, against float64, through the PTX machine."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jcuts.base.errors import CompileRejected, Refusal
from jcuts.codegen.cuda import compile as compiler
from jcuts.codegen.cuda.toolchain.target import CudaTarget
from jcuts.kernel_ir.interpret import interpret
from jcuts.lower.patterns.attention_backward import match_backward
from jcuts.lower.patterns.masked_tiles import masked_backward
from jcuts.schedule.gpu import candidates as gpu_candidates
from jcuts.schedule.gpu.attention import backward_schedules
from jcuts.schedule.gpu.attention.backward_tile import BackwardTile
from tests import programs
from tests.gpu.cases import attention_backward
from tests.ptx import machine as ptx_machine
from tests.ptx.tensor_core import round_tf32

MACHINE = gpu_candidates.GpuMachine(132)
SM80, SM90 = CudaTarget((8, 0)), CudaTarget((9, 0))
compiled = pytest.mark.cuda_compilers
MANTISSA = {"float32": 10, "bfloat16": 7, "float16": 10}
"""Bits to which P and dS are rounded before they are multiplied."""
LIMIT = {"float32": 1e-3, "bfloat16": 3e-2, "float16": 4e-3}
"""Allowed error over the root mean square, beside that rounding: results of 16 bits are rounded as well."""

SHAPES = {
    "odd": ((2, 37, 3, 8), (2, 53, 3, 8), 24),
    "cross": ((1, 16, 2, 40), (1, 70, 2, 40), 8),
    "few": ((2, 5, 1, 16), (2, 3, 1, 16), 16),
    "bert": ((1, 40, 2, 64), (1, 40, 2, 64), 64),
    "deep": ((1, 18, 1, 128), (1, 33, 1, 128), 104),
}
TILES: list[Any] = [
    (32, 32, 2, 2, False, False),
    (64, 16, 4, 3, True, False),
    (32, 16, 2, 1, True, True),
    (32, 64, 2, 1, False, False),
    (64, 16, 2, 2, True, False),
]
"""Rows, columns, warps, stages, rounded, held."""
SIDES = ("queries", "keys")


def operands(name: str, dtype: Any = np.float32, seed: int = 0) -> list[np.ndarray]:
    """Queries, keys, values, gradient, and the statistics that belong to them."""
    query, key, features = SHAPES[name]
    rng = np.random.default_rng([seed, *query])
    shapes = (query, key, (*key[:3], features), (*query[:3], features))
    q, k, v, grad = (rng.standard_normal(s).astype(np.float32).astype(jnp.dtype(dtype)) for s in shapes)
    exact = [round_tf32(np.asarray(a, np.float32)).astype(np.float64) for a in (q, k, v, grad)]
    scores = np.einsum("bqhd,bkhd->bhqk", exact[0], exact[1]) * query[-1] ** -0.5
    lse = np.log(np.exp(scores).sum(-1, keepdims=True))
    weights = np.exp(scores - lse)
    delta = (weights * np.einsum("bqhd,bkhd->bhqk", exact[3], exact[2])).sum(-1, keepdims=True)
    return [q, k, v, grad, lse.astype(np.float32), delta.astype(np.float32)]


def traced(fn, *arguments):
    """A function whose one region is a backward pass: program, operands."""
    made = programs.trace(fn, *arguments)
    members, program = made.attention("attention_backward")
    return program, made.operands(members)


def shaped(program, rows: int, columns: int, warps: int, stages: int, *flags: bool, skips: bool = False):
    """A program with one schedule."""
    known = match_backward(program)
    assert not isinstance(known, Refusal), str(known)
    rounded, held = (*flags, False, False)[:2]
    rounded = rounded and known.kind == "tf32"
    tile = BackwardTile(known, rows, columns, warps, stages, rounded, held, skips)
    return backward_schedules.apply_tile(program, tile)


def results(program, operands, target=SM90):
    kernel = compiler.compile_program(program, target)
    return ptx_machine.run_kernel(compiler.ptx_of(program, target), kernel, operands)


def exact(side, *arguments, mask=lambda scores, m: scores, bits=None):
    """The function in float64, of operands that are rounded as matrix units take them, P and dS to so many bits."""
    with jax.enable_x64(True):
        wide = [round_tf32(a) if a.dtype == np.float32 and n < 4 else a for n, a in enumerate(arguments)]
        wide = [jnp.asarray(a.astype(np.float64) if a.dtype.kind not in "bi" else a) for a in wide]
        fn = attention_backward(side, mask, lambda x, _: x if bits is None else jax.lax.reduce_precision(x, 11, bits))
        return [np.asarray(x) for x in jax.tree.leaves(fn(*wide))]


def compare(got, want, limit):
    assert [g.shape for g in got] == [w.shape for w in want]
    for g, w in zip(got, want, strict=True):
        error = np.abs(g.astype(np.float64) - w).max() / np.sqrt(np.mean(np.square(w)))
        assert error < limit, error


PAIRS = [
    (name, tile, SIDES[(n + k) // 2 % 2])
    for n, name in enumerate(SHAPES)
    for k, tile in enumerate(TILES)
    if (n + k) % 2 == 0 and name != "deep"
]
PAIRS += [("deep", (128, 16, 8, 2, True, False), side) for side in SIDES]
PAIRS += [("bert", TILES[1], "keys"), ("bert", TILES[3], "queries"), ("odd", TILES[2], "keys")]


@compiled
@pytest.mark.parametrize(("name", "tile", "side"), PAIRS, ids=str)
def test_shapes_and_tiles(name, tile, side):
    fn, arrays = attention_backward(side), operands(name)
    program, given = traced(fn, *arrays)
    compare(results(shaped(program, *tile), given), exact(side, *arrays, bits=10), LIMIT["float32"])


@compiled
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("side", SIDES)
def test_16_bits(side, dtype):
    fn = attention_backward(side)
    for name, tile in (("odd", TILES[0]), ("bert", TILES[1])):
        arrays = operands(name, dtype)
        program, given = traced(fn, *arrays)
        want = exact(side, *arrays, bits=MANTISSA[dtype])
        compare(results(shaped(program, *tile), given), want, LIMIT[dtype])


@compiled
@pytest.mark.parametrize("side", SIDES)
def test_capability_8(side):
    fn, arrays = attention_backward(side), operands("odd")
    program, given = traced(fn, *arrays)
    compare(results(shaped(program, *TILES[0]), given, SM80), exact(side, *arrays, bits=10), LIMIT["float32"])


def _causal(scores, m):
    rows, keys = (jax.lax.broadcasted_iota(jnp.int32, scores.shape, d) for d in (2, 3))
    return jnp.where(keys <= rows + 8, scores, -jnp.inf)


MASKS: dict[str, Any] = {
    "causal": (_causal, lambda rng: np.ones(1, np.float32)),
    "keys": (lambda s, m: jnp.where(m[:, None, None, :], s, -1e9), lambda rng: rng.random((2, 53)) < 0.7),
    "bias": (lambda s, m: s + m[:, None], lambda rng: rng.standard_normal((2, 37, 53)).astype(np.float32)),
}


@compiled
@pytest.mark.parametrize("how", MASKS)
@pytest.mark.parametrize("side", SIDES)
def test_masks(side, how):
    mask, make = MASKS[how]
    arrays, m = operands("odd"), make(np.random.default_rng(5))
    program, given = traced(attention_backward(side, mask), *arrays, m)
    read = interpret(program, [round_tf32(x) if x.ndim == 4 and x.shape[-1] > 1 else x for x in given])
    compare(read, exact(side, *arrays, m, mask=mask), 1e-4)
    for skips in (False, True):
        got = results(shaped(program, *TILES[0], skips=skips), given)
        compare(got, exact(side, *arrays, m, mask=mask, bits=10), LIMIT["float32"])


BAD = {"queries": ("grad", "delta", "v", "k"), "keys": ("grad", "delta", "v", "q")}
"""Operands that dS, or a result, is a product with."""


@compiled
@pytest.mark.parametrize("side", SIDES)
def test_tiles_without_a_weight_are_left_out(side, monkeypatch):
    """Fewer products than with infinite operands behind the mask, which make NaN as in XLA's program."""
    count = ptx_machine.counted(monkeypatch, "mma")
    arrays = dict(zip(("q", "k", "v", "grad", "lse", "delta"), operands("bert"), strict=True))
    mask, m = MASKS["causal"][0], np.ones(1, np.float32)
    arrays["lse"] = _log_sums(arrays["q"], arrays["k"])
    program, given = traced(attention_backward(side, mask), *arrays.values(), m)
    known = match_backward(program)
    assert not isinstance(known, Refusal) and masked_backward(known)
    for tile in ((16, 16, 1, 2, False, False), (32, 16, 2, 2, True, True)):
        wanted = results(shaped(program, *tile, skips=True), given)
        compare(wanted, exact(side, *arrays.values(), m, mask=mask, bits=10), LIMIT["float32"])
        few = count()
        for name in BAD[side]:
            bad = arrays | {name: arrays[name].copy()}
            bad[name].reshape(-1)[:: arrays[name].shape[-1]] = np.inf
            bad[name] = np.where(_seen_least(name, bad[name].shape), bad[name], arrays[name])
            _, more = traced(attention_backward(side, mask), *bad.values(), m)
            with np.errstate(all="ignore"):
                found = results(shaped(program, *tile, skips=True), more)
                reference = jax.tree.leaves(jax.jit(attention_backward(side, mask))(*bad.values(), m))
            for got, want in zip(found, reference, strict=True):
                np.testing.assert_array_equal(np.isfinite(got), np.isfinite(want))
            assert few < count()


def _seen_least(name, shape):
    """Keys that few queries see, and queries that see few keys."""
    place = np.arange(40).reshape([-1 if n == 40 else 1 for n in shape])
    return np.broadcast_to(place >= 30 if name in ("k", "v") else place < 8, shape)


def _log_sums(q, k):
    """Logarithms of the sums of exponentials of causal scores."""
    mask, _ = MASKS["causal"]
    scores = np.asarray(mask(jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5, None))
    return np.asarray(jax.nn.logsumexp(scores, -1, keepdims=True), np.float32)


@compiled
@pytest.mark.parametrize("side", SIDES)
def test_a_schedule_that_does_not_fit_is_refused(side):
    program, _ = traced(attention_backward(side), *operands("odd"))
    with pytest.raises(CompileRejected, match="no tiles"):
        compiler.compile_program(shaped(program, 40, 32, 2, 2), SM90)


@compiled
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("side", SIDES)
def test_ranked_schedules_of_gpt_assemble_without_spills(side, dtype, masked):
    array, row = np.zeros((8, 512, 12, 64), jnp.dtype(dtype)), np.zeros((8, 12, 512, 1), np.float32)
    bias = [np.zeros((512, 512), np.float32)] if masked else []
    fn = (
        attention_backward(side, lambda scores, m: scores + m.astype(scores.dtype))
        if masked
        else attention_backward(side)
    )
    program, _ = traced(fn, array, array, array, array, row, row, *bias)
    found = gpu_candidates.candidates(program, MACHINE, 3)
    assert len(found) == 3
    for candidate, _ in found:
        compiler.compile_program(candidate, SM90)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", SHAPES)
def test_the_program_means_the_backward_pass(name, side):
    fn, arrays = attention_backward(side), operands(name)
    program, given = traced(fn, *arrays)
    got = interpret(program, [round_tf32(x) if x.shape[-1] > 1 else x for x in given])
    compare(got, exact(side, *arrays), 1e-4)
