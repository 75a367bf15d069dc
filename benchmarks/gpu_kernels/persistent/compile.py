"""CUDA C of the phases -> cubins by NVRTC, without a GPU; what the assembler says about registers and local memory."""

from __future__ import annotations

import re
import struct
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.gpu_kernels.persistent import phases

HERE = Path(__file__).resolve().parent
PRIMITIVES = HERE / "primitives.cuh"
SOURCES = (HERE / "phases.cuh", HERE / "matmul.cuh", HERE / "kernels.cuh")
ARCH = "sm_90"


@dataclass(frozen=True)
class Unit:
    """One program. Args: threads: that compute, of a block; blocks: per multiprocessor; slots: of the ring of weights
    in shared memory; form: "persistent", "chain" (a kernel per phase) or "copies" (equal bodies with distinct code)."""

    form: str
    threads: int
    blocks: int
    slots: int

    @property
    def name(self) -> str:
        return f"{self.form} {self.threads} threads {self.blocks} per multiprocessor"

    @property
    def fine(self) -> bool:
        """Whether tiles are those for two blocks per multiprocessor."""
        return self.form == "persistent" and self.blocks > 1

    @property
    def shared_bytes(self) -> int:
        """Of a block: `Shared` of `phases.cuh`, in whole 128 bytes."""
        found = self.slots * 4 * phases.CHUNK + 4 * 9216 + 64 * 96 + 2 * 8 * self.slots + 4 * 64 + 3 * 4
        return -(-found // 128) * 128

    def bodies(self) -> list[str]:
        """C++ types by number."""
        if self.form == "copies":
            return [p.body(False, tag) for p in phases.COPIED for tag in range(phases.COPIES)]
        return [p.body(self.fine) for p in phases.BODIES]

    def source(self, primitives: Path = PRIMITIVES) -> str:
        """The whole program. Args: primitives: the file of the instructions, in a test of another machine's."""
        cases = " ".join(f"X({k}, {body})" for k, body in enumerate(self.bodies()))
        defines = {"THREADS": self.threads, "MIN_BLOCKS": self.blocks, "SLOTS": self.slots, "BODIES(X)": cases}
        if self.form != "chain":
            defines["PERSISTENT"] = 1
        head = "".join(f"#define {k} {v}\n" for k, v in defines.items())
        return head + "".join(path.read_text(encoding="utf-8") for path in (primitives, *SOURCES))


UNITS = (
    Unit("persistent", 256, 1, 20),
    Unit("persistent", 512, 1, 20),
    Unit("persistent", 256, 2, 7),
    Unit("chain", 256, 2, 6),
    Unit("chain", 512, 1, 6),
    Unit("copies", 256, 1, 20),
)


def compiled(unit: Unit) -> dict[str, Any]:
    """``cubin``, ``seconds``, ``kernels`` with registers of each; ``spilled`` where they use local memory; or
    ``failed``, with the compiler's words."""
    from cuda.bindings import nvrtc

    start = time.perf_counter()
    _, program = nvrtc.nvrtcCreateProgram(unit.source().encode(), b"phases.cu", 0, [], [])
    options = [f"-arch={ARCH}".encode(), b"-std=c++17", b"-default-device", b"--ptxas-options=-v"]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    _, size = nvrtc.nvrtcGetProgramLogSize(program)
    log = b" " * size
    nvrtc.nvrtcGetProgramLog(program, log)
    text = log.decode(errors="replace").strip("\0 \n")
    row: dict[str, Any] = {"unit": unit.name, "seconds": time.perf_counter() - start, "shared": unit.shared_bytes}
    if int(status):
        return row | {"failed": text[-2000:]}
    _, size = nvrtc.nvrtcGetCUBINSize(program)
    cubin = b" " * size
    nvrtc.nvrtcGetCUBIN(program, cubin)
    row |= {"cubin": cubin, "code_bytes": code_bytes(cubin), "kernels": resources(text)}
    spilled = {k: r for k, r in row["kernels"].items() if r["stack"] or r["spills"]}
    if not row["kernels"]:
        row["log"] = text[:1000]
    return row | ({"spilled": spilled} if spilled else {})


def code_bytes(cubin: bytes) -> dict[str, int]:
    """Machine code of every kernel [B]: the sections ``.text.NAME`` of the ELF file."""
    start = struct.unpack_from("<Q", cubin, 40)[0]
    size, count, strings = struct.unpack_from("<3H", cubin, 58)
    headers = [struct.unpack_from("<2I4Q", cubin, start + k * size) for k in range(count)]
    names = headers[strings][4]
    found = {}
    for header in headers:
        name = cubin[names + header[0] : cubin.index(b"\0", names + header[0])].decode()
        if name.startswith(".text."):
            found[name.removeprefix(".text.")] = header[5]
    return found


def resources(log: str) -> dict[str, dict[str, int]]:
    """Registers, stack and spills [B] of the kernels in ptxas' log.

    >>> resources("Compiling entry function 'k' for 'sm_90'\\n 0 bytes stack frame, 4 bytes spill stores, 8 bytes "
    ...           "spill loads\\nptxas info : Used 8 registers, used 0 barriers")
    {'k': {'stack': 0, 'spills': 12, 'registers': 8}}
    """
    found = {}
    for part in re.split(r"Compiling entry function '", log)[1:]:
        sizes = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", part)
        used = re.search(r"Used (\d+) registers", part)
        if sizes and used:
            stack, stores, loads = (int(n) for n in sizes.groups())
            found[part.split("'")[0]] = {"stack": stack, "spills": stores + loads, "registers": int(used[1])}
    return found


def compile_all(units: Sequence[Unit], workers: int) -> list[dict[str, Any]]:
    """All programs in parallel; none of them raises."""
    with ProcessPoolExecutor(min(workers, len(units)), mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(compiled, unit) for unit in units]
        found = []
        for unit, future in zip(units, futures, strict=True):
            try:
                found.append(future.result())
            except Exception as error:
                found.append({"unit": unit.name, "failed": f"{type(error).__name__}: {error}"})
    return found
