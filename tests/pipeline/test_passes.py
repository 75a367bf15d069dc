"""Whole functions through every stage, against jax.jit: results, modes, refusals, fuel, dumps and reports."""

from __future__ import annotations

import itertools
import json
import re
import runpy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jcuts
from benchmarks.networks.workloads.keras_cnn import keras_model
from jcuts.base import knobs
from jcuts.base.errors import UnsupportedError, UsageError
from jcuts.kernel_ir import run as kernel_run
from jcuts.pipeline import passes as pipeline_passes


def random(*shape, seed=0, scale=1.0):
    return (np.random.default_rng([seed, *shape]).standard_normal(shape) * scale).astype(np.float32)


@pytest.fixture(autouse=True)
def fresh():
    pipeline_passes.forget()
    yield
    pipeline_passes.forget()


def planned(fn, **options):
    return jcuts.optimize(fn, **{"mode": "fusion", "tune": "off", **options})


def assert_close(got, want, rtol=2e-4, atol=2e-5):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        scale = max(1.0, float(np.abs(np.asarray(b)).max(initial=0)))
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=rtol, atol=atol * scale)


# -- programs ---------------------------------------------------------------------------------------------------------
def mlp_step(params, x, labels):
    """Loss, gradients and an SGD update."""

    def loss(params):
        h = x
        for w, b in params[:-1]:
            h = jax.nn.gelu(h @ w + b)
        logits = h @ params[-1][0] + params[-1][1]
        return -jnp.mean(jnp.sum(jax.nn.log_softmax(logits) * jax.nn.one_hot(labels, logits.shape[-1]), -1))

    value, grads = jax.value_and_grad(loss)(params)
    return value, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


def mlp():
    sizes = (20, 32, 24, 10)
    params = [(random(a, b, scale=0.3), random(b, scale=0.1)) for a, b in itertools.pairwise(sizes)]
    return mlp_step, (params, random(16, 20), np.arange(16) % 10)


def encoder(params, x):
    """A transformer encoder block with two heads."""

    def norm(x, g, b):
        mean = x.mean(-1, keepdims=True)
        return (x - mean) * lax.rsqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-5) * g + b

    batch, length, width = x.shape
    h = norm(x, *params["norm1"])
    q, k, v = (jnp.reshape(h @ params[n], (batch, length, 2, width // 2)) for n in ("q", "k", "v"))
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.float32(np.sqrt(width // 2)))
    mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(batch, length, width)
    x = x + mixed @ params["o"]
    return x + jax.nn.gelu(norm(x, *params["norm2"]) @ params["up"]) @ params["down"]


def transformer():
    width = 24
    params = {n: random(width, width, seed=k, scale=0.2) for k, n in enumerate(("q", "k", "v", "o"))}
    params |= {"up": random(width, 48, scale=0.2), "down": random(48, width, scale=0.2)}
    params |= {n: (1 + random(width, scale=0.1), random(width, scale=0.1)) for n in ("norm1", "norm2")}
    return encoder, (params, random(2, 12, width))


def gru_scan(params, xs, h):
    def cell(h, x):
        z = jax.nn.sigmoid(x @ params["wz"] + h @ params["uz"])
        r = jax.nn.sigmoid(x @ params["wr"] + h @ params["ur"])
        new = jnp.tanh(x @ params["wh"] + (r * h) @ params["uh"])
        h = (1 - z) * h + z * new
        return h, h

    return lax.scan(cell, h, xs)


def gru():
    params = {f"w{g}": random(12, 18, seed=k, scale=0.3) for k, g in enumerate("zrh")}
    params |= {f"u{g}": random(18, 18, seed=k, scale=0.3) for k, g in enumerate("zrh")}
    return gru_scan, (params, random(7, 5, 12), random(5, 18))


def conv_net(layout):
    spec = (layout, "HWIO", layout)
    axis = layout.index("C")

    def net(params, x):
        for w, g, b in params:
            x = lax.conv_general_dilated(x, w, (2, 2), "SAME", dimension_numbers=spec)
            others = tuple(d for d in range(4) if d != axis)
            mean, square = x.mean(others, keepdims=True), (x * x).mean(others, keepdims=True)
            shape = [1, 1, 1, 1]
            shape[axis] = -1
            x = (x - mean) * lax.rsqrt(square - mean * mean + 1e-3) * g.reshape(shape) + b.reshape(shape)
            x = jax.nn.relu6(x)
        return x.mean(tuple(d for d in (1, 2, 3) if d != axis))

    def build():
        widths = (3, 8, 20)
        params = [
            (random(3, 3, a, b, scale=0.3), 1 + random(b, scale=0.1), random(b, scale=0.1))
            for a, b in itertools.pairwise(widths)
        ]
        x = random(2, 14, 14, 3)
        return net, (params, x if layout == "NHWC" else x.transpose(0, 3, 1, 2))

    return build


PROGRAMS = {
    "MLP step": mlp,
    "transformer": transformer,
    "GRU": gru,
    "NHWC": conv_net("NHWC"),
    "NCHW": conv_net("NCHW"),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_against_jit(name):
    fn, arguments = PROGRAMS[name]()
    ours = planned(fn)
    assert_close(ours(*arguments), jax.jit(fn)(*arguments))
    report = ours.explain(*arguments)
    assert report.kernels > 0
    assert report.share("flop") > 0.9


@pytest.mark.parametrize("name", ["MLP step", "transformer", "NHWC"])
def test_modes_agree(name):
    fn, arguments = PROGRAMS[name]()
    want = jax.jit(fn)(*arguments)
    kernels = {}
    for mode in ("no_fusion", "fusion", "mixed"):
        ours = planned(fn, mode=mode)
        assert_close(ours(*arguments), want)
        kernels[mode] = ours.explain(*arguments).kernels
    assert kernels["no_fusion"] > kernels["fusion"] >= kernels["mixed"]


def test_scan_bodies_hold_kernels():
    fn, arguments = gru()
    with knobs.scope(chains=False):  # with chains the whole scan is one call (`tests/xla/chains/test_loop.py`)
        report = planned(fn).explain(*arguments)
    body, call, _ = report.source.partition(" = scan(")
    assert call and "ffi_call" in body
    assert body.index("ffi_call") > body.index("    def jaxpr(")


def test_gradients_through_the_whole_thing():
    fn, (params, x) = transformer()
    ours = planned(fn)
    got = jax.grad(lambda p: (ours(p, x) ** 2).sum())(params)
    want = jax.jit(jax.grad(lambda p: (fn(p, x) ** 2).sum()))(params)
    assert_close(got, want, rtol=2e-3, atol=2e-4)


def test_mobilenet():
    pytest.importorskip("keras")
    model = keras_model("MobileNetV2", "float32", 96, alpha=0.35, classes=50)
    weights = ([v.value for v in model.trainable_variables], [v.value for v in model.non_trainable_variables])

    def apply(weights, images):
        return model.stateless_call(*weights, images, training=False)[0]

    images = random(1, 96, 96, 3)
    ours = planned(apply)
    assert_close(ours(weights, images), jax.jit(apply)(weights, images))
    report = ours.explain(weights, images)
    assert report.share("flop") > 0.99
    assert not report.refusals
    assert report.kernels < 80  # 52 convolutions, a dense layer, and what is between them


# -- options ----------------------------------------------------------------------------------------------------------
def with_sort(x):
    h = jnp.tanh(x) * 2
    return lax.sort(h) + 1


def test_strict_names_primitive_line_and_reason():
    with pytest.raises(UnsupportedError) as caught:
        planned(with_sort, strict=True)(random(50))
    error = caught.value
    assert error.op == "sort"  # type: ignore[attr-defined]
    assert re.search(r"test_passes\.py:\d+ \(with_sort\)", error.where)  # type: ignore[attr-defined]
    assert "no op rule" in error.reason and "sort at " in str(error)  # type: ignore[attr-defined]


def test_strict_is_silent_where_everything_is_covered():
    planned(lambda x: jnp.tanh(x) * 2, strict=True)(random(50))


def test_strict_is_silent_about_what_is_too_small_for_a_kernel():
    def fn(x):
        return jnp.tanh(x) * 2, x[0] + 1

    ours = planned(fn, mode="mixed", strict=True)
    x = random(50)
    jax.tree.map(assert_close, ours(x), jax.jit(fn)(x))
    report = ours.explain(x)
    assert any("too little work" in r.reason for r in report.refusals)


def gates(x, w):
    i, f, g, o = jnp.split(x @ w, 4, axis=-1)
    return jax.nn.sigmoid(i) * jnp.tanh(g) + jax.nn.sigmoid(f) * jnp.tanh(o)


def uneven_in_a_loop(x):
    def body(c, _):
        a, b, d = jnp.split(c, [5, 9], axis=1)
        return jnp.concatenate([jnp.tanh(b), a * 2, d], 1), b.sum()

    return lax.scan(lambda c, _: lax.scan(body, c, None, length=2), x, None, length=2)


@pytest.mark.parametrize("fn, shapes", [(gates, [(40, 24), (24, 96)]), (uneven_in_a_loop, [(30, 21)])])
def test_split_is_fused_as_slices(fn, shapes):
    arguments = [random(*shape) for shape in shapes]
    ours = planned(fn, mode="fusion")
    jax.tree.map(assert_close, ours(*arguments), jax.jit(fn)(*arguments))
    report = ours.explain(*arguments)
    assert not report.refusals
    assert not [s for s in report.subsets if set(s.operations) == {"slice"}]
    jax.tree.map(
        assert_close,
        jax.grad(lambda *a: jax.tree.leaves(ours(*a))[0].sum())(*arguments),
        jax.grad(lambda *a: jax.tree.leaves(fn(*a))[0].sum())(*arguments),
    )


def test_what_is_left_to_xla_is_listed_and_right():
    x = random(50)
    ours = planned(with_sort)
    assert_close(ours(x), jax.jit(with_sort)(x))
    (refusal,) = [r for r in ours.explain(x).refusals if r.op == "sort"]
    assert "no op rule" in refusal.reason and "test_passes.py" in refusal.where


def chain(x, w):
    return jax.nn.relu(x @ w) * 2 + 1


@pytest.mark.parametrize("amount", [0, 1, 2, 10])
def test_fuel_stops_after_so_many_fusions(amount):
    x, w = random(9, 16), random(16, 20)
    with knobs.scope(fuel=amount):
        ours = planned(chain)
        assert_close(ours(x, w), jax.jit(chain)(x, w))
        report = ours.explain(x, w)
    operations = sum(sum(s.operations.values()) * s.count for s in report.subsets)
    fusions = operations - sum(s.count for s in report.subsets)
    assert fusions == min(amount, operations - 1)


def test_dump_writes_every_stage(tmp_path, monkeypatch):
    monkeypatch.setenv("JCUTS_DUMP", str(tmp_path))
    planned(chain)(random(9, 16), random(16, 20))
    (folder,) = [f for f in tmp_path.iterdir() if f.name.startswith("chain")]
    files = sorted(folder.iterdir())
    stages = [re.sub(r"^\d+_|\.\w+$", "", f.name) for f in files]
    assert stages[0] == "jaxpr" and {"rewritten", "kernels"} <= set(stages)
    kernels = next(f for f in files if "kernels" in f.name and f.suffix == ".py").read_text()
    assert "def kernel(buffers, tile_begin, tile_end, scratch):" in kernels
    assert "ffi_call" in next(f for f in files if f.name.endswith("_rewritten.txt")).read_text()


def test_dumped_stages_run_again(tmp_path, monkeypatch):
    monkeypatch.setenv("JCUTS_DUMP", str(tmp_path))
    x, w = random(9, 16), random(16, 20)
    planned(chain)(x, w)
    (folder,) = [f for f in tmp_path.iterdir() if f.name.startswith("chain")]
    (script,) = folder.glob("*_flat.py")
    again = runpy.run_path(str(script))
    assert again["OPERANDS"] == [((9, 16), "float32"), ((16, 20), "float32")]
    np.testing.assert_allclose(again["program"](x, w)[0], jax.jit(chain)(x, w), rtol=1e-5, atol=1e-5)
    for stage in ("subsets", "kernels"):
        (file,) = folder.glob(f"*_{stage}.json")
        for program in kernel_run.load(file):
            results = kernel_run.run(program, kernel_run.random_operands(program))
            assert [r.shape for r in results.values()] == [b.shape for b in program.outputs]
        assert kernel_run.main([str(file), "--results", str(tmp_path / "results.npz")]) == 0


def test_plans_are_remembered_and_deterministic():
    x, w = random(9, 16), random(16, 20)
    first = planned(chain).explain(x, w)
    assert planned(chain).explain(x, w).subsets == first.subsets
    pipeline_passes.forget()
    assert planned(chain).explain(x, w).subsets == first.subsets


def test_reports_are_data_text_and_html(tmp_path):
    ours = planned(with_sort)
    ours(random(50))
    report = ours.explain(random(50))
    data = json.loads(json.dumps(report.to_dict()))
    assert data["mode"] == "fusion" and data["platform"] == "cpu"
    assert [r["op"] for r in data["refusals"]] == ["sort"]
    assert data["guard"]["chosen"]
    assert sum(sum(s["operations"].values()) for s in data["subsets"]) == data["equations"] - 1
    text = str(report)
    assert "left to XLA: 1 x sort" in text and "tanh" in text
    page = report.to_html(tmp_path / "report.html").read_text()
    assert page.startswith("<!doctype html>") and "tanh" in page and "ffi_call" in page


def test_another_platform_is_left_alone():
    from jcuts.base.settings import Settings
    from jcuts.trace import jaxapi

    closed = jaxapi.closed_jaxpr_of(jnp.tanh, random(50))
    outcome = pipeline_passes.optimize_jaxpr(closed, Settings(), platform="tpu", may_measure=False)
    assert outcome.closed is closed
    assert "no kernels for platform tpu" in outcome.report.notes[0]


def test_a_missing_native_library_leaves_everything_to_xla(monkeypatch):
    monkeypatch.setattr(pipeline_passes.native_library, "native_available", lambda: (False, "it is gone"))
    x = random(50)
    ours = planned(with_sort)
    assert_close(ours(x), jax.jit(with_sort)(x))
    assert "it is gone" in ours.explain(x).notes[0]


@pytest.mark.parametrize("bits", [(5, 10), (8, 7)])
def test_float64_is_rounded_to_sixteen_bits_once(bits):
    rng = np.random.default_rng(0)
    count, (exponent, mantissa) = 400, bits
    ties = 1 + (rng.integers(0, 1 << mantissa, count) + 0.5) / (1 << mantissa)
    beside = ties + rng.choice([-1, 0, 1], count) * 2.0 ** -rng.integers(25, 52, count)  # float32 cannot tell
    x = np.ldexp(beside, rng.integers(-12, 12, count)) * rng.choice([-1, 1], count)
    ends = [0.0, -0.0, np.inf, -np.inf, np.nan, 65519.99999999, 65520.0, 6.1e-5, 6.103e-5, 5e-324, 1e300]
    x = np.concatenate([x, ends])
    with jax.enable_x64(True):
        function = lambda x: jax.lax.reduce_precision(x, exponent, mantissa)  # noqa: E731
        f = jcuts.optimize(function, mode="fusion", tune="off")
        got, want = np.asarray(f(x)), np.asarray(jax.jit(function)(x))
        assert f.explain(x).kernels == 1
    np.testing.assert_array_equal(got, want)
    assert (np.signbit(got) == np.signbit(want))[~np.isnan(want)].all()


def test_functions_with_other_random_keys_are_others():
    """Constants that NumPy cannot hold count, too: plans are remembered by them."""

    def make(seed):
        key = jax.random.key(seed)
        return lambda x: x + jax.random.normal(key, x.shape) + jnp.max(jnp.tanh(x), -1, keepdims=True)

    x = jnp.ones((16, 64))
    for seed in (0, 1):
        got = jcuts.optimize(make(seed), mode="fusion", tune="off")(x)
        np.testing.assert_allclose(got, jax.jit(make(seed))(x), atol=1e-4)


def test_substitutes_are_of_passes_that_there_are():
    seen = []
    passes = pipeline_passes.with_substitutes({"group": lambda state: seen.append(state) or state})
    assert [p.name for p in passes] == [p.name for p in pipeline_passes.PASSES]
    changed = [p.name for p, q in zip(passes, pipeline_passes.PASSES, strict=True) if p.apply is not q.apply]
    assert changed == ["group"]
    with pytest.raises(UsageError, match=r"no pass is called fuse; there are inline, .*, chain"):
        pipeline_passes.with_substitutes({"fuse": lambda state: state})
