"""Small kernels in LLVM IR for the tests of the launcher: they need neither the code generator nor numba."""

from __future__ import annotations

from llvmlite import binding

from jcuts.base.fingerprint import digest
from jcuts.codegen.artifact import CompiledKernel

_LOOP = """
declare float @tanhf(float)
{declarations}
define void @{symbol}(i8** %buffers, i64 %tile_begin, i64 %tile_end, i8* %scratch) {{
entry:
  %begin = mul i64 %tile_begin, {block}
  %end = mul i64 %tile_end, {block}
  %p0 = bitcast i8** %buffers to float**
  %x = load float*, float** %p0
  %p1 = getelementptr float*, float** %p0, i64 1
  %y = load float*, float** %p1
  {setup}
  br label %loop
loop:
  %i = phi i64 [%begin, %entry], [%next, %loop]
  %xi = getelementptr float, float* %x, i64 %i
  %v = load float, float* %xi
  {body}
  %yi = getelementptr float, float* %y, i64 %i
  store float %r, float* %yi
  %next = add i64 %i, 1
  %more = icmp slt i64 %next, %end
  br i1 %more, label %loop, label %exit
exit:
  ret void
}}
"""


def compile_ir(text: str) -> bytes:
    """LLVM IR to position-independent object code of this machine."""
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    target = binding.Target.from_default_triple()
    machine = target.create_target_machine(reloc="pic", opt=2)
    module = binding.parse_assembly(text)
    module.verify()
    return machine.emit_object(module)


def elementwise(
    body: str,
    *,
    tiles: int,
    block: int,
    setup: str = "",
    declarations: str = "",
    scratch_bytes: int = 0,
    symbol: str = "kernel",
) -> CompiledKernel:
    """A kernel over ``f32[tiles * block]``: ``body`` computes ``%r`` from ``%v``, one element at a time."""
    text = _LOOP.format(block=block, body=body, setup=setup, declarations=declarations, symbol=symbol)
    aval = ((tiles * block,), "float32")
    return CompiledKernel(
        digest=digest("test kernel", text, tiles, scratch_bytes),
        symbol=symbol,
        object_code=compile_ir(text),
        tiles=tiles,
        scratch_bytes=scratch_bytes,
        inputs=(aval,),
        outputs=(aval,),
    )


def affine(tiles: int, block: int, scale: float = 2.0, shift: float = 1.0) -> CompiledKernel:
    """``y = scale * x + shift`` in float32; choose constants that float32 holds exactly."""
    return elementwise(
        f"%m = fmul float %v, {scale:e}\n  %r = fadd float %m, {shift:e}", tiles=tiles, block=block
    )


def tanh(tiles: int, block: int) -> CompiledKernel:
    """``y = tanhf(x)``: needs libm."""
    return elementwise("%r = call float @tanhf(float %v)", tiles=tiles, block=block)


def through_scratch(tiles: int, block: int) -> CompiledKernel:
    """``y = 3 * x`` where ``3`` is read back, one element late, from scratch that the tile filled: shared scratch shows."""
    body = """
  %local = sub i64 %i, %begin
  %word = urem i64 %local, 1024
  %si = getelementptr volatile_float, float* %s, i64 %word
  store volatile float %v, float* %si
  %back = load volatile float, float* %si
  %r = fmul float %back, 3.0
""".replace("volatile_float", "float")
    return elementwise(
        body, tiles=tiles, block=block, setup="%s = bitcast i8* %scratch to float*", scratch_bytes=4096
    )
