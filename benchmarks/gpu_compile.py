"""Compiles many programs for a GPU in parallel processes into a folder of kernels; needs no GPU."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from jcuts.base.errors import CompileRejected  # noqa: E402
from jcuts.codegen.cuda.target import CudaTarget  # noqa: E402
from jcuts.dfg.program import Program  # noqa: E402


@dataclass(frozen=True)
class Built:
    """What became of one program: a kernel file, or why not (``stack``: bytes of local memory, 0 for other reasons)."""

    path: Path | None
    reason: str = ""
    stack: int = 0


def compile_all(
    programs: Iterable[Program], folder: Path, capability: tuple[int, int], jobs: int = 0
) -> dict[str, Built]:
    """Digest -> kernel file. Kernels that are in the folder already are not compiled again."""
    folder.mkdir(parents=True, exist_ok=True)
    unique = {p.digest: p for p in programs}
    jobs = jobs or os.cpu_count() or 1
    tasks = [
        (json.dumps(p.to_json()), str(_path(folder, digest, capability)), capability) for digest, p in unique.items()
    ]
    if jobs == 1 or len(tasks) < 2:
        answers = [_compile(task) for task in tasks]
    else:  # no fork: the parent may have threads of JAX
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(min(jobs, len(tasks)), mp_context=context) as pool:
            answers = list(pool.map(_compile, tasks, chunksize=max(1, min(8, len(tasks) // (4 * jobs)))))
    return {
        digest: Built(None if reason else _path(folder, digest, capability), reason, stack)
        for digest, (reason, stack) in zip(unique, answers, strict=True)
    }


def _path(folder: Path, digest: str, capability: tuple[int, int]) -> Path:
    return folder / f"{digest}.sm{capability[0]}{capability[1]}.kernel"


def _compile(task: tuple[str, str, tuple[int, int]]) -> tuple[str, int]:
    from jcuts.codegen.cuda.compile import compile_program
    from jcuts.tune.kernelfile import write_kernel

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
