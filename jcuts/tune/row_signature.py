"""HMAC signatures of database rows: a row with a valid one was written by this cache.

The secret is a random file next to the database (mode 0600), created by the first process, and in no export.  A row
that was imported, edited, or written by a version without signatures has no valid one.  Without a secret (full disk,
read-only folder) nothing is signed, and such rows count as foreign.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import logging
import os
import stat
from pathlib import Path

SECRET_BYTES = 32
TUNED = "tuned here"
"""Where a row comes from: this cache has measured it."""
CHECKED = "imported, checked here"
"""This cache has checked it."""
CHECKED_IN = "checked in, signed"
"""A file of a problem says it, which is signed with the key that this process was given."""
FOREIGN = "imported, not checked"
"""This cache knows nothing of it."""
OTHER_VERSIONS = "tuned with other versions, not checked"
"""This cache has measured or checked it with other packages, or as an older jcuts."""
RECHECKED = "tuned with other versions, checked here"
"""The same, and this cache has checked it with these versions."""
_log = logging.getLogger("jcuts.tune")


class Signer:
    """Signs rows with the secret of a database. Args: path: of the secret's file; None: nothing is signed."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._secret: bytes | None = None

    def sign(self, row: tuple[str, ...], source: str) -> str:
        """Signature of a row's texts and of what is said of their source; '' without a secret, which this makes."""
        secret = self._known(make=True)
        return "" if secret is None else _digest(secret, row, source)

    def is_signed(self, row: tuple[str, ...], source: str, signature: str) -> bool:
        """Whether this cache has made the signature."""
        secret = self._known(make=False)
        return bool(signature) and secret is not None and hmac.compare_digest(_digest(secret, row, source), signature)

    def _known(self, *, make: bool) -> bytes | None:
        if self._secret is None and self.path is not None:
            self._secret = _read(self.path)
            if self._secret is None and make:
                self._secret = _made(self.path)
        return self._secret


def _digest(secret: bytes, row: tuple[str, ...], source: str) -> str:
    return hmac.new(secret, json.dumps([*row, source]).encode(), hashlib.sha256).hexdigest()


def _read(path: Path) -> bytes | None:
    """The secret in a file of this user that nobody else may read; None for anything else."""
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0))
    except OSError:
        return None
    with os.fdopen(handle, "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            return None
        secret = file.read(SECRET_BYTES + 1)
    return secret if len(secret) == SECRET_BYTES else None


def _made(path: Path) -> bytes | None:
    """The secret that is there once this process has tried to make one: its own, or that of another one."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}-{os.urandom(4).hex()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(os.urandom(SECRET_BYTES))
            file.flush()
            os.fsync(file.fileno())
        if path.exists() and _read(path) is None:
            os.replace(scratch, path)  # cut short, or for others to read: rows that it signed are foreign now
        else:
            try:
                os.link(scratch, path)  # unlike a renaming it does not replace that of another process
            except FileExistsError:
                pass
            except OSError:  # a file system without links
                os.rename(scratch, path)
    except OSError as error:
        _log.info("rows of the tuning database are not signed: %s", error)
    finally:
        with contextlib.suppress(OSError):
            scratch.unlink()
    return _read(path)
