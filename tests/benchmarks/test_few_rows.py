"""The benchmark of products of 2 to 16 rows as far as it needs no GPU: layers, schedules, summary, samples of a fit."""

from __future__ import annotations

import json

import pytest

from benchmarks import refit
from benchmarks.gpu_kernels import few_row_gemm
from benchmarks.gpu_kernels.run import program_of
from jcuts.lower.patterns.gemm import as_gemm
from jcuts.schedule.gpu.families import family_of
from jcuts.schedule.gpu.machine import GpuMachine
from jcuts.schedule.gpu.skinny_gemm.schedules import SkinnyProblem, SkinnySchedule, estimated_seconds

CASES = [few_row_gemm.layers((2,))[4], few_row_gemm.layers((16,))[6]]
SLOWER = 1.25
"""Time of the made-up measurements over the model's."""


def families(case):
    return {family_of(p).name for p in few_row_gemm.schedules(case, 8)}


def test_layers_come_in_the_order_of_their_rows_the_largest_last():
    found = few_row_gemm.layers((8, 2))
    assert len({case.name for case in found}) == len(found) == 2 * len(few_row_gemm.LAYERS) * 4
    assert found[0].name.startswith("8 rows") and "25088" in found[-1].name
    assert all("25088" not in case.name for case in found[: -2 * 4])


def test_schedules_of_new_and_former_families_are_measured():
    few, many = (families(case) for case in CASES)
    assert few > {"skinny_gemm", "gemv"} and "skinny_gemm" in many and "gemv" not in many and len(many) > 1


def rows():
    """Results as the benchmark writes them, with times that the model gives."""
    machine, found = GpuMachine.named("H200"), []
    for case in CASES:
        problem = SkinnyProblem.of(as_gemm(program_of(case)[0]))
        programs = {"xla": {"family": "xla", "params": {}, "median": 1.0}}
        for program in few_row_gemm.schedules(case, 8):
            if family_of(program).name == "skinny_gemm":
                seconds = SLOWER * estimated_seconds(problem, SkinnySchedule.of(program), machine)
                params = {k: v for k, v in program.params if k != "cuda"}
                measured = {"family": "skinny_gemm", "params": params, "alone": seconds, "median": 0.5}
                programs[program.digest] = measured
        found.append({"case": case.name, "programs": programs})
    return found


def test_the_summary_counts_layers_that_lose():
    made = rows()
    assert few_row_gemm.summary(made) == "2 layers: XLA takes 2.00x as long (least 2.00), 0 below 0.95"
    made[0]["programs"]["xla"]["median"] = 0.25
    assert few_row_gemm.summary(made) == "2 layers: XLA takes 1.00x as long (least 0.50), 1 below 0.95"


def test_recorded_schedules_become_samples(tmp_path):
    path = tmp_path / "results.json"
    path.write_text(json.dumps(rows()))
    _, paths = refit.recorded("skinny_gemm", [path])
    samples, clock = refit.skinny_gemm_samples(paths), refit.clock_hertz()
    assert len(samples) == sum(len(row["programs"]) - 1 for row in rows())
    assert all(s.seconds * clock == pytest.approx(SLOWER * s.cycles()) for s in samples)
    with pytest.raises(SystemExit, match="no recorded samples"):
        refit.recorded("skinny_gemm")


def test_layers_that_were_lost_are_measured_again():
    """By any family: the tensor cores' of before count, too."""
    names = {case.name for case in few_row_gemm.layers()}
    some, all_of_them = few_row_gemm.lost(0.95), few_row_gemm.lost(100.0)
    assert some < few_row_gemm.lost(1.0) < all_of_them == names
    assert "8 rows 4096x11008 row-major bfloat16" in some and not any("k-major" in name for name in some)
    row = {"programs": {"x": {"family": "xla", "median": 3.0}, "m": {"family": "mma", "median": 2.0}}}
    assert few_row_gemm.speedup(row) == 1.5 and few_row_gemm.speedup(row, few_row_gemm.MINE) == 0.0
