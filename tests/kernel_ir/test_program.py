"""Programs: JSON, digests, and one test per check of the verifier."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from jcuts.base.errors import IRError
from jcuts.kernel_ir.index import Index
from jcuts.kernel_ir.node import Graph, Guard, Node
from jcuts.kernel_ir.printer import program_text
from jcuts.kernel_ir.program import Acc, Axis, Buffer, Grid, Phase, Program, Red, Store
from jcuts.kernel_ir.verify import verify
from tests import programs
from tests.ops.cases import CASES, make

ROW, K = Index.axis("i"), Index.axis("k")


def simple() -> Program:
    """out[i] = sum_k x[4 i + k]"""
    body, leave = Graph(), Graph()
    body.load("x", ROW * 4 + K, "float32")
    leave.add(Node("acc", "float32", attrs=(("number", 0),)))
    phase = Phase(
        "sum", (Axis("i", 6),), (Red("k", 4),), (Acc("add", "float32", (0,)),), body, leave, (Store("out", ROW, 0),)
    )
    buffers = (Buffer("x", "float32", (6, 4), "in"), Buffer("out", "float32", (6,), "out"))
    return Program("simple", buffers, (), (), (phase,), 1, "reduction")


def changed(**phase_changes) -> Program:
    program = simple()
    return replace(program, phases=(replace(program.phases[0], **phase_changes),))


def graph(*nodes: Node) -> Graph:
    return Graph(list(nodes))


ACC = Node("acc", "float32", attrs=(("number", 0),))
WRONG = {
    "two buffers of one name": lambda: replace(simple(), buffers=(*simple().buffers, simple().buffers[0])),
    "no result": lambda: replace(simple(), buffers=simple().buffers[:1]),
    "serial axis j is not on the grid": lambda: replace(simple(), serial=("j",)),
    "two axes of one name": lambda: changed(reds=(Red("i", 4),)),
    "2 vector axes": lambda: replace(changed(axes=(Axis("i", 6, 1, True),), reds=(Red("k", 4, 1, True),)), lanes=4),
    "1 vector axes with 1 lanes": lambda: changed(axes=(Axis("i", 6, 1, True),)),
    "axis i has extent 6 and unroll 0": lambda: changed(axes=(Axis("i", 6, 0),)),
    "axis k has extent 0": lambda: changed(reds=(Red("k", 0),)),
    "3 chains do not divide unroll 4": lambda: changed(reds=(Red("k", 4, 4, False, 3),)),
    "reductions without accumulators": lambda: changed(accs=()),
    "accumulator add with contributions": lambda: changed(accs=(Acc("add", "float32", (7,)),)),
    "accumulator argmax with contributions": lambda: changed(accs=(Acc("argmax", "float32", (0,), "int32"),)),
    "runs once in the loop over i, which is not serial": lambda: changed(once=("i",)),
    "runs once in the loop over j, which is not serial": lambda: changed(last=("j",)),
    "runs when x, which is no local bool buffer": lambda: changed(when="x"),
    "store address uses ['j']": lambda: changed(stores=(Store("out", ROW, 0, (Guard(Index.axis("j"), 0, 3),)),)),
    "a store into out is guarded by the lane axis": lambda: replace(
        changed(axes=(Axis("i", 6, 1, True),), stores=(Store("out", ROW, 0, (Guard(ROW, 0, 3),)),)), lanes=4
    ),
    "stores into operand x": lambda: changed(stores=(Store("x", ROW, 0),)),
    "no buffer 'gone'": lambda: changed(stores=(Store("gone", ROW, 0),)),
    "stores value 5, which does not exist": lambda: changed(stores=(Store("out", ROW, 5),)),
    "int32 value into float32 out": lambda: changed(exit=graph(replace(ACC, dtype="int32"))),
    "store address uses": lambda: changed(stores=(Store("out", Index.axis("z"), 0),)),
    "leaves out": lambda: changed(stores=(Store("out", ROW + 1, 0),)),
    "uses a later value": lambda: changed(exit=graph(Node("neg", "float32", args=(0,)))),
    "loads from result out": lambda: changed(body=graph(Node("load", "float32", buffer="out", index=ROW))),
    "int32 load from float32 x": lambda: changed(body=graph(Node("load", "int32", buffer="x", index=ROW))),
    "accumulator 1 of 1": lambda: changed(exit=graph(Node("acc", "float32", attrs=(("number", 1),)))),
    "(load) uses ['z']": lambda: changed(body=graph(Node("load", "float32", buffer="x", index=Index.axis("z")))),
    "(guard) uses ['k']": lambda: changed(exit=graph(ACC, Node("guard", "bool", guards=(Guard(K, 0, 1),)))),
}


def test_the_simple_program_is_right():
    verify(simple())


@pytest.mark.parametrize("message", WRONG)
def test_the_verifier_names_what_is_wrong(message):
    with pytest.raises(IRError) as caught:
        verify(WRONG[message]())
    assert message in str(caught.value)


# -- JSON -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("case", [c for c in CASES if c.golden], ids=lambda c: c.name)
def test_json_round_trip(case):
    trace = programs.trace(case.call, *(make(text) for text in case.inputs))
    for program in (trace.program(), *programs.schedules(trace.program(), 2)):
        verify(program)
        again = Program.from_json(json.loads(program.to_text()))
        assert again.to_text() == program.to_text()
        assert (again.digest, program_text(again)) == (program.digest, program_text(program))


def test_json_keeps_odd_constants():
    leave = Graph()
    values = [leave.const(v, "float32") for v in (-0.0, math.inf, math.nan, 0.1)]
    stores = tuple(Store("out", Index(k), v) for k, v in enumerate(values))
    program = Program(
        "odd", (Buffer("out", "float32", (4,), "out"),), (), (), (Phase("map", (), (), (), Graph(), leave, stores),), 1
    )
    again = Program.from_json(program.to_text())
    found = [n.value for n in again.phases[0].exit.nodes]
    assert math.copysign(1, found[0]) == -1 and found[1] == math.inf and math.isnan(found[2]) and found[3] == 0.1


def test_the_digest_forgets_the_name_only():
    program = simple()
    assert program.renamed("other").digest == program.digest
    assert replace(program, lanes=8).digest != program.digest
    assert replace(program, grid=(Grid("i", 6, 2),)).digest != program.digest


def test_another_format_is_refused():
    with pytest.raises(IRError, match="format 99"):
        Program.from_json({**simple().to_json(), "format": 99})


def test_tiles_and_scratch():
    local = Buffer("t", "float64", (10,), "local")
    program = replace(
        simple(), grid=(Grid("i", 6, 4), Grid("j", 9, 3)), buffers=(*simple().buffers, local, replace(local, name="u"))
    )
    assert program.tiles == 2 * 3
    assert program.local_offsets() == {"t": 0, "u": 192}  # 80 bytes, 64 of slack, in steps of 64
    assert program.scratch_bytes == 384
    assert np.prod([b.bytes for b in program.locals]) == 80 * 80
