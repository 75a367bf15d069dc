"""Random programs with GPU kernels, interpreted: PTX in a machine, the rest on the CPU (`on_gpu.py`)."""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import pytest

from jcuts.codegen.cuda import compile as compiler

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from random_programs import on_gpu, runner

SEED = 70_000_000
_WHY = compiler.available()
pytestmark = pytest.mark.skipif(bool(_WHY), reason=_WHY or "-")


@pytest.mark.parametrize("start, transform", [(SEED, "plain"), (SEED + 20, "plain"), (SEED, "vmap"), (SEED, "grad")])
def test_programs_match_xla(start, transform, cache_dir):
    with on_gpu.on_gpu(interpreted=True):
        verdicts = [runner.run(seed, transform, small=True) for seed in range(start, start + 6)]
    jax.clear_caches()
    ran = [v for v in verdicts if v.status != "unsuitable"]
    assert sum(v.kernels for v in ran) > 0
    assert [f"seed {v.seed} {v.status}: {v.reason}" for v in ran if v.status != "ok"] == []
