"""Scheduled program -> cubin: emits the tile of its kernel family, runs numba.cuda (NVVM) and ptxas, checks resource
limits.

The only file that imports numba.cuda.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping
from typing import Any

from llvmlite import ir

from jcuts.base import fingerprint, keys
from jcuts.base.errors import CompileRejected, JcutsError
from jcuts.codegen.artifact import CompiledKernel
from jcuts.codegen.cuda.families import kernel_family_of
from jcuts.codegen.cuda.launch_source import emit_source
from jcuts.codegen.cuda.launch_writer import CudaSource
from jcuts.codegen.cuda.ptx import global_memory as M
from jcuts.codegen.cuda.ptx import mma as ptx_mma
from jcuts.codegen.cuda.ptx.builder import GpuBuilder
from jcuts.codegen.cuda.split_kernels import KernelPart, split_into_kernels
from jcuts.codegen.cuda.toolchain import ptxas
from jcuts.codegen.cuda.toolchain.image import SYMBOL, Image, Launch, Resources
from jcuts.codegen.cuda.toolchain.l2_prefetch import OperandPrefetch
from jcuts.codegen.cuda.toolchain.target import AMPERE, GROUPED, REGISTERS, CudaTarget
from jcuts.codegen.llvm import lanes as L
from jcuts.kernel_ir.index import Index
from jcuts.kernel_ir.program import ITEM_SIZE, Buffer, Program
from jcuts.kernel_ir.verify import verify
from jcuts.schedule.gpu.families import FAMILIES, TENSOR_CORES
from jcuts.schedule.gpu.weight_prefetch.operands import limits, prefetched_ranges

_lock = threading.RLock()
_SLOW_PATHS = frozenset({"sin", "cos", "tan"})
"""float64 functions whose library code keeps a table on the stack for huge arguments."""
WORD = 4
"""Bytes of a register."""
PACKAGES = ("numba-cuda", "cuda-bindings", "nvidia-nvvm", "nvidia-cuda-nvcc")


@functools.cache
def available() -> str:
    """'' if kernels can be compiled here, else the reason."""
    if fingerprint.package_version("numba-cuda") == "none":  # numba's own CUDA target is older and knows less
        return f"numba-cuda is not installed: {ptxas.INSTALL}"
    try:
        _numba()
    except Exception as error:  # import errors of several packages; numba-cuda itself raises AttributeError
        return f"numba-cuda cannot be imported ({type(error).__name__}: {str(error)[:200]}): {ptxas.INSTALL}"
    if not ptxas.assembler():
        try:
            from cuda.bindings import nvjitlink  # type: ignore[import-not-found]  # noqa: F401
        except ImportError:
            return f"there is neither ptxas nor nvJitLink: {ptxas.INSTALL}"
    return ""


def _numba() -> Any:
    from numba import cuda, types  # type: ignore[attr-defined]
    from numba.cuda.extending import intrinsic  # type: ignore[import-not-found]

    return cuda, types, intrinsic


@functools.cache
def _toolchain() -> str:
    return keys.cuda_toolchain(PACKAGES, ptxas.assembler())


def kernel_digest(program: Program, target: CudaTarget) -> str:
    """Names a kernel in HLO and on disk: program, architecture, compilers, limits of prefetches."""
    return keys.cuda_kernel(program.digest, target.arch, _toolchain(), repr(limits()))


def compile_program(program: Program, target: CudaTarget) -> CompiledKernel:
    """Compiles one program; no GPU is needed.

    Args: program: scheduled for a GPU (`schedule.gpu.candidates`); target: the architecture.
    Returns: a kernel whose object code is an `Image`.
    Raises: CompileRejected where numba, NVVM or the assembler refuse, a kernel would use local memory, or a block of it
        does not fit on a multiprocessor; IRError where the program is ill-formed.
    """
    verify(program)
    check_tensor_core_support(program, target)
    digest = kernel_digest(program, target)
    found, emitted, scratch = sources_of(program)
    symbols = [f"jcuts_{digest[:12]}_{number}" for number in range(len(found))]
    sources = [
        (_ptx(part.program, source, target, symbol), symbol)
        for part, source, symbol in zip(found, emitted, symbols, strict=True)
    ]
    arch = arch_of(program, target)
    grids = _grids(program, found, emitted)
    cubin, report, early = ptxas.assemble_best(sources, arch, grids, overlapped=kernel_family_of(program).overlapped)
    launches = []
    for part, source, symbol in zip(found, emitted, symbols, strict=True):
        used = report[symbol]
        if used.stack and not _may_use_stack(part.program):
            raise CompileRejected(
                f"{program.name}: {symbol} keeps {used.stack} bytes per thread in local memory (it has "
                f"{used.registers} registers): spills are not run",
                stack=used.stack,
                registers=used.registers,
            )
        check_limits(program.name, used, source.threads, target, source.shared)
        entry_registers = kernel_family_of(part.program).entry_registers
        for wanted in map(entry_registers, source.variants.values()):
            if wanted is not None and used.registers != wanted:
                raise CompileRejected(f"{program.name}: {symbol} has {used.registers} registers to share, not {wanted}")
        grid, block, cluster = ((n, 1, 1) for n in (source.blocks, source.threads, source.cluster))
        launches.append(
            Launch(
                symbol, grid, block, part.arguments, source.shared, cluster, source.cooperative, early, resources=used
            )
        )
    image = Image(arch, program.name, tuple(launches), cubin)
    return CompiledKernel(
        digest=digest,
        symbol=SYMBOL,
        object_code=image.pack(),
        tiles=sum(s.blocks for s in emitted),
        scratch_bytes=scratch,
        inputs=tuple((b.shape, b.dtype) for b in program.inputs),
        outputs=tuple((b.shape, b.dtype) for b in program.outputs),
    )


_UNFIT = (ArithmeticError, AssertionError, AttributeError, LookupError, StopIteration, TypeError, ValueError)
"""What schedules raise that were made for other programs, or by nobody."""


def sources_of(program: Program) -> tuple[list[KernelPart], list[CudaSource], int]:
    """The kernels of a program, the source text of each, and the bytes of scratch memory that they share.

    Raises: CompileRejected for parameters that are no schedule's; IRError where a part is ill-formed.
    """
    try:
        found, scratch = split_into_kernels(program)
        for part in found:
            verify(part.program)
        return found, [emit_source(part.program) for part in found], scratch
    except JcutsError:
        raise
    except _UNFIT as error:
        text = f"{program.name}: its parameters are no schedule's ({type(error).__name__}: {str(error)[:80]})"
        raise CompileRejected(text, program=program.name) from error


def arch_of(program: Program, target: CudaTarget) -> str:
    """The architecture that a program is assembled for: products of warpgroups ask for the one with its own features.

    Raises: CompileRejected where the target has no warpgroups.
    """
    features = kernel_family_of(program).features
    if not features:
        return target.arch
    if target.capability != GROUPED:
        raise CompileRejected(f"{program.name}: products of warp groups need compute capability 9.0, not {target.arch}")
    return target.arch + features


def check_tensor_core_support(program: Program, target: CudaTarget) -> None:
    """Raises CompileRejected for a schedule of matrix units whose copies and products the target does not have."""
    form = dict(program.params).get("cuda")
    families = (FAMILIES[name] for name in FAMILIES)
    if target.capability < AMPERE and any(f.form == form and f.capability >= TENSOR_CORES for f in families):
        raise CompileRejected(
            f"{program.name}: a {form} needs asynchronous copies and TF32 (compute capability 8.0), {target.arch} has "
            "neither",
            form=form,
            arch=target.arch,
        )


def check_limits(name: str, used: Resources, threads: int, target: CudaTarget, launched: int = 0) -> None:
    """Raises CompileRejected for a kernel that no multiprocessor of the target can hold one block of.

    Args: launched: bytes of shared memory that the launch adds to what the kernel declares.
    """
    shared = used.shared + launched
    if shared > target.max_shared:
        raise CompileRejected(
            f"{name}: a block needs {shared} bytes of shared memory, {target.arch} has {target.max_shared}",
            shared=shared,
            limit=target.max_shared,
        )
    warps = -(-threads // 32)
    taken = warps * -(-used.registers * 32 // 256) * 256
    if taken > REGISTERS:
        raise CompileRejected(
            f"{name}: a block of {threads} threads with {used.registers} registers each needs {taken}, {target.arch} "
            f"has {REGISTERS}",
            registers=taken,
            limit=REGISTERS,
        )


def _may_use_stack(program: Program) -> bool:
    return any(
        node.op in _SLOW_PATHS and node.dtype == "float64"
        for phase in program.phases
        for graph in (phase.body, phase.exit)
        for node in graph.nodes
    )


def ptx_of(program: Program, target: CudaTarget) -> str:
    """PTX of all kernels of a program, for dumps and tests."""
    check_tensor_core_support(program, target)
    found, _ = split_into_kernels(program)
    emitted = [emit_source(part.program) for part in found]
    sources = [
        (_ptx(p.program, source, target, f"k{n}"), f"k{n}")
        for n, (p, source) in enumerate(zip(found, emitted, strict=True))
    ]
    arch = arch_of(program, target)
    return ptxas.merge_modules(sources, arch, grids=_grids(program, found, emitted) if ptxas.supports_pdl(arch) else ())


def _grids(program: Program, parts: list[KernelPart], sources: list[CudaSource]) -> list[ptxas.Grid]:
    """The launches of a program's kernels, with what each of them prefetches into the L2 cache."""
    grids = []
    for part, source in zip(parts, sources, strict=True):
        names = [b.name for b in part.program.buffers if b.role != "local"]
        prefetches = tuple(
            OperandPrefetch(names.index(one.buffer), one.first, one.bytes, one.wanted)
            for one in prefetched_ranges(part.program, program)
        )
        grids.append(ptxas.Grid(source.blocks, source.threads, source.shared, prefetches))
    return grids


def _ptx(program: Program, source: CudaSource, target: CudaTarget, symbol: str) -> str:
    cuda, types, intrinsic = _numba()
    names: dict[str, Any] = {"cuda": cuda}
    try:
        with _lock:
            for name, tile in source.variants.items():
                names[name] = _tile(program, tile, source, types, intrinsic, symbol, target)
            for name, (kind, number) in source.helpers.items():
                names[name] = _helper(kind, number, types, intrinsic)
            exec(compile(source.text, f"<jcuts {program.name}>", "exec"), names)
            pointer = types.CPointer(types.uint8)
            signature = tuple(pointer for b in program.buffers if b.role != "local")
            text, _ = cuda.compile(
                names["kernel"],
                signature,
                device=False,
                abi="numba",
                cc=target.capability,
                output="ptx",
                launch_bounds=(source.threads, source.least) if source.least else source.threads,
            )
    except JcutsError:
        raise
    except Exception as error:
        raise CompileRejected(f"{program.name}: {type(error).__name__}: {error}", program=program.name) from error
    return text


def _helper(kind: str, number: int, types: Any, intrinsic: Any) -> object:
    """Division or remainder by a constant, of a 32-bit number that is not negative."""

    def helper(typing_context: Any, x: Any) -> Any:
        def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            value = _narrow(builder, args[0])
            return (builder.udiv if kind == "div" else builder.urem)(value, L.I32(number))

        return types.int32(x), generate

    return intrinsic(helper)


def _narrow(builder: Any, value: Any) -> Any:
    return builder.trunc(value, L.I32) if value.type.width > 32 else value


def _moved(
    builder: GpuBuilder, buffer: Buffer, pointers: Mapping[str, L.Value], buffers: Mapping[str, Buffer]
) -> L.Value:
    """The address (i64) of a result with its run-time offset (`Buffer.offset`)."""
    offset = buffer.offset
    assert offset is not None
    size = ITEM_SIZE[buffers[offset.start].dtype]
    frame = M.Frame(builder, {}, pointers, {}, {})
    (word,) = M.load(frame, offset.start, size, Index(), 1, (), 0)
    start = word if size > WORD else builder.sext(word, L.I64)
    for limit, worse in ((L.I64(0), "<"), (L.I64(offset.limit), ">")):
        start = builder.select(builder.icmp_signed(worse, start, limit), limit, start)
    return builder.add(pointers[buffer.name], builder.mul(start, L.I64(offset.stride * ITEM_SIZE[buffer.dtype])))


def _tile(
    program: Program, tile: Any, source: CudaSource, types: Any, intrinsic: Any, symbol: str, target: CudaTarget
) -> object:
    """A numba intrinsic that emits what one thread does."""
    buffers = {b.name: b for b in program.buffers}
    names = [b.name for b in program.buffers if b.role != "local"]
    kernel = kernel_family_of(program).kernel

    def signature_of(*operands: Any) -> Any:
        def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            gpu = GpuBuilder(builder, target.capability)
            pointers = {
                name: builder.ptrtoint(value, ir.IntType(64))
                for name, value in zip(names, args[: len(names)], strict=True)
            }
            pointers |= {b.name: _moved(gpu, b, pointers, buffers) for b in program.outputs if b.offset is not None}
            numbers = [_narrow(builder, value) for value in args[len(names) :]]
            integers = dict(zip(source.record, numbers, strict=True))
            shared = L.I32(0)
            if source.shared:
                shared = ptx_mma.dynamic_shared(gpu, f"{symbol}_shared", source.alignment)
            kernel(gpu, program, tile, buffers, pointers, integers, symbol, shared).emit()
            return context.get_dummy_value()

        return types.void(*operands), generate

    # numba reads the parameter list of an intrinsic, so it has to be spelled out.
    parameters = ", ".join(f"a{k}" for k in range(len(names) + len(source.record)))
    space: dict[str, Any] = {"signature_of": signature_of}
    exec(f"def tile(typing_context, {parameters}):\n    return signature_of({parameters})\n", space)
    return intrinsic(space["tile"])
