"""What warp groups (``wgmma``) need of the PTX machine: descriptors, swizzled tiles, the units' own view of memory.

Reads are under way from the instruction until its threads wait for its group: until then nobody may write the bytes
(nor these threads the registers) that it reads, and until a barrier after that nobody else the bytes.  What threads
have written is not seen before they pass a proxy fence.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from jcuts.kernel_ir.numpy_semantics import numpy_dtype
from tests.ptx.tensor_core import TensorFault

if TYPE_CHECKING:
    from tests.ptx.machine import Instruction, Machine

GROUP, ROWS, LINE = 128, 64, 128
TYPES = {"tf32": "float32", "bf16": "bfloat16", "f16": "float16"}
_SHAPE = re.compile(r"m64n(\d+)k(\d+)")


@dataclass
class Reads:
    """One instruction of one group of threads: their number of it; bytes, cells and registers that it reads."""

    group: int
    number: int
    block: int
    where: np.ndarray
    cells: np.ndarray
    registers: frozenset[str] = frozenset()


class Units:
    """The matrix units of all warp groups."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.each = machine.threads // GROUP  # groups of a block
        starts = np.arange(machine.blocks)[:, None] * machine.threads + np.arange(self.each) * GROUP
        self.threads = starts.reshape(-1, 1) + np.arange(GROUP)  # [group, its threads]
        self.committed = np.zeros(len(self.threads), np.int64)
        self.fenced = np.zeros(len(self.threads), bool)
        self.under_way: list[Reads] = []
        self.reading = np.zeros(machine.shared.shape, np.int16)
        self.unseen = np.full(machine.shared.shape, -1, np.int64)  # who wrote a byte and has not passed a fence

    def wrote(self, block: np.ndarray, where: np.ndarray, threads: np.ndarray, text: str) -> None:
        """Threads write (or will have copied) bytes."""
        if self.reading[block, where].any():
            raise TensorFault(f"writes what a warp group is reading: {text}")
        self.unseen[block, where] = threads

    def changes(self, name: str, on: np.ndarray) -> None:
        """Threads write a register."""
        for reads in self.under_way:
            if name in reads.registers and on[self.threads[reads.group]].any():
                raise TensorFault(f"writes register {name}, which a warp group is reading")

    def proxy_fence(self, on: np.ndarray) -> None:
        """fence.proxy.async: what these threads have written, or know of by a barrier, is seen by the units."""
        held = (self.unseen >= 0) & ~self.machine.pipeline.busy  # copies that have arrived
        block, where = np.nonzero(held)
        seen = on[self.unseen[block, where]] | self.machine.races.is_known(block, where, on)
        self.unseen[block[seen], where[seen]] = -1

    def step(self, ins: Instruction, parts: list[str], on: np.ndarray) -> None:
        """wgmma.fence, wgmma.mma_async, wgmma.commit_group, wgmma.wait_group; ``on`` are whole groups."""
        groups = np.flatnonzero(on[self.threads[:, 0]])
        if parts[1] == "fence":
            self.fenced[groups] = True
        elif parts[1] == "commit_group":
            self.committed[groups] += 1
            self.fenced[groups] = False
        elif parts[1] == "wait_group":
            self._wait(groups, int(ins.operands[0]))
        else:
            for group in groups:
                self._multiply(ins, parts, int(group))

    def _wait(self, groups: np.ndarray, newest: int) -> None:
        left = []
        for reads in self.under_way:
            if reads.group in groups and reads.number < self.committed[reads.group] - newest:
                self.reading[reads.block, reads.where] -= 1
                self.machine.races.units_have_read(reads.block, reads.cells, int(self.threads[reads.group, 0]))
            else:
                left.append(reads)
        self.under_way = left

    def _multiply(self, ins: Instruction, parts: list[str], group: int) -> None:
        machine = self.machine
        if not self.fenced[group]:
            raise TensorFault(f"no wgmma.fence before {ins.text[:60]}")
        found = _SHAPE.fullmatch(parts[4])
        assert found is not None
        columns, terms, kind = int(found[1]), int(found[2]), parts[6]
        names = [n.strip() for n in ins.operands[0].strip("{}").split(",")]
        turned = [bool(int(x)) for x in ins.operands[6:8]]
        turned = [False] * (2 - len(turned)) + turned  # registers lie one way only
        threads = self.threads[group]
        operands = []
        for number, (rows, across) in enumerate(zip((ROWS, columns), turned, strict=True)):
            if ins.operands[1 + number].startswith("{"):
                operands.append(self._fragments(ins.operands[1], kind, group, ins))
                continue
            words = machine.value(ins.operands[1 + number], "u64")[threads]
            if (words != words[0]).any():
                raise TensorFault(f"lanes with different descriptors: {ins.text[:60]}")
            operands.append(self._read(int(words[0]), rows, terms, kind, across, group, ins))
        total = np.stack([machine.value(n, "f32")[threads] for n in names], -1).astype(np.float64)
        lane = np.arange(GROUP)
        row = lane // 32 * 16 + lane % 32 // 4
        made = operands[0] @ operands[1].T  # [64, columns]
        for k in range(len(names)):
            total[:, k] += made[row + 8 * (k % 4 // 2), k // 4 * 8 + lane % 4 * 2 + k % 2]
        on = np.zeros(machine.count, bool)
        on[threads] = True
        for k, name in enumerate(names):
            full = np.zeros(machine.count, np.float32)
            full[threads] = total[:, k].astype(np.float32)
            machine.set(name, full, on)

    def _fragments(self, operand: str, kind: str, group: int, ins: Instruction) -> np.ndarray:
        """The left operand [64, terms] in registers: rows ``lane / 4`` and 8 more, words ``lane % 4`` and 4 more."""
        names = [n.strip() for n in operand.strip("{}").split(",")]
        threads = self.threads[group]
        words = np.stack([self.machine.value(n, "b32")[threads] for n in names], -1)
        if kind == "tf32":
            _check_rounded(words, ins)
        dtype = numpy_dtype(TYPES[kind])
        many = 4 // dtype.itemsize  # terms of a word
        lane = np.arange(GROUP)
        row, term, found = lane // 32 * 16 + lane % 32 // 4, lane % 4 * many, np.zeros((ROWS, 8 * many))
        for k in range(4):
            values = np.ascontiguousarray(words[:, k]).view(dtype).astype(np.float64).reshape(GROUP, many)
            for n in range(many):
                found[row + 8 * (k % 2), term + n + 4 * many * (k // 2)] = values[:, n]
        none, block = np.zeros(0, np.int64), group // self.each
        self.under_way.append(Reads(group, int(self.committed[group]), block, none, none, frozenset(names)))
        return found

    def _read(
        self, words: int, rows: int, terms: int, kind: str, turned: bool, group: int, ins: Instruction
    ) -> np.ndarray:
        """A tile [rows, terms] that a descriptor names, in float64."""
        machine = self.machine
        if words >> 62 != 1 or words >> 49 & 7:
            raise TensorFault(f"no swizzle of 128 bytes from an aligned atom: {ins.text[:60]}")
        start, leading, stride = words << 4 & 0x3FFFF, words >> 12 & 0x3FFF0, words >> 28 & 0x3FFF0
        dtype = numpy_dtype(TYPES[kind])
        item = dtype.itemsize
        if turned and item != 2:
            raise TensorFault(f"only 16-bit operands may lie across: {ins.text[:60]}")
        row, term = np.arange(rows)[:, None], np.arange(terms)[None, :]
        if turned:
            place = row // 64 * leading + row % 64 * item + term // 8 * stride + term % 8 * LINE
        else:
            place = row // 8 * stride + row % 8 * LINE + term * item
        place = start + place
        place = place ^ (place >> 3 & 0x70)  # bits 7 to 9 of an address into bits 4 to 6
        where = (place[..., None] + np.arange(item)).reshape(-1)
        block = group // self.each
        if where.max() >= machine.shared.shape[1]:
            raise TensorFault(f"outside shared memory: {ins.text[:60]}")
        if self.unseen[block, where].any() and (self.unseen[block, where] >= 0).any():
            raise TensorFault(f"reads what has not passed a proxy fence: {ins.text[:60]}")
        cells = where[:: min(item, machine.races.cell)] // machine.races.cell
        if machine.races.units_read(block, cells, self.threads[group]):
            raise TensorFault(f"reads before a barrier what was written: {ins.text[:60]}")
        machine.pipeline.check(np.full(where.shape, block), where, ins.text[:60])
        self.reading[block, where] += 1
        self.under_way.append(Reads(group, int(self.committed[group]), block, where, cells))
        data = np.ascontiguousarray(machine.shared[block, where])
        if kind == "tf32":
            _check_rounded(data.view(np.uint32), ins)
        return data.view(dtype).astype(np.float64).reshape(rows, terms)


def _check_rounded(words: np.ndarray, ins: Instruction) -> None:
    if (words & np.uint32(0x1FFF)).any() and np.isfinite(words.view(np.float32)).all():
        raise TensorFault(f"operands that are not rounded to TF32: {ins.text[:60]}")
