"""Tables in Markdown, times in their cells, and generated files that are brought up to date."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path


def line(cells: Sequence[object]) -> str:
    """A row of a table."""
    return "| " + " | ".join(map(str, cells)) + " |"


def table(head: Sequence[str], body: Sequence[Sequence[object]]) -> str:
    """A table.

    >>> print(table(["a", "b"], [[1, 2]]))
    | a | b |
    | --- | --- |
    | 1 | 2 |
    """
    return "\n".join([line(head), line(["---"] * len(head)), *map(line, body)])


def ms(seconds: float | None) -> str:
    """Milliseconds, three digits or more; '' of None.

    >>> ms(0.00234567), ms(0.1234), ms(1.2345), ms(None)
    ('2.35', '123', '1234', '')
    """
    if seconds is None:
        return ""
    value = seconds * 1e3
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def update(files: Mapping[Path, str], check: bool) -> list[Path]:
    """Writes generated files; gives those that differed, each printed. Args: check: writes nothing."""
    stale = [p for p, text in files.items() if not p.exists() or p.read_text(encoding="utf-8") != text]
    for path in stale:
        print(f"{'stale' if check else 'written'}: {path}")
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(files[path], encoding="utf-8")
    return stale
