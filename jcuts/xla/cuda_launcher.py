"""CUDA custom calls: the native launcher (``launch_cuda.cc``), its registration as typed FFI handler, the traceable
call.

The CUDA counterpart of `cpu_launcher` and `cpu_ffi_call`.  A kernel's object code is an `Image`; HLO names it by
digest, and the launcher loads it on a device when an executable first runs there.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import logging
import threading
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from jcuts.base.errors import CacheError, NativeError
from jcuts.codegen.artifact import CompiledKernel
from jcuts.codegen.cuda.toolchain.image import Image, is_image
from jcuts.xla import native_library, object_cache, scratch
from jcuts.xla.cpu_launcher import register_launcher

log = logging.getLogger("jcuts.cuda")

LIBRARY = "libjcuts_cuda.so"
DRIVER = "libcuda.so.1"
TARGET = "jcuts_cuda_launch"
STATE_TYPE = "jcuts_cuda_launch_state"
CHAIN = "jcuts_cuda_chain"
CHAIN_STATE = "jcuts_cuda_chain_state"
PLATFORM = "CUDA"
KEEP = "jcuts_keep"
MARK = "jcuts_mark"
HOOK = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_void_p)
"""Is told the number of a mark and the CUDA stream that it is executed on."""
_TEXT = 2048
_CLOCK_KHZ = 13
"""CU_DEVICE_ATTRIBUTE_CLOCK_RATE."""
_MEMORY_CLOCK_KHZ = 36
"""CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE."""
_MEMORY_BUS_BITS = 37
"""CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH."""

Place = tuple[int | None, int]
"""Of a kernel that updates an operand in place (`lower.sliced_output`): the operand's number, bytes before what it
writes.
"""

_lock = threading.RLock()
_known: dict[str, CompiledKernel] = {}
_target_registered = False
_callback: Any = None  # the launcher holds the pointer: the object must live as long


@functools.cache
def load() -> ctypes.CDLL:
    """The launcher, loaded once and checked.

    Raises:
        NativeError: missing, unloadable, not jcuts' library, or built for another FFI version.
    """
    return native_library.opened(
        native_library.library_path(LIBRARY), "CUDA launcher", _declare, "jcuts_cuda_ffi_api_version"
    )


def _declare(lib: ctypes.CDLL) -> None:
    pointer, size, text = ctypes.c_void_p, ctypes.c_int64, ctypes.c_char_p
    signatures = {
        "jcuts_cuda_ffi_api_version": (ctypes.c_int, []),
        "jcuts_cuda_state_type_id": (pointer, []),
        "jcuts_cuda_state_type_info": (pointer, []),
        "jcuts_cuda_chain_type_id": (pointer, []),
        "jcuts_cuda_chain_type_info": (pointer, []),
        "jcuts_cuda_set_driver": (ctypes.c_int, [text]),
        "jcuts_cuda_driver": (ctypes.c_int, [text, size]),
        "jcuts_cuda_executions": (size, []),
        "jcuts_cuda_register": (
            ctypes.c_int,
            [text, text, text, size, size, ctypes.POINTER(text), ctypes.POINTER(size), ctypes.POINTER(size)],
        ),
        "jcuts_cuda_unregister": (ctypes.c_int, [text]),
        "jcuts_cuda_is_registered": (ctypes.c_int, [text]),
        "jcuts_cuda_set_resolver": (None, [native_library.RESOLVER]),
        "jcuts_cuda_launch": (
            ctypes.c_int,
            [text, ctypes.c_int, pointer, ctypes.POINTER(pointer), size, pointer, text, size],
        ),
        "jcuts_cuda_set_hook": (None, [HOOK]),
        KEEP: (pointer, [pointer]),
        MARK: (pointer, [pointer]),
    }
    native_library.declare(lib, signatures)


def available() -> str:
    """'' if this machine's GPUs can run kernels, else the reason."""
    try:
        lib = load()
    except NativeError as error:
        return error.message
    text = ctypes.create_string_buffer(_TEXT)
    return text.value.decode(errors="replace") if lib.jcuts_cuda_driver(text, _TEXT) else ""


def driver_version(library: str = DRIVER) -> tuple[int, int] | None:
    """CUDA version that the installed driver supports; None where there is none. Starts nothing on a device."""
    number = ctypes.c_int()
    try:
        if ctypes.CDLL(library).cuDriverGetVersion(ctypes.byref(number)):
            return None
    except (OSError, AttributeError):
        return None
    return number.value // 1000, number.value % 1000 // 10


def memory_bandwidth(library: str = DRIVER) -> float:
    """Of the first device's memory by its attributes (bus width, memory clock) [byte/s]; 0 where they are not said."""
    clock, width = (_attribute(number, library) for number in (_MEMORY_CLOCK_KHZ, _MEMORY_BUS_BITS))
    return 2000 * clock * width / 8  # twice per clock of kHz


def highest_clock(library: str = DRIVER) -> float:
    """Of the first device's multiprocessors by its attributes [Hz]; 0 where they do not say."""
    return 1000 * _attribute(_CLOCK_KHZ, library)


def _attribute(number: int, library: str) -> int:
    """An attribute of the first device, 0 where there is none. Starts nothing on a device."""
    found = ctypes.c_int()
    try:
        if ctypes.CDLL(library).cuDeviceGetAttribute(ctypes.byref(found), number, 0):
            return 0
    except (OSError, AttributeError):
        return 0
    return found.value


def too_old(driver: tuple[int, int] | None, toolkit: tuple[int, int] | None) -> str:
    """'' if a driver can load an assembler's output, else the reason; unknown versions count as compatible.

    Machine code of one CUDA toolkit runs on drivers of the same major version and of newer ones (CUDA Compatibility,
    "Minor version compatibility").
    """
    if driver is None or toolkit is None or driver[0] >= toolkit[0]:
        return ""
    return (
        f"the driver supports CUDA {driver[0]}.{driver[1]}, the assembler is of CUDA {toolkit[0]}.{toolkit[1]}: update "
        f"the driver, or install the CUDA {driver[0]} packages of the compilers"
    )


def add_kernel(kernel: CompiledKernel, *, persist: bool = True) -> None:
    """Registers a kernel with the launcher; a known digest is left as it is.

    Args: persist: also write it to the object cache.
    Raises: NativeError: no launcher, or the kernel holds no CUDA image.
    """
    with _lock:
        if kernel.digest not in _known:
            _register_image(kernel)
            _known[kernel.digest] = kernel
    if persist:
        object_cache.store(kernel)


def _register_image(kernel: CompiledKernel) -> None:
    try:
        image = Image.unpack(kernel.object_code)
    except CacheError as error:
        raise NativeError(f"kernel {kernel.digest}: {error.message}", kernel=kernel.digest) from error
    numbers: list[int] = []
    arguments: list[int] = []
    for launch in image.launches:
        numbers += [*launch.grid, *launch.block, *launch.cluster, launch.shared, int(launch.cooperative)]
        numbers += [len(launch.arguments), int(launch.waits)]
        arguments += [n for pair in launch.arguments for n in pair]
    symbols = [launch.symbol.encode() for launch in image.launches]
    refused = load().jcuts_cuda_register(
        kernel.digest.encode(),
        image.region.encode(),
        image.cubin,
        len(image.cubin),
        len(symbols),
        (ctypes.c_char_p * len(symbols))(*symbols),
        (ctypes.c_int64 * len(numbers))(*numbers),
        (ctypes.c_int64 * len(arguments))(*arguments),
    )
    if refused:
        raise NativeError(
            f"the launcher refused kernel {kernel.digest}: launch parameters out of range", kernel=kernel.digest
        )


def kernel_of(digest: str) -> CompiledKernel | None:
    """The kernel of a digest, of this process or of the object cache."""
    with _lock:
        known = _known.get(digest)
    return known or object_cache.fetch(digest)


def executions() -> int:
    """How often XLA has called the launcher: calls inside a CUDA graph are recorded once, replays do not count."""
    return int(load().jcuts_cuda_executions())


def forget(digest: str) -> None:
    """Drops a digest (for tests): the next executable that names it goes through the object cache."""
    with _lock:
        if _known.pop(digest, None) is not None:
            load().jcuts_cuda_unregister(digest.encode())


def launch(kernel: CompiledKernel, device: int, stream: int, buffers: list[int], scratch: int) -> None:
    """Launches a kernel on raw device addresses, as XLA would (for measuring: no JAX takes part).

    Raises: NativeError: the driver refused; its sentence names the kernel.
    """
    add_kernel(kernel, persist=False)
    table = (ctypes.c_void_p * len(buffers))(*buffers)
    text = ctypes.create_string_buffer(_TEXT)
    if load().jcuts_cuda_launch(kernel.digest.encode(), device, stream, table, len(buffers), scratch, text, _TEXT):
        raise NativeError(text.value.decode(errors="replace"), kernel=kernel.digest)


def _resolve(digest: bytes) -> int:
    """Called by the launcher, from any thread, for a digest that is not registered."""
    try:
        kernel = object_cache.fetch(digest.decode())
        if kernel is None or not is_image(kernel.object_code):
            return 0
        add_kernel(kernel, persist=False)
        return 1
    except Exception:  # nothing may propagate into C; the launcher reports the digest as unknown
        log.exception("kernel %r cannot be loaded from the object cache", digest)
        return 0


def ensure_registered() -> None:
    """Registers the launcher with XLA's CUDA platform, once per process (starts that backend: `register` says why).

    Raises:
        NativeError: no launcher, or XLA refuses it.
    """
    global _target_registered, _callback
    if _target_registered:
        return
    lib = load()
    jax.devices("cuda")
    with _lock:
        if _target_registered:
            return
        for target, state, kind in ((TARGET, STATE_TYPE, "state"), (CHAIN, CHAIN_STATE, "chain")):
            pointers = tuple(getattr(lib, f"jcuts_cuda_{kind}_type_{what}")() for what in ("id", "info"))
            stages = {s: getattr(lib, f"{target}_{s}") for s in ("instantiate", "initialize", "execute")}
            register_launcher(target, state, PLATFORM, "CUDA launcher", pointers, stages)
        _callback = native_library.RESOLVER(_resolve)
        lib.jcuts_cuda_set_resolver(_callback)
        # A compilation that outlives the interpreter must not call into it.
        atexit.register(lib.jcuts_cuda_set_resolver, native_library.RESOLVER(0))
        _target_registered = True


@functools.cache
def _register(name: str, platform: str) -> None:
    execute = jax.ffi.pycapsule(getattr(load(), name))
    try:
        jax.ffi.register_ffi_target(name, {"execute": execute}, platform=platform)
    except Exception as error:  # XLA's own error types differ from version to version
        raise NativeError(f"XLA refused {name}: {error}", reason=str(error)) from error


def begin(x: jax.Array) -> jax.Array:
    """Identity with a timing mark: on a GPU the hook gets mark 0 before anything that depends on the result runs.

    Raises: NativeError: no launcher, or XLA refuses the call.
    """
    if jax.default_backend() == "cpu":
        return x
    _register(MARK, PLATFORM)
    same = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.ffi.ffi_call(MARK, same, has_side_effect=True, input_output_aliases={0: 0})(x, number=np.int64(0))


def keep(arrays: Sequence[jax.Array]) -> jax.Array:
    """A number that depends on every element of the arrays, so that XLA must compute them (its value means nothing).

    On a GPU the hook is told of mark 1 when they have been launched.

    Raises: NativeError: no launcher, or XLA refuses the call.
    """
    number = jax.ShapeDtypeStruct((), np.float32)
    if jax.default_backend() == "cpu":
        _register(KEEP, "cpu")
        return jax.ffi.ffi_call(KEEP, number)(*arrays)
    _register(MARK, PLATFORM)
    return jax.ffi.ffi_call(MARK, number, has_side_effect=True)(*arrays, number=np.int64(1))


def set_hook(hook: Any) -> None:
    """Sets the callback for timing marks, a `HOOK`, or None. The caller keeps it alive."""
    load().jcuts_cuda_set_hook(hook or HOOK(0))


def call_kernel(
    kernel: CompiledKernel,
    *operands: Any,
    place: Place | None = None,
    aliases: Mapping[int, int] = MappingProxyType({}),
) -> tuple[jax.Array, ...]:
    """Calls a CUDA kernel as one XLA custom call (for images; `cpu_ffi_call.call_kernel` dispatches here).

    Scratch memory is an extra result (`scratch`): a handler that XLA captures into a graph must not allocate.

    Args: place: the operand that becomes the result (None: none does), and how many bytes of the result lie before what
        the kernel writes. aliases: numbers of operands -> of the results that they become.
    """
    ensure_registered()
    add_kernel(kernel)
    results = [jax.ShapeDtypeStruct(shape, jax.numpy.dtype(dtype)) for shape, dtype in kernel.outputs]
    size = scratch.least_bytes(kernel.scratch_bytes, len(results))
    results += scratch.result_of(size)
    call = jax.ffi.ffi_call(
        TARGET,
        results,
        has_side_effect=False,
        input_layouts=[tuple(range(len(shape))) for shape, _ in kernel.inputs],
        output_layouts=[tuple(range(len(result.shape))) for result in results],
        input_output_aliases=(dict(aliases) or None) if place is None or place[0] is None else {place[0]: 0},
    )
    outputs = call(
        *operands,
        digest=kernel.digest,
        num_outputs=np.int64(len(kernel.outputs)),
        scratch_bytes=np.int64(size),
        start=np.int64(0 if place is None else place[1]),
    )
    return tuple(outputs[: len(kernel.outputs)])


def call_chain(
    digests: Sequence[str],
    wiring: Sequence[int],
    operands: Sequence[Any],
    results: Sequence[Any],
    *,
    scratch_bytes: int,
    aliases: dict[int, int],
) -> tuple[jax.Array, ...]:
    """Calls kernels in sequence as one XLA custom call (`xla.chains`).

    Args:
        digests: of the kernels.
        wiring: per kernel its number of buffers, bytes into the call's scratch memory where its own begins, and three
            numbers per buffer (its operands, its results): 0 for an operand of the call, 1 for a result, 2 for scratch
            memory; which; bytes into it.
        operands, results: arrays, and what has the shapes and dtypes of the results.
        aliases: number of an operand that is overwritten -> number of the result that it becomes.
    """
    ensure_registered()
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in results]
    size = scratch.least_bytes(scratch_bytes, len(shapes))
    shapes += scratch.result_of(size)
    call = jax.ffi.ffi_call(
        CHAIN,
        shapes,
        has_side_effect=False,
        input_layouts=[tuple(range(len(jax.numpy.shape(x)))) for x in operands],
        output_layouts=[tuple(range(len(x.shape))) for x in shapes],
        input_output_aliases=aliases or None,
    )
    outputs = call(
        *operands,
        digests="".join(f"{digest} " for digest in digests),
        wiring=np.array(wiring, np.int64),
        scratch_bytes=np.int64(size),
    )
    return tuple(outputs[: len(results)])
