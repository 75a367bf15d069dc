"""XLA's time of regions by a profile of its whole program: HLO metadata, kinds of operations, who decides by it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jcuts.trace import jaxapi
from jcuts.trace.inline import inline
from jcuts.tune.baseline import xla_profile
from jcuts.tune.baseline.hlo_attribution import SCOPE, equation_seconds, equation_shares
from jcuts.tune.baseline.xla_profile import OperationTimes, RegionProfiler, kind

MODULE = """
HloModule jit_scoped, is_scheduled=true

%region_0 (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add.9 = f32[] add(%a, %b), metadata={op_name="/@4/reduce_sum"}
}

%fused (p.0: f32[8,100], p.1: f32[100]) -> (f32[8,100], f32[8]) {
  %p.0 = f32[8,100]{1,0} parameter(0)
  %p.1 = f32[100]{0} parameter(1)
  %c = f32[] constant(0)
  %wide = f32[8,100]{1,0} broadcast(%p.1), dimensions={1}, metadata={op_name="/@1/add"}
  %sum = f32[8,100]{1,0} add(%p.0, %wide), metadata={op_name="/@1/add"}
  %rows = f32[8]{0} reduce(%sum, %c), dimensions={1}, metadata={op_name="/@4/r"}
  ROOT %both = (f32[8,100]{1,0}, f32[8]{0}) tuple(%sum, %rows)
}

%wide (p.2: f32[4096], p.3: s32[]) -> (f32[8], f32[8], f32[8], f32[8], f32[8], /*index=5*/f32[8]) {
  %p.2 = f32[4096]{0:T(256)} parameter(0)
  %p.3 = s32[] parameter(1)
  %part = f32[8]{0} dynamic-slice(%p.2, %p.3), dynamic_slice_sizes={8}, metadata={op_name="/@5/dynamic_slice"}
  %exp.1 = f32[8]{0} exponential(%part), metadata={op_name="/@6/exp"}
  ROOT %six = (f32[8]{0}, f32[8]{0}, f32[8]{0}, f32[8]{0}, f32[8]{0}, /*index=5*/f32[8]{0}) tuple(%exp.1, %part)
}

ENTRY %main (x: f32[8,50], w: f32[50,100], v: f32[100]) -> f32[8] {
  %x = f32[8,50]{1,0} parameter(0), metadata={op_name="args[0]"}
  %w = f32[50,100]{1,0} parameter(1)
  %v = f32[100]{0} parameter(2)
  %copy.1 = f32[50,100]{0,1} copy(%w)
  %gemm.3 = (f32[8,100]{1,0}, s8[4096]{0}) custom-call(%x, %copy.1), metadata={op_name="/@0/d"}
  %made = f32[8,100]{1,0} get-tuple-element(%gemm.3), index=0
  %fusion.1 = (f32[8,100]{1,0}, f32[8]{0}) fusion(%made, %v), kind=kInput, calls=%fused, metadata={op_name="/@4/r"}
  %many = (f32[8]{0}, f32[8]{0}, f32[8]{0}, f32[8]{0}, f32[8]{0}, /*index=5*/f32[8]{0}) fusion(%v), calls=%wide
  ROOT %out = f32[8]{0} get-tuple-element(%fusion.1), index=1
}
""".replace("@", SCOPE)


def test_a_fusion_is_divided_by_bytes_and_a_call_belongs_to_its_equation():
    shares = equation_shares(MODULE)
    assert shares["gemm.3"] == {0: 1.0}
    # The addition reads two arrays of 800 elements in the fusion (the broadcast one is none in memory, but read here).
    assert shares["fusion.1"] == pytest.approx({1: 6400 / (6400 + 3204), 4: 3204 / (6400 + 3204)})
    # A slice reads what it writes, of however long an array; tuples of many elements have comments.
    assert shares["many"] == pytest.approx({5: 64 / (64 + 32), 6: 32 / (64 + 32)})
    assert "copy.1" not in shares and "x" not in shares
    seconds = equation_seconds(MODULE, {"gemm.3": 2e-6, "fusion.1": 1e-6, "copy.1": 5e-6, "gone": 1.0})
    assert seconds[0] == 2e-6 and sum(seconds.values()) == pytest.approx(3e-6)


def network(x, w, v):
    y = jax.nn.relu(x @ w + v)
    return (jnp.tanh(y) * 2.0).sum(-1), y.T


def arguments():
    rng = np.random.default_rng(3)
    return [jnp.asarray(rng.normal(size=s), "float32") for s in ((8, 50), (50, 100), (100,))]


def test_scopes_change_no_result_and_reach_the_compiled_module():
    closed = inline(jax.make_jaxpr(network)(*arguments()))

    def scoped(*args):
        return jaxapi.eval_in_scopes(closed, SCOPE, *args)

    for ours, plain in zip(scoped(*arguments()), network(*arguments()), strict=True):
        np.testing.assert_array_equal(ours, plain)
    text = jax.jit(scoped).lower(*arguments()).compile().as_text()
    shares = equation_shares(text or "")
    assert all(sum(mine.values()) == pytest.approx(1.0) for mine in shares.values())
    found = {closed.jaxpr.eqns[n].primitive.name for mine in shares.values() for n in mine}
    assert {"dot_general", "tanh", "reduce_sum"} <= found


def eqns_of(function, *shapes):
    return inline(jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(s, "float32") for s in shapes)))


def test_a_kind_ignores_layouts_and_tells_gradients_of_a_product_apart():
    def product(x, w):
        return x @ w

    (forward,) = eqns_of(product, (64, 30), (30, 70)).jaxpr.eqns
    (turned,) = eqns_of(lambda w, x: jax.lax.dot_general(w, x, (((1,), (1,)), ((), ()))), (70, 30), (64, 30)).jaxpr.eqns
    (filters,) = eqns_of(product, (30, 64), (64, 70)).jaxpr.eqns
    assert kind(forward) == kind(turned) != kind(filters)
    (conv,) = [
        e
        for e in eqns_of(
            lambda x, w: jax.lax.conv_general_dilated(
                x, w, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
            ),
            (1, 8, 8, 30),
            (1, 1, 30, 70),
        ).jaxpr.eqns
        if e.primitive.name == "conv_general_dilated"
    ]
    assert kind(conv) == kind(forward)
    (half,) = inline(
        jax.make_jaxpr(product)(*(jax.ShapeDtypeStruct(s, "bfloat16") for s in ((64, 30), (30, 70))))
    ).jaxpr.eqns
    (exact,) = eqns_of(lambda x, w: jnp.matmul(x, w, precision="highest"), (64, 30), (30, 70)).jaxpr.eqns
    assert len({kind(forward), kind(half), kind(exact)}) == 3
    (loop,) = eqns_of(lambda x: jax.lax.fori_loop(0, 3, lambda _, y: jnp.sin(y), x), (8,)).jaxpr.eqns
    assert kind(loop) == ""


def test_times_of_a_kind_are_averaged_and_unknown_operations_make_a_region_unknown():
    closed = eqns_of(lambda x: jnp.exp(jnp.tanh(x)) * jnp.exp(x.T).T, (8, 100))
    names = [e.primitive.name for e in closed.jaxpr.eqns]
    times = {
        n: {"exp": 1e-6 * (1 + names[:n].count("exp")), "mul": 4e-6}.get(name, 0.0) for n, name in enumerate(names)
    }
    table = OperationTimes.of(closed, times)
    exp = [e for e in closed.jaxpr.eqns if e.primitive.name == "exp"]
    assert table.seconds(exp) == pytest.approx(3e-6)
    assert table.seconds([*exp, *(e for e in closed.jaxpr.eqns if e.primitive.name == "transpose")]) == pytest.approx(
        3e-6
    )
    assert table.seconds(eqns_of(jnp.sin, (8, 100)).jaxpr.eqns) is None
    assert table.seconds(eqns_of(jnp.exp, (9, 100)).jaxpr.eqns) is None
    assert table.seconds(eqns_of(jnp.tanh, (8, 100)).jaxpr.eqns) is None  # it took no time, so that nothing is known


def test_a_profile_tells_the_times_of_regions(monkeypatch):
    closed = jax.make_jaxpr(network)(*arguments())
    flat = inline(closed)

    def recorded(call, module):
        assert call() and module == "jit_jcuts_profile"
        return {"first": 1.0}

    monkeypatch.setattr(xla_profile.autotune_cache, "known_options", lambda _: {})
    monkeypatch.setattr(xla_profile, "instruction_seconds", recorded)
    monkeypatch.setattr(
        xla_profile, "equation_seconds", lambda text, seconds: dict.fromkeys(range(99), seconds["first"])
    )
    profiler = RegionProfiler(closed, arguments())
    profiler.lower()
    profiler.compile()
    profiler.run()
    assert profiler.seconds(flat.jaxpr.eqns) == pytest.approx(len(flat.jaxpr.eqns))


def test_where_nothing_can_be_recorded_nothing_is_known_and_nobody_waits(monkeypatch):
    monkeypatch.setattr(xla_profile.autotune_cache, "known_options", lambda _: {})
    monkeypatch.setattr(xla_profile, "instruction_seconds", lambda *_: {})
    closed = jax.make_jaxpr(network)(*arguments())
    profiler = RegionProfiler(closed, arguments())
    profiler.lower()
    profiler.compile()
    with pytest.raises(RuntimeError, match="recorded no kernel"):
        profiler.run()
    assert profiler.seconds(closed.jaxpr.eqns) is None
    assert not profiler.is_known
    monkeypatch.setattr(xla_profile, "lowered_in_scopes", lambda *_: 1 / 0)
    never_compiled = RegionProfiler(closed, arguments())
    never_compiled.lower()  # which must not end planning
    never_compiled.compile()
    with pytest.raises(RuntimeError, match="was not compiled"):
        never_compiled.run()
    assert not never_compiled.is_known
    closed_early = RegionProfiler(closed, arguments())
    closed_early.close()
    assert closed_early.seconds(closed.jaxpr.eqns) is None
