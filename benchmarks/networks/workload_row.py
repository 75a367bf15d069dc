"""Benchmark rows: workload, batch, calling form, data type and batch-norm statistics; their names, files and order."""

from __future__ import annotations

from dataclasses import dataclass, replace

FORMS = ("closed", "args")


@dataclass(frozen=True)
class Row:
    """What is measured: workload, batch, calling form (weights closed over or arguments), data type, statistics."""

    name: str
    batch: int
    form: str
    dtype: str = "float32"
    statistics: str = "trained"

    @classmethod
    def parse(cls, text: str, statistics: str = "trained") -> Row:
        """A row from ``NAME:BATCH:FORM[:DTYPE]``.

        >>> Row.parse("DLRM:1:args").dtype
        'float32'

        Raises: ValueError: another number of parts, or an unknown calling form.
        """
        parts = text.split(":")
        if len(parts) not in (3, 4) or parts[2] not in FORMS or not parts[1].isdigit():
            raise ValueError(f"{text!r} is no row: NAME:BATCH:FORM[:DTYPE], FORM {' or '.join(FORMS)}")
        return cls(parts[0], int(parts[1]), *parts[2:], statistics=statistics)

    def __str__(self) -> str:
        return f"{self.name}:{self.batch}:{self.form}:{self.dtype}"

    @property
    def stem(self) -> str:
        """Name of the row's file without its suffix."""
        return f"{self}".replace(":", "_") + ("" if self.statistics == "trained" else f"_{self.statistics}")

    @property
    def file(self) -> str:
        """Name of the row's file."""
        return f"{self.stem}.json"

    def closed(self, closed: bool) -> Row:
        """The same row in a calling form."""
        return replace(self, form=FORMS[0] if closed else FORMS[1])


def headline(batches: tuple[int, ...]) -> int:
    """The batch that stands for a workload: the middle one, of two the larger.

    >>> headline((1, 8, 64, 128)), headline((1, 16)), headline((8,))
    (64, 16, 8)
    """
    return batches[len(batches) // 2]


def all_rows(statistics: str = "trained") -> list[Row]:
    """Every workload at every batch, form and type; with fresh statistics only those that have any.

    The most valuable first: the headline batch of every workload before other batches, float32 before bfloat16.
    """
    from benchmarks.networks.workloads import WORKLOADS

    rows = [
        Row(spec.name, batch, form, dtype, statistics)
        for spec in WORKLOADS.values()
        if statistics == "trained" or spec.has_statistics
        for batch in spec.batches
        for form in spec.forms
        for dtype in spec.dtypes
    ]

    def value(row: Row) -> tuple[bool, int, int]:
        spec = WORKLOADS[row.name]
        return row.batch != headline(spec.batches), spec.dtypes.index(row.dtype), spec.forms.index(row.form)

    return sorted(rows, key=value)
