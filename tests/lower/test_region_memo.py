"""Memo of lowered regions: isomorphic regions share a program, and what differs in anything does not."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jcuts.base.errors import Refusal
from jcuts.fusion import greedy
from jcuts.lower import region
from jcuts.lower.equation_key import NotPlain, plain
from jcuts.lower.region_memo import RegionMemo, region_key
from jcuts.lower.tensor_graph import build_graph
from jcuts.rewrite.simplify import simplify
from jcuts.trace import jaxapi
from jcuts.trace.inline import inline


def graph_of(function, *shapes, dtype=np.float32, **more):
    args = [jax.ShapeDtypeStruct(s, dtype) for s in shapes]
    return build_graph(simplify(inline(jaxapi.closed_jaxpr_of(function, *args))).jaxpr, **more)


def whole(graph):
    return frozenset(node.number for node in graph.nodes)


def text(made):
    return str(made) if isinstance(made, Refusal) else made.to_text()


def key_of(function, *shapes, **more):
    graph = graph_of(function, *shapes, **more)
    return region_key(graph, whole(graph))


def test_repeated_layers_have_one_key_each():
    def layers(a, b, x):
        return jnp.tanh(jnp.tanh(x * a) * b)

    graph = graph_of(layers, (8, 8), (8, 8), (8, 8))
    first, second = frozenset({0, 1}), frozenset({2, 3})
    assert region_key(graph, first) == region_key(graph, second) is not None
    made = RegionMemo()
    programs = [made.lowered(graph, s, (), lambda s=s: region._lower(graph, s, "kernel", 1.0)) for s in (first, second)]
    assert programs[0] is programs[1]
    assert text(programs[0]) == text(region._lower(graph, second, "kernel", 1.0))


SAME = ((8, 4), (8, 4))
DIFFERENT = {
    "primitive": (lambda x, y: x - y, SAME, {}),
    "parameter": (lambda x, y: jnp.sum(x + y, 0), SAME, {}),
    "other parameter": (lambda x, y: jnp.sum(x + y, 1), SAME, {}),
    "shape": (lambda x, y: x + y, ((4, 8), (4, 8)), {}),
    "type": (lambda x, y: x + y, SAME, {"dtype": np.int32}),
    "operand twice": (lambda x, y: x + x, SAME, {}),
    "scalar": (lambda x, y: x + 2.0, SAME, {}),
    "other scalar": (lambda x, y: x + 3.0, SAME, {}),
    "zero": (lambda x, y: x * 0.0, SAME, {}),
    "minus zero": (lambda x, y: x * -0.0, SAME, {}),
    "wiring": (lambda x, y: (x * y) + x, SAME, {}),
    "other wiring": (lambda x, y: (x * y) + y, SAME, {}),
    "escaping value": (lambda x, y: ((z := x * y) + x, z), SAME, {}),
}


def test_what_differs_has_another_key():
    keys = {name: key_of(fn, *shapes, **more) for name, (fn, shapes, more) in DIFFERENT.items()}
    keys["plain"] = key_of(lambda x, y: x + y, *SAME)
    assert None not in keys.values()
    assert len(set(keys.values())) == len(keys)


def test_numbers_known_to_be_tf32_count():
    def function(x, w):
        return x @ w

    closed = jaxapi.closed_jaxpr_of(function, *(jax.ShapeDtypeStruct((64, 64), np.float32) for _ in range(2)))
    one, other = build_graph(closed.jaxpr), build_graph(closed.jaxpr, tf32=[closed.jaxpr.invars[1]])
    assert region_key(one, whole(one)) != region_key(other, whole(other))


def test_equations_with_functions_have_no_key():
    def function(x, y):
        return lax.reduce(x * y, np.float32(0), lambda a, b: a + b * 2, (0,))

    graph = graph_of(function, (8, 4), (8, 4))
    assert any(node.kind is None for node in graph.nodes)
    assert region_key(graph, whole(graph)) is None
    calls = []
    memo = RegionMemo()
    for _ in range(2):
        memo.lowered(graph, whole(graph), (), lambda: calls.append(1) or Refusal("subset", "no"))
    assert len(calls) == 2 and not memo.found


def network(weights, x):
    """Repeated blocks: batch norms in training, residuals, a softmax."""
    for a, b, scale in weights:
        y = lax.conv_general_dilated(x, a, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        mean, var = y.mean((0, 1, 2)), y.var((0, 1, 2))
        y = jax.nn.relu((y - mean) * lax.rsqrt(var + 1e-5) * scale)
        x = x + jnp.einsum("nhwc,cd->nhwd", y, b)
    return jnp.sum(jax.nn.log_softmax(x.mean((1, 2))))


def test_all_that_fusion_lowers_is_what_would_be_lowered_anew(monkeypatch):
    shapes = [(jnp.zeros((3, 3, 8, 8)), jnp.zeros((8, 8)), jnp.zeros(8)) for _ in range(3)]
    closed = jaxapi.closed_jaxpr_of(jax.grad(network), shapes, jnp.zeros((2, 6, 6, 8)))
    graph = build_graph(simplify(inline(closed)).jaxpr)
    counts = {"hit": 0, "made": 0}

    class Compared(RegionMemo):
        def lowered(self, graph, subset, options, lower):
            before = len(self.found)
            found, fresh = super().lowered(graph, subset, options, lower), lower()
            counts["made" if len(self.found) > before else "hit"] += 1
            assert text(found) == text(fresh)
            return found

    monkeypatch.setattr(region, "MEMO", Compared())
    grouped = greedy.group(graph)
    assert grouped.subsets and counts["hit"] > counts["made"] > 0


def test_the_least_recently_used_leave_first():
    graph = graph_of(lambda x: jnp.exp(jnp.tanh(jnp.sin(x))), (8,))
    memo, calls = RegionMemo(most=2), []
    for number in (0, 1, 0, 2, 0, 1):
        memo.lowered(graph, frozenset({number}), (), lambda n=number: calls.append(n) or Refusal("subset", str(n)))
    assert calls == [0, 1, 2, 1]
    memo.clear()
    assert not memo.found


class Mode(enum.Enum):
    CLIP = 1


@dataclass(frozen=True)
class Numbers:
    a: int
    b: tuple


def test_parameters_as_keys():
    values = [1, 1.0, True, None, "1", (1,), [1], Mode.CLIP, Numbers(1, (2,)), np.dtype("float32"), {"a": 1}, 0.0, -0.0]
    keys = [plain(v) for v in values]
    assert len(set(keys)) == len(values)
    assert plain(np.int64(3)) == plain(3) and plain(jnp.bfloat16.dtype) != plain(np.dtype("float16"))
    for value in (lambda x: x, np.zeros(3), object()):
        with pytest.raises(NotPlain):
            plain(value)
