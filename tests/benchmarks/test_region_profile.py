"""The benchmark of the region profile, where nothing is recorded: it plans, compiles with name scopes and reports."""

from __future__ import annotations

from benchmarks.networks import region_profile


def test_a_small_network_on_a_cpu_has_regions_and_no_recorded_kernel():
    row = region_profile.measure("MobileNetV2:2:args", dry=True)
    assert row["regions"] > 0 and row["kernel_seconds"] == 0.0
    assert row["attributed"] is None and row["error_by_kind"] is None
