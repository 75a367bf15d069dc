"""The traceable FFI custom call of one compiled kernel (``jax.ffi.ffi_call``)."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from jcuts.base import fingerprint, knobs
from jcuts.base.errors import IRError
from jcuts.codegen.artifact import CompiledKernel
from jcuts.codegen.cuda.toolchain.image import is_image
from jcuts.xla import cpu_launcher, scratch

ALIGNMENT = 64  # bytes: of every scratch slot, as in custom_calls/launch_cpu.cc


def pool_threads() -> int:
    """Size of XLA:CPU's intra-op pool as XLA chooses it (``NPROC``, else the usable cores), at most ``JCUTS_THREADS``.

    It bounds the threads of one launch and the scratch slots; a pool of another size is correct all the same.
    """
    threads = fingerprint.usable_cores()
    text = os.environ.get("NPROC", "")
    if text.isdigit() and int(text) > 0:
        threads = int(text)
    limit = knobs.current().threads
    return threads if limit is None else min(threads, limit)


def scratch_result_bytes(size: int, slots: int) -> int:
    """Size [B] of the extra scratch result: ``slots`` aligned slots of ``size`` bytes, and room to align the first."""
    if size == 0:
        return 0
    stride = -(-size // ALIGNMENT) * ALIGNMENT
    return slots * stride + ALIGNMENT


def call_kernel(
    kernel: CompiledKernel,
    *operands: Any,
    place: tuple[int | None, int] | None = None,
    aliases: Mapping[int, int] = MappingProxyType({}),
) -> tuple[jax.Array, ...]:
    """Calls a kernel as one XLA custom call; works under ``jit`` and eagerly.

    Operands and results are row-major (XLA inserts transposes where they are not).  The kernel is registered here if it
    was not; HLO holds its digest, never its address.  Scratch is an extra result that is dropped (`scratch`).
    Transformations do not enter the call: it is made at lowering, after them.

    Args:
        kernel: the compiled kernel.
        operands: arrays of ``kernel.inputs``' shapes and dtypes.
        place: of a CUDA kernel that writes a part of its result: the operand that becomes the result, None where the
            rest is undefined; and bytes before what is written.
        aliases: of a CUDA kernel that writes each element of some results where it has read that of an operand: numbers
            of operands -> of the results in their memory.
    Returns: arrays of ``kernel.outputs``' shapes and dtypes.
    Raises:
        IRError: an operand does not fit the kernel.
        NativeError: the native library cannot be used.
    """
    _check(kernel, operands)
    if is_image(kernel.object_code):
        from jcuts.xla import cuda_launcher

        return cuda_launcher.call_kernel(kernel, *operands, place=place, aliases=aliases)
    cpu_launcher.ensure_registered()
    cpu_launcher.add_kernel(kernel)
    slots = max(1, min(kernel.tiles, pool_threads()))
    results = [jax.ShapeDtypeStruct(shape, jax.numpy.dtype(dtype)) for shape, dtype in kernel.outputs]
    size = scratch.least_bytes(kernel.scratch_bytes, len(results))
    results += scratch.result_of(scratch_result_bytes(size, slots))
    call = jax.ffi.ffi_call(
        cpu_launcher.TARGET,
        results,
        has_side_effect=False,
        input_layouts=[tuple(range(len(shape))) for shape, _ in kernel.inputs],
        output_layouts=[tuple(range(len(result.shape))) for result in results],
    )
    outputs = call(
        *operands,
        digest=kernel.digest,
        num_outputs=np.int64(len(kernel.outputs)),
        scratch_bytes=np.int64(size),
        slots=np.int64(slots),
        tiles=np.int64(kernel.tiles),
    )
    return tuple(outputs[: len(kernel.outputs)])


def call_chain(
    digests: Sequence[str],
    wiring: Sequence[int],
    sizes: Sequence[int],
    operands: Sequence[Any],
    results: Sequence[Any],
    *,
    arena_bytes: int,
) -> tuple[jax.Array, ...]:
    """Calls kernels of this CPU in sequence as one XLA custom call (`xla.chains`), which must have been registered.

    What only they read lies in an arena that the call keeps from one execution to the next.

    Args:
        digests: of the kernels.
        wiring: per kernel its number of buffers, bytes into the arena where its scratch memory begins, and three
            numbers per buffer (its operands, its results): 0 for an operand of the call, 1 for a result, 2 for the
            arena; which; bytes into it.
        sizes: per kernel its tiles, bytes of a scratch slot, slots.
        operands, results: arrays, and what has the shapes and dtypes of the results.
    """
    attributes = chain_attributes(digests, wiring, sizes, arena_bytes)
    return _call_of_kernels(cpu_launcher.CHAIN, attributes, operands, results)


def chain_attributes(
    digests: Sequence[str], wiring: Sequence[int], sizes: Sequence[int], arena_bytes: int
) -> dict[str, Any]:
    """Attributes of a chain's call. Args: see `call_chain`."""
    return {
        "digests": "".join(f"{digest} " for digest in digests),
        "wiring": np.array(wiring, np.int64),
        "sizes": np.array(sizes, np.int64),
        "arena_bytes": np.int64(arena_bytes),
    }


def call_loop(
    chain: Mapping[str, Any],
    plan: Sequence[int],
    operands: Sequence[Any],
    results: Sequence[Any],
    *,
    length: int,
    reverse: bool,
) -> tuple[jax.Array, ...]:
    """Calls a loop over a chain of this CPU's kernels as one XLA custom call (`xla.chains.loop`).

    Args:
        chain: attributes of the body's chain (`call_chain`), with memory of the arena for what the loop carries.
        plan: numbers of feeds, drains, carried values and copies, then these (`custom_calls/launch_cpu_loop.h`).
        operands, results: arrays, and what has the shapes and dtypes of the results.
        length, reverse: turns, and whether the last one comes first.
    """
    more = {"length": np.int64(length), "reverse": np.int64(reverse), "plan": np.array(plan, np.int64)}
    return _call_of_kernels(cpu_launcher.LOOP, {**chain, **more}, operands, results)


def _call_of_kernels(
    target: str, attributes: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]
) -> tuple[jax.Array, ...]:
    """A custom call of several kernels on row-major operands."""
    cpu_launcher.ensure_registered()
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in results]
    shapes += scratch.result_of(scratch.least_bytes(0, len(shapes)))
    call = jax.ffi.ffi_call(
        target,
        shapes,
        has_side_effect=False,
        input_layouts=[tuple(range(len(jax.numpy.shape(x)))) for x in operands],
        output_layouts=[tuple(range(len(x.shape))) for x in shapes],
    )
    return tuple(call(*operands, **attributes)[: len(results)])


def _check(kernel: CompiledKernel, operands: tuple[Any, ...]) -> None:
    found = tuple((tuple(jax.numpy.shape(x)), jax.numpy.result_type(x).name) for x in operands)
    if found != kernel.inputs:
        raise IRError(
            f"kernel {kernel.digest} takes {kernel.inputs}, got {found}",
            digest=kernel.digest,
            expected=kernel.inputs,
            found=found,
        )
