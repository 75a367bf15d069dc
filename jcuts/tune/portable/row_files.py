"""Rows of the tuning database as files, one JSON file each, for version control: names tell kind, problem and device.

A file has the form of ``jcuts cache export`` with one entry, and may be signed (HMAC-SHA-256) with a key of the team:
who has the key follows it, for all others it is a row of another cache, which is checked before it counts.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jcuts.base import keys
from jcuts.base.errors import CacheError
from jcuts.tune.database_rows import SCHEMA, Row, read_export, to_text

SUFFIX = ".json"
_NAME_LENGTH = 48


class FileRow(NamedTuple):
    """A row of a file. Attributes: signed: whether the file is signed with the key that was asked for."""

    row: Row
    signed: bool


class Written(NamedTuple):
    """Counts of files: ``fresh`` were written, ``same`` held the same row already."""

    fresh: int
    same: int


def file_name(row: Row) -> str:
    """``choice-<operations>-<key>-<device and versions>.json``: the same row has the same name everywhere."""
    name = str(row.value.get("name") or row.value.get("chosen") or "")
    words = re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-")[:_NAME_LENGTH].strip("-")
    parts = (row.kind, words, row.key[:16], keys.row_file(row.key, row.device, row.versions))
    return "-".join(part for part in parts if part) + SUFFIX


def write(folder: Path, rows: Iterable[Row], key: bytes | None = None) -> Written:
    """Writes a file per row; one that holds the same result already stays as it is, whenever that was measured.

    Args: folder: made where there is none; key: signs the files, None for none.
    Raises: CacheError: a file cannot be written.
    """
    fresh = same = 0
    for row in rows:
        path = folder / file_name(row)
        with contextlib.suppress(CacheError):
            known = read_file(path, key)
            if to_text(known.row.value) == to_text(row.value) and (known.signed or key is None):
                same += 1
                continue
        write_text(path, _text(row, key))
        fresh += 1
    return Written(fresh, same)


def _text(row: Row, key: bytes | None) -> str:
    data: dict[str, Any] = {"jcuts_tuning": SCHEMA, "entries": [row.__dict__]}
    if key is not None:
        data["signature"] = signature(row, key)
    return json.dumps(data, indent=1, sort_keys=True) + "\n"


def signature(row: Row, key: bytes) -> str:
    """HMAC-SHA-256 of all that a row says but when."""
    text = json.dumps([row.kind, row.key, row.device, row.versions, to_text(row.value)])
    return hmac.digest(key, text.encode(), "sha256").hex()


def write_text(path: Path, text: str) -> None:
    """Replaces a file as a whole. Raises: CacheError: it cannot be written."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch.write_text(text)
        os.replace(scratch, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            scratch.unlink()
        raise CacheError(f"cannot write {path}: {error.strerror or error}", path=str(path)) from None


def read_file(path: Path, key: bytes | None = None) -> FileRow:
    """The row of a file. Args: key: to compare its signature with.

    Raises: CacheError: no such file, no row of a tuning database, or several.
    """
    rows = read_export(path)
    if len(rows) != 1:
        raise CacheError(f"{path} holds {len(rows)} entries: a file of a problem holds one", path=str(path))
    return FileRow(rows[0], key is not None and _is_signed(path, rows[0], key))


def _is_signed(path: Path, row: Row, key: bytes) -> bool:
    try:
        found: Mapping[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CacheError(f"cannot read {path}: {error}", path=str(path)) from None
    return hmac.compare_digest(str(found.get("signature", "")).encode(), signature(row, key).encode())


def read_folder(folder: Path, key: bytes | None = None) -> tuple[list[FileRow], list[CacheError]]:
    """The rows of all files of a folder and those below it, in the order of their names; and what was none.

    Raises: CacheError: no such folder.
    """
    if not folder.is_dir():
        raise CacheError(f"{folder} is no folder of tuning results", path=str(folder))
    rows, errors = [], []
    for path in sorted(folder.rglob("*" + SUFFIX)):
        if path.name.startswith("."):
            continue
        try:
            rows.append(read_file(path, key))
        except CacheError as error:
            errors.append(error)
    return rows, errors
