"""Large outputs: a sample of them is held to the rule, every element to XLA's."""

from __future__ import annotations

import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jcuts.base.errors import AccuracyRejected
from jcuts.tune.baseline.xla_export import export_subset
from jcuts.tune.problem import Candidate, Input, Output, Problem, stablehlo_payload
from jcuts.tune.verify import inputs as verify_inputs
from jcuts.tune.verify import sampling as verify_sampling
from jcuts.tune.verify.float_rules import Accuracy
from jcuts.tune.worker import problem_files, requests, runners

SIZE = 300_007
SPEC = Output((SIZE,), "float32")


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Sizes that tests can afford, in a process that keeps its types of 32 bits."""
    monkeypatch.setattr(problem_files, "import_jax", lambda: jax)
    monkeypatch.setattr(verify_sampling, "LARGEST", 1 << 16)
    monkeypatch.setattr(verify_sampling, "LARGEST_THAT_FLIP", 1 << 15)
    monkeypatch.setattr(verify_sampling, "RUNS", 32)
    monkeypatch.setattr(verify_inputs, "PERIOD", 65_521)
    verify_sampling._drawn.cache_clear()
    yield
    verify_sampling._drawn.cache_clear()


def plain(x):
    return x * 2.0 + 1.0


def candidate(fn, label):
    exported = jax.export.export(jax.jit(fn))(jax.ShapeDtypeStruct((SIZE,), jnp.float32))
    return Candidate("stablehlo", stablehlo_payload(exported.serialize()), label)


def run(tmp_path, device="", **candidates):
    """The verdict on each candidate: None, or the rule that it breaks."""
    made = tuple(candidate(fn, label) for label, fn in candidates.items())
    problem = Problem("affine", (Input((SIZE,), "float32"),), (SPEC,), made, device=device)
    exports = export_subset(jax.make_jaxpr(plain)(jax.ShapeDtypeStruct((SIZE,), jnp.float32)))
    problem = problem.with_exports(exports.library, exports.reference, exports.perturb, exports.unsure)
    file = tmp_path / "problem.json"
    file.write_text(json.dumps(problem.to_json()))
    said: list[str] = []
    request = {"problem": str(file), "folder": str(tmp_path), "seed": 3}
    with jax.enable_x64(True):
        kinds = requests.reference(request, said.append)["kinds"]
        found = {}
        for label in candidates:
            try:
                requests.check({**request, "kinds": kinds, "label": label, "kernel": ""}, said.append)
                found[label] = None
            except AccuracyRejected as error:
                found[label] = error.values["rule"]
    return found


def test_rule_sees_runs_with_both_ends():
    seen = verify_sampling.sample_positions(Problem("", (), (SPEC,)), SPEC)
    assert seen is not None
    assert (np.diff(seen) > 0).all()
    assert seen[0] == 0
    assert seen[-1] == SIZE - 1
    assert len(seen) < SIZE // 2


def test_small_discrete_and_integer_outputs_are_seen_whole():
    perturbed = Problem("", (), (SPEC,), perturb=True)
    assert verify_sampling.sample_positions(perturbed, Output((1 << 15,), "bool")) is None
    assert verify_sampling.sample_positions(perturbed, Output((1 << 16,), "float32")) is not None
    for kind in ("float32", "bool", "int32"):  # a dozen references of each would be made
        assert verify_sampling.sample_positions(perturbed, Output((SIZE,), kind)) is not None
    for spec in (Output((1 << 16,), "float32"), Output((SIZE,), "int32"), Output((SIZE,), "float32", exact=True)):
        assert verify_sampling.sample_positions(Problem("", (), (spec,)), spec) is None


@pytest.mark.parametrize("device", ["", "NVIDIA H200 9.0 x132"])
def test_one_wrong_element_is_found_wherever_it_is(tmp_path, device):
    seen = verify_sampling.sample_positions(Problem("", (), (SPEC,)), SPEC)
    unseen = int(np.setdiff1d(np.arange(SIZE), seen)[1000])
    found = run(
        tmp_path,
        device,
        right=lambda x: x + x + 1.0,
        outside=lambda x: plain(x).at[unseen].add(1e-3),
        nan=lambda x: plain(x).at[unseen].set(jnp.nan),
        inside=lambda x: plain(x).at[int(seen[1000])].add(1.0),
        everywhere=lambda x: plain(x) * (1.0 + 2e-5),
    )
    assert found == {
        "right": None,
        "outside": "everywhere",
        "nan": "everywhere",
        "inside": "output",
        "everywhere": "output",
    }


def compared(xla, have):
    seen = np.arange(0, xla.size, 2)
    verify_sampling.compare(0, xla, have, Accuracy(0.5, 0.5, 5.0), seen)


def test_what_is_not_finite_gives_no_scale():
    xla = np.linspace(1.0, 2.0, 1000, dtype=np.float32)
    xla[[0, 2, 4]] = np.nan, np.inf, -np.inf
    xla[7] = 1e-9  # small beside the others: an absolute error of an ulp of those is none
    right = np.where(np.isfinite(xla), xla + np.float32(2e-7), xla)
    compared(xla, right)
    with pytest.raises(AccuracyRejected):
        compared(xla, np.where(np.isinf(xla), np.float32(1.0), right))
    compared(np.full(1000, np.nan, np.float32), np.full(1000, np.nan, np.float32))


def test_right_results_with_a_heavy_tail_are_accepted():
    rng = np.random.default_rng(5)
    size = 1 << 21
    a, b = rng.standard_normal(size), rng.standard_normal(size)

    def quotient(noise_of):  # the denominator, a sum that cancels, is off by roundings: Cauchy's tail
        noise = np.random.default_rng(noise_of).uniform(-1e-9, 1e-9, size)
        return (a / (b + noise)).astype(np.float32)

    xla, have = quotient(1), quotient(2)
    seen = np.sort(rng.choice(size, size // 64, replace=False))
    exact = a / b
    scale = np.sqrt(np.mean(exact[seen] ** 2))
    eps = float(np.finfo(np.float32).eps)
    own = float(np.max(np.abs(xla[seen] - exact[seen]) / np.maximum(np.abs(exact[seen]), scale))) / eps
    found = Accuracy(own, own, 2 * own + 4)
    apart = np.abs(have.astype(np.float64) - xla) / np.maximum(np.abs(xla.astype(np.float64)), scale)
    assert apart.max() / eps > verify_sampling.ELEMENT_FACTOR * (
        found.limit + found.xla
    )  # by the sample's errors alone it is out
    verify_sampling.compare(0, xla, have, found, seen)
    wrong = have.copy()
    wrong[int(np.setdiff1d(np.arange(1000), seen)[0])] = np.nan
    with pytest.raises(AccuracyRejected):
        verify_sampling.compare(0, xla, wrong, found, seen)
    shifted = have.copy()
    shifted[1000:1500] = have[2000:2500]  # of another place
    with pytest.raises(AccuracyRejected):
        verify_sampling.compare(0, xla, shifted, found, seen)


def test_a_light_tail_leaves_the_limit_as_it_is():
    rng = np.random.default_rng(6)
    for draw in (rng.uniform(0, 1, 1 << 16), np.abs(rng.standard_normal(1 << 16)), np.zeros(1 << 16)):
        assert verify_sampling._growth(draw, 1 << 22) < 2.0
    assert verify_sampling._growth(np.abs(rng.standard_cauchy(1 << 16)), 1 << 22) > 20.0


def test_the_largest_finite_number_is_next_to_infinity():
    xla = np.full(1000, 1.0, np.float16)
    xla[::7] = np.inf
    near = np.where(np.isinf(xla), np.float16(65504), xla)
    compared(xla, near)
    with pytest.raises(AccuracyRejected):
        compared(xla, np.where(np.isinf(xla), np.float16(30000), xla))
    with pytest.raises(AccuracyRejected):
        compared(xla, np.where(np.isinf(xla), -xla, xla))
    denormal = np.full(1000, 3e-39, np.float32)
    compared(denormal, np.zeros(1000, np.float32))


@pytest.mark.parametrize("gpu", [False, True])
def test_zeros_that_are_not_written_show_where_all_elements_are_compared(monkeypatch, gpu):
    wanted = np.where(np.arange(1000) < 10, np.float32(0.0), np.float32(1.0))

    class Idle:
        def __init__(self, *_):
            self.kernel = SimpleNamespace(tiles=4)

        def run(self, inputs, *_, poison, **__):
            return [np.where(wanted > 0, wanted, np.frombuffer(bytes([poison] * 4), np.float32))]

    kernel = SimpleNamespace(object_code=b"", digest="idle", inputs=())
    monkeypatch.setattr(runners, "Launcher", Idle)
    monkeypatch.setattr("jcuts.tune.measure.gpu_launch.GpuLauncher", Idle)
    monkeypatch.setattr("jcuts.tune.measure.cuda_driver.device", lambda: None)
    monkeypatch.setattr(runners, "read_kernel", lambda _: kernel)
    run = runners.gpu_runner(kernel) if gpu else runners.kernel_runner("")
    with pytest.raises(AccuracyRejected):
        compared(wanted, run([], 0)[0])


def test_large_inputs_repeat_a_prime_number_of_values():
    problem = Problem("", (Input((500, 601), "bfloat16"),), (SPEC,))
    (made,) = verify_inputs.make_inputs(problem, verify_inputs.SPECIAL, 1)
    assert made.shape == (500, 601)
    flat = made.reshape(-1).astype(np.float32)
    np.testing.assert_array_equal(flat[65_521 : 2 * 65_521], flat[:65_521])
    assert np.isnan(flat).any()
    assert len(np.unique(flat[:65_521])) > 1000


@pytest.fixture
def flipping():
    """What XLA's code makes of a mask and of what it chooses, and a sample of their positions."""
    rng = np.random.default_rng(11)
    value = rng.standard_normal(SIZE).astype(np.float32)
    return value, value > 0, verify_sampling.sample_positions(Problem("", (), (SPEC,)), SPEC)


def flipped(flipping, where):
    """Compares a mask and a choice by it that are the other way round at some places."""
    value, mask, seen = flipping
    other = mask.copy()
    other[where] ^= True
    exact, close = Accuracy(0.0, 0.0, 0.0), Accuracy(0.5, 0.5, 5.0)
    verify_sampling.compare(0, mask, other, exact, seen, may_flip=True)
    chosen = [np.where(m, value, np.float32(2.0) * value) for m in (mask, other)]
    verify_sampling.compare(1, *chosen, close, seen, may_flip=True)


def outside(seen, count, step):
    """Places that the sample does not see."""
    found = np.setdiff1d(np.arange(SIZE), seen)
    return found[:: max(1, step)][:count]


def test_single_flips_are_accepted_and_wrong_tiles_are_not(flipping):
    seen = flipping[2]
    flipped(flipping, outside(seen, 12, 20_000))
    assert len(outside(seen, 12, 20_000)) == 12
    with pytest.raises(AccuracyRejected, match=" are apart from XLA's") as tile:
        flipped(flipping, outside(seen, 64, 1))  # side by side
    assert tile.value.rule == "everywhere"
    with pytest.raises(AccuracyRejected):
        flipped(flipping, outside(seen, 2_000, 140))  # one in every run or two, none of which the sample has


def test_as_many_flips_as_in_the_sample_are_accepted(flipping):
    flipped(flipping, np.random.default_rng(3).choice(SIZE, 900, replace=False))


def test_nan_is_no_flip_that_comes_in_tiles(flipping):
    value, _, seen = flipping
    wrong = value.copy()
    wrong[outside(seen, 20, 1)] = np.nan
    with pytest.raises(AccuracyRejected):
        verify_sampling.compare(0, value, wrong, Accuracy(0.5, 0.5, 5.0), seen, may_flip=True)


@pytest.mark.parametrize("kind", [np.float32, np.float64, ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("limit", [1e-7, 1e-3, 0.25])
def test_what_its_own_type_finds_near_is_near_in_float64(kind, limit):
    random = np.random.default_rng(5)
    exponents = random.integers(-8, 4, 4096) if kind is np.float16 else random.integers(-44, 37, 4096)
    x = (random.standard_normal(4096) * 10.0**exponents).astype(kind)
    scale = float(np.finfo(np.float32).tiny)
    for factor in (0.5, 1 - 1e-6, 1.0, 1 + 1e-6, 2.0):
        c = (x.astype(np.float64) * (1 + factor * limit)).astype(kind)
        wide = x.astype(np.float64)
        apart = np.maximum(np.abs(c.astype(np.float64) - wide) - scale, 0.0) / np.maximum(np.abs(wide), scale)
        for a, b, far in zip(c, x, apart, strict=True):
            assert far <= limit or not verify_sampling._all_near(a[None], b[None], scale=scale, limit=limit)
    assert verify_sampling._all_near(x, x, scale=scale, limit=limit)
    for special in (np.nan, np.inf):  # float64 has the last word
        pair = np.full(3, special, kind), np.ones(3, kind)
        assert not verify_sampling._all_near(*pair, scale=scale, limit=limit)
        assert not verify_sampling._all_near(*reversed(pair), scale=scale, limit=limit)
    whole = np.ones(3, np.int32)
    assert not verify_sampling._all_near(whole, whole, scale=scale, limit=limit)
