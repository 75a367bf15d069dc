"""Report rows of micro-batched convolutions: plain data, and its text cells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class DivisionReport:
    """One convolution under a workspace limit.

    Attributes:
        layer: its name.
        kernel: which convolution.
        where: user source line.
        batch: samples.
        division: the micro-batches, '' where XLA keeps it.
        why: then the reason.
        seconds, workspace: of the division [s], [B].
        undivided: the fastest single call of cuDNN within the same limit [s], None if there is none.
        xla_seconds, xla_workspace: of XLA's own convolution, None where it was not timed.
        front: (workspace [B], seconds, division) of all that nothing beats in both, ascending workspace.
    """

    layer: str
    kernel: str
    where: str
    batch: int
    division: str = ""
    why: str = ""
    seconds: float | None = None
    workspace: int = 0
    undivided: float | None = None
    xla_seconds: float | None = None
    xla_workspace: int | None = None
    front: tuple[tuple[int, float, str], ...] = ()


def microseconds(value: float | None) -> str:
    """A time in microseconds, '-' where unknown."""
    return "-" if value is None else f"{value * 1e6:,.1f}"


FRONT_HEADINGS = ["front of", "n", "workspace", "us", "division"]
DIVISION_HEADINGS = ["layer", "kernel", "n", "division", "us", "undivided us", "XLA us", "workspace", "XLA's", "where"]


def size_text(size: int | None) -> str:
    """A number of bytes in MiB, in KiB where that is less than 1; '-' where unknown."""
    if size is None:
        return "-"
    return f"{size / 2**20:,.1f} MiB" if size >= 2**20 else f"{size / 2**10:,.1f} KiB" if size else "0"


def division_rows(divisions: Sequence[DivisionReport]) -> list[list[str]]:
    """The table of convolutions under a workspace limit, as text cells, in program order."""
    return [
        [
            d.layer,
            d.kernel,
            str(d.batch),
            d.division or f"XLA: {d.why}",
            microseconds(d.seconds),
            microseconds(d.undivided),
            microseconds(d.xla_seconds),
            size_text(d.workspace if d.division else None),
            size_text(d.xla_workspace),
            d.where,
        ]
        for d in divisions
    ]


def division_total(divisions: Sequence[DivisionReport]) -> str:
    """Workspaces of the divided convolutions, in all and at once, as one line; '' where none is divided."""
    spaces = [d.workspace for d in divisions if d.division]
    if not spaces:
        return ""
    return (
        f"{len(spaces)} of {len(divisions)} convolutions by cuDNN: workspaces of {size_text(sum(spaces))} in all, "
        f"{size_text(max(spaces))} at once"
    )


def pareto_rows(divisions: Sequence[DivisionReport]) -> list[list[str]]:
    """The Pareto front of every distinct kernel under a limit, as text cells."""
    fronts = {(d.kernel, d.batch): d.front for d in divisions if d.front}
    return [
        [kernel, str(batch), size_text(space), microseconds(seconds), text]
        for (kernel, batch), front in fronts.items()
        for space, seconds, text in front
    ]
