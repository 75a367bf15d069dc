"""Which chains of two layers are back-to-back GEMMs, and why others are none."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jcuts.base.errors import Refusal
from jcuts.fusion import greedy
from jcuts.fusion.join_regions import region_groups
from jcuts.fusion.match_b2b_gemm import b2b_gemm_groups
from jcuts.kernel_ir.interpret import interpret
from jcuts.kernel_ir.program import Program
from jcuts.kernel_ir.verify import verify
from jcuts.lower.patterns.b2b_gemm import lower_b2b_gemm, match_b2b_gemm
from jcuts.schedule.gpu import candidates as gpu_candidates
from tests import programs
from tests.codegen.cuda.b2b_gemm.test_kernel import CASES, HALVES, operands_of
from tests.codegen.cuda.inverted_residual.test_kernel import BLOCKS
from tests.ops.cases import conv

MACHINE = gpu_candidates.GpuMachine(132)


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


def yes(program):
    return True


@pytest.mark.parametrize("layers", [*CASES.values(), *HALVES.values()], ids=[*CASES, *(f"bf16 {n}" for n in HALVES)])
def test_mlps_are_matched_and_keep_their_meaning(layers):
    traced = programs.trace(layers, *layers.arguments())
    (group,) = b2b_gemm_groups(traced.graph, greedy.group(traced.graph).subsets, yes)
    assert group.members == traced.everything and len(group.parts) == 2
    program = group.program
    verify(program)
    assert Program.from_json(program.to_text()) == program
    found = match_b2b_gemm(program)
    assert not isinstance(found, Refusal)
    sizes = found.rows, found.in_channels, found.expanded_channels, found.out_channels
    assert sizes == (np.prod(layers.rows), layers.inputs, layers.hidden, layers.results)
    assert found.multiply_adds == sizes[0] * sizes[2] * (sizes[1] + sizes[3])
    (got,) = interpret(program, operands_of(traced))
    want = np.asarray(layers(*layers.arguments()), np.float32)
    limit = 2e-4 if layers.dtype == np.float32 else 6e-2
    np.testing.assert_allclose(got.astype(np.float32), want, rtol=limit, atol=limit)


X, W, V = zeros(64, 32), zeros(32, 64), zeros(64, 32)
IMAGE = zeros(2, 8, 8, 32)


def with_precision(x, w, v):
    with jax.default_matmul_precision("highest"):
        return jax.nn.relu(x @ w) @ v


NOT = {
    "precision": (with_precision, (X, W, V), "more than the default precision"),
    "a factor per row": (lambda x, w, v, r: ((x @ w) * r) @ v, (X, W, V, zeros(64, 1)), "no vector along the hidden"),
    "a residual between": (lambda x, w, v, y: (x @ w + y) @ v, (X, W, V, zeros(64, 64)), "no vector along the hidden"),
    "a prologue": (lambda x, w, v, s: ((x * s) @ w) @ v, (X, W, V, zeros(32)), "the first layer is no GEMM"),
    "a 3x3 convolution": (
        lambda x, w, v: conv(jax.nn.relu(conv(x, w, padding="SAME")), v),
        (IMAGE, zeros(3, 3, 32, 64), zeros(1, 1, 64, 32)),
        "the first layer is no GEMM of rows as they lie in memory",
    ),
    "a 3x3 convolution behind": (
        lambda x, w, v: conv(jax.nn.relu(conv(x, w)), v, padding="SAME"),
        (IMAGE, zeros(1, 1, 32, 64), zeros(3, 3, 64, 32)),
        "the second layer is no GEMM of rows as they lie in memory",
    ),
    "several types": (
        lambda x, w, v: jnp.einsum("mk,kn->mn", x, w, preferred_element_type=jnp.float32) @ v,
        (zeros(64, 32, dtype=jnp.bfloat16), zeros(32, 64, dtype=jnp.bfloat16), V),
        "operands of several types",
    ),
    "three layers": (lambda x, w, v: ((x @ w) @ v) @ w, (X, W, V), "3 phases"),
    "a batch": (
        lambda x, w, v: jnp.einsum("bmk,bkn->bmn", x, w) @ v,
        (zeros(4, 64, 32), zeros(4, 32, 64), V),
        "no GEMM",
    ),
}


@pytest.mark.parametrize("name", NOT)
def test_what_makes_no_back_to_back_gemm(name):
    function, arguments, why = NOT[name]
    traced = programs.trace(function, *arguments)
    refused = lower_b2b_gemm(traced.graph, traced.everything)
    assert isinstance(refused, Refusal) and why in refused.reason, refused
    cover = greedy.group(traced.graph).subsets
    groups = b2b_gemm_groups(traced.graph, cover, yes)
    assert all(group.members < traced.everything for group in groups) and bool(groups) is (name == "three layers")
    assert not b2b_gemm_groups(traced.graph, cover, lambda program: False)


def test_a_hidden_matrix_that_is_needed_elsewhere_makes_none():
    def summed(x, w, v):
        hidden = jax.nn.relu(x @ w)
        return hidden @ v, hidden.sum()

    def added(x, w, v):
        hidden = jax.nn.relu(x @ w)
        return hidden @ v + hidden

    for function in (summed, added):
        traced = programs.trace(function, X, W, zeros(64, 64))
        assert not region_groups(traced.graph, greedy.group(traced.graph).subsets, yes)


def test_1x1_convolutions_are_gemms_of_pixels():
    def layers(x, w, v):
        return conv(jax.nn.silu(conv(x, w)), v) + x

    traced = programs.trace(layers, IMAGE, zeros(1, 1, 32, 64), zeros(1, 1, 64, 32))
    (group,) = region_groups(traced.graph, greedy.group(traced.graph).subsets, yes)
    found = match_b2b_gemm(group.program)
    assert not isinstance(found, Refusal) and found.rows == 2 * 8 * 8


def test_inverted_residuals_are_preferred_and_no_region_is_in_two_groups():
    """Of a block without residual, the project GEMM and the expand GEMM of the next one would be a pair."""
    first, second = BLOCKS["stride 2"], BLOCKS["residual"]
    arguments = [*first.arguments(), *second.arguments()[1:]]
    traced = programs.trace(lambda x, *more: second(first(x, *more[:6]), *more[6:]), *arguments)
    cover = greedy.group(traced.graph).subsets
    found = region_groups(traced.graph, cover, lambda p: bool(gpu_candidates.candidates(p, MACHINE, 1)))
    assert [group.program.template for group in found] == ["block", "block"]
    chain = programs.trace(lambda x, w, v: (((x @ w) @ v) @ w) @ v, X, W, V)
    groups = region_groups(chain.graph, greedy.group(chain.graph).subsets, yes)
    assert [len(group.parts) for group in groups] == [2, 2] and not groups[0].members & groups[1].members
