"""A pipeline that replaces every multiplication by a primitive without derivative, batching or type rules.

A program that reaches it and still differentiates and batches proves that planning happens after both.
"""

from __future__ import annotations

import sys
import types

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import Primitive
from jax.interpreters import mlir

import jcuts.jit.variant_selection  # binds the real pipeline, before a test replaces it
import jcuts.pipeline
from jcuts.pipeline.outcome import Outcome
from jcuts.report.function_report import FunctionReport
from jcuts.trace import jaxapi
from jcuts.trace.inline import inline

toy_mul_p = Primitive("toy_mul")
toy_mul_p.def_abstract_eval(lambda x, y, like: like)
# The barrier is visible in StableHLO, and nothing else in the cases makes one.
mlir.register_lowering(
    toy_mul_p,
    mlir.lower_fun(lambda x, y, like: jax.lax.optimization_barrier(jnp.multiply(x, y)), multiple_results=False),
)
MARK = "optimization_barrier"


class ToyPipeline:
    """Counts what it is asked for."""

    def __init__(self):
        self.calls = []

    def optimize_jaxpr(self, closed, settings, *, platform, may_measure, examples=None):
        self.calls.append(
            {
                "platform": platform,
                "may_measure": may_measure,
                "examples": examples,
                "types": [v.aval.str_short() for v in closed.jaxpr.invars],
            }
        )
        flat = inline(closed)
        new = self._rewrite(flat)
        jaxapi.check(new)
        report = FunctionReport("toy", settings.mode, platform, equations=len(flat.jaxpr.eqns))
        return Outcome(new, report)

    def _rewrite(self, closed):
        eqns = []
        for eqn in closed.jaxpr.eqns:
            if jaxapi.primitive_name(eqn) == "mul":
                eqn = jaxapi.new_eqn(eqn.invars, eqn.outvars, toy_mul_p, {"like": eqn.outvars[0].aval}, like=eqn)
            elif jaxapi.primitive_name(eqn) in ("scan", "while", "cond"):
                bodies = [self._rewrite(body) for _, _, body in jaxapi.inner_jaxprs(eqn)]
                eqn = jaxapi.with_inner_jaxprs(eqn, bodies)
            eqns.append(eqn)
        return jaxapi.with_eqns(closed, eqns)


@pytest.fixture
def toy(monkeypatch):
    pipeline = ToyPipeline()
    module = types.ModuleType("jcuts.pipeline.passes")
    module.optimize_jaxpr = pipeline.optimize_jaxpr

    def start_planning(*args, **keywords):
        return types.SimpleNamespace(problems=None, finish=lambda: module.optimize_jaxpr(*args, **keywords))

    module.start_planning = start_planning
    monkeypatch.setitem(sys.modules, "jcuts.pipeline.passes", module)
    monkeypatch.setattr(jcuts.pipeline, "passes", module, raising=False)
    jax.clear_caches()
    yield pipeline
    jax.clear_caches()
