"""Statistics of a process: programs per signature, fallbacks, tuning seconds."""

from __future__ import annotations

import gc

import jax.numpy as jnp
import numpy as np

import jcuts
from jcuts.base import run_statistics


class Function:
    def __init__(self, name, *rows):
        self.name, self.rows = name, list(rows)

    def stats(self):
        return {"name": self.name, "kind": "optimize", "signatures": self.rows}


def row(**changes):
    return {"arguments": [], "program": "jcuts", "reason": "", "fallback": False, "tuning_seconds": 1.5, **changes}


def test_sums(monkeypatch):
    monkeypatch.setattr(run_statistics, "_watched", type(run_statistics._watched)())
    kept = Function("b", row(), row(program="xla", fallback=True)), Function("a", row()), Function("never called")
    for function in kept:
        run_statistics.watch(function)
    run_statistics.watch(Function("gone", row()))
    gc.collect()
    found = jcuts.stats()
    assert [f["name"] for f in found["functions"]] == ["a", "b"]
    assert (found["signatures"], found["fallbacks"], found["tuning_seconds"]) == (3, 1, 4.5)


def test_an_optimised_function():
    fn = jcuts.optimize(lambda x: jnp.tanh(x) * 2, mode="fusion", tune="off")
    assert fn.stats() == {"name": "<lambda>", "kind": "optimize", "signatures": []}
    fn(np.ones((4, 8), np.float32))
    (found,) = fn.stats()["signatures"]
    assert found["arguments"] == ["float32[4,8]"] and found["program"] == "jcuts" and not found["fallback"]
    assert fn.stats() in jcuts.stats()["functions"]
