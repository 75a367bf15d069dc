"""Compiles many programs for a GPU in parallel processes into a folder of kernels; needs no GPU."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from jcuts.base.errors import CompileRejected
from jcuts.codegen.cuda.toolchain.target import CudaTarget
from jcuts.kernel_ir.program import Program


@dataclass(frozen=True)
class Built:
    """What became of one program: a kernel file, or why not (``stack``: bytes of local memory, 0 for other reasons)."""

    path: Path | None
    reason: str = ""
    stack: int = 0


class Compiler:
    """Processes that compile; a context manager.  Kernels that are in the folder already are not compiled again."""

    def __init__(self, folder: Path, capability: tuple[int, int], jobs: int = 0) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.capability = folder, capability
        # No fork: the parent may have threads of JAX.
        context = multiprocessing.get_context("spawn")
        jobs = jobs or os.cpu_count() or 1
        self.pool = ProcessPoolExecutor(jobs, mp_context=context) if jobs > 1 else None

    def __enter__(self) -> Compiler:
        return self

    def __exit__(self, *_: object) -> None:
        if self.pool is not None:
            self.pool.shutdown(cancel_futures=True)

    def start(self, programs: Iterable[Program]) -> Callable[[], dict[str, Built]]:
        """Begins to compile; what it gives back waits for the results: digest -> what became of the program."""
        unique = {p.digest: p for p in programs}
        tasks = [
            (json.dumps(p.to_json()), str(_path(self.folder, digest, self.capability)), self.capability)
            for digest, p in unique.items()
        ]
        answers = map(_compile, tasks) if self.pool is None else self.pool.map(_compile, tasks, chunksize=4)

        def wait() -> dict[str, Built]:
            return {
                digest: Built(None if reason else _path(self.folder, digest, self.capability), reason, stack)
                for digest, (reason, stack) in zip(unique, answers, strict=True)
            }

        return wait


def compile_all(
    programs: Iterable[Program], folder: Path, capability: tuple[int, int], jobs: int = 0
) -> dict[str, Built]:
    """Compiles programs and waits for all of them."""
    with Compiler(folder, capability, jobs) as compiler:
        return compiler.start(programs)()


def _path(folder: Path, digest: str, capability: tuple[int, int]) -> Path:
    return folder / f"{digest}.sm{capability[0]}{capability[1]}.kernel"


def _compile(task: tuple[str, str, tuple[int, int]]) -> tuple[str, int]:
    from jcuts.codegen.cuda.compile import compile_program
    from jcuts.tune.kernel_file import write_kernel

    text, out, capability = task
    if os.path.exists(out):
        return "", 0
    try:
        kernel = compile_program(Program.from_json(json.loads(text)), CudaTarget(capability))
    except CompileRejected as error:
        return error.message, int(str(error.values.get("stack", 0)))
    part = Path(f"{out}.{os.getpid()}.part")  # a process that is killed leaves no half of a kernel under its name
    write_kernel(part, kernel)
    os.replace(part, out)
    return "", 0
