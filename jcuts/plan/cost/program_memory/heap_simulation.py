"""Heap simulation of buffer assignment: best fit by decreasing size, as XLA's ``GlobalDecreasingSizeBestFitHeap``.

XLA gives all temporaries of a program offsets in one allocation, so fragmentation counts as memory that is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

NEGLIGIBLE = 2.0**-12
"""Fraction of the largest total below which a buffer is not placed but added to the height."""


@dataclass(frozen=True)
class Buffer:
    """A temporary of a program: its bytes per device, the primitive that writes it, its shape and type."""

    bytes: float
    primitive: str
    shape: tuple[int, ...] = ()
    dtype: str = ""

    def __str__(self) -> str:
        return f"{self.bytes / 2**20:,.1f} MiB {self.primitive} {self.dtype}{list(self.shape)}"


@dataclass
class Lifetime:
    """A buffer and the first and last instant at which it is live."""

    buffer: Buffer
    start: int
    end: int = -1


@dataclass
class Timeline:
    """Lifetimes of the buffers of a program whose loops and branches run in its midst, one turn of each."""

    now: int = 0
    lifetimes: list[Lifetime] = field(default_factory=list)
    ran: list[tuple[str, int]] = field(default_factory=list)
    """Primitives and the instants at which they ran."""

    def bytes_at(self, instant: int) -> float:
        """Bytes of all buffers that are live at an instant."""
        return sum(one.buffer.bytes for one in self.lifetimes if one.start <= instant <= one.end)

    def allocate(self, buffer: Buffer) -> Lifetime:
        """A buffer that is live from now on, until its ``end`` is set."""
        made = Lifetime(buffer, self.now)
        self.lifetimes.append(made)
        return made

    def free(self, lifetime: Lifetime) -> None:
        """Ends a lifetime with the present instant."""
        lifetime.end = self.now

    def live(self) -> tuple[Buffer, ...]:
        """The buffers at the instant that has the most bytes, the largest first."""
        changes: dict[int, float] = {}
        for one in self.lifetimes:
            changes[one.start] = changes.get(one.start, 0.0) + one.buffer.bytes
            changes[one.end + 1] = changes.get(one.end + 1, 0.0) - one.buffer.bytes
        total = best = 0.0
        instant = -1
        for time in sorted(changes):
            total += changes[time]
            if total > best:
                best, instant = total, time
        found = [one.buffer for one in self.lifetimes if one.start <= instant <= one.end]
        return tuple(sorted(found, key=lambda buffer: -buffer.bytes))

    def height(self) -> float:
        """Bytes of the allocation that holds all buffers: the lower of the placements by size and by lifetime."""
        total = sum(buffer.bytes for buffer in self.live())
        large = [one for one in self.lifetimes if one.buffer.bytes > NEGLIGIBLE * total]
        by_size = sorted(large, key=lambda one: (-one.buffer.bytes, one.start - one.end, one.start))
        by_time = sorted(large, key=lambda one: (one.start - one.end, -one.buffer.bytes, one.start))
        return max(total, min(_placed(by_size), _placed(by_time)))


def _placed(order: Sequence[Lifetime]) -> float:
    """Height after placing buffers in this order, each in the smallest gap that is free for all of its lifetime."""
    placed: list[tuple[float, Lifetime]] = []
    height = 0.0
    for one in order:
        busy = sorted(
            (at, at + old.buffer.bytes) for at, old in placed if old.start <= one.end and one.start <= old.end
        )
        gaps: list[tuple[float, float]] = []
        end = 0.0
        for low, high in busy:
            if low - end >= one.buffer.bytes:
                gaps.append((low - end, end))
            end = max(end, high)
        offset = min(gaps)[1] if gaps else end
        placed.append((offset, one))
        height = max(height, offset + one.buffer.bytes)
    return height
