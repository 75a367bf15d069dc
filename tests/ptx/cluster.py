"""What blocks of a cluster that store into each other's memory need of the PTX machine: barriers that count bytes.

A byte that was stored, or comes by a bulk copy, is under way until a thread of the block that has it has seen the
barrier full: until then nobody may touch it.  Bulk copies that leave read what has passed a proxy fence and a barrier;
their threads wait for them before they end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from tests.ptx.tensor_core import TensorFault

if TYPE_CHECKING:
    from tests.ptx.machine import Instruction, Machine


@dataclass
class Barrier:
    """Of one block: arrivals of a phase and those that it still waits for, bytes that it expects less those that came,
    what came.

    ``phase``: how many have ended. ``known``: all threads of its block know of it; ``open``: all blocks of the cluster.
    ``clock``: what those have done who arrived, ``ended``: before the last phase ended (`ptx_races`); ``column``: its
    own there.
    """

    count: int
    pending: int
    clock: np.ndarray
    ended: np.ndarray
    column: int
    phase: int = 0
    bytes: int = 0
    known: bool = False
    open: bool = False
    places: list[np.ndarray] = field(default_factory=list)

    def advance(self) -> bool:
        """Whether a phase ends."""
        if self.pending or self.bytes:
            return False
        self.phase, self.pending = self.phase + 1, self.count
        np.maximum(self.clock, self.ended, out=self.ended)
        self.clock[:] = 0
        return True


class Barriers:
    """All barriers in shared memory: (block, address) -> barrier."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.known: dict[tuple[int, int], Barrier] = {}
        self.leaving: set[int] = set()  # threads with bulk copies that they have not waited for

    def step(self, ins: Instruction, parts: list[str], on: np.ndarray) -> None:
        """mbarrier.init, mbarrier.arrive, mbarrier.try_wait.parity; cp.async.mbarrier.arrive, when copies have come."""
        machine, live = self.machine, np.flatnonzero(on)
        alone = parts[1] == "init" or ins.op.startswith("cp")
        address = machine.address(ins.operands[0 if alone else 1], "u32", live).astype(np.int64)
        if (address % 8).any():
            raise TensorFault(f"misaligned: {ins.text}")
        full = np.zeros(machine.count, bool)
        for key, mine in _groups(live // machine.threads, address):
            if parts[1] == "init":
                if key in self.known or mine.sum() > 1:
                    raise TensorFault(f"a barrier is made twice: {ins.text}")
                count = int(machine.value(ins.operands[1], "u32")[live[mine][0]])
                races = machine.races
                self.known[key] = Barrier(count, count, races.clock(), races.clock(), races.column(key[0]))
                continue
            barrier = self._at(key, ins)
            if parts[1] == "arrive":
                barrier.pending -= int(mine.sum())
                if barrier.pending < 0:
                    raise TensorFault(f"more arrive than are waited for: {ins.text}")
                if "expect_tx" in parts:
                    barrier.bytes += int(machine.value(ins.operands[2], "u32")[live[mine]].sum())
                machine.races.release(barrier.clock, live[mine])
                self._ends(barrier)
            else:
                full[live[mine]] = True
                self._seen(key[0], barrier, live[mine])
        if parts[1] == "try_wait":
            machine.set(ins.operands[0], full, on)

    def ended(self, at: np.ndarray, ins: Instruction) -> np.ndarray:
        """Which of the threads at ``mbarrier.try_wait`` find their phase ended."""
        machine, live, found = self.machine, np.flatnonzero(at), np.zeros(self.machine.count, bool)
        address = machine.address(ins.operands[1], "u32", live).astype(np.int64)
        parity = machine.value(ins.operands[2], "u32")[live]
        for key, mine in _groups(live // machine.threads, address):
            found[live[mine]] = self._at(key, ins).phase % 2 != parity[mine]
        return found

    def _ends(self, barrier: Barrier) -> None:
        if barrier.advance():
            self.machine.waiting[:] = False  # whoever still has to wait finds out

    def meet(self, blocks: np.ndarray, *, cluster: bool) -> None:
        """All threads of these blocks (``cluster``: of whole clusters) have passed a barrier."""
        for (block, _), barrier in self.known.items():
            if block in blocks:
                barrier.known = True
                barrier.open |= cluster

    def bulk(self, ins: Instruction, parts: list[str], on: np.ndarray) -> None:
        """cp.async.bulk from global into shared memory and back, and waiting for the latter."""
        machine, live = self.machine, np.flatnonzero(on)
        if parts[3] == "commit_group":
            return
        if parts[3] == "wait_group":
            self.leaving -= set(live.tolist())
            return
        comes = parts[3] == "shared::cluster"
        inside, outside = ins.operands[:2] if comes else ins.operands[1::-1]
        size = machine.value(ins.operands[2], "u32")[live].astype(np.int64)
        source = machine.address(outside, "u64", live)
        place = machine.address(inside, "u32", live).astype(np.int64)
        if (size % 16).any() or (size <= 0).any() or (place % 16).any() or (source % np.uint64(16)).any():
            raise TensorFault(f"no whole pieces: {ins.text}")
        for number, thread in enumerate(live):
            where, block = place[number] + np.arange(size[number]), np.full(size[number], thread // machine.threads)
            if where.max() >= machine.shared.shape[1]:
                raise TensorFault(f"outside shared memory: {ins.text}")
            machine.pipeline.check(block, where, ins.text)
            starts = source[number] + np.arange(0, size[number], 16, dtype=np.uint64)
            if comes:
                machine.claim(block[:1, None], where[None], live[number : number + 1], ins)
                machine.units.unseen[block, where] = -1  # no thread wrote them
                machine.shared[block, where] = machine.memory.read(starts, 16, ins.text).reshape(-1)
                machine.pipeline.busy[block, where] = True
                barrier = self._at((int(block[0]), int(machine.address(ins.operands[3], "u32", live)[number])), ins)
                if not barrier.known:
                    raise TensorFault(f"tells a barrier that may not be there: {ins.text}")
                machine.races.comes(int(block[0]), where, barrier.column, barrier.clock)
                barrier.bytes -= int(size[number])
                barrier.places.append(where)
                self._ends(barrier)
                continue
            if (machine.units.unseen[block, where] >= 0).any():
                raise TensorFault(f"sends what has not passed a proxy fence: {ins.text}")
            if machine.races.unsent(int(block[0]), where, int(thread)):
                raise TensorFault(f"sends before a barrier what was written: {ins.text}")
            pieces = machine.shared[block, where].reshape(-1, 16)
            machine.memory.write(starts, pieces, np.full(len(starts), thread), ins.text)
            self.leaving.add(int(thread))

    def store(self, ins: Instruction, on: np.ndarray) -> None:
        """st.async of words."""
        machine, live = self.machine, np.flatnonzero(on)
        names = [n.strip() for n in ins.operands[1].strip("{}").split(",")]
        size = 4 * len(names)
        block, where = machine.shared_place(machine.address(ins.operands[0], "u32", live), size, live, ins)
        there, place = machine.shared_place(machine.address(ins.operands[2], "u32", live), 8, live, ins)
        if (block[:, 0] != there[:, 0]).any():
            raise TensorFault(f"tells another block than it stores to: {ins.text}")
        machine.claim(block, where, live, ins)
        machine.pipeline.check(block, where, ins.text)
        words = [machine.value(n, "b32")[live].view(np.uint8).reshape(-1, 4) for n in names]
        machine.shared[block, where] = np.concatenate(words, 1)
        machine.pipeline.busy[block, where] = True
        for key, mine in _groups(there[:, 0], place[:, 0]):
            barrier = self._at(key, ins)
            if not barrier.open:
                raise TensorFault(f"stores into a block that may not have begun: {ins.text}")
            machine.races.comes(block[mine], where[mine], barrier.column, barrier.clock)
            barrier.bytes -= size * int(mine.sum())
            barrier.places.append(where[mine])
            self._ends(barrier)

    def _at(self, key: tuple[int, int], ins: Instruction) -> Barrier:
        if key not in self.known:
            raise TensorFault(f"no barrier there: {ins.text}")
        return self.known[key]

    def _seen(self, block: int, barrier: Barrier, threads: np.ndarray) -> None:
        for where in barrier.places:
            self.machine.pipeline.busy[block, where] = False
        barrier.places = []
        self.machine.races.acquire(barrier.ended, threads)


def _groups(block: np.ndarray, address: np.ndarray) -> Iterator[tuple[tuple[int, int], np.ndarray]]:
    """Which threads name which barrier."""
    for mine in np.unique(block):
        for place in np.unique(address[block == mine]):
            yield (int(mine), int(place)), (block == mine) & (address == place)
