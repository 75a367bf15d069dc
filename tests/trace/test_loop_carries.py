"""What is added to the carries of a scan."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jcuts.pipeline import computation, kernel_selection
from jcuts.rewrite.simplify import simplify
from jcuts.trace import jaxapi
from jcuts.trace.inline import inline
from jcuts.trace.loop_carries import accumulations
from tests.pipeline.test_kernel_selection import gpu_level

X = np.ones((8, 256, 128), np.float32)
ZEROS = np.zeros((128, 128), np.float32)


def gram(xs, total):
    """Sums of products, of which the second is read besides."""

    def step(carry, x):
        total, other, last = carry
        other = other + x.T @ jnp.sin(x)
        return (total + x.T @ x, other, x[:128] + last.sum()), other.sum()

    return jax.lax.scan(step, (total, total, total), xs)


def scan_of(function, *args):
    closed = simplify(inline(jaxapi.closed_jaxpr_of(function, *args)))
    (scan,) = (e for e in closed.jaxpr.eqns if jaxapi.primitive_name(e) == "scan")
    return scan, next(body for _, _, body in jaxapi.inner_jaxprs(scan))


def test_sums_in_carries_are_found_with_their_products():
    scan, body = scan_of(gram, X, ZEROS)
    names = [jaxapi.primitive_name(body.jaxpr.eqns[number]) for number in sorted(accumulations(scan, body))]
    assert sorted(name for name in names if name != "transpose") == ["add", "add", "dot_general", "dot_general"]


def test_a_carry_that_is_read_twice_is_no_accumulator():
    def twice(xs, total):
        return jax.lax.scan(lambda total, x: (total + x.T @ x, total.sum()), total, xs)

    assert not accumulations(*scan_of(twice, X, ZEROS))
    assert not accumulations(*scan_of(lambda xs, t: jax.lax.scan(lambda t, x: (x.T @ x, t), t, xs), X, ZEROS))


def test_a_gpu_leaves_products_that_are_added_to_a_carry_to_the_library():
    def function(xs, total):
        def step(total, x):
            return total + x.T @ x, jax.nn.softmax(x @ total)

        return jax.lax.scan(step, total, xs)

    def sums(xs, total):
        return jax.lax.scan(lambda total, x: (total + x.T @ x, jax.nn.softmax(x @ x.T)), total, xs)

    for run, count in ((function, 0), (sums, 1)):
        (body,) = gpu_level(run, X, ZEROS).walk()[1:]
        kernel_selection._leave_on_gpu([body], "all")
        reasons = [why.reason for why in body.left_out.values() if why.reason == computation.IN_CARRY]
        assert bool(reasons) is bool(count)
        kept = [body.graph.nodes[m].prim for s in body.subsets for m in s.members]
        assert kept.count("dot_general") == 2 - count
