"""Persistent recurrences: results on the PTX machine, which watches blocks for races; planted races and deadlocks."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

from jcuts.codegen.cuda import compile as compiler
from jcuts.codegen.cuda.toolchain.image import Image
from jcuts.codegen.cuda.toolchain.target import CudaTarget
from jcuts.schedule.gpu import candidates as gpu_candidates
from jcuts.schedule.gpu.kernel_time import kernel_time
from jcuts.schedule.gpu.machine import GpuMachine, scheduled
from jcuts.schedule.gpu.recurrence.residency import residents
from jcuts.schedule.gpu.recurrence.schedules import FORM, recurrence_schedules
from tests.lower.recurrence.cells import CASES, gru, lstm, minimal_gated_unit, perceptrons
from tests.lower.recurrence.test_program import assert_close, lowered
from tests.ptx import machine as ptx_machine

SM80, SM90 = CudaTarget((8, 0)), CudaTarget((9, 0))
H200 = GpuMachine(132, capability=(9, 0))
compiled = pytest.mark.cuda_compilers


WIDE = {
    "gru, 40 wide": (lambda: gru(width=40), 3),
    "lstm, 36 wide": (lambda: lstm(width=36, batch=2), 4),
    "minimal gated unit, 34 wide": (lambda: minimal_gated_unit(width=34), 2),
    "perceptrons, 40 wide": (lambda: perceptrons(width=40, batch=1), 2),
}
"""Loops whose products are long, and the operands of these that do not change."""


@functools.cache
def case(name):
    return lowered(*(CASES[name]() if name in CASES else WIDE[name][0]()))


def check(program, operands, wanted, target=SM90, late=None):
    kernel = compiler.compile_program(program, target)
    found = ptx_machine.run_kernel(compiler.ptx_of(program, target), kernel, operands, limit=2_000_000, late=late)
    for mine, theirs in zip(found, wanted, strict=True):
        assert_close(mine, theirs)
    return Image.unpack(kernel.object_code)


@compiled
@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("name", [*CASES, *WIDE])
def test_all_steps_in_one_launch(name, blocks):
    program, (operands, wanted) = case(name)
    made = scheduled(program, FORM, 256, ("flight", 2), *((("split", blocks),) if blocks > 1 else ()))
    image = check(made, operands, wanted)
    assert [launch.cooperative for launch in image.launches[-1:]] == [blocks > 1]
    assert len(image.launches) == 1 or blocks > 1


@compiled
@pytest.mark.parametrize("resident", [1, 4])
@pytest.mark.parametrize("blocks", [1, 5])
@pytest.mark.parametrize("name", WIDE)
def test_weights_stay_in_shared_memory(name, blocks, resident):
    program, (operands, wanted) = case(name)
    kept = residents(program, blocks)[:resident]
    assert len(kept) == min(resident, WIDE[name][1])
    more = (("split", blocks),) if blocks > 1 else ()
    made = scheduled(program, FORM, 128, ("flight", 2), *more, ("resident", resident))
    launch = check(made, operands, wanted).launches[-1]
    assert launch.shared >= sum(one.buffer.bytes for one in kept)


@compiled
def test_a_block_takes_columns_that_are_no_multiple_of_its_threads():
    program, (operands, wanted) = case("gru, 40 wide")
    check(scheduled(program, FORM, 96, ("flight", 3), ("split", 7)), operands, wanted)
    check(scheduled(program, FORM, 128, ("flight", 4)), operands, wanted, SM80)


@compiled
@pytest.mark.parametrize("late", [0, 1, 4])
def test_a_block_that_is_late(late):
    for name in WIDE:
        program, (operands, wanted) = case(name)
        made = scheduled(program, FORM, 64, ("flight", 2), ("split", 5))
        check(made, operands, wanted, late=late)


def run_changed(made, operands, change):
    """A kernel with changed lines of PTX."""
    kernel, ptx = compiler.compile_program(made, SM90), compiler.ptx_of(made, SM90)
    changed = "\n".join(map(change, ptx.splitlines()))
    assert changed != ptx
    return ptx_machine.run_kernel(changed, kernel, operands, limit=50_000)


def faulty(change):
    """A GRU's kernel on three blocks with changed PTX."""
    program, (operands, _) = case("gru, 40 wide")
    return run_changed(scheduled(program, FORM, 64, ("flight", 2), ("split", 3)), operands, change)


@compiled
def test_a_missing_release_is_a_deadlock():
    with pytest.raises(ptx_machine.Fault, match="does not end"):
        faulty(lambda line: "" if "red.release" in line else line)


@compiled
def test_a_barrier_that_nobody_waits_at_is_a_race():
    def change(line):
        return f"mov.u32 {line.split()[1]} 0x3fffffff;" if "ld.acquire" in line else line

    with pytest.raises(ptx_machine.Fault, match=r"race|may still read"):
        faulty(change)


@compiled
def test_state_by_the_path_of_constants_is_an_error():
    with pytest.raises(ptx_machine.Fault, match=r"global\.nc"):
        faulty(lambda line: line.replace("ld.global.b32", "ld.global.nc.b32"))


@compiled
@pytest.mark.parametrize("name", ["gru", "minimal gated unit", "kalman", "scalar"])
def test_schedules_compile_without_local_memory(name):
    program, _ = case(name)
    found = recurrence_schedules(program, H200)
    assert found and found[0][1] == 1.0
    for made, _ in found:
        kernel = compiler.compile_program(made, SM80)
        for launch in Image.unpack(kernel.object_code).launches:
            assert launch.resources.stack == 0 and launch.grid[0] <= 132


def test_the_enumeration_asks_the_family():
    program, _ = case("gru")
    found = gpu_candidates.candidates(program, H200, 8)
    assert found and all(dict(made.params)["cuda"] == FORM for made, _ in found)


def test_small_steps_run_in_one_block_first():
    program, _ = case("scalar")
    assert "split" not in dict(recurrence_schedules(program, H200)[0][0].params)


def test_rows_that_registers_do_not_hold_have_no_schedule():
    program, _ = lowered(*gru(width=70, batch=70, steps=2))
    assert not recurrence_schedules(program, H200)
    assert replace(program, template="") != program


@pytest.mark.parametrize("name", ["gru", "minimal gated unit", "scalar"])
def test_the_model_counts_every_step(name):
    program, _ = case(name)
    machine = GpuMachine.named("H200")
    (made, _), *_ = recurrence_schedules(program, machine)
    time = kernel_time(made, machine)
    assert 0 < time.bound(machine.arch, resident=time.compulsory) <= time.seconds
    steps = program.grid[0].extent
    longer = replace(made, grid=(replace(program.grid[0], extent=10 * steps),))
    assert kernel_time(longer, machine).seconds > 2 * time.seconds
