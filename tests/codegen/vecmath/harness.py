"""Compiles ``emit`` calls into array functions with llvmlite alone, for the tests and the error benchmark."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import lru_cache

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir

from jcuts.codegen.llvm import lanes

Code = Callable[[ir.IRBuilder, Sequence[ir.Value]], ir.Value]
_KEEP: list[object] = []  # engines own the code: they live as long as the process


@lru_cache(maxsize=1)
def _initialised() -> None:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()


def target_machine(cpu: str | None = None, triple: str | None = None) -> llvm.TargetMachine:
    """The host's machine at -O3, or the named one (for reading assembly only)."""
    _initialised()
    if triple is not None:
        llvm.initialize_all_targets()
        llvm.initialize_all_asmprinters()
        return llvm.Target.from_triple(triple).create_target_machine(cpu=cpu or "", opt=3)
    target = llvm.Target.from_default_triple()
    if cpu is not None:
        return target.create_target_machine(cpu=cpu, opt=3, jit=True)
    features = llvm.get_host_cpu_features().flatten()
    return target.create_target_machine(cpu=llvm.get_host_cpu_name(), features=features, opt=3, jit=True)


def loop_module(code: Code, ins: Sequence[str], out: str, width: int | None) -> ir.Module:
    """``void loop(ptr out, ptr in0, ..., i64 count)``: ``code`` on vectors of ``width`` lanes (None: on scalars)."""
    module = ir.Module("loop")
    kinds = [ir.PointerType()] * (1 + len(ins)) + [lanes.I64]
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), kinds), "loop")
    entry, body, done = (function.append_basic_block(name) for name in ("entry", "body", "done"))
    builder = ir.IRBuilder(entry)
    builder.cbranch(builder.icmp_signed(">", function.args[-1], lanes.I64(0)), body, done)
    builder.position_at_end(body)
    index = builder.phi(lanes.I64)
    index.add_incoming(lanes.I64(0), entry)

    def memory(dtype: str) -> ir.Type:
        one = lanes.I8 if dtype == "bool" else lanes.element_type(dtype)
        return one if width is None else ir.VectorType(one, width)

    values = []
    for pointer, dtype in zip(function.args[1:-1], ins, strict=True):
        kind = memory(dtype)
        address = builder.gep(pointer, [index], source_etype=lanes.element(kind))
        value = lanes.load(builder, address, kind)
        values.append(builder.trunc(value, lanes.like(kind, lanes.I1)) if dtype == "bool" else value)
    result = code(builder, values)
    kind = memory(out)
    if out == "bool":
        result = builder.zext(result, kind)
    lanes.store(builder, result, builder.gep(function.args[0], [index], source_etype=lanes.element(kind)))
    following = builder.add(index, lanes.I64(width or 1))
    index.add_incoming(following, builder.block)
    builder.cbranch(builder.icmp_signed("<", following, function.args[-1]), body, done)
    builder.position_at_end(done)
    builder.ret_void()
    return module


def compile_module(module: ir.Module, name: str) -> int:
    """Optimises and compiles for this machine; the address of the named function."""
    machine = target_machine()
    parsed = llvm.parse_assembly(str(module))
    parsed.verify()
    passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=2))
    passes.getModulePassManager().run(parsed, passes)
    engine = llvm.create_mcjit_compiler(parsed, machine)
    engine.finalize_object()
    _KEEP.append((engine, machine))
    return engine.get_function_address(name)


def compile_loop(code: Code, ins: Sequence[str], out: str, width: int | None = 16) -> Callable[..., np.ndarray]:
    """An array function: pads to whole vectors, runs the loop, returns an array of ``out``."""
    address = compile_module(loop_module(code, ins, out, width), "loop")
    raw = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * (1 + len(ins)), ctypes.c_int64)(address)

    def run(*arrays: np.ndarray) -> np.ndarray:
        count, step = arrays[0].size, width or 1
        total = -(-count // step) * step
        padded = [np.resize(np.ascontiguousarray(a), total) for a in arrays]
        result = np.empty(total, storage(out))
        raw(result.ctypes.data, *(a.ctypes.data for a in padded), total)
        return result[:count]

    def in_place(result: np.ndarray, *arrays: np.ndarray) -> None:
        raw(result.ctypes.data, *(a.ctypes.data for a in arrays), result.size)

    run.in_place = in_place  # type: ignore[attr-defined]  # for timing, without the padding copies
    return run


def storage(dtype: str) -> np.dtype:
    """The NumPy dtype of an array of this jax dtype."""
    if dtype == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(dtype)
