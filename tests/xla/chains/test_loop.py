"""Loops that are one call of a CPU's kernels: the same bits as XLA's loop over them, from several threads; what cannot
be one call stays a loop; damaged plans are refused.
"""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun

from jcuts.artifact import kernels as artifact_kernels
from jcuts.base import knobs
from jcuts.base.errors import ArtifactError
from jcuts.base.settings import LOOP_BODIES, Settings, Variant
from jcuts.pipeline.passes import optimize_jaxpr
from jcuts.trace import jaxapi
from jcuts.trace.inline import inline
from jcuts.xla import cpu_ffi_call, cpu_launcher
from jcuts.xla.chains import fuse, loop
from tests.xla.kernels import assert_threads_agree

RNG = np.random.default_rng(8)


def normal(*shape, dtype=np.float32):
    return (0.3 * RNG.standard_normal(shape)).astype(dtype)


TARGETS = artifact_kernels.CPU_TARGETS
W, U, B = normal(24, 24), normal(24, 24), normal(24)
X, H = normal(9, 5, 24), normal(5, 24)


def cell(h, row):
    return jnp.tanh(row @ W + h @ U + B)


def scan(step, *args, **params):
    return lambda *xs: jax.lax.scan(step, *xs, **params)


def both(h, row):
    h = cell(h, row)
    return h, h


def old_state(h, row):
    return cell(h, row), h


def input_as_result(h, row):
    return cell(h, row), (row, jnp.sum(h, 1))


def lstm(carry, row):
    h, c = carry
    i, f, g, o = jnp.split(jnp.concatenate([row, h], 1) @ jnp.concatenate([jnp.concatenate([W, U])] * 4, 1), 4, 1)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    h = jax.nn.sigmoid(o) * jnp.tanh(c)
    return (h, c), (h, c.sum(1))


def last_input(carry, row):
    """Carries the row of the step before, and a value that no step changes."""
    h, before, same = carry
    return (cell(h, row) + before.sum(1, keepdims=True) * same, row, same), h.max()


def counted(carry, row):
    h, n = carry
    return (cell(h, row) + n.astype(jnp.float32), n + 2), n


def rows(h, _):
    return cell(h, h), None


LOOPS = {
    "carried and stacked": (both, (H, X)),
    "old state": (old_state, (H, X)),
    "inputs": (input_as_result, (H, X)),
    "two carried": (lstm, ((H, H + 1), X)),
    "carried input, unchanged value": (last_input, ((H, X[3], np.float32(0.5)), X)),
    "integers": (counted, ((H, np.int32(3)), X)),
}


def planned(fn, args, calls=True) -> jaxapi.Closed:
    """The function with kernels for everything; its loops as they are without ``calls``."""
    closed = inline(jaxapi.closed_jaxpr_of(fn, *args))
    with pytest.MonkeyPatch.context() as patch:
        if not calls:
            patch.setattr("jcuts.pipeline.rebuild.scans_as_calls", lambda closed: closed)
        settings = Settings(mode="fusion", tune="auto" if calls else "cached")  # plans are remembered by their settings
        return optimize_jaxpr(closed, settings, platform="cpu", may_measure=False).closed


def primitives(closed):
    return [jaxapi.primitive_name(e) for e in closed.jaxpr.eqns]


def compared(fn, args):
    """Results of the call and of XLA's loop over the same kernels, which are equal."""
    call, plain = planned(fn, args), planned(fn, args, calls=False)
    jaxapi.check(call)
    assert loop.has_calls(call) and "scan" not in primitives(call) and "scan" in primitives(plain)
    leaves = jax.tree.leaves(args)
    run, alone = (jax.jit(jaxpr_as_fun(c)) for c in (call, plain))
    for _ in range(3):  # memory of the calls before lies in the arena
        found = run(*leaves)
        for got, want in zip(found, alone(*leaves), strict=True):
            np.testing.assert_array_equal(got, want)
    return call, found


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_computes_what_xlas_does(name, reverse):
    step, args = LOOPS[name]
    fn = scan(step, reverse=reverse)
    call, found = compared(fn, args)
    for got, want in zip(found, jax.tree.leaves(jax.jit(fn)(*args)), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)
    assert "a loop is one call" in str(fuse.note(call))


@pytest.mark.parametrize("length", [1, 2, 3])
def test_short_loops(length):
    compared(lambda h: jax.lax.scan(rows, h, None, length=length), (H,))


def test_many_tiles_are_shared_out():
    """Kernels of several tiles run on a team of threads, again and again."""
    w = normal(300, 300)

    def fn(h, x):
        return jax.lax.scan(lambda h, row: (jnp.tanh(h @ w + row), jnp.abs(h).sum(0)), h, x)

    call, _ = compared(fn, (normal(64, 300), normal(40, 64, 300)))
    (eqn,) = (e for e in call.jaxpr.eqns if jaxapi.call_target(e) == cpu_launcher.LOOP)
    assert max(jaxapi.call_attributes(eqn)["sizes"][::3]) > 1


def test_loops_in_loops():
    def outer(h, _):
        h, rows = jax.lax.scan(both, h, X)
        return h * 0.5, rows.sum()

    closed = planned(lambda h: jax.lax.scan(outer, h, None, length=3), (H,))
    assert primitives(closed).count("scan") == 1 and loop.has_calls(closed)
    want = jax.jit(lambda h: jax.lax.scan(outer, h, None, length=3))(H)
    for got, exact in zip(jax.jit(jaxpr_as_fun(closed))(H), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(got, exact, rtol=1e-4, atol=1e-4)


def test_under_vmap_and_grad():
    import jcuts

    ours = jcuts.optimize(lambda h, x: jax.lax.scan(both, h, x)[1].sum(), mode="fusion", tune="off")
    plain = lambda h, x: jax.lax.scan(both, h, x)[1].sum()  # noqa: E731
    np.testing.assert_allclose(ours(H, X), plain(H, X), rtol=1e-4)
    for got, want in zip(jax.grad(ours, (0, 1))(H, X), jax.grad(plain, (0, 1))(H, X), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-4)
    many = jax.vmap(ours, (0, None))(np.stack([H, H * 2]), X)
    np.testing.assert_allclose(many, [plain(H, X), plain(H * 2, X)], rtol=1e-4)


def test_several_threads_run_the_same_loop():
    call = jax.jit(jaxpr_as_fun(planned(scan(lstm), ((H, H), X))))
    inputs = [H + np.float32(k) for k in range(4)]
    assert_threads_agree(call, inputs, H, X)


def swapped(carry, row):
    a, b = carry
    return (b, cell(a, row)), b.sum()


def twice(h, row):
    h = cell(h, row)
    return h, (h, h)


def sorted_rows(h, row):
    return jnp.sort(cell(h, row), 1), None


@pytest.mark.parametrize(
    ("step", "args"),
    [(swapped, ((H, H + 1), X)), (twice, (H, X)), (sorted_rows, (H, X))],
    ids=["old value of another carry", "one value stacked twice", "XLA's operation"],
)
def test_what_cannot_be_one_call_stays_a_loop(step, args):
    fn = scan(step)
    closed = planned(fn, args)
    assert not loop.has_calls(closed) and "scan" in primitives(closed)
    for got, want in zip(jaxpr_as_fun(closed)(*jax.tree.leaves(args)), jax.tree.leaves(fn(*args)), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


def test_no_chains_no_loops():
    with knobs.scope(chains=False):
        assert not loop.has_calls(planned(scan(both), (H, X)))


def tiny(carry, z):
    """A few hundred operations a step: no region is worth a kernel call of its own."""
    x, p = carry
    x, p = W[:4, :4] @ x, W[:4, :4] @ p @ W[:4, :4].T + jnp.eye(4)
    gain = p[0] / (p[0, 0] + 0.1)
    return (x + gain * (z - x[0]), p - jnp.outer(gain, p[0])), x


def test_a_variant_takes_all_of_a_small_body():
    args = (normal(4), np.eye(4, dtype=np.float32)), normal(30)
    closed = inline(jaxapi.closed_jaxpr_of(scan(tiny), *args))
    plain = optimize_jaxpr(closed, Settings(), platform="cpu", may_measure=False)
    loops = optimize_jaxpr(closed, Settings(form=Variant((), LOOP_BODIES)), platform="cpu", may_measure=False)
    assert not loop.has_calls(plain.closed) and loop.has_calls(loops.closed)
    want = jax.tree.leaves(jax.jit(scan(tiny))(*args))
    for got, exact in zip(jax.jit(jaxpr_as_fun(loops.closed))(*jax.tree.leaves(args)), want, strict=True):
        np.testing.assert_allclose(got, exact, rtol=1e-4, atol=1e-5)


def test_the_variant_changes_nothing_where_no_body_is_all_kernels():
    closed = inline(jaxapi.closed_jaxpr_of(scan(sorted_rows), H, X))
    found = optimize_jaxpr(closed, Settings(form=Variant((), LOOP_BODIES)), platform="cpu", may_measure=False)
    assert found.closed is closed


# -- damaged plans ----------------------------------------------------------------------------------------------------
def call_of(fn, args):
    """The call of a loop: operands' and results' types, attributes."""
    (eqn,) = (e for e in planned(fn, args).jaxpr.eqns if jaxapi.call_target(e) == cpu_launcher.LOOP)
    return eqn, jaxapi.call_attributes(eqn)


def called(eqn, attributes, operands):
    chain = {k: attributes[k] for k in ("digests", "wiring", "sizes", "arena_bytes")}
    length, reverse = int(attributes["length"]), bool(attributes["reverse"])
    plan, results = [int(n) for n in attributes["plan"]], [v.aval for v in eqn.outvars]
    return cpu_ffi_call.call_loop(chain, plan, operands, results, length=length, reverse=reverse)


def damaged(attributes):
    """Plans that leave something out, or name what there is not."""
    plan = [int(n) for n in attributes["plan"]]
    yield "plan", plan[:3]
    yield "plan", plan[:-1]
    yield "plan", [*plan, 0]
    yield "plan", [-1, *plan[1:]]
    yield "plan", [plan[0] + 1, *plan[1:]]
    yield "plan", [*plan[:4], 7, *plan[5:]]
    yield "plan", [*plan[:4], plan[4], -1, *plan[6:]]
    yield "length", np.int64(-1)


def test_damaged_plans_are_refused_by_the_launcher():
    eqn, attributes = call_of(scan(lstm), ((H, H), X))
    operands = [np.zeros(a.aval.shape, a.aval.dtype) for a in eqn.invars]
    called(eqn, attributes, operands)
    for name, value in damaged(attributes):
        with pytest.raises(Exception, match="jcuts loop: impossible"):
            called(eqn, {**attributes, name: value}, operands)


def test_artefacts_refuse_plans_that_leave_their_buffers():
    eqn, attributes = call_of(scan(lstm), ((H, H), X))
    avals = [[(tuple(v.aval.shape), str(v.aval.dtype)) for v in group] for group in (eqn.invars, eqn.outvars)]
    numbers = {k: int(attributes[k]) for k in ("arena_bytes", "length", "reverse")}
    arrays = {k: tuple(int(n) for n in attributes[k]) for k in ("wiring", "sizes", "plan")}
    names = tuple(str(attributes["digests"]).split())
    call = artifact_kernels.Call(cpu_launcher.LOOP, names, numbers, arrays, tuple(avals[0]), tuple(avals[1]))
    kernels = {name: cpu_launcher.kernel_of(name) for name in names}
    artifact_kernels.check_calls([call], kernels, TARGETS)
    plan = list(arrays["plan"])
    changes = [{"plan": [*plan[:k], plan[k] + (1 << 20), *plan[k + 1 :]]} for k in range(len(plan))]
    changes += [{"length": numbers["length"] + 1}, {"arena_bytes": 64}]
    for change in changes:
        other = artifact_kernels.Call(
            call.target,
            names,
            {**numbers, **{k: v for k, v in change.items() if k != "plan"}},
            {**arrays, **{k: tuple(v) for k, v in change.items() if k == "plan"}},
            call.operands,
            call.results,
        )
        with pytest.raises(ArtifactError, match="does not fit"):
            artifact_kernels.check_calls([other], kernels, TARGETS)
            pytest.fail(f"accepted: {change}")


def test_the_call_travels_through_stablehlo():
    call = planned(scan(both), (H, X))
    text = jax.jit(jaxpr_as_fun(call)).lower(H, X).as_text()
    assert len(re.findall("custom_call @jcuts_cpu_loop", text)) == 1
    (found,) = artifact_kernels.calls(text)
    kernels = {name: cpu_launcher.kernel_of(name) for name in found.kernels}
    artifact_kernels.check_calls([found], kernels, TARGETS)
