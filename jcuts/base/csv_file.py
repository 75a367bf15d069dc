"""Reads measured tables (CSV).  Lines that begin with ``#`` say where the numbers come from."""

from __future__ import annotations

import csv
from pathlib import Path

from jcuts.base.errors import UsageError


def read_csv(path: str | Path) -> list[dict[str, str]]:
    """Rows of a CSV file with a header line; comment lines are skipped.

    Raises: UsageError if the file cannot be read, has no rows, or a row has another number of fields than the header.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}", path=str(path)) from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: is not UTF-8 text", path=str(path)) from error
    kept = [(number, line) for number, line in enumerate(lines, 1) if line.strip() and not line.startswith("#")]
    reader = csv.DictReader(line for _, line in kept)
    rows = []
    for row in reader:
        number = kept[reader.line_num - 1][0]
        if None in row or None in row.values():
            raise UsageError(f"{path}, line {number}: fields do not match the header", path=str(path), line=number)
        rows.append(row)
    if not rows:
        raise UsageError(f"{path}: holds no rows", path=str(path))
    return rows
