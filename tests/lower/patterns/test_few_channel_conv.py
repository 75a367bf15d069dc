"""Which convolutions are patches, where their windows begin; their schedules are legal, few and ranked."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jcuts.kernel_ir.interpret import interpret
from jcuts.kernel_ir.program import Program
from jcuts.kernel_ir.verify import verify
from jcuts.lower.patterns.few_channel_conv import as_few_channel_conv, conv_geometry
from jcuts.schedule.gpu import candidates as gpu_candidates
from jcuts.schedule.gpu import kernel_time
from jcuts.schedule.gpu.conv import few_channels
from jcuts.schedule.gpu.conv.few_channels_tile import FewChannelTile, shape_of
from jcuts.schedule.gpu.gemm import mma as gemm_mma
from tests import programs
from tests.ops.cases import conv

MACHINE = gpu_candidates.GpuMachine(132)


def normal(*shape, dtype=np.float32):
    return np.random.default_rng(shape).standard_normal(shape).astype(dtype)


def zeros(*shape):
    return np.zeros(shape, np.float32)


def made_of(fn, *arguments):
    return as_few_channel_conv(programs.trace(fn, *arguments).program())


LAYERS = {
    "7x7": (lambda x, w: conv(x, w, strides=(2, 2), padding=((3, 3), (3, 3))), (2, 21, 19, 3), (7, 7, 3, 8)),
    "3x3": (lambda x, w: conv(x, w, strides=(2, 1), padding="VALID"), (1, 9, 11, 3), (3, 3, 3, 5)),
    "uneven": (lambda x, w: conv(x, w, padding=((2, 0), (1, 3)), dilation=(2, 1)), (2, 8, 9, 2), (3, 4, 2, 6)),
    "padded below": (lambda x, w: conv(x, w, padding=((0, 2), (0, 0))), (2, 8, 9, 3), (3, 3, 3, 6)),
    "one channel": (lambda x, w: conv(x, w), (2, 8, 9, 1), (5, 5, 1, 6)),
    "one row": (lambda x, w: conv(x, w, padding="VALID"), (2, 3, 9, 3), (3, 3, 3, 6)),
    "surrounded": (
        lambda x, w: conv(jnp.pad(x, ((0, 0), (1, 2), (3, 0), (0, 0))), w, padding="VALID", strides=(2, 2)),
        (2, 8, 9, 3),
        (3, 3, 3, 6),
    ),
    "OHWI": (lambda x, w: conv(x, w, layout=("NHWC", "OHWI", "NHWC")), (2, 8, 9, 3), (6, 3, 3, 3)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_patches_keep_their_meaning(name):
    """The program computes the same, and so does what is known of its windows: sums over an image with zeros around."""
    fn, *shapes = LAYERS[name]
    x, w = (normal(*s) for s in shapes)
    traced = programs.trace(lambda x, w: fn(x, w), x, w)
    program = traced.program()
    made = as_few_channel_conv(program)
    assert made is not None
    verify(made)
    (want,) = interpret(program, traced.operands())
    np.testing.assert_array_equal(interpret(made, traced.operands())[0], want)
    found = conv_geometry(made)
    kernels = w.reshape(-1)
    result = np.zeros((found.images, found.rows, found.outputs, found.columns))
    for b, y, p in np.ndindex(result.shape[:3]):
        image = x.reshape(found.images, found.lines, found.length)[b]
        for k, (line, element) in enumerate(found.terms):
            line += y * found.step[0] + found.start[0]
            element += p * found.step[1] + found.start[1]
            if 0 <= line < found.lines and 0 <= element < found.length:
                step, first = (found.weights.stride(axis) for axis in ("k", "n"))
                result[b, y, p] += image[line, element] * kernels[np.arange(found.columns) * first + k * step]
    np.testing.assert_allclose(result.reshape(want.shape), want, rtol=1e-4, atol=1e-4)


REFUSED = {
    "groups": (lambda x, w: conv(x, w, groups=2), zeros(1, 9, 9, 4), zeros(3, 3, 2, 16)),
    "stretched": (lambda x, w: conv(x, w, padding=((1, 1), (1, 1)), lhs=(2, 2)), zeros(1, 9, 9, 3), zeros(3, 3, 3, 16)),
    "channels first": (
        lambda x, w: conv(x, w, layout=("NCHW", "OIHW", "NCHW")),
        zeros(1, 3, 9, 9),
        zeros(16, 3, 3, 3),
    ),
    "prologue": (lambda x, w: conv(jnp.abs(x), w), zeros(1, 9, 9, 3), zeros(3, 3, 3, 16)),
    "prologue without padding": (
        lambda x, w: conv(jnp.abs(x), w, padding="VALID"),
        zeros(1, 9, 9, 3),
        zeros(3, 3, 3, 16),
    ),
    "channel gate": (
        lambda x, gate, w: conv(x * gate, w),
        zeros(1, 112, 112, 32),
        zeros(1, 1, 1, 32),
        zeros(1, 1, 32, 16),
    ),
    "surrounded by ones": (
        lambda x, w: conv(jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)), constant_values=1), w, padding="VALID"),
        zeros(1, 9, 9, 3),
        zeros(3, 3, 3, 16),
    ),
    "precision": (
        lambda x, w: jax.lax.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), precision="highest"
        ),
        zeros(1, 9, 9, 3),
        zeros(3, 3, 3, 16),
    ),
    "many terms": (conv, zeros(1, 20, 20, 9), zeros(7, 7, 9, 16)),
    "few terms": (conv, zeros(1, 9, 9, 1), zeros(2, 2, 1, 16)),
    "a product": (lambda x, w: x @ w, zeros(64, 27), zeros(27, 32)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_patch(name):
    fn, *arguments = REFUSED[name]
    assert made_of(fn, *arguments) is None


NETWORKS = {
    "7x7": (zeros(64, 224, 224, 3), zeros(7, 7, 3, 64), ((3, 3), (3, 3))),
    "7x7 alone": (zeros(1, 224, 224, 3), zeros(7, 7, 3, 64), ((3, 3), (3, 3))),
    "3x3": (zeros(64, 224, 224, 3), zeros(3, 3, 3, 32), "SAME"),
    "3x3 odd": (zeros(64, 299, 299, 3), zeros(3, 3, 3, 32), "VALID"),
    "one row": (zeros(64, 3, 300, 3), zeros(5, 5, 3, 32), ((1, 1), (2, 2))),
    "small": (zeros(1, 9, 10, 3), zeros(3, 3, 3, 7), "SAME"),
}


def layer(name):
    x, w, padding = NETWORKS[name]
    return programs.trace(
        lambda x, w, b: jax.nn.relu(conv(x, w, strides=(2, 2), padding=padding) + b), x, w, zeros(w.shape[-1])
    ).program()


@pytest.mark.parametrize("name", NETWORKS)
def test_schedules_are_few_legal_and_ranked(name):
    program = layer(name)
    found = gpu_candidates.candidates(program, MACHINE, 100)
    assert 1 < len({p.digest for p, _ in found}) == len(found) <= gemm_mma.MOST
    assert [s for _, s in found] == sorted((s for _, s in found), reverse=True) and found[0][1] <= 1
    assert dict(found[0][0].params)["cuda"] == "patch"
    for candidate, _ in found:
        verify(candidate)
        assert Program.from_json(candidate.to_text()).digest == candidate.digest
        if dict(candidate.params)["cuda"] == "patch":
            shape = shape_of(candidate)
            assert shape.fits and shape.tiles <= shape.blocks[1] * shape.share
            assert shape.shared <= gemm_mma.MOST_SHARED
            assert few_channels.cycles(candidate, shape, MACHINE) >= few_channels.cycle_bound(candidate, MACHINE)


def test_the_ranking_fills_the_machine():
    def blocks(name):
        return shape_of(gpu_candidates.candidates(layer(name), MACHINE, 1)[0][0]).blocks

    assert blocks("7x7 alone")[0] * blocks("7x7 alone")[1] >= 132
    assert blocks("7x7")[0] == 1  # the image is read once for all filters


def test_a_patch_by_hand():
    """8 x 16 outputs of a 7x7 window, stride 2: 21 lines of 37 pixels, which begin 9 elements early."""
    found = conv_geometry(as_few_channel_conv(layer("7x7")))
    assert (found.start, found.step, found.reach) == ((-3, -9), (2, 6), (7, 21))
    assert (found.lines, found.length, found.images, found.rows, found.outputs) == (224, 672, 64, 112, 112)
    shape = FewChannelTile(found, 8, 16, 64, (4, 1, 1), 2, 4)
    assert (shape.lines, shape.width, shape.early) == (7 * 2 + 7, 4, 3)  # 9 early are 12, a multiple of 16 bytes
    assert shape.length == 116 >= 3 + 15 * 6 + 21 and shape.steps == 19 and len(shape.k_offsets) == 38
    assert (shape.threads, shape.warp, shape.counts, shape.tiles) == (128, (2, 16, 64), (14, 7), 64 * 98)
    assert shape.filters == 152 * 72 * 4 and shape.shared == 2 * 21 * shape.pitch * 4 + shape.filters
    assert shape.fragment_row_stride == 2  # 12 elements: eight pixels by four terms meet all banks
    (use,) = kernel_time.launch_stats(
        few_channels.apply_tile(as_few_channel_conv(layer("7x7")), shape), [(1568, 128, 140, shape.shared)]
    )
    read = 64 * 98 * 21 * 116 + 1568 * 152 * 72
    assert use.moved == 4 * (read + 64 * 112 * 112 * 64) and use.under_way == 21 * shape.pitch * 4 / 128


@pytest.mark.parametrize("stride, channels", list(itertools.product((1, 2, 3, 4), (1, 2, 3, 4))))
def test_fragments_meet_few_banks(stride, channels):
    """Cycles of a fragment's reads, recounted; lines in steps of 16 words are the worst case."""
    made = made_of(
        lambda x, w: conv(x, w, strides=(stride, stride)), zeros(1, 64, 64, channels), zeros(5, 5, channels, 8)
    )
    shape = FewChannelTile(conv_geometry(made), 4, 16, 16, (4, 1, 1), 1, 1)
    total = 0
    for four in shape.k_offsets:
        words = {g * shape.fragment_row_stride * stride * channels + t for g in range(8) for t in four}
        total += max(sum(w % 32 == bank for w in words) for bank in range(32))
    assert total == shape.bank_conflict_cycles <= (4 if stride * channels == 16 else 2) * len(shape.k_offsets)
