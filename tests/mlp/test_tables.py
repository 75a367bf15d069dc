"""The page of the MLP study: its tables are those of the stored results; the results keep the report's limits."""

from __future__ import annotations

import pytest

from benchmarks.mlp import gemm, report_tables, tables
from benchmarks.mlp.network import largest

LIMITS = {"1": 1e-12, "2": 1e-7, "3": 1e-7}


def test_the_page_is_up_to_date() -> None:
    text = tables.PAGE.read_text(encoding="utf-8")
    assert {name for _, name, _ in tables.BLOCK.findall(text)} == set(tables.TABLES)
    assert tables.page(text) == text


@pytest.mark.parametrize("engine", ["jit", "jcuts"])
def test_measured_trainings_keep_the_limits(engine: str) -> None:
    for mode, found in tables.result(f"training_{engine}")["modes"].items():
        assert set(found["parallel"]) == {"1", "2", "3", "4"}
        for row in found["parallel"].values():
            assert row["rank_difference"] <= LIMITS[mode]
            assert largest(row["differences"]) <= LIMITS[mode]
            assert abs(row["precision"] - found["sequential"]["precision"]) <= 0.01


def test_measured_gemm_keeps_the_limit() -> None:
    for found in tables.result("gemm")["tests"].values():
        assert found["rows"][gemm.OURS]["difference"] <= 1e-15


def test_the_reports_tables() -> None:
    assert [(r.mode, r.processes) for r in report_tables.TABLE_1] == [(m, p) for m in (1, 2, 3) for p in (1, 2, 3, 4)]
    assert max(max(row.differences) for row in report_tables.TABLE_1) < 1e-7
    assert sum(report_tables.TABLE_3.values()) == pytest.approx(100, abs=1)
    assert all(min(times, key=times.__getitem__) == 16 for times in report_tables.TABLE_2.values())


def test_a_missing_result_is_told(tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match="no gemm"):
        tables.result("gemm", tmp_path)
