"""Importing jcuts and wrapping a function brings in neither planner nor tuner nor compilers: the first call does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIGHT = """
import sys
import jax
sys.path.insert(0, {root!r})
before = set(sys.modules)
import jcuts
f = jcuts.optimize(lambda x: x + 1, batch_buckets=[2])
class Model:
    call = jcuts.optimize(lambda self, x: x)
repr((f, Model().call, jcuts.stats()))
print("\\n".join(sorted(set(sys.modules) - before)))
"""
HEAVY = ("numba", "llvmlite", "scipy", "cvxpy", "rich")
HEAVY_FLOORS = ("schedule", "fusion", "lower", "codegen", "xla", "pipeline", "plan", "estimate", "ops", "rewrite")


def test_nothing_heavy_is_imported():
    code = LIGHT.format(root=str(ROOT))
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    heavy = (*HEAVY, *(f"jcuts.{floor}" for floor in HEAVY_FLOORS))
    assert [name for name in found if any(name == h or name.startswith(h + ".") for h in heavy)] == []
    assert "jcuts.api" in found
