"""Tails of products that the next kernel takes over."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jcuts.fusion import greedy, move_epilogue
from jcuts.kernel_ir.interpret import interpret
from jcuts.kernel_ir.program import Program
from jcuts.lower.patterns.gemm import as_gemm, gemm_operands, k_vectors, prologue
from jcuts.lower.region import lower_region
from jcuts.lower.tensor_graph import build_graph
from jcuts.rewrite.registry import rewritten
from jcuts.rewrite.simplify import simplify
from jcuts.rewrite.tf32_weights import rounded_constants
from jcuts.schedule.gpu import candidates as gpu_candidates
from jcuts.trace import jaxapi
from jcuts.trace.inline import inline

RNG = np.random.default_rng(2)
MACHINE = gpu_candidates.GpuMachine(132)


def values(*shape):
    return jnp.asarray(RNG.standard_normal(shape), jnp.float32)


X, W, B, D = values(2, 6, 5, 96), values(96, 8), values(8), values(3, 3, 1, 8)


def expanded(x, w, b, d):
    """Product, bias, relu6, depthwise convolution with padding, relu."""
    y = jnp.clip(x @ w + b, 0.0, 6.0)
    numbers = ("NHWC", "HWIO", "NHWC")
    y = lax.conv_general_dilated(y, d, (1, 1), "SAME", dimension_numbers=numbers, feature_group_count=8)
    return jax.nn.relu(y)


def has_form(program):
    return bool(gpu_candidates.candidates(program, MACHINE, 1))


def covers(function, *args):
    closed = simplify(inline(jaxapi.closed_jaxpr_of(function, *args)))
    graph = build_graph(closed.jaxpr)
    before = greedy.group(graph).subsets
    return graph, before, move_epilogue.move_epilogues(graph, before, has_form)


def primitives(graph, members):
    return sorted(
        graph.nodes[m].prim
        for m in members
        if graph.nodes[m].prim not in ("broadcast_in_dim", "reshape", "convert_element_type")
    )


def test_a_product_without_a_kernel_loses_what_stands_before_it():
    def block(x, s, w, r):
        return jax.nn.relu(jnp.abs(x * s) @ w + r * 0.5)

    args = values(12, 96), values(96), values(96, 8), values(12, 8)
    closed = simplify(inline(jaxapi.closed_jaxpr_of(block, *args)))
    graph = build_graph(closed.jaxpr)
    everything = frozenset(range(len(graph.nodes)))
    program = lower_region(graph, everything)
    assert isinstance(program, Program) and not has_form(program)
    (head, first), (rest, second) = move_epilogue.split_prologues(graph, [(everything, program)], has_form)
    assert head | rest == everything and not head & rest and has_form(second)
    assert primitives(graph, head) == ["abs", "mul"]
    assert primitives(graph, rest) == ["add", "dot_general", "max", "mul"]
    known = {a.shape: np.asarray(a) for a in args}
    (known[12, 96],) = interpret(first, [known[b.shape] for b in first.inputs])
    (got,) = interpret(second, [known[b.shape] for b in second.inputs])
    np.testing.assert_allclose(got, block(*args), rtol=1e-4, atol=1e-4)
    # Nothing is cut off where it helps nothing, or where the kernel computes it itself.
    for form in (True, False):
        assert move_epilogue.split_prologues(graph, [(everything, program)], lambda _, form=form: form) == [
            (everything, program)
        ]


def test_a_depthwise_convolution_takes_the_activation_before_it():
    graph, before, after = covers(expanded, X, W, B, D)
    assert {m for members, _ in before for m in members} == {m for members, _ in after for m in members}
    products = [members for members, _ in after if move_epilogue.is_library_contraction(graph, members)]
    (kernel,) = [(members, p) for members, p in after if not move_epilogue.is_library_contraction(graph, members)]
    assert [primitives(graph, m) for m in products] == [["dot_general"]]
    assert primitives(graph, kernel[0]) == ["add", "conv_general_dilated", "max", "max", "min"]
    # The larger kernel computes what the two did: padding is zero behind the activation, not before it.
    dot = np.asarray(X @ W)
    by_shape = {dot.shape: dot, B.shape: np.asarray(B), D.shape: np.asarray(D)}
    operands = [by_shape[tuple(buffer.shape)] for buffer in kernel[1].inputs]
    (got,) = interpret(kernel[1], operands)
    np.testing.assert_allclose(got, expanded(X, W, B, D), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w, b, d: (expanded(x, w, b, d), x @ w + b),  # the tail is a result, too
        lambda x, w, b, d: jnp.tanh(x @ w + b) * 2,  # nobody reads it
        lambda x, w, b, d: jnp.exp(jnp.clip(x @ w + b, 0, 6)) @ w.T,  # its reader is a product
    ],
)
def test_other_tails_stay(function):
    _, before, after = covers(function, X, W, B, D)
    assert dict(before).keys() == dict(after).keys()


def test_rows_take_a_residual():
    x, w, b = values(4, 96), values(96, 96), values(96)
    graph, before, after = covers(lambda x, w, b: jax.nn.softmax(x + (x @ w + b), -1), x, w, b)
    assert ["dot_general"] in [primitives(graph, m) for m, _ in after] and len(before) == len(after) == 2


def round_weights(function, *args):
    """The cover of a function with rounded weights, before and after products took what stands before them."""
    closed = rewritten(simplify(inline(jax.make_jaxpr(function)(*args))), ("rounds",)).closed
    graph = build_graph(closed.jaxpr, tf32=rounded_constants(closed))
    before = move_epilogue.split_prologues(graph, greedy.group(graph).subsets, has_form)
    after = move_epilogue.fuse_prologues(graph, before, has_form)
    assert {m for members, _ in before for m in members} == {m for members, _ in after for m in members}
    return graph, before, after


W1, GAIN, SHIFT, BIAS = values(128, 64), values(128), values(128), values(64)


def dense_layer(x, y):
    """A layer of a densely connected network: what is joined goes on, its norm and activation are for one product."""
    joined = jnp.concatenate([x, y], -1)
    return joined, jax.nn.relu(jax.nn.relu(joined * GAIN + SHIFT) @ W1 + BIAS)


def test_products_of_rounded_weights_take_what_stands_before_them():
    half = jax.ShapeDtypeStruct((8, 64, 64, 64), jnp.float32)
    graph, before, after = round_weights(dense_layer, half, half)
    (product,) = [(m, p) for m, p in after if move_epilogue.is_library_contraction(graph, m)]
    assert primitives(graph, product[0]) == ["add", "add", "dot_general", "max", "max", "mul"]
    assert [primitives(graph, m) for m, _ in after if m != product[0]] == [["concatenate"]]
    assert len(after) == len(before) == 2
    found = gpu_candidates.candidates(product[1], MACHINE, 100)
    assert found and all(dict(p.params)["rounded"] for p, _ in found)
    made = as_gemm(product[1])
    assert made is not None and prologue(made) is not None and len(k_vectors(made)) == 2
    assert gemm_operands(made)[0].along_terms


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (jax.nn.relu(x * GAIN), jax.nn.relu(x * GAIN) @ W1),  # a result, too
        lambda x: jax.nn.relu(x @ values(128, 128) + GAIN) @ W1,  # the tail of another product
        lambda x: jnp.cumsum(x, -1) @ W1,
        lambda x: (x + x[::-1]) @ W1,  # two operands
        lambda x: jnp.dot(jax.nn.relu(x), W1, precision="highest"),
        lambda x: jnp.dot(jax.nn.relu(x), W1 + x[0, :, None]),  # not constant
        lambda x: lax.conv_general_dilated(
            jax.nn.relu(x.reshape(8, 64, 64, 128)), W3, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        ),  # padding is zero behind the activation
    ],
    ids=["a result", "a tail", "no element-wise operation", "two operands", "highest", "no constant", "padding"],
)
def test_what_stays_before_a_product(function):
    _, before, after = round_weights(function, jax.ShapeDtypeStruct((32768, 128), jnp.float32))
    assert after == before


W3 = values(3, 3, 128, 64)


def test_prologue_producers_are_those_of_a_scan_over_all_equations():
    def function(x, y):
        a = jax.nn.relu(x * 2.0 + y)
        b = a * jnp.tanh(a) + x[0]
        c = (b @ W1) + 1.0
        d = jnp.exp(y) * y
        return c, (d - jnp.abs(d)) @ W1, a[::-1] @ W1

    args = (jax.ShapeDtypeStruct((64, 128), jnp.float32),) * 2
    closed = simplify(inline(jaxapi.closed_jaxpr_of(function, *args)))
    graph = build_graph(closed.jaxpr)
    roots = [n.number for n in graph.nodes if n.op is not None and n.op.is_complex]
    plain = dict(greedy.group(graph, fuse=False).subsets)
    found = []
    for cover in (plain, dict(greedy.group(graph).subsets)):
        for root in roots:
            members = next(s for s in cover if root in s)
            found.append(move_epilogue._prologue_producers(graph, root, members, cover))
            assert found[-1] == _scan(graph, root, members, cover)
    assert len(roots) == 3 and any(len(head) > 2 for head in found)


def _scan(graph, root, members, cover):
    """Element-wise producers of an operand that nothing else uses, by a walk over all equations."""
    rooted = {s for s in cover if any(graph.nodes[k].op.is_root for k in s)}
    free = {m for s in cover if s != members and s not in rooted for m in s}
    head: set[int] = set()
    for number in range(root - 1, -1, -1):
        node = graph.nodes[number]
        users = {u for t in node.outputs for u in graph.tensors[t].users}
        feeds = users <= head or (users <= head | {root} and graph.nodes[root].inputs[0] in node.outputs)
        plain = node.op is not None and node.op.family in move_epilogue.PER_ELEMENT
        escapes = any(graph.tensors[t].escapes for t in node.outputs)
        if plain and not escapes and number in free and users and feeds:
            head.add(number)
    return head
