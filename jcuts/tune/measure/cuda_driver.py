"""The CUDA driver through ctypes: memory, streams, events and graphs of one device, without JAX.

For the measuring process.  Every call that fails is a `NativeError` that names it; after an illegal access or a hang
the context is lost, and the process must end (`is_lost`).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from jcuts.base.errors import NativeError

LIBRARY = "libcuda.so.1"
_LOST = frozenset({700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 720, 999})
"""Errors after which nothing works in this context: illegal address, launch timeout, illegal instruction, ..."""
_ATTRIBUTE_L2 = 38
_ATTRIBUTE_CLOCK = 36
"""Of the memory [kHz]."""
_ATTRIBUTE_BUS = 37
"""Of the memory [bits]."""
_CAPTURE_THREAD_LOCAL = 1
_NAME_BYTES = 256

Pointer = ctypes.c_void_p
Size = ctypes.c_size_t


def total_bytes(device: int = 0, library: str = LIBRARY) -> int:
    """Memory of a device [B], found out without using it; 0 where there is none."""
    try:
        lib = ctypes.CDLL(library)
    except OSError:
        return 0
    handle, total = ctypes.c_int(), Size()
    if lib.cuInit(ctypes.c_uint(0)) or lib.cuDeviceGet(ctypes.byref(handle), ctypes.c_int(device)):
        return 0
    return 0 if lib.cuDeviceTotalMem_v2(ctypes.byref(total), handle) else int(total.value)


ROOMY = 32 << 30
"""Memory of a GPU [B] from which on what idle processes hold of it (some hundred megabytes each) does not matter."""


def is_roomy() -> bool:
    """Whether processes that wait may keep their memory of the GPU: getting it anew takes a second or two."""
    return total_bytes() >= ROOMY


class Driver:
    """One CUDA device with its primary context current on this thread.

    Raises: NativeError where there is no driver or no such device.
    """

    def __init__(self, device: int = 0, library: str = LIBRARY) -> None:
        try:
            self.lib = ctypes.CDLL(library)
        except OSError as error:
            raise NativeError(f"the CUDA driver cannot be opened: {error}", library=library) from error
        self.ordinal = device
        self.call("cuInit", ctypes.c_uint(0))
        handle, context = ctypes.c_int(), Pointer()
        self.call("cuDeviceGet", ctypes.byref(handle), ctypes.c_int(device))
        self.handle = handle
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)
        self.context = context
        self.call("cuCtxSetCurrent", context)
        stream = Pointer()
        self.call("cuStreamCreate", ctypes.byref(stream), ctypes.c_uint(1))
        self.stream = int(stream.value or 0)

    def call(self, name: str, *arguments: object) -> None:
        """One driver call. Raises NativeError with attributes ``call`` and ``code``."""
        code = int(getattr(self.lib, name)(*arguments))
        if code:
            raise NativeError(f"{name} failed: {self.text(code)}", call=name, code=code)

    def text(self, code: int) -> str:
        """Name of an error."""
        name = ctypes.c_char_p()
        self.lib.cuGetErrorName(ctypes.c_int(code), ctypes.byref(name))
        return f"{(name.value or b'CUDA error').decode()} ({code})"

    # -- memory ---------------------------------------------------------------------------------------------------
    def free_bytes(self) -> int:
        """Memory that is free on the device [B]."""
        free, total = Size(), Size()
        self.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return int(free.value)

    def total_bytes(self) -> int:
        """Memory of the device, whoever holds it [B]."""
        free, total = Size(), Size()
        self.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return int(total.value)

    def allocate(self, size: int) -> int:
        """Device memory; its address."""
        pointer = Pointer()
        self.call("cuMemAlloc_v2", ctypes.byref(pointer), Size(max(1, size)))
        return int(pointer.value or 0)

    def release(self, address: int) -> None:
        """Frees what `allocate` gave."""
        self.call("cuMemFree_v2", Pointer(address))

    def fill(self, address: int, value: int, size: int) -> None:
        """Sets bytes, on the stream: kernels launched there do not wait for the default stream."""
        if size:
            self.call("cuMemsetD8Async", Pointer(address), ctypes.c_ubyte(value), Size(size), Pointer(self.stream))

    def upload(self, address: int, values: np.ndarray) -> None:
        """Host to device."""
        data = np.ascontiguousarray(values)
        if data.nbytes:
            self.call(
                "cuMemcpyHtoDAsync_v2",
                Pointer(address),
                Pointer(data.ctypes.data),
                Size(data.nbytes),
                Pointer(self.stream),
            )
            self.synchronize()  # ``data`` may be gone after this

    def copy(self, to: int, source: int, size: int) -> None:
        """Device to device, on the stream."""
        if size:
            self.call("cuMemcpyDtoDAsync_v2", Pointer(to), Pointer(source), Size(size), Pointer(self.stream))

    def download(self, address: int, size: int) -> np.ndarray:
        """Device to host, as bytes; after everything on the stream."""
        data = np.empty(size, np.uint8)
        if size:
            self.call(
                "cuMemcpyDtoHAsync_v2", Pointer(data.ctypes.data), Pointer(address), Size(size), Pointer(self.stream)
            )
            self.synchronize()
        return data

    # -- running --------------------------------------------------------------------------------------------------
    @contextmanager
    def current(self) -> Iterator[None]:
        """The device's context is the calling thread's inside."""
        self.call("cuCtxPushCurrent_v2", self.context)
        try:
            yield
        finally:
            popped = Pointer()
            self.call("cuCtxPopCurrent_v2", ctypes.byref(popped))

    def function(self, code: bytes, name: str) -> ctypes.c_void_p:
        """A kernel of a cubin, or of PTX that the driver compiles; never unloaded."""
        module, function = Pointer(), Pointer()
        self.call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(code))
        self.call("cuModuleGetFunction", ctypes.byref(function), module, ctypes.c_char_p(name.encode()))
        return function

    def launch(self, function: ctypes.c_void_p, stream: int, *arguments: Any) -> None:
        """Launches one thread of a kernel. Args: arguments: ctypes values."""
        table = (Pointer * len(arguments))(*(ctypes.addressof(a) for a in arguments))
        one = ctypes.c_uint(1)
        self.call(
            "cuLaunchKernel", function, one, one, one, one, one, one, ctypes.c_uint(0), Pointer(stream), table, None
        )

    def launch_grid(
        self, function: ctypes.c_void_p, blocks: int, threads: int, arguments: Sequence[Any], *, together: bool = False
    ) -> None:
        """Launches blocks of threads on the stream.

        Args: arguments: ctypes values; together: a cooperative launch: all blocks are resident at once, or it fails.
        """
        table = (Pointer * len(arguments))(*(ctypes.addressof(a) for a in arguments))
        one = ctypes.c_uint(1)
        shape = (ctypes.c_uint(blocks), one, one, ctypes.c_uint(threads), one, one, ctypes.c_uint(0))
        if together:
            self.call("cuLaunchCooperativeKernel", function, *shape, Pointer(self.stream), table)
        else:
            self.call("cuLaunchKernel", function, *shape, Pointer(self.stream), table, None)

    def seconds(self, work: Callable[[], None]) -> float:
        """Time on the device of what ``work`` launches on the stream [s]."""
        events = Events(self)
        try:
            return events.seconds(work)
        finally:
            events.close()

    def synchronize(self) -> None:
        """Waits for the stream."""
        self.call("cuStreamSynchronize", Pointer(self.stream))

    def attribute(self, number: int) -> int:
        """A device attribute."""
        value = ctypes.c_int()
        self.call("cuDeviceGetAttribute", ctypes.byref(value), ctypes.c_int(number), self.handle)
        return value.value

    @property
    def name(self) -> str:
        """As the driver says it, such as "NVIDIA H100 80GB HBM3"."""
        text = ctypes.create_string_buffer(_NAME_BYTES)
        self.call("cuDeviceGetName", text, ctypes.c_int(_NAME_BYTES), self.handle)
        return text.value.decode(errors="replace")

    @property
    def l2_bytes(self) -> int:
        """Size of the L2 cache [B]."""
        return self.attribute(_ATTRIBUTE_L2)

    def graph(self, work: Callable[[], None]) -> Graph:
        """What ``work`` launches on the stream, as a graph that can be launched again and again."""
        self.call("cuStreamBeginCapture_v2", Pointer(self.stream), ctypes.c_int(_CAPTURE_THREAD_LOCAL))
        captured = Pointer()
        try:
            work()
        finally:
            self.call("cuStreamEndCapture", Pointer(self.stream), ctypes.byref(captured))
        made = Pointer()
        self.call("cuGraphInstantiateWithFlags", ctypes.byref(made), captured, ctypes.c_ulonglong(0))
        self.call("cuGraphDestroy", captured)
        return Graph(self, made)


class Events:
    """A pair of CUDA events: the device's time from one to the other."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.events = [Pointer(), Pointer()]
        for event in self.events:
            driver.call("cuEventCreate", ctypes.byref(event), ctypes.c_uint(0))

    def seconds(self, work: Callable[[], None]) -> float:
        """Time that what ``work`` puts on the stream takes [s]."""
        self.record(0, self.driver.stream)
        work()
        self.record(1, self.driver.stream)
        return self.elapsed()

    def record(self, number: int, stream: int) -> None:
        """Puts one of them on a stream."""
        self.driver.call("cuEventRecord", self.events[number], Pointer(stream))

    def elapsed(self) -> float:
        """Time between them, once both have been [s]."""
        driver = self.driver
        driver.call("cuEventSynchronize", self.events[1])
        milliseconds = ctypes.c_float()
        name = "cuEventElapsedTime_v2" if hasattr(driver.lib, "cuEventElapsedTime_v2") else "cuEventElapsedTime"
        driver.call(name, ctypes.byref(milliseconds), self.events[0], self.events[1])
        return milliseconds.value * 1e-3

    def close(self) -> None:
        """Frees them."""
        for event in self.events:
            self.driver.call("cuEventDestroy_v2", event)


class Graph:
    """A CUDA graph of captured launches."""

    def __init__(self, driver: Driver, handle: ctypes.c_void_p) -> None:
        self.driver, self.handle = driver, handle
        self.events = Events(driver)

    def seconds(self) -> float:
        """Runs it once and gives its time between two events [s]."""
        driver = self.driver
        return self.events.seconds(lambda: driver.call("cuGraphLaunch", self.handle, Pointer(driver.stream)))

    def close(self) -> None:
        """Frees it."""
        self.driver.call("cuGraphExecDestroy", self.handle)
        self.events.close()


def bandwidth() -> float:
    """What the memory moves at most [B/s]; 0 where the driver does not say."""
    try:
        clock, width = (device().attribute(number) for number in (_ATTRIBUTE_CLOCK, _ATTRIBUTE_BUS))
    except NativeError:
        return 0.0
    return 2 * 1e3 * clock * width / 8


def is_lost(error: NativeError) -> bool:
    """Whether the context is beyond repair after this error."""
    return error.values.get("code") in _LOST


@functools.cache
def device() -> Driver:
    """The measuring process' device: the first visible one."""
    return Driver()
