"""Races in shared memory: who touched a cell last, when, and which warps know of it.

Every warp knows of every other one what it did before some time (vector clocks; C. Flanagan, S. Freund, "FastTrack",
2009).  A barrier of the block tells all of it everything, which one time per block says.  Who arrives at an mbarrier
leaves there what it has done and knows of others; who finds its phase ended knows it then, and nobody else does.
Lanes of a warp learn of each other in the same way, or by ``bar.warp.sync``.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from tests.ptx.machine import Machine

WARP, WORD = 32, 4
MOST = 64
"""Barriers of a block."""


class Races:
    """The accesses of one launch.

    Times are counted on at every barrier; an access has the time at which it was made.  ``who`` did it is the thread's
    number plus 1, or minus (1 plus a column of what warps know): a warp of which several threads did, a barrier that
    counts bytes, or the last column, of which nobody knows anything.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine, self.cluster = machine, machine.cluster
        ops = [i.op for i in machine.kernel.code]
        self.cell = min([WORD, *(int(x) // 8 for op in ops for x in _SHARED.findall(op))])
        self.warps = -(-machine.threads // WARP)
        here = self.cluster * self.warps
        grouped = any(op.startswith("mbarrier") for op in ops)
        self.planes = (here if any("ld.shared::cluster" in op for op in ops) else self.warps) if grouped else 1
        shape = (machine.blocks, -(-machine.shared.shape[1] // self.cell))
        self.writer, self.written = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        self.reader, self.read = (np.zeros((self.planes, *shape), np.int32) for _ in range(2))
        self.latest = np.zeros(shape, np.int32) if grouped else self.read[0]
        self.time, self.floor = 1, np.ones(machine.blocks, np.int32)
        self.columns = here + self.cluster * MOST + 1
        self.known = np.zeros((machine.blocks // self.cluster, here, self.columns), np.int32)
        self.made = np.zeros(machine.blocks, np.int64)  # barriers of each block

    # -- accesses: blocks [n, 1], bytes [n, size], threads [n] --------------------------------------------------------
    def writes(self, block: np.ndarray, where: np.ndarray, threads: np.ndarray) -> bool:
        """Whether these writes race with what others have done."""
        cells, own = self._cells(where), threads[:, None]
        if self._unknown(block, self.writer[block, cells], self.written[block, cells], own).any():
            return True
        fresh = self.latest[block, cells] >= self.floor[block]
        if not fresh.any():
            return False
        block, cells, own = (np.broadcast_to(a, fresh.shape)[fresh] for a in (block, cells, own))
        return bool(self._unknown(block, self.reader[:, block, cells], self.read[:, block, cells], own).any())

    def wrote(self, block: np.ndarray, where: np.ndarray, threads: np.ndarray) -> None:
        """Threads have written."""
        cells = self._cells(where)
        self.writer[block, cells], self.written[block, cells] = threads[:, None] + 1, self.time

    def reads(self, block: np.ndarray, where: np.ndarray, threads: np.ndarray) -> bool:
        """Whether these reads race with what others have written."""
        cells = self._cells(where)
        return bool(self._unknown(block, self.writer[block, cells], self.written[block, cells], threads[:, None]).any())

    def has_read(self, block: np.ndarray, where: np.ndarray, threads: np.ndarray) -> None:
        """Threads have read."""
        self._has_read(block, self._cells(where), threads[:, None])

    def units_read(self, block: int, cells: np.ndarray, threads: np.ndarray) -> bool:
        """Whether a group's matrix units read what one of its warps does not know to be written."""
        who, when = self.writer[block, cells], self.written[block, cells]
        rows = np.unique(self._warp(threads))
        return bool(self._kept(block, who, when, self.known[block // self.cluster, rows].min(0)).any())

    def units_have_read(self, block: int, cells: np.ndarray, thread: int) -> None:
        """The first warp of a group speaks for it."""
        self._has_read(np.full(cells.shape, block), cells, np.full(cells.shape, thread))

    def unsent(self, block: int, where: np.ndarray, thread: int) -> bool:
        """Whether a thread does not know that all was written that it sends; its own has to pass a barrier too."""
        cells = self._cells(where)
        row = self.known[block // self.cluster, self._warp(np.array(thread))]
        return bool(self._kept(block, self.writer[block, cells], self.written[block, cells], row).any())

    def is_known(self, block: np.ndarray, where: np.ndarray, on: np.ndarray) -> np.ndarray:
        """Which bytes [n] are known to be written by some warp of those of their block that are ``on``."""
        cells, best = where // self.cell, np.zeros((self.machine.blocks, self.columns), np.int32)
        warps = np.unique(np.flatnonzero(on) // self.machine.threads * self.warps + self._own(np.flatnonzero(on)))
        for number in warps:
            mine = number // self.warps
            row = self.known[mine // self.cluster, mine % self.cluster * self.warps + number % self.warps]
            best[mine] = np.maximum(best[mine], row)
        who, when = self.writer[block, cells], self.written[block, cells]
        here = np.isin(np.arange(self.machine.blocks), warps // self.warps)[block]
        return here & ((when < self.floor[block]) | (when < best[block, self._column(who)]))

    # -- barriers -------------------------------------------------------------------------------------------------
    def meet(self, blocks: np.ndarray) -> None:
        """All threads of these blocks have passed a barrier."""
        self.time += 1
        self.floor[blocks] = self.time

    def meet_in_warps(self, threads: np.ndarray) -> None:
        """Whole warps have passed a barrier of their own: each knows what it has done itself."""
        self.time += 1
        warps = self._warp(threads)
        self.known[threads // self.machine.threads // self.cluster, warps, warps] = self.time

    def column(self, block: int) -> int:
        """The column of another barrier of a block."""
        self.made[block] += 1
        assert self.made[block] <= MOST
        return self.cluster * self.warps + block % self.cluster * MOST + int(self.made[block]) - 1

    def clock(self) -> np.ndarray:
        """What a barrier knows at first."""
        return np.zeros(self.columns, np.int32)

    def release(self, clock: np.ndarray, threads: np.ndarray) -> None:
        """Warps, of each some threads, arrive: the barrier knows what they have done and know."""
        self.time += 1
        block = int(threads[0]) // self.machine.threads
        for warp in np.unique(self._warp(threads)):
            np.maximum(clock, self.known[block // self.cluster, warp], out=clock)
            clock[warp] = self.time

    def acquire(self, clock: np.ndarray, threads: np.ndarray) -> None:
        """The warps of these threads know what the barrier does."""
        rows = self.known[int(threads[0]) // self.machine.threads // self.cluster]
        for warp in np.unique(self._warp(threads)):
            np.maximum(clock, rows[warp], out=rows[warp])

    def comes(self, block: np.ndarray | int, where: np.ndarray, column: int, clock: np.ndarray) -> None:
        """Bytes come that a barrier counts: it knows of them."""
        cells = self._cells(where)
        self.writer[block, cells], self.written[block, cells] = -1 - column, self.time
        self.time += 1
        clock[column] = self.time

    # -- within ---------------------------------------------------------------------------------------------------
    def _cells(self, where: np.ndarray) -> np.ndarray:
        return where[..., :: self.cell] // self.cell

    def _own(self, threads: np.ndarray) -> np.ndarray:
        """The threads' warps within their blocks."""
        return threads % self.machine.threads // WARP

    def _warp(self, threads: np.ndarray) -> np.ndarray:
        """The threads' warps within their clusters."""
        return threads // self.machine.threads % self.cluster * self.warps + self._own(threads)

    def _column(self, who: np.ndarray) -> np.ndarray:
        return np.where(who > 0, self._warp(who - 1), -1 - who)

    def _kept(self, block: np.ndarray | int, who: np.ndarray, when: np.ndarray, row: np.ndarray) -> np.ndarray:
        """Which accesses are not known, by one row of what warps know."""
        fresh = when >= self.floor[block]
        return fresh & (row[self._column(who)] <= when)

    def _unknown(self, block: np.ndarray, who: np.ndarray, when: np.ndarray, threads: np.ndarray) -> np.ndarray:
        """Which accesses are others', and not known to the threads' warps."""
        fresh = when >= self.floor[block]
        if not fresh.any():
            return fresh
        block, threads = (np.broadcast_to(a, fresh.shape)[fresh] for a in (block, threads))
        who, when = who[fresh], when[fresh]
        known = self.known[block // self.cluster, self._warp(threads), self._column(who)]
        fresh[fresh] = (who != threads + 1) & (known <= when)
        return fresh

    def _has_read(self, block: np.ndarray, cells: np.ndarray, threads: np.ndarray) -> None:
        if self.planes == 1:
            plane, several = np.zeros_like(threads), np.full(threads.shape, -self.columns, np.int32)
        else:
            plane = (self._warp(threads) if self.planes > self.warps else self._own(threads)) % self.planes
            several = -1 - self._warp(threads)
        before, when = self.reader[plane, block, cells], self.read[plane, block, cells]
        other = self._unknown(block, before, when, threads)  # what a reader knows of, it speaks for
        now = np.where(other, several, threads + 1).astype(np.int32)
        self.reader[plane, block, cells], self.read[plane, block, cells] = now, self.time
        self.latest[block, cells] = self.time
        twice = self.reader[plane, block, cells] != now  # several threads of this instruction
        if twice.any():
            parts = (np.broadcast_to(a, now.shape)[twice] for a in (plane, block, cells, several))
            plane, block, cells, several = parts
            self.reader[plane, block, cells] = several


_SHARED = re.compile(r"^(?:ld|st)\.shared(?:::cluster|::cta)?\.(?:v\d\.)?[a-z]+(\d+)$")
