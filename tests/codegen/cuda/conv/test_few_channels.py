"""Convolutions with few channels as patches on matrix units, against float64, through the PTX machine."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jcuts.base.errors import CompileRejected
from jcuts.codegen.cuda import compile as compiler
from jcuts.codegen.cuda.launch_source import emit_source
from jcuts.codegen.cuda.toolchain.image import Image
from jcuts.codegen.cuda.toolchain.target import CudaTarget
from jcuts.lower.patterns.few_channel_conv import as_few_channel_conv, conv_geometry
from jcuts.schedule.gpu import candidates as gpu_candidates
from jcuts.schedule.gpu.conv import few_channels
from jcuts.schedule.gpu.conv.few_channels_tile import FewChannelTile
from tests import programs
from tests.ops.cases import conv
from tests.ptx import machine as ptx_machine
from tests.ptx.tensor_core import TensorFault, round_tf32

MACHINE = gpu_candidates.GpuMachine(132)
SM80, SM90 = CudaTarget((8, 0)), CudaTarget((9, 0))
compiled = pytest.mark.cuda_compilers
LIMIT = 2e-6
"""Allowed error over the root mean square: float32 sums of exact products."""


def normal(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def zeros(*shape):
    return np.zeros(shape, np.float32)


def tf32(x):
    return round_tf32(x).astype(np.float64)


def shaped(program, rows, pixels, columns, warps, stages, share):
    """A program with one schedule."""
    return few_channels.apply_tile(
        program, FewChannelTile(conv_geometry(program), rows, pixels, columns, warps, stages, share)
    )


def layer(params, end=jax.nn.relu):
    return lambda x, w, b: end(conv(x, w, **params) + b)


def results(program, operands, target=SM90):
    kernel = compiler.compile_program(program, target)
    return ptx_machine.run_kernel(compiler.ptx_of(program, target), kernel, operands)


def compare(got, want, limit=LIMIT):
    assert got.shape == want.shape
    error = np.abs(got.astype(np.float64) - want).max() / np.sqrt(np.mean(np.square(want)))
    assert error < limit, error


CONVOLUTIONS = {
    "7x7 stride 2": ((1, 20, 24, 3), (7, 7, 3, 16), {"strides": (2, 2), "padding": ((3, 3), (3, 3))}),
    "7x7 odd": ((2, 19, 21, 3), (7, 7, 3, 20), {"strides": (2, 2), "padding": ((3, 3), (3, 3))}),
    "3x3 stride 2": ((2, 20, 36, 3), (3, 3, 3, 32), {"strides": (2, 2)}),
    "3x3 without padding": ((1, 13, 37, 3), (3, 3, 3, 33), {"strides": (2, 2), "padding": "VALID"}),
    "uneven padding": ((1, 7, 18, 3), (3, 5, 3, 10), {"padding": ((2, 0), (1, 4)), "strides": (1, 3)}),
    "dilation": ((1, 14, 20, 3), (3, 3, 3, 16), {"dilation": (2, 3)}),
    "one channel": ((2, 9, 17, 1), (5, 5, 1, 8), {}),
    "four channels": ((1, 8, 18, 4), (3, 3, 4, 16), {"strides": (2, 2)}),
    "five channels": ((1, 9, 16, 5), (2, 3, 5, 12), {"strides": (1, 2)}),
    "one row": ((3, 5, 40, 3), (5, 3, 3, 16), {"padding": ((0, 0), (1, 1))}),
    "filters along terms": ((1, 9, 20, 3), (16, 3, 3, 3), {"layout": ("NHWC", "OHWI", "NHWC")}),
}
TILES = [
    (2, 32, 32, (2, 1, 2), 1, 1),
    (4, 16, 16, (4, 1, 1), 2, 2),
    (2, 32, 16, (1, 2, 1), 1, 3),
    (8, 16, 48, (4, 1, 1), 2, 5),
]


@compiled
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions(name, tile):
    image, filters, params = CONVOLUTIONS[name]
    columns = filters[0] if "layout" in params else filters[-1]
    x, w, b = normal(*image), normal(*filters), normal(columns)
    with jax.enable_x64(True):
        want = np.asarray(layer(params)(jnp.asarray(tf32(x)), jnp.asarray(tf32(w)), jnp.asarray(b, jnp.float64)))
    traced = programs.trace(layer(params), x, w, b)
    made = as_few_channel_conv(traced.program())
    assert made is not None
    if conv_geometry(made).vertical is None:
        tile = (1, tile[1], tile[2], (1, tile[1] // 16, tile[2] // 16), *tile[4:])
    (got,) = results(shaped(made, *tile), traced.operands())
    compare(got, want)


@compiled
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_16_bits(name, dtype):
    image, filters, params = CONVOLUTIONS[name]
    columns = filters[0] if "layout" in params else filters[-1]
    x, w, b = (normal(*s).astype(jnp.dtype(dtype)) for s in (image, filters, (columns,)))
    traced = programs.trace(layer(params), x, w, b)
    made = as_few_channel_conv(traced.program())
    assert made is not None
    found = [p for p, _ in few_channels.products(traced.program(), MACHINE)]
    even = image[2] * image[3] % 2 == 0 or conv_geometry(made).start[1] >= 0
    assert bool(found) == even
    with jax.enable_x64(True):
        want = np.asarray(layer(params)(*(jnp.asarray(a.astype(np.float64)) for a in (x, w, b))))
    tile = (1, 32, 32, (1, 2, 1), 1, 2) if conv_geometry(made).vertical is None else TILES[1]
    for program in [shaped(made, *tile), *found[:1]] if even else []:
        (got,) = results(program, traced.operands())
        compare(got, want, float(jnp.finfo(jnp.dtype(dtype)).eps) * 4)


@compiled
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pixels_that_are_not_finite_stay_in_their_windows(dtype):
    """Zeros for terms beyond the last, and neighbours of a window in shared memory, never meet an infinity."""
    image, filters, params = CONVOLUTIONS["7x7 stride 2"]
    x, w, b = (normal(*s).astype(jnp.dtype(dtype)) for s in (image, filters, filters[-1:]))
    x[0, 3, 5, 1], x[0, 10, 20, 2], x[0, 18, 0, 0] = np.inf, np.nan, -np.inf
    want = np.asarray(layer(params)(*(a.astype(np.float32) for a in (x, w, b))))
    traced = programs.trace(layer(params), x, w, b)
    made = as_few_channel_conv(traced.program())
    with np.errstate(invalid="ignore"):
        for tile in TILES[:2]:
            (got,) = results(shaped(made, *tile), traced.operands())
            got = got.astype(np.float32)
            np.testing.assert_array_equal(np.isfinite(got), np.isfinite(want))
            np.testing.assert_allclose(got, want, rtol=0.05, atol=0.2)
    assert 0 < (~np.isfinite(want)).sum() < want.size


@compiled
@pytest.mark.parametrize("images", [1, 2, 3])
@pytest.mark.parametrize("warps", [(2, 1, 1), (3, 1, 1)])
def test_lines_of_odd_length(images, warps):
    """Lines that begin in the middle of a word: neither lines beside them nor what lies behind the array is read."""
    image, params = (images, 11, 37, 3), {"strides": (2, 2), "padding": "VALID"}
    x, w, b = (normal(*s).astype(jnp.dtype("bfloat16")) for s in (image, (3, 3, 3, 20), (20,)))
    x[0, 3], x[-1, -1, -1, 0] = np.inf, np.nan
    made = as_few_channel_conv((traced := programs.trace(layer(params), x, w, b)).program())
    assert made is not None
    want = np.asarray(layer(params)(*(jnp.asarray(a.astype(np.float32)) for a in (x, w, b))))
    for tile in ((6 // warps[0] * warps[0], 32, 32, warps, 2, 4), (3 * warps[0], 16, 32, warps, 1, 1)):
        with np.errstate(invalid="ignore"):
            (got,) = results(shaped(made, *tile), traced.operands())
        np.testing.assert_array_equal(np.isfinite(got.astype(np.float32)), np.isfinite(want))
        held = np.isfinite(want)
        compare(got[held], want[held], float(jnp.finfo(jnp.bfloat16).eps) * 4)
    assert 0 < held.sum() < want.size


@compiled
@pytest.mark.parametrize("seed", range(12))
def test_random_layers(seed):
    rng = np.random.default_rng([29, seed])
    while True:
        channels, dtype = int(rng.integers(1, 7)), str(rng.choice(["float32", "float32", "bfloat16", "float16"]))
        size, taps = rng.integers(4, 40, 2), rng.integers(1, 8, 2)
        params = {"strides": tuple(map(int, rng.integers(1, 4, 2))), "dilation": tuple(map(int, rng.integers(1, 3, 2)))}
        params["padding"] = [tuple(map(int, pair)) for pair in rng.integers(0, 4, (2, 2))]
        images, columns = int(rng.integers(1, 4)), int(rng.integers(1, 70))
        reach = [(t - 1) * d + 1 - sum(p) for t, d, p in zip(taps, params["dilation"], params["padding"], strict=True)]
        if any(r > s for r, s in zip(reach, size, strict=True)):
            continue
        shapes = ((images, *map(int, size), channels), (*map(int, taps), channels, columns), (columns,))
        x, w, b = (normal(*s).astype(jnp.dtype(dtype)) for s in shapes)
        traced = programs.trace(layer(params, jnp.tanh), x, w, b)
        found = [p for p, _ in few_channels.products(traced.program(), MACHINE)]
        if found:
            break
    exact = [tf32(a) if dtype == "float32" else a.astype(np.float64) for a in (x, w)]
    with jax.enable_x64(True):
        want = np.asarray(layer(params, jnp.tanh)(*map(jnp.asarray, exact), jnp.asarray(b.astype(np.float64))))
    for program in {p.digest: p for p in (found[0], found[int(rng.integers(len(found)))])}.values():
        try:
            (got,) = results(program, traced.operands())
        except CompileRejected as error:  # assemblers differ: tuning leaves such schedules out
            assert "local memory" in error.message
            continue
        compare(got, want, 4e-6 if dtype == "float32" else float(jnp.finfo(jnp.dtype(dtype)).eps) * 4)


@compiled
def test_everything_behind_them():
    """Scale and shift, ReLU6, a residual, and two results."""

    def block(x, w, s, b, r):
        y = conv(x, w, strides=(2, 2)) * s + b
        return y, jnp.clip(y, 0.0, 6.0) + r

    x, w, s, b, r = normal(2, 11, 33, 3), normal(3, 3, 3, 18), normal(18), normal(18, seed=1), normal(2, 6, 17, 18)
    with jax.enable_x64(True):
        y, z = (
            np.asarray(v) for v in block(*(jnp.asarray(a) for a in (tf32(x), tf32(w), *map(np.float64, (s, b, r)))))
        )
    traced = programs.trace(block, x, w, s, b, r)
    made = as_few_channel_conv(traced.program())
    for tile in TILES[:2]:
        found = results(shaped(made, *tile), traced.operands())
        for want in (y, z):
            errors = [np.abs(got - want).max() for got in found]
            assert min(errors) < 2e-5


@compiled
@pytest.mark.parametrize("name", ["7x7 odd", "3x3 stride 2", "one channel"])
def test_what_the_ranking_proposes_is_right(name):
    image, filters, params = CONVOLUTIONS[name]
    x, w, b = normal(*image), normal(*filters), normal(filters[-1])
    traced = programs.trace(layer(params), x, w, b)
    with jax.enable_x64(True):
        wide = [jnp.asarray(tf32(a)) for a in (x, w)]
        want = np.asarray(layer(params)(*wide, jnp.asarray(b, jnp.float64)))
    found = [p for p, _ in gpu_candidates.candidates(traced.program(), MACHINE, 8) if dict(p.params)["cuda"] == "patch"]
    assert len(found) > 2
    for program in found[::3]:
        (got,) = results(program, traced.operands())
        compare(got, want)


@compiled
def test_older_units_and_copies_that_are_not_awaited():
    image, filters, params = CONVOLUTIONS["3x3 stride 2"]
    x, w, b = normal(*image), normal(*filters), normal(filters[-1])
    traced = programs.trace(layer(params), x, w, b)
    program = shaped(as_few_channel_conv(traced.program()), *TILES[1])
    rounded = [round_tf32(a, even=False).astype(np.float64) for a in (x, w)]
    with jax.enable_x64(True):
        want = np.asarray(layer(params)(*map(jnp.asarray, rounded), jnp.asarray(b, jnp.float64)))
    compare(results(program, traced.operands(), SM80)[0], want)
    kernel, ptx = compiler.compile_program(program, SM90), compiler.ptx_of(program, SM90)
    for change, fault, what in (
        (("cp.async.wait_group 0;", "cp.async.wait_group 1;"), TensorFault, "under way"),
        (("cvt.rn.tf32.f32", "mov.b32"), TensorFault, "not rounded"),
        (("bar.sync 0;", ""), ptx_machine.Fault, "race"),
    ):
        with pytest.raises(fault, match=what):
            ptx_machine.run_kernel(ptx.replace(*change), kernel, traced.operands())


LAYERS = {
    "ResNet50": ((64, 224, 224, 3), (7, 7, 3, 64), {"strides": (2, 2), "padding": ((3, 3), (3, 3))}),
    "ResNet50 alone": ((1, 224, 224, 3), (7, 7, 3, 64), {"strides": (2, 2), "padding": ((3, 3), (3, 3))}),
    "InceptionV3": ((64, 299, 299, 3), (3, 3, 3, 32), {"strides": (2, 2), "padding": "VALID"}),
    "MobileNetV2": ((64, 224, 224, 3), (3, 3, 3, 32), {"strides": (2, 2)}),
}


@compiled
@pytest.mark.parametrize("target", [SM80, SM90], ids=lambda t: t.arch)
@pytest.mark.parametrize(
    "name, dtype",
    [
        *((name, "float32") for name in LAYERS),
        ("ResNet50", "bfloat16"),
        ("MobileNetV2", "float16"),
        ("InceptionV3", "bfloat16"),
    ],
)
def test_candidates_assemble_without_local_memory(name, dtype, target):
    image, filters, params = LAYERS[name]
    arguments = [np.zeros(s, jnp.dtype(dtype)) for s in (image, filters, filters[-1:])]
    program = programs.trace(layer(params), *arguments).program()
    found = [p for p, _ in gpu_candidates.candidates(program, MACHINE, 8) if dict(p.params)["cuda"] == "patch"]
    assert len(found) > 4
    for candidate in found[: 2 if (name, dtype) == ("InceptionV3", "bfloat16") else 4]:  # lines of odd length
        (launch,) = Image.unpack(compiler.compile_program(candidate, target).object_code).launches
        assert launch.resources.stack == 0 and launch.shared <= 96 << 10
        assert launch.block[0] * launch.resources.registers <= 65536


@compiled
def test_the_code_is_what_the_tile_says():
    image, filters, params = LAYERS["ResNet50"]
    program = programs.trace(layer(params), zeros(*image), zeros(*filters), zeros(64)).program()
    ptx = compiler.ptx_of(shaped(as_few_channel_conv(program), 4, 32, 64, (4, 1, 1), 1, 1), SM90)
    steps = -(-147 // 8)
    assert ptx.count("mma.sync") == steps * 2 * 8
    assert (
        ptx.count("ld.shared.b32") == 37 * 2 * 2
    )  # fours of terms: 37 of 38 are there, two rows each of two fragments
    assert ptx.count("ld.shared.v2.b32") == steps * 8
    assert ptx.count("cp.async.ca") == 0  # 13 lines of 53 pieces, by 8 threads at a time or more
    assert ptx.count("cp.async.cg.shared.global") == min(-(-13 // (128 // n)) * -(-53 // n) for n in (4, 8, 16, 32))
    assert ptx.count("st.global.v4.b32") == 4 * 32 * 64 // 4 // 128 and "st.global.b32" not in ptx


def test_refusals():
    image, filters, params = CONVOLUTIONS["3x3 stride 2"]
    made = as_few_channel_conv(programs.trace(layer(params), zeros(*image), zeros(*filters), zeros(32)).program())
    for tile in ((2, 24, 32, (2, 1, 1), 1, 1), (2, 32, 32, (3, 1, 1), 1, 1), (2, 32, 32, (2, 1, 1), 3, 1)):
        with pytest.raises(CompileRejected, match="no patches"):
            emit_source(shaped(made, *tile))
