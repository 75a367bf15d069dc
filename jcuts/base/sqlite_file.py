"""Robust SQLite file: busy timeout, schema check, damaged files moved aside.

Rollback journal (not WAL: that needs shared memory, which network file systems lack), full synchronisation, one
short-lived connection per operation (safe across threads and forks), tables made by whoever comes first.  A damaged or
foreign file is found before anything is read from it, and moved aside, never deleted, by callers that may do so.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
BUSY_SECONDS = 30.0
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_FORMAT)


class ForeignFile(sqlite3.DatabaseError):
    """The file is SQLite, but another program's or of another version."""


class DamagedFile(ForeignFile):
    """The file is ours, but not whole."""


def is_damaged(error: BaseException) -> bool:
    """Whether an error means that the contents are no use here; locked, full and read-only files are whole."""
    if isinstance(error, ForeignFile):
        return True
    # The low byte is the primary code.
    code = getattr(error, "sqlite_errorcode", None)
    if code is not None:
        return (code & 0xFF) in _DAMAGED
    return isinstance(error, sqlite3.OperationalError) and "no such table" in str(error)


def why_read_only(path: Path) -> str:
    """Why nothing can be written to a database, or made where there is none yet; '' if it can.  It stays as it is."""
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            probe = path.with_name(f"{path.name}.probe-{os.getpid()}")
            probe.write_bytes(b"x")
            probe.unlink()
            return ""
        with contextlib.closing(sqlite3.connect(path, timeout=1.0, isolation_level=None)) as db:
            db.execute("BEGIN IMMEDIATE")
            db.execute("CREATE TABLE written_by_nobody (x)")  # begins the journal, too
            db.execute("ROLLBACK")
    except sqlite3.OperationalError as error:
        busy = (getattr(error, "sqlite_errorcode", 0) & 0xFF) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
        return "" if busy else str(error)  # another process writes: so can this one
    except (sqlite3.Error, OSError) as error:
        return str(error)
    return ""


class SqliteFile:
    """One file.

    Args: tables: statements that make the tables, separated by semicolons; application: id shown by file(1);
    schema: version of the tables.
    """

    def __init__(self, path: Path, *, tables: str, application: int, schema: int) -> None:
        self.path = path
        self.tables, self.application, self.schema = tables, application, schema
        self._checked = False

    @contextlib.contextmanager
    def open(self, *, write: bool) -> Iterator[sqlite3.Connection | None]:
        """One connection; None if there is no database to read yet.

        Raises: sqlite3.Error, OSError; ForeignFile if it is another program's or of another version; DamagedFile.
        """
        if write and not self.path.exists():
            self.path.parent.mkdir(parents=True, exist_ok=True)
        elif not write and not self.path.exists():
            yield None
            return
        db = sqlite3.connect(self.path, timeout=BUSY_SECONDS, isolation_level=None)
        try:
            db.execute("PRAGMA synchronous = FULL")
            if not self._checked or write:
                self._check(db, create=write)
            yield db if self._checked else None
        finally:
            db.close()

    def query(
        self, work: Callable[[sqlite3.Connection], list[Any]], recover: Callable[[Exception], bool] | None = None
    ) -> list[Any]:
        """The rows that ``work`` reads; none where there is no database yet.

        Args: recover: asked with the first error whether it has changed something, so that a second try may help.
        Raises: as `open`.
        """

        def once() -> list[Any]:
            with self.open(write=False) as db:
                return [] if db is None else work(db)

        return _twice(once, recover)

    def transaction(
        self, work: Callable[[sqlite3.Connection], None], recover: Callable[[Exception], bool] | None = None
    ) -> bool:
        """Runs ``work`` as one transaction, which reaches the disk as a whole or not at all; whether it did.

        Args, Raises: as `query`.
        """

        def once() -> bool:
            with self.open(write=True) as db:
                if db is None:
                    return False
                db.execute("BEGIN IMMEDIATE")
                work(db)
                db.execute("COMMIT")
                return True

        return _twice(once, recover)

    def set_aside(self, number: int) -> Path | None:
        """Moves the file (and its journal, which belongs to it) out of the way; None if another process was faster.

        Raises: OSError if it cannot be moved.
        """
        self._checked = False
        aside = self.path.with_name(f"{self.path.name}.aside-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{number}")
        journal = self.path.with_name(self.path.name + "-journal")
        try:
            os.replace(self.path, aside)
        except FileNotFoundError:
            return None
        if journal.exists():
            os.replace(journal, aside.with_name(aside.name + "-journal"))
        return aside

    def _check(self, db: sqlite3.Connection, *, create: bool) -> None:
        """Is this our database, whole and of this schema?  An empty file is made into one when ``create``."""
        version = db.execute("PRAGMA user_version").fetchone()[0]
        owner = db.execute("PRAGMA application_id").fetchone()[0]
        if (owner, version) == (0, 0) and not db.execute("SELECT name FROM sqlite_master").fetchall():
            if not create:
                return
            db.execute("PRAGMA journal_mode = DELETE")
            db.execute("BEGIN IMMEDIATE")
            # Another process may have made the tables while this one waited for the lock.
            if not db.execute("SELECT name FROM sqlite_master").fetchall():
                for statement in self.tables.split(";"):
                    if statement.strip():
                        db.execute(statement)
                db.execute(f"PRAGMA application_id = {self.application}")
                db.execute(f"PRAGMA user_version = {self.schema}")
            db.execute("COMMIT")
            self._checked = True
            return
        if owner != self.application or version != self.schema:
            raise ForeignFile(f"schema version {version} of application {owner:#x}, this jcuts writes {self.schema}")
        if not self._checked:
            verdict = db.execute("PRAGMA integrity_check(1)").fetchone()[0]
            if verdict != "ok":
                raise DamagedFile(f"integrity check: {verdict}")
            self._checked = True


def _twice(once: Callable[[], T], recover: Callable[[Exception], bool] | None) -> T:
    try:
        return once()
    except (sqlite3.Error, OSError) as error:
        if recover is None or not recover(error):
            raise
    return once()
