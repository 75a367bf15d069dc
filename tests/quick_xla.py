"""XLA compiles quickly in the tests: most of a run would go into machine code that runs once.

What `jax.jit` computes stays the same to rounding, and only XLA's own loops are compiled so, never kernels.  Tests of
what XLA's code does to the last bit ask for `xla_as_shipped`; ``pytest --xla-as-shipped`` compiles everything so.
A module that XLA has compiled in this process is not compiled again, as in JAX's own compilation cache.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections import OrderedDict
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import pytest

# name: (as users have it, quickly)
_OPTIONS: dict[str, tuple[Any, Any]] = {
    "xla_backend_optimization_level": (3, 0),
    "xla_llvm_disable_expensive_passes": (False, True),
}
if tuple(int(n) for n in version("jaxlib").split(".")[:2]) < (0, 11):  # later ones do not know it
    _OPTIONS["xla_cpu_use_fusion_emitters"] = (True, False)

_KEPT = 1000
"""Executables that are kept: those used last."""


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
        from jax._src import compiler

        compiler.backend_compile_and_load = _memoised(compiler.backend_compile_and_load)


def _memoised(compile_and_load: Callable[..., Any]) -> Callable[..., Any]:
    """XLA's compiler, which gives the executable of an equal module, options and devices again.

    Left out are modules that call kernels of jcuts, which are looked up when an executable is made, and callbacks.
    """
    executables: OrderedDict[bytes, Any] = OrderedDict()

    def compiled(backend: Any, module: Any, devices: Any, options: Any, host_callbacks: Any) -> Any:
        text = str(module)
        if host_callbacks or "callback" in text or "jcuts" in text:
            return compile_and_load(backend, module, devices, options, host_callbacks)
        places = [device.id for device in devices]
        key = hashlib.sha256(f"{id(backend)} {places} {text}".encode() + options.SerializeAsString()).digest()
        if key not in executables:
            executables[key] = compile_and_load(backend, module, devices, options, host_callbacks)
        executables.move_to_end(key)
        if len(executables) > _KEPT:
            executables.popitem(last=False)
        return executables[key]

    return compiled


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
