"""Manifest of an artefact: strict JSON schema of its signatures, kernels, weights, devices, versions and evidence.

Every record is read field by field: an unknown key, a missing one, a value of another type or out of range is an
`ArtifactError`.  What is free-form (choices, the decision, evidence) is for people and for `jcuts inspect`, and decides
nothing.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from jcuts.artifact import container
from jcuts.base import json_fields
from jcuts.base.errors import ArtifactError, JcutsError
from jcuts.codegen.artifact import CompiledKernel

FORMAT = 1
INSIDE = "inside"
BESIDE = "beside"
ARGUMENTS = "arguments"
WEIGHTS = (INSIDE, BESIDE, ARGUMENTS)
PLATFORMS = ("cpu", "cuda")
DTYPES = frozenset(
    [
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "complex64", "complex128"),
        *("float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"),
    ]
)
_SHA = re.compile(r"[0-9a-f]{64}")
_MOST_ELEMENTS = 1 << 48
_text = json_fields.text


@dataclass(frozen=True)
class ArrayType:
    """Shape and dtype name of an array."""

    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Tensor:
    """A weight: its name, type, and the SHA-256 of its row-major bytes, or of its name where weights are arguments."""

    name: str
    type: ArrayType
    sha256: str

    @property
    def key(self) -> str:
        """By which programs refer to it."""
        return container.checksum(f"{self.type} {self.sha256}".encode())


@dataclass(frozen=True)
class Static:
    """A static argument: position (or None) and name (or ''), and the value, which is JSON."""

    position: int | None
    name: str
    value: Any


@dataclass(frozen=True)
class Program:
    """An exported program: its section and its SHA-256, keys of the weights that come first, and XLA's options."""

    section: str
    sha256: str
    weights: tuple[str, ...]
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Signature:
    """What one saved call looks like, and what runs for it.

    Attributes:
        in_tree, out_tree: structures (`jcuts.artifact.trees`) of dynamic arguments and results.
        donated: numbers of the inputs that a call uses up.
        program: what was tuned. plain: XLA's own program of the function.
        kernels: names of the kernels that `program` calls.
        decision, choices, evidence: why it was chosen, for every region; errors against float64 (for people).
    """

    in_tree: Any
    out_tree: Any
    inputs: tuple[ArrayType, ...]
    outputs: tuple[ArrayType, ...]
    statics: tuple[Static, ...]
    donated: tuple[int, ...]
    program: Program
    plain: Program
    kernels: tuple[str, ...]
    decision: Any = None
    choices: Any = None
    evidence: Any = None


@dataclass(frozen=True)
class Kernel:
    """A compiled kernel: its header (``name`` in place of the digest), and the SHA-256 of its code."""

    header: dict[str, Any]
    sha256: str

    @property
    def name(self) -> str:
        """What HLO calls it."""
        return self.header["digest"]


@dataclass(frozen=True)
class Manifest:
    """All that an artefact says of itself.

    Attributes:
        name: of the function. made: versions that saved it. device: what it was made for.
        x64: whether JAX had 64-bit types. target: FFI targets that its programs call, and the FFI version of the
            native library. weights: where they are. file: name of the file beside. tensors: the weights.
    """

    name: str
    made: dict[str, str]
    device: dict[str, Any]
    x64: bool
    targets: tuple[str, ...]
    weights: str
    file: str
    tensors: tuple[Tensor, ...]
    kernels: tuple[Kernel, ...]
    signatures: tuple[Signature, ...]

    def to_json(self) -> bytes:
        """Canonical JSON."""
        data = {"format": FORMAT, **asdict(self)}
        return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def seal(manifest: Manifest, signature: Signature) -> str:
    """Name of a signature's programs: a digest of all that decides how they are called, and with what.

    The manifest has the programs' SHA-256 and the programs have this in their name, so that neither is changed without
    the other, checksums recomputed or not.
    """
    kernels = [kernel for kernel in manifest.kernels if kernel.name in signature.kernels]
    whole = asdict(manifest) | {"kernels": [asdict(kernel) for kernel in kernels]}
    call = asdict(signature)
    for program in ("program", "plain"):
        call[program] = {name: call[program][name] for name in ("weights", "options")}
    for name in ("decision", "choices", "evidence"):
        del call[name]
    for name in ("file", "tensors", "signatures"):
        del whole[name]
    text = json.dumps([whole, call], sort_keys=True, separators=(",", ":"), allow_nan=False)
    return "sealed_" + container.checksum(text.encode())


def from_json(data: bytes | memoryview) -> Manifest:
    """The inverse of `Manifest.to_json`. Raises: ArtifactError for anything else."""
    try:
        found = json.loads(bytes(data).decode("utf-8"), parse_constant=_no_constant)
        return _manifest(found)
    except ArtifactError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, JcutsError) as error:
        raise ArtifactError(f"the artefact's manifest does not have the form of format {FORMAT}: {error}") from error


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} is no JSON number")


def _fields(data: Any, what: str, **readers: Callable[[Any], Any]) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise TypeError(f"{what} is no JSON object")
    if set(data) != set(readers):
        odd = sorted(set(data) ^ set(readers))
        raise ValueError(f"{what} lacks or has besides: {', '.join(map(str, odd))[:200]}")
    return {name: reader(data[name]) for name, reader in readers.items()}


def _all(reader: Callable[[Any], Any]) -> Callable[[Any], tuple[Any, ...]]:
    def read(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise TypeError(f"{repr(value)[:40]} is no JSON list")
        return tuple(reader(item) for item in value)

    return read


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError(f"{repr(value)[:40]} is no whole number from 0 on")
    return value


def _sha(value: Any) -> str:
    if not isinstance(value, str) or not _SHA.fullmatch(value):
        raise ValueError(f"{repr(value)[:80]} is no SHA-256")
    return value


def _any(value: Any) -> Any:
    return value


def _one_of(known: Any) -> Callable[[Any], str]:
    def read(value: Any) -> str:
        if value not in known:
            raise ValueError(f"{repr(value)[:40]} is none of {', '.join(sorted(known))}")
        return value

    return read


def _options(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or any(type(v) not in (str, int, float, bool) for v in value.values()):
        raise TypeError("options of XLA are no JSON object of plain values")
    return {_text(k): v for k, v in value.items()}


def _array_type(data: Any) -> ArrayType:
    found = ArrayType(**_fields(data, "an array's type", shape=_all(_count), dtype=_one_of(DTYPES)))
    if math.prod(max(1, n) for n in found.shape) > _MOST_ELEMENTS or len(found.shape) > 32:
        raise ValueError(f"an array of type {found} is too large")
    return found


def _tensor(data: Any) -> Tensor:
    return Tensor(**_fields(data, "a weight", name=_text, type=_array_type, sha256=_sha))


def _static(data: Any) -> Static:
    def position(value: Any) -> int | None:
        return None if value is None else _count(value)

    return Static(**_fields(data, "a static argument", position=position, name=_text, value=static_value))


def static_value(value: Any) -> Any:
    """A static argument as JSON gives it back: lists are tuples. Raises: TypeError for what JSON lacks."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, (list, tuple)):
        return tuple(static_value(item) for item in value)
    raise TypeError(f"a static argument of type {type(value).__name__} has no form in JSON")


def _program(data: Any) -> Program:
    readers = {"section": _text, "sha256": _sha, "weights": _all(_sha), "options": _options}
    return Program(**_fields(data, "a program", **readers))


def _signature(data: Any) -> Signature:
    readers = {"in_tree": _any, "out_tree": _any, "inputs": _all(_array_type), "outputs": _all(_array_type)}
    readers |= {"statics": _all(_static), "donated": _all(_count), "program": _program, "plain": _program}
    readers |= {"kernels": _all(_text), "decision": _any, "choices": _any, "evidence": _any}
    found = Signature(**_fields(data, "a signature", **readers))
    if any(n >= len(found.inputs) for n in found.donated):
        raise ValueError("an input is donated that there is not")
    return found


def _kernel(data: Any) -> Kernel:
    found = Kernel(**_fields(data, "a kernel", header=_any, sha256=_sha))
    readers: dict[str, Callable[[Any], Any]] = {"digest": _text, "symbol": _text}
    readers |= {"tiles": _count, "scratch_bytes": _count, "inputs": _any, "outputs": _any}
    header = _fields(found.header, "a kernel's header", **readers)
    CompiledKernel.from_header(header, b"")  # checks the rest
    if not found.name.endswith(f".{found.sha256[:16]}"):
        raise ValueError(f"kernel {found.name!r} and its code do not belong together")
    return Kernel(header, found.sha256)


def _device(data: Any) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise TypeError("the device is no JSON object")
    if data.get("platform") == "cpu":
        readers = {"machine": _text, "model": _text, "features": _all(_text)}
        return _fields(data, "the device", platform=_one_of(PLATFORMS), cores=_count, external=_all(_text), **readers)
    pair = _all(_count)
    return _fields(data, "the device", platform=_one_of(PLATFORMS), name=_text, capability=pair, driver=pair)


def _manifest(data: Mapping[str, Any]) -> Manifest:
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ValueError("it has another format")
    readers = {"name": _text, "made": json_fields.texts, "device": _device, "x64": json_fields.flag}
    readers |= {"targets": _all(_text), "weights": _one_of(WEIGHTS), "file": _text, "tensors": _all(_tensor)}
    readers |= {"kernels": _all(_kernel), "signatures": _all(_signature)}
    found = Manifest(**_fields({k: v for k, v in data.items() if k != "format"}, "the manifest", **readers))
    if not found.signatures:
        raise ValueError("it has no signature")
    kernels = {kernel.name for kernel in found.kernels}
    tensors = {tensor.key for tensor in found.tensors}
    if len(kernels) != len(found.kernels) or len(tensors) != len(found.tensors):
        raise ValueError("a kernel or a weight is listed twice")
    if len({tensor.name for tensor in found.tensors}) != len(found.tensors):
        raise ValueError("two weights have one name")
    for signature in found.signatures:
        if not kernels.issuperset(signature.kernels):
            raise ValueError("a signature has kernels that are not there")
        if not tensors.issuperset((*signature.program.weights, *signature.plain.weights)):
            raise ValueError("a signature has weights that are not there")
    return found
