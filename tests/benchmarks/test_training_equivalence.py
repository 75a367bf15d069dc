"""Benchmarks of training steps against float64, of loss curves and of repeatability, on a network of two layers."""

from __future__ import annotations

import argparse
import dataclasses
import xml.etree.ElementTree as ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.networks.line_chart import Panel, line_chart
from benchmarks.networks.workloads.optimizers import adamw, cross_entropy, sgd, training
from benchmarks.training_equivalence import (
    gradients,
    loss_curves,
    network_processes,
    repeatability,
    training_networks,
)
from benchmarks.training_equivalence.training_networks import Network

TOY = "toy"


def toy_training(batch: int, dtype: str, tiny: bool = False, rule: tuple = ()) -> training_networks.Program:
    """A step of a network with one hidden layer; a gradient that is zero: that of a shift of all logits."""
    rng = np.random.default_rng(1)
    sizes = (192, 16, training_networks.CLASSES)
    params = [jnp.asarray(rng.standard_normal(s) / 8, dtype) for s in (sizes[:2], sizes[1:], (1,))]

    def loss(p: list[jax.Array], images: jax.Array, labels: jax.Array) -> jax.Array:
        hidden = jnp.tanh(images.reshape(images.shape[0], -1) @ p[0])
        return cross_entropy(hidden @ p[1] + p[2], labels)

    data = jnp.zeros((batch, 8, 8, 3), dtype), jnp.zeros(batch, jnp.int32)
    return training(loss, params, data, rule or sgd(0.01), dtype)


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Network:
    network = Network(TOY, 8, toy_training)
    monkeypatch.setitem(training_networks.SMALL, TOY, network)
    return network


def measured(module: object, script: str, folder: object, *words: str) -> dict:
    """A network's child in this process, then the command, which finds its results."""
    for more in (["--child", TOY], []):
        code = module.main(["--network", TOY, "--out", str(folder), "--dry", *words, *more])
        assert code == 0
    return network_processes.read(folder / f"{script}_{TOY}_8.json")


def test_names_of_networks():
    assert Network.parse("GPT_training:8").stem == "GPT_training_8"
    assert all(Network.parse(name).name == name for name in training_networks.SMALL)
    for name in training_networks.GPUS:
        assert Network.parse(name).batch in (8, 64)
    for wrong in ("GPT_training", "ResNet50:1", "nothing:1"):
        with pytest.raises(ValueError, match="is no network"):
            Network.parse(wrong)


def test_batches_are_equal_every_time_and_learnable(toy):
    form = toy.form()
    one, other = (training_networks.batches(form, 40) for _ in range(2))
    assert all(np.array_equal(a, b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True))
    images, labels = (np.concatenate([np.asarray(b[k]) for b in one]) for k in (0, 1))
    means = np.stack([images[labels == k].mean(0) for k in range(training_networks.CLASSES)])
    nearest = np.square(images[:, None] - means).sum((2, 3, 4)).argmin(1)
    assert (nearest == labels).mean() > 0.5
    (sequences,) = training_networks.tokens(np.arange(10)[::-1], np.random.default_rng(0), (50, 40))
    assert (sequences[:, 1:] == 9 - sequences[:, :-1]).mean() > 0.75


@pytest.mark.parametrize("rule, factor", [(sgd(), 1.0), (adamw(clip=1e9), 0.1)], ids=["sgd", "adamw"])
def test_first_moments_are_gradients(rule, factor):
    form = Network(TOY, 8, lambda batch, dtype, tiny: toy_training(batch, dtype, tiny, rule)).form()
    batches = training_networks.batches(form, 2)
    found, losses = gradients.gradients(jax.jit(form.function), form, batches)
    rate, params = 1e-3, form.arguments[0]
    plain = Network(TOY, 8, lambda *a, **k: toy_training(*a, **k, rule=sgd(rate, 0.0))).form()
    for batch, one, loss in zip(batches, found, losses, strict=True):
        after, _, value = plain.function(params, (), *batch)
        assert value == pytest.approx(loss)
        for g, p, q in zip(one[:2], params, after, strict=False):
            np.testing.assert_allclose(g, factor * np.asarray(p - q) / rate, rtol=0.02, atol=1e-4)


def test_summary_names_worse_leaves():
    wanted = [[np.array([3.0, 4.0]), np.array([1.0])]] * 3
    found = [[np.array([3.0, y]), np.array([1.0])] for y in (4.1, 4.0, 9.0)]
    error = gradients.errors(found, wanted, 0)
    assert error == pytest.approx({"l2": 0.02, "max": 0.1 / 12.5**0.5, "absolute": 0.1, "worst batch": 1.0})
    assert gradients.flips((found, []), wanted) == 2
    same = {"l2": 1e-6, "max": 1e-6, "worst batch": 1e-6}
    leaves = [
        {"leaf": name, "shape": [2], "jax.jit": same, "jcuts": same | {"l2": x}}
        for name, x in (("a", 1e-6), ("b", 3e-6), ("c", 4e-7))
    ]
    made = gradients.summary(leaves)
    assert made["l2"]["worse"] == [["b", [2], 3.0]]
    assert made["l2"]["better"] == 1
    assert made["l2"]["jcuts"]["worst leaf"] == "b"
    assert made["l2"]["ratio"] == pytest.approx({"of worst": 3.0, "of medians": 1.0, "median": 1.0, "largest": 3.0})
    assert made["max"]["worse"] == []


def test_gradients_against_float64(toy, tmp_path):
    found = measured(gradients, "gradients", tmp_path, "--batches", "2")
    assert found["jcuts"]["kernels"] > 0
    assert len(found["leaves"]) == 2
    assert [row["leaf"] for row in found["vanishing"]] == ["[2]"]
    for leaf in found["leaves"]:
        assert 0 < leaf["jax.jit"]["l2"] < 1e-6
        assert 0 < leaf["jcuts"]["l2"] < 1e-6
    assert found["losses"]["jcuts"] == pytest.approx(found["losses"]["float64"], rel=1e-6)


def test_widened_program_is_the_one_built_in_float64(toy):
    form = toy.form()
    batches = training_networks.batches(form, 1)
    options = argparse.Namespace(reference="device", dry=False)
    built, widened = (gradients.exact(dataclasses.replace(toy, wide=w), form, batches, options) for w in (True, False))
    assert built[2] != widened[2]
    np.testing.assert_allclose(built[1], widened[1], rtol=1e-12)
    for a, b in zip(built[0][0][:2], widened[0][0][:2], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-14)


def test_float32_inside_the_reference_is_found():
    narrow = Network(TOY, 8, lambda batch, dtype, tiny: toy_training(batch, "float32", tiny))
    options = argparse.Namespace(reference="device", dry=False)
    with pytest.raises(TypeError, match="float32"):
        gradients.exact(narrow, narrow.form(), training_networks.batches(narrow.form(), 1), options)


def test_parameters_move_by_one_ulp():
    before = np.array([1.0, -2.5, 3e-9, 7e8] * 20, np.float32)
    after = np.asarray(loss_curves.moved([before], 1)[0])
    assert set(np.abs(before.view(np.int32) - after.view(np.int32))) == {1}
    assert {-1.0, 1.0} <= set(np.sign(after - before))


def test_distance_of_curves():
    base = [4.0] * 10 + [2.0] * 20
    found = loss_curves.distance([4.0] * 5 + [5.0] * 5 + [2.1] * 20, base)
    assert found == pytest.approx({"largest": 0.5, "late": 0.05, "end": 0.05, "first step over 1e-3": 6})
    assert loss_curves.distance(base, base)["first step over 1e-3"] is None


def test_loss_curves(toy, tmp_path):
    found = measured(loss_curves, "loss_curves", tmp_path, "--steps", "60", "--perturbed", "1")
    assert list(found["curves"]) == ["jax.jit", "jcuts", f"{loss_curves.PERTURBED} (1)"]
    ends = found["loss"]["jax.jit"]
    assert ends["end"] < 0.95 * ends["begin"]
    assert all(d["largest"] < 1e-4 for d in found["distance"].values())
    ElementTree.fromstring((tmp_path / "loss_curves.svg").read_text())


def test_runs_repeat_bit_for_bit(toy, cache_dir, tmp_path):
    job = {"steps": 3, "dry": True, "mode": "fusion", "deterministic": False}
    files = [tmp_path / f"{k}.npz" for k in range(2)]
    for program, file in zip(("jcuts", repeatability.CACHED), files, strict=True):
        row = repeatability.run_steps(toy, job | {"program": program, "file": str(file)})
        assert row["kernels"] > 0
    assert repeatability.difference(*files) == {"equal": True, "unequal leaves": 0, "leaves": 3, "l2": 0.0}
    with np.load(files[0]) as kept:
        arrays = [kept[name] for name in kept.files]
    np.savez(files[1], arrays[0], 2 * arrays[1], arrays[2])
    assert repeatability.difference(*files) == {"equal": False, "unequal leaves": 1, "leaves": 3, "l2": 0.5}


def test_line_chart_has_every_curve_in_its_colour():
    panels = [Panel("up <", [("a", [0.0, 1.0, 2.0]), ("b", [2.0, 1.0, 0.0])]), Panel("log", [("b", [1e-6, 0.0])], True)]
    text = line_chart("two", [panels])
    root = ElementTree.fromstring(text)
    curves = [e for e in root.iter() if e.tag.endswith("polyline")]
    assert len(curves) == 3
    assert curves[1].get("stroke") == curves[2].get("stroke") != curves[0].get("stroke")
    assert "up &lt;" in text
    assert text == line_chart("two", [panels])
