"""Attention whose scores stay in registers, against float64, through the PTX machine."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jcuts.base.errors import CompileRejected, Refusal
from jcuts.codegen.cuda import compile as compiler
from jcuts.codegen.cuda.toolchain.target import CudaTarget
from jcuts.kernel_ir.interpret import interpret
from jcuts.lower.patterns.attention import match
from jcuts.lower.patterns.masked_tiles import masked_forward
from jcuts.schedule.gpu import candidates as gpu_candidates
from jcuts.schedule.gpu.attention import schedules as attention_schedules
from jcuts.schedule.gpu.attention.tile import FlashTile
from tests import programs
from tests.gpu.cases import attention
from tests.ptx import machine as ptx_machine
from tests.ptx.tensor_core import round_tf32

MACHINE = gpu_candidates.GpuMachine(132)
SM80, SM90 = CudaTarget((8, 0)), CudaTarget((9, 0))
compiled = pytest.mark.cuda_compilers
LIMIT = {"float32": 1e-3, "bfloat16": 2e-2, "float16": 6e-3}
"""Allowed error over the root mean square: weights are rounded to 11 or 8 bits, 16-bit scores and results as well."""

SHAPES = {
    "odd": ((2, 37, 3, 8), (2, 53, 3, 8), 8),
    "cross": ((1, 16, 2, 40), (1, 70, 2, 40), 24),
    "three keys": ((2, 5, 1, 16), (2, 3, 1, 16), 16),
    "bert": ((1, 40, 2, 64), (1, 40, 2, 64), 64),
    "deep": ((1, 18, 1, 128), (1, 33, 1, 128), 104),
}
HIGH: dict[str, Any] = {"bert": (64, 16, (2, 1), 3, True), "odd": (32, 64, (1, 2), 2, False)}
"""Tiles of warps of 32 rows."""
TILES: list[Any] = [
    (32, 32, (2, 1), 2, False),
    (16, 64, (1, 2), 2, True),
    (32, 16, (1, 1), 3, False),
    (32, 64, (1, 4), 1, False),
    (48, 64, (3, 2), 2, True),
    (32, 48, (2, 1), 2, False),
]


def normal(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def traced(fn, *arguments):
    """A function whose one subset is an attention: program, operands."""
    made = programs.trace(fn, *arguments)
    members, program = made.attention()
    return program, made.operands(members)


def shaped(
    program,
    rows: int,
    keys: int,
    warps: tuple[int, int],
    stages: int,
    rounded: bool = False,
    skips: bool = False,
    cluster: int = 1,
):
    """A program with one schedule."""
    known = match(program)
    assert not isinstance(known, Refusal), str(known)
    rounded = rounded and known.kind == "tf32"
    return attention_schedules.apply_tile(program, FlashTile(known, rows, keys, warps, stages, rounded, skips, cluster))


def results(program, operands, target=SM90):
    kernel = compiler.compile_program(program, target)
    return ptx_machine.run_kernel(compiler.ptx_of(program, target), kernel, operands)


def exact(fn, *arguments):
    """The function in float64, of operands that are rounded as matrix units take them."""
    with jax.enable_x64(True):
        wide = [round_tf32(a) if a.dtype == np.float32 and a.ndim > 2 else a for a in arguments]
        wide = [jnp.asarray(a.astype(np.float64) if a.dtype.kind not in "bi" else a) for a in wide]
        return np.asarray(fn(*wide))


def compare(got, want, limit):
    assert got.shape == want.shape
    error = np.abs(got.astype(np.float64) - want).max() / np.sqrt(np.mean(np.square(want)))
    assert error < limit, error


PAIRS = [(name, tile) for n, name in enumerate(SHAPES) for k, tile in enumerate(TILES) if (n + k) % 3 == 0]


@compiled
@pytest.mark.parametrize(("name", "tile"), PAIRS, ids=str)
def test_shapes_and_tiles(name, tile):
    query, key, features = SHAPES[name]
    arrays = normal(*query), normal(*key, seed=1), normal(*key[:3], features, seed=2)
    program, operands = traced(attention(), *arrays)
    if name == "deep" and tile[0] == 32 * tile[2][0]:  # registers
        tile = (16 * tile[2][0], *tile[1:])
    if name == "deep" and tile[1] == 32 * tile[2][1]:
        tile = (tile[0], 16 * tile[2][1], *tile[2:])
    (got,) = results(shaped(program, *tile), operands)
    compare(got, exact(attention(), *arrays), LIMIT["float32"])


@compiled
@pytest.mark.parametrize("name", HIGH)
def test_warps_of_32_rows(name):
    query, key, features = SHAPES[name]
    arrays = normal(*query), normal(*key, seed=1), normal(*key[:3], features, seed=2)
    program, operands = traced(attention(), *arrays)
    (got,) = results(shaped(program, *HIGH[name]), operands)
    compare(got, exact(attention(), *arrays), LIMIT["float32"])


@compiled
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", SHAPES)
def test_16_bits(name, dtype):
    query, key, features = SHAPES[name]
    arrays = [a.astype(jnp.dtype(dtype)) for a in (normal(*query), normal(*key, seed=1), normal(*key[:3], features))]
    program, operands = traced(attention(), *arrays)
    for tile in (TILES[1], TILES[4]):
        (got,) = results(shaped(program, *tile), operands)
        compare(got, exact(attention(), *arrays), LIMIT[dtype])


def with_logsumexp(q, k, v):
    """Attention with the logsumexp of its rows, in float32, as the rewrite for its gradient makes it."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    largest = scores.max(-1, keepdims=True)
    powers = jnp.exp(scores - largest)
    total = powers.astype(np.float32).sum(-1, keepdims=True)
    out = jnp.einsum("bhqk,bkhd->bqhd", powers / total.astype(powers.dtype), v)
    return out, jnp.log(total) + largest.astype(np.float32)


@compiled
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_logsumexp_of_16_bit_scores_is_rounded_once(dtype):
    query, key, features = SHAPES["bert"]  # whose scale is a power of two
    arrays = [4 * normal(*query), normal(*key, seed=1), normal(*key[:3], features, seed=2)]
    arrays = [a.astype(jnp.dtype(dtype)) for a in arrays]
    program, operands = traced(with_logsumexp, *arrays)
    out, lse = results(shaped(program, *TILES[1]), operands)
    wide = [round_tf32(a).astype(np.float64) if dtype == "float32" else a.astype(np.float64) for a in arrays]
    scores = np.einsum("bqhd,bkhd->bhqk", *wide[:2]) * query[-1] ** -0.5
    powers = np.exp(scores)
    total = powers.sum(-1, keepdims=True)
    assert scores.max() > 8 and lse.dtype == np.float32  # where bfloat16 numbers are 1/16 apart
    error = np.abs(lse - np.log(total).reshape(lse.shape)).max()
    assert error < (2e-2 if dtype == "float16" else 5e-3)  # every float16 operation rounds its score
    compare(out, np.einsum("bhqk,bkhd->bqhd", powers / total, wide[2]), 3 * LIMIT[dtype])


def _masked(mask):
    def fn(q, k, v, m):
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(mask(scores, m), -1), v)

    return fn


def _causal(s, m):
    rows, keys = (jax.lax.broadcasted_iota(jnp.int32, s.shape, d) for d in (2, 3))
    return jnp.where(keys <= rows + 8, s, -jnp.inf)


MASKS = {
    "causal": (_causal, (1,)),
    "keys": (lambda s, m: jnp.where(m[:, None, None, :], s, -jnp.inf), (2, 53)),
    "bias": (lambda s, m: s + jnp.where(m, 0.0, -1e9).astype(s.dtype)[:, None], (2, 37, 53)),
    "capped": (lambda s, m: jnp.tanh(s / 3) * 3 + jnp.where(m, 0, -30.0).astype(s.dtype), (3, 37, 53)),
}


MASKED: list[Any] = [(32, 16, (1, 1), 2, False), (32, 32, (2, 2), 3, True)]


@compiled
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MASKS)
def test_masks(name, dtype):
    mask, shape = MASKS[name]
    shapes = enumerate(((2, 37, 3, 8), (2, 53, 3, 8), (2, 53, 3, 8)))
    q, k, v = (normal(*s, seed=n).astype(jnp.dtype(dtype)) for n, s in shapes)
    m = np.random.default_rng(3).random(shape) < 0.7
    m[..., 20:40] = False  # whole tiles of keys without a score
    program, operands = traced(_masked(mask), q, k, v, m)
    for tile, skips in itertools.product(MASKED, (False, True)):
        (got,) = results(shaped(program, *tile, skips=skips), operands)
        compare(got, exact(_masked(mask), q, k, v, m), LIMIT[dtype])


@compiled
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("tile", MASKED, ids=str)
def test_tiles_without_a_weight_are_left_out(tile, dtype, monkeypatch):
    """Fewer products than with an infinite value behind the mask, which makes NaN as in XLA's program."""
    count = ptx_machine.counted(monkeypatch, "mma")
    q, k, v = (normal(1, n, 2, 8, seed=n).astype(jnp.dtype(dtype)) for n in (32, 160, 161))
    v, m = v[:, :160], np.ones(1, bool)
    program, operands = traced(_masked(_causal), q, k, v, m)
    known = match(program)
    assert not isinstance(known, Refusal) and masked_forward(known)
    (got,) = results(shaped(program, *tile, skips=True), operands)
    compare(got, exact(_masked(_causal), q, k, v, m), LIMIT[dtype])
    few = count()
    for bad in (np.inf, np.nan):
        v = np.where((np.arange(160) >= 64)[:, None, None] & (np.arange(8) == 3), np.float32(bad), v)
        v = v.astype(jnp.dtype(dtype))
        _, operands = traced(_masked(_causal), q, k, v, m)
        with np.errstate(all="ignore"):
            (got,) = results(shaped(program, *tile, skips=True), operands)
        np.testing.assert_array_equal(np.isnan(got.astype(np.float32)), np.isnan(_masked(_causal)(q, k, v, m)))
        assert few < 0.8 * count()


@compiled
def test_rows_without_a_key_and_infinite_scores_are_as_those_of_xla():
    mask, _ = MASKS["keys"]
    q, k, v = normal(2, 20, 1, 8), normal(2, 40, 1, 8), normal(2, 40, 1, 8, seed=2)
    q[0, 3], k[0, 5], q[0, 7, 0, 0] = np.inf, 1.0, np.nan
    m = np.ones((2, 40), bool)
    m[1] = False
    want = np.asarray(_masked(mask)(q, k, v, m))
    assert np.isnan(want[1]).all() and 0 < np.isnan(want[0]).sum() < want[0].size
    program, operands = traced(_masked(mask), q, k, v, m)
    with np.errstate(all="ignore"):
        for tile, skips in itertools.product((TILES[0], TILES[3]), (False, True)):
            (got,) = results(shaped(program, *tile, skips=skips), operands)
            np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
            np.testing.assert_allclose(got, want, rtol=0.02, atol=5e-3)


@compiled
def test_large_scores_do_not_overflow():
    q, k, v = 30 * normal(1, 16, 1, 16), 30 * normal(1, 64, 1, 16, seed=1), normal(1, 64, 1, 16, seed=2)
    program, operands = traced(attention(), q, k, v)
    (got,) = results(shaped(program, 16, 16, (1, 1), 2), operands)
    assert np.isfinite(got).all()


@compiled
def test_slices_of_one_array():
    """What one product of q, k and v leaves behind (`trace.siblings`), and what follows the second product."""

    def fn(x, y, bias):
        q, k, v = (x[..., 32 * i : 32 * i + 32].reshape(*x.shape[:2], 2, 16) for i in range(3))
        out = attention()(q, k, v).reshape(*x.shape[:2], 32)
        return jax.nn.relu(out + bias) * y

    x, y, bias = normal(2, 21, 96), round_tf32(normal(2, 21, 32)), normal(32)
    program, operands = traced(fn, x, y, bias)
    assert sum(b.shape == (2, 21, 96) for b in program.inputs) == 1
    (got,) = results(shaped(program, *TILES[0]), operands)
    compare(got, exact(fn, x, y, bias), LIMIT["float32"])


@compiled
@pytest.mark.parametrize("heads", [4, 2])
def test_what_jax_makes_of_it(heads):
    """`jax.nn.dot_product_attention`: transposes between scores and weights, keys that several heads share, a mask."""

    def fn(q, k, v, bias):
        return jax.nn.dot_product_attention(q, k, v, bias=bias, is_causal=True)

    arrays = normal(2, 20, 4, 16), normal(2, 20, heads, 16, seed=1), normal(2, 20, heads, 16, seed=2)
    bias = round_tf32(normal(1, 4, 20, 20))
    program, operands = traced(fn, *arrays, bias)
    (read,) = interpret(program, [round_tf32(x) if x.dtype == np.float32 else x for x in operands])
    (got,) = results(shaped(program, *TILES[0]), operands)
    want = exact(fn, *arrays, bias)
    compare(read, want, 1e-5)
    compare(got, want, LIMIT["float32"])


@compiled
def test_capability_8():
    arrays = normal(1, 20, 2, 16), normal(1, 33, 2, 16, seed=1), normal(1, 33, 2, 16, seed=2)
    program, operands = traced(attention(), *arrays)
    (got,) = results(shaped(program, *TILES[0]), operands, SM80)
    compare(got, exact(attention(), *arrays), LIMIT["float32"])


@compiled
def test_a_schedule_that_does_not_fit_is_refused():
    arrays = normal(1, 20, 2, 16), normal(1, 33, 2, 16), normal(1, 33, 2, 16)
    program, _ = traced(attention(), *arrays)
    with pytest.raises(CompileRejected, match="no attention of tiles"):
        compiler.compile_program(shaped(program, 40, 32, (2, 1), 2), SM90)


@compiled
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("length", [128, 384])
def test_ranked_schedules_of_bert_assemble_without_spills(length, dtype):
    array = np.zeros((8, length, 12, 64), jnp.dtype(dtype))
    program, _ = traced(attention(), array, array, array)
    found = gpu_candidates.candidates(program, MACHINE, 4)
    assert len(found) == 4
    for candidate, _ in found:
        compiler.compile_program(candidate, SM90)


@pytest.mark.parametrize("name", SHAPES)
def test_the_program_means_attention(name):
    query, key, features = SHAPES[name]
    arrays = normal(*query), normal(*key, seed=1), normal(*key[:3], features, seed=2)
    program, operands = traced(attention(), *arrays)
    (got,) = interpret(program, [round_tf32(x) for x in operands])
    compare(got, exact(attention(), *arrays), 1e-5)


def _with_logsumexp(q, k, v):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    most = jax.lax.stop_gradient(scores.max(-1, keepdims=True))
    exponentials = jnp.exp(scores - most)
    total = exponentials.sum(-1, keepdims=True)
    return jnp.einsum("bhqk,bkhd->bqhd", exponentials / total, v), most + jnp.log(total)


@compiled
@pytest.mark.parametrize("tile", [TILES[0], TILES[3], HIGH["odd"]], ids=str)
@pytest.mark.parametrize("name", ["odd", "cross"])
def test_logsumexp_of_rows_is_a_result_too(name, tile):
    query, key, features = SHAPES[name]
    arrays = normal(*query), normal(*key, seed=1), normal(*key[:3], features, seed=2)
    program, operands = traced(_with_logsumexp, *arrays)
    found = dict(zip((b.shape for b in program.outputs), results(shaped(program, *tile), operands), strict=True))
    with jax.enable_x64(True):
        wide = [jnp.asarray(round_tf32(a).astype(np.float64)) for a in arrays]
        want = [np.asarray(x) for x in _with_logsumexp(*wide)]
    compare(found[want[0].shape], want[0], LIMIT["float32"])
    np.testing.assert_allclose(found[want[1].shape], want[1], atol=2e-5)
