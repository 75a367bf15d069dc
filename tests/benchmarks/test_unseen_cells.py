"""Recurrent cells that nothing in jcuts was written for: one kernel each, and right on the PTX machine."""

from __future__ import annotations

import pytest

from benchmarks.gpu_kernels.unseen_cells import CELLS, SMALL
from jcuts.base.errors import Refusal
from jcuts.codegen.cuda import compile as compiler
from jcuts.codegen.cuda.toolchain.target import CudaTarget
from jcuts.schedule.gpu.machine import GpuMachine, scheduled
from jcuts.schedule.gpu.recurrence.schedules import FORM, recurrence_schedules
from tests.lower.recurrence.test_program import assert_close, lowered
from tests.ptx import machine as ptx_machine

SM90 = CudaTarget((9, 0))
H200 = GpuMachine(132, capability=(9, 0))
WITHOUT_SCHEDULE = "delta rule"
"""Its state's update divides by the length of a key, which every point would compute again."""


@pytest.mark.parametrize("name", CELLS)
def test_a_cell_has_schedules(name):
    program, _ = lowered(*CELLS[name]())
    assert not isinstance(program, Refusal), program
    assert bool(recurrence_schedules(program, H200)) == (WITHOUT_SCHEDULE not in name)


@pytest.mark.cuda_compilers
@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("name", SMALL)
def test_a_cell_in_one_launch(name, blocks):
    program, (operands, wanted) = lowered(*SMALL[name]())
    assert not isinstance(program, Refusal)
    made = scheduled(program, FORM, 256, ("flight", 2), *((("split", blocks),) if blocks > 1 else ()))
    kernel = compiler.compile_program(made, SM90)
    found = ptx_machine.run_kernel(compiler.ptx_of(made, SM90), kernel, operands, limit=2_000_000)
    for mine, theirs in zip(found, wanted, strict=True):
        assert_close(mine, theirs)
