"""Prices of programs that exist: by hand for small ones, and the reference step on four measured GPUs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from jcuts.base.errors import NotJaxError, UsageError
from jcuts.plan.cost import collectives, spmd_step
from jcuts.plan.cost.compute import gemm_time
from jcuts.plan.spec import cluster

PLACE = cluster.load("h200-x4-measured")
SPEED = PLACE.gpu.bandwidth * PLACE.gpu.memory_efficiency


def _struct(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def test_a_product():
    found = spmd_step.step_time(lambda a, b: a @ b, _struct(512, 256), _struct(256, 1024), cluster=PLACE)
    assert found.products == pytest.approx(float(gemm_time(PLACE.gpu, 512, 1024, 256)))
    assert found.flops == 2 * 512 * 256 * 1024 and found.kernels == 0
    wide = spmd_step.step_time(
        lambda a, b: a @ b, _struct(4096, 4096, dtype="float32"), _struct(4096, 4096, dtype="float32"), cluster=PLACE
    )
    half = spmd_step.step_time(lambda a, b: a @ b, _struct(4096, 4096), _struct(4096, 4096), cluster=PLACE)
    assert wide.products == pytest.approx(2 * half.products)


def test_elementwise_chains_are_one_kernel():
    found = spmd_step.step_time(lambda x, y: jnp.tanh(x * 2 + y) - x, _struct(1024), _struct(1024), cluster=PLACE)
    assert found.moved == 3 * 2 * 1024 and found.calls == 1
    assert found.kernels == pytest.approx(3 * 2 * 1024 / SPEED)
    assert found.gaps == pytest.approx(PLACE.gpu.kernel_gap)


def test_an_adam_update_is_one_kernel_with_three_results():
    def adam(w, m, v, g):
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
        return w - m / (jnp.sqrt(v) + 1e-8), m, v

    found = spmd_step.step_time(adam, *(_struct(4096, dtype="float32"),) * 4, cluster=PLACE)
    assert found.moved == 4096 * 28 and found.calls == 1  # reads w, m, v, g; writes w, m, v


def test_a_residual_is_not_fused_with_what_lies_before_a_product():
    found = spmd_step.step_time(
        lambda x, w: (y := jnp.tanh(x)) + y @ w, _struct(256, 256), _struct(256, 256), cluster=PLACE
    )
    # tanh reads and writes; the sum reads both of its operands and writes.
    assert found.moved == 5 * 2 * 256 * 256 and found.calls == 3


def test_loops_turn_and_conditionals_take_the_dearest_branch():
    a = _struct(256, 256)
    one = spmd_step.step_time(lambda x: x @ x, a, cluster=PLACE)
    loop = spmd_step.step_time(
        lambda x: jax.lax.scan(lambda c, _: (c @ x, None), x, None, length=7)[0], a, cluster=PLACE
    )
    assert loop.flops == 7 * one.flops
    either = spmd_step.step_time(
        lambda p, x: jax.lax.cond(p, lambda: x @ x @ x, lambda: x @ x), _struct(dtype="bool"), a, cluster=PLACE
    )
    assert either.flops == 2 * one.flops


def test_a_loop_fills_its_stack_and_copies_what_products_make():
    x, w = _struct(64, 64), _struct(64, 64)
    size, turns = 2 * 64 * 64, 5

    def moved(body):
        found = spmd_step.step_time(
            lambda x, w: jax.lax.scan(lambda c, _: body(c, w), x, None, length=turns)[1], x, w, cluster=PLACE
        )
        return found.moved / size

    # Zeros for the stack; each turn the carry is read and written, and tanh reads it and writes into the stack.
    assert moved(lambda c, w: (c * 2, jnp.tanh(c))) == turns + turns * (2 + 2)
    # A product's result is a buffer, copied into the stack.
    assert moved(lambda c, w: (c * 2, c @ w)) == turns + turns * (2 + 2)
    # Two stacks of one shape are one constant and its copy.
    assert moved(lambda c, w: (c * 2, (c @ w, w @ c))) == 3 * turns + turns * (2 + 2 * 2)


def test_an_inner_loops_stack_is_copied_into_the_outer_one():
    x = _struct(64, 64)
    size, inner, outer = 2 * 64 * 64, 3, 4

    def layers(c, _):
        return jax.lax.scan(lambda c, _: (c * 2, jnp.tanh(c)), c, None, length=inner)

    once = spmd_step.step_time(lambda x: layers(x, None), x, cluster=PLACE).moved
    found = spmd_step.step_time(lambda x: jax.lax.scan(layers, x, None, length=outer), x, cluster=PLACE).moved
    assert found == outer * once + outer * inner * size * (1 + 2)  # zeros; read and written
    # Running over it backward, a turn takes its part out for the inner loop.
    stack = _struct(outer, inner, 64, 64)

    def back(c, part):
        return jax.lax.scan(lambda c, y: (c + y, None), c, part)

    found = spmd_step.step_time(lambda x, s: jax.lax.scan(back, x, s)[0], x, stack, cluster=PLACE).moved
    assert found == outer * inner * size * (3 + 2)


def test_one_turn_is_no_loop():
    def run(length):
        body = lambda x: jax.lax.scan(lambda c, _: (c * 2, c @ c), x, None, length=length)  # noqa: E731
        return spmd_step.step_time(body, _struct(64, 64), cluster=PLACE).moved

    assert run(1) == 2 * 2 * 64 * 64 and run(2) == 2 * run(1) + 2 * (1 + 2) * 2 * 64 * 64


def test_what_nothing_uses_costs_nothing():
    def recomputed(w, x):
        return jnp.sum(jax.checkpoint(lambda x: jnp.tanh(x @ w) @ w)(x) ** 2)

    a = _struct(128, 128)
    found = spmd_step.step_time(lambda w, x: jax.grad(recomputed, 1)(w, x), a, a, cluster=PLACE)
    # Forward two, again only the first (the last product's value is not needed), backward two.
    assert found.flops == 5 * 2 * 128**3


def test_collectives_by_members_and_bytes():
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b"))

    def run(names):
        body = lambda x: jax.lax.psum(x, names)  # noqa: E731
        spec = PartitionSpec("a", "b")
        out = PartitionSpec(*(None if name in names else name for name in ("a", "b")))
        return spmd_step.step_time(
            jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=out), _struct(64, 64), cluster=PLACE
        ).collectives

    size = 2 * 32 * 32
    for names, members in ((("b",), 2), (("a", "b"), 4)):
        want = float(collectives.all_reduce(PLACE.intra, PLACE.inter, members, members, size))
        assert run(names) == {"all-reduce": pytest.approx(want)}
    with pytest.raises(UsageError, match="mesh has 4 devices"):
        body = jax.shard_map(
            lambda x: jax.lax.psum(x, "a"), mesh=mesh, in_specs=PartitionSpec("a"), out_specs=PartitionSpec()
        )
        spmd_step.step_time(body, _struct(64), cluster=PLACE.resized(2))


def test_collectives_between_nodes_are_dearer():
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b"))
    two = cluster.Cluster("two", (cluster.NodeGroup(2, 2, PLACE.gpu),), PLACE.intra, cluster.Link(10e9))

    def time(name):
        body = jax.shard_map(
            lambda x: jax.lax.psum(x, name), mesh=mesh, in_specs=PartitionSpec(name), out_specs=PartitionSpec()
        )
        return spmd_step.step_time(body, _struct(2**20), cluster=two).seconds

    assert time("a") > 5 * time("b")  # b's pairs lie within a node


def test_a_function_that_cannot_be_traced():
    with pytest.raises(NotJaxError):
        spmd_step.step_time(lambda x: float(x.sum()), _struct(3), cluster=PLACE)
