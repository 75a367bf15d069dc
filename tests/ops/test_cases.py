"""Every `OpCase`: the rule describes it, the interpreted program and the compiled kernel agree with `jax.lax`."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

from jcuts.base.errors import Refusal
from jcuts.kernel_ir.printer import program_text
from jcuts.ops import supported_primitives
from jcuts.tune.problem import Output
from jcuts.tune.verify.acceptance import check_output
from jcuts.tune.verify.expected import OutputReference
from jcuts.tune.verify.float64_eval import evaluate
from tests import programs
from tests.ops.cases import CASES, OpCase, make

WORKING = [c for c in CASES if not c.refused]
REFUSED = [c for c in CASES if c.refused]
# Rules without a case of their own, and where they are met instead.
ELSEWHERE = {
    "add_any": "gradients (tests/pipeline/test_passes.py)",
    "copy": "identity",
    "copy_p": "identity",
    "stop_gradient": "identity",
    "optimization_barrier_value": "identity",
    "expand_dims": "older JAX spells it so",
}


@pytest.fixture(autouse=True)
def every_type():
    with jax.enable_x64(True):
        yield


def each(cases: list[OpCase]) -> pytest.MarkDecorator:
    """One test per case; those of one case run in one process, which then traces and compiles it once."""
    return pytest.mark.parametrize(
        "case", [pytest.param(c, marks=pytest.mark.xdist_group(c.name), id=c.name) for c in cases]
    )


@functools.cache
def traced(case: OpCase) -> programs.Traced:
    return programs.trace(case.call, *(make(text) for text in case.inputs))


@functools.cache
def expected(case: OpCase) -> tuple[list[np.ndarray], list[np.ndarray], str]:
    """XLA's results, those in float64, and the kind of the operands' values."""
    trace = traced(case)
    arguments = trace.arguments
    xla = jax.jit(case.call)(*arguments)
    wide = [a.astype(np.float64) if a.dtype.kind in "fV" else a for a in arguments]
    reference = [np.asarray(x) for x in evaluate(trace.closed, wide)]
    odd = any(a.dtype.kind in "fV" and not np.isfinite(a.astype(np.float64)).all() for a in arguments)
    return [np.asarray(x) for x in jax.tree.leaves(xla)], reference, "special" if odd else "normal"


def check(case: OpCase, got: list[np.ndarray], slack: int = 1) -> None:
    """Holds results to the tuner's own acceptance rule, as `tune` would; ``slack`` widens the floor of 4 ulp."""
    xla, reference, kind = expected(case)
    for k, (x, r, g) in enumerate(zip(xla, reference, got, strict=True)):
        spec = Output(x.shape, x.dtype.name, case.reduction * slack**2, case.exact)
        check_output(k, spec, [OutputReference(kind, x, x if case.exact else r)], [g], 2.0)


def test_every_rule_has_a_case():
    covered = {c.primitive for c in CASES}
    missing = [p for p in supported_primitives() if p not in covered and p not in ELSEWHERE]
    assert missing == []
    assert len({c.name for c in CASES}) == len(CASES)


@each(WORKING)
def test_the_rule_describes_it(case):
    trace = traced(case)
    assert case.primitive in trace.names()
    for node in trace.graph.nodes:
        assert node.op is not None, str(node.refusal)
        assert node.op.outputs == tuple(trace.graph.tensors[t].type for t in node.outputs)
        assert (node.op.pull is None) == (node.op.is_root or node.op.family == "cumulative")


@each(WORKING)
def test_the_interpreted_program_agrees_with_lax(case):
    from jcuts.kernel_ir.interpret import interpret

    trace = traced(case)
    check(case, interpret(trace.program(), trace.operands()), slack=16)  # NumPy's functions are its own


@each(WORKING)
def test_the_compiled_kernel_agrees_with_lax(case):
    from jcuts.kernel_ir.interpret import interpret

    trace = traced(case)
    program = programs.schedules(trace.program(), 1)[0]
    check(case, interpret(program, trace.operands()), slack=16)
    check(case, programs.run_compiled(program, trace.operands()))


@each([c for c in WORKING if c.golden])
def test_golden_program(case, golden):
    golden(f"ops/{case.name}.txt", program_text(traced(case).program()))


@each(REFUSED)
def test_refusals_name_the_primitive_and_the_reason(case):
    trace = traced(case)
    found = [node.refusal for node in trace.graph.nodes if node.refusal is not None]
    assert [r for r in found if r.op == case.primitive and case.refused in r.reason], found
    assert isinstance(trace.build(), Refusal)
