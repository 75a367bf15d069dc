"""What matrix products need of the PTX machine: asynchronous copies, matrices from shared memory, matrix units.

A copy is under way from its instruction until its thread waits for its group: until then nobody may touch the bytes,
and until a barrier after that nobody else may read them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from jcuts.kernel_ir.numpy_semantics import numpy_dtype

if TYPE_CHECKING:
    from tests.ptx.machine import Instruction, Machine

WARP = 32
BLOCK = 20  # bit from which on an address of shared memory names a block of the cluster


class TensorFault(Exception):
    """What the kernel did wrong with copies or matrix units."""


@dataclass
class Copies:
    """One instruction's copies: threads, the group that each belongs to, shared addresses, bytes, still under way."""

    threads: np.ndarray
    groups: np.ndarray
    where: np.ndarray
    data: np.ndarray
    alive: np.ndarray


class Pipeline:
    """Copies into shared memory that are under way."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.groups = np.zeros(machine.count, np.int64)
        self.under_way: list[Copies] = []
        self.busy = np.zeros(machine.shared.shape, bool)

    def step(self, ins: Instruction, parts: list[str], on: np.ndarray) -> None:
        """cp.async, cp.async.commit_group, cp.async.wait_group."""
        if parts[2] == "commit_group":
            self.groups[on] += 1
        elif parts[2] == "wait_group":
            self._wait(on, int(ins.operands[0]))
        else:
            self._start(ins, on)

    def _start(self, ins: Instruction, on: np.ndarray) -> None:
        machine = self.machine
        live = np.flatnonzero(on)
        size = int(ins.operands[2])
        count = machine.value(ins.operands[3], "u32")[live] if len(ins.operands) > 3 else np.full(live.size, size)
        if (count > size).any():
            raise TensorFault(f"copies more than a piece: {ins.text}")
        block, where = machine.shared_place(machine.address(ins.operands[0], "u32", live), size, live, ins)
        if self.busy[block, where].any():
            raise TensorFault(f"copies onto a copy that is under way: {ins.text}")
        machine.claim(block, where, live, ins)
        data = np.zeros((live.size, size), np.uint8)
        source = machine.address(ins.operands[1], "u64", live)
        if (source % size).any():
            raise TensorFault(f"copies from an address that its size does not divide: {ins.text}")
        for part in np.unique(count[count > 0]):
            reads = count == part
            data[reads, :part] = machine.memory.read(source[reads], int(part), ins.text)
        self.busy[block, where] = True
        self.under_way.append(Copies(live, self.groups[live], where, data, np.ones(live.size, bool)))

    def _wait(self, on: np.ndarray, newest: int) -> None:
        machine = self.machine
        for copies in self.under_way:
            done = copies.alive & on[copies.threads] & (copies.groups < self.groups[copies.threads] - newest)
            threads, where = copies.threads[done, None], copies.where[done]
            block = threads // machine.threads
            machine.shared[block, where] = copies.data[done]
            machine.races.wrote(block, where, threads[:, 0])
            self.busy[block, where] = False
            copies.alive &= ~done
        self.under_way = [c for c in self.under_way if c.alive.any()]

    def arrive(self, on: np.ndarray) -> None:
        """cp.async.mbarrier.arrive: all copies of these threads come, at the earliest time that they may."""
        self.groups[on] += 1
        self._wait(on, 0)

    def check(self, block: np.ndarray, where: np.ndarray, text: str) -> None:
        """An access of shared memory meets no copy."""
        if self.busy[block, where].any():
            raise TensorFault(f"touches bytes of a copy that is under way: {text}")


def round_tf32(values: np.ndarray, *, even: bool = True) -> np.ndarray:
    """float32 rounded to TF32: ten bits after the point, to nearest, ties to even or else away from zero."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    half = np.uint32(0xFFF) + ((bits >> np.uint32(13)) & np.uint32(1)) if even else np.uint32(0x1000)
    rounded = ((bits + half) & np.uint32(0xFFFFE000)).view(np.float32)
    return np.where(np.isfinite(values), rounded, values)


def address_of_block(machine: Machine, ins: Instruction, on: np.ndarray) -> None:
    """mapa: the number of a block of the cluster goes into the upper bits of an address."""
    place = machine.value(ins.operands[1], "u32")
    rank = machine.value(ins.operands[2], "u32")
    if (rank >= machine.cluster).any() or (place >> np.uint32(BLOCK)).any():
        raise TensorFault(f"no such block in the cluster: {ins.text}")
    machine.set(ins.operands[0], place | ((rank + np.uint32(1)) << np.uint32(BLOCK)), on)


def in_cluster(machine: Machine, block: np.ndarray, where: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Block and bytes of an address that `address_of_block` made (or of one's own)."""
    rank = where[:, :1] >> BLOCK
    first = block // machine.cluster * machine.cluster
    return np.where(rank > 0, first + rank - 1, block), where & ((1 << BLOCK) - 1)


def read_matrices(machine: Machine, ins: Instruction, on: np.ndarray) -> None:
    """ldmatrix.x4 of 16-bit elements."""
    live = np.flatnonzero(on)
    block, where = machine.shared_place(machine.address(ins.operands[1], "u32", live), 16, live, ins)
    names = [n.strip() for n in ins.operands[0].strip("{}").split(",")]
    rows = machine.fetch(block, where, live, ins, readers=_lanes_of_matrix(live))  # [threads, 16 bytes]
    matrices = rows.reshape(-1, len(names), 8, 16).view(np.uint16)  # [warp, matrix, row, 8]
    if ".trans" in ins.op:
        matrices = matrices.swapaxes(2, 3)
    words = np.ascontiguousarray(matrices).view(np.uint32).reshape(-1, len(names), WARP)
    for k, name in enumerate(names):
        full = np.zeros(machine.count, np.uint32)
        full[live] = words[:, k].reshape(-1)
        machine.set(name, full, on)


def _lanes_of_matrix(live: np.ndarray) -> np.ndarray:
    """Whoever gets elements of a line is any lane of the warp: its first lane stands for it."""
    return live // WARP * WARP


def multiply(machine: Machine, ins: Instruction, parts: list[str], on: np.ndarray) -> None:
    """mma.m16n8k8 of TF32, mma.m16n8k16 of 16-bit floats, mma.m16n8k8 and mma.m8n8k4 of float64."""
    live = np.flatnonzero(on)
    lists = [[n.strip() for n in o.strip("{}").split(",")] for o in ins.operands]
    if parts[7] == "f64":
        _multiply_double(machine, lists, live, on)
        return
    left, right, total = (
        np.stack([machine.value(n, "b32")[live] for n in names], -1).reshape(-1, WARP, len(names))
        for names in lists[1:]
    )
    kind = parts[7]
    if kind == "tf32":
        if ((left | right.repeat(2, -1)) & np.uint32(0x1FFF)).any() and _finite(left) and _finite(right):
            raise TensorFault(f"operands that are not rounded to TF32: {ins.text}")
        a, b = left.view(np.float32)[..., None], right.view(np.float32)[..., None]
    else:
        dtype = numpy_dtype("bfloat16" if kind == "bf16" else "float16")
        a = np.ascontiguousarray(left).view(dtype).reshape(*left.shape, 2)
        b = np.ascontiguousarray(right).view(dtype).reshape(*right.shape, 2)
    lane = np.arange(WARP)
    across, down, pack = lane % 4, lane // 4, a.shape[-1]
    steps = 4 * pack
    first = np.zeros((len(left), 16, 2 * steps), np.float64)
    second = np.zeros((len(left), 2 * steps, 8), np.float64)
    result = np.zeros((len(left), 16, 8), np.float64)
    for k in range(4):
        for p in range(pack):
            first[:, down + 8 * (k % 2), across * pack + p + steps * (k // 2)] = a[:, :, k, p]
    for k in range(2):
        for p in range(pack):
            second[:, across * pack + p + steps * k, down] = b[:, :, k, p]
    for k in range(4):
        result[:, down + 8 * (k // 2), 2 * across + k % 2] = total.view(np.float32)[:, :, k]
    with np.errstate(all="ignore"):
        result = (result + first @ second).astype(np.float32)
    for k, name in enumerate(lists[0]):
        full = np.zeros(machine.count, np.float32)
        full[live] = result[:, down + 8 * (k // 2), 2 * across + k % 2].reshape(-1)
        machine.set(name, full, on)


def _multiply_double(machine: Machine, lists: list[list[str]], live: np.ndarray, on: np.ndarray) -> None:
    """Registers of rows and columns ``lane / 4``, terms ``lane % 4``: eight rows further, then four terms further."""
    left, right, total = (
        np.stack([machine.value(n, "f64")[live] for n in names], -1).reshape(-1, WARP, len(names))
        for names in lists[1:]
    )
    lane = np.arange(WARP)
    across, down = lane % 4, lane // 4
    terms, high = 4 * right.shape[-1], 4 * total.shape[-1]
    first = np.zeros((len(left), high, terms))
    second = np.zeros((len(left), terms, 8))
    result = np.zeros((len(left), high, 8))
    tall = high // 8
    for k in range(left.shape[-1]):
        first[:, down + 8 * (k % tall), across + 4 * (k // tall)] = left[:, :, k]
    for k in range(right.shape[-1]):
        second[:, across + 4 * k, down] = right[:, :, k]
    for k in range(total.shape[-1]):
        result[:, down + 8 * (k // 2), 2 * across + k % 2] = total[:, :, k]
    with np.errstate(all="ignore"):
        result += first @ second
    for k, name in enumerate(lists[0]):
        full = np.zeros(machine.count, np.float64)
        full[live] = result[:, down + 8 * (k // 2), 2 * across + k % 2].reshape(-1)
        machine.set(name, full, on)


def _finite(words: np.ndarray) -> bool:
    return bool(np.isfinite(np.ascontiguousarray(words).view(np.float32)).all())
