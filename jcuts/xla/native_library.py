"""Loader of the native library (``custom_calls/``, by ctypes), with an ABI check against the running jaxlib.

Every fault here is a ``NativeError``; callers test ``native_available()`` and otherwise leave the work to XLA.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import logging
import re
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jcuts.base import knobs
from jcuts.base.errors import NativeError
from jcuts.base.warn_once import warn_once

log = logging.getLogger("jcuts.native")

LIBRARY = "libjcuts_cpu.so"
RESOLVER = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p)
"""C type of the resolver: gets a digest, returns non-zero once it is registered."""

_lock = threading.Lock()
_loaded: dict[Path, ctypes.CDLL] = {}


def library_path(name: str = LIBRARY) -> Path:
    """Path of a library: ``JCUTS_NATIVE`` (others: the file next to it), else in the installed package.

    Raises:
        NativeError: it is not there; attribute ``tried``.
    """
    override = knobs.current().native
    if override is not None:
        chosen = override if name == LIBRARY else override.with_name(name)
        if not chosen.is_file():
            why = f"JCUTS_NATIVE={override}: {chosen} is not a file: point it at {LIBRARY} or unset it"
            raise _missing(why, [str(chosen)])
        return chosen.resolve()
    # An editable install keeps built files elsewhere than sources: ask the import system as well.
    folders = [Path(__file__).resolve().parent.parent / "_native"]
    spec = importlib.util.find_spec("jcuts")
    folders += [Path(p) / "_native" for p in (spec.submodule_search_locations if spec else None) or ()]
    tried = list(dict.fromkeys(str(folder / name) for folder in folders))
    for path in tried:
        if Path(path).is_file():
            return Path(path)
    why = (
        f"the native library {name} is missing (looked at {', '.join(tried)}): run `make native` in a source tree, "
        "leave it if jcuts is installed, or reinstall jcuts with a C++17 compiler at hand"
    )
    raise _missing(why, tried) if name == LIBRARY else NativeError(why, tried=tried)


def _missing(why: str, tried: list[str]) -> NativeError:
    """The error of a library without which there are no kernels, of which the user is told."""
    warn_once(log, why, "%s; until then functions are left to XLA", why)
    return NativeError(why, tried=tried)


def parse_ffi_version(header: str) -> tuple[int, int] | None:
    """``(major, minor)`` of XLA's FFI from the text of ``xla/ffi/api/c_api.h``, or None."""
    numbers = []
    for name in ("MAJOR", "MINOR"):
        found = re.search(rf"^\s*#\s*define\s+XLA_FFI_API_{name}\s+(\d+)", header, re.MULTILINE)
        if not found:
            return None
        numbers.append(int(found.group(1)))
    return (numbers[0], numbers[1])


@functools.cache
def runtime_ffi_version() -> tuple[int, int] | None:
    """FFI version of the running jaxlib, read from the headers that it ships; None if it ships none."""
    spec = importlib.util.find_spec("jaxlib")
    for folder in (spec.submodule_search_locations if spec else None) or ():
        header = Path(folder) / "include" / "xla" / "ffi" / "api" / "c_api.h"
        try:
            return parse_ffi_version(header.read_text(encoding="utf-8"))
        except OSError:
            continue
    return None


def check_version(built: tuple[int, int], running: tuple[int, int] | None) -> None:
    """FFI compatibility: same major version as XLA's, and a minor version that is not newer.

    Raises:
        NativeError: the versions do not fit; attributes ``built`` and ``running``.
    """
    if running is None:  # XLA itself checks at registration
        return
    if built[0] != running[0] or built[1] > running[1]:
        raise NativeError(
            f"the native library speaks XLA FFI {built[0]}.{built[1]}, this jaxlib speaks {running[0]}.{running[1]}: "
            "rebuild jcuts against the installed jaxlib (`make native` in a source tree)",
            built=built,
            running=running,
        )


def _declare(lib: ctypes.CDLL) -> None:
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    signatures = {
        "jcuts_ffi_api_version": (ctypes.c_int, []),
        "jcuts_state_type_id": (pointer, []),
        "jcuts_state_type_info": (pointer, []),
        "jcuts_chain_type_id": (pointer, []),
        "jcuts_chain_type_info": (pointer, []),
        "jcuts_loop_type_id": (pointer, []),
        "jcuts_loop_type_info": (pointer, []),
        "jcuts_register": (ctypes.c_int, [ctypes.c_char_p, pointer]),
        "jcuts_unregister": (ctypes.c_int, [ctypes.c_char_p]),
        "jcuts_is_registered": (ctypes.c_int, [ctypes.c_char_p]),
        "jcuts_arena_bytes": (size, []),
        "jcuts_set_resolver": (None, [RESOLVER]),
        "jcuts_bench": (
            ctypes.c_int,
            [pointer, ctypes.POINTER(pointer), size, pointer, size, size, size, ctypes.POINTER(ctypes.c_double)],
        ),
    }
    declare(lib, signatures)


def declare(lib: ctypes.CDLL, signatures: Mapping[str, tuple[Any, list[Any]]]) -> None:
    """Sets result and argument types of functions.  Raises: AttributeError: the library lacks one."""
    for name, (result, arguments) in signatures.items():
        function = getattr(lib, name)
        function.restype = result
        function.argtypes = arguments


def opened(path: Path, what: str, declare: Callable[[ctypes.CDLL], None], version: str) -> ctypes.CDLL:
    """A library of jcuts, opened and checked.

    Args: what: what messages call it; declare: sets its functions' types; version: its function that gives the FFI
        version that it was built for.
    Raises: NativeError: missing, unloadable, not jcuts' library, or built for another FFI version.
    """
    try:
        lib = ctypes.CDLL(str(path))
        declare(lib)
    except (OSError, AttributeError) as error:
        raise NativeError(
            f"cannot load the {what} {path}: {error}. Rebuild it with `make native`", path=str(path)
        ) from error
    check_version(divmod(int(getattr(lib, version)()), 1000), runtime_ffi_version())
    return lib


def load() -> ctypes.CDLL:
    """The native library, loaded once and checked.

    Raises:
        NativeError: missing, unloadable, not jcuts' library, or built for another FFI version.
    """
    path = library_path()
    with _lock:
        lib = _loaded.get(path)
        if lib is None:
            lib = _loaded[path] = opened(path, "native library", _declare, "jcuts_ffi_api_version")
        return lib


def native_available() -> tuple[bool, str]:
    """``(True, path)`` if the native library can be used, else ``(False, reason)``."""
    try:
        load()
        return True, str(library_path())
    except NativeError as error:
        return False, error.message
