"""Convolutions that keep pixels: how they are read, and which schedules are proposed."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jcuts.codegen.cuda.conv.implicit_gemm_tile import window_shape
from jcuts.codegen.cuda.gemm.mma_mainloop import three
from jcuts.lower.patterns.conv_window import match_conv_window
from jcuts.lower.patterns.gemm import K, _number, as_gemm, gemm_operands
from jcuts.lower.region import lower_region
from jcuts.lower.tensor_graph import build_graph
from jcuts.rewrite.simplify import simplify
from jcuts.schedule.gpu import candidates as gpu_candidates
from jcuts.schedule.gpu import contraction
from jcuts.schedule.gpu.conv import implicit_gemm, implicit_gemm_cluster
from jcuts.schedule.gpu.gemm.wgmma_problem import WgmmaProblem
from jcuts.trace.inline import inline

MACHINE = gpu_candidates.GpuMachine(132)


def convolution(image, filters, strides=(1, 1), padding="SAME"):
    """The product of a convolution with rounded weights, of shapes alone."""

    def fn(x, w):
        return lax.conv_general_dilated(x, w, strides, padding, dimension_numbers=("NHWC", "OHWI", "NHWC"))

    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (image, filters)]
    graph = build_graph(simplify(inline(jax.make_jaxpr(fn)(*arguments))).jaxpr)
    made = as_gemm(lower_region(graph, frozenset(range(len(graph.nodes)))))
    right = gemm_operands(made)[1].buffer
    return replace(made, buffers=tuple(replace(b, tf32=b.name == right) for b in made.buffers))


@pytest.mark.parametrize(
    "image, filters, strides, padding",
    [
        ((3, 9, 11, 32), (32, 3, 3, 32), (1, 1), "SAME"),
        ((2, 9, 8, 64), (32, 1, 7, 64), (1, 1), "SAME"),
        ((2, 13, 12, 32), (32, 5, 3, 32), (2, 3), "VALID"),
        ((2, 9, 8, 4), (32, 7, 1, 4), (1, 1), "SAME"),
    ],
)
def test_every_pixel_that_a_tile_reads_is_in_its_run(image, filters, strides, padding):
    program = convolution(image, filters, strides, padding)
    found = match_conv_window(program)
    assert found is not None and found.taps == filters[1] * filters[2] and found.channels == image[3]
    side = found.side
    for size in (5, 64):
        span = found.halo_rows(size)
        for m in range(found.rows):
            first = _number(found.pixel, {"m": m // size * size}) + found.first
            for tap in range(found.taps):
                address = _number(side.index, {"m": m, K: tap * found.channels})
                line = _number(found.pixel, {"m": m}) - _number(found.pixel, {"m": m // size * size})
                line += tap // found.across * found.down + tap % found.across * found.aside
                assert address == (first + line) * found.channels and 0 <= line < span


def test_what_shares_no_pixels():
    dense = jax.make_jaxpr(lambda x, w: x @ w.T)(*(jax.ShapeDtypeStruct((256, 256), jnp.float32) for _ in "xw"))
    graph = build_graph(simplify(inline(dense)).jaxpr)
    made = as_gemm(lower_region(graph, frozenset(range(len(graph.nodes)))))
    assert match_conv_window(made) is None
    assert match_conv_window(convolution((2, 30, 30, 32), (32, 7, 7, 32))) is None  # 49 taps
    assert match_conv_window(convolution((2, 30, 30, 32), (32, 1, 1, 32))) is None


LAYERS = {
    "56x56x64": ((64, 56, 56, 64), (64, 3, 3, 64)),
    "28x28x128": ((64, 28, 28, 128), (128, 3, 3, 128)),
    "7x7x512": ((64, 7, 7, 512), (512, 3, 3, 512)),
    "35x35x48": ((64, 35, 35, 48), (64, 5, 5, 48)),
    "35x35x96": ((64, 35, 35, 96), (96, 3, 3, 96)),
}


@pytest.mark.parametrize("layer", LAYERS)
def test_schedules_are_what_their_blocks_take(layer):
    program = convolution(*LAYERS[layer])
    counter, found = WgmmaProblem(program, MACHINE), match_conv_window(program)
    assert found is not None
    tilings = list(implicit_gemm.tilings(counter, found))
    assert tilings
    for tiling in tilings:
        shape = window_shape(tiling.of(program))
        assert shape.shared == implicit_gemm.shared(found, tiling) <= implicit_gemm.MOST_SHARED
        assert counter.least <= implicit_gemm.cycles(counter, found, tiling)
        assert shape.blocks * tiling.rounds >= -(-counter.rows // tiling.rows) * -(-counter.columns // tiling.columns)


def test_they_are_tried_before_others():
    program = convolution(*LAYERS["28x28x128"])
    found = [dict(p.params) for p, _ in contraction.contraction_schedules(program, MACHINE)]
    assert sum("pixels" in p for p in found) >= implicit_gemm.MOST and "pixels" in found[0]
    assert any("pixels" not in p for p in found) and any("fed" in p for p in found)
    other = replace(MACHINE, capability=(8, 0))
    assert not any("pixels" in dict(p.params) for p, _ in contraction.contraction_schedules(program, other))


SMALL = {
    "7x7x512": ((1, 7, 7, 512), (512, 3, 3, 512)),
    "14x14x128 to 32": ((1, 14, 14, 128), (32, 3, 3, 128)),
    "35x35x48": ((1, 35, 35, 48), (64, 5, 5, 48)),
    "17x17x160": ((1, 17, 17, 160), (160, 1, 7, 160)),
    "16 of 14x14x256": ((16, 14, 14, 256), (256, 3, 3, 256)),
}


@pytest.mark.parametrize("layer", SMALL)
def test_single_images_are_shared_among_blocks(layer):
    """With pixels that are kept and without, in clusters all; what estimates count is what blocks take."""
    program = convolution(*SMALL[layer])
    counter, found = WgmmaProblem(program, MACHINE), match_conv_window(program)
    assert found is not None
    ranked = [dict(p.params) for p, _ in contraction.contraction_schedules(program, MACHINE)]
    clusters = [p for p in ranked if "cluster" in p and "pixels" in p]
    assert len(clusters) == implicit_gemm_cluster.MOST and any("pixels" not in p for p in ranked)
    tilings = list(implicit_gemm_cluster.cluster_tiles(counter, found))
    assert len(tilings) > implicit_gemm_cluster.MOST
    for tiling in tilings:
        shape = window_shape(tiling.of(program))
        assert shape.shared <= implicit_gemm_cluster.shared(found, tiling) <= implicit_gemm.MOST_SHARED
        assert shape.blocks == tiling.cluster * -(-counter.rows // tiling.rows) * -(-counter.columns // tiling.columns)
        assert implicit_gemm_cluster.cycles(counter, found, tiling) > counter.least


def test_clusters_that_a_smaller_gpu_does_not_have_at_once_share_multiprocessors():
    """Of 132 multiprocessors 13 clusters of 8 blocks have one per block, of 78 only 7."""
    program = convolution(*SMALL["7x7x512"])
    large, small = (WgmmaProblem(program, replace(MACHINE, sms=sms)) for sms in (132, 78))
    found = match_conv_window(program)
    assert found is not None
    tilings = [t for t in implicit_gemm_cluster.cluster_tiles(small, found) if (t.columns, t.cluster) == (64, 8)]
    assert tilings and small.rows <= 64 and small.columns == 8 * 64
    for tiling in tilings:
        assert implicit_gemm_cluster.cycles(small, found, tiling) > implicit_gemm_cluster.cycles(large, found, tiling)


def test_older_units_and_tiny_layers_have_no_clusters():
    program = convolution(*SMALL["7x7x512"])
    older = WgmmaProblem(program, replace(MACHINE, capability=(8, 0)))
    assert not implicit_gemm_cluster.candidates(older, program)
    tiny = convolution((1, 5, 5, 64), (32, 3, 3, 64))
    assert not implicit_gemm_cluster.candidates(WgmmaProblem(tiny, MACHINE), tiny)


def test_the_best_are_tried_in_other_ways():
    for layer in ("56x56x64", "28x28x128", "7x7x512"):
        program = convolution(*LAYERS[layer])
        ranked = sorted(contraction.contraction_schedules(program, MACHINE), key=lambda found: -found[1])
        found = [p for p in (dict(p.params) for p, _ in ranked) if "pixels" in p and "fed" not in p]
        assert {p.get("fetched", 0) for p in found[:4]} == {0, 1}
        assert any(p.get("unrolled") for p in found) or layer == "28x28x128"  # no registers for all addresses
        for params in found:
            window_shape(replace(program, params=tuple(params.items())))


def test_filters_stay_where_they_have_a_place():
    program = convolution(*LAYERS["56x56x64"])
    found = match_conv_window(program)
    assert found is not None
    stay = [dict(p.params) for p, _ in contraction.contraction_schedules(program, MACHINE)]
    stay = [p for p in stay if "pixels" in p and p["stages"] == found.k_tiles == 18]
    assert len(stay) >= 2 and all(three(p["tile"])[1] == 64 for p in stay)
