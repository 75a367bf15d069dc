"""Greedy fusion keeps a topological order of the quotient graph while it merges."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jcuts.fusion.greedy import GreedyFusion
from jcuts.lower.tensor_graph import TensorGraph
from tests import programs


def diamond(x, y):
    """Two paths from x to the result, one through a product that no region takes in."""
    a = jnp.tanh(x)
    return (a @ y) + a * 2 + jnp.sum(a, 1, keepdims=True)


def branches(x, y):
    parts = [jnp.exp(x + k) * (x @ y if k % 2 else x) for k in range(5)]
    return sum(parts[1:], parts[0]) / (1 + sum(p.sum(0) for p in parts)), parts[3].max(1)


def step(x, y):
    return jax.grad(lambda w: jnp.sum(jax.nn.softmax(jnp.tanh(x @ w) @ w.T) ** 2))(y)


@pytest.mark.parametrize("function", [diamond, branches, step])
def test_the_order_stays_topological(function):
    graph: TensorGraph = programs.trace(function, np.ones((16, 16), np.float32), np.ones((16, 16), np.float32)).graph
    fusion = GreedyFusion(graph)
    merges = 0
    reorder = fusion._reorder

    def checked(first, second, reached):
        nonlocal merges
        reorder(first, second, reached)
        merges += 1

    fusion._reorder = checked
    fusion.run()
    assert merges >= 2
    place = {member: fusion.place[fusion.of.get(member, member)] for member in range(len(graph.nodes))}
    for node in graph.nodes:
        for tensor in node.outputs:
            for user in graph.tensors[tensor].users:
                same = fusion.of.get(node.number, node.number) == fusion.of.get(user, user)
                assert same or place[node.number] < place[user]
