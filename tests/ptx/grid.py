"""Memory that all blocks of a cooperative launch read and write: happens-before by vector clocks of blocks.

``red.release`` gives what the block has seen to those who ``ld.acquire`` the counter after it.  A read of what another
block has written, or a write of what another has read or written, that is not ordered by this is a race.  Threads of a
block count as one: `races` watches them in shared memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np


class Grid:
    """The scratch memory of one launch.

    Args: memory: all global memory; first, size: of the scratch memory in it [B]; blocks, threads: of the launch.
    """

    def __init__(self, memory: Any, first: int, size: int, blocks: int, threads: int) -> None:
        last = first + size
        self.memory, self.first, self.last, self.threads = memory, first, last, threads
        self.clock = np.eye(blocks, dtype=np.int64)
        self.released: dict[int, np.ndarray] = {}
        self.writer = np.full(last - first, -1, np.int64)
        self.epoch = np.zeros(last - first, np.int64)
        self.reads = np.zeros((last - first, blocks), np.int64)

    def has(self, address: np.ndarray) -> bool:
        """Whether an access goes there."""
        return bool(address.size) and self.first <= int(address[0]) < self.last

    def _where(self, address: np.ndarray, size: int, threads: np.ndarray, what: str) -> tuple[np.ndarray, np.ndarray]:
        place = self.memory._where(address, size, what)
        return place - (self.first - self.memory.base), np.broadcast_to((threads // self.threads)[:, None], place.shape)

    def _after_writer(self, where: np.ndarray, block: np.ndarray, what: str) -> None:
        writer = self.writer[where]
        late = (writer >= 0) & (writer != block) & (self.clock[block, writer] < self.epoch[where])
        if late.any():
            raise self.memory.fault(f"race between blocks {writer[late][0]} and {block[late][0]}: {what}")

    def read(self, address: np.ndarray, size: int, threads: np.ndarray, what: str) -> np.ndarray:
        """What a load gives. Raises Fault for a race, and where nobody has written."""
        where, block = self._where(address, size, threads, what)
        place = where + (self.first - self.memory.base)
        if not (self.memory.readable[place] | (self.writer[where] >= 0)).all():
            raise self.memory.fault(f"reads scratch memory that nobody has written: {what}")
        self._after_writer(where, block, what)
        self.reads[where, block] = self.clock[block, block]
        return self.memory.data[place]

    def write(self, address: np.ndarray, values: np.ndarray, threads: np.ndarray, what: str) -> None:
        """A store. Raises Fault for a race, and where two threads write one byte."""
        where, block = self._where(address, values.shape[1], threads, what)
        if len(np.unique(where)) != where.size:
            raise self.memory.fault(f"writes a byte twice: {what}")
        self._after_writer(where, block, what)
        seen, others = self.reads[where], self.clock[block]
        mine = np.arange(len(self.clock)) == block[..., None]
        if ((seen > others) & ~mine).any():
            raise self.memory.fault(f"overwrites what another block may still read: {what}")
        self.writer[where], self.epoch[where] = block, self.clock[block, block]
        self.memory.data[where + (self.first - self.memory.base)] = values

    def release_add(self, address: np.ndarray, added: np.ndarray, threads: np.ndarray) -> None:
        """``red.release.gpu.global.add.u32``, thread by thread."""
        for place, value, thread in zip(address.astype(np.int64), added, threads, strict=True):
            block, here = thread // self.threads, slice(place - self.memory.base, place - self.memory.base + 4)
            total = self.memory.data[here].view(np.uint32) + np.uint32(value)
            self.memory.data[here] = total.view(np.uint8)
            before = self.released.get(int(place), np.zeros_like(self.clock[block]))
            self.released[int(place)] = np.maximum(before, self.clock[block])
            self.clock[block, block] += 1

    def acquire(self, address: np.ndarray, threads: np.ndarray) -> np.ndarray:
        """``ld.acquire.gpu.global.u32``."""
        found = np.zeros(len(address), np.uint32)
        for k, (place, thread) in enumerate(zip(address.astype(np.int64), threads, strict=True)):
            block, start = thread // self.threads, place - self.memory.base
            found[k] = self.memory.data[start : start + 4].view(np.uint32)[0]
            if int(place) in self.released:
                self.clock[block] = np.maximum(self.clock[block], self.released[int(place)])
        return found

    def relaxed_read(self, address: np.ndarray, threads: np.ndarray, what: str) -> np.ndarray:
        """``ld.relaxed.gpu.global.b64``: a word as whoever has written it last; nothing is ordered by it."""
        where, _ = self._exchanged(address, threads, what)
        place = where + (self.first - self.memory.base)
        if not (self.memory.readable[place] | (self.writer[where] >= 0)).all():
            raise self.memory.fault(f"reads scratch memory that nobody has written: {what}")
        return np.ascontiguousarray(self.memory.data[place]).view(np.uint64)[:, 0]

    def relaxed_write(self, address: np.ndarray, values: np.ndarray, threads: np.ndarray, what: str) -> None:
        """``st.relaxed.gpu.global.b64``; who reads the word by another instruction is in a race."""
        where, block = self._exchanged(address, threads, what)
        if len(np.unique(where)) != where.size:
            raise self.memory.fault(f"writes a byte twice: {what}")
        if ((self.writer[where] >= 0) & (self.writer[where] != block)).any():
            raise self.memory.fault(f"a word that another block writes, too: {what}")
        self.writer[where], self.epoch[where] = block, self.clock[block, block]
        data = np.ascontiguousarray(values, np.uint64).view(np.uint8).reshape(-1, 8)
        self.memory.data[where + (self.first - self.memory.base)] = data

    def _exchanged(self, address: np.ndarray, threads: np.ndarray, what: str) -> tuple[np.ndarray, np.ndarray]:
        """Bytes of words in scratch memory, and the blocks that want them. Raises Fault for others."""
        if ((address < self.first) | (address + 8 > self.last)).any():
            raise self.memory.fault(f"no word that blocks exchange: {what}")
        return self._where(address, 8, threads, what)
