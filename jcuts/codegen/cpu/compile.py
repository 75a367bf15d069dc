"""CPU compiler driver: kernel program -> numba -> LLVM -> relocatable object code.

The only file that imports numba.  `compile_program` is what the tuner's worker processes call; nothing is cached here
(the object cache is ``xla/object_cache.py``, keyed by `codegen.cpu.target.kernel_digest`).
"""

from __future__ import annotations

import logging
import threading
from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.core.compiler_lock import global_compiler_lock
from numba.extending import intrinsic

from jcuts.base.errors import CompileRejected, JcutsError
from jcuts.codegen.artifact import CompiledKernel
from jcuts.codegen.cpu.emit import Source, emit_source, variant_arguments
from jcuts.codegen.cpu.target import CpuTarget, host_target, kernel_digest
from jcuts.codegen.cpu.tile_body import BodyEmitter, Shape
from jcuts.codegen.llvm import lanes as L
from jcuts.kernel_ir.program import Buffer, Phase, Program
from jcuts.kernel_ir.verify import verify

BYTES = types.CPointer(types.uint8)
SIGNATURE = types.void(types.CPointer(BYTES), types.int64, types.int64, BYTES)
_OPTIONS: dict[str, Any] = {"nopython": True, "error_model": "numpy", "forceinline": True}

# numba warns about its own state when several threads compile; its lock makes it safe, ours makes it quiet.
_lock = threading.RLock()
logging.getLogger("numba").setLevel(logging.WARNING)


def compile_program(program: Program, target: CpuTarget | None = None) -> CompiledKernel:
    """Compiles one kernel.

    Args: program: a scheduled program; target: the host by default (another CPU's code is not made here).
    Returns: position-independent object code with one entry point of the CPU kernel ABI.
    Raises: CompileRejected where numba or LLVM refuse; IRError where the program is ill-formed.
    """
    target = target or host_target()
    verify(program)
    source = emit_source(program)
    names = _names(program, source)
    try:
        with _lock, global_compiler_lock:
            code = compile(source.text, f"<jcuts {program.name}>", "exec")
            exec(code, names)
            entry: Any = numba.cfunc(SIGNATURE, **_OPTIONS)(names["kernel"])
            library = entry._library
            object_code = library._get_compiled_object()
            symbol = entry._wrapper_name
    except JcutsError:
        raise
    except Exception as error:
        raise CompileRejected(f"{program.name}: {type(error).__name__}: {error}", program=program.name) from error
    return CompiledKernel(
        digest=kernel_digest(program, target),
        symbol=symbol,
        object_code=bytes(object_code),
        tiles=program.tiles,
        scratch_bytes=program.scratch_bytes,
        inputs=tuple((b.shape, b.dtype) for b in program.inputs),
        outputs=tuple((b.shape, b.dtype) for b in program.outputs),
    )


def llvm_of(program: Program) -> str:
    """Optimised LLVM IR, for dumps."""
    return _compiled_text(program, "llvm")


def assembly_of(program: Program) -> str:
    """Assembly of the host, for dumps."""
    return _compiled_text(program, "asm")


def _compiled_text(program: Program, what: str) -> str:
    source = emit_source(program)
    names = _names(program, source)
    with _lock:
        exec(compile(source.text, f"<jcuts {program.name}>", "exec"), names)
        entry: Any = numba.cfunc(SIGNATURE, **_OPTIONS)(names["kernel"])
        return entry._library.get_llvm_str() if what == "llvm" else entry._library.get_asm_str()


def _names(program: Program, source: Source) -> dict[str, Any]:
    """What the source calls: one intrinsic per tile variant, one per condition of a phase."""
    names: dict[str, Any] = {n: _variant(program, program.phases[k], s) for n, (k, s) in source.variants.items()}
    for number, phase in enumerate(program.phases):
        if phase.when:
            names[f"flag_{number}"] = _flag(program, phase.when)
    return names


def _flag(program: Program, buffer: str) -> object:
    """A numba intrinsic that reads the first byte of a local buffer."""
    offset = program.local_offsets()[buffer]

    def flag(typing_context, buffers, scratch):
        def generate(context, builder, sig, args):
            opaque = ir.PointerType()
            place = builder.gep(builder.bitcast(args[1], opaque), [ir.IntType(64)(offset)], source_etype=ir.IntType(8))
            place.type = opaque
            return builder.zext(builder.load(place, typ=ir.IntType(8)), ir.IntType(64))

        return types.int64(types.CPointer(BYTES), BYTES), generate

    return intrinsic(flag)


def _variant(program: Program, phase: Phase, shape: Shape) -> object:
    """A numba intrinsic that emits one tile variant."""
    arguments = variant_arguments(program, phase)
    buffers = {b.name: b for b in program.buffers}

    def signature_of(*operands: object) -> object:
        def generate(context, builder, sig, args):
            pointers = _pointers(builder, program, args[0], args[1])
            variables = dict(zip(arguments, args[2:], strict=True))
            _emit(builder, program, phase, shape, buffers, pointers, variables)
            return context.get_dummy_value()

        return types.void(types.CPointer(BYTES), BYTES, *([types.int64] * len(arguments))), generate

    # numba reads the parameter list of an intrinsic, so it has to be spelled out.
    names = ", ".join(["bufs", "scratch", *(f"i{k}" for k in range(len(arguments)))])
    space: dict[str, Any] = {"signature_of": signature_of}
    exec(f"def tile(typing_context, {names}):\n    return signature_of({names})\n", space)
    return intrinsic(space["tile"])


def _pointers(builder: L.Builder, program: Program, buffers: L.Value, scratch: L.Value) -> dict[str, L.Value]:
    """Base address of every buffer of the program."""
    i64, opaque = ir.IntType(64), ir.PointerType()
    result: dict[str, L.Value] = {}
    number = 0
    base = builder.bitcast(buffers, opaque)
    for buffer in program.buffers:
        if buffer.role == "local":
            continue
        slot = builder.gep(base, [i64(number)], source_etype=opaque)
        result[buffer.name] = builder.load(slot, typ=opaque)
        number += 1
    raw = builder.bitcast(scratch, opaque)
    for name, offset in program.local_offsets().items():
        address = builder.gep(raw, [i64(offset)], source_etype=ir.IntType(8))
        address.type = opaque  # llvmlite types a gep by its element; the pointer itself is opaque
        result[name] = address
    return result


def _emit(
    builder: L.Builder,
    program: Program,
    phase: Phase,
    shape: Shape,
    buffers: dict[str, Buffer],
    pointers: dict[str, L.Value],
    variables: dict[str, L.Value],
) -> None:
    ranges = {f"{g.axis}_lo": g.extent for g in program.grid}
    BodyEmitter(builder, phase, shape, program.lanes, buffers, pointers, variables, ranges).emit()
