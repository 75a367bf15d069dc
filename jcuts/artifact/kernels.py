"""Kernel registration: binds an artefact's object code to the FFI calls of its programs, after checking that they fit.

Object code is machine code, which is trusted like a shared library.  What can be checked of its use is: every custom
call of jcuts in a program names a kernel of the artefact, with the operands, results, tiles and scratch memory that the
kernel was compiled for.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jcuts.artifact.container import Container
from jcuts.artifact.loop_calls import Misfit, room_of_body
from jcuts.artifact.manifest import Manifest
from jcuts.base.errors import ArtifactError, JcutsError
from jcuts.codegen.artifact import Aval, CompiledKernel
from jcuts.codegen.cuda.toolchain.image import is_image
from jcuts.kernel_ir.program import ITEM_SIZE
from jcuts.xla import cpu_ffi_call, cpu_launcher, elf_loader

_CALL = re.compile(r"stablehlo\.custom_call @(jcuts_\w+)\([^)]*\) (\{.*\}) : (\(.*?\)) -> (.*)")
_NUMBER = re.compile(r"\b(\w+) = (-?\d+) : i64")
_TEXT = re.compile(r'\b(digests?) = "([^"]*)"')
_TENSOR = re.compile(r"tensor<((?:\d+x)*)(\w+)>")
_DTYPES: dict[str, str] = {"i1": "bool", "f16": "float16", "bf16": "bfloat16", "f32": "float32", "f64": "float64"}
_DTYPES |= {f"i{n}": f"int{n}" for n in (8, 16, 32, 64)}
_DTYPES |= {f"ui{n}": f"uint{n}" for n in (8, 16, 32, 64)}
_DTYPES |= {"f8E4M3FN": "float8_e4m3fn", "f8E5M2": "float8_e5m2"}

_ARRAY = re.compile(r'\b(\w+) = dense<"?([^">]*)"?> : tensor<(\d+)xi64>')

CPU_TARGETS = cpu_launcher.TARGETS
CUDA_TARGETS = ("jcuts_cuda_launch", "jcuts_cuda_chain")


@dataclass(frozen=True)
class Call:
    """A custom call of a program: its target, the kernels, numbers and arrays in its attributes, its types."""

    target: str
    kernels: tuple[str, ...]
    numbers: Mapping[str, int]
    arrays: Mapping[str, tuple[int, ...]]
    operands: tuple[Aval, ...]
    results: tuple[Aval, ...]


def calls(module: str) -> list[Call]:
    """The custom calls of jcuts in the text of a StableHLO module. Raises: ArtifactError: one cannot be read."""
    found = []
    for line in module.splitlines():
        if "custom_call @jcuts_" not in line:
            continue
        parts = _CALL.search(line)
        if parts is None:
            raise ArtifactError("a program has a call of jcuts that cannot be read")
        target, attributes, operands, results = parts.groups()
        text = dict(_TEXT.findall(attributes))
        names = tuple((text.get("digests") or text.get("digest") or "").split())
        numbers = {name: int(value) for name, value in _NUMBER.findall(attributes)}
        arrays = {name: _array(text, int(size)) for name, text, size in _ARRAY.findall(attributes)}
        found.append(Call(target, names, numbers, arrays, _types(operands), _types(results.partition(" loc(")[0])))
    return found


def _array(text: str, size: int) -> tuple[int, ...]:
    """An array of 64-bit integers: its elements, the one that all are, or the bytes of more than a hundred."""
    if text.startswith("0x"):
        data = bytes.fromhex(text[2:])
        return struct.unpack(f"<{len(data) // 8}q", data[: len(data) // 8 * 8])
    numbers = tuple(map(int, re.findall(r"-?\d+", text)))
    return numbers if text.startswith("[") else numbers * size


def _types(text: str) -> tuple[Aval, ...]:
    return tuple(
        (tuple(int(n) for n in shape.split("x") if n), _DTYPES.get(dtype, dtype)) for shape, dtype in _tensors(text)
    )


def _tensors(text: str) -> list[tuple[str, str]]:
    return _TENSOR.findall(text)


def check_calls(found: Sequence[Call], kernels: Mapping[str, CompiledKernel], targets: tuple[str, ...]) -> None:
    """Does every call of jcuts fit a kernel? Raises: ArtifactError where one does not."""
    for call in found:
        if call.target not in targets or not call.kernels:
            raise ArtifactError(f"a program calls {call.target}, which is not among {', '.join(targets) or 'none'}")
        for name in call.kernels:
            if name not in kernels:
                raise ArtifactError(f"a program calls the kernel {name!r}, which the artefact lacks", kernel=name)
        if call.target == cpu_launcher.TARGET and (why := _misfit(call, kernels[call.kernels[0]])):
            raise ArtifactError(f"a call of kernel {call.kernels[0]} does not fit it: {why}", kernel=call.kernels[0])
        chained = call.target in (cpu_launcher.CHAIN, cpu_launcher.LOOP)
        if chained and (why := _chain_misfit(call, [kernels[name] for name in call.kernels])):
            raise ArtifactError(f"a call of {len(call.kernels)} kernels does not fit them: {why}")


def _misfit(call: Call, kernel: CompiledKernel) -> str:
    count = len(kernel.outputs)
    size, slots = call.numbers.get("scratch_bytes", -1), call.numbers.get("slots", 0)
    if call.operands != kernel.inputs or call.results[:count] != kernel.outputs:
        return "its operands or results have other types"
    if call.numbers.get("num_outputs") != count or call.numbers.get("tiles") != kernel.tiles:
        return "it says another number of results or tiles"
    if size < kernel.scratch_bytes or slots < 1:
        return f"it has {size} bytes of scratch memory in {slots} slots, {kernel.scratch_bytes} are needed"
    needed = cpu_ffi_call.scratch_result_bytes(size, slots)
    expected = [((needed,), "uint8")] if size else []
    return "" if list(call.results[count:]) == expected else "its scratch result has another size"


def _chain_misfit(call: Call, kernels: Sequence[CompiledKernel]) -> str:
    """What of a chain's wiring (`cpu_ffi_call.call_chain`) leaves its buffers or its arena."""
    wiring, sizes = list(call.arrays.get("wiring", ())), call.arrays.get("sizes", ())
    arena = call.numbers.get("arena_bytes", -1)
    operands, results = ([_bytes(a) for a in avals] for avals in (call.operands, call.results))
    if call.target == cpu_launcher.LOOP:
        try:
            operands, results = room_of_body(call.arrays.get("plan", ()), call.numbers, operands, results)
        except Misfit as why:
            return str(why)
    room = {0: operands, 1: results, 2: [arena]}
    if len(sizes) != 3 * len(kernels):
        return "it has sizes of another number of kernels"
    for number, kernel in enumerate(kernels):
        buffers = (*kernel.inputs, *kernel.outputs)
        tiles, size, slots = sizes[3 * number : 3 * number + 3]
        if len(wiring) < 2 + 3 * len(buffers) or wiring[0] != len(buffers):
            return "a kernel has another number of buffers"
        if tiles != kernel.tiles or size < kernel.scratch_bytes or slots < 1:
            return "it says another number of tiles, or too little scratch memory"
        if wiring[1] < 0 or wiring[1] + cpu_ffi_call.scratch_result_bytes(size, slots) > arena:
            return "scratch memory beyond its arena"
        for place, aval in enumerate(buffers):
            kind, which, start = wiring[2 + 3 * place : 5 + 3 * place]
            if not 0 <= which < len(room.get(kind, ())) or not 0 <= start <= room[kind][which] - _bytes(aval):
                return "a buffer beyond its memory"
        wiring = wiring[2 + 3 * len(buffers) :]
    return "it has wiring of more kernels" if wiring else ""


def _bytes(aval: Aval) -> int:
    shape, dtype = aval
    return math.prod(shape) * ITEM_SIZE.get(dtype, 1)


def read(manifest: Manifest, container: Container) -> dict[str, CompiledKernel]:
    """The kernels by name. Raises: ArtifactError where code and header do not belong together."""
    found = {}
    for number, kernel in enumerate(manifest.kernels):
        name = section_of(number)
        code = bytes(container.section(name))
        if container.digests[name] != kernel.sha256:
            raise ArtifactError(f"section {name!r} does not hold the code of kernel {kernel.name}", section=name)
        if is_image(code) != (manifest.device["platform"] == "cuda"):
            raise ArtifactError(f"kernel {kernel.name} is for another platform", kernel=kernel.name)
        found[kernel.name] = CompiledKernel.from_header(kernel.header, code)
    return found


def section_of(number: int) -> str:
    """Name of the section of a kernel's code."""
    return f"code.{number}"


def register(kernels: Mapping[str, CompiledKernel], platform: str) -> None:
    """Makes kernels known to the launcher, and the launcher to XLA.

    Raises: NativeError: no native library, or it refuses one; ArtifactError: code that cannot be loaded.
    """
    if platform == "cuda":
        from jcuts.xla import cuda_launcher

        cuda_launcher.ensure_registered()
        for kernel in kernels.values():
            cuda_launcher.add_kernel(kernel, persist=False)
        return
    cpu_launcher.ensure_registered()
    for kernel in kernels.values():
        cpu_launcher.add_kernel(kernel, persist=False, link=elf_loader.load)


def renamed(kernel: CompiledKernel, sha256: str) -> str:
    """The name of a kernel in artefacts: its digest and the beginning of its code's SHA-256.

    So equal names are equal code, whatever process, compiler or artefact a kernel comes from.
    """
    return f"{kernel.digest}.{sha256[:16]}"


def external_symbols(kernels: Mapping[str, CompiledKernel]) -> tuple[str, ...]:
    """What the kernels take from the C library. Raises: ArtifactError: code that is no object file."""
    names: set[str] = set()
    for kernel in kernels.values():
        if not is_image(kernel.object_code):
            try:
                names |= elf_loader.undefined_symbols(kernel.object_code)
            except JcutsError as error:
                raise ArtifactError(f"kernel {kernel.digest}: {error.message}") from error
    return tuple(sorted(names))
