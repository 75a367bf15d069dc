"""Constants fitted from curves: exact on the model's own times, robust to a bad one, and again from kept files."""

import math
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jcuts.base.errors import UsageError
from jcuts.plan.calibrate import fit, measure
from jcuts.plan.cost import collectives
from jcuts.plan.cost.compute import gemm_time
from jcuts.plan.spec import cluster
from jcuts.plan.spec.cluster import Gpu, Link

SHAPES = [(4096, 4096, k) for k in (512, 1024, 2048, 4096)] + [(1024, 8192, 8192), (8192, 2048, 1024)]
KEPT = sorted((Path(__file__).parents[3] / "benchmarks" / "results" / "planner").glob("h200_x4_cluster_*.toml"))


def _products(speed, ramp, gap, shapes=SHAPES, units=132):
    gpu = Gpu("", speed, 1.0, math.inf, multiprocessors=units, gemm_efficiency=1.0, gemm_ramp=ramp)
    rows = []
    for m, n, k in shapes:
        took = gap + float(gemm_time(gpu, m, n, k) + gemm_time(gpu, m, k, n)) / 2
        rows.append((m, n, k, 2.0 * m * n * k / took))
    return rows


@given(st.floats(1e14, 1e15), st.floats(10, 400), st.floats(0, 5e-6))
def test_products_give_back_speed_and_ramp(speed, ramp, gap):
    peak, efficiency, found = fit.fit_products(_products(speed, ramp, gap), 132, gap)
    assert peak * efficiency == pytest.approx(speed, rel=0.03)
    assert found == pytest.approx(ramp, rel=0.10)
    assert 0 < efficiency <= 1


def test_one_bad_product_changes_nothing():
    rows = _products(7e14, 100, 2e-6)
    rows[4] = (*rows[4][:3], rows[4][3] / 3)
    peak, efficiency, _ = fit.fit_products(rows, 132, 2e-6)
    assert peak * efficiency == pytest.approx(7e14, rel=0.05)


def test_ramp_is_left_alone_where_products_cannot_tell():
    rows = _products(7e14, 30, 0.0, [(4096, 4096, 4096), (2048, 2048, 2048), (8192, 2048, 1024)])
    assert fit.fit_products(rows, 132)[2] == fit.RAMP
    with pytest.raises(UsageError, match="no products"):
        fit.fit_products([], 132)


def test_all_reduces_give_back_the_link_and_noise_in_short_ones_does_not_matter():
    link = Link(300e9, 1.0, 2e-6, 15e-6)
    sizes = [2**16, 2**20, 2**24, 2**27, 2**29]
    exact = [(n, s, float(collectives.all_reduce(link, link, n, 8, s))) for n in (2, 4, 8) for s in sizes]
    found = fit.fit_link(exact)
    assert found["bandwidth_gbs"] == pytest.approx(300, rel=1e-6)
    assert (found["hop_us"], found["call_us"]) == (pytest.approx(2, rel=1e-4), pytest.approx(15, rel=1e-4))
    noisy = [(n, s, 1e-7 if s == 2**16 and n == 2 else t) for n, s, t in exact]
    assert fit.fit_link(noisy)["bandwidth_gbs"] == pytest.approx(300, rel=0.05)
    with pytest.raises(UsageError, match="2 all-reduces"):
        fit.fit_link(exact[:2])


def test_a_file_keeps_its_curves(tmp_path):
    made = fit.Measured(
        {"nodes": {"count": 1, "gpus": 4}, "gpu": {"multiprocessors": 132, "memory_gib": 80, "bandwidth_gbs": 3000.0}},
        {"memory": "test"},
        [("bfloat16", *row) for row in _products(7e14, 100, 0.0)],
        [("all-reduce", n, s, s / 1e11 * n) for n in (2, 4) for s in (2**20, 2**24, 2**27)],
        "2026-01-02",
    )
    fit.constants(made)
    path = tmp_path / "a.toml"
    path.write_text(fit.to_toml(made, "here"))
    again = fit.refit([path, path])
    assert again.when == "2026-01-02" and len(again.collectives) == 12
    assert again.tables["gpu"]["gemm_efficiency"] == pytest.approx(made.tables["gpu"]["gemm_efficiency"], rel=1e-3)
    assert cluster.load(str(path)).gpus == 4
    bare = tmp_path / "b.toml"
    bare.write_text(path.read_text().split("# products")[0])
    with pytest.raises(UsageError, match="no measured curves"):
        fit.refit([bare])


def test_the_measured_preset_is_what_its_files_give():
    """``h200-x4-measured`` is a refit of the kept measurements; only the host's capacity was set besides."""
    assert len(KEPT) == 2
    found = fit.refit([path for path in KEPT if "first" in path.name] + [p for p in KEPT if "first" not in p.name])
    place = cluster.load("h200-x4-measured")
    gpu = found.tables["gpu"]
    assert place.gpu.peak * place.gpu.gemm_efficiency == pytest.approx(
        gpu["peak_tflops"] * gpu["gemm_efficiency"] * 1e12, rel=1e-3
    )
    assert place.gpu.gemm_ramp == fit.RAMP  # these products cannot tell
    assert place.intra.bandwidth == pytest.approx(found.tables["intra"]["bandwidth_gbs"] * 1e9, rel=1e-3)
    assert place.intra.call == pytest.approx(found.tables["intra"]["call_us"] * 1e-6, rel=1e-3)
    assert place.gpu.bandwidth == gpu["bandwidth_gbs"] * 1e9


def test_pinned_memory_is_what_the_runtime_allows(monkeypatch):
    monkeypatch.setenv(measure.PINNED, "0.5")
    capacity, why = measure._pinnable("gpu")
    assert capacity == 0.5 and measure.PINNED in why
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    assert 0 < measure._pinnable("cpu")[0] <= 0.8 * whole + 0.1


def test_slope_leaves_out_what_a_call_costs(monkeypatch):
    clock = iter(np.cumsum([0, 5 + 2, 0, 5 + 10] * 9).tolist())
    monkeypatch.setattr(measure.time, "perf_counter", lambda: next(clock))
    assert measure.slope([lambda: (), lambda: ()], 8) == 1.0
