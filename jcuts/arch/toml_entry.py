"""Numbers of architecture files as TOML: ``{ value, unit, source }`` entries, read with line numbers, and written."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from typing import Any

from jcuts.base.errors import ModelError


class ArchFile:
    """The content of one architecture file; its errors name file, line and key.

    Raises: ModelError where the text is not TOML.
    """

    def __init__(self, text: str, file: str) -> None:
        self.text, self.file = text, file
        self.sources: dict[str, str] = {}
        """Of every number that was read: where it comes from."""
        try:
            self.table: dict[str, Any] = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            where = re.search(r"line (\d+)", str(error))
            line = int(where.group(1)) if where else len(text.splitlines())
            raise ModelError(f"{file}:{line}: not valid TOML: {error}", file=file, line=line, key=None) from error

    def bad(self, key: str, reason: str) -> ModelError:
        """An error of this file, with attributes ``file``, ``line`` and ``key``."""
        line = line_of(self.text, key)
        return ModelError(f"{self.file}:{line}: {key}: {reason}", file=self.file, line=line, key=key)

    def name(self, key: str = "name") -> str:
        """A text that is not empty."""
        found = self.table.get(key)
        if not isinstance(found, str) or not found:
            raise self.bad(key, "must be a non-empty string")
        return found

    def number(self, key: str, *, whole: bool = False, zero: bool = False) -> float:
        """A number of the file, which must be there."""
        if key not in self.table:
            raise self.bad(key, "missing")
        return self.entry(self.table[key], key, key, whole=whole, zero=zero)

    def numbers(self, table: str, known: Iterable[str] | None) -> dict[str, float]:
        """A table of numbers, empty where there is none. Args: known: the keys that it may have; None: any."""
        entries = self.table.get(table, {})
        if not isinstance(entries, dict):
            raise self.bad(table, "must be a table of numbers")
        allowed = None if known is None else tuple(known)
        for key in entries:
            if allowed is not None and key not in allowed:
                raise self.bad(key, f"unknown key of {table}, choose from {list(allowed)}")
        return {key: self.entry(entry, key, f"{table}.{key}") for key, entry in entries.items()}

    def entry(self, entry: object, key: str, name: str, *, whole: bool = False, zero: bool = False) -> float:
        """The value of one entry; its source is noted under ``name``. Args: zero: whether it may be 0."""
        if not isinstance(entry, dict):
            raise self.bad(key, "must be a table {value = ..., source = ...}")
        extra = sorted(set(entry) - {"value", "source", "unit"})
        if extra:
            raise self.bad(key, f"unknown part {extra[0]!r}: allowed are value, unit and source")
        value, source = entry.get("value"), entry.get("source")
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.bad(key, f"value {value!r} must be a number")
        if not 0 <= value < float("inf") or (value == 0 and not zero):
            raise self.bad(key, f"value {value!r} must be positive and finite")
        if not isinstance(source, str) or not source.strip():
            raise self.bad(key, "has no source: say where the number comes from")
        if whole and value != int(value):
            raise self.bad(key, f"value {value!r} must be a whole number")
        self.sources[name] = source
        return value


def line_of(text: str, key: str) -> int:
    """Line (from 1) on which ``key`` is set; the last line if it is nowhere, which is where it is missing."""
    pattern = re.compile(rf"^\s*(\[?\s*\"?){re.escape(key)}\b")
    lines = text.splitlines()
    for number, line in enumerate(lines, start=1):
        if pattern.match(line):
            return number
    return max(1, len(lines))


def written(key: str, value: float, unit: str, source: str) -> str:
    """One entry as a line of a file."""
    text = str(value) if isinstance(value, int) else f"{value:.5g}"
    return f"{key} = {{ value = {text}, unit = {quoted(unit)}, source = {quoted(source)} }}"


def quoted(text: str) -> str:
    """A TOML string."""
    return json.dumps(text, ensure_ascii=False)


def written_table(name: str, values: Mapping[str, float], units: Mapping[str, str], sources: Mapping[str, str]) -> str:
    """A table of entries, '' for none. Args: units: by key, '' for all others; sources: by ``name.key``."""
    lines = [
        written(key, value, units.get(key, units.get("", "")), sources[f"{name}.{key}"])
        for key, value in values.items()
    ]
    return "\n".join(["", f"[{name}]", *lines]) if lines else ""
