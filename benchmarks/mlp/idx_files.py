"""IDX files of MNIST: `read` and `write` of arrays, plain or gzip, with one error class per fault.

Format: two zero bytes, a byte for the type, a byte for the number of axes, the sizes as big-endian 32-bit integers,
then the elements in row-major order, big-endian.  Source: LeCun, Cortes, Burges, "The MNIST database of handwritten
digits", section "The IDX file format".
"""

from __future__ import annotations

import gzip
import math
import os
import struct
import zlib
from pathlib import Path

import numpy as np

from jcuts.base.errors import JcutsError

GZIP = b"\x1f\x8b"
TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
"""NumPy types by the type byte of an IDX file."""


class IdxError(JcutsError):
    """A file that is no IDX file.  Attributes: path, fault."""

    def __init__(self, path: Path, fault: str) -> None:
        super().__init__(f"{path}: {fault}")
        self.path = path
        self.fault = fault

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.path, self.fault)


class IdxHeaderError(IdxError):
    """The first bytes are not those of an IDX file, or name a type that the format does not have."""


class IdxLengthError(IdxError):
    """The file is shorter or longer than its header says."""


class IdxContentError(IdxError):
    """A proper IDX file, but not images or labels, or not as many labels as images."""


def _content(path: Path) -> bytes:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise IdxError(path, f"cannot be read: {error.strerror}") from error
    if not data.startswith(GZIP):
        return data
    try:
        return gzip.decompress(data)
    except (EOFError, OSError, zlib.error) as error:
        raise IdxLengthError(path, f"the compressed data are damaged ({error}); download the file again") from error


def read(path: str | Path) -> np.ndarray:
    """The array of an IDX file, in this machine's byte order.

    Args: path: plain or compressed by gzip.
    Raises: IdxHeaderError, IdxLengthError; IdxError if it cannot be read.
    """
    path = Path(path)
    data = _content(path)
    if len(data) < 4 or data[:2] != b"\0\0":
        raise IdxHeaderError(path, f"starts with {data[:4].hex(' ') or 'nothing'}, an IDX file with 00 00 TYPE AXES")
    kind, axes = data[2], data[3]
    if kind not in TYPES:
        known = ", ".join(f"{k:#04x}" for k in TYPES)
        raise IdxHeaderError(path, f"type byte {kind:#04x} is none of {known}")
    start = 4 + 4 * axes
    if len(data) < start:
        raise IdxLengthError(path, f"{len(data)} bytes, too few for a header of {axes} axes ({start} bytes)")
    shape = struct.unpack(f">{axes}I", data[4:start])
    dtype = np.dtype(TYPES[kind])
    expected = start + dtype.itemsize * math.prod(shape)
    if len(data) != expected:
        raise IdxLengthError(path, f"{len(data)} bytes, {expected} expected for shape {shape} of {dtype.name}")
    return np.frombuffer(data, dtype, offset=start).reshape(shape).astype(dtype.newbyteorder("="))


def write(path: str | Path, array: np.ndarray) -> None:
    """Writes an array as an IDX file, at once or not at all; compressed if the name ends in ``.gz``."""
    path = Path(path)
    kinds = {np.dtype(t): k for k, t in TYPES.items()}
    dtype = array.dtype.newbyteorder(">")
    if dtype not in kinds or array.ndim > 255:
        raise IdxContentError(path, f"IDX has no arrays of {array.dtype} with {array.ndim} axes")
    data = struct.pack(f">HBB{array.ndim}I", 0, kinds[dtype], array.ndim, *array.shape)
    data += array.astype(dtype).tobytes()
    beside = path.with_name(f"{path.name}.{os.getpid()}.new")
    beside.write_bytes(gzip.compress(data, 1) if path.suffix == ".gz" else data)
    beside.replace(path)


def read_labelled(images: str | Path, labels: str | Path, classes: int = 10) -> tuple[np.ndarray, np.ndarray]:
    """Images (samples, rows, columns) of bytes and their labels (samples,), checked against each other.

    Raises: IdxContentError if shapes, types, counts or a label's range are not those of labelled images.
    """
    pixels, numbers = read(images), read(labels)
    if pixels.ndim != 3 or pixels.dtype != np.uint8:
        raise IdxContentError(Path(images), f"images need 3 axes of uint8, not {pixels.shape} of {pixels.dtype}")
    if numbers.ndim != 1 or numbers.dtype != np.uint8:
        raise IdxContentError(Path(labels), f"labels need 1 axis of uint8, not {numbers.shape} of {numbers.dtype}")
    if len(pixels) != len(numbers):
        raise IdxContentError(Path(labels), f"{len(numbers)} labels for {len(pixels)} images")
    if len(numbers) and numbers.max() >= classes:
        raise IdxContentError(Path(labels), f"label {numbers.max()} is not below {classes}")
    return pixels, numbers
