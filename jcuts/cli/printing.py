"""Console output helpers of the commands: tables, and human-readable numbers."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text


def console() -> Console:
    """A console on standard output that does not guess at colours in plain text."""
    return Console(highlight=False, soft_wrap=False)


class Titled(Table):
    """A table under a title that may be wider than it is."""

    heading = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The title at the console's width, then the table."""
        if self.heading:
            yield Text(self.heading, style="table.title")
        yield from super().__rich_console__(console, options)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[int] = ()) -> Table:
    """A plain table; ``right`` are the columns that hold numbers."""
    made = Titled(header_style="bold")
    made.heading = title
    for position, column in enumerate(columns):
        number = position in right
        made.add_column(column, justify="right" if number else "left", overflow="fold", no_wrap=number)
    for row in rows:
        made.add_row(*row)
    return made


def phrases(parts: Sequence[str], width: int) -> str:
    """Phrases with commas between them, broken into lines of ``width`` columns between phrases, not inside of them.

    >>> print(phrases(["d data", "P parameters", "b micro-batch"], 22))
    d data, P parameters,
    b micro-batch
    """
    kept = "\u00a0"
    text = ", ".join(part.replace(" ", kept) if len(part) < width else part for part in parts)
    return textwrap.fill(text, width, break_on_hyphens=False).replace(kept, " ")


def duration(seconds: float) -> str:
    """Seconds with a fitting unit and three significant digits.

    >>> duration(0.00123), duration(45e-6), duration(12.3)
    ('1.23 ms', '45.0 us', '12.3 s')
    """
    units = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9))
    unit, scale = next((entry for entry in units if seconds >= entry[1]), units[-1])
    value = seconds / scale
    digits = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:.{digits}f} {unit}"


def size(count: float) -> str:
    """Bytes with a binary unit.

    >>> size(512), size(1536), size(3 * 2**20)
    ('512 B', '1.5 KiB', '3.0 MiB')
    """
    if count < 1024:
        return f"{count:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        count /= 1024
        if count < 1024:
            return f"{count:.1f} {unit}"
    return f"{count / 1024:.1f} TiB"
