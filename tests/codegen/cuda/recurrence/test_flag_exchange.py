"""Flags in place of a grid barrier: results on the PTX machine, weights in registers, planted faults."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from jcuts.base.errors import CompileRejected
from jcuts.codegen.cuda import compile as compiler
from jcuts.codegen.cuda.toolchain.image import Image
from jcuts.schedule.gpu.machine import scheduled
from jcuts.schedule.gpu.recurrence.exchange import exchanged
from jcuts.schedule.gpu.recurrence.schedules import FORM, recurrence_schedules
from tests.codegen.cuda.recurrence.test_recurrence import H200, SM80, SM90, check, compiled, run_changed
from tests.lower.recurrence.cells import gru, lstm, minimal_gated_unit, normal, perceptrons
from tests.lower.recurrence.test_program import lowered
from tests.ptx import machine as ptx_machine

CELLS = {
    "gru": lambda: gru(width=40),
    "gru, 3 rows, a last block with few columns": lambda: gru(width=36, batch=3),
    "gru, 90 wide": lambda: gru(width=90, steps=3),
    "lstm": lambda: lstm(width=36, batch=2),
}


def made_of(name, blocks, threads=64, flight=64, *more):
    program, (operands, wanted) = lowered(*CELLS[name]())
    made = scheduled(program, FORM, threads, ("flight", flight), ("split", blocks), *more, ("exchange", "flags"))
    return made, operands, wanted


@compiled
@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize(("name", "blocks"), [(name, 3) for name in CELLS] + [("gru", 5), ("gru, 90 wide", 12)])
def test_all_steps_without_a_barrier(name, blocks, held):
    made, operands, wanted = made_of(name, blocks, 64 if "90" not in name else 256, 64, *([("held", 1)] * held))
    launch = check(made, operands, wanted).launches[-1]
    assert launch.cooperative and launch.grid[0] == blocks


@compiled
@pytest.mark.parametrize("late", [0, 2, 4])
@pytest.mark.parametrize("name", ["gru", "lstm"])
def test_a_block_that_is_late(name, late):
    made, operands, wanted = made_of(name, 5, 64, 64, ("held", 1))
    check(made, operands, wanted, late=late)


@compiled
def test_values_that_no_product_reads_are_waited_for():
    """A block is waited for by all others, even where products read a part of what is carried."""

    def part(h, xs, w):
        return jax.lax.scan(lambda h, x: (jnp.tanh(h[:, :40] @ w + x), None), h, xs)[0]

    program, (operands, wanted) = lowered(part, (normal(2, 80), normal(5, 2, 80), normal(40, 80, scale=0.2)))
    assert exchanged(program, 10)
    made = scheduled(program, FORM, 64, ("flight", 64), ("split", 10), ("exchange", "flags"))
    for late in (0, 9):
        check(made, operands, wanted, late=late)


@compiled
@pytest.mark.parametrize("replicas", [2, 4])
def test_every_block_reads_one_of_several_replicas(replicas):
    made, operands, wanted = made_of("lstm", 3, 64, 64, ("held", 1), ("replicas", replicas))
    check(made, operands, wanted)


@compiled
@pytest.mark.parametrize("flight", [1, 5])
def test_operands_of_several_trips_stay_in_shared_memory(flight):
    made, operands, wanted = made_of("gru", 5, 64, flight, ("resident", 3))
    check(made, operands, wanted, SM80)
    made, *_ = made_of("gru", 5, 64, 1, ("held", 1))
    with pytest.raises(CompileRejected, match="terms in registers"):
        compiler.compile_program(made, SM90)


def test_only_what_others_read_is_exchanged():
    found = [[b.name for b in exchanged(lowered(*case())[0], 3)] for case in CELLS.values()]
    assert [len(names) for names in found] == [1, 1, 1, 1]  # an LSTM's cell state stays with its thread


@pytest.mark.parametrize("case", [minimal_gated_unit, perceptrons])
def test_several_stages_need_a_barrier(case):
    program, _ = lowered(*case(width=40))
    assert exchanged(program, 3) == []
    made = scheduled(program, FORM, 64, ("flight", 4), ("split", 3), ("exchange", "flags"))
    with pytest.raises(CompileRejected, match="grid barrier"):
        compiler.compile_program(made, SM90)


def test_a_block_without_columns_of_its_own_needs_a_barrier():
    program, _ = lowered(*gru(width=40))
    assert exchanged(program, 5) and not exchanged(program, 6)  # 8 columns a block: the sixth has none


def faulty(change):
    made, operands, _ = made_of("gru", 3)
    return run_changed(made, operands, change)


@compiled
def test_a_value_that_is_not_written_is_a_deadlock():
    with pytest.raises(ptx_machine.Fault, match="does not end"):
        faulty(lambda line: "" if "st.relaxed" in line else line)


@compiled
def test_words_read_without_their_flag_are_a_race():
    with pytest.raises(ptx_machine.Fault, match="race"):
        faulty(lambda line: line.replace("ld.relaxed.gpu.global.b64", "ld.global.b64"))


@compiled
@pytest.mark.parametrize(("case", "rows"), [(gru, 1), (lstm, 1), (gru, 4)])
def test_schedules_of_800_units_compile_without_local_memory(case, rows):
    program, _ = lowered(*case(width=800, batch=rows, steps=2))
    found = [m for m, _ in recurrence_schedules(program, H200) if dict(m.params).get("exchange") == "flags"]
    kernels = []
    for made in found:
        try:
            kernels.append(compiler.compile_program(made, SM90))
        except CompileRejected as error:
            assert "local memory" in str(error)
    assert kernels
    assert all(Image.unpack(k.object_code).launches[-1].resources.stack == 0 for k in kernels)
