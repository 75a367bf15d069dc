"""CPU custom calls: links kernels into the process, registers them with the native launcher and the launcher with XLA.

A kernel travels through HLO by digest.  An executable that comes out of JAX's persistent compilation cache may name a
kernel which this process has never seen; the launcher then asks ``_resolve``, which reads the object cache.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

from jcuts.base.errors import NativeError
from jcuts.codegen.artifact import CompiledKernel
from jcuts.xla import jit_linker, native_library, object_cache

log = logging.getLogger("jcuts.register")

TARGET = "jcuts_cpu_launch"
STATE_TYPE = "jcuts_cpu_launch_state"
CHAIN = "jcuts_cpu_chain"
CHAIN_STATE_TYPE = "jcuts_cpu_chain_state"
LOOP = "jcuts_cpu_loop"
LOOP_STATE_TYPE = "jcuts_cpu_loop_state"
TARGETS = (TARGET, CHAIN, LOOP)
"""Custom calls of kernels of this CPU."""
PLATFORM = "cpu"

_lock = threading.RLock()
_addresses: dict[str, int] = {}
_known: dict[str, CompiledKernel] = {}
_target_registered = False
_callback: Any = None  # the launcher holds the pointer: the object must live as long


def add_kernel(
    kernel: CompiledKernel, *, persist: bool = True, link: Callable[[bytes, str], int] = jit_linker.link
) -> int:
    """Links a kernel and registers its digest; a known digest is left as it is.

    Args:
        kernel: from ``codegen.cpu.compile``, or `xla.object_cache.fetch`.
        persist: also write it to the object cache (a cache that cannot be written is only logged).
        link: makes an address of object code and a symbol.
    Returns: address of the entry point, valid for the life of the process.
    Raises:
        NativeError: no native library, or the object code cannot be linked here.
    """
    with _lock:
        address = _addresses.get(kernel.digest)
        if address is not None:
            return address
        lib = native_library.load()
        address = link(kernel.object_code, kernel.symbol)
        lib.jcuts_register(kernel.digest.encode(), address)
        _addresses[kernel.digest] = address
        _known[kernel.digest] = kernel
    if persist:
        object_cache.store(kernel)
    return address


def kernel_of(digest: str) -> CompiledKernel | None:
    """The kernel of a digest, of this process or of the object cache."""
    with _lock:
        known = _known.get(digest)
    return known or object_cache.fetch(digest)


def is_known(digest: str) -> bool:
    """Whether this process can run the kernel of this digest without the object cache."""
    with _lock:
        return digest in _addresses


def forget(digest: str) -> None:
    """Drops a digest (for tests): the next executable that names it goes through the object cache.

    Executables that hold the kernel keep working, since linked code is never freed.
    """
    with _lock:
        _known.pop(digest, None)
        if _addresses.pop(digest, None) is not None:
            native_library.load().jcuts_unregister(digest.encode())


def _resolve(digest: bytes) -> int:
    """Called by the launcher, from any thread, for a digest that is not registered."""
    try:
        kernel = object_cache.fetch(digest.decode())
        if kernel is None:
            return 0
        add_kernel(kernel, persist=False)
        return 1
    except Exception:  # nothing may propagate into C; the launcher reports the digest as unknown
        log.exception("kernel %r cannot be loaded from the object cache", digest)
        return 0


# A function object of its own: JAX changes the argument types of `ctypes.pythonapi.PyCapsule_New`.
_CAPSULE_NEW = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
_capsule_new = _CAPSULE_NEW(("PyCapsule_New", ctypes.pythonapi))


def register_launcher(
    target: str, state: str, platform: str, name: str, type_pointers: tuple[int, int], stages: Mapping[str, Any]
) -> None:
    """Registers a launcher's state type and its handler with XLA.

    Args:
        target, state, platform: what XLA is to call the handler and its state, and on which platform.
        name: what messages call the launcher.
        type_pointers: addresses of the state's id and info. stages: FFI stage -> function of the library.
    Raises:
        NativeError: XLA refuses it.
    """
    import jax

    try:
        identity, info = type_pointers
        jax.ffi.register_ffi_type(
            state,
            {"type_id": _capsule_new(identity, None, None), "type_info": _capsule_new(info, None, None)},
            platform=platform,
        )
        jax.ffi.register_ffi_target(
            target, {stage: jax.ffi.pycapsule(function) for stage, function in stages.items()}, platform=platform
        )
    except Exception as error:  # XLA's own error types differ from version to version
        raise NativeError(
            f"XLA refused jcuts' {name}: {error}. Rebuild jcuts against the installed jaxlib (`make native`)",
            reason=str(error),
        ) from error


def ensure_registered() -> None:
    """Registers the launcher with XLA, once per process.

    Starts JAX's CPU backend if it is not running: XLA wants the state's type before the handler that makes it, and
    registrations made before the backend exists are replayed in another order.

    Raises:
        NativeError: no native library, or XLA refuses it.
    """
    global _target_registered, _callback
    if _target_registered:
        return
    import jax

    lib = native_library.load()
    jax.devices(PLATFORM)
    with _lock:
        if _target_registered:
            return
        for target, state, name, kind in (
            (TARGET, STATE_TYPE, "launcher", "state"),
            (CHAIN, CHAIN_STATE_TYPE, "launcher of chains", "chain"),
            (LOOP, LOOP_STATE_TYPE, "launcher of loops", "loop"),
        ):
            types = getattr(lib, f"jcuts_{kind}_type_id")(), getattr(lib, f"jcuts_{kind}_type_info")()
            stages = {stage: getattr(lib, f"{target}_{stage}") for stage in ("instantiate", "execute")}
            register_launcher(target, state, PLATFORM, name, types, stages)
        _callback = native_library.RESOLVER(_resolve)
        lib.jcuts_set_resolver(_callback)
        # A compilation that outlives the interpreter must not call into it.
        atexit.register(lib.jcuts_set_resolver, native_library.RESOLVER(0))
        _target_registered = True
