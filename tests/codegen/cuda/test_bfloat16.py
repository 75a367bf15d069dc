"""Rounding to bfloat16 on GPUs: the instruction for pairs where there is one, bits for constants and older GPUs."""

from __future__ import annotations

import pytest
from llvmlite import ir

from jcuts.codegen.cuda.ptx.builder import GpuBuilder
from jcuts.codegen.llvm import lanes as L
from jcuts.codegen.vecmath.convert import convert

PACKED = "cvt.rn.bf16x2.f32"


def text_of(make, capability=(9, 0)):
    """LLVM IR of a function of a float32 and a bool. Args: make: builder and both -> a value to round."""
    module = ir.Module()
    function = ir.Function(module, ir.FunctionType(L.I16, [L.F32, L.I1]), "f")
    plain = ir.IRBuilder(function.append_basic_block())
    builder = GpuBuilder(plain, capability)
    plain.ret(convert(builder, make(builder, *function.args), "float32", "bfloat16"))
    return str(module)


@pytest.mark.parametrize(("capability", "packed"), [((9, 0), True), ((8, 0), True), ((7, 5), False)])
def test_values_are_rounded_by_the_instruction_that_a_gpu_has(capability, packed):
    text = text_of(lambda b, x, _: b.fmul(x, x), capability)
    assert (PACKED in text) == packed
    assert ("icmp" in text) == (not packed)


def test_constants_and_choices_of_two_are_left_to_the_optimiser():
    assert PACKED not in text_of(lambda b, x, there: L.F32(1.5))
    assert PACKED not in text_of(lambda b, x, there: b.select(there, L.F32(0.0), L.F32(-1e9)))
    assert PACKED in text_of(lambda b, x, there: b.select(there, x, L.F32(-1e9)))
