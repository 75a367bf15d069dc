"""Smoke tests of ``jcuts doctor``: hand-written LLVM IR through the CPU custom call, and a call of ``optimize``."""

from __future__ import annotations

from jcuts.base import keys
from jcuts.base.errors import NativeError
from jcuts.codegen.artifact import CompiledKernel

TILES = 16
BLOCK = 1024

_ELEMENTWISE = """
{declarations}
define void @{symbol}(i8** %buffers, i64 %tile_begin, i64 %tile_end, i8* %scratch) {{
entry:
  %begin = mul i64 %tile_begin, {block}
  %end = mul i64 %tile_end, {block}
  %p0 = bitcast i8** %buffers to float**
  %x = load float*, float** %p0
  %p1 = getelementptr float*, float** %p0, i64 1
  %y = load float*, float** %p1
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


def elementwise_ir(body: str, *, symbol: str, block: int, declarations: str = "") -> str:
    """LLVM IR of a kernel ``y[i] = f(x[i])`` over tiles of ``block`` floats: without the code generator.

    Args: body: computes ``%r`` from ``%v``; declarations: of the functions that it calls.
    """
    return _ELEMENTWISE.format(body=body, symbol=symbol, block=block, declarations=declarations)


def compile_ir(text: str) -> bytes:
    """LLVM IR to position-independent object code of this machine.

    Raises:
        NativeError: llvmlite is missing.
    """
    try:
        from llvmlite import binding
    except ImportError as error:
        raise NativeError(f"llvmlite cannot be imported ({error}): pip install numba") from error
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    machine = binding.Target.from_default_triple().create_target_machine(reloc="pic", opt=2)
    module = binding.parse_assembly(text)
    module.verify()
    return machine.emit_object(module)


def smoke_kernel() -> CompiledKernel:
    """``f32[TILES * BLOCK] -> 2 x + 1`` compiled here and now.

    Raises:
        NativeError: llvmlite is missing.
    """
    text = elementwise_ir("%m = fmul float %v, 2.0\n  %r = fadd float %m, 1.0", symbol="jcuts_smoke", block=BLOCK)
    aval = ((TILES * BLOCK,), "float32")
    return CompiledKernel(
        digest=keys.smoke_kernel(text),
        symbol="jcuts_smoke",
        object_code=compile_ir(text),
        tiles=TILES,
        scratch_bytes=0,
        inputs=(aval,),
        outputs=(aval,),
    )


def run_kernel() -> str:
    """Runs the kernel through ``jax.jit`` and compares; returns a sentence about it.

    Raises:
        NativeError: it cannot run, or the numbers are wrong.
    """
    import jax
    import numpy as np

    from jcuts.xla.cpu_ffi_call import call_kernel, pool_threads

    kernel = smoke_kernel()
    x = np.arange(TILES * BLOCK, dtype=np.float32)
    with jax.default_device(jax.devices("cpu")[0]):
        out = np.asarray(jax.jit(lambda x: call_kernel(kernel, x)[0])(x))
    if not np.array_equal(out, x * 2 + 1):
        wrong = int((out != x * 2 + 1).sum())
        raise NativeError(f"a kernel gave {wrong} wrong numbers of {x.size}: please report this machine", wrong=wrong)
    return f"{TILES} tiles on up to {pool_threads()} threads through jax.jit, every number right"


def run_function() -> str:
    """Runs a small function through ``jcuts.optimize`` and compares with ``jax.jit``; returns a sentence about it.

    Raises:
        NativeError: the numbers differ.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    import jcuts

    def fn(x: jax.Array) -> jax.Array:
        return jnp.tanh(x * 0.5) + jnp.maximum(x, 0.0)

    x = jnp.linspace(-4.0, 4.0, 4096, dtype=jnp.float32)
    ours = np.asarray(jcuts.optimize(fn, tune="off")(x))
    theirs = np.asarray(jax.jit(fn)(x))
    if not np.allclose(ours, theirs, rtol=1e-5, atol=1e-6):
        error = float(np.abs(ours - theirs).max())
        raise NativeError(f"an optimised function differs from jax.jit by {error:g}: please report this", error=error)
    return "jcuts.optimize agrees with jax.jit on a small function"
