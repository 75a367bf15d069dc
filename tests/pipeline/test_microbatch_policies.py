"""Policies of micro-batch sizes in ``jcuts.optimize``, and the round trip: what it measures, the command line reads."""

from __future__ import annotations

import json
from functools import partial

import jax
import numpy as np
import pytest

import jcuts
from jcuts.base import knobs
from jcuts.base.errors import UsageError
from jcuts.base.settings import Settings
from jcuts.cli.main import main
from jcuts.microbatch.benchmark import Found
from jcuts.microbatch.database import Database
from jcuts.microbatch.timings import MicroConfig
from jcuts.pipeline import microbatch_convs
from jcuts.tune.cudnn.measurer import Measurer, this_device
from jcuts.xla.cudnn import call as cudnn_call
from jcuts.xla.cudnn.match import Site
from tests.pipeline.test_microbatch_convs import layer


def operands(batch: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    shapes = (batch, 5, 5, 4), (3, 3, 4, 4)
    return tuple(rng.standard_normal(shape).astype(np.float32) for shape in shapes)  # type: ignore[return-value]


def sizes(folder) -> set[int]:
    return {entry.batch for entry in Database(folder / "microbatch.sqlite").entries()}


def one_second(self, convolution, batch):
    """Times without a device: whatever the batch."""
    return Found([MicroConfig(batch, cudnn_call.algorithms("forward")[0], "tf32", 1.0, 0)])


@pytest.mark.parametrize(
    "policy, measured, division",
    [("all", {1, 2, 3, 4, 5, 6}, "1 x 6"), ("powerOfTwo", {1, 2, 4, 6}, "1 x 6"), ("undivided", {6}, "1 x 6")],
)
def test_a_policy_names_the_sizes_that_are_measured(host_cudnn, cache_dir, monkeypatch, policy, measured, division):
    monkeypatch.setattr(Measurer, "__call__", one_second)
    closed = jax.make_jaxpr(layer)(*operands(6))
    settings = Settings(mode="fusion", workspace_limit=1 << 20, microbatch_policy=policy)
    made = microbatch_convs.divide_convolutions(closed, settings, "cpu", may_measure=True)
    assert sizes(cache_dir) == measured and made.rows[0].division.startswith(division)
    assert f"micro-batch sizes: {policy}" in made.note


def test_undivided_by_the_variable_is_one_call(host_cudnn, cache_dir, monkeypatch):
    monkeypatch.setattr(Measurer, "__call__", one_second)
    monkeypatch.setenv("JCUTS_MICROBATCH_POLICY", "UNDIVIDED")
    closed, settings = jax.make_jaxpr(layer)(*operands(6)), Settings(mode="fusion", workspace_limit=1 << 20)
    (row,) = microbatch_convs.divide_convolutions(closed, settings, "cpu", may_measure=True).rows
    assert sizes(cache_dir) == {6} and row.division.startswith("1 x 6 ") and "slices" not in row.division
    monkeypatch.setenv("JCUTS_MICROBATCH_POLICY", "half")
    with pytest.raises(UsageError, match="all, powerOfTwo, undivided"):
        knobs.current()


def test_a_policy_limits_what_is_chosen_of_known_times(host_cudnn, cache_dir):
    x, w = operands(6)
    closed = jax.make_jaxpr(layer)(x, w)
    (site,) = (s for s in microbatch_convs.sites(closed) if isinstance(s, Site))
    name, database = cudnn_call.algorithms("forward")[0], Database(cache_dir / "microbatch.sqlite")
    for size, seconds in ((6, 0.9), (3, 0.2), (2, 0.2), (4, 0.3)):
        database.record(this_device("cpu"), site.convolution, size, [MicroConfig(size, name, "tf32", seconds, 0)])
    found = {}
    for policy in (None, "all", "powerOfTwo", "undivided"):
        settings = Settings(mode="fusion", workspace_limit=1 << 20, microbatch_policy=policy)
        (row,) = microbatch_convs.divide_convolutions(closed, settings, "cpu", may_measure=False).rows
        found[policy] = row.division.split(" cudnn")[0]
    assert found == {None: "2 x 3", "all": "2 x 3", "powerOfTwo": "1 x 4", "undivided": "1 x 6"}
    assert Settings(microbatch_policy="all") != Settings() and repr(Settings(microbatch_policy="all")) == repr(
        Settings()
    )


def test_an_unknown_policy_is_an_error():
    with pytest.raises(UsageError, match="microbatch_policy='half'"):
        jcuts.optimize(layer, microbatch_policy="half")


def test_what_optimize_measures_the_command_line_analyses_and_splits(
    host_cudnn, cache_dir, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(Measurer, "__call__", one_second)

    def two_layers(x, w):
        return layer(layer(x, w), w)

    x, w = operands(2)
    settings = Settings(mode="fusion", workspace_limit=1 << 20)
    measure = partial(microbatch_convs.divide_convolutions, platform="cpu", may_measure=True, name="two_layers")
    measure(jax.make_jaxpr(two_layers)(x, w), settings)
    there = tmp_path / "elsewhere.sqlite"  # another machine: no device, no cuDNN
    there.write_bytes((cache_dir / "microbatch.sqlite").read_bytes())
    with knobs.scope(cudnn=None, cache_dir=tmp_path / "none"):
        assert main(["microbatch", "analyse", str(there), "--limit", "1MiB", "--json", "-"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert main(["microbatch", "analyse", str(there), "--total", "1MiB", "--network", "two_layers"]) == 0
        assert "two_layers" in capsys.readouterr().out
        command = ["best-batch", "--db", str(there), "--batch", "2", "--devices", "host", "host", "--json"]
        assert main(command) == 0
        split = json.loads(capsys.readouterr().out)
    assert found["network"].startswith("two_layers ") and found["device"].startswith("host")
    assert [k["name"] for k in found["kernels"]] == ["conv1 forward", "conv2 forward"]
    report = jcuts.optimize(two_layers, mode="fusion", workspace_limit=1 << 20, tune="cached").explain(x, w)
    used = [str(row.division) for row in report.divisions]
    for kernel, text in zip(found["kernels"], used, strict=True):
        assert kernel["batch"] == 2 and kernel["division"]["seconds"] > 0 and "cudnn/" in text
    assert sum(split["sizes"]) == 2 and found["memory_peak"] >= 2 * x.nbytes + w.nbytes
    names = {network.name for network in Database(there).networks()}
    measure(jax.make_jaxpr(two_layers)(x, w), settings)
    measure(jax.make_jaxpr(two_layers)(*operands(1)), settings)  # another network
    again = {network.name for network in Database(cache_dir / "microbatch.sqlite").networks()}
    assert len(names) == 1 and len(again) == 2 and names < again
    assert main(["microbatch", "ls"]) == 0 and "two_layers" in capsys.readouterr().out  # the user's own database
    assert main(["microbatch", "analyse", "--network", "two_layers"]) != 0
    assert "which network?" in capsys.readouterr().err
