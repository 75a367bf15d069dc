"""Small kernels in LLVM IR for the tests of the launcher: they need neither the code generator nor numba."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jcuts.base.fingerprint import digest
from jcuts.cli.doctor_trials import compile_ir, elementwise_ir
from jcuts.codegen.artifact import CompiledKernel
from jcuts.xla import jit_linker, native_library


def elementwise(
    body: str,
    *,
    tiles: int,
    block: int,
    declarations: str = "",
    symbol: str = "kernel",
) -> CompiledKernel:
    """A kernel over ``f32[tiles * block]``: ``body`` computes ``%r`` from ``%v``, one element at a time."""
    text = elementwise_ir(body, symbol=symbol, block=block, declarations=declarations)
    aval = ((tiles * block,), "float32")
    return CompiledKernel(
        digest=digest("test kernel", text, tiles),
        symbol=symbol,
        object_code=compile_ir(text),
        tiles=tiles,
        scratch_bytes=0,
        inputs=(aval,),
        outputs=(aval,),
    )


def affine(tiles: int, block: int, scale: float = 2.0, shift: float = 1.0) -> CompiledKernel:
    """``y = scale * x + shift`` in float32; choose constants that float32 holds exactly."""
    return elementwise(f"%m = fmul float %v, {scale:e}\n  %r = fadd float %m, {shift:e}", tiles=tiles, block=block)


def tanh(tiles: int, block: int) -> CompiledKernel:
    """``y = tanhf(x)``: needs libm."""
    return elementwise(
        "%r = call float @tanhf(float %v)", tiles=tiles, block=block, declarations="declare float @tanhf(float)"
    )


_SCRATCH = """
define void @kernel(i8** %buffers, i64 %tile_begin, i64 %tile_end, i8* %scratch) {{
entry:
  %p0 = bitcast i8** %buffers to float**
  %x = load float*, float** %p0
  %p1 = getelementptr float*, float** %p0, i64 1
  %y = load float*, float** %p1
  %s = bitcast i8* %scratch to float*
  br label %tile
tile:
  %t = phi i64 [%tile_begin, %entry], [%t1, %next]
  %base = mul i64 %t, {block}
  br label %fill
fill:
  %i = phi i64 [0, %tile], [%i1, %fill]
  %at = add i64 %base, %i
  %xi = getelementptr float, float* %x, i64 %at
  %v = load float, float* %xi
  %si = getelementptr float, float* %s, i64 %i
  store volatile float %v, float* %si
  %i1 = add i64 %i, 1
  %filling = icmp slt i64 %i1, {block}
  br i1 %filling, label %fill, label %drain
drain:
  %j = phi i64 [0, %fill], [%j1, %drain]
  %sj = getelementptr float, float* %s, i64 %j
  %w = load volatile float, float* %sj
  %r = fmul float %w, 3.0
  %to = add i64 %base, %j
  %yj = getelementptr float, float* %y, i64 %to
  store float %r, float* %yj
  %j1 = add i64 %j, 1
  %draining = icmp slt i64 %j1, {block}
  br i1 %draining, label %drain, label %next
next:
  %t1 = add i64 %t, 1
  %more = icmp slt i64 %t1, %tile_end
  br i1 %more, label %tile, label %exit
exit:
  ret void
}}
"""


def through_scratch(tiles: int, block: int) -> CompiledKernel:
    """``y = 3 * x``: each tile fills its scratch from ``x``, then reads it back, so that sharing it shows."""
    text = _SCRATCH.format(block=block)
    aval = ((tiles * block,), "float32")
    return CompiledKernel(
        digest=digest("test scratch", text, tiles),
        symbol="kernel",
        object_code=compile_ir(text),
        tiles=tiles,
        scratch_bytes=4 * block,
        inputs=(aval,),
        outputs=(aval,),
    )


def sum_of(operands: int, *, tiles: int, block: int) -> CompiledKernel:
    """``y = x0 + x1 + ...``, added in that order."""
    lines = []
    for n in range(1, operands):
        lines.append(f"%pp{n} = getelementptr float*, float** %p0, i64 {n}")
        lines.append(f"%x{n} = load float*, float** %pp{n}")
        lines.append(f"%xi{n} = getelementptr float, float* %x{n}, i64 %i")
        lines.append(f"%v{n} = load float, float* %xi{n}")
        lines.append(f"%s{n} = fadd float {'%v' if n == 1 else f'%s{n - 1}'}, %v{n}")
    last = "%v" if operands == 1 else f"%s{operands - 1}"
    lines.append(f"%r = fadd float {last}, -0.0")
    text = elementwise_ir("\n  ".join(lines), symbol="kernel", block=block)
    text = text.replace("float** %p0, i64 1\n  %y", f"float** %p0, i64 {operands}\n  %y")
    aval = ((tiles * block,), "float32")
    return CompiledKernel(
        digest=digest("test sum", text, tiles),
        symbol="kernel",
        object_code=compile_ir(text),
        tiles=tiles,
        scratch_bytes=0,
        inputs=(aval,) * operands,
        outputs=(aval,),
    )


def counted(block: int) -> CompiledKernel:
    """``(n + 1, 3 * x)`` of ``n: f32[1]`` and ``x: f32[block]``."""
    pointers = "\n  ".join(
        f"%q{k} = getelementptr float*, float** %p0, i64 {k}\n  %b{k} = load float*, float** %q{k}" for k in (1, 3)
    )
    body = "%r = fadd float %v, 1.0\n  br label %second\nsecond:\n  %j = phi i64 [0, %loop], [%j1, %second]\n  " + (
        "%s = getelementptr float, float* %b1, i64 %j\n  %w = load float, float* %s\n  %u = fmul float %w, 3.0\n  "
        "%t = getelementptr float, float* %b3, i64 %j\n  store float %u, float* %t\n  %j1 = add i64 %j, 1\n  "
        f"%k = icmp slt i64 %j1, {block}\n  br i1 %k, label %second, label %last\nlast:"
    )
    text = elementwise_ir(body, symbol="kernel", block=1)
    text = text.replace("float** %p0, i64 1\n  %y", "float** %p0, i64 2\n  %y")
    text = text.replace("[%next, %loop]", "[%next, %last]")
    text = text.replace("  br label %loop\n", f"  {pointers}\n  br label %loop\n", 1)
    avals = (((1,), "float32"), ((block,), "float32"))
    return CompiledKernel(
        digest=digest("test counted", text),
        symbol="kernel",
        object_code=compile_ir(text),
        tiles=1,
        scratch_bytes=0,
        inputs=avals,
        outputs=avals,
    )


def floating_point_mode(tiles: int) -> CompiledKernel:
    """``u32[tiles, 2]``: MXCSR and (part of) the thread's identity as each tile saw them, after some slow work."""
    text = """
declare void @llvm.x86.sse.stmxcsr(i8*)
declare i64 @pthread_self()
define void @kernel(i8** %buffers, i64 %begin, i64 %end, i8* %scratch) {
entry:
  %p0 = bitcast i8** %buffers to i32**
  %y = load i32*, i32** %p0
  %spin = alloca i32
  br label %tile
tile:
  %t = phi i64 [%begin, %entry], [%next, %store]
  br label %slow
slow:
  %n = phi i64 [0, %tile], [%n1, %slow]
  store volatile i32 0, i32* %spin
  %n1 = add i64 %n, 1
  %again = icmp slt i64 %n1, 20000
  br i1 %again, label %slow, label %store
store:
  %word = mul i64 %t, 2
  %mode = getelementptr i32, i32* %y, i64 %word
  %mode8 = bitcast i32* %mode to i8*
  call void @llvm.x86.sse.stmxcsr(i8* %mode8)
  %self = call i64 @pthread_self()
  %high = lshr i64 %self, 8
  %id = trunc i64 %high to i32
  %word1 = add i64 %word, 1
  %who = getelementptr i32, i32* %y, i64 %word1
  store i32 %id, i32* %who
  %next = add i64 %t, 1
  %more = icmp slt i64 %next, %end
  br i1 %more, label %tile, label %exit
exit:
  ret void
}
"""
    return CompiledKernel(
        digest=digest("test floating-point mode", text, tiles),
        symbol="kernel",
        object_code=compile_ir(text),
        tiles=tiles,
        scratch_bytes=0,
        inputs=(),
        outputs=(((tiles, 2), "uint32"),),
    )


def bench(
    kernel: CompiledKernel, inputs: list[np.ndarray], *, threads: int, repeats: int
) -> tuple[list[np.ndarray], np.ndarray]:
    """Runs a kernel through ``jcuts_bench``: outputs, and the wall time [s] of each repeat."""
    outputs = [np.zeros(shape, dtype) for shape, dtype in kernel.outputs]
    pointers = (ctypes.c_void_p * (len(inputs) + len(outputs)))(*[a.ctypes.data for a in (*inputs, *outputs)])
    stride = -(-kernel.scratch_bytes // 64) * 64
    scratch = np.zeros(threads * stride + 64, np.uint8)
    aligned = -(-scratch.ctypes.data // 64) * 64
    seconds = np.zeros(repeats)
    status = native_library.load().jcuts_bench(
        jit_linker.link(kernel.object_code, kernel.symbol),
        pointers,
        kernel.tiles,
        aligned,
        kernel.scratch_bytes,
        threads,
        repeats,
        seconds.ctypes.data_as(ctypes.POINTER(ctypes.c_double)),
    )
    if status != 0:
        raise RuntimeError(f"jcuts_bench returned {status}")
    return outputs, seconds


def assert_threads_agree(run: Callable[..., Any], inputs: Sequence[Any], *rest: Any) -> None:
    """Calls of several threads, each with an input of its own, give what the same calls give one after the other."""
    wanted = [[np.asarray(y) for y in run(x, *rest)] for x in inputs]
    wrong = []

    def work(k: int) -> None:
        for _ in range(30):
            if any((np.asarray(y) != z).any() for y, z in zip(run(inputs[k], *rest), wanted[k], strict=True)):
                wrong.append(k)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
