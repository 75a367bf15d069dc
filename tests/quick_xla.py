"""XLA compiles quickly in the tests: most of a run would go into machine code that runs once.

What `jax.jit` computes stays the same to rounding, and only XLA's own loops are compiled so, never kernels.  Tests of
what XLA's code does to the last bit ask for `xla_as_shipped`; ``pytest --xla-as-shipped`` compiles everything so.
A module that XLA has compiled is not compiled again, as in JAX's own compilation cache (`tests.compiled_files`).
MLIR's contexts, which take a third of the time of lowering one operation and a megabyte each, serve many modules.
"""

from __future__ import annotations

import hashlib
import os
import sys
import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import pytest

from tests import compiled_files

# name: (as users have it, quickly)
_OPTIONS: dict[str, tuple[Any, Any]] = {
    "xla_backend_optimization_level": (3, 0),
    "xla_llvm_disable_expensive_passes": (False, True),
}
if tuple(int(n) for n in version("jaxlib").split(".")[:2]) < (0, 11):  # later ones do not know it
    _OPTIONS["xla_cpu_use_fusion_emitters"] = (True, False)

_KEPT = 1000
"""Executables that are kept: those used last."""
_MODULES = 50
"""Modules of one MLIR context, which keeps their constants."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--xla-as-shipped", action="store_true", help="compile XLA's code as users have it (takes longer)")


def pytest_configure(config: pytest.Config) -> None:
    # JAX reads it when it makes its first client; child processes read it, too.
    given = os.environ.get("XLA_FLAGS", "")
    wanted = {"xla_force_host_platform_device_count": 4}  # for the sharding tests
    if not config.getoption("--xla-as-shipped"):
        wanted |= {name: quick for name, (_, quick) in _OPTIONS.items()}
    flags = [f"--{name}={str(value).lower()}" for name, value in wanted.items() if f"--{name}" not in given]
    os.environ["XLA_FLAGS"] = " ".join([given, *flags]).strip()


def pytest_collection_finish() -> None:
    if "jax" in sys.modules:  # not in the process that only hands tests out
        memoise()


def memoise() -> None:
    """XLA compiles a module once, and few MLIR contexts are made, from now on in this process and its forks."""
    from jax._src import compiler
    from jax._src.interpreters import mlir

    compiler.backend_compile_and_load = _memoised(compiler.backend_compile_and_load)
    mlir.make_ir_context = _reused(mlir.make_ir_context)


def _reused(make_ir_context: Callable[[], Any]) -> Callable[[], Any]:
    """Contexts of MLIR: the next `_MODULES` of a thread are the same one."""
    local = threading.local()

    def context() -> Any:
        if getattr(local, "left", 0) == 0:
            local.context, local.left = make_ir_context(), _MODULES
        local.left -= 1
        return local.context

    return context


def _memoised(compile_and_load: Callable[..., Any]) -> Callable[..., Any]:
    """XLA's compiler, which gives the executable of an equal module, options and devices again.

    Left out are modules that call kernels of jcuts, which are looked up when an executable is made, and callbacks.
    """
    from jcuts.base import fingerprint

    executables: OrderedDict[tuple[int, str], Any] = OrderedDict()
    compiler = f"{version('jaxlib')} {os.environ['XLA_FLAGS']} {sorted(fingerprint.cpu().items())}"

    def compiled(backend: Any, module: Any, devices: Any, options: Any, host_callbacks: Any) -> Any:
        text = str(module)
        if host_callbacks or "callback" in text or "jcuts" in text:
            return compile_and_load(backend, module, devices, options, host_callbacks)
        places = [device.id for device in devices]
        asked = f"{compiler} {backend.platform} {places} {text}".encode() + options.SerializeAsString()
        key = hashlib.sha256(asked).hexdigest()
        if (id(backend), key) not in executables:
            found = _from_file(key, backend, devices, options)
            if found is None:
                found = compile_and_load(backend, module, devices, options, host_callbacks)
                _to_file(key, backend, found)
            executables[id(backend), key] = found
        executables.move_to_end((id(backend), key))
        if len(executables) > _KEPT:
            executables.popitem(last=False)
        return executables[id(backend), key]

    return compiled


def _from_file(key: str, backend: Any, devices: Any, options: Any) -> Any:
    """The executable that a process has made of a module for this CPU, None if none has."""
    data = compiled_files.read(f"{key}.xla") if backend.platform == "cpu" else None
    return None if data is None else backend.deserialize_executable(zlib.decompress(data), devices, options)


def _to_file(key: str, backend: Any, executable: Any) -> None:
    if backend.platform == "cpu":
        compiled_files.write(f"{key}.xla", zlib.compress(executable.serialize(), 1))


@pytest.fixture(scope="module")
def xla_as_shipped():
    """XLA compiles what this file's tests and their child processes compile as it does for users."""
    import jax
    from jax._src import compiler

    given = compiler.get_compile_options
    shipped = {name: value for name, (value, _) in _OPTIONS.items()}

    def get_compile_options(*args: Any, env_options_overrides: dict[str, Any] | None = None, **more: Any) -> Any:
        return given(*args, env_options_overrides={**shipped, **(env_options_overrides or {})}, **more)

    jax.devices()  # has read the flags
    quick = {f"--{name}" for name in _OPTIONS}
    flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if flag.partition("=")[0] not in quick]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLA_FLAGS", " ".join(flags))
        patch.setattr(compiler, "get_compile_options", get_compile_options)
        jax.clear_caches()
        yield
    jax.clear_caches()
