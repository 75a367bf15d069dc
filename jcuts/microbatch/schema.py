"""SQL schema of the benchmark database: tables and rows, written in one transaction per convolution and batch size."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jcuts.microbatch.convolution import Convolution
from jcuts.microbatch.network import Network
from jcuts.microbatch.timings import MicroConfig

Read = Callable[[str, tuple[object, ...]], list[Any]]
"""Runs a query: (text, values) -> rows."""

REMARKS = """
CREATE TABLE IF NOT EXISTS remarks (
    device INTEGER NOT NULL, convolution INTEGER NOT NULL, batch INTEGER NOT NULL, name TEXT NOT NULL,
    value TEXT NOT NULL, PRIMARY KEY (device, convolution, batch, name)) WITHOUT ROWID
"""
"""Files made before there were remarks get the table with the first of them."""
TABLES = """
CREATE TABLE devices (
    id INTEGER PRIMARY KEY, name TEXT NOT NULL, driver TEXT NOT NULL, library TEXT NOT NULL,
    UNIQUE (name, driver, library));
CREATE TABLE convolutions (id INTEGER PRIMARY KEY, key TEXT NOT NULL UNIQUE, description TEXT NOT NULL);
CREATE TABLE searched (
    device INTEGER NOT NULL REFERENCES devices, convolution INTEGER NOT NULL REFERENCES convolutions,
    batch INTEGER NOT NULL, created REAL NOT NULL, PRIMARY KEY (device, convolution, batch)) WITHOUT ROWID;
CREATE TABLE timings (
    device INTEGER NOT NULL, convolution INTEGER NOT NULL, batch INTEGER NOT NULL,
    algorithm TEXT NOT NULL, math TEXT NOT NULL, seconds REAL NOT NULL, workspace INTEGER NOT NULL,
    PRIMARY KEY (device, convolution, batch, algorithm, math)) WITHOUT ROWID;
CREATE TABLE networks (name TEXT PRIMARY KEY, description TEXT NOT NULL, created REAL NOT NULL);
"""


@dataclass(frozen=True, order=True)
class Device:
    """Device identity that times are valid for.

    Attributes:
        name: e.g. "NVIDIA H200".
        driver: its version.
        library: everything else that decides times, with versions, e.g. "cuDNN 9.19.0, jaxlib 0.11.2".
    """

    name: str
    driver: str
    library: str

    def __str__(self) -> str:
        return f"{self.name} (driver {self.driver}, {self.library})"


@dataclass(frozen=True)
class BenchmarkRecord:
    """All measurements of one convolution at one batch size on one device, and when (seconds since 1970)."""

    device: Device
    convolution: Convolution
    batch: int
    micros: tuple[MicroConfig, ...]
    created: float
    remarks: Mapping[str, str] = field(default_factory=dict, compare=False)


def entries(read: Read, condition: str, values: tuple[object, ...]) -> list[BenchmarkRecord]:
    """Entries that a condition (on d, devices, and c, convolutions) holds for.

    Raises: UsageError, ValueError, TypeError: somebody edited a row.
    """
    # One statement: a writer's transaction is seen whole or not at all.
    rows = read(
        "SELECT d.name, d.driver, d.library, c.description, s.batch, s.created, t.algorithm, t.math, t.seconds,"
        " t.workspace FROM searched s JOIN devices d ON d.id = s.device JOIN convolutions c ON c.id = s.convolution"
        " LEFT JOIN timings t ON t.device = s.device AND t.convolution = s.convolution AND t.batch = s.batch"
        f" WHERE 1 {condition} ORDER BY s.device, s.convolution, s.batch, t.algorithm, t.math",
        values,
    )
    remarks = _remarks(read, condition, values)
    grouped: dict[tuple[Any, ...], list[MicroConfig]] = {}
    for *owner, algorithm, maths, seconds, workspace in rows:
        micros = grouped.setdefault(tuple(owner), [])
        if algorithm is not None:
            micros.append(MicroConfig(owner[4], algorithm, maths, seconds, workspace))
    texts = {text: Convolution.from_json(json.loads(text)) for text in {owner[3] for owner in grouped}}
    return [
        BenchmarkRecord(
            Device(*owner[:3]), texts[owner[3]], owner[4], tuple(micros), owner[5], remarks.get(owner[:5], {})
        )
        for owner, micros in grouped.items()
    ]


def _remarks(read: Read, condition: str, values: tuple[object, ...]) -> dict[tuple[Any, ...], dict[str, str]]:
    if not read("SELECT 1 FROM sqlite_master WHERE name = 'remarks'", ()):
        return {}
    rows = read(
        "SELECT d.name, d.driver, d.library, c.description, r.batch, r.name, r.value FROM remarks r"
        f" JOIN devices d ON d.id = r.device JOIN convolutions c ON c.id = r.convolution WHERE 1 {condition}",
        values,
    )
    found: dict[tuple[Any, ...], dict[str, str]] = {}
    for *owner, name, value in rows:
        found.setdefault(tuple(owner), {})[name] = value
    return found


def networks(read: Read) -> list[tuple[Network, float]]:
    """Networks, and when they were written.  Raises: UsageError, ValueError: somebody edited a row."""
    rows = read("SELECT description, created FROM networks ORDER BY name", ())
    return [(Network.from_json(json.loads(text)), created) for text, created in rows]


def insert(db: sqlite3.Connection, entry: BenchmarkRecord) -> None:
    """Inserts or replaces an entry, in the caller's transaction."""
    device, convolution = entry.device, entry.convolution
    triple = (device.name, device.driver, device.library)
    db.execute("INSERT OR IGNORE INTO devices (name, driver, library) VALUES (?, ?, ?)", triple)
    db.execute(
        "INSERT OR IGNORE INTO convolutions (key, description) VALUES (?, ?)",
        (convolution.key, json.dumps(convolution.to_json(), sort_keys=True)),
    )
    where = "name = ? AND driver = ? AND library = ?"
    (d,) = db.execute(f"SELECT id FROM devices WHERE {where}", triple).fetchone()
    (c,) = db.execute("SELECT id FROM convolutions WHERE key = ?", (convolution.key,)).fetchone()
    owner = (d, c, entry.batch)
    db.execute("DELETE FROM timings WHERE device = ? AND convolution = ? AND batch = ?", owner)
    db.execute("INSERT OR REPLACE INTO searched VALUES (?, ?, ?, ?)", (*owner, entry.created))
    db.executemany(
        "INSERT INTO timings VALUES (?, ?, ?, ?, ?, ?, ?)",
        [(*owner, m.algorithm, m.math, m.seconds, m.workspace) for m in entry.micros],
    )
    db.execute(REMARKS)
    db.execute("DELETE FROM remarks WHERE device = ? AND convolution = ? AND batch = ?", owner)
    db.executemany("INSERT INTO remarks VALUES (?, ?, ?, ?, ?)", [(*owner, *pair) for pair in entry.remarks.items()])


def insert_network(db: sqlite3.Connection, network: Network, created: float) -> None:
    """Inserts or replaces a network of its name, in the caller's transaction."""
    text = json.dumps(network.to_json(), sort_keys=True)
    db.execute("INSERT OR REPLACE INTO networks VALUES (?, ?, ?)", (network.name, text, created))
