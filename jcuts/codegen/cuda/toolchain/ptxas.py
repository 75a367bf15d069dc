"""PTX -> cubin with ptxas or nvJitLink, without a GPU; registers, stack and shared memory as the cubin says.

The assembler is ``ptxas`` (from the CUDA wheels of this Python, or on the PATH), else the nvJitLink library.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import struct
import subprocess
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from jcuts.arch.sm_limits import SM_90
from jcuts.base.errors import CompileRejected
from jcuts.codegen.cuda.toolchain.image import Resources
from jcuts.codegen.cuda.toolchain.l2_prefetch import OperandPrefetch, prefetch_instructions
from jcuts.codegen.cuda.toolchain.programmatic_launch import insert_grid_dependency_wait

PTX_VERSION = "8.0"
"""Oldest PTX version that knows everything emitted here: assemblers of CUDA 12.0 and newer read it."""
FAR_STORES = "st.async"
"""Stores into another block's shared memory."""
PTX_OF_FAR_STORES = "8.1"
"""The PTX version (CUDA 12.1) that these need."""
SERIAL = "wgmma.mma_async instructions are serialized"
_DEPENDENT = 90
_TIMEOUT = 120.0
_LEAST_SMS = 114
"""Multiprocessors of the H100 PCIe: no GPU of compute capability 9.0 has fewer."""
_ENTRY = re.compile(r"^\.visible \.entry (\S+)\(", re.MULTILINE)
_PARAMETER = re.compile(r"\.param \.u64 (?:\.ptr [^,]*)?(\w+)")
_REGCOUNT = 0x2F
_FRAME_SIZE = 0x11
_SIZED = 0x04

INSTALL = "install jcuts[cuda13], without a GPU jcuts[cuda-compilers]"
"""What is to be done where a compiler is missing."""


_EXTREME = re.compile(r"\b(?:min|max)\.[su](?:16|32)\b")
_NEGATED = re.compile(r"^(\s*)(?:neg|sub)\.s(16|32)(\s+)(%\w+), (?:0, )?(%\w+);", re.MULTILINE)


class Grid(NamedTuple):
    """A launch: blocks, threads per block, dynamic shared memory per block [B], and operands that it prefetches."""

    blocks: int
    threads: int
    shared: int
    prefetches: tuple[OperandPrefetch, ...] = ()

    def blocks_per_sm(self, registers: int, shared: int) -> int:
        """Resident blocks per multiprocessor with so many registers per thread (occupancy), at most the blocks that it
        gets at all.
        """
        warps = -(-self.threads // SM_90.warp_threads)
        by_shared = SM_90.smem_per_sm_bytes // max(1, self.shared + shared)
        by_registers = SM_90.registers_per_sm // (warps * max(1, -(-registers // 8)) * 8 * SM_90.warp_threads)
        by_threads = SM_90.threads_per_sm // (SM_90.warp_threads * warps)
        return min(by_shared, by_registers, by_threads, -(-self.blocks // _LEAST_SMS))


def merge_modules(
    sources: list[tuple[str, str]], arch: str = "", *, grids: Sequence[Grid] = (), ready: bool = True
) -> str:
    """Merges PTX modules into one: [(PTX of one kernel, the name that it gets)].

    Args: arch: what the module asks for where that is more than the compiler wrote, e.g. ``sm_90a``; grids: launches of
        kernels that wait for the grid in front of them (`insert_grid_dependency_wait`), () where none does; ready: wait
        behind what they can compute before.
    """
    head, bodies = "", []
    for number, (text, symbol) in enumerate(sources):
        found = _ENTRY.search(text)
        if found is None:
            raise CompileRejected("PTX without a kernel in it")
        text = _without_negations(text.replace(found.group(1), symbol))
        lines = [x for x in text.splitlines() if not x.lstrip().startswith((".common .global", "//"))]
        start = next(k for k, x in enumerate(lines) if x.startswith(".address_size"))
        head = "\n".join(lines[: start + 1])
        body = lines[start + 1 :]
        bodies.append("\n".join(_waiting(body, grids[number], ready) if grids else body))
    version = PTX_VERSION if not any(FAR_STORES in body for body in bodies) else PTX_OF_FAR_STORES
    head = re.sub(r"^\.version .*$", f".version {version}", head, flags=re.MULTILINE)
    if arch:
        head = re.sub(r"^\.target .*$", f".target {arch}", head, flags=re.MULTILINE)
    return head + "\n" + "\n".join(bodies) + "\n"


def _without_negations(text: str) -> str:
    """The same code with complement and addition instead of integer negation, where there are integer minima or maxima.

    ptxas 13.0 (13.5 does not) makes one instruction of two minima, and leaves out the sign of its second operand:
    ``min(min(-a, -b), -c)`` became ``min(-a, b, -c)`` on compute capability 9.0.
    """
    if not _EXTREME.search(text):
        return text
    return _NEGATED.sub(r"\1not.b\2\3\4, \5;\n\1add.s\2\3\4, \4, 1;", text)


def supports_pdl(arch: str) -> bool:
    """Whether an architecture has programmatic dependent launch (PTX ISA, ``griddepcontrol``)."""
    found = re.match(r"sm_(\d+)", arch)
    return found is not None and int(found[1]) >= _DEPENDENT


def _waiting(lines: list[str], grid: Grid, ready: bool) -> list[str]:
    """The lines of a PTX kernel with its wait, behind its declarations. Args: ready: as of `merge_modules`."""
    entry = next(k for k, x in enumerate(lines) if _ENTRY.match(x))
    place = lines.index("{", entry) + 1
    parameters = [found[1] for line in lines[entry:place] for found in _PARAMETER.finditer(line)]
    while not lines[place].strip() or lines[place].lstrip().startswith((".", "//")):
        place += 1
    prefetches = prefetch_instructions(parameters, grid.prefetches, grid.blocks, grid.threads)
    return insert_grid_dependency_wait(lines, place, prefetches, ready=ready)


@functools.cache
def assembler() -> str:
    """Path of ptxas, or '' where there is none.

    >>> assembler() == "" or assembler().endswith("ptxas")
    True
    """
    packages = Path(sysconfig.get_paths()["purelib"])
    for pattern in ("nvidia/cu*/bin/ptxas", "nvidia/cuda_nvcc/bin/ptxas"):
        for path in sorted(packages.glob(pattern), reverse=True):
            if os.access(path, os.X_OK):
                return str(path)
    return shutil.which("ptxas") or ""


@functools.cache
def toolkit() -> tuple[int, int] | None:
    """CUDA version of the assembler; None where it does not report one."""
    path = assembler()
    if not path:
        try:
            from cuda.bindings import nvjitlink  # type: ignore[import-not-found]

            major, minor = nvjitlink.version()
            return int(major), int(minor)
        except Exception:  # an import error, or one of the binding's own
            return None
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=_TIMEOUT, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r"release (\d+)\.(\d+)", done.stdout)
    return (int(found[1]), int(found[2])) if found else None


def assemble(ptx: str, arch: str, *, overlapped: bool = False) -> bytes:
    """The cubin of a PTX module.

    Args: ptx: the module; arch: e.g. ``sm_90``; overlapped: products of warpgroups must not wait for each other, as
        they do where the assembler cannot give the registers of several to all of them (ptxas tells).
    Raises: CompileRejected where the assembler refuses, hangs, or is missing; attribute ``log``.
    """
    path = assembler()
    return _run_ptxas(path, ptx, arch, overlapped) if path else _link(ptx, arch)


def assemble_best(
    sources: list[tuple[str, str]], arch: str, grids: Sequence[Grid], *, overlapped: bool = False
) -> tuple[bytes, dict[str, Resources], bool]:
    """The cubin of all kernels, their resources, and whether they use programmatic dependent launch.

    What is computed before the wait stays in registers over it.  Where they do not suffice, or a multiprocessor would
    have fewer blocks at once, the wait comes first; and where ptxas keeps small arrays in memory only because there is
    a wait, there is none.

    Args: sources: as of `merge_modules`; grids: of each; arch, overlapped: as of `assemble`.
    """
    found: list[tuple[int, bytes, dict[str, Resources]]] = []
    for ready in (True, False) if supports_pdl(arch) else ():
        try:
            cubin = assemble(merge_modules(sources, arch, grids=grids, ready=ready), arch, overlapped=overlapped)
        except CompileRejected:
            if not found:
                raise
            break
        report = resources(cubin)
        if not any(used.stack for used in report.values()):
            used = [report[symbol] for _, symbol in sources]
            count, most = (
                sum(grid.blocks_per_sm(u.registers * own, u.shared) for u, grid in zip(used, grids, strict=True))
                for own in (1, 0)
            )
            found.append((count, cubin, report))
            if count == most:
                break
    if found:
        _, cubin, report = max(found, key=lambda one: one[0])
        return cubin, report, True
    cubin = assemble(merge_modules(sources, arch), arch, overlapped=overlapped)
    return cubin, resources(cubin), False


def _run_ptxas(path: str, ptx: str, arch: str, overlapped: bool) -> bytes:
    with tempfile.TemporaryDirectory(prefix="jcuts-ptx-") as folder:
        source, target = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        source.write_text(ptx)
        command = [path, f"-arch={arch}", "-O3", *(["-v"] if overlapped else []), str(source), "-o", str(target)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise CompileRejected(f"ptxas failed: {error}", log=str(error)) from error
        if done.returncode or not target.exists():
            log = (done.stderr or done.stdout).strip()
            raise CompileRejected(f"ptxas refused the kernel: {log[:500]}", log=log)
        if overlapped and SERIAL in done.stdout + done.stderr:
            raise CompileRejected("products of warp groups would wait for each other", log=done.stdout + done.stderr)
        return target.read_bytes()


def _link(ptx: str, arch: str) -> bytes:
    try:
        from cuda.bindings import nvjitlink  # type: ignore[import-not-found]
    except ImportError as error:
        raise CompileRejected(f"there is neither ptxas nor nvJitLink: {INSTALL}", log=str(error)) from error
    data = ptx.encode()
    options = [f"-arch={arch}", "-O3"]
    handle = None
    try:
        handle = nvjitlink.create(len(options), options)
        nvjitlink.add_data(handle, nvjitlink.InputType.PTX, data, len(data), "kernel.ptx")
        nvjitlink.complete(handle)
        cubin = bytearray(nvjitlink.get_linked_cubin_size(handle))
        nvjitlink.get_linked_cubin(handle, cubin)
        return bytes(cubin)
    except Exception as error:  # the binding's own error types
        raise CompileRejected(f"nvJitLink refused the kernel: {error}", log=str(error)) from error
    finally:
        if handle is not None:
            nvjitlink.destroy(handle)


# -- the resource report ------------------------------------------------------------------------------------------
def resources(cubin: bytes) -> dict[str, Resources]:
    """Registers, stack bytes per thread and static shared bytes per block of every kernel in a cubin.

    Local memory (a spilled register, an array indexed at run time) shows as stack bytes.
    Raises: CompileRejected for bytes that are no 64-bit ELF file.
    """
    sections = _sections(cubin)
    names = _symbol_names(cubin, sections)
    registers: dict[str, int] = {}
    stack: dict[str, int] = {}
    for _, kind, offset, size, _, _ in (s for s in sections if s[0] == ".nv.info"):
        del kind
        for attribute, payload in _attributes(cubin[offset : offset + size]):
            if attribute in (_REGCOUNT, _FRAME_SIZE) and len(payload) >= 8:
                symbol, value = struct.unpack_from("<II", payload)
                (registers if attribute == _REGCOUNT else stack)[names.get(symbol, "")] = value
    shared = {s[0].removeprefix(".nv.shared."): s[3] for s in sections if s[0].startswith(".nv.shared.")}
    kernels = [s[0].removeprefix(".text.") for s in sections if s[0].startswith(".text.")]
    found = {}
    for name in kernels:
        if name not in registers:
            raise CompileRejected(f"the cubin does not say how many registers {name} takes", kernel=name)
        found[name] = Resources(registers[name], stack.get(name, 0), shared.get(name, 0))
    return found


Section = tuple[str, int, int, int, int, int]


def _sections(data: bytes) -> list[Section]:
    """(name, type, offset, size, link, entry size) of every section."""
    if data[:4] != b"\x7fELF" or data[4] != 2:
        raise CompileRejected("the assembler's output is no 64-bit ELF file")
    (table,) = struct.unpack_from("<Q", data, 0x28)
    size, count, names = struct.unpack_from("<HHH", data, 0x3A)
    raw = [struct.unpack_from("<IIQQQQIIQQ", data, table + k * size) for k in range(count)]
    start = raw[names][4]
    return [(_text(data, start + r[0]), r[1], r[4], r[5], r[6], r[9]) for r in raw]


def _text(data: bytes, start: int) -> str:
    return data[start : data.index(b"\0", start)].decode()


def _symbol_names(data: bytes, sections: list[Section]) -> dict[int, str]:
    for name, _, offset, size, link, entry in sections:
        if name == ".symtab" and entry:
            strings = sections[link][2]
            return {
                k: _text(data, strings + struct.unpack_from("<I", data, offset + k * entry)[0])
                for k in range(size // entry)
            }
    return {}


def _attributes(data: bytes) -> list[tuple[int, bytes]]:
    """(attribute, payload) records of a .nv.info section."""
    found, place = [], 0
    while place + 4 <= len(data):
        form, attribute, value = struct.unpack_from("<BBH", data, place)
        place += 4
        if form == _SIZED:
            found.append((attribute, data[place : place + value]))
            place += value
    return found
