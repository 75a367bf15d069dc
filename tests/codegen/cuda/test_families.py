"""Kernel half of the registry of GPU kernel families: the scheduling half's names, and tiles apart from launches."""

from __future__ import annotations

import inspect
from dataclasses import replace

import numpy as np
import pytest
from llvmlite import binding, ir

from jcuts.base.errors import CompileRejected
from jcuts.codegen.cuda.families import FAMILIES, kernel_family_of
from jcuts.codegen.cuda.launch_source import emit_source
from jcuts.codegen.cuda.ptx.builder import GpuBuilder
from jcuts.codegen.cuda.split_kernels import split_into_kernels
from jcuts.codegen.cuda.tile_kernel import TileKernel
from jcuts.kernel_ir.loop_transforms import collapse_program
from jcuts.lower.horizontal import horizontal_fuse
from jcuts.lower.reduction.multi_tensor_sums import ArraySum, multi_tensor_sums
from jcuts.lower.weight_transpose import transpose_program
from jcuts.schedule.gpu.families import FAMILIES as SCHEDULE_FAMILIES
from jcuts.schedule.gpu.machine import GpuMachine
from tests import programs
from tests.codegen.cuda.b2b_gemm.test_kernel import CASES as MLPS
from tests.codegen.cuda.b2b_gemm.test_kernel import program_of as b2b_gemm_of
from tests.codegen.cuda.inverted_residual.test_kernel import BLOCKS
from tests.codegen.cuda.inverted_residual.test_kernel import program_of as inverted_residual_of
from tests.codegen.cuda.reduction.test_row_column_sums import FUNCTIONS as NORM_GRADIENTS
from tests.codegen.cuda.reduction.test_row_column_sums import arguments_of as norm_arguments_of
from tests.codegen.cuda.reduction.test_row_column_sums import program_of as norm_gradients_of
from tests.gpu.cases import attention, attention_backward
from tests.gpu.test_products import ROUNDED
from tests.lower.recurrence.cells import gru
from tests.lower.recurrence.test_program import lowered as recurrence_of
from tests.schedule.gpu.test_families import program_of

CAPABILITY = (9, 0)
MACHINE = GpuMachine(132, capability=CAPABILITY)
NAMED = {
    "thread_tile": "pooling",
    "sliding_window": "pooling",
    "smem_transpose": "transpose",
    "row_reduction": "softmax",
    "online_softmax": "long softmax",
    "column_reduction": "column sum",
    "column_softmax": "column softmax",
    "welford": "column variance",
    "scan_rows": "row scan",
    "scan_columns": "column scan",
    "mma": "product",
    "mma_f64": "double product",
    "simt_gemm": "exact product",
    "wgmma": "large product",
    "implicit_gemm": "convolution",
    "few_channels_conv": "first convolution",
    "gemv": "vector product",
    "skinny_gemm": "product of few rows",
}


def zeros(*shape):
    return np.zeros(shape, np.float32)


def unscheduled(name):
    """A program that a family computes."""
    if name in NAMED:
        return program_of(NAMED[name])
    if name == "warp_specialized":
        fn, shapes = ROUNDED["dense"]
        return programs.trace(fn, *(zeros(*shape) for shape in shapes)).rounded()
    if name == "flash_attention":
        return programs.trace(attention(), *(zeros(2, n, 3, 40) for n in (37, 53, 53))).attention()[1]
    if name == "attention_backward":
        rows = (zeros(2, 3, 37, 1), zeros(2, 3, 37, 1))
        arrays = (zeros(2, n, 3, 40) for n in (37, 53, 53, 37))
        return programs.trace(attention_backward("keys"), *arrays, *rows).attention("attention_backward")[1]
    if name in ("b2b_gemm", "b2b_wgmma"):
        mlp = MLPS["residual"]
        return b2b_gemm_of(mlp, mlp.arguments())[0]
    if name == "recurrence":
        return recurrence_of(*gru(width=40))[0]
    if name == "row_column_sums":
        return norm_gradients_of(NORM_GRADIENTS["layer norm"], norm_arguments_of((37, 100)))
    assert name == "inverted_residual"
    layers = next(iter(BLOCKS.values()))
    return inverted_residual_of(layers, layers.arguments())[0]


def lowered(name):
    """A program of a family whose schedules lowering makes."""
    if name == "weight_transpose":
        return transpose_program([((64, 70), (70, 64)), ((3, 5, 17), (17, 3, 5))])
    if name == "multi_tensor_sums":
        sums = [ArraySum(None, (0,), 2, 64), ArraySum(None, (1,), 1, 7)]
        return multi_tensor_sums([((100,), "float32"), ((7,), "float32")], sums)
    assert name == "horizontal"
    maps = [collapse_program(programs.trace(lambda x: x * 2 + 1, zeros(n)).program()) for n in (96, 1000)]
    return horizontal_fuse(maps, [[0], [1]], [[0], [1]])


def scheduled(name):
    """The first kernel of the best schedule that a family has for its program."""
    if SCHEDULE_FAMILIES[name].templates:
        program, _ = next(iter(SCHEDULE_FAMILIES[name].schedules(unscheduled(name), MACHINE)))
    else:
        program = lowered(name)
    assert kernel_family_of(program) is FAMILIES[name]
    parts = split_into_kernels(program)[0]
    return parts[-1 if name == "recurrence" else 0].program  # those in front fill what is carried


def test_both_halves_have_the_same_families():
    assert FAMILIES.names() == SCHEDULE_FAMILIES.names()
    assert all(FAMILIES[name].name == name for name in FAMILIES)


def test_every_family_has_a_kernel_of_its_own():
    assert len({FAMILIES[name].kernel for name in FAMILIES}) == len(FAMILIES)


@pytest.mark.parametrize("name", FAMILIES.names())
def test_every_kernel_is_a_tile_kernel(name):
    kernel = FAMILIES[name].kernel
    assert [*inspect.signature(kernel).parameters] == [*inspect.signature(TileKernel).parameters]
    assert [*inspect.signature(kernel.emit).parameters] == [*inspect.signature(TileKernel.emit).parameters]
    assert kernel.__doc__ and kernel.emit.__doc__


@pytest.mark.parametrize("name", FAMILIES.names())
def test_a_tile_is_emitted_without_its_launch(name):
    """Two tiles in one function that is no launch: task record and shared memory are its arguments."""
    program = scheduled(name)
    source = emit_source(program)
    tile = next(iter(source.variants.values()))
    names = [b.name for b in program.buffers if b.role != "local"]
    types = [*(ir.IntType(64) for _ in names), *(ir.IntType(32) for _ in (*source.record, "shared"))]
    module = ir.Module()
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), types), "tasks")
    *arguments, shared = function.args
    builder = GpuBuilder(ir.IRBuilder(function.append_basic_block("entry")), CAPABILITY)
    pointers = dict(zip(names, arguments, strict=False))
    integers = dict(zip(source.record, arguments[len(names) :], strict=True))
    buffers = {b.name: b for b in program.buffers}
    for symbol in ("first", "second"):
        kernel = FAMILIES[name].kernel(builder, program, tile, buffers, pointers, integers, symbol, shared)
        kernel.emit()
    builder.ret_void()
    memory = [g for g in module.global_values if isinstance(g, ir.GlobalVariable) and g.addrspace == 3]
    assert all(g.linkage == "internal" and g.name.startswith(("first_", "second_")) for g in memory)
    assert name == "recurrence" or not (source.shared and memory)
    binding.parse_assembly(str(module)).verify()


def test_a_family_that_is_one_kernel_is_not_split():
    program = scheduled("smem_transpose")
    with pytest.raises(CompileRejected, match="not split over the grid"):
        split_into_kernels(replace(program, params=(*program.params, ("split", 2))))
