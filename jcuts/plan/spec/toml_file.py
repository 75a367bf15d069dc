"""TOML reader with strict validation: every mistake is reported with its file, line and key."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jcuts.base.errors import ModelError, UsageError

REQUIRED = object()
"""Default of a key that must be there."""


class Table:
    """A TOML table with typed access; unknown keys are errors that name the nearest known key."""

    def __init__(self, values: Mapping[str, Any], path: str, name: str, text: str) -> None:
        self.values, self.path, self.name, self.text = values, path, name, text
        self.used: set[str] = set()

    def error(self, key: str, problem: str) -> ModelError:
        """The error for a key, with the line of the key (or of its table's header)."""
        line = find_line(self.text, self.name, key)
        full = f"{self.name}.{key}" if self.name else key
        return ModelError(f"{self.path}:{line}: {full}: {problem}", file=self.path, line=line, key=full)

    def number(
        self, key: str, default: Any = REQUIRED, *, positive: bool = True, zero: bool = False, high: float | None = None
    ) -> Any:
        """A number; by default it must be > 0 (``zero`` allows 0, ``positive=False`` anything)."""
        value = self._take(key, default)
        if value is default and key not in self.values:
            return value
        if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
            raise self.error(key, f"must be a number, not {value!r}")
        if positive and (value < 0 or (value == 0 and not zero)):
            raise self.error(key, f"must be {'>= 0' if zero else 'positive'}, not {value}")
        if high is not None and value > high:
            raise self.error(key, f"must be at most {high:g}, not {value}")
        return value

    def integer(self, key: str, default: Any = REQUIRED, *, zero: bool = False) -> Any:
        """A whole number >= 1 (or >= 0)."""
        value = self.number(key, default, zero=zero)
        if value is not default and not isinstance(value, int):
            raise self.error(key, f"must be a whole number, not {value!r}")
        return value

    def integers(self, key: str, count: int = 0) -> list[int]:
        """A list of whole numbers >= 0, of ``count`` entries (0: at least one)."""
        value = self._take(key, REQUIRED)
        good = isinstance(value, list) and all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in value)
        if not good or not value or (count and len(value) != count):
            raise self.error(key, f"must be a list of {count or 'one or more'} whole numbers, not {value!r}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """A boolean."""
        value = self._take(key, default)
        if not isinstance(value, bool):
            raise self.error(key, f"must be true or false, not {value!r}")
        return value

    def text_of(self, key: str, default: Any = REQUIRED, *, choices: Iterable[str] = ()) -> Any:
        """A string, of ``choices`` if there are any."""
        value = self._take(key, default)
        if value is default and key not in self.values:
            return value
        if not isinstance(value, str):
            raise self.error(key, f"must be a string, not {value!r}")
        choices = tuple(choices)
        if choices and value not in choices:
            raise self.error(key, f"{value!r} is unknown{nearest(value, choices)}")
        return value

    def table(self, key: str, *, required: bool = True) -> Table | None:
        """A sub-table, or None if it is optional and absent."""
        value = self._take(key, REQUIRED if required else None)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(key, "must be a table")
        return Table(value, self.path, f"{self.name}.{key}" if self.name else key, self.text)

    def tables(self, key: str) -> list[Table]:
        """An array of tables (``[[key]]``)."""
        value = self._take(key, REQUIRED)
        if not isinstance(value, list) or not value or not all(isinstance(entry, dict) for entry in value):
            raise self.error(key, "must be an array of tables with at least one entry")
        return [Table(entry, self.path, f"{self.name}.{key}" if self.name else key, self.text) for entry in value]

    def done(self) -> None:
        """Raises for keys that were never read."""
        for key in self.values:
            if key not in self.used:
                raise self.error(key, f"is not a known key{nearest(key, self.used)}")

    def _take(self, key: str, default: Any) -> Any:
        self.used.add(key)
        if key in self.values:
            return self.values[key]
        if default is REQUIRED:
            # A key that is nearly this one and that nothing has asked for was probably meant.
            close = difflib.get_close_matches(key, set(self.values) - self.used, n=1, cutoff=0.7)
            raise self.error(key, "is missing" + (f": is {close[0]!r} meant to be it?" if close else ""))
        return default


def read(path: str | Path) -> Table:
    """Parses a TOML file.

    Raises: UsageError if it cannot be read; ModelError with file and line if it is not TOML.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}", path=str(path)) from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: is not UTF-8 text", path=str(path)) from error
    return parse(text, str(path))


def parse(text: str, path: str) -> Table:
    """Parses TOML text; ``path`` is what errors call it."""
    try:
        return Table(tomllib.loads(text), path, "", text)
    except tomllib.TOMLDecodeError as error:
        found = re.search(r"at line (\d+)", str(error))
        line = int(found.group(1)) if found else text.count("\n") + 1
        lines = text.splitlines()
        key = lines[line - 1].split("=")[0].strip() if line <= len(lines) else ""
        raise ModelError(
            f"{path}:{line}: {key or 'end of file'}: not valid TOML: {error}", file=path, line=line, key=key
        ) from error


def find_line(text: str, table: str, key: str) -> int:
    """Line (from 1) of ``key`` in ``[table]``; that of the table's header if the key is absent; else 1."""
    current, header = "", 1 if not table else 0
    for number, line in enumerate(text.splitlines(), 1):
        bare = line.strip()
        if bare.startswith("["):
            current = bare.strip("[] \t").split("]")[0]
            if current == table and not header:
                header = number
            if current == f"{table}.{key}".lstrip("."):
                return number
        elif current == table and re.match(rf'"?{re.escape(key)}"?\s*[=.]', bare):
            return number
    return header or 1


def nearest(name: str, known: Iterable[str]) -> str:
    """A clause that suggests the nearest known name, or lists them.

    >>> nearest("gpt3-175", ["gpt3-175b", "bert-large"])
    ": did you mean 'gpt3-175b'?"
    """
    known = sorted(known)
    found = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.5)
    if found:
        return f": did you mean {found[0]!r}?"
    return f": known are {', '.join(known)}" if known else ""
