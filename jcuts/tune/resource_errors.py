"""Classifies transient resource errors of tuning workers (memory, disk, device), not held against a candidate."""

from __future__ import annotations

import errno

OUT_OF_MEMORY = ("RESOURCE_EXHAUSTED", "OUT_OF_MEMORY")
"""In messages of XLA and of the CUDA driver: others hold the memory; the candidate is not to blame."""
CONTEXT_BYTES = 512 << 20
"""About what JAX takes on a GPU before it computes anything."""


def is_memory(error: Exception) -> bool:
    """Whether an error says that memory ran out, on the host or on the device."""
    if isinstance(error, MemoryError) or any(name in str(error) for name in OUT_OF_MEMORY):
        return True
    return no_backend(error) and _no_context()


def is_disk(error: Exception) -> bool:
    """Whether an error says that a file could not be written for want of space (NumPy's gives no number)."""
    full = (errno.ENOSPC, errno.EDQUOT)
    return isinstance(error, OSError) and (error.errno in full or "requested and" in str(error))


def no_backend(error: Exception) -> bool:
    """JAX found no device in this process, although the parent uses one: the GPU is full or another's alone."""
    return "Unable to initialize backend" in str(error)


def _no_context() -> bool:
    """Whether the driver has no memory for another context: JAX does not say why it finds no device."""
    from jcuts.base.errors import NativeError
    from jcuts.tune.measure import cuda_driver

    try:
        return cuda_driver.device().free_bytes() < CONTEXT_BYTES
    except NativeError as error:
        return any(name in error.message for name in OUT_OF_MEMORY)
