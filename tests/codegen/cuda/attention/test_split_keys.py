"""Decoding: one query per head, keys split over the blocks of a cluster, against float64, through the PTX machine."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jcuts.base.errors import CompileRejected, Refusal
from jcuts.codegen.cuda import compile as compiler
from jcuts.fusion import greedy
from jcuts.fusion.match_attention import fuse_attention
from jcuts.lower.patterns.attention import match
from jcuts.schedule.gpu import candidates as gpu_candidates
from jcuts.schedule.gpu.attention.tile import shape_of
from tests import programs
from tests.codegen.cuda.attention.test_flash import (
    LIMIT,
    MACHINE,
    SM90,
    compare,
    compiled,
    exact,
    normal,
    results,
    shaped,
    traced,
)
from tests.codegen.cuda.attention.test_flash import _with_logsumexp as with_logsumexp
from tests.gpu.cases import attention
from tests.ptx.tensor_core import round_tf32


def decoded(q, k, v, position):
    """Queries of one position to the keys up to it: heads of (batch, length, heads, depth) share keys."""
    q = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[-1])
    scores = jnp.einsum("bqhgd,bkhd->bhgqk", q, k) * q.shape[-1] ** -0.5
    scores = jnp.where(jnp.arange(k.shape[1]) <= position, scores, -jnp.inf)
    return jnp.einsum("bhgqk,bkhd->bqhgd", jax.nn.softmax(scores, -1).astype(v.dtype), v)


SPLIT: list[Any] = [(16, 16, (1, 1), 2, 2), (16, 32, (1, 2), 3, 4), (16, 32, (1, 2), 1, 2), (32, 16, (2, 1), 2, 8)]
"""Rows, keys, warps, stages, blocks of a cluster."""


@compiled
@pytest.mark.parametrize("position", [127, 30])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("heads", [3, 6], ids=["one query", "grouped"])
@pytest.mark.parametrize("tile", SPLIT, ids=str)
def test_keys_split_over_a_cluster(tile, heads, dtype, position):
    """Decoding: the softmax states of a cluster's blocks are merged, of slices without a key as well."""
    shapes = (2, 1, heads, 16), (2, 128, 3, 16), (2, 128, 3, 16)
    arrays = [normal(*s, seed=n).astype(jnp.dtype(dtype)) for n, s in enumerate(shapes)]
    program, operands = traced(decoded, *arrays, np.int32(position))
    known = match(program)
    assert not isinstance(known, Refusal) and (known.batches, known.rows) == (6, heads // 3)
    rows, keys, warps, stages, cluster = tile
    for skips in (False, True):
        (got,) = results(shaped(program, rows, keys, warps, stages, skips=skips, cluster=cluster), operands)
        compare(got, exact(decoded, *arrays, np.int32(position)), LIMIT[dtype])


def biased(q, k, v, seen, bias):
    """Grouped queries with a mask and a bias per key."""
    q = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[-1])
    scores = jnp.einsum("bqhgd,bkhd->bhgqk", q, k).astype(jnp.float32) * q.shape[-1] ** -0.5 + bias
    return jnp.einsum("bhgqk,bkhd->bqhgd", jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), -1).astype(v.dtype), v)


@compiled
@pytest.mark.parametrize("group", [1, 5, 8, 9])
@pytest.mark.parametrize("tile", [(16, 32, (1, 2), 3, 1), (16, 16, (1, 1), 1, 1), (16, 32, (1, 2), 2, 2)], ids=str)
def test_masks_and_biases_per_key_are_loaded_a_tile_ahead(tile, group):
    """Eight queries of a head at most: half a fragment has no rows; the last tile of keys is not whole."""
    keys = 16 if tile[3] == 1 else 118
    arrays = [normal(1, n, h, 16, seed=n).astype(jnp.bfloat16) for n, h in ((1, 2 * group), (keys, 2), (keys, 2))]
    arrays += [normal(keys) > -0.5, normal(keys, seed=1)]
    program, operands = traced(biased, *arrays)
    rows, across, warps, stages, cluster = tile
    made = shaped(program, rows, across, warps, stages, cluster=cluster)
    (got,) = results(made, operands)
    compare(got, exact(biased, *arrays), LIMIT["bfloat16"])
    ptx = compiler.ptx_of(made, SM90)
    loop = ptx[: ptx.index("mma.sync")]
    assert ("ld.global.nc.u8" in loop or "ld.global.nc.b16" in loop) == (group <= 8)


@compiled
@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("queries", [5, 20])
def test_float32_keys_split_over_a_cluster(rounded, queries):
    arrays = normal(1, queries, 2, 24), normal(1, 70, 2, 24, seed=1), normal(1, 70, 2, 24, seed=2)
    program, operands = traced(with_logsumexp, *arrays)
    made = shaped(program, 16, 32, (1, 2), 2, rounded, cluster=3)
    found = dict(zip((b.shape for b in program.outputs), results(made, operands), strict=True))
    with jax.enable_x64(True):
        wide = [jnp.asarray(round_tf32(a).astype(np.float64)) for a in arrays]
        want = [np.asarray(x) for x in with_logsumexp(*wide)]
    compare(found[want[0].shape], want[0], LIMIT["float32"])
    np.testing.assert_allclose(found[want[1].shape], want[1], atol=2e-5)


@compiled
def test_a_cluster_that_does_not_divide_the_tiles_is_refused():
    program, _ = traced(attention(), *(np.zeros((1, 96, 2, 16), jnp.bfloat16) for _ in range(3)))
    with pytest.raises(CompileRejected, match="no attention of tiles"):
        compiler.compile_program(shaped(program, 16, 32, (1, 1), 2, cluster=2), SM90)


@compiled
@pytest.mark.parametrize("heads", [16, 32], ids=["one query", "grouped"])
def test_ranked_schedules_of_decoding_assemble_without_spills(heads):
    """Few heads: the keys of each are split over a cluster."""
    arrays = [np.zeros((1, n, h, 2048 // heads), jnp.bfloat16) for n, h in ((1, heads), (2048, 16), (2048, 16))]
    program, _ = traced(decoded, *arrays, np.int32(2047))
    found = [candidate for candidate, _ in gpu_candidates.candidates(program, MACHINE, 4)]
    assert any(dict(c.params).get("cluster", 1) > 1 for c in found)
    for candidate in found:
        compiler.compile_program(candidate, SM90)


def test_clusters_that_fill_their_multiprocessors_are_not_first():
    """16 clusters of eight blocks that fill an SM each took two waves on an H200 (25.0 us in place of 14.3)."""
    arrays = [np.zeros((1, n, 16, 128), jnp.bfloat16) for n in (1, 2048, 2048)]
    program, _ = traced(decoded, *arrays, np.int32(2047))
    for candidate, _ in gpu_candidates.candidates(program, MACHINE, 3):
        tile = shape_of(candidate)
        assert not (tile.cluster == 8 and 2 * tile.shared > MACHINE.limits.smem_per_sm_bytes)


def test_one_query_in_float32_is_no_attention_of_matrix_units():
    made = programs.trace(decoded, *(np.zeros((1, n, 2, 16), np.float32) for n in (1, 32, 32)), np.int32(3))
    cover = greedy.group(made.graph).subsets
    assert all(program.template != "attention" for _, program in fuse_attention(made.graph, cover))
