"""Shipped tuning results: rows for CPUs and GPUs that were measured before a release, as package data.

One JSON file per problem (`tune.portable.row_files`), read when its key is asked for: the file's name has its first
digits.  No such row is signed: a kernel of one is compared with float64 once before it runs, as of any cache of others.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from jcuts.base import keys
from jcuts.base.errors import CacheError
from jcuts.schedule.cpu.bound import host_arch
from jcuts.tune.choice import LIBRARY, Choice
from jcuts.tune.database_rows import SCHEMA, Row, recorded_schedules
from jcuts.tune.measure import regime
from jcuts.tune.portable import row_files
from jcuts.tune.select import select_stored

FOLDER = Path(__file__).resolve().parent / "data"
_KEY_DIGITS = 16
KINDS = ("choice", "partition")
"""What is shipped: whole programs are compared where they run."""


@functools.cache
def cpu_kind() -> str:
    """The ``device`` of shipped rows about CPUs: model, vector width; cores and caches are part of a problem's key."""
    arch = host_arch()
    return f"cpu {arch.machine} {arch.name} {arch.simd_bits} bits"


class ShippedRows:
    """The rows of a folder for this CPU, and for GPUs. Args: folder: of files that `write` wrote."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self._folder = folder
        self._read: dict[tuple[str, str], list[Row]] = {}

    @functools.cached_property
    def _names(self) -> dict[str, list[str]]:
        """Names of files by the first digits of their keys."""
        found: dict[str, list[str]] = {}
        for path in sorted(self._folder.glob("*/*" + row_files.SUFFIX)):
            digits = path.stem.rsplit("-", 2)[-2:-1]
            found.setdefault("".join(digits), []).append(str(path))
        return found

    def rows(self, kind: str, key: str) -> list[Row]:
        """The rows under a key, newest first; one of other schedules says so in its regime."""
        if (known := self._read.get((kind, key))) is None:
            found = []
            for name in self._names.get(key[:_KEY_DIGITS], ()) if kind in KINDS else ():
                try:
                    found.append(row_files.read_file(Path(name)).row)
                except CacheError:  # somebody has edited the installation
                    continue
            mine = [row for row in found if (row.kind, row.key) == (kind, key) and _is_here(row)]
            known = self._read[kind, key] = sorted((_marked(row) for row in mine), key=lambda row: -row.created)
        return known


def _is_here(row: Row) -> bool:
    return row.device in (cpu_kind(), keys.GPU_DEVICE)


def _marked(row: Row) -> Row:
    """A row that other schedules may beat says so: explicit tuning measures it anew."""
    if row.kind != "choice" or keys.is_current(recorded_schedules(row.value)):
        return row
    return replace(row, value={**row.value, "regime": {**regime.recorded(row.value), regime.CODE: regime.EARLIER}})


def trimmed(choice: Choice) -> Choice:
    """A choice with what decides: times of XLA and of kernels that some mode chooses; no names of the user's lines."""
    kept = {LIBRARY, choice.winner, select_stored(choice, "fusion").winner}

    def mine(table: Mapping[str, str]) -> dict[str, str]:
        return {label: text for label, text in table.items() if label in kept}

    return replace(
        choice,
        measurements=tuple(m for m in choice.measurements if m.label in kept),
        rejections=(),
        kernels=mine(choice.kernels),
        digests=mine(choice.digests),
        programs=mine(choice.programs),
    )


def remove(folder: Path) -> None:
    """Removes the files about this CPU; those about GPUs are replaced one by one."""
    for path in folder.glob("*/*" + row_files.SUFFIX):
        if row_files.read_file(path).row.device == cpu_kind():
            path.unlink()


def write(folder: Path, rows: Iterable[Row]) -> int:
    """Writes rows of this machine as files to ship: a folder per kind of device; how many there are.

    Raises: CacheError: a file cannot be written.
    """
    count = 0
    for row in rows:
        if row.kind not in KINDS or (row.kind == "choice" and Choice.from_json(row.value).is_cut):
            continue
        on_gpu = row.device == keys.GPU_DEVICE
        if row.kind == "choice":
            value = trimmed(Choice.from_json(row.value)).to_json()
        else:  # a CPU's cover names equations alone: it is right in other versions where it fits
            value = {name: part for name, part in row.value.items() if on_gpu or name != "schedules"}
        shipped = replace(row, device=row.device if on_gpu else cpu_kind(), value=value)
        target = folder / ("gpu" if on_gpu else "cpu") / row_files.file_name(shipped)
        data: dict[str, Any] = {"jcuts_tuning": SCHEMA, "entries": [shipped.__dict__]}
        row_files.write_text(target, json.dumps(data, sort_keys=True, separators=(",", ":")) + "\n")
        count += 1
    return count
