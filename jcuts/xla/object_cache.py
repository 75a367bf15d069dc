"""Content-addressed object-code cache on disk: compiled kernels by digest, so that a new process links instead of
compiling.

One file per kernel, ``<cache>/objects/<code fingerprint>/<digest>.jco``: a magic line, one line of JSON (everything of
``CompiledKernel`` but the code, and the code's SHA-256), then the ELF bytes.  The folder names compilers, emitter
sources and CPU features, so that two installations share a cache directory without harm.

Writes are atomic (temporary file, fsync, rename) into directories that only this user may write; files are read back
only if their hash matches, and never unpickled.  Without a usable cache kernels are compiled anew (logged once).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import tempfile
import threading
from pathlib import Path

from jcuts.base import keys, knobs
from jcuts.base.errors import CacheError, JcutsError
from jcuts.base.warn_once import unusable_cache
from jcuts.codegen.artifact import CompiledKernel

log = logging.getLogger("jcuts.objects")

MAGIC = b"jcuts object 1\n"
SUFFIX = ".jco"
_DIGEST = re.compile(r"[0-9A-Za-z_.-]{1,128}")
_CLEAN_EVERY = 64  # writes between two looks at the size of the whole cache

_lock = threading.Lock()
_writes = 0


def secure_directory(path: Path) -> Path:
    """Makes ``path`` (mode 0700) and checks that only this user can write there.

    Raises:
        CacheError: it cannot be made, is not a directory, belongs to another user, or others may write to it.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        state = path.stat()
    except OSError as error:
        raise CacheError(f"cannot use the cache directory {path}: {error}", path=str(path)) from error
    if hasattr(os, "getuid") and state.st_uid != os.getuid():
        raise CacheError(
            f"the cache directory {path} belongs to user {state.st_uid}, not to {os.getuid()}: code from there is "
            "not run; set JCUTS_CACHE_DIR to a directory of your own",
            path=str(path),
            owner=state.st_uid,
        )
    if state.st_mode & 0o022:
        raise CacheError(
            f"the cache directory {path} can be written by other users (mode {state.st_mode & 0o777:o}): "
            "run chmod 700 on it",
            path=str(path),
            mode=state.st_mode & 0o777,
        )
    return path


def root() -> Path:
    """``<cache>/objects``; nothing is created."""
    return knobs.current().cache_dir / "objects"


def _folder() -> Path:
    """The folder of this installation, checked level by level (a foreign parent could swap its children)."""
    base = secure_directory(knobs.current().cache_dir)
    objects = secure_directory(base / "objects")
    return secure_directory(objects / keys.object_folder())


def _path(folder: Path, digest: str) -> Path:
    if not _DIGEST.fullmatch(digest) or digest.startswith("."):
        raise CacheError(f"{digest!r} is not a kernel digest", digest=digest)
    return folder / (digest + SUFFIX)


def encode(kernel: CompiledKernel) -> bytes:
    """Serialises a kernel to the bytes of its file."""
    header = {**kernel.header(), "fingerprint": keys.object_folder()}
    line = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
    check = hashlib.sha256(line + b"\n" + kernel.object_code).hexdigest().encode()
    return MAGIC + check + b"\n" + line + b"\n" + kernel.object_code


def decode(data: bytes, digest: str) -> CompiledKernel:
    """The kernel in a file's bytes (inverse of `encode`).

    Raises:
        CacheError: corrupt, of another format or installation, or another kernel than ``digest``.
    """
    if not data.startswith(MAGIC):
        raise CacheError(f"object file of {digest} has another format", digest=digest)
    check, _, body = data[len(MAGIC) :].partition(b"\n")
    if hashlib.sha256(body).hexdigest().encode() != check:
        raise CacheError(f"object file of {digest} is corrupt: its hash does not fit", digest=digest)
    line, _, code = body.partition(b"\n")
    try:
        header = json.loads(line)
        if header["digest"] != digest or header["fingerprint"] != keys.object_folder():
            raise ValueError("it is of another kernel or installation")
        return CompiledKernel.from_header(header, code)
    except (ValueError, KeyError, TypeError, JcutsError) as error:
        raise CacheError(f"object file of {digest} cannot be used: {error}", digest=digest) from error


def store(kernel: CompiledKernel) -> bool:
    """Writes a kernel; True if it is on disk afterwards.  A full, foreign or read-only cache is logged, not raised."""
    global _writes
    try:
        folder = _folder()
        path = _path(folder, kernel.digest)
        if path.exists():
            return True
        _write_atomically(path, encode(kernel))
    except (CacheError, OSError) as error:
        unusable_cache(log, "kernels stay in memory only, and every process compiles them again: %s", error)
        return False
    with _lock:
        _writes += 1
        due = _writes % _CLEAN_EVERY == 0
    if due:
        clean()
    return True


def _write_atomically(path: Path, data: bytes) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".tmp-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def fetch(digest: str) -> CompiledKernel | None:
    """Reads a kernel; None if it is not there or cannot be used (the reason is logged, a bad file is removed)."""
    try:
        path = _path(_folder(), digest)
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except (CacheError, OSError) as error:
        unusable_cache(log, "object cache not used: %s", error)
        return None
    try:
        kernel = decode(data, digest)
    except CacheError as error:
        log.warning("%s; it is removed", error)
        with contextlib.suppress(OSError):
            path.unlink()
        return None
    with contextlib.suppress(OSError):
        os.utime(path)  # recently used, for clean()
    return kernel


def usage() -> tuple[int, int]:
    """``(files, bytes)`` below the object cache, of every installation."""
    sizes = [size for _, size, _ in _files()]
    return len(sizes), sum(sizes)


def _files() -> list[tuple[float, int, Path]]:
    found: list[tuple[float, int, Path]] = []
    with contextlib.suppress(OSError):  # a directory that nobody may read
        for path in root().glob("*/*"):
            with contextlib.suppress(OSError):  # another process may be cleaning
                state = path.stat()
                found.append((state.st_mtime, state.st_size, path))
    return found


def clean(limit_bytes: int | None = None) -> int:
    """Removes the least recently used files until at most ``limit_bytes`` [B] remain (default: ``JCUTS_CACHE_MAX_MB``).

    Returns: how many files were removed.
    """
    if limit_bytes is None:
        limit_bytes = int(knobs.current().cache_max_mb * 2**20)
    try:
        secure_directory(root())
    except CacheError as error:
        unusable_cache(log, "object cache not cleaned: %s", error)
        return 0
    files = sorted(_files(), key=lambda entry: (entry[0], str(entry[2])))
    total = sum(size for _, size, _ in files)
    removed = 0
    for _, size, path in files:
        if total <= limit_bytes:
            break
        with contextlib.suppress(OSError):
            path.unlink()
            removed += 1
        total -= size
    for folder in root().iterdir():
        with contextlib.suppress(OSError):  # only empty folders go
            folder.rmdir()
    return removed
