"""Profiles of whole programs: kernels are joined with the regions that they run."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jcuts
from benchmarks.networks import program_profile

LARGEST = [["jcuts_0123456789ab_0", 2.0, 30e-6], ["fusion_7", 1.0, 20e-6], ["jcuts_0123456789ab_1", 2.0, 10e-6]]
REGION = {
    "region": "add gemm/01234567",
    "count": 2,
    "seconds": 15e-6,
    "xla_seconds": None,
    "bound_seconds": 5e-6,
}


def test_kernels_of_one_region_are_joined():
    first, second = program_profile.joined(LARGEST, {"0123456789ab": REGION})
    assert first["region"] is REGION and first["launches"] == 4.0
    assert first["seconds"] == pytest.approx(40e-6)
    assert second["name"] == "fusion_7" and second["region"] is None


def test_the_table_has_times_of_all_equal_regions():
    programs = {"jcuts": {"largest": LARGEST, "busy_seconds": 60e-6, "per_step": 5.0}}
    text = program_profile.table({"profile": {"programs": programs, "regions": {"0123456789ab": REGION}}}, "jcuts", 9)
    assert "regions of jcuts 0.040 ms, alone 0.030 ms, bound 0.010 ms" in text
    assert "| add gemm/01234567 x 2 | 4 | 40.0 | 30.0 |  | 10.0 |" in text
    assert "| fusion_7 | 1 | 20.0 |  |  |  |" in text


def test_regions_are_found_by_the_digest_of_their_kernel(cache_dir):
    x = np.random.default_rng(0).standard_normal((64, 96), np.float32)
    function = jcuts.optimize(lambda x: jnp.tanh(x) * 2 + jax.nn.softmax(x), tune="off")
    function(x)
    report = function.explain(x)
    found = program_profile.regions(report, program_profile.compiled_digests())
    kernels = [subset for subset in report.subsets if subset.chosen != "xla"]
    assert kernels and sum(region["count"] for region in found.values()) == sum(s.count for s in kernels)
    assert {region["region"] for region in found.values()} == {f"{s.name} {s.chosen}" for s in kernels}
