"""File format of compiled kernels in a session's private folder: one line of JSON, then the object code."""

from __future__ import annotations

import json
from pathlib import Path

from jcuts.base.errors import CompileRejected
from jcuts.codegen.artifact import CompiledKernel


def write_kernel(path: Path, kernel: CompiledKernel) -> None:
    """Writes a kernel."""
    head = {**kernel.header(), "bytes": len(kernel.object_code)}
    path.write_bytes(json.dumps(head).encode() + b"\n" + kernel.object_code)


def read_kernel(path: Path) -> CompiledKernel:
    """Reads what `write_kernel` wrote.

    Raises:
        CompileRejected: the file is missing, cut short, or not a kernel.
    """
    try:
        line, _, code = path.read_bytes().partition(b"\n")
        head = json.loads(line)
        if head["bytes"] != len(code):
            raise ValueError(f"{len(code)} bytes of code instead of {head['bytes']}")
        return CompiledKernel.from_header(head, code)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CompileRejected(f"cannot read the compiled kernel {path.name}: {error}", path=str(path)) from None
