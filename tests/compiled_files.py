"""What XLA and numba have compiled in the tests, in files that all processes of a run and later runs read.

They lie in pytest's cache folder (``.pytest_cache/d/compiled``) under hashes of all that the compilers read: who
changes a kernel, an emitter, an option or a compiler finds nothing there.  ``pytest --compile-anew`` begins with an
empty folder; ``pytest --cache-clear`` and ``make clean`` delete it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

FOLDER = "TESTS_COMPILED_FILES"
"""Environment variable with the folder's path, for child processes."""
_KEPT_SECONDS = 14 * 86400
"""Files that no run has read for so long are deleted."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--compile-anew", action="store_true", help="use nothing that earlier runs have compiled")


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        return  # the process that hands tests out has chosen
    if config.getoption("--compile-anew") or getattr(config, "cache", None) is None:
        folder = Path(tempfile.mkdtemp(prefix="jcuts-compiled-"))
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    else:
        folder = config.cache.mkdir("compiled")
        _clean(folder)
    os.environ[FOLDER] = str(folder)


def _clean(folder: Path) -> None:
    oldest = time.time() - _KEPT_SECONDS
    for file in os.scandir(folder):
        with contextlib.suppress(OSError):
            if file.stat().st_mtime < oldest:
                os.unlink(file.path)


def read(name: str) -> bytes | None:
    """The bytes of a file, None if there is none."""
    path = os.path.join(os.environ[FOLDER], name)
    try:
        with open(path, "rb") as file:
            data = file.read()
        os.utime(path)
    except OSError:
        return None
    return data


def write(name: str, data: bytes) -> None:
    """Makes a file, at once; a full disk is no error."""
    folder = os.environ[FOLDER]
    with contextlib.suppress(OSError):
        handle, scratch = tempfile.mkstemp(dir=folder)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(scratch, os.path.join(folder, name))


def pytest_collection_finish() -> None:
    memoise_kernels()


def memoise_kernels() -> None:
    """Kernels that jcuts asks for are compiled once; tests that call the compiler themselves have imported it."""
    if FOLDER in os.environ:
        from jcuts.codegen.cpu import compile as compiler

        compiler.compile_program = _memoised(compiler.compile_program)


def _memoised(compile_program: Callable[..., Any]) -> Callable[..., Any]:
    """The compiler of kernels for CPUs; a kernel's digest names the program, this CPU, the compilers and emitters."""
    from jcuts.base.errors import CacheError
    from jcuts.codegen.cpu.target import host_target, kernel_digest
    from jcuts.xla import object_cache

    @functools.wraps(compile_program)
    def compiled(program: Any, target: Any = None) -> Any:
        digest = kernel_digest(program, target or host_target())
        name = f"{digest}.kernel"
        data = read(name)
        if data is not None:
            with contextlib.suppress(CacheError):
                return object_cache.decode(data, digest)
        kernel = compile_program(program, target)
        write(name, object_cache.encode(kernel))
        return kernel

    return compiled
