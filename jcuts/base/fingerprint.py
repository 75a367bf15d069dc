"""Content hashes, and what this installation and CPU are: the parts of cache keys (`jcuts.base.keys`).

Versions are read with ``importlib.metadata``: nothing here imports jax or numba.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import re
import struct
from importlib import metadata
from pathlib import Path

from jcuts.base.errors import UsageError

PACKAGES = ("jax", "jaxlib", "numba", "llvmlite", "numpy")


def _feed(h: hashlib._Hash, part: object) -> None:
    """Feeds a tagged, length-prefixed encoding: different parts never give the same bytes."""
    if part is None:
        h.update(b"n")
    elif isinstance(part, bool):
        h.update(b"b1" if part else b"b0")
    elif isinstance(part, int):
        text = str(part).encode()
        h.update(b"i%d:" % len(text) + text)
    elif isinstance(part, float):
        h.update(b"f" + struct.pack("<d", part))
    elif isinstance(part, str):
        data = part.encode("utf-8", "surrogatepass")
        h.update(b"s%d:" % len(data) + data)
    elif isinstance(part, (bytes, bytearray, memoryview)):
        data = bytes(part)
        h.update(b"y%d:" % len(data) + data)
    elif isinstance(part, (tuple, list)):
        h.update(b"t%d:" % len(part))
        for item in part:
            _feed(h, item)
    elif isinstance(part, dict):
        h.update(b"d%d:" % len(part))
        for key in sorted(part, key=str):
            _feed(h, key)
            _feed(h, part[key])
    elif isinstance(part, (set, frozenset)):
        h.update(b"e%d:" % len(part))
        for item in sorted(part, key=lambda x: (type(x).__name__, str(x))):
            _feed(h, item)
    else:
        raise UsageError(
            f"cannot hash {type(part).__name__}: pass str, bytes, numbers, None and containers of these",
            type=type(part).__name__,
        )


def digest(*parts: object) -> str:
    """SHA-256 of the parts, as 32 hexadecimal digits (128 bits).

    Parts are ``None``, ``bool``, ``int``, ``float``, ``str``, ``bytes`` and tuples, lists, dicts and sets of these; the
    encoding is unambiguous, so ``digest("ab", "c") != digest("a", "bc")``, and dicts and sets do not depend on order.

    Raises:
        UsageError: a part of another type.

    >>> len(digest("a", 1))
    32
    >>> digest({"x": 1, "y": 2}) == digest({"y": 2, "x": 1})
    True
    """
    h = hashlib.sha256()
    for part in parts:
        _feed(h, part)
    return h.hexdigest()[:32]


@functools.cache
def source_hash() -> str:
    """Hash of all of jcuts' Python sources, for records of measurements; no key: prose is part of it."""
    root = Path(__file__).resolve().parent.parent
    return digest(*((str(path.relative_to(root)), path.read_bytes()) for path in sorted(root.rglob("*.py"))))


@functools.cache
def package_version(name: str) -> str:
    """Version of an installed distribution, or ``"none"``."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "none"


@functools.cache
def versions() -> dict[str, str]:
    """Versions of Python and of everything that may change generated code or measured times, for records; no key."""
    found = {"python": platform.python_version()}
    found.update({name: package_version(name) for name in PACKAGES})
    found["jcuts"] = source_hash()
    return found


def _cpuinfo() -> str:
    try:
        return Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


def parse_cpuinfo(text: str) -> tuple[str, tuple[str, ...]]:
    """Model name and sorted feature flags from the text of ``/proc/cpuinfo`` (x86 and ARM spellings)."""
    model = re.search(r"^(?:model name|Model|cpu model)\s*:\s*(.+)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    return (model.group(1).strip() if model else "", tuple(sorted(flags.group(1).split())) if flags else ())


def usable_cores() -> int:
    """Number of cores that this process may run on (respects affinity; not cgroup quotas, as XLA does not)."""
    try:
        return max(1, len(os.sched_getaffinity(0)))
    except AttributeError:  # not Linux
        return max(1, os.cpu_count() or 1)


@functools.cache
def _cpu_identity() -> tuple[str, tuple[str, ...]]:
    model, features = parse_cpuinfo(_cpuinfo())
    return (model or platform.processor() or platform.machine(), features)


def cpu() -> dict[str, object]:
    """``{"machine", "model", "features", "cores"}`` of this CPU."""
    model, features = _cpu_identity()
    return {"machine": platform.machine(), "model": model, "features": features, "cores": usable_cores()}
