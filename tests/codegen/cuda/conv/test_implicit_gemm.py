"""Convolutions by warp groups that keep pixels in shared memory: against float64, through the PTX machine."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jcuts.base.errors import CompileRejected
from jcuts.codegen.cuda import compile as compiler
from jcuts.codegen.cuda.conv.implicit_gemm_tile import window_shape
from jcuts.codegen.cuda.toolchain import ptxas
from jcuts.lower.patterns.gemm import as_gemm
from jcuts.schedule.gpu.conv.implicit_gemm import ImplicitGemmTile
from tests import programs
from tests.codegen.cuda.gemm.test_mma import SM90, compare, compiled, normal, tf32
from tests.codegen.cuda.gemm.test_wgmma import EPS
from tests.ptx import machine as ptx_machine
from tests.ptx.tensor_core import round_tf32

TILINGS = [
    ImplicitGemmTile(64, 32, 1, 4, 2),
    ImplicitGemmTile(128, 64, 2, 5, 2, spread=1, steps=2),
    ImplicitGemmTile(128, 32, 1, 3, 2),
    ImplicitGemmTile(128, 48, 2, 4, 2, steps=4),
    ImplicitGemmTile(64, 64, 1, 5, 2, rounds=3, spread=1, steps=4),
    ImplicitGemmTile(64, 64, 1, 4, 2, rounds=2),
    ImplicitGemmTile(128, 32, 2, 4, 2, rounds=3, spread=1),
]
CASES = {
    "3x3": ((2, 9, 11, 64), (40, 3, 3, 64), (1, 1), "SAME"),
    "3x3 ragged channels": ((1, 7, 13, 44), (24, 3, 3, 44), (1, 1), "SAME"),
    "3x3 stride 2": ((2, 11, 10, 32), (32, 3, 3, 32), (2, 2), "SAME"),
    "3x3 inside": ((3, 8, 9, 32), (48, 3, 3, 32), (1, 1), "VALID"),
    "1x7": ((2, 9, 8, 64), (64, 1, 7, 64), (1, 1), "SAME"),
    "7x1": ((2, 9, 8, 32), (40, 7, 1, 32), (1, 1), "SAME"),
    "5x5 uneven": ((1, 10, 9, 36), (36, 5, 5, 36), (1, 1), ((1, 3), (2, 0))),
}
"""Image, filters (O, H, W, I), strides, padding."""


RESIDENT = (
    ImplicitGemmTile(64, 32, 1, 0, 2, rounds=3, steps=4),
    ImplicitGemmTile(128, 16, 2, 0, 2, rounds=2, spread=1, steps=2),
)


def steps_of(case):
    """Taps by lines of channels."""
    _, down, across, channels = CASES[case][1]
    return -(-channels // 32) * down * across


def run_window(fn, arguments, tiling):
    """The results of a kernel that takes argument 1 as it is."""
    program = tiling.of(programs.trace(fn, *arguments).product())
    kernel, ptx = compiler.compile_program(program, SM90), compiler.ptx_of(program, SM90)
    return ptx_machine.run_kernel(ptx, kernel, [np.asarray(a) for a in arguments])


@compiled
@pytest.mark.parametrize("tiling", RESIDENT, ids=str)
@pytest.mark.parametrize("case", ["3x3", "3x3 ragged channels", "3x3 stride 2", "7x1"])
def test_weights_that_stay_in_shared_memory(case, tiling):
    check(case, tiling)


@compiled
@pytest.mark.parametrize(
    "tiling",
    [
        ImplicitGemmTile(64, 32, 1, 4, 2, unrolled=1, spread=1, steps=4),
        ImplicitGemmTile(128, 32, 1, 5, 2, rounds=2, unrolled=1),
        ImplicitGemmTile(64, 24, 1, 0, 2, rounds=3, unrolled=1, spread=1, steps=4),
    ],
    ids=str,
)
@pytest.mark.parametrize("case", ["3x3", "3x3 ragged channels", "1x7"])
def test_taps_with_code_of_their_own(case, tiling):
    check(case, tiling)


CLUSTERS = [
    ImplicitGemmTile(64, 32, 1, 4, 1, steps=2, cluster=2, early=1),
    ImplicitGemmTile(128, 64, 2, 8, 2, steps=4, cluster=2),
    ImplicitGemmTile(64, 64, 1, 0, 1, steps=2, unrolled=1, cluster=4, early=1),
    ImplicitGemmTile(64, 40, 1, 5, 2, cluster=3),
    ImplicitGemmTile(64, 64, 1, 8, 2, steps=4, unrolled=1, cluster=2, early=1),
    ImplicitGemmTile(64, 96, 1, 3, 2, cluster=4),
    ImplicitGemmTile(128, 32, 2, 0, 2, steps=2, spread=1, cluster=5, early=1),
]
SHARED_CHANNELS = {2: (48, 128), 3: (84,), 4: (112, 256), 5: (160,)}
"""By blocks of a cluster: channels whose lines they can share."""


@compiled
@pytest.mark.parametrize("tiling", CLUSTERS, ids=str)
@pytest.mark.parametrize(
    "taps, strides, padding",
    [
        ((3, 3), 1, "SAME"),
        ((1, 7), 1, "SAME"),
        ((3, 3), 2, "VALID"),
        ((5, 5), 1, "SAME"),
    ],
)
def test_blocks_of_a_cluster_share_channels(taps, strides, padding, tiling):
    """A vector and a matrix are added to the totals; pixels lie among channels that are NaN."""
    tried = 0
    for channels in SHARED_CHANNELS[tiling.cluster]:
        lines = -(-channels // 32) // tiling.cluster
        made = replace(tiling, stages=tiling.stages or lines * taps[0] * taps[1], pixels=min(tiling.pixels, lines))
        if lines > 1:
            made = replace(made, pixels=2)
        x, w = normal(2, 9, 8, channels + 8), round_tf32(normal(72, *taps, channels, seed=1))
        x[..., :4], x[..., 4 + channels :] = np.nan, np.nan
        size = (9, 8) if padding == "SAME" else (4, 3)
        b, r = normal(72, seed=2), normal(2, *size, 72, seed=3)

        def fn(x, w, b, r, channels=channels):
            x = lax.slice_in_dim(x, 4, 4 + channels, axis=3)
            y = lax.conv_general_dilated(x, w, (strides,) * 2, padding, dimension_numbers=("NHWC", "OHWI", "NHWC"))
            return jax.nn.relu(y + b) + r

        try:
            found = run_window(fn, (x, w, b, r), made)
        except CompileRejected:  # more stages than steps, or than there is time for a run of pixels
            continue
        with jax.enable_x64(True):
            rounded = np.where(np.isnan(x), np.nan, tf32(x))
            want = np.asarray(fn(*(jnp.asarray(np.asarray(a, np.float64)) for a in (rounded, w, b, r))))
        compare(found, [want], 3e-6)
        tried += 1
    assert tried or taps == (1, 7)


@compiled
@pytest.mark.parametrize(
    "tiling, channels",
    [
        (ImplicitGemmTile(128, 128, 2, 9, 1, steps=2, cluster=2, early=1), 64),
        (ImplicitGemmTile(128, 128, 2, 9, 1, steps=2, unrolled=1, cluster=3), 96),
    ],
    ids=str,
)
def test_what_is_pushed_may_take_the_place_of_operands(tiling, channels):
    """Where shared memory has no room for both."""
    x, w, b = normal(1, 5, 60, channels), round_tf32(normal(136, 3, 3, channels, seed=1)), normal(136, seed=2)

    def fn(x, w, b):
        y = lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "OHWI", "NHWC"))
        return jax.nn.relu(y + b)

    shape = window_shape(tiling.of(programs.trace(fn, x, w, b).product()))
    assert not shape.dsmem_is_separate and shape.kept_until < shape.shared < shape.kept_until + shape.room
    with jax.enable_x64(True):
        want = np.asarray(fn(*(jnp.asarray(np.asarray(a, np.float64)) for a in (tf32(x), w, b))))
    compare(run_window(fn, (x, w, b), tiling), [want], 3e-6)


@compiled
def test_what_clusters_do_not_share():
    """Lines that are no multiple of the blocks, several tiles of outputs, a last line that ends early."""
    x, w = normal(2, 9, 8, 96), round_tf32(normal(64, 3, 3, 96, seed=1))
    made = programs.trace(
        lambda x, w: lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "OHWI", "NHWC")), x, w
    ).product()
    good = ImplicitGemmTile(64, 32, 1, 4, 1, steps=2, cluster=3)
    compiler.compile_program(good.of(made), SM90)
    for wrong in (
        replace(good, cluster=2),
        replace(good, rounds=2, pixels=2),
        replace(good, short=1),
        replace(good, cluster=1, early=1, rounds=2, pixels=2),
    ):
        with pytest.raises(CompileRejected):
            compiler.compile_program(wrong.of(made), SM90)


@compiled
@pytest.mark.parametrize(
    "tiling",
    [
        ImplicitGemmTile(64, 32, 1, 4, 2, spread=1, steps=4),
        ImplicitGemmTile(128, 72, 1, 5, 2, rounds=2),
        ImplicitGemmTile(64, 64, 1, 0, 2, rounds=3, unrolled=1, spread=1, steps=2),
    ],
    ids=str,
)
@pytest.mark.parametrize("layout", ["OHWI", "HWIO"])
def test_floats_of_16_bits(layout, tiling):
    dtype = "float16" if tiling.steps == 4 and layout == "OHWI" else "bfloat16"
    x, w, b = (normal(*s, seed=k).astype(dtype) for k, s in enumerate(((2, 9, 11, 72), (72, 3, 3, 72), (72,))))
    w = w if layout == "OHWI" else np.ascontiguousarray(w.transpose(1, 2, 3, 0))

    def fn(x, w, b):
        y = lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", layout, "NHWC"))
        return jax.nn.relu(y + b)

    program = as_gemm(programs.trace(fn, x, w, b).program())
    tiling = replace(tiling, stages=tiling.stages or 18)
    program = tiling.of(program)
    kernel, ptx = compiler.compile_program(program, SM90), compiler.ptx_of(program, SM90)
    with jax.enable_x64(True):
        wanted = np.asarray(fn(*(jnp.asarray(a.astype(np.float64)) for a in (x, w, b))))
    compare(ptx_machine.run_kernel(ptx, kernel, [x, w, b]), [wanted], 2.1 * EPS[dtype] * np.abs(wanted).max())


@compiled
@pytest.mark.parametrize(
    "tiling",
    [
        ImplicitGemmTile(64, 32, 1, 4, 1, steps=2, unrolled=1),
        ImplicitGemmTile(128, 40, 2, 9, 2, 2, 1, 2, unrolled=1),
        ImplicitGemmTile(128, 72, 1, 5, 2, rounds=3, steps=2),
        ImplicitGemmTile(192, 32, 3, 9, 1, spread=1, steps=2, unrolled=1),
        ImplicitGemmTile(128, 48, 2, 9, 2, rounds=2, spread=1, steps=2, unrolled=1, paired=1),
    ],
    ids=str,
)
@pytest.mark.parametrize("channels, strides, padding", [(32, 1, "SAME"), (24, 2, "SAME"), (32, 1, "VALID")])
def test_lines_of_64_bytes(channels, strides, padding, tiling):
    """Few channels of 16 bits, beside NaN that belong to nobody."""
    x, w, b = (normal(*s, seed=k) for k, s in enumerate(((3, 13, 11, 40), (3, 3, channels, 72), (72,))))
    x, w, b = (a.astype("bfloat16") for a in (x, w, b))
    x[..., :8], x[..., 8 + channels :] = np.nan, np.nan

    def fn(x, w, b):
        x = lax.slice_in_dim(x, 8, 8 + channels, axis=3)
        y = lax.conv_general_dilated(x, w, (strides,) * 2, padding, dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return jax.nn.relu(y + b)

    program = tiling.of(programs.trace(fn, x, w, b).product())
    assert window_shape(program).run == window_shape(program).span * 64
    kernel, ptx = compiler.compile_program(program, SM90), compiler.ptx_of(program, SM90)
    with jax.enable_x64(True):
        wanted = np.asarray(fn(*(jnp.asarray(a.astype(np.float64)) for a in (x, w, b))))
    compare(ptx_machine.run_kernel(ptx, kernel, [x, w, b]), [wanted], 2.1 * EPS["bfloat16"] * np.abs(wanted).max())


@compiled
@pytest.mark.parametrize(
    "channels, tiling",
    [
        (80, ImplicitGemmTile(192, 96, 3, 6, 2, rounds=2, steps=4, spread=1, short=1)),
        (96, ImplicitGemmTile(64, 40, 1, 18, 2, rounds=3, spread=1, steps=4, unrolled=1, short=1)),
        (80, ImplicitGemmTile(192, 72, 3, 5, 2, rounds=2, steps=2, short=1)),
        (48, ImplicitGemmTile(64, 72, 1, 5, 1, short=1)),
        (48, ImplicitGemmTile(128, 64, 2, 9, 2, rounds=2, spread=1, steps=4, unrolled=1, short=1)),
        (104, ImplicitGemmTile(128, 24, 1, 5, 2, steps=2, short=1)),
        (136, ImplicitGemmTile(64, 64, 1, 6, 2, rounds=2, short=1)),
        (136, ImplicitGemmTile(128, 64, 2, 4, 2, spread=1, steps=2, short=1, paired=1)),
        (16, ImplicitGemmTile(128, 64, 2, 9, 2, spread=1, steps=2, unrolled=1, short=1)),
    ],
    ids=str,
)
def test_last_lines_that_are_not_full(channels, tiling):
    x, w, b = (normal(*s, seed=k) for k, s in enumerate(((2, 9, 11, channels), (3, 3, channels, 72), (72,))))
    x, w, b = (a.astype("bfloat16") for a in (x, w, b))

    def fn(x, w, b):
        y = lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return jax.nn.relu(y + b)

    program = tiling.of(programs.trace(fn, x, w, b).product())
    kernel, ptx = compiler.compile_program(program, SM90), compiler.ptx_of(program, SM90)
    parts = window_shape(program).parts
    assert sum(p.taps * p.steps for p in parts) == 9 * -(-channels // 16)
    with jax.enable_x64(True):
        wanted = np.asarray(fn(*(jnp.asarray(a.astype(np.float64)) for a in (x, w, b))))
    compare(ptx_machine.run_kernel(ptx, kernel, [x, w, b]), [wanted], 2.1 * EPS["bfloat16"] * np.abs(wanted).max())


@compiled
@pytest.mark.parametrize(
    "tiling",
    [
        ImplicitGemmTile(64, 32, 1, 4, 2, spread=1, steps=4, fetched=1),
        ImplicitGemmTile(128, 48, 2, 5, 2, rounds=2, spread=1, steps=4, fetched=1),
        ImplicitGemmTile(64, 24, 1, 0, 2, rounds=3, spread=1, steps=4, fetched=1),
        ImplicitGemmTile(64, 32, 1, 0, 2, rounds=2, spread=1, steps=4, unrolled=1, fetched=1),
    ],
    ids=str,
)
@pytest.mark.parametrize("case", ["3x3", "3x3 ragged channels", "1x7"])
def test_fragments_that_are_asked_for_before_products(case, tiling):
    check(case, tiling)


@compiled
def test_one_run_of_pixels():
    check("7x1", ImplicitGemmTile(64, 64, 1, 4, 1))


@compiled
@pytest.mark.parametrize("case", ["3x3 ragged channels", "3x3 stride 2", "1x7", "3x3 inside", "5x5 uneven"])
@pytest.mark.parametrize("begin", [0, 8])
def test_channels_that_are_part_of_a_pixel(case, begin):
    """Nothing else of it is read."""
    tiling = (
        ImplicitGemmTile(64, 32, 1, 4, 2, spread=1, steps=2) if begin else ImplicitGemmTile(128, 48, 2, 5, 2, rounds=2)
    )
    check(case, tiling, begin)


def layer(strides, padding):
    """A convolution with bias, a matrix that is added, and ReLU."""

    def fn(x, w, b, r):
        y = lax.conv_general_dilated(x, w, strides, padding, dimension_numbers=("NHWC", "OHWI", "NHWC"))
        return jax.nn.relu(y + b + r)

    return fn


@compiled
@pytest.mark.parametrize(
    "case, tiling",
    [(case, tiling) for k, case in enumerate(CASES) for n, tiling in enumerate(TILINGS) if (k + n) % 2],
    ids=str,
)
def test_convolutions_of_odd_sizes(case, tiling):
    check(case, tiling)


def exact(case):
    """A case's layer, its operands, and its results in float64 with the image rounded to TF32."""
    image, filters, strides, padding = CASES[case]
    x, w, b = normal(*image), round_tf32(normal(*filters, seed=1)), normal(filters[0], seed=2)
    shape = jax.eval_shape(layer(strides, padding), x, w, b, np.float32(0)).shape
    r = normal(*shape, seed=3)
    with jax.enable_x64(True):
        y = lax.conv_general_dilated(
            tf32(x).astype(np.float64),
            w.astype(np.float64),
            strides,
            padding,
            dimension_numbers=("NHWC", "OHWI", "NHWC"),
            precision="highest",
        )
        wanted = np.maximum(np.asarray(y) + b + r, 0)
    return layer(strides, padding), (x, w, b, r), wanted


def check(case, tiling, begin=None):
    """Compares a schedule of a case with float64. Args: begin: channels before those that are read, NaN as others."""
    count = steps_of(case)
    tiling = replace(tiling, stages=tiling.stages or count, steps=2 if count % 2 else tiling.steps)
    of_image, (x, w, b, r), wanted = exact(case)
    fn = of_image
    if begin is not None:
        channels, whole = x.shape[-1], np.full((*x.shape[:3], begin + x.shape[-1] + 12), np.nan, np.float32)
        whole[..., begin : begin + channels] = x
        x, fn = whole, lambda x, *more: of_image(x[..., begin : begin + channels], *more)
    compare(run_window(fn, (x, w, b, r), tiling), [wanted], 3e-6)


@compiled
@pytest.mark.skipif((ptxas.toolkit() or (0, 0)) < (13, 5), reason="ptxas 13.0 leaves these fragments where they are")
@pytest.mark.skipif(not ptxas.assembler(), reason="only ptxas tells")
def test_products_that_would_wait_for_each_other_are_refused():
    """The assembler moves fragments between registers where copies stand between the products of 128 rows."""
    x, w = normal(1, 56, 56, 64), round_tf32(normal(64, 3, 3, 64))
    traced = programs.trace(lambda x, w: layer((1, 1), "SAME")(x, w, 0.0, 0.0), x, w)
    program = ImplicitGemmTile(256, 64, 2, 4, 2, spread=1).of(traced.product())
    with pytest.raises(CompileRejected, match="wait for each other"):
        compiler.compile_program(program, SM90)


@compiled
def test_what_does_not_fit():
    x, w = normal(1, 8, 8, 64), round_tf32(normal(24, 3, 3, 64))
    product = programs.trace(lambda x, w: layer((1, 1), "SAME")(x, w, 0.0, 0.0), x, w).product()
    good = ImplicitGemmTile(64, 24, 1, 4, 2)
    window_shape(good.of(product))
    for tiling, program in (
        (replace(good, stages=2), product),
        (replace(good, stages=19), product),
        (replace(good, pixels=1), product),
        (replace(good, rows=96), product),
        (replace(good, steps=3), product),
    ):
        with pytest.raises(CompileRejected):
            window_shape(tiling.of(program))
    plain = replace(product, buffers=tuple(replace(b, tf32=False) for b in product.buffers))
    with pytest.raises(CompileRejected, match="rounded"):
        window_shape(good.of(plain))
