"""Tuning on a GPU: choices by measurement; candidates that crash, hang or write where they must not (``-m gpu``)."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import jcuts
from jcuts.base import knobs
from jcuts.tune.choice import SCREENED, UNCHECKED
from jcuts.tune.database import Store
from jcuts.tune.parent.tuner import TuningBudget, tune
from jcuts.xla import devices as xla_devices
from tests.gpu import cases, objects

pytestmark = pytest.mark.gpu


def test_a_function_is_tuned(tmp_path):
    x = cases.normal(4096, 1024)
    with knobs.scope(cache_dir=tmp_path, max_candidates=4):
        run = jcuts.optimize(lambda a: jax.nn.softmax(a * 2))
        got = run(x)
        report = run.explain(x)
    (subset,) = report.subsets
    assert subset.origin == "measured" and subset.xla_seconds and subset.xla_seconds > 0
    np.testing.assert_allclose(got, jax.nn.softmax(x * 2), rtol=1e-4, atol=1e-7)


def test_bad_candidates_cost_themselves_only(tmp_path):
    names = ["illegal", "hangs", "trap", "wrong", "beside", "clobbers", "right"]
    gpu = xla_devices.this()
    with knobs.scope(cache_dir=tmp_path):
        problem = objects.problem(names, gpu.identity(), f"sm_{gpu.capability[0]}{gpu.capability[1]}")
        store = Store(None, device="d", versions="v")
        choice = tune([problem], store, effort=TuningBudget(seconds=0.05, timeout=8.0, workers=2, seed=1))[
            problem.digest
        ]
    rejected = {r.label: r.error for r in choice.rejections}
    assert rejected["illegal"] == rejected["hangs"] == rejected["trap"] == "WorkerFailed", choice
    # Those that are wrong are found out before they win; who would not win is not looked at.
    unchecked = {m.label for m in choice.measurements if m.method in (SCREENED, UNCHECKED)}
    for label in ("wrong", "beside", "clobbers"):
        assert rejected.get(label) == "AccuracyRejected" or label in unchecked, choice
    assert choice.winner in ("right", "xla") and set(choice.kernels) <= {"right"}
    assert choice.seconds("right") and choice.seconds("xla")
    # This process is unharmed.
    assert float(jax.jit(lambda a: a.sum())(np.ones(100, np.float32))) == 100.0
