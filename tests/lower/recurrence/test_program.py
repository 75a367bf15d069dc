"""Scans as one program: results by the interpreter against float64, stages, refusals."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jcuts.base.errors import Refusal
from jcuts.kernel_ir.interpret import interpret
from jcuts.kernel_ir.program import Program
from jcuts.kernel_ir.verify import read, verify
from jcuts.lower.recurrence import stages
from jcuts.lower.recurrence.program import TEMPLATE, lower_recurrence
from jcuts.lower.tensor_graph import build_graph
from jcuts.rewrite.simplify import simplify
from jcuts.trace import jaxapi
from jcuts.trace.inline import inline
from tests.lower.recurrence.cells import CASES, normal


def lowered(function, args) -> tuple[Program | Refusal, list]:
    """The program of a function's last scan, and the scan's operands by value."""
    closed = simplify(inline(jaxapi.closed_jaxpr_of(function, *args)))
    number, eqn = [(n, e) for n, e in enumerate(closed.jaxpr.eqns) if jaxapi.primitive_name(e) == "scan"][-1]
    graph = build_graph(closed.jaxpr)
    ((_, _, body),) = jaxapi.inner_jaxprs(eqn)
    made = lower_recurrence(graph, graph.nodes[number], eqn, build_graph(body.jaxpr), "loop")
    known = dict(zip(closed.jaxpr.invars, args, strict=True)) | dict(
        zip(closed.jaxpr.constvars, closed.consts, strict=True)
    )
    for before in closed.jaxpr.eqns[:number]:
        values = jaxapi.bind_eqn(before, [a.val if jaxapi.is_literal(a) else known[a] for a in before.invars])
        known.update(zip(before.outvars, values, strict=True))
    names = {tensor: var for var, tensor in graph.of_var.items()}
    operands = [np.asarray(known[names[t]]) for t in graph.subset_inputs(frozenset({number}))]
    results = [names[t] for t in graph.subset_outputs(frozenset({number}))]
    exact = eqn.primitive.bind(*(a.val if jaxapi.is_literal(a) else known[a] for a in eqn.invars), **eqn.params)
    wanted = dict(zip(eqn.outvars, exact, strict=True))
    return made, [operands, [np.asarray(wanted[v]) for v in results]]


def assert_close(mine, theirs):
    """Within a few roundings of the type."""
    short = theirs.dtype == jnp.bfloat16
    mine, theirs = np.asarray(mine, np.float64), np.asarray(theirs, np.float64)
    np.testing.assert_allclose(mine, theirs, rtol=4e-2 if short else 2e-5, atol=1e-2 if short else 3e-6)


@pytest.mark.parametrize("name", CASES)
def test_a_scan_is_one_program(name):
    program, (operands, wanted) = lowered(*CASES[name]())
    assert not isinstance(program, Refusal), str(program)
    assert program.template == TEMPLATE and program.tiles == 1
    verify(program, all_addresses=True)
    assert read(program.to_text()).digest == program.digest
    for mine, theirs in zip(interpret(program, operands), wanted, strict=True):
        assert_close(mine, theirs)


@pytest.mark.parametrize(
    "name, last",
    [("gru", 1), ("lstm", 1), ("minimal gated unit", 2), ("two layers", 2), ("perceptrons", 2), ("scalar", 0)],
)
def test_stages_of_a_step(name, last):
    program, _ = lowered(*CASES[name]())
    names = {phase.name for phase in program.phases} - {"fill", "result"}
    assert max(int(one.removeprefix("stage")) for one in names) == last


def test_a_large_operand_that_every_block_would_compute_is_kept(monkeypatch):
    """Derivatives of a GRU's gates: element-wise from what is carried, read as a whole by the product behind them."""
    for kept_from, least, most in ((stages.KEPT_FROM, 10, 20), (1, 2, 2)):
        monkeypatch.setattr(stages, "KEPT_FROM", kept_from)
        program, (operands, wanted) = lowered(*CASES["gru, gradient"]())
        (stage,) = (p for p in program.phases if p.name == "stage1")
        assert least <= sum(node.op == "load" for node in stage.body.nodes) <= most
        for mine, theirs in zip(interpret(program, operands), wanted, strict=True):
            assert_close(mine, theirs)


def test_gates_are_products_side_by_side():
    program, _ = lowered(*CASES["gru"]())
    (stage,) = (p for p in program.phases if p.name == "stage1")
    assert [acc.combine for acc in stage.accs] == ["add"] * 3
    loads = [node for node in stage.body.nodes if node.op == "load"]
    assert len(loads) == 4  # the state once, a column of each gate


def test_what_has_no_form_is_refused():
    def sorts(x, h):
        return jax.lax.scan(lambda h, x: (jnp.sort(h) + x, None), h, x)

    made, _ = lowered(sorts, (normal(3, 8), normal(8)))
    assert isinstance(made, Refusal)


def test_a_number_that_a_loop_closes_over_belongs_to_that_loop():
    """Two loops with one body and other numbers: the graph of the body is shared."""

    def twice(h, u, factor):
        return jax.lax.scan(lambda h, _: (jnp.tanh(h @ u) * factor, None), h, None, length=2)[0]

    h, u = normal(2, 8), normal(8, 8)
    closed = simplify(inline(jaxapi.closed_jaxpr_of(lambda h, u: twice(h, u, np.float32(0.5)), h, u)))
    ((_, eqn),) = ((n, e) for n, e in enumerate(closed.jaxpr.eqns) if jaxapi.primitive_name(e) == "scan")
    ((_, _, body),) = jaxapi.inner_jaxprs(eqn)
    shared, graph = build_graph(body.jaxpr), build_graph(closed.jaxpr)
    node = next(node for node in graph.nodes if node.prim == "scan")
    before = [tensor.scalar for tensor in shared.tensors]
    made = lower_recurrence(graph, node, eqn, shared, "loop")
    assert not isinstance(made, Refusal)
    assert [tensor.scalar for tensor in shared.tensors] == before
