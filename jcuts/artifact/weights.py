"""Weights of an artefact: zero-copy arrays out of sections, or a safetensors file beside it.

The file beside is written by the package ``safetensors`` (the extra ``jcuts[artifact]``) and read here, so that loading
needs no package.  Every tensor has its SHA-256 in the manifest, so that a file of other weights is told apart.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jax import numpy as jnp

from jcuts.artifact.container import Container, checksum
from jcuts.artifact.manifest import BESIDE, INSIDE, ArrayType, Manifest, Tensor
from jcuts.base.errors import ArtifactError, UnsupportedError

_NAMES = {
    "bool": "BOOL",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
"""NumPy's names of dtypes, and those of the format."""
_LONGEST_HEADER = 100 << 20


def array_type(x: Any) -> ArrayType:
    """Shape and dtype name of an array."""
    return ArrayType(tuple(int(n) for n in x.shape), np.dtype(x.dtype).name)


def contents(x: Any) -> bytes:
    """An array's elements, row-major and little-endian."""
    return np.ascontiguousarray(np.asarray(x)).tobytes()


def array_of(data: memoryview | bytes, type_: ArrayType) -> np.ndarray:
    """An array over bytes, without a copy. Raises: ArtifactError: they are too few or too many."""
    dtype = np.dtype(jnp.dtype(type_.dtype))
    if len(data) != math.prod(type_.shape) * dtype.itemsize:
        raise ArtifactError(f"{len(data)} bytes are no {type_}", size=len(data))
    return np.frombuffer(data, dtype).reshape(type_.shape)


def section_of(number: int) -> str:
    """Name of the section of a weight."""
    return f"weight.{number}"


def pack_beside(tensors: Sequence[Tensor], data: Mapping[str, bytes]) -> bytes:
    """A safetensors file.

    Args: data: key -> bytes.
    Raises: UnsupportedError: the package is missing, or a dtype has no name in the format.
    """
    try:
        from safetensors import numpy as format_  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise UnsupportedError(
            "weights beside an artefact need the package safetensors: pip install 'jcuts[artifact]', or save them "
            "inside"
        ) from error
    if odd := [t.name for t in tensors if t.type.dtype not in _NAMES]:
        raise UnsupportedError(f"weight {odd[0]} has a dtype that safetensors lacks: save the weights inside")
    arrays = {t.name: array_of(data[t.key], t.type) for t in tensors}
    return format_.save(arrays, {"format": "jcuts"})


def read_beside(path: Path, tensors: Sequence[Tensor]) -> dict[str, np.ndarray]:
    """The arrays of a safetensors file, by key; each is compared with its SHA-256.

    Raises: ArtifactError: unreadable, damaged, or of other weights.
    """
    try:
        data = memoryview(path.read_bytes())
    except OSError as error:
        raise ArtifactError(f"cannot read the weights {path}: {error.strerror or error}", path=str(path)) from error
    entries, body = _header(data, path)
    found = {}
    for tensor in tensors:
        try:
            entry = entries[tensor.name]
            begin, end = entry["data_offsets"]
            shape, dtype = entry["shape"], entry["dtype"]
        except (KeyError, TypeError, ValueError) as error:
            raise ArtifactError(f"{path} has no readable weight {tensor.name!r}", weight=tensor.name) from error
        if shape != list(tensor.type.shape) or dtype != _NAMES.get(tensor.type.dtype):
            raise ArtifactError(f"{path}: weight {tensor.name!r} is {dtype}{shape}, not {tensor.type}")
        if type(begin) is not int or type(end) is not int or not 0 <= begin <= end <= len(body):
            raise ArtifactError(f"{path}: weight {tensor.name!r} lies outside of the file", weight=tensor.name)
        found[tensor.key] = _checked(body[begin:end], tensor, str(path))
    return found


def _header(data: memoryview, path: Path) -> tuple[dict[str, Any], memoryview]:
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or size > min(_LONGEST_HEADER, len(data) - 8):
        raise ArtifactError(f"{path} is no safetensors file, or is cut short", path=str(path))
    try:
        entries = json.loads(bytes(data[8 : 8 + size]).decode("utf-8"))
        if not isinstance(entries, dict):
            raise ValueError("it is no object")
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{path}: its header cannot be read ({error})", path=str(path)) from error
    return entries, data[8 + size :]


def _checked(data: memoryview, tensor: Tensor, where: str) -> np.ndarray:
    if checksum(data) != tensor.sha256:
        raise ArtifactError(
            f"{where}: weight {tensor.name!r} is not the one that was saved (its SHA-256 is another)",
            weight=tensor.name,
        )
    return array_of(data, tensor.type)


def read(manifest: Manifest, container: Container, path: Path) -> dict[str, np.ndarray]:
    """All weights by key; none where they are arguments. Raises: ArtifactError."""
    if manifest.weights == BESIDE:
        if Path(manifest.file).name != manifest.file or not manifest.file:
            raise ArtifactError(f"{manifest.file!r} is no name of a file beside the artefact", file=manifest.file)
        return read_beside(path.parent / manifest.file, manifest.tensors)
    found = {}
    if manifest.weights == INSIDE:
        for number, tensor in enumerate(manifest.tensors):
            name = section_of(number)
            data = container.section(name)
            if container.digests[name] != tensor.sha256:
                raise ArtifactError(f"section {name!r} does not hold weight {tensor.name!r}", section=name)
            found[tensor.key] = array_of(data, tensor.type)
    return found
