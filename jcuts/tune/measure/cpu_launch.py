"""Runs CPU kernels directly through their C ABI, without JAX: poisoned buffers with guard zones, any order of tiles.

`void symbol(void** buffers, int64 tile_begin, int64 tile_end, void* scratch)` (docs/architecture.md, "Kernel ABI").
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import platform
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from jcuts.base.errors import AccuracyRejected, CompileRejected, NativeError
from jcuts.codegen.artifact import CompiledKernel
from jcuts.tune.verify.inputs import dtype_of
from jcuts.xla import jit_linker

ALIGNMENT = 64
FENCE = 4096
"""Bytes before and after every buffer that no kernel may touch."""
POISON = 0xAB
_FENCE_BYTE = 0xC3
# Flush to zero and denormals are zero: XLA:CPU sets both while a program runs.
_FTZ_DAZ = 0x8040

_SIGNATURE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)

_FLOAT_MODE_IR = """
target triple = "{triple}"
declare void @llvm.x86.sse.stmxcsr(ptr)
declare void @llvm.x86.sse.ldmxcsr(ptr)
define i32 @jcuts_get_mxcsr() {{
  %slot = alloca i32, align 4
  call void @llvm.x86.sse.stmxcsr(ptr %slot)
  %value = load i32, ptr %slot, align 4
  ret i32 %value
}}
define void @jcuts_set_mxcsr(i32 %value) {{
  %slot = alloca i32, align 4
  store i32 %value, ptr %slot, align 4
  call void @llvm.x86.sse.ldmxcsr(ptr %slot)
  ret void
}}
"""


class Fenced:
    """An aligned array between two guard zones; ``intact`` tells whether anything was written outside it."""

    def __init__(self, shape: Sequence[int], dtype: np.dtype, values: np.ndarray | None = None) -> None:
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        self._raw = np.full(size + 2 * FENCE + ALIGNMENT, _FENCE_BYTE, np.uint8)
        start = FENCE + (-(self._raw.ctypes.data + FENCE)) % ALIGNMENT
        self._start, self._stop = start, start + size
        self.bytes = self._raw[start : start + size]
        self.array = self.bytes.view(dtype).reshape(tuple(shape)) if size else np.zeros(tuple(shape), dtype)
        self.address = self._raw.ctypes.data + start
        if values is None:
            self.poison()
        else:
            self.bytes[:] = np.ascontiguousarray(values).reshape(-1).view(np.uint8)

    def poison(self, value: int = POISON) -> None:
        """Fills the array with a byte; 0xFF makes NaN of every float type."""
        self.bytes[:] = value

    def intact(self) -> bool:
        """Whether both fences are as they were made."""
        return bool((self._raw[: self._start] == _FENCE_BYTE).all() and (self._raw[self._stop :] == _FENCE_BYTE).all())


@dataclass(frozen=True)
class Schedule:
    """Execution order of tiles: pieces of ``piece`` tiles, ``threads`` pieces at a time, last first if ``backward``."""

    piece: int | None = None
    backward: bool = False
    threads: int = 1

    def pieces(self, tiles: int) -> list[tuple[int, int]]:
        """Half-open tile ranges that cover [0, tiles)."""
        step = tiles if self.piece is None else max(1, self.piece)
        found = [(begin, min(begin + step, tiles)) for begin in range(0, tiles, step)]
        return found[::-1] if self.backward else found


class Launcher:
    """A compiled kernel linked into this process.

    Raises:
        CompileRejected: the object code does not link.
    """

    def __init__(self, kernel: CompiledKernel) -> None:
        self.kernel = kernel
        try:
            self.address = jit_linker.link(kernel.object_code, kernel.symbol)
        except NativeError as error:
            raise CompileRejected(f"kernel {kernel.digest}: {error.message}", kernel=kernel.digest) from error
        self._call = _SIGNATURE(self.address)

    def run(
        self, inputs: Sequence[np.ndarray], schedule: Schedule = Schedule(), poison: int = POISON
    ) -> list[np.ndarray]:
        """Runs the kernel once on fresh buffers.

        Args:
            inputs: operands, in the kernel's shapes and dtypes.
            schedule: order and concurrency of the tiles.
            poison: byte that fills the results (and scratch) before; what stays unwritten shows it.
        Returns: the results.
        Raises:
            AccuracyRejected: a write outside a result, or into an operand.
        """
        kernel = self.kernel
        operands = [Fenced(x.shape, x.dtype, x) for x in inputs]
        results = [Fenced(shape, dtype_of(dtype)) for shape, dtype in kernel.outputs]
        for result in results:
            result.poison(poison)
        scratch = [Fenced((kernel.scratch_bytes,), np.dtype(np.uint8)) for _ in range(schedule.threads)]
        for part in scratch:
            part.poison(poison)
        self.launch([b.address for b in (*operands, *results)], [s.address for s in scratch], schedule)
        for kind, buffers in (("operand", operands), ("result", results), ("scratch", scratch)):
            for number, buffer in enumerate(buffers):
                if not buffer.intact():
                    raise AccuracyRejected(
                        f"the kernel writes outside {kind} {number}", rule="bounds", buffer=kind, number=number
                    )
        for number, (buffer, value) in enumerate(zip(operands, inputs, strict=True)):
            if not np.array_equal(buffer.bytes, np.ascontiguousarray(value).reshape(-1).view(np.uint8)):
                raise AccuracyRejected(
                    f"the kernel changes its operand {number}", rule="bounds", buffer="operand", number=number
                )
        return [np.array(result.array) for result in results]

    def launch(self, buffers: Sequence[int], scratch: Sequence[int], schedule: Schedule = Schedule()) -> None:
        """One execution on raw addresses, in XLA's floating-point mode."""
        table = (ctypes.c_void_p * len(buffers))(*buffers)
        pieces = iter(schedule.pieces(self.kernel.tiles))
        lock = threading.Lock()

        def work(slot: int) -> None:
            with xla_float_mode():
                while True:
                    with lock:
                        piece = next(pieces, None)
                    if piece is None:
                        return
                    self._call(ctypes.addressof(table), *piece, scratch[slot])

        helpers = [threading.Thread(target=work, args=(slot,)) for slot in range(1, schedule.threads)]
        for helper in helpers:
            helper.start()
        work(0)
        for helper in helpers:
            helper.join()

    def timed(self, inputs: Sequence[np.ndarray]) -> Callable[[], None]:
        """A callable that executes the kernel once on buffers of its own, all tiles on the calling thread."""
        operands = [Fenced(x.shape, x.dtype, x) for x in inputs]
        results = [Fenced(shape, dtype_of(dtype)) for shape, dtype in self.kernel.outputs]
        scratch = Fenced((self.kernel.scratch_bytes,), np.dtype(np.uint8))
        addresses = [b.address for b in (*operands, *results)]
        table = (ctypes.c_void_p * len(addresses))(*addresses)

        def run(_: object = (operands, results)) -> None:  # keeps the buffers alive
            with xla_float_mode():
                self._call(ctypes.addressof(table), 0, self.kernel.tiles, scratch.address)

        return run


@functools.cache
def _float_mode() -> tuple[Callable[[], int], Callable[[int], None]] | None:
    """Reader and writer of MXCSR, or None on other processors (where XLA's mode is not reproduced here)."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return None
    from llvmlite import binding

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    module = binding.parse_assembly(_FLOAT_MODE_IR.format(triple=binding.get_process_triple()))
    machine = binding.Target.from_default_triple().create_target_machine()
    engine = binding.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    _kept.append(engine)
    # PyDLL-style prototypes keep the interpreter lock: these are two instructions.
    read = ctypes.PYFUNCTYPE(ctypes.c_uint32)(engine.get_function_address("jcuts_get_mxcsr"))
    write = ctypes.PYFUNCTYPE(None, ctypes.c_uint32)(engine.get_function_address("jcuts_set_mxcsr"))
    return read, write


_kept: list[object] = []


@contextlib.contextmanager
def xla_float_mode() -> Iterator[None]:
    """This thread flushes denormals, as XLA:CPU's threads do, while the block runs."""
    mode = _float_mode()
    if mode is None:
        yield
        return
    read, write = mode
    before = read()
    write(before | _FTZ_DAZ)
    try:
        yield
    finally:
        write(before)
