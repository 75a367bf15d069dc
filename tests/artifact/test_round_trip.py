"""What is saved and loaded gives the same bits, whatever its structure, dtype, weights and surroundings."""

from __future__ import annotations

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jcuts
from jcuts.artifact.loaded import Loaded
from jcuts.base.errors import ArtifactError, UnknownSignature, UnsupportedError, UsageError
from jcuts.jit.export import saving
from tests.artifact.functions import Scores, array, convolutions, fused, mlp, same

has_safetensors = importlib.util.find_spec("safetensors") is not None


def loaded(fn, path, *args, **options) -> Loaded:
    fn.save(path, *args, **options)
    return jcuts.load(path)


def test_convolutions(tmp_path):
    fn, args, _ = convolutions()
    found = loaded(fn, tmp_path / "net.jcuts", *args)
    assert same(found(*args), fn(*args))
    assert found.manifest.kernels and not found.is_fallback and found.differences == ()


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_structures_and_dtypes(tmp_path, dtype):
    fn, args, _ = mlp(dtype)
    scale = jnp.asarray(1.5, dtype)
    found = loaded(fn, tmp_path / "net.jcuts", *args, scale=scale)
    assert same(found(*args, scale=scale), fn(*args, scale=scale))


def test_signatures_are_told_apart(tmp_path):
    fn, (x,), _ = convolutions()
    found = loaded(fn, tmp_path / "net.jcuts", x, signatures=[(x[:1],)])
    assert same(found(x), fn(x)) and same(found(x[:1]), fn(x[:1]))
    assert found.signatures == ("(float32[2,8,8,4])", "(float32[1,8,8,4])")
    with pytest.raises(UnknownSignature, match=r"float32\[1,4,8,4\].*it has \(float32\[2,8,8,4\]\)"):
        found(x[:1, :4])
    with pytest.raises(UnknownSignature, match="no array"):
        found("text")
    with pytest.raises(UnknownSignature):
        found(x, x)


@pytest.mark.parametrize(
    "mode", ["inside", pytest.param("beside", marks=pytest.mark.skipif(not has_safetensors, reason="no safetensors"))]
)
def test_weights_are_stored_once(tmp_path, mode):
    fn, (x,), w = convolutions()
    path = tmp_path / "net.jcuts"
    found = loaded(fn, path, x, signatures=[(x[:1],)], weights=mode, names=w)
    assert same(found(x), fn(x))
    assert sorted(t.name for t in found.manifest.tensors) == ["a", "b", "out"]
    if mode == "beside":
        beside = tmp_path / "net.safetensors"
        from safetensors import numpy as format_

        assert same(format_.load_file(beside)["b"], w["b"])
        data = bytearray(beside.read_bytes())
        data[-1] ^= 1
        beside.write_bytes(data)
        with pytest.raises(ArtifactError, match="is not the one that was saved"):
            jcuts.load(path)
        beside.unlink()
        with pytest.raises(ArtifactError, match="cannot read the weights"):
            jcuts.load(path)


def test_weights_as_arguments(tmp_path):
    fn, args, w = mlp()
    scale = jnp.float32(1)
    found = loaded(fn, tmp_path / "net.jcuts", *args, weights="arguments", names=w, scale=scale)
    assert same(found(w, *args, scale=scale), fn(*args, scale=scale))
    other = {**w, "out": w["out"] * 2}
    assert not same(found(other, *args, scale=scale), fn(*args, scale=scale))
    with pytest.raises(UnknownSignature, match="no weight 'out'"):
        found({"in": w["in"]}, *args, scale=scale)
    with pytest.raises(UnknownSignature, match="must be"):
        found({**w, "out": w["in"]}, *args, scale=scale)
    with pytest.raises(ArtifactError, match="weights are arguments"):
        found.export_bytes()


def test_equal_weights_are_stored_once_and_are_no_two_arguments(tmp_path):
    first, second = (jnp.asarray(np.arange(64, dtype=np.float32).reshape(8, 8)) for _ in range(2))
    flat = jnp.asarray(first.reshape(-1))
    fn = fused(lambda x: jnp.tanh(x @ first) @ second + flat[:8])
    x = array(8, 8)
    found = loaded(fn, tmp_path / "net.jcuts", x)
    assert same(found(x), fn(x))
    assert [t.type.shape for t in found.manifest.tensors] in ([(8, 8), (64,)], [(64,), (8, 8)])
    with pytest.raises(UnsupportedError, match=r"weights that differ|computed from them"):
        fn.save(tmp_path / "net.jcuts", x, weights="arguments")


def test_weights_of_the_function(tmp_path):
    fn = fused(lambda w, x: jax.nn.softmax(x @ w["w"]))
    w, x = {"w": array(16, 8)}, array(4, 16, seed=1)
    found = loaded(fn, tmp_path / "net.jcuts", w, x)
    assert same(found(w, x), fn(w, x)) and found.manifest.tensors == ()


def test_named_tuples(tmp_path):
    fn = fused(lambda s: Scores(s.best * 2, {"n": s.all @ s.all}))
    x = Scores(array(4), array(8, 8))
    found = loaded(fn, tmp_path / "net.jcuts", x)
    assert same(found(x), fn(x)) and isinstance(found(x), Scores)


def test_static_arguments(tmp_path):
    fn = fused(lambda x, n, kind: jax.nn.softmax(x) * n if kind == "a" else x, static_argnums=1, static_argnames="kind")
    x = array(8, 8)
    found = loaded(fn, tmp_path / "net.jcuts", x, 3, kind="a")
    assert same(found(x, 3, kind="a"), fn(x, 3, kind="a"))
    with pytest.raises(UnknownSignature, match=r"\(float32\[8,8\], 3, kind='a'\)"):
        found(x, 4, kind="a")


def test_donated_arguments(tmp_path):
    fn = fused(lambda c, x: (c + x, jnp.tanh(x)), donate_argnums=0)
    x = array(64, 64)
    found = loaded(fn, tmp_path / "net.jcuts", array(64, 64, seed=1), x)
    c = array(64, 64, seed=1)
    expected = fn(array(64, 64, seed=1), x)
    assert same(found(c, x), expected) and c.is_deleted()


def test_a_function_that_xla_runs(tmp_path):
    fn = jcuts.optimize(jnp.sort, tune="off")
    x = array(16)
    found = loaded(fn, tmp_path / "net.jcuts", x)
    assert same(found(x), fn(x)) and found.manifest.kernels == ()


def test_loops_hold_kernels(tmp_path):
    w = array(32, 32)
    fn = fused(lambda x: jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), c.sum()), x, None, length=5))
    x = array(32, 32, seed=1)
    found = loaded(fn, tmp_path / "net.jcuts", x)
    assert found.manifest.kernels and same(found(x), fn(x))


def test_signatures_with_other_options_of_xla(tmp_path, monkeypatch):
    options = {"xla_cpu_enable_concurrency_optimized_scheduler": False}
    monkeypatch.setattr(saving, "_options", lambda traced, _: options if traced.leaves[0].shape[0] == 1 else {})
    fn, (x,), _ = convolutions()
    found = loaded(fn, tmp_path / "net.jcuts", x, signatures=[(x[:1],)])
    assert [s.program.options for s in found.manifest.signatures] == [{}, options]
    for _ in range(2):
        assert same(found(x), fn(x)) and same(found(x[:1]), fn(x[:1]))
    np.testing.assert_array_equal(jax.jit(lambda x: found(x) + 1)(x[:1]), fn(x[:1]) + 1)
    found.lower(x[:1]).compile()
    with pytest.raises(UnknownSignature, match="no array"):
        found("text")


# -- surroundings -----------------------------------------------------------------------------------------------------
def test_inside_a_larger_program(tmp_path):
    fn, (x,), _ = convolutions()
    found = loaded(fn, tmp_path / "net.jcuts", x)
    np.testing.assert_array_equal(jax.jit(lambda x: found(x) * 2)(x), fn(x) * 2)
    assert "jcuts_cpu_chain" in jax.jit(lambda x: found(x) * 2).lower(x).as_text()


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_under_shard_map(tmp_path, kind):
    fn, (x,), _ = convolutions()
    found = loaded(fn, tmp_path / "net.jcuts", x)
    mesh = jax.make_mesh((4,), ("i",), axis_types=(kind,))
    xs = jax.device_put(jnp.concatenate([x, x + 1, x, x - 1]), NamedSharding(mesh, P("i")))
    mapped = jax.shard_map(found, mesh=mesh, in_specs=P("i"), out_specs=P("i"))
    expected = np.concatenate([fn(x), fn(x + 1), fn(x), fn(x - 1)])
    np.testing.assert_array_equal(jax.jit(mapped)(xs), expected)


def test_export_bytes(tmp_path):
    fn, (x,), _ = convolutions()
    found = loaded(fn, tmp_path / "net.jcuts", x)
    assert jcuts.register_targets(tmp_path / "net.jcuts") == ("jcuts_cpu_chain",)
    again = export.deserialize(bytearray(found.export_bytes()))
    np.testing.assert_array_equal(jax.jit(again.call)(x)[0], fn(x))


def test_statistics(tmp_path):
    fn, (x,), _ = convolutions()
    found = loaded(fn, tmp_path / "net.jcuts", x)
    rows = jcuts.stats()["functions"]
    assert found.stats() in rows and fn.stats() in rows
    assert fn.stats()["signatures"][0]["program"] == "jcuts"


# -- what cannot be saved ---------------------------------------------------------------------------------------------
class Node:
    """A container that JSON has no form for."""

    def __init__(self, x):
        self.x = x


jax.tree_util.register_pytree_node(Node, lambda n: ((n.x,), None), lambda _, xs: Node(*xs))


@pytest.mark.parametrize(
    ("fn", "args", "options", "error", "why"),
    [
        (lambda n: n.x * 2, (Node(np.ones(4, np.float32)),), {}, UnsupportedError, "Node"),
        (lambda d: d[(1, 2)] * 2, ({(1, 2): np.ones(4, np.float32)},), {}, UnsupportedError, "with the key"),
        (lambda k: jax.random.normal(k, (4,)), (jax.random.key(0),), {}, UnsupportedError, "key<fry>"),
        (lambda x: jax.debug.print("{}", x) or x, (np.ones(4, np.float32),), {}, UnsupportedError, "effects"),
        (lambda x: x, (np.ones(4, np.float32),), {"weights": "elsewhere"}, UsageError, "must be one of"),
        (lambda x: x, (np.ones(4, np.float32),), {"key": b"short"}, ArtifactError, "at least 16"),
    ],
)
def test_refusals(tmp_path, fn, args, options, error, why):
    with pytest.raises(error, match=why):
        jcuts.optimize(fn, tune="off").save(tmp_path / "net.jcuts", *args, **options)
    assert list(tmp_path.iterdir()) == []


def test_not_inside_a_trace(tmp_path):
    fn, (x,), _ = convolutions()

    def outer(x):
        fn.save(tmp_path / "net.jcuts", x)
        return x

    with pytest.raises(UsageError, match="concrete arguments"):
        jax.jit(outer)(x)


def test_folded_weights_cannot_become_arguments(tmp_path):
    w = array(8)
    fn = fused(lambda x: x * jax.lax.rsqrt(jnp.square(w) + 1e-3))
    x = array(64, 8)
    assert same(loaded(fn, tmp_path / "net.jcuts", x)(x), fn(x))
    if len(jcuts.load(tmp_path / "net.jcuts").manifest.tensors) > 1:
        with pytest.raises(UnsupportedError, match="computed from them"):
            fn.save(tmp_path / "other.jcuts", x, weights="arguments")
