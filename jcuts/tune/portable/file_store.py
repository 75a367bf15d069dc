"""The user's tuning database with folders of checked-in results beside it (``JCUTS_DATABASES``)."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jcuts.base import keys, knobs
from jcuts.base.errors import CacheError
from jcuts.tune.database import Store
from jcuts.tune.database_rows import Row, recorded_schedules, to_text
from jcuts.tune.portable import row_files
from jcuts.tune.portable.shipped import ShippedRows
from jcuts.tune.row_signature import CHECKED_IN, FOREIGN, OTHER_VERSIONS

Noted = set[tuple[str, str]]
"""Kinds and keys of rows."""


class FileStore(Store):
    """A `Store` that also finds what folders hold; it never writes there.

    What this cache has measured or checked goes first, but for rows that are pinned in a folder.  Rows that are signed
    with the key count as measured; all others are of another cache, and are checked before they count.

    Args: path, device, versions: as of `Store`; folders: of files (`row_files`); key: of the team, None for none;
    shipped: rows that came with jcuts, which go last.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        *,
        device: str,
        versions: str,
        folders: Sequence[Path] = (),
        key: bytes | None = None,
        shipped: ShippedRows | None = None,
    ) -> None:
        super().__init__(path, device=device, versions=versions)
        self._files: dict[tuple[str, str], list[row_files.FileRow]] = {}
        self._shipped = shipped
        self._wrong: Noted = set()  # choices of files that turned out to be wrong here
        self._noted: list[Noted] = []
        for folder in folders:
            self._read_folder(folder, key)
        for found in self._files.values():
            found.sort(key=lambda one: -one.row.created)
        known = [(*place, one.signed, to_text(one.row.value)) for place, found in self._files.items() for one in found]
        self._content = keys.row_files(sorted(known))

    def generation(self) -> tuple[int, int]:
        """As of `Store`; other files are another generation."""
        stored, writes = super().generation()
        return stored + self._content, writes

    def _read_folder(self, folder: Path, key: bytes | None) -> None:
        try:
            rows, errors = row_files.read_folder(folder, key)
        except CacheError as error:
            rows, errors = [], [error]
        for error in errors:
            self._report(error)
        for one in rows:
            if one.row.device in self.devices:
                self._files.setdefault((one.row.kind, one.row.key), []).append(one)

    @contextlib.contextmanager
    def noting(self) -> Iterator[Noted]:
        """Inside the block, the rows that are found or stored are noted."""
        noted: Noted = set()
        self._noted.append(noted)
        try:
            yield noted
        finally:
            self._noted.remove(noted)

    def rows_of(self, noted: Noted) -> list[Row]:
        """The rows of these versions under noted keys, of the database or of files."""
        mine = {(row.kind, row.key): row for row in self.ls(all_devices=False)}
        for place, found in self._files.items():
            for one in reversed(found):
                if self._counts(one.row.versions, one.row.value):
                    mine.setdefault(place, one.row)
        return [mine[place] for place in sorted(noted) if place in mine]

    def drop(self, problem: str) -> None:
        self._wrong.add(("choice", problem))
        super().drop(problem)

    def entry(self, kind: str, key: str) -> tuple[dict[str, Any] | None, str]:
        found = super().entry(kind, key)
        if found[0] is None and kind == "guard":
            found = next((one[1:] for one in self._rows(kind, key) if is_pinned(one[1])), found)
        if found[0] is not None:
            self._note(kind, key)
        return found

    def _put(self, kind: str, key: str, value: dict[str, Any], *more: Any, **options: Any) -> None:
        self._note(kind, key)
        super()._put(kind, key, value, *more, **options)

    def _note(self, kind: str, key: str) -> None:
        for noted in self._noted:
            noted.add((kind, key))

    def _rows(self, kind: str, key: str) -> Iterator[tuple[str, dict[str, Any], str]]:
        own = super()._rows(kind, key)
        if (kind, key) in self._wrong:
            return own
        files = self._files.get((kind, key), [])
        told = [(one.row.versions, one.row.value, CHECKED_IN if one.signed else FOREIGN) for one in files]
        if self._shipped is not None:
            told += [(row.versions, row.value, FOREIGN) for row in self._shipped.rows(kind, key)]
        first = [one for one in told if is_pinned(one[1])]
        return itertools.chain(first, own, [one for one in told if not is_pinned(one[1])])

    def _other(self, kind: str, key: str) -> tuple[dict[str, Any] | None, str]:
        """As of `Store`, and a pinned row whatever versions of schedules it records."""
        found = super()._other(kind, key)
        if found[0] is not None:
            return found
        for _, value, source in self._rows(kind, key):
            if is_pinned(value):
                believed = source != FOREIGN and (recorded_schedules(value) or kind == "choice")
                return value, OTHER_VERSIONS if believed else FOREIGN
        if kind == "choice" and self._shipped is not None and (kind, key) not in self._wrong:
            for row in self._shipped.rows(kind, key):  # of other schedules
                return row.value, FOREIGN
        return None, ""


def is_pinned(value: Mapping[str, Any]) -> bool:
    """Whether a row stays what it is, whatever version of jcuts reads it."""
    return value.get("pinned") is True


def default_store() -> FileStore:
    """The user's database, for this CPU and these versions, with the folders that ``JCUTS_DATABASES`` names.

    Raises: CacheError: ``JCUTS_DATABASE_KEY`` cannot be read, or is too short.
    """
    current = knobs.current()
    return FileStore(
        current.cache_dir / "tuning.db",
        device=keys.cpu_device(),
        versions=keys.packages(),
        folders=[Path(name).expanduser() for name in current.databases],
        key=read_key(current.database_key),
        shipped=ShippedRows() if current.shipped else None,
    )


def read_key(path: Path | None) -> bytes | None:
    """The key in a file. Raises: CacheError: it cannot be read, or has fewer than 16 bytes."""
    if path is None:
        return None
    try:
        key = path.read_bytes()
    except OSError as error:
        raise CacheError(f"cannot read the key {path}: {error.strerror or error}", path=str(path)) from None
    if len(key) < 16:
        raise CacheError(f"the key {path} has {len(key)} bytes, at least 16 are needed", path=str(path), size=len(key))
    return key
