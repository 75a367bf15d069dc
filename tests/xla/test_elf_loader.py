"""The static ELF loader runs what LLVM's linker runs, and refuses what is damaged with a typed error."""

from __future__ import annotations

import ctypes
import random
import struct

import numpy as np
import pytest

from jcuts.base.errors import NativeError
from jcuts.xla import elf_loader, jit_linker
from tests.xla.kernels import affine, tanh

pytestmark = pytest.mark.skipif(elf_loader.supported() != "", reason="the loader is for x86-64")


def run_at(address: int, x: np.ndarray, tiles: int) -> np.ndarray:
    """Calls an entry point of the kernel ABI on this thread."""
    y = np.zeros_like(x)
    buffers = (ctypes.c_void_p * 2)(x.ctypes.data, y.ctypes.data)
    entry = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)(address)
    entry(buffers, 0, tiles, None)
    return y


@pytest.mark.parametrize("kernel", [affine(4, 16), tanh(4, 16)])
def test_same_bits_as_llvm(kernel):
    x = np.linspace(-3, 3, 64, dtype=np.float32)
    ours = run_at(elf_loader.load(kernel.object_code, kernel.symbol), x, kernel.tiles)
    llvm = run_at(jit_linker.link(kernel.object_code, kernel.symbol), x, kernel.tiles)
    assert ours.tobytes() == llvm.tobytes() and ours.any()


def test_symbols_of_the_c_library():
    assert elf_loader.undefined_symbols(tanh(1, 16).object_code) == {"tanhf"}


def test_missing_function():
    with pytest.raises(NativeError, match="does not define the function 'other'"):
        elf_loader.load(affine(1, 16).object_code, "other")


def test_unknown_symbol():
    code = tanh(1, 16).object_code.replace(b"tanhf\0", b"tanhq\0")
    with pytest.raises(NativeError, match="needs tanhq, which this process does not have"):
        elf_loader.load(code, "kernel")


def test_unknown_relocation():
    code = bytearray(tanh(1, 16).object_code)
    (sections,) = struct.unpack_from("<Q", code, 40)
    size, count = struct.unpack_from("<HH", code, 58)
    for n in range(count):
        kind, offset = struct.unpack_from("<I16xQ", code, sections + n * size + 4)
        if kind == 4:
            struct.pack_into("<I", code, offset + 8, 99)
    with pytest.raises(NativeError, match="relocation of kind 99"):
        elf_loader.load(bytes(code), "kernel")


def test_damaged_object_code():
    code, rng = tanh(2, 16).object_code, random.Random(0)
    for _ in range(1000):
        found = bytearray(code)
        for _ in range(rng.choice((1, 3))):
            found[rng.randrange(len(found))] = rng.randrange(256)
        try:
            elf_loader.load(bytes(found[: rng.choice((len(found), rng.randrange(len(found))))]), "kernel")
        except NativeError:
            continue
