"""Tables and rows of the tuning database as SQL and JSON: schema, what a row records, exports."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jcuts.base import json_fields, keys
from jcuts.base.errors import CacheError
from jcuts.tune.choice import Choice
from jcuts.tune.measure import regime

SCHEMA = 2
APPLICATION_ID = 0x6A637574  # 'jcut', shown by file(1)
TABLES = """
CREATE TABLE choices (
    problem TEXT NOT NULL, device TEXT NOT NULL, versions TEXT NOT NULL,
    choice TEXT NOT NULL, created REAL NOT NULL, PRIMARY KEY (problem, device, versions));
CREATE TABLE measurements (
    problem TEXT NOT NULL, device TEXT NOT NULL, versions TEXT NOT NULL, label TEXT NOT NULL,
    seconds REAL, rejected TEXT, detail TEXT NOT NULL, PRIMARY KEY (problem, device, versions, label));
CREATE TABLE guards (
    key TEXT NOT NULL, device TEXT NOT NULL, versions TEXT NOT NULL,
    decision TEXT NOT NULL, created REAL NOT NULL, PRIMARY KEY (key, device, versions));
CREATE TABLE partitions (
    key TEXT NOT NULL, device TEXT NOT NULL, versions TEXT NOT NULL,
    cover TEXT NOT NULL, created REAL NOT NULL, PRIMARY KEY (key, device, versions));
CREATE TABLE IF NOT EXISTS signatures (
    kind TEXT NOT NULL, key TEXT NOT NULL, device TEXT NOT NULL, versions TEXT NOT NULL,
    source TEXT NOT NULL, signature TEXT NOT NULL, PRIMARY KEY (kind, key, device, versions));
CREATE TABLE meta (name TEXT PRIMARY KEY, value INTEGER NOT NULL);
INSERT INTO meta VALUES ('generation', 0);
"""

SIGNATURES = next(text for text in TABLES.split(";") if "signatures" in text)
"""Databases of older versions lack this table: whoever writes makes it.  Those versions go on without it."""

PLACES = {  # kind of entry -> table, key column, value column
    "choice": ("choices", "problem", "choice"),
    "guard": ("guards", "key", "decision"),
    "partition": ("partitions", "key", "cover"),
}


@dataclass(frozen=True)
class Row:
    """One stored entry: ``kind`` is 'choice', 'guard' or 'partition', ``key`` its digest."""

    kind: str
    key: str
    device: str
    versions: str
    created: float
    value: dict[str, Any]


def recorded_schedules(value: Mapping[str, Any]) -> dict[str, str]:
    """Versions of kernel families that a value records; none for what a person made of them."""
    found = value.get("schedules")
    return {str(k): str(v) for k, v in found.items()} if isinstance(found, dict) else {}


def device_of(kind: str, value: Mapping[str, Any], cpu: str) -> str:
    """The device of a row that is written, by the kernel families that it records: `keys.GPU_DEVICE`, or this CPU."""
    families = recorded_schedules(value)
    on_gpu = kind != "guard" and bool(families) and regime.platform_of(families) != "cpu"
    return keys.GPU_DEVICE if on_gpu else cpu


def with_signatures(db: sqlite3.Connection, kind: str, key: str, devices: tuple[str, str]) -> list[Any]:
    """Rows of devices under a key, newest first: versions, device, text, and (source, signature) of each signature."""
    table, column, value = PLACES[kind]
    which = f"FROM {table} WHERE {column} = ? AND device IN (?, ?) ORDER BY created DESC"
    rows = db.execute(f"SELECT versions, device, {value} {which}", (key, *devices)).fetchall()
    signed = rows and db.execute("SELECT name FROM sqlite_master WHERE name = 'signatures'").fetchall()
    query = "SELECT versions, device, source, signature FROM signatures WHERE kind = ? AND key = ?"
    marks = db.execute(query, (kind, key)).fetchall() if signed else []
    return [(*row, [mark[2:] for mark in marks if mark[:2] == row[:2]]) for row in rows]


def regime_distance(value: Mapping[str, Any]) -> int:
    """How far a choice's regime is from the one that would be measured in now (`tune.measure.regime`); 0 if pinned."""
    if value.get("pinned") is True:
        return 0
    return regime.distance(regime.recorded(value), regime.platform_of(recorded_schedules(value)))


def to_text(value: Mapping[str, Any]) -> str:
    """A value as the JSON text that is stored and signed."""
    return json.dumps(value, sort_keys=True)


def insert(db: sqlite3.Connection, row: Row, signed: tuple[str, str] | None = None) -> None:
    """Writes a row. Args: signed: its source and signature; None for a row of others."""
    owner = (row.key, row.device, row.versions)
    text = to_text(row.value)
    db.execute(SIGNATURES)
    db.execute("DELETE FROM signatures WHERE kind = ? AND key = ? AND device = ? AND versions = ?", (row.kind, *owner))
    if signed is not None and signed[1]:
        db.execute("INSERT INTO signatures VALUES (?, ?, ?, ?, ?, ?)", (row.kind, *owner, *signed))
    db.execute(f"INSERT OR REPLACE INTO {PLACES[row.kind][0]} VALUES (?, ?, ?, ?, ?)", (*owner, text, row.created))
    if row.kind != "choice":
        return
    db.execute("DELETE FROM measurements WHERE problem = ? AND device = ? AND versions = ?", owner)
    for entry in row.value.get("measurements", ()):
        db.execute(
            "INSERT OR REPLACE INTO measurements VALUES (?, ?, ?, ?, ?, NULL, ?)",
            (*owner, entry["label"], entry["seconds"], json.dumps(entry, sort_keys=True)),
        )
    for entry in row.value.get("rejections", ()):
        db.execute(
            "INSERT OR REPLACE INTO measurements VALUES (?, ?, ?, ?, NULL, ?, ?)",
            (*owner, entry["label"], entry["error"], json.dumps(entry, sort_keys=True)),
        )


def to_object(text: str) -> dict[str, Any] | None:
    """Inverse of `to_text`; None for what a person made of it."""
    try:
        value = json.loads(text)
    except (TypeError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def read_export(path: Path) -> list[Row]:
    """The rows in a file that `Store.export` wrote. Raises CacheError: no such file, no export, of another version."""
    try:
        data = json.loads(path.read_text())
    except OSError as error:
        raise CacheError(f"cannot import {path}: {error.strerror or error}", path=str(path)) from None
    except ValueError as error:  # UnicodeDecodeError as well
        why = f"it is no JSON, as `jcuts cache export` writes it ({error})"
        raise CacheError(f"cannot import {path}: {why}", path=str(path)) from None
    found = data.get("jcuts_tuning") if isinstance(data, dict) else None
    if found != SCHEMA:
        raise CacheError(
            f"cannot import {path}: it is not a jcuts tuning export of version {SCHEMA} (found {found!r})",
            path=str(path),
            found=found,
        )
    entries = data.get("entries", ())
    if not isinstance(entries, (list, tuple)):
        raise CacheError(f"cannot import {path}: its entries are a {type(entries).__name__}", path=str(path))
    rows = []
    for number, entry in enumerate(entries):
        try:
            rows.append(_read_entry(entry))
        except (TypeError, ValueError, CacheError) as error:
            raise CacheError(f"cannot import {path}: entry {number}: {error}", path=str(path), entry=number) from None
    return rows


def _read_entry(entry: Any) -> Row:
    """A row of an export. Raises: TypeError, ValueError, CacheError: it is none."""
    if not isinstance(entry, dict):
        raise TypeError(f"a {type(entry).__name__} is no row")
    row = Row(**entry)
    for text in (row.kind, row.key, row.device, row.versions):
        json_fields.text(text)
    if row.kind not in PLACES or not isinstance(row.value, dict):
        raise TypeError(f"kind {row.kind!r} with a value of type {type(row.value).__name__}")
    if row.kind == "choice" and Choice.from_json(row.value).problem != row.key:
        raise ValueError(f"the key {row.key[:16]} is not that of the choice's problem")
    return replace(row, created=json_fields.non_negative(row.created))
