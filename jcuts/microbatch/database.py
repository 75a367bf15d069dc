"""SQLite store of convolution timings: persistent, shared between processes and mergeable between machines.

One file (`base/sqlite_file.py`).  Keys hold all that a time depends on: device name, driver and library versions, the
convolution (dtype and layout included), batch size, algorithm, math.  All times of one (device, convolution, batch) are
written in one transaction, so an entry is complete.

Remarks record why times are missing: ``memory``, the least workspace [B] for which there was no memory (a run that
allows that much measures again), or a library that refused, and why.

The file is named by its user and may be shared: one of another schema version, or of another program, is refused and
left alone.  A damaged one is moved aside by a writer, and refused by a reader.  Where the file cannot be written (full
disk, read-only folder) entries stay in memory and one warning is logged, so that the process that ran a benchmark of
minutes still has it. On network file systems give every writer a file of its own, and merge them.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jcuts.base.errors import CacheError, UsageError
from jcuts.base.sqlite_file import DamagedFile, ForeignFile, SqliteFile, is_damaged
from jcuts.microbatch import schema
from jcuts.microbatch.convolution import Convolution
from jcuts.microbatch.errors import ForeignDeviceError, MissingTimesError
from jcuts.microbatch.network import Network
from jcuts.microbatch.schema import BenchmarkRecord, Device
from jcuts.microbatch.timings import MicroConfig, Table

SCHEMA = 1
APPLICATION_ID = 0x6A636D62  # 'jcmb', shown by file(1)
_log = logging.getLogger("jcuts.microbatch")

MEMORY = "memory"


class Database:
    """Times by device, convolution and batch size; networks by name.

    Args: path: the file, made with its folders when something is first written; None: in memory only.
    """

    def __init__(self, path: str | os.PathLike[str] | None) -> None:
        self.path = None if path is None else Path(path)
        self._file = self.path and SqliteFile(
            self.path, tables=schema.TABLES, application=APPLICATION_ID, schema=SCHEMA
        )
        self._memory: dict[tuple[Device, str, int], BenchmarkRecord] = {}
        self._networks: dict[str, Network] = {}
        self._fresh: set[tuple[Device, str, int]] = set()
        self._lock = threading.RLock()
        self.errors: list[CacheError] = []

    # Writing ---------------------------------------------------------------------------------------------------------

    def record(
        self,
        device: Device,
        convolution: Convolution,
        batch: int,
        micros: Sequence[MicroConfig],
        *,
        remarks: Mapping[str, str] | None = None,
    ) -> None:
        """Stores the measurements of one convolution at one batch size, replacing earlier ones.

        ``micros`` may be empty: no algorithm runs this convolution, and nobody needs to try again.  Remarks: see above.
        Raises: UsageError if a micro-configuration has another batch size, or occurs twice; CacheError if the file is
        another program's or of another version.
        """
        entry = _entry(device, convolution, batch, micros, time.time(), remarks or {})
        with self._lock:
            self._fresh.add((device, convolution.key, batch))
            if not self._write(lambda db: schema.insert(db, entry)):
                self._memory[device, convolution.key, batch] = entry

    def record_network(self, network: Network) -> None:
        """Stores a network under its name, replacing an earlier one.  Raises: as `record`."""
        with self._lock:
            if not self._write(lambda db: schema.insert_network(db, network, time.time())):
                self._networks[network.name] = network

    def merge(self, paths: Iterable[str | os.PathLike[str]]) -> int:
        """Merges the entries and networks of other databases, all or none; of duplicates the newer stays.

        Returns: entries taken over.
        Raises: CacheError if a file is missing, damaged, or not such a database, or if this one cannot be written.
        """
        others = [Database(path) for path in paths]
        fresh: dict[tuple[Device, str, int], BenchmarkRecord] = {}
        networks: dict[str, tuple[Network, float]] = {}
        for other in others:
            if other.path is not None and not other.path.exists():
                raise CacheError(f"{other.path}: no such file", path=str(other.path))
            for entry in other.entries():
                key = (entry.device, entry.convolution.key, entry.batch)
                if key not in fresh or entry.created > fresh[key].created:
                    fresh[key] = entry
            for network, created in other._stored_networks():
                if network.name not in networks or created > networks[network.name][1]:
                    networks[network.name] = (network, created)
        known = {(entry.device, entry.convolution.key, entry.batch): entry.created for entry in self.entries()}
        known_networks = {network.name: created for network, created in self._stored_networks()}
        taken = [entry for key, entry in fresh.items() if entry.created > known.get(key, -1.0)]

        def work(db: sqlite3.Connection) -> None:
            for entry in taken:
                schema.insert(db, entry)
            for network, created in networks.values():
                if created > known_networks.get(network.name, -1.0):
                    schema.insert_network(db, network, created)

        if not self._write(work):
            raise self.errors[-1] if self.errors else CacheError("a database in memory cannot take over others")
        return len(taken)

    # Reading ---------------------------------------------------------------------------------------------------------

    def devices(self) -> tuple[Device, ...]:
        """Devices with times, sorted."""
        found = self._read("SELECT name, driver, library FROM devices WHERE id IN (SELECT device FROM searched)", ())
        return tuple(sorted({Device(*row) for row in found} | {key[0] for key in self._memory}))

    def device(self, name: str | None = None) -> Device:
        """The device of this name, or whose name contains it; None: the only one.

        Raises: ForeignDeviceError if there is none, or more than one.
        """
        known = self.devices()
        found = [device for device in known if name is None or name.lower() in str(device).lower()]
        found = [device for device in found if device.name == name] or found
        if len(found) != 1:
            what = "no times at all" if not known else "; ".join(map(str, found or known))
            problem = f"no times of {name!r}" if not found else "more than one device"
            raise ForeignDeviceError(
                f"{self._where}: {problem}; it has: {what}", device=name, known=tuple(map(str, known))
            )
        return found[0]

    def missing(
        self, device: Device, convolution: Convolution, sizes: Iterable[int], *, limit: int | None = None
    ) -> tuple[int, ...]:
        """Batch sizes without measurements, in the given order.

        Where an earlier process had no memory for an algorithm whose workspace is within the limit [B], its times do
        not count.
        """
        known = {
            entry.batch
            for entry in self._entries(device, convolution)
            if (device, convolution.key, entry.batch) in self._fresh or not _lacks(entry, limit)
        }
        return tuple(size for size in sizes if size not in known)

    def remarks(self, device: Device, convolution: Convolution, batch: int) -> Mapping[str, str]:
        """Remarks on one convolution at one batch size."""
        return next((e.remarks for e in self._entries(device, convolution) if e.batch == batch), {})

    def table(self, device: Device, convolution: Convolution) -> Table:
        """Everything measured of a convolution on a device.

        Raises: ForeignDeviceError if the database does not know the device; MissingTimesError if it does not know the
        convolution there; CacheError if the file cannot be used.
        """
        entries = self._entries(device, convolution)
        if not entries:
            known = self.devices()
            if device not in known:
                raise ForeignDeviceError(
                    f"{self._where}: no times of {device}; it has: {'; '.join(map(str, known)) or 'none'}",
                    device=str(device),
                    known=tuple(map(str, known)),
                )
            raise MissingTimesError(f"{self._where}: no times of {convolution} on {device}", convolution=convolution)
        micros = tuple(micro for entry in entries for micro in entry.micros)
        return Table(convolution, micros, convolution.unit)

    def networks(self) -> tuple[Network, ...]:
        """Networks by name."""
        found = {network.name: network for network, _ in self._stored_networks()}
        return tuple(found[name] for name in sorted(found))

    def network(self, name: str | None = None) -> Network:
        """The network of this name, or whose name contains it; None: the only one.

        Raises: MissingTimesError if there is none, or more than one.
        """
        known = {network.name: network for network in self.networks()}
        found = [one for one in known if name is None or name.lower() in one.lower()]
        if len(found) == 1:
            return known[found[0]]
        if name not in known:
            problem = "which network?" if name is None or found else f"no network {name!r}"
            names = ", ".join(known) or "none"
            raise MissingTimesError(f"{self._where}: {problem} it has: {names}", network=name, known=tuple(known))
        return known[name]

    def entries(self) -> list[BenchmarkRecord]:
        """Everything, oldest first."""
        found = {
            (entry.device, entry.convolution.key, entry.batch): entry for entry in self._load("", ())
        } | self._memory
        return sorted(found.values(), key=lambda e: (e.created, e.device, e.convolution.key, e.batch))

    # Inside ----------------------------------------------------------------------------------------------------------

    @property
    def _where(self) -> str:
        return str(self.path) if self.path else "benchmark database"

    def _entries(self, device: Device, convolution: Convolution) -> list[BenchmarkRecord]:
        condition = "AND d.name = ? AND d.driver = ? AND d.library = ? AND c.key = ?"
        key = convolution.key
        found = {e.batch: e for e in self._load(condition, (device.name, device.driver, device.library, key))}
        found |= {e.batch: e for (d, k, _), e in list(self._memory.items()) if (d, k) == (device, key)}
        return [found[batch] for batch in sorted(found)]

    def _load(self, condition: str, values: tuple[object, ...]) -> list[BenchmarkRecord]:
        try:
            return schema.entries(self._read, condition, values)
        except (UsageError, ValueError, TypeError) as error:  # somebody edited a row
            raise CacheError(f"{self._where}: an entry cannot be understood: {error}", path=self._where) from None

    def _stored_networks(self) -> list[tuple[Network, float]]:
        try:
            found = schema.networks(self._read)
        except (UsageError, ValueError) as error:
            raise CacheError(f"{self._where}: a network cannot be understood: {error}", path=self._where) from None
        return found + [(network, time.time()) for network in list(self._networks.values())]

    def _read(self, query: str, values: tuple[object, ...]) -> list[Any]:
        if self._file is None:
            return []
        with self._lock:
            try:
                return self._file.query(lambda db: db.execute(query, values).fetchall())
            except (sqlite3.Error, OSError) as error:
                raise CacheError(
                    f"{self._where}: cannot be read as a benchmark database: {error}", path=self._where
                ) from None

    def _write(self, work: Callable[[sqlite3.Connection], None]) -> bool:
        """Runs one transaction; False when nothing reached the disk."""
        if self._file is None:
            return False
        try:
            return self._file.transaction(work, self._recover)
        except (sqlite3.Error, OSError) as error:
            if _is_foreign(error):
                raise CacheError(f"{self._where}: not written: {error}", path=self._where) from None
            self._report(f"{self._where}: cannot be written ({error}): times are kept in memory only")
            return False

    def _recover(self, error: Exception) -> bool:
        """Moves a damaged file of ours aside; False for every other error."""
        if _is_foreign(error) or not is_damaged(error):
            return False
        self._set_aside(error)
        return True

    def _set_aside(self, why: Exception) -> None:
        assert self._file is not None
        try:
            aside = self._file.set_aside(len(self.errors))
        except OSError as error:
            self._report(f"{self._where}: damaged ({why}), and cannot be moved aside: {error}")
            return
        if aside is not None:
            self._report(f"{self._where}: damaged ({why}): moved to {aside}, a fresh one is started")

    def _report(self, message: str) -> None:
        if not any(known.message == message for known in self.errors):
            self.errors.append(CacheError(message, path=self._where))
            _log.warning("%s", message)


def _is_foreign(error: Exception) -> bool:
    """Not a benchmark database of this version: somebody else's file, and none of our business."""
    if isinstance(error, ForeignFile):
        return not isinstance(error, DamagedFile)
    return getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_NOTADB


def _lacks(entry: BenchmarkRecord, limit: int | None) -> bool:
    """Whether there was no memory for workspaces within a limit."""
    least = entry.remarks.get(MEMORY, "")
    return least.isdigit() and (limit is None or int(least) <= limit)


def _entry(
    device: Device,
    convolution: Convolution,
    batch: int,
    micros: Sequence[MicroConfig],
    created: float,
    remarks: Mapping[str, str],
) -> BenchmarkRecord:
    if any(micro.batch != batch for micro in micros):
        raise UsageError(f"times of other batch sizes among those of {batch}", batch=batch)
    Table(convolution, tuple(micros))  # checks maths and doubles
    return BenchmarkRecord(device, convolution, batch, tuple(micros), created, dict(remarks))
