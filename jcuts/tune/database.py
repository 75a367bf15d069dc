"""The tuning database: a persistent SQLite store that survives crashes, damage and concurrent processes.

It holds choices with their measurements, the partitions of functions, and end-to-end decisions.

Rows that this cache wrote are signed (`tune/row_signature.py`); what was imported, edited or written by older versions
is foreign until it was checked.

One transaction per choice (`base/sqlite_file.py` says how the file is opened).  A damaged or foreign file is moved
aside, never deleted.  When the file cannot be written the store says so once and goes on in memory: tuning results may
be lost at exit, the user's program is not.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jcuts.base import keys
from jcuts.base.errors import CacheError
from jcuts.base.sqlite_file import SqliteFile, is_damaged
from jcuts.base.warn_once import unusable_cache
from jcuts.tune.choice import Choice
from jcuts.tune.database_rows import (
    APPLICATION_ID,
    PLACES,
    SCHEMA,
    SIGNATURES,
    TABLES,
    Row,
    device_of,
    insert,
    read_export,
    recorded_schedules,
    regime_distance,
    to_object,
    to_text,
    with_signatures,
)
from jcuts.tune.measure import regime
from jcuts.tune.row_signature import FOREIGN, OTHER_VERSIONS, TUNED, Signer

UNWRITTEN = "cannot write the tuning database"
_log = logging.getLogger("jcuts.tune")


class Store:
    """Store of choices and end-to-end decisions of this machine and these versions.

    Args:
        path: the database file, made with its folders on first use; None keeps everything in memory.
        device: fingerprint of the CPU that was measured (text); rows about GPUs have `keys.GPU_DEVICE`.
        versions: the packages that it was measured with (`keys.packages`).

    A row counts here where its packages are these and the kernel families that it records (``schedules``) have the
    versions that they have here.  Rows of other packages, and those of older databases, which record nothing, are
    `other_choice`: to be checked before they count.  Where a family differs, the row is of other kernels.

    Nothing here raises for a bad file: what went wrong is logged once and kept in ``errors``.
    """

    def __init__(self, path: str | os.PathLike[str] | None, *, device: str, versions: str) -> None:
        self.path = None if path is None else Path(path)
        self._file = self.path and SqliteFile(self.path, tables=TABLES, application=APPLICATION_ID, schema=SCHEMA)
        self.device = device
        self.devices = (device, keys.GPU_DEVICE)
        self.versions = versions
        self.errors: list[CacheError] = []
        self._lock = threading.RLock()
        self._memory: dict[tuple[str, str], tuple[float, dict[str, Any]]] = {}
        self._signer = Signer(self.path and self.path.with_name(self.path.name + ".key"))
        self._sources: dict[tuple[str, str, str], str] = {}  # what this process wrote -> where that comes from
        self._writes = 0
        self._hidden = False  # the file could not be cleared: pretend that it is empty

    # Choices and guards ----------------------------------------------------------------------------------------------

    def lookup(self, problem: str) -> Choice | None:
        """The stored choice of a problem on this device with these versions, or None."""
        return self.choice(problem)[0]

    def put(self, choice: Choice, source: str = TUNED) -> None:
        """Stores a choice with its measurements in one transaction, replacing an earlier one.

        Args: source: how this cache knows that it is right (`tune.row_signature`).
        """
        self._put("choice", choice.problem, choice.to_json(), source=source)

    def drop(self, problem: str) -> None:
        """Removes the choice of a problem on this device with these versions."""
        mine = [versions for versions, value, _ in self._rows("choice", problem) if self._counts(versions, value)]

        def work(db: sqlite3.Connection) -> None:
            for table, versions, device in itertools.product(("choices", "measurements"), mine, self.devices):
                owner = (problem, device, versions)
                db.execute(f"DELETE FROM {table} WHERE problem = ? AND device = ? AND versions = ?", owner)

        with self._lock:
            self._writes += 1
            self._memory.pop(("choice", problem), None)
            self._write(work)

    def choice(self, problem: str) -> tuple[Choice | None, str]:
        """The same as `lookup`, and where it comes from: `TUNED`, `CHECKED` or `FOREIGN`."""
        return self._as_choice(problem, *self.entry("choice", problem))

    def other_choice(self, problem: str) -> tuple[Choice | None, str]:
        """The newest choice of this device that was made with other packages, or by an older jcuts.

        Returns: the choice, and `OTHER_VERSIONS` if this cache has written it, else `FOREIGN`; None, '' for none.
        """
        return self._as_choice(problem, *self._other("choice", problem))

    def _as_choice(self, problem: str, value: dict[str, Any] | None, source: str) -> tuple[Choice | None, str]:
        try:
            choice = None if value is None else Choice.from_json(value)
            if choice is not None and choice.problem != problem:
                raise CacheError(f"not the choice of {problem[:12]}: it is of {choice.problem[:12]}", problem=problem)
            return choice, source
        except CacheError as error:  # a person may have edited the row
            self._report(error)
            return None, source

    def entry(self, kind: str, key: str) -> tuple[dict[str, Any] | None, str]:
        """A stored entry of this device and these versions as JSON data, and where it comes from; None, '' for none.

        A partition may be one of other packages (`OTHER_VERSIONS`), or of an older jcuts (`FOREIGN`): what it says of
        equations is checked against the function anyway, and its kernels have choices of their own.
        """
        with self._lock:
            if (kind, key) in self._memory:
                value = self._memory[kind, key][1]
                return value, self._sources.get((kind, key, to_text(value)), FOREIGN)
        counting = [(data, source) for versions, data, source in self._rows(kind, key) if self._counts(versions, data)]
        if counting:
            return counting[0] if kind != "choice" else min(counting, key=lambda found: regime_distance(found[0]))
        return self._other(kind, key) if kind == "partition" else (None, "")

    def _other(self, kind: str, key: str) -> tuple[dict[str, Any] | None, str]:
        """The newest row of other versions that may be right here, and whether this cache has written it."""
        for versions, data, source in self._rows(kind, key):
            recorded = recorded_schedules(data)
            if versions != self._versions_of(data) and keys.is_current(recorded):
                believed = source != FOREIGN and (recorded or kind == "choice")
                return data, OTHER_VERSIONS if believed else FOREIGN
        return None, ""

    def _counts(self, versions: str, value: Mapping[str, Any]) -> bool:
        """Whether a row of this device is one of these packages and schedules."""
        return versions == self._versions_of(value) and keys.is_current(recorded_schedules(value))

    def _versions_of(self, value: Mapping[str, Any]) -> str:
        """The ``versions`` of a row that these packages write."""
        return keys.row_versions(self.versions, recorded_schedules(value), regime.key_text(regime.recorded(value)))

    def has_these_versions(self, row: Row) -> bool:
        """Whether an entry is one of these packages and schedules, on whatever device."""
        return self._counts(row.versions, row.value)

    def _rows(self, kind: str, key: str) -> Iterator[tuple[str, dict[str, Any], str]]:
        """Rows of this device under a key, newest first: versions, value, where it comes from."""
        for versions, device, text, marks in self._ask(lambda db: with_signatures(db, kind, key, self.devices)):
            data = to_object(text) if isinstance(text, str) else None
            if data is None or not isinstance(text, str) or not isinstance(versions, str):
                continue
            source = self._sources.get((kind, key, text), FOREIGN)
            for name, signature in marks:
                if self._signer.is_signed((kind, key, device, versions, text), str(name), str(signature)):
                    source = str(name)
            yield versions, data, source

    def guard(self, key: str) -> dict[str, Any] | None:
        """A last-guard decision (JSON object) of this device and these versions, or None."""
        return self.entry("guard", key)[0]

    def is_own(self, key: str) -> bool:
        """Whether this cache has taken the last-guard decision under a key."""
        return self.entry("guard", key)[1] != FOREIGN

    def put_guard(self, key: str, decision: Mapping[str, Any], *, on_gpu: bool = False) -> None:
        """Stores a last-guard decision. Args: on_gpu: about programs of a GPU, whose kind is part of the key."""
        self._put("guard", key, dict(decision), on_gpu=on_gpu)

    def partition(self, key: str) -> dict[str, Any] | None:
        """The stored cover of a function (JSON object) on this device with these versions, or None."""
        return self.entry("partition", key)[0]

    def put_partition(self, key: str, cover: Mapping[str, Any], *, is_news: bool = True) -> None:
        """Stores the cover of a function. Args: is_news: whether plans made before may differ from those made now."""
        self._put("partition", key, dict(cover), is_news)

    def adopt_partition(self, key: str, schedules: Mapping[str, str]) -> None:
        """Stores a partition of other versions, which has been found to fit, under these."""
        rows = list(self._rows("partition", key))
        cover = self._other("partition", key)[0]
        if cover is not None and not any(self._counts(versions, data) for versions, data, _ in rows):
            self._put("partition", key, {**cover, "schedules": dict(schedules)}, is_news=False)

    def generation(self) -> tuple[int, int]:
        """Changes whenever anything is stored, by any process; a part of memoisation keys."""
        stored = self._read("SELECT value FROM meta WHERE name = 'generation'", ())
        return (stored[0][0] if stored else -1, self._writes)

    # Housekeeping ----------------------------------------------------------------------------------------------------

    def ls(self, *, all_devices: bool = True) -> list[Row]:
        """Every entry, oldest first; ``all_devices=False`` limits it to this device and these versions."""
        rows: dict[tuple[str, str, str, str], Row] = {}
        for kind, (table, key, value) in PLACES.items():
            for k, device, versions, text, created in self._read(
                f"SELECT {key}, device, versions, {value}, created FROM {table}", ()
            ):
                data = to_object(text)
                if data is not None:
                    rows[kind, k, device, versions] = Row(kind, k, device, versions, created, data)
        for (kind, k), (created, data) in list(self._memory.items()):
            versions, device = self._versions_of(data), device_of(kind, data, self.device)
            rows[kind, k, device, versions] = Row(kind, k, device, versions, created, data)
        found = sorted(rows.values(), key=lambda row: (row.created, row.kind, row.key))
        if all_devices:
            return found
        return [row for row in found if row.device in self.devices and self.has_these_versions(row)]

    def clear(self) -> int:
        """Removes every entry (the file stays); returns how many there were."""
        count = len(self.ls())

        def work(db: sqlite3.Connection) -> None:
            db.execute(SIGNATURES)
            for table in ("choices", "measurements", "guards", "partitions", "signatures"):
                db.execute(f"DELETE FROM {table}")

        self._memory.clear()
        self._writes += 1
        if not self._write(work) and self.path is not None:
            self._hidden = True
        return count

    def export(self, path: str | os.PathLike[str]) -> int:
        """Writes every entry as readable JSON, atomically; returns their number.

        Raises:
            CacheError: the file cannot be written.
        """
        rows = self.ls()
        text = json.dumps({"jcuts_tuning": SCHEMA, "entries": [row.__dict__ for row in rows]}, indent=1, sort_keys=True)
        target = Path(path)
        scratch = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            scratch.write_text(text + "\n")
            os.replace(scratch, target)
        except OSError as error:
            with contextlib.suppress(OSError):
                scratch.unlink()
            raise CacheError(f"cannot write {target}: {error}", path=str(target)) from None
        return len(rows)

    def import_(self, path: str | os.PathLike[str]) -> int:
        """Reads a file that `export` wrote; of two entries with one key the newer stays.  Returns entries taken over.

        Raises:
            CacheError: no such file, not an export, or of another version; the database is then unchanged.
        """
        return self.merge([path])

    def merge(self, paths: Sequence[str | os.PathLike[str]]) -> int:
        """Imports several exports in one transaction: all of them or none."""
        entries = [entry for path in paths for entry in read_export(Path(path))]
        entries.sort(key=lambda row: row.created)
        known = {(row.kind, row.key, row.device, row.versions): row.created for row in self.ls()}
        fresh: dict[tuple[str, str, str, str], Row] = {}
        for row in entries:
            key = (row.kind, row.key, row.device, row.versions)
            if row.created > known.get(key, float("-inf")):
                fresh[key] = row

        def work(db: sqlite3.Connection) -> None:
            for row in fresh.values():
                insert(db, row)

        if fresh and not self._write(work):
            for row in fresh.values():
                if row.device in self.devices and self.has_these_versions(row):
                    self._memory[row.kind, row.key] = (row.created, row.value)
                    self._writes += 1
        return len(fresh)

    # Inside ----------------------------------------------------------------------------------------------------------

    def _put(
        self,
        kind: str,
        key: str,
        value: dict[str, Any],
        is_news: bool = True,
        source: str = TUNED,
        on_gpu: bool = False,
    ) -> None:
        device = keys.GPU_DEVICE if on_gpu else device_of(kind, value, self.device)
        row = Row(kind, key, device, self._versions_of(value), time.time(), value)
        text = to_text(value)
        signature = self._signer.sign((kind, key, device, row.versions, text), source)
        with self._lock:
            self._sources[kind, key, text] = source
            self._writes += is_news
            if self._write(lambda db: insert(db, row, (source, signature)), is_news):
                self._memory.pop((kind, key), None)
            else:
                self._memory[kind, key] = (row.created, value)

    def _read(self, query: str, values: tuple[object, ...]) -> list[Any]:
        return self._ask(lambda db: db.execute(query, values).fetchall())

    def _ask(self, work: Callable[[sqlite3.Connection], list[Any]]) -> list[Any]:
        with self._lock:
            if self._file is None or self._hidden:
                return []
            try:
                return self._file.query(work, self._recover)
            except (sqlite3.Error, OSError) as error:
                self._report(CacheError(f"cannot read the tuning database {self.path}: {error}", path=str(self.path)))
                return []

    def _write(self, work: Any, is_news: bool = True) -> bool:
        """Runs one transaction; False when nothing reached the disk. Args: is_news: whether the generation changes."""

        def entire(db: sqlite3.Connection) -> None:
            work(db)
            if is_news:
                db.execute("UPDATE meta SET value = value + 1 WHERE name = 'generation'")

        with self._lock:
            if self._file is None:
                return False
            try:
                if not self._file.transaction(entire, self._recover):
                    return False
                self._hidden = False
                return True
            except (sqlite3.Error, OSError) as error:
                self._report(
                    CacheError(
                        f"{UNWRITTEN} {self.path} ({error}): tuning results are kept in "
                        "memory only; free some space, or point JCUTS_CACHE_DIR to a writable folder",
                        path=str(self.path),
                    )
                )
                return False

    def _recover(self, error: Exception) -> bool:
        """Moves a damaged or foreign file aside; False for every other error."""
        if is_damaged(error):
            self._set_aside(str(error))
            return True
        return False

    def _set_aside(self, why: str) -> None:
        """Moves the file (and its journal, which belongs to it) out of the way; nothing is deleted."""
        assert self._file is not None
        aside = None
        try:
            aside = self._file.set_aside(len(self.errors))
            if aside is None:
                return  # another process moved it first
        except OSError as error:
            why = f"{why}; moving it aside failed: {error}"
        self._report(
            CacheError(
                f"the tuning database {self.path} is damaged or of another version ({why})"
                + (f": it was moved to {aside} and a fresh one is started" if aside else ""),
                path=str(self.path),
                aside=str(aside) if aside else None,
            )
        )

    @property
    def unwritten(self) -> CacheError | None:
        """Why something did not reach the file; None where all did."""
        return next((error for error in self.errors if error.message.startswith(UNWRITTEN)), None)

    def _report(self, error: CacheError) -> None:
        if not any(known.message == error.message for known in self.errors):
            self.errors.append(error)
            if error.message.startswith(UNWRITTEN) and self.path is not None:
                unusable_cache(_log, "%s", error, folder=self.path.parent)
            else:
                _log.warning("%s", error)
