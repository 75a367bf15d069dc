"""The helpers over llvmlite builders: memory with masks, gathers, lane reductions, types."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
import pytest
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from jcuts.base.errors import IRError
from jcuts.codegen.llvm import lanes
from jcuts.codegen.vecmath import emit
from jcuts.codegen.vecmath.exact import emit_exact
from tests.codegen.vecmath.harness import compile_module

V8 = lanes.vector_type("float32", 8)


def compiled(body: Callable[[ir.IRBuilder, ir.Value, ir.Value, ir.Value], None]) -> Callable[..., None]:
    """``f(out, in, n)`` on arrays from code on two pointers and an i64."""
    module = ir.Module("helpers")
    kind = ir.FunctionType(ir.VoidType(), [ir.PointerType(), ir.PointerType(), lanes.I64])
    function = ir.Function(module, kind, "helper")
    builder = ir.IRBuilder(function.append_basic_block())
    body(builder, *function.args)
    builder.ret_void()
    raw = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)(compile_module(module, "helper"))
    return lambda out, source, n: raw(out.ctypes.data, source.ctypes.data, n)


@pytest.mark.parametrize("valid", (0, 1, 5, 8))
def test_masked_load_and_store_touch_only_valid_lanes(valid: int) -> None:
    def body(builder: ir.IRBuilder, out: ir.Value, source: ir.Value, n: ir.Value) -> None:
        mask = lanes.tail_mask(builder, n, 8)
        value = lanes.masked_load(builder, source, mask, lanes.const(V8, -1.0))
        lanes.store(builder, value, out)
        rest = builder.gep(out, [lanes.I64(8)], source_etype=lanes.F32)
        lanes.masked_store(builder, value, rest, mask)

    source, out = np.arange(1, 9, dtype=np.float32), np.full(16, 99, np.float32)
    compiled(body)(out, source, valid)
    kept = np.arange(8) < valid
    assert np.array_equal(out[:8], np.where(kept, source, -1))
    assert np.array_equal(out[8:], np.where(kept, source, 99))


def test_gather_reads_by_index_where_the_mask_is_set() -> None:
    index = [7, 0, 3, 3, 100000, 2, 1, 6]

    def body(builder: ir.IRBuilder, out: ir.Value, source: ir.Value, n: ir.Value) -> None:
        kind = lanes.vector_type("int64", 8)
        where = ir.Constant(kind, [ir.Constant(lanes.I64, k) for k in index])
        inside = builder.icmp_signed("<", where, lanes.splat(builder, n, 8))
        lanes.store(builder, lanes.gather(builder, source, where, inside, lanes.const(V8, -5.0)), out)

    source, out = np.arange(10, 18, dtype=np.float32), np.zeros(8, np.float32)
    compiled(body)(out, source, 8)
    assert out.tolist() == [17, 10, 13, 13, -5, 12, 11, 16]


def test_reduction_over_lanes_has_a_fixed_order_and_any_combination() -> None:
    def body(builder: ir.IRBuilder, out: ir.Value, source: ir.Value, n: ir.Value) -> None:
        value = lanes.load(builder, source, V8)
        total = lanes.reduce_lanes(builder, value, builder.fadd)
        top = lanes.reduce_lanes(builder, value, lambda a, b: emit_exact(builder, "max", [a, b], "float32"))
        lanes.store(builder, total, out)
        lanes.store(builder, top, builder.gep(out, [lanes.I64(1)], source_etype=lanes.F32))

    source = np.random.default_rng(0).normal(size=8).astype(np.float32) * np.float32(1e3)
    out, run = np.zeros(2, np.float32), compiled(body)
    run(out, source, 0)
    a = source[:4] + source[4:]
    b = a[:2] + a[2:]
    assert out[0] == b[0] + b[1]
    assert out[1] == source.max()
    source[3] = np.nan
    run(out, source, 0)
    assert np.isnan(out).all()


def test_slices_join_to_the_whole_and_iota_counts() -> None:
    def body(builder: ir.IRBuilder, out: ir.Value, source: ir.Value, n: ir.Value) -> None:
        value = lanes.load(builder, source, lanes.vector_type("int32", 8))
        halves = [lanes.slice_lanes(builder, value, start, 4) for start in (4, 0)]
        swapped = lanes.join_lanes(builder, *halves)
        lanes.store(builder, builder.add(swapped, lanes.iota(swapped.type)), out)

    source, out = np.arange(0, 80, 10, dtype=np.int32), np.zeros(8, np.int32)
    compiled(body)(out, source, 0)
    assert out.tolist() == [40, 51, 62, 73, 4, 15, 26, 37]


def test_pointers_typed_by_numba_are_accepted() -> None:
    """Numba's array data pointers know their element: loads, stores, masks and gathers of vectors go through them."""

    @intrinsic
    def double_sine(typing_context, out, source, valid):
        def code(context, builder, signature, args):
            arrays = [context.make_array(signature.args[k])(context, builder, args[k]) for k in range(2)]
            to, of = (array.data for array in arrays)
            assert not to.type.is_opaque
            value = emit(builder, "sin", [lanes.load(builder, of, V8)], "float32")
            lanes.store(builder, value, to)
            mask = lanes.tail_mask(builder, args[2], 8)
            again = lanes.masked_load(builder, to, mask, lanes.const(V8, 0.0))
            wide = ir.Constant(lanes.vector_type("int64", 8), [lanes.I64(k) for k in range(8)])
            same = lanes.gather(builder, to, wide, mask, lanes.const(V8, 0.0))
            lanes.masked_store(builder, builder.fadd(again, same), to, mask)
            return context.get_dummy_value()

        return types.void(out, source, valid), code

    @njit
    def run(out, source, valid):
        double_sine(out, source, valid)

    source, out = np.linspace(-3e6, 3e6, 8).astype(np.float32), np.zeros(8, np.float32)
    run(out, source, 5)
    expected = np.sin(source.astype(np.float64)) * np.where(np.arange(8) < 5, 2, 1)
    assert np.allclose(out, expected, rtol=1e-6)


def test_types_have_names_widths_and_refusals() -> None:
    assert str(lanes.vector_type("bfloat16", 4)) == "<4 x i16>"
    assert lanes.suffix(V8) == "v8f32" and lanes.suffix(lanes.I16) == "i16"
    assert (lanes.bit_width(V8), lanes.lane_count(V8), lanes.lane_count(lanes.F64)) == (32, 8, 1)
    with pytest.raises(IRError, match="is no lane type") as caught:
        lanes.bit_width(ir.VoidType())
    assert caught.value.type == "void"
    builder = ir.IRBuilder()
    with pytest.raises(IRError, match="3 lanes cannot be halved"):
        lanes.reduce_lanes(builder, ir.Constant(ir.VectorType(lanes.F32, 3), [0.0] * 3), lambda a, b: a)
