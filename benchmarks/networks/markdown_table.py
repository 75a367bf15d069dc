"""Tables in Markdown, and times in their cells."""

from __future__ import annotations

from collections.abc import Sequence


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
    """Milliseconds, three digits; '' of None.

    >>> ms(0.00234567), ms(1.2345), ms(None)
    ('2.35', '1234', '')
    """
    if seconds is None:
        return ""
    return f"{seconds * 1e3:.3g}" if seconds < 1 else f"{seconds * 1e3:.0f}"
