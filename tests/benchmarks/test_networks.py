"""The evaluation on whole networks: counts beside counts by hand, tables, one item from the command to its table."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jcuts
from benchmarks.networks import roofline as counts
from benchmarks.networks import run, tables, workloads
from jcuts.arch.load import load_gpu
from jcuts.base.settings import Settings
from jcuts.report.report_data import SubsetReport

ROOT = Path(__file__).resolve().parents[2]

W = np.ones((3, 3, 8, 16), np.float32)
D = np.ones((3, 3, 1, 16), np.float32)
V = np.ones((16, 10), np.float32)


def small(x):
    """A convolution with bias and ReLU, a depthwise one, a pool, a product, a softmax."""
    x = jax.nn.relu(workloads.conv(x, W) + 1.0)
    x = lax.conv_general_dilated(x, D, (2, 2), "SAME", dimension_numbers=workloads.NHWC, feature_group_count=16)
    x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    x = x.reshape(x.shape[0], -1, 16).sum(1) @ V
    return jnp.exp(x)


BY_HAND = {
    "conv": 2 * (2 * 12 * 12 * 16) * (9 * 8),
    "bias": 2 * 12 * 12 * 16,
    "relu": 2 * 12 * 12 * 16,
    "depthwise": 2 * (2 * 6 * 6 * 16) * 9,
    "pool": (2 * 3 * 3 * 16) * 4,
    "sum": 2 * 3 * 3 * 16,
    "dot": 2 * 2 * 10 * 16,
    "exp": 2 * 10,
}


@pytest.fixture
def closed():
    return counts.traced(small, (np.ones((2, 12, 12, 8), np.float32),))


def test_counts_by_hand(closed):
    found = counts.count(closed)
    assert found.flop == sum(BY_HAND.values()) and found.operations == len(BY_HAND)
    assert [p[0] for p in found.products] == [BY_HAND[k] for k in ("conv", "depthwise", "dot")]
    assert [p[2] for p in found.products] == ["tf32_mma", "ffma", "tf32_mma"]
    assert found.products[2][1] == 4 * (2 * 16 + 16 * 10 + 2 * 10)
    assert found.bytes == 4 * (2 * 12 * 12 * 8 + W.size + D.size + V.size + 2 * 10)
    looped = counts.traced(lambda x: lax.scan(lambda c, _: (jnp.sin(c), None), x, None, length=7)[0], (jnp.ones(5),))
    assert counts.count(looped).flop == 35 and counts.count(looped).operations == 7


def test_the_roofline_is_the_peak_rates(closed):
    arch, found = load_gpu("h200"), counts.count(closed)
    line = counts.roofline(found, arch)
    matrix, simple = BY_HAND["conv"] + BY_HAND["dot"], sum(BY_HAND.values()) - BY_HAND["conv"] - BY_HAND["dot"]
    wanted = matrix / (132 * 2048 * 1.98e9) + simple / (132 * 256 * 1.98e9)
    assert line["compute"] == pytest.approx(wanted) and line["memory"] == pytest.approx(found.bytes / 4.815e12)
    assert line["bound"] == max(line["compute"], line["memory"]) and line["layers"] >= line["memory"] / 2
    assert counts.arch_of("NVIDIA H100 80GB HBM3").name == "H100" and counts.arch_of("something").name == "H200"


def test_shares_are_what_kernels_leave(closed):
    eqns = closed.jaxpr.eqns
    prims = [e.primitive.name for e in counts.planned(closed, Settings(tune="off"), "none")[0].jaxpr.eqns]
    assert prims.count("conv_general_dilated") == 2
    flat = counts.planned(closed, Settings(tune="off"), "none")[0]
    rest = flat.jaxpr.replace(eqns=[e for e in flat.jaxpr.eqns if e.primitive.name != "conv_general_dilated"])
    found = counts.shares(flat, type(closed)(rest, flat.consts))
    heavy = BY_HAND["conv"] + BY_HAND["depthwise"]
    assert found["flop"] == pytest.approx(heavy / sum(BY_HAND.values())) and len(eqns) >= len(BY_HAND)
    assert found["operations"] == pytest.approx(2 / 8)
    assert found["product_flop"] == pytest.approx(heavy / (heavy + BY_HAND["dot"]))


def test_shares_of_what_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("JCUTS_CACHE_DIR", str(tmp_path))
    x = np.ones((2, 12, 12, 8), np.float32)
    ours = jcuts.optimize(lambda x: small(x), mode="fusion", tune="off")
    ours(x)
    found = counts.shares_of(ours, (x,), counts.traced(small, (x,)), "cpu")
    assert found["program"] == "jcuts" and found["flop"] == found["operations"] == 1.0
    apart = jcuts.optimize(lambda x: jnp.sort(small(x)), mode="fusion", tune="off")
    apart(x)
    found = counts.shares_of(apart, (x,), counts.traced(lambda x: jnp.sort(small(x)), (x,)), "cpu")
    assert found["operations"] == pytest.approx(8 / 9) and 0.99 < found["flop"] < 1.0


def subset(kind, chosen, seconds, xla, count=1):
    return SubsetReport(
        "n", {"add": 1}, [], "none", kind, chosen, "measured", {}, 1.0, 0.0, seconds, xla, count, 1.0, 1.0
    )


def test_time_by_kind():
    found = counts.by_kind(
        [
            subset("complex (fusion)", "product/12345678", 2.0, 3.0, 4),
            subset("complex", "xla", 5.0, 4.0),
            subset("simple", "map/1", 1.0, 2.0),
            subset("simple", "xla", None, 2.0, 3),
        ]
    )
    assert found["complex (fusion)"] | {"left": 0.0} == {
        "jcuts": 8.0,
        "xla": 0.0,
        "vendor": 12.0,
        "ours_alone": 8.0,
        "kernels": 4.0,
        "left": 0.0,
        "untimed": 0.0,
    }
    assert found["complex"]["xla"] == 4.0 and found["complex"]["ours_alone"] == 5.0
    assert found["simple"]["untimed"] == 3 and found["simple"]["vendor"] == 2.0
    kinds = {"0123456789ab": "complex (fusion)"}
    names = {
        "jcuts_0123456789ab_0": "complex (fusion)",
        "jcuts_f_0": "jcuts",
        "loop_add_fusion_3": "simple (fusion)",
        "sm90_xmma_fprop_implicit_gemm_tf32": "complex",
        "gemm_fusion_dot_12": "complex (fusion)",
        "wrapped_add": "simple",
    }
    assert {name: counts.kind_of_kernel(name, kinds) for name in names} == names


def test_fits_and_means():
    points = [((n, math.log2(b)), 3.0 * n + 2.0 * math.log2(b) + 5.0) for n, b in ((1, 1), (4, 2), (2, 8), (7, 64))]
    found, share = tables.fit(points)
    assert found == pytest.approx([3.0, 2.0, 5.0]) and share == pytest.approx(1.0)
    assert "3.00 per distinct subset + 2.0 log2(batch)" in tables.fitted("s", points)[0] and not tables.fitted("s", [])
    assert tables.geomean([1.0, 4.0]) == 2.0 and math.isnan(tables.geomean([]))


def test_items():
    full = run.asked([], ["closed"])
    assert len(full) == len(set(full)) == 4 * 4 + 4 * 2 + 8 + 4 + 8
    assert "speed/InceptionV3:256:closed" in full and "speed/ResNet50:64:closed:bfloat16" in full
    assert run.asked(["blocks", "modes/a:1:closed"], ["closed"])[-1] == "modes/a:1:closed"
    assert len(run.asked(["speed"], ["closed", "args"])) == 48
    with pytest.raises(SystemExit, match="no part"):
        run.asked(["spead"], ["closed"])


def test_tables_of_measured_rows():
    rows = tables.load([ROOT / "benchmarks" / "results" / "networks" / "gpu_networks_h200_2026-11-22d.json"])
    text = tables.report(rows, markdown=True)
    assert "| ResNet50 b64 | 4.264 | 4.172 | 4.516 | 2.943 | 1.45 | 1.42 |" in text
    assert "Geometric means, speed, closed" in text


def test_octave_and_shift_modules_are_what_their_papers_say():
    fn, (high, low) = workloads.octave(2, size=8, channels=16)
    up, down = fn(high, low)
    assert up.shape == high.shape and down.shape == low.shape == (2, 4, 4, 8)
    assert float(np.abs(workloads.doubled(low)[:, 1::2, ::2] - low).max()) == 0
    np.testing.assert_allclose(workloads.halved(high)[0, 1, 2], high[0, 2:4, 4:6].mean((0, 1)), rtol=1e-5, atol=1e-6)
    opened, arguments = workloads.octave(2, size=8, channels=16, closed=False)
    np.testing.assert_allclose(opened(*arguments)[0], up, rtol=1e-6)
    fn, (x,) = workloads.shift_conv(2, size=6, channels=36, expansion=1)
    assert fn(x).shape == x.shape


def test_an_item_from_the_command_to_its_table(tmp_path):
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "networks" / "run.py"),
        "--dry",
        "--out",
        str(tmp_path),
        "--seconds",
        "0.2",
        "planning/octave:2:closed",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    row = json.loads((tmp_path / "planning_octave_b2_bclosed.json").read_text())
    assert row["finished"] and row["problems"] >= row["subsets"] >= 3 and row["candidates"] >= row["problems"]
    assert row["warm_seconds"] < row["cold_seconds"]
    assert "Planning" in done.stdout and "octave b2" in done.stdout
    again = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert again.stdout.strip() == done.stdout.strip()


@pytest.mark.slow
def test_modes_and_blocks_from_the_command_to_their_tables(tmp_path):
    items = ["modes/shift_conv:2:closed", "blocks/shift_conv:2:closed"]
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "networks" / "run.py"),
        "--dry",
        "--out",
        str(tmp_path),
        "--seconds",
        "0.2",
        "--modes",
        "no_fusion",
        "fusion",
        "--",
        *items,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    row = json.loads((tmp_path / "modes_shift_conv_b2_bclosed.json").read_text())
    apart, fused = (row["modes"][mode] for mode in ("no_fusion", "fusion"))
    assert row["finished"] and apart["kernels"] > fused["kernels"] == 2 and fused["shares"]["operations"] == 1.0
    assert all(s["operations"].get("conv_general_dilated", 1) == 1 for s in apart["subsets"])
    assert row["errors"]["fusion"]["l2"] < 1e-5 and set(row["times"]) >= {"xla", "fusion", "no_fusion"}
    block = json.loads((tmp_path / "blocks_shift_conv_b2_bclosed.json").read_text())
    assert block["finished"] and block["cold"] is False and block["warm"]["seconds"] > 0
    assert block["counts"]["roofline"]["bound"] > 0 and "shift_conv b2, fusion" in done.stdout
