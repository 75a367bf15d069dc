"""Element-wise regions between the kernels of a chain: what is joined, and which have kernels then."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.gpu_kernels import decoder_model as model
from benchmarks.networks import modes, partition_gpu
from jcuts.base.settings import UNBROKEN, Settings, Variant
from jcuts.fusion.chain_gaps import chain_gaps, is_elementwise, join_elementwise
from jcuts.jit import race_limits, variant_space
from jcuts.lower.region import lower_region
from jcuts.pipeline import inplace_update, loop_bodies, passes
from jcuts.trace import jaxapi
from jcuts.trace.inline import inline
from tests import programs

W = np.ones((16, 32), np.float32)


def rotated(x, cos):
    """A product, the rotary embedding of a part of it, another product."""
    part = (x @ W)[:, 8:24]
    a, b = part[:, :8], part[:, 8:]
    return jnp.concatenate([a * cos - b, b * cos + a], -1) @ W


def cover_of(graph):
    """Every equation alone."""
    members = [frozenset({node.number}) for node in graph.nodes]
    return [(m, lower_region(graph, m)) for m in members]


def prims(graph, members):
    return [graph.nodes[m].prim for m in sorted(members)]


def test_slices_join_what_alone_reads_them():
    graph = programs.trace(rotated, np.ones((4, 16), np.float32), np.ones((4, 8), np.float32)).graph
    before = [members for members, _ in cover_of(graph) if is_elementwise(graph, members)]
    found = join_elementwise(graph, cover_of(graph), lambda program: True)
    after = [members for members, _ in found if is_elementwise(graph, members)]
    assert len(after) == 1 and set().union(*before) == set(after[0])
    assert chain_gaps(graph, [members for members, _ in found]) == set(after)
    assert {m for members, _ in found for m in members} == {m for members, _ in cover_of(graph) for m in members}


def test_regions_without_a_form_and_with_several_readers_stay_apart():
    def twice(x):
        part = jnp.sin(x @ W)
        return jnp.cos(part) @ W.T, part.T * 2

    graph = programs.trace(rotated, np.ones((4, 16), np.float32), np.ones((4, 8), np.float32)).graph
    assert join_elementwise(graph, cover_of(graph), lambda program: False) == cover_of(graph)
    graph = programs.trace(twice, np.ones((4, 16), np.float32)).graph
    found = [prims(graph, members) for members, _ in join_elementwise(graph, cover_of(graph), lambda program: True)]
    assert ["sin"] in found and ["cos"] in found and ["mul", "transpose"] in map(sorted, found)


def test_what_no_kernel_reads_is_no_gap():
    """The program's first and last element-wise operations are XLA's, which fuses them into others."""
    graph = programs.trace(lambda x: jnp.sin(jnp.cos(x) @ W), np.ones((4, 16), np.float32)).graph
    regions = [members for members, _ in cover_of(graph)]
    apart = [frozenset({n.number}) for n in graph.nodes]
    assert not chain_gaps(graph, regions) and not chain_gaps(graph, apart)


def decoder(layers=2):
    """A decoding step of a decoder with joined projections, by shapes alone."""
    sizes = model.Sizes(layers, width=2048, heads=16, shared=16, hidden=5376, vocabulary=4096)
    caches, weights = jax.eval_shape(lambda: (model.caches(sizes, 1, "bfloat16"), model.weights(sizes, "bfloat16")))
    scalar, tokens = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((), (1,)))
    step = jax.jit(model.decoding_step(sizes))  # inside another function, as in users' programs
    return jax.make_jaxpr(lambda *xs: step(*xs))(caches, weights, tokens, scalar)


def test_a_decoding_step_is_one_chain():
    """Rotary embeddings and appends are kernels; nothing of XLA's lies between the first product and the head."""
    closed, states = decoder(), []
    assert inplace_update.appends(inline(closed))

    def times(problem, region):
        return [*partition_gpu.predicted(problem), 1.0]

    with modes.pretended({}, times):
        forms = variant_space.candidate_variants(closed, "cuda")
        (form,) = [f for f in forms if f is not None and f.regions == UNBROKEN]
        assert form in race_limits.most_rewritten(forms) and variant_space.is_known(str(f"jcuts/{form}"), "cuda", True)
        stop = {name: lambda state: (states.append(state), state)[1] for name in ("compile", "rebuild", "chain")}
        with_stops = passes.with_substitutes(stop)
        kept, passes.PASSES = passes.PASSES, with_stops
        try:
            passes.optimize_jaxpr(closed, Settings(form=form), platform="cuda", may_measure=True)
        finally:
            passes.PASSES = kept
    top = states[-1].top
    assert loop_bodies.wanted([top], UNBROKEN) == {s.identity for s in top.subsets if s.program.template == "map"}
    assert not loop_bodies.wanted([top], "all")
    updates = [u for s in top.subsets if (u := inplace_update.find_inplace_update(top, s)) is not None]
    assert len(updates) == 4 and all(u.begins is not None for u in updates)
    graph = top.graph
    kernels = frozenset().union(*(s.members for s in top.subsets)) | {u.number for u in updates}
    products = [n.number for n in graph.nodes if n.prim == "dot_general"]
    assert kernels.issuperset(products)
    behind: set[int] = set()
    for node in graph.nodes:  # what depends on a kernel, and is read by one, is a kernel
        made = {graph.tensors[t].producer for t in node.inputs}
        if made & kernels or made & behind:
            behind.add(node.number)
    left = behind - kernels
    assert not any(u in kernels for n in left for t in graph.nodes[n].outputs for u in graph.tensors[t].users)


def test_programs_without_appends_have_no_such_variant():
    def prefill(x, cache):
        return lax.dynamic_update_slice(cache, x @ W, (0, 0))

    x, cache = np.ones((4, 16), np.float32), np.ones((8, 32), np.float32)
    assert not inplace_update.appends(jaxapi.closed_jaxpr_of(prefill, x, cache))

    def generate(x, cache):
        def step(k, cache):
            return lax.dynamic_update_slice(cache, (x @ W)[:1], (k, 0))

        return lax.fori_loop(0, 4, step, cache)

    assert inplace_update.appends(jaxapi.closed_jaxpr_of(generate, x, cache))
    assert Variant.parse(f"plain/{UNBROKEN}").regions == UNBROKEN
