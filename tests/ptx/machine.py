"""A PTX machine in NumPy: runs the kernels that jcuts emits, with no GPU, and checks what a GPU would not.

All threads of the grid run together, one instruction for all that stand at it; threads at smaller addresses go first,
so that branches meet again, and barriers and shuffles wait for all of their block or warp.  A load or store outside the
buffers, a misaligned access, a result byte written by two threads or never, a race in shared memory (a byte read or
written by another thread without a barrier between, see `ptx_races`) and a shuffle or barrier that some threads miss
are errors.  Rounding is exact for float32.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jcuts.codegen.artifact import CompiledKernel
from jcuts.codegen.cuda.toolchain import l2_prefetch, programmatic_launch
from jcuts.codegen.cuda.toolchain.image import Image
from jcuts.kernel_ir.numpy_semantics import numpy_dtype
from tests.ptx import cluster as ptx_cluster
from tests.ptx import grid as ptx_grid
from tests.ptx import races, tensor_core
from tests.ptx import wgmma as ptx_wgmma


class Fault(Exception):
    """What the kernel did wrong."""


UINT = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
BASE, GAP = 1 << 20, 4096
LIMIT = 200_000
"""Instructions of a launch."""
STALL = 6000
"""Instructions of a cooperative launch before its late block begins."""
TURN = 50
"""Instructions of the late block, and of the others, in turn."""


@dataclass(frozen=True)
class Instruction:
    predicate: str
    op: str
    operands: tuple[str, ...]
    text: str


@dataclass(frozen=True)
class Kernel:
    parameters: tuple[str, ...]
    code: tuple[Instruction, ...]
    labels: dict[str, int]


@dataclass(frozen=True)
class Module:
    kernels: dict[str, Kernel]
    shared: dict[str, int]
    shared_bytes: int


WAIT = "griddepcontrol.wait"
EARLY = programmatic_launch.COMPUTES | {"nanosleep", "griddepcontrol"}
"""What a kernel may do before it waits, parameters read as well."""


def parse(ptx: str) -> Module:
    """The kernels of a PTX module. Raises Fault for functions and tables (code of libdevice is not run here)."""
    text = re.sub(r"//[^\n]*", "", ptx)
    shared: dict[str, int] = {}
    total = 0
    for align, name, size in re.findall(r"^\s*\.shared \.align (\d+) \.b8 (\w+)\[(\d+)\];", text, re.MULTILINE):
        total = -(-total // int(align)) * int(align)
        shared[name] = total
        total += int(size)
    for align, name in re.findall(r"^\s*\.extern \.shared \.align (\d+) \.b8 (\w+)\[\];", text, re.MULTILINE):
        shared[name] = -(-total // int(align)) * int(align)  # what the launch gives lies behind the rest
    if re.search(r"^\.(visible )?\.?func|^\.global|^\.const", text, re.MULTILINE):
        raise Fault("library code")
    kernels = {}
    for name, head, body in re.findall(r"^\.visible \.entry (\w+)\((.*?)\)(.*?)^\}", text, re.MULTILINE | re.DOTALL):
        parameters = tuple(re.findall(r"\.param \.u64 (\w+)", head))
        code: list[Instruction] = []
        labels: dict[str, int] = {}
        inner = 0
        for line in _statements(body[body.index("{") + 1 :]):
            found = re.fullmatch(r"(\$?\w+):", line)
            if found:
                labels[found.group(1)] = len(code)
            elif line.startswith((".shared", ".local", ".pragma")):
                continue
            elif line.startswith(".reg"):
                inner += "%" not in line
            else:  # names without % are registers of an inner scope
                code.append(_instruction(re.sub(r"(?<![\w%.$])(p|tmp)(?!\w)", rf"%inner{inner}\1", line)))
        if WAIT in (ops := [ins.op for ins in code]):
            place = ops.index(WAIT)
            before = {op for op in ops[:place] if not op.startswith(("ld.param", l2_prefetch.BULK))}
            before = {op for op in before if op.split(".")[0] not in EARLY}
            if before or min(labels.values(), default=place + 1) <= place:
                raise Fault(f"does {sorted(before)} before it waits for the grid in front of it")
        kernels[name] = Kernel(parameters, tuple(code), labels)
    return Module(kernels, shared, total)


def _statements(body: str) -> list[str]:
    found = []
    for line in body.splitlines():
        line = line.strip()
        if line in ("", "{", "}"):
            continue
        if line.startswith("{ .reg"):  # a scope on one line
            found += [x.strip() for x in line[1 : line.rindex("}")].split(";") if x.strip()]
        else:
            found += [x.strip() for x in line.split(";") if x.strip() not in ("", "}")]
    return found


def _instruction(line: str) -> Instruction:
    predicate = ""
    if line.startswith("@"):
        predicate, line = line[1:].split(None, 1)
    op, rest = [*line.split(None, 1), ""][:2]
    operands = tuple(x.strip() for x in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,{}\[\]]+", rest) if x.strip())
    return Instruction(predicate, op.strip(), operands, line)


class Memory:
    """Global memory: buffers with gaps between them."""

    base, fault = BASE, Fault

    def __init__(self, buffers: Sequence[np.ndarray], writable: Sequence[bool]) -> None:
        places, total = [], BASE
        for b in buffers:
            places.append(total)
            total += -(-(b.nbytes + GAP) // 256) * 256
        self.places = places
        self.data = np.full(total - BASE, 0xFF, np.uint8)  # NaN where nothing was written
        self.readable = np.zeros(total - BASE, bool)
        self.writable = np.zeros(total - BASE, bool)
        self.writer = np.full(total - BASE, -1, np.int64)
        for place, b, w in zip(places, buffers, writable, strict=True):
            here = slice(place - BASE, place - BASE + b.nbytes)
            if not w:
                self.data[here] = np.ascontiguousarray(b).reshape(-1).view(np.uint8)
            self.readable[here] = not w
            self.writable[here] = w

    def read(self, address: np.ndarray, size: int, what: str) -> np.ndarray:
        where = self._where(address, size, what)
        if not self.readable[where].all():
            raise Fault(f"reads outside its operands: {what}")
        return self.data[where]

    def write(self, address: np.ndarray, values: np.ndarray, threads: np.ndarray, what: str) -> None:
        where = self._where(address, values.shape[1], what)
        if not self.writable[where].all():
            raise Fault(f"writes outside its results: {what}")
        if (self.writer[where] >= 0).any() or len(np.unique(where)) != where.size:
            raise Fault(f"writes a byte twice: {what}")
        self.writer[where] = threads[:, None]
        self.data[where] = values

    def _where(self, address: np.ndarray, size: int, what: str) -> np.ndarray:
        if (address % np.uint64(size)).any():
            raise Fault(f"misaligned: {what}")
        start = address.astype(np.int64) - BASE
        if start.size and (start.min() < 0 or start.max() + size > self.data.size):
            raise Fault(f"address outside all buffers: {what}")
        return start[:, None] + np.arange(size)

    def settle(self) -> None:
        """Between kernels: what one wrote, the next may read and write."""
        self.readable |= self.writer >= 0
        self.writer[:] = -1


class Machine:
    """Runs one launch."""

    def __init__(
        self,
        module: Module,
        name: str,
        memory: Memory,
        arguments: Sequence[int],
        blocks: int,
        threads: int,
        launched: int = 0,
        cluster: int = 1,
        flushes: bool = False,
    ):
        self.cluster, self.flushes = cluster, flushes
        self.grid: ptx_grid.Grid | None = None
        self.late: int | None = None
        self.module, self.kernel, self.memory = module, module.kernels[name], memory
        self.blocks, self.threads, count = blocks, threads, blocks * threads
        self.count = count
        self.arguments = dict(zip(self.kernel.parameters, arguments, strict=True))
        self.thread = np.arange(count)
        self.pc = np.zeros(count, np.int64)
        self.registers: dict[str, np.ndarray] = {}
        self.special = {
            "%ctaid.x": self.thread // threads,
            "%tid.x": self.thread % threads,
            "%ntid.x": np.full(count, threads),
        }
        self.constants: dict[tuple[str, type], np.ndarray] = {}  # operands that are the same in every thread
        size = max([module.shared_bytes, *module.shared.values()]) + launched
        self.shared = np.zeros((blocks, max(1, size)), np.uint8)
        self.races = races.Races(self)
        self.pipeline = tensor_core.Pipeline(self)
        self.units = ptx_wgmma.Units(self)
        self.barriers = ptx_cluster.Barriers(self)
        self.read_remotely = np.zeros(blocks, bool)  # blocks whose memory others read since the last cluster barrier
        self.waiting = np.zeros(count, bool)  # at a barrier or shuffle that others of their group have not reached

    def _turn(self, number: int, ready: np.ndarray) -> np.ndarray:
        """The threads whose turn it is: all, or those of the late block, or of the others."""
        every = np.ones(self.count, bool)
        if self.late is None:
            return every
        late = self.thread // self.threads == self.late
        mine = ~late if number < STALL or number // TURN % 2 else late
        return mine if (ready & mine).any() else ~mine if (ready & ~mine).any() else every

    def run(self, limit: int = LIMIT) -> None:
        code, end = self.kernel.code, len(self.kernel.code)
        waiting = self.waiting
        for number in range(limit):
            ready = (self.pc < end) & ~waiting
            turn = self._turn(number, ready)
            ready &= turn
            if not ready.any():
                if waiting.any():
                    raise Fault(f"only some threads reach {code[int(self.pc[waiting].min())].text}")
                return
            here = int(self.pc[ready].min())
            at = (self.pc == here) & turn
            instruction = code[here]
            if instruction.op.startswith("mbarrier.try_wait"):  # those go on that need not wait
                there = self.barriers.ended(at, instruction)
                waiting |= at & ~there
                at = there
                if not at.any():
                    continue
            elif not self._complete(at, instruction):
                waiting |= at
                continue
            waiting &= ~at
            on = at
            if instruction.predicate:
                negated = instruction.predicate.startswith("!")
                flag = self.registers[instruction.predicate.lstrip("!")].astype(bool)
                on = at & (~flag if negated else flag)
            self.pc[at] += 1
            self._step(instruction, on, at)
        raise Fault("does not end")

    # -- operands -------------------------------------------------------------------------------------------------
    def value(self, text: str, kind: str) -> np.ndarray:
        """An operand as an array of the type (``s32``, ``f32``, ``b64``, ``pred`` ...)."""
        dtype = _dtype(kind)
        if text in self.special:
            return self.special[text].astype(dtype)
        if text in self.registers:
            return _as(self.registers[text], dtype)
        if (text, dtype) not in self.constants:
            self.constants[text, dtype] = np.full(self.count, self._constant(text, dtype), dtype)
            self.constants[text, dtype].flags.writeable = False
        return self.constants[text, dtype]

    def _constant(self, text: str, dtype: type) -> Any:
        """What an operand is in every thread: an address in shared memory, a register without a value yet, a number."""
        if text in self.module.shared:  # before numbers: names of any form
            return self.module.shared[text]
        if text.startswith("%"):
            return 0  # declared, not yet written
        if text.startswith(("0f", "0F")):
            number = np.array([int(text[2:], 16)], np.uint32).view(np.float32)
            return _as(number.view(np.uint32), dtype)[0]
        if text.startswith(("0d", "0D")):
            return _as(np.array([int(text[2:], 16)], np.uint64), dtype)[0]
        raw = int(text.removesuffix("U"), 0)
        if dtype is np.bool_:
            return bool(raw)
        size = np.dtype(dtype).itemsize
        return np.array([raw % (1 << (8 * size))], UINT.get(size, np.uint64)).view(dtype)[0]

    def set(self, name: str, values: np.ndarray, on: np.ndarray) -> None:
        bits = values if values.dtype == bool else np.ascontiguousarray(values).view(UINT[values.dtype.itemsize])
        if name.startswith(("%r", "%f")) and not name.startswith("%rd") and not name.startswith("%fd"):
            bits = _extended(values, bits, 4)
        elif name.startswith(("%rd", "%fd")):
            bits = _extended(values, bits, 8)
        elif name.startswith(("%rs", "%h")):
            bits = _extended(values, bits, 2)
        if self.units.under_way:
            self.units.changes(name, on)
        old = self.registers.get(name)
        self.registers[name] = bits.copy() if old is None else np.where(on, bits, old.astype(bits.dtype))

    # -- one instruction --------------------------------------------------------------------------------------------
    def _step(self, ins: Instruction, on: np.ndarray, at: np.ndarray) -> None:
        parts = ins.op.split(".")
        name, kind = parts[0], parts[-1]
        if name == "bra":
            self.pc[on] = self.kernel.labels[ins.operands[0]]
        elif name == "ret":
            if self.barriers.leaving & set(np.flatnonzero(on).tolist()):
                raise Fault("ends before its bulk copies have left")
            if self.read_remotely[np.flatnonzero(on) // self.threads].any():
                raise Fault("ends while other blocks may still read its shared memory")
            self.pc[on] = len(self.kernel.code)
        elif name == "bar" or (name == "barrier" and parts[2] == "wait"):
            self._meet(ins.op, np.flatnonzero(at))
            if ins.op == "bar.red.and.pred":
                self._every(ins, self.threads, on)
        elif name == "shfl":
            values = self.value(ins.operands[1], "b32")
            distance, place = int(ins.operands[2]), self.thread % 32
            if parts[2] == "bfly":
                lane = self.thread ^ distance
            elif parts[2] == "up":
                lane = np.where(place >= distance, self.thread - distance, self.thread)
            else:
                lane = self.thread - place + distance
            self.set(ins.operands[0], values[lane], on)
        elif ins.op == "vote.sync.all.pred":
            self._every(ins, 32, on)
        elif ins.op.startswith("st.async"):
            self.barriers.store(ins, on)
        elif name in ("red", "trap") or parts[1:2] in (["acquire"], ["relaxed"]):
            (self._relaxed if parts[1:2] == ["relaxed"] else self._counter)(ins, on)
        elif name in ("ld", "st"):
            self._access(ins, parts, on)
        elif name == "prefetch":
            self.memory.read(self.address(ins.operands[0], "u64", np.flatnonzero(on)), 1, ins.text)  # has no alignment
        elif name in ("setmaxnreg", "griddepcontrol", "nanosleep", "barrier") or ins.op.startswith("fence.mbarrier_in"):
            pass  # of a barrier: arrives where it then waits; all of a cluster pass one before anybody stores
        elif name == "mapa":
            tensor_core.address_of_block(self, ins, on)
        elif ins.op.startswith("cp.async.bulk."):
            (self._bulk_prefetch if ins.op == l2_prefetch.BULK else self._bulk_copy)(ins, on)
        elif ins.op.startswith("cp.async.mbarrier.arrive"):
            self.pipeline.arrive(on)
            self.barriers.step(ins, ["mbarrier", "arrive"], on)
        elif name == "cp":
            self.pipeline.step(ins, parts, on)
        elif name == "ldmatrix":
            tensor_core.read_matrices(self, ins, on)
        elif name == "mma":
            tensor_core.multiply(self, ins, parts, on)
        elif name == "wgmma":
            self.units.step(ins, parts, on)
        elif name == "mbarrier":
            self.barriers.step(ins, parts, on)
        elif name == "fence":
            self.units.proxy_fence(on)
        else:
            with np.errstate(all="ignore"):
                self._compute(ins, name, parts, kind, on)

    def _every(self, ins: Instruction, size: int, on: np.ndarray) -> None:
        """Whether a predicate holds in all threads of a group of this size."""
        predicate = next(o for o in ins.operands[1:] if o.startswith("%"))
        every = self.value(predicate, "pred").reshape(-1, size).all(1)
        self.set(ins.operands[0], np.repeat(every, size), on)

    def _meet(self, op: str, threads: np.ndarray) -> None:
        """All threads of some warps, blocks or clusters have reached a barrier."""
        if op == "bar.warp.sync":
            self.races.meet_in_warps(threads)
            return
        blocks, cluster = np.unique(threads // self.threads), op.startswith("barrier")
        self.races.meet(blocks)
        self.barriers.meet(blocks, cluster=cluster)
        if cluster:
            self.read_remotely[blocks] = False

    def _complete(self, at: np.ndarray, ins: Instruction) -> bool:
        """Whether whole blocks stand at a barrier, whole warps at a shuffle."""
        name = ins.op.split(".")[0]
        size = {
            "bar": self.threads,
            "barrier": self.threads * self.cluster,
            "shfl": 32,
            "vote": 32,
            "mma": 32,
            "ldmatrix": 32,
            "wgmma": ptx_wgmma.GROUP,
        }
        if name not in size:
            return True
        if name == "wgmma":  # warps behind the last whole group of a block have no part in it
            groups = at[self.units.threads]
            return bool((groups.any(1) == groups.all(1)).all())
        groups = at.reshape(-1, 32 if ins.op == "bar.warp.sync" else size[name])
        return bool((groups.any(1) == groups.all(1)).all())

    def _counter(self, ins: Instruction, on: np.ndarray) -> None:
        """The counter of a grid barrier, and the end of who waits there too long."""
        if ins.op == "trap":
            if on.any():
                raise Fault("traps")
            return
        live, ops = np.flatnonzero(on), ("red.release.gpu.global.add.u32", "ld.acquire.gpu.global.u32")
        if self.grid is None or ins.op not in ops:
            raise Fault(f"outside of a cooperative launch: {ins.text}")
        is_load = ins.op == ops[1]
        address = self.address(ins.operands[is_load], "u64", live)
        if is_load:
            found = np.zeros(self.count, np.uint32)
            found[live] = self.grid.acquire(address, live)
            self.set(ins.operands[0], found, on)
        else:
            self.grid.release_add(address, self.value(ins.operands[1], "u32")[live], live)

    def _relaxed(self, ins: Instruction, on: np.ndarray) -> None:
        """Words that blocks exchange without a barrier, each with its flag."""
        live, is_load = np.flatnonzero(on), ins.op.startswith("ld")
        if self.grid is None or not ins.op.endswith(".relaxed.gpu.global.b64"):
            raise Fault(f"outside of a cooperative launch: {ins.text}")
        if not live.size:
            return
        address = self.address(ins.operands[is_load].strip("[]"), "u64", live)
        if is_load:
            found = np.zeros(self.count, np.uint64)
            found[live] = self.grid.relaxed_read(address, live, ins.text)
            self.set(ins.operands[0], found, on)
        else:
            self.grid.relaxed_write(address, self.value(ins.operands[1], "u64")[live], live, ins.text)

    def _access(self, ins: Instruction, parts: list[str], on: np.ndarray) -> None:
        space, kind = parts[1], parts[-1]
        count = next((int(p[1:]) for p in parts if re.fullmatch(r"v\d", p)), 1)
        where = ins.operands[0 if parts[0] == "st" else 1].strip("[]")
        if space == "param":
            self.set(ins.operands[0], np.full(self.count, self.arguments[where], np.uint64), on)
            return
        size = np.dtype(_dtype(kind)).itemsize
        live = np.flatnonzero(on)
        names = [n.strip() for n in ins.operands[0 if parts[0] == "ld" else 1].strip("{}").split(",")]
        address = self.address(where, "u64" if space == "global" else "u32", live)
        if space.startswith("shared"):
            self._shared(parts[0], names, address, size, live, on, ins)
        elif parts[0] == "ld":
            shared = self.grid is not None and self.grid.has(address)
            if shared and "nc" in parts:
                raise Fault(f"reads what others write by ld.global.nc: {ins.text}")
            found = (
                self.grid.read(address, size * count, live, ins.text)
                if shared
                else self.memory.read(address, size * count, ins.text)
            )
            for k, register in enumerate(names):
                full = np.zeros((self.count, size), np.uint8)
                full[live] = found[:, k * size : (k + 1) * size]
                self.set(register, full.view(UINT[size]).reshape(-1), on)
        else:
            parts_ = [self.value(n, f"b{8 * max(size, 1)}")[live].view(np.uint8).reshape(-1, size) for n in names]
            memory = self.grid if self.grid is not None and self.grid.has(address) else self.memory
            memory.write(address, np.concatenate(parts_, 1), live, ins.text)

    def address(self, where: str, kind: str, live: np.ndarray) -> np.ndarray:
        """Byte addresses of an operand like ``[%r1+16]`` in the threads ``live``."""
        base, _, offset = where.strip("[]").partition("+")
        return self.value(base.strip(), kind)[live].astype(np.uint64) + np.uint64(int(offset or 0) % (1 << 64))

    def _bulk_copy(self, ins: Instruction, on: np.ndarray) -> None:
        self.barriers.bulk(ins, ins.op.split("."), on)

    def _bulk_prefetch(self, ins: Instruction, on: np.ndarray) -> None:
        """Whole pieces of operands into the L2 cache: changes no value."""
        live = np.flatnonzero(on)
        size = self.value(ins.operands[1], "u32")[live].astype(np.int64)
        source = self.address(ins.operands[0], "u64", live)
        if (size % l2_prefetch.UNIT).any() or (size <= 0).any() or (source % np.uint64(l2_prefetch.UNIT)).any():
            raise Fault(f"no whole pieces: {ins.text}")
        for first, count in zip(source, size, strict=True):
            self.memory.read(first + np.arange(0, count, l2_prefetch.UNIT, dtype=np.uint64), l2_prefetch.UNIT, ins.text)

    def shared_place(
        self, address: np.ndarray, size: int, live: np.ndarray, ins: Instruction
    ) -> tuple[np.ndarray, np.ndarray]:
        """Block and bytes of accesses to shared memory."""
        block, where = (live // self.threads)[:, None], address.astype(np.int64)[:, None] + np.arange(size)
        if "shared::cluster" in ins.op:
            block, where = tensor_core.in_cluster(self, block, where)
            if ins.op.startswith("ld"):
                self.read_remotely[block[block[:, 0] != live // self.threads, 0]] = True
        if where.size and (where.max() >= self.shared.shape[1] or where.min() < 0):
            raise Fault(f"outside shared memory: {ins.text}")
        if (address % np.uint64(size)).any():
            raise Fault(f"misaligned: {ins.text}")
        return block, where

    def claim(self, block: np.ndarray, where: np.ndarray, live: np.ndarray, ins: Instruction) -> None:
        """Nobody else has read or written the bytes since the last barrier."""
        if self.races.writes(block, where, live):
            raise Fault(f"race in shared memory: {ins.text}")
        self.units.wrote(block, where, live[:, None], ins.text)

    def fetch(
        self,
        block: np.ndarray,
        where: np.ndarray,
        live: np.ndarray,
        ins: Instruction,
        readers: np.ndarray | None = None,
    ) -> np.ndarray:
        """Bytes of shared memory that nobody else has written since the last barrier."""
        if self.races.reads(block, where, live):
            raise Fault(f"race in shared memory: {ins.text}")
        self.pipeline.check(block, where, ins.text)
        self.races.has_read(block, where, live if readers is None else readers)
        return self.shared[block, where]

    def _shared(
        self,
        what: str,
        names: list[str],
        address: np.ndarray,
        size: int,
        live: np.ndarray,
        on: np.ndarray,
        ins: Instruction,
    ) -> None:
        block, where = self.shared_place(address, size * len(names), live, ins)
        if what == "st":
            self.claim(block, where, live, ins)
            self.pipeline.check(block, where, ins.text)
            parts = [self.value(n, f"b{8 * size}")[live].view(np.uint8).reshape(-1, size) for n in names]
            self.shared[block, where] = np.concatenate(parts, 1)
            self.races.wrote(block, where, live)
            return
        found = self.fetch(block, where, live, ins)
        for k, name in enumerate(names):
            full = np.zeros((self.count, size), np.uint8)
            full[live] = found[:, k * size : (k + 1) * size]
            self.set(name, full.view(UINT[size]).reshape(-1), on)

    def _compute(self, ins: Instruction, name: str, parts: list[str], kind: str, on: np.ndarray) -> None:
        args = ins.operands[1:]
        if name == "cvt" and parts[2] == "tf32":
            self.set(ins.operands[0], tensor_core.round_tf32(self.value(args[0], "f32"), even=parts[1] == "rn"), on)
        elif name == "cvt" and parts[2] == "relu":
            values = [_ARITHMETIC["max"](["NaN"], self.value(x, "f32"), np.zeros(self.count, np.float32)) for x in args]
            self.set(ins.operands[0], _narrow(parts[3], values), on)
        elif name in ("min", "max") and kind == "bf16x2":
            self.set(ins.operands[0], _in_pairs(name, *(self.value(x, "u32") for x in args)), on)
        elif name == "cvt" and (parts[2].startswith("bf16") or parts[2].endswith("x2")):
            self.set(ins.operands[0], _narrow(parts[2], [self.value(x, "f32") for x in args]), on)
        elif name == "cvt":
            self.set(ins.operands[0], _convert(self.value(args[0], kind), parts), on)
        elif name == "setp":
            a, b = (self.value(x, kind) for x in args)
            self.set(ins.operands[0], _compare(parts[1], a, b), on)
        elif name == "selp":
            flag = self.value(args[2], "pred")
            self.set(ins.operands[0], np.where(flag, self.value(args[0], kind), self.value(args[1], kind)), on)
        elif name == "mov" and ins.operands[0].startswith("{"):
            wide = self.value(args[0], kind)
            names = [n.strip() for n in ins.operands[0].strip("{}").split(",")]
            pieces = wide.view(UINT[wide.dtype.itemsize // len(names)]).reshape(self.count, len(names))
            for k, n in enumerate(names):
                self.set(n, np.ascontiguousarray(pieces[:, k]), on)
        elif name == "mov" and args[0].startswith("{"):
            names = [n.strip() for n in args[0].strip("{}").split(",")]
            size = np.dtype(_dtype(kind)).itemsize
            pieces = [self.value(n, f"b{8 * size // len(names)}") for n in names]
            self.set(ins.operands[0], np.stack(pieces, 1).view(UINT[size]).reshape(-1), on)
        elif name in ("mul", "mad") and "wide" in parts:
            wider = kind[0] + str(2 * int(kind[1:]))
            a, b = (self.value(x, kind).astype(_dtype(wider)) for x in args[:2])
            total = a * b + (self.value(args[2], wider) if name == "mad" else 0)
            self.set(ins.operands[0], total.astype(_dtype(wider)), on)
        elif name == "bfi":
            a, b = (self.value(x, kind) for x in args[:2])
            place, width = int(args[2]), int(args[3])
            mask = a.dtype.type(((1 << width) - 1) << place)
            self.set(ins.operands[0], (b & ~mask) | ((a << a.dtype.type(place)) & mask), on)
        elif name in ("popc", "clz"):
            a = self.value(args[0], kind)
            self.set(ins.operands[0], _bits(name, a), on)
        else:
            values = [self.value(x, kind) for x in args]
            if name in ("shl", "shr"):
                values[1] = self.value(args[1], "u32")
            function = _ARITHMETIC.get(name)
            unknown = kind[0] == "f" and (name, parts[1]) in _UNKNOWN
            unknown |= parts[1] == "rz" and (kind, name) not in _TOWARDS_ZERO and kind[0] == "f" and kind != "f32"
            if function is None or unknown:
                raise Fault(f"no meaning for {ins.text}")
            flushes = "ftz" in parts or (self.flushes and kind == "f64" and name in _ROUNDED)
            if flushes:
                values = [_flushed(v) for v in values]
            result = np.asarray(function(parts, *values)).astype(values[0].dtype)
            self.set(ins.operands[0], _flushed(result) if flushes else result, on)


def _flushed(values: np.ndarray) -> np.ndarray:
    """Denormal numbers become zeros of their sign."""
    small = np.abs(values) < np.finfo(values.dtype).smallest_normal
    return np.where(small, np.copysign(values.dtype.type(0), values), values)


def _dtype(kind: str) -> type:
    if kind == "pred":
        return np.bool_
    letter, bits = kind[0], int(kind[1:])
    if letter == "f":
        return {16: np.float16, 32: np.float32, 64: np.float64}[bits]
    if letter == "s":
        return {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}[bits]
    return UINT[bits // 8]


def _as(bits: np.ndarray, dtype: type) -> np.ndarray:
    """Register bits as a type of the same or a smaller size."""
    if dtype is np.bool_ or bits.dtype == bool:
        return bits.astype(dtype)
    size = np.dtype(dtype).itemsize
    return bits.astype(UINT[size]).view(dtype)


def _extended(values: np.ndarray, bits: np.ndarray, size: int) -> np.ndarray:
    if bits.dtype.itemsize >= size or values.dtype == bool:
        return bits
    signed = values.dtype.kind == "i"
    return (
        values.astype({2: np.int16, 4: np.int32, 8: np.int64}[size]).view(UINT[size])
        if signed
        else bits.astype(UINT[size])
    )


def _compare(how: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    unordered = np.isnan(a) | np.isnan(b) if a.dtype.kind == "f" else np.zeros(a.shape, bool)
    plain: dict[str, Callable[..., np.ndarray]] = {
        "eq": np.equal,
        "ne": np.not_equal,
        "lt": np.less,
        "le": np.less_equal,
        "gt": np.greater,
        "ge": np.greater_equal,
        "lo": np.less,
        "ls": np.less_equal,
        "hi": np.greater,
        "hs": np.greater_equal,
    }
    if how == "nan":
        return unordered
    if how == "num":
        return ~unordered
    if how.endswith("u") and how[:-1] in plain:
        return unordered | plain[how[:-1]](a, b)
    return plain[how](a, b) & ~unordered


def _convert(value: np.ndarray, parts: list[str]) -> np.ndarray:
    target = _dtype(parts[-2])
    if value.dtype.kind != "f":
        return value.astype(target)
    mode = {"rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil, "rni": np.rint}.get(parts[1])
    rounded = mode(value) if mode else value
    if np.dtype(target).kind == "f":
        return rounded.astype(target)
    info = np.iinfo(target)
    wide = np.nan_to_num(rounded.astype(np.float64), nan=0.0)
    result = np.where(np.abs(wide) < 2.0**62, wide, 0.0).astype(np.int64).clip(info.min, min(info.max, 2**63 - 1))
    result = result.astype(target)
    big = np.clip(wide, 0, 2.0**63).astype(np.uint64).astype(target) if info.max > 2**62 else result
    result = np.where((wide >= 2.0**62) & (wide < 2.0**63), big, result)
    result = np.where(wide >= float(info.max), info.max, result)
    return np.where(wide <= float(info.min), info.min, result).astype(target)


def _narrow(kind: str, values: list[np.ndarray]) -> np.ndarray:
    """Rounds float32 to 16 bits; of two values the first becomes the upper half."""
    dtype = numpy_dtype("bfloat16" if kind.startswith("bf16") else "float16")
    words = [np.ascontiguousarray(v.astype(dtype)).view(np.uint16) for v in values]
    return words[0] if len(words) == 1 else (words[0].astype(np.uint32) << np.uint32(16)) | words[1]


def _in_pairs(name: str, *words: np.ndarray) -> np.ndarray:
    """The larger (or smaller) ones of two bfloat16 in each word; NaN stays."""
    pick, dtype = np.maximum if name == "max" else np.minimum, numpy_dtype("bfloat16")
    pairs = (np.ascontiguousarray(w).view(np.uint16).view(dtype).astype(np.float32) for w in words)
    return pick(*pairs).astype(dtype).view(np.uint16).view(np.uint32)


def _bits(name: str, a: np.ndarray) -> np.ndarray:
    width = 8 * a.dtype.itemsize
    table = np.unpackbits(np.ascontiguousarray(a).view(np.uint8).reshape(len(a), -1)[:, ::-1], axis=1)
    if name == "popc":
        return table.sum(1).astype(np.uint32)
    first = np.argmax(table, axis=1)
    return np.where(table.any(1), first, width).astype(np.uint32)


def _extreme(pick: Callable[..., np.ndarray], other: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    def code(parts: list[str], a: np.ndarray, b: np.ndarray) -> np.ndarray:
        if a.dtype.kind != "f":
            return pick(a, b)
        best = pick(a, b) if "NaN" in parts else other(a, b)
        zero = (a == 0) & (b == 0)
        sign = np.signbit(a) & np.signbit(b) if pick is np.maximum else np.signbit(a) | np.signbit(b)
        return np.where(zero, np.where(sign, -0.0, 0.0), best)

    return code


def _fma(parts: list[str], a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    if a.dtype != np.float32:
        return (a.astype(np.longdouble) * b.astype(np.longdouble) + c.astype(np.longdouble)).astype(a.dtype)
    product, term = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)  # both exact
    total = product + term
    bits = total.view(np.int64)
    near = np.flatnonzero(((bits & 0xFFFFFFF) == 0) & np.isfinite(total))  # numbers of float32, and ties of two
    product, term, sum_ = product[near], term[near], total[near]
    back = sum_ - product
    rest = (product - (sum_ - back)) + (term - back)
    # Rounded to odd: the second rounding then sees on which side it was.
    bits[near] += np.where(rest == 0, 0, np.where((rest > 0) == (sum_ > 0), 1, -1))
    found = total.astype(np.float32)
    if parts[1] == "rz":
        found = np.where(np.abs(found) > np.abs(total), np.nextafter(found, np.float32(0)), found)
    return found


def _divide(parts: list[str], a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if a.dtype.kind == "f":
        return a / b
    safe = np.where(b == 0, 1, b).astype(a.dtype)
    if a.dtype.kind == "u":
        return a // safe
    quotient = a // safe
    return quotient + ((quotient < 0) & (quotient * safe != a))


def _remainder(parts: list[str], a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return a - _divide(parts, a, b) * b


def _sum(parts: list[str], a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if parts[1] != "rz":
        return a + b
    if a.dtype != np.float64:
        return _fma(parts, a, np.ones_like(a), b)
    total = a + b
    back = total - a
    rest = (a - (total - back)) + (b - back)  # what rounding took from the sum
    found = np.where((rest != 0) & ((rest < 0) == (total > 0)), np.nextafter(total, 0.0), total)
    largest = np.copysign(np.finfo(np.float64).max, total)
    return np.where(np.isinf(total) & np.isfinite(a) & np.isfinite(b), largest, found)


def _high(parts: list[str], a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if parts[1] == "rz":
        return _fma(parts, a, b, np.full_like(a, -0.0))
    if "lo" in parts or a.dtype.kind == "f":
        return a * b
    if a.dtype.itemsize < 8:
        wide = np.int64 if a.dtype.kind == "i" else np.uint64
        return (a.astype(wide) * b.astype(wide)) >> wide(8 * a.dtype.itemsize)
    high = [((int(x) * int(y)) >> 64) % (1 << 64) for x, y in zip(a, b, strict=True)]
    return np.array(high, np.uint64).view(a.dtype)


def _shift(left: bool) -> Callable[..., np.ndarray]:
    def code(parts: list[str], a: np.ndarray, amount: np.ndarray) -> np.ndarray:
        width = 8 * a.dtype.itemsize
        inside = np.minimum(amount, width - 1).astype(a.dtype)
        moved = (a << inside) if left else (a >> inside)
        return np.where(amount < width, moved, (a >> inside) if a.dtype.kind == "i" and not left else 0)

    return code


def _bitwise(function: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    return lambda parts, *args: function(*args)


def _permute(parts: list[str], a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    pool = np.concatenate([a.view(np.uint8).reshape(-1, 4), b.view(np.uint8).reshape(-1, 4)], 1)
    chosen = np.stack([(selector >> np.uint32(4 * k)) & np.uint32(7) for k in range(4)], 1)
    return np.take_along_axis(pool, chosen.astype(np.int64), 1).copy().view(np.uint32).reshape(-1)


def _funnel(parts: list[str], low: np.ndarray, high: np.ndarray, amount: np.ndarray) -> np.ndarray:
    """shf: a shift of 64 bits, of which the half is left that is filled."""
    amount = (amount % 32 if parts[2] == "wrap" else np.minimum(amount, 32)).astype(np.uint64)
    both = high.astype(np.uint64) << np.uint64(32) | low.astype(np.uint64)
    return (both << amount) >> np.uint64(32) if parts[1] == "l" else both >> amount


def _small_dot(parts: list[str], a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """dp4a: four bytes of both; dp2a: two 16-bit halves of the first, the lower or upper two bytes of the second."""
    one, other = ("iu"[p.startswith("u")] for p in parts[-2:])
    x = a.view(f"{one}{1 if parts[0] == 'dp4a' else 2}").reshape(a.size, -1).astype(np.int64)
    y = b.view(f"{other}1").reshape(-1, 4).astype(np.int64)
    y = y[:, 2:] if "hi" in parts else y[:, : x.shape[1]]
    return (c.astype(np.int64) + (x * y).sum(1)).astype(c.dtype)


_ARITHMETIC: dict[str, Callable[..., np.ndarray]] = {
    "mov": lambda parts, a: a,
    "add": _sum,
    "mul": _high,
    "sub": lambda parts, a, b: _sum(parts, a, -b) if parts[1] == "rz" else a - b,
    "mad": lambda parts, a, b, c: a * b + c,
    "fma": _fma,
    "div": _divide,
    "rem": _remainder,
    "neg": lambda parts, a: -a if a.dtype.kind != "u" else (~a + a.dtype.type(1)),
    "abs": lambda parts, a: np.abs(a),
    "and": _bitwise(np.bitwise_and),
    "or": _bitwise(np.bitwise_or),
    "xor": _bitwise(np.bitwise_xor),
    "not": _bitwise(np.invert),
    "shl": _shift(True),
    "shr": _shift(False),
    "max": _extreme(np.maximum, np.fmax),
    "min": _extreme(np.minimum, np.fmin),
    "sqrt": lambda parts, a: np.sqrt(a),
    "rcp": lambda parts, a: 1 / a,
    "prmt": _permute,
    "shf": _funnel,
    "ex2": lambda parts, a: np.exp2(a),
    "rsqrt": lambda parts, a: 1 / np.sqrt(a),
    "tanh": lambda parts, a: np.tanh(a),
    "copysign": lambda parts, a, b: np.copysign(b, a),
    "cvta": lambda parts, a: a,
    "dp4a": _small_dot,
    "dp2a": _small_dot,
}
_UNKNOWN = frozenset((name, to) for name in ("add", "sub", "mul", "fma", "div", "sqrt", "rcp") for to in ("rm", "rp"))
_UNKNOWN |= {("div", "rz"), ("sqrt", "rz"), ("rcp", "rz")}
_TOWARDS_ZERO = frozenset({("f64", "add"), ("f64", "sub")})
_ROUNDED = frozenset({"add", "sub", "mul", "mad", "fma", "div", "sqrt", "rcp", "rsqrt"})


def counted(monkeypatch: Any, name: str) -> Callable[[], int]:
    """Counts the threads that run instructions of a name; the result gives their number since its last call."""
    step, threads = Machine._step, [0]

    def counting(self: Machine, ins: Instruction, on: np.ndarray, at: np.ndarray) -> None:
        threads[0] += int(on.sum()) if ins.op.split(".")[0] == name else 0
        step(self, ins, on, at)

    def since() -> int:
        found, threads[0] = threads[0], 0
        return found

    monkeypatch.setattr(Machine, "_step", counting)
    return since


def run_kernel(
    ptx: str,
    kernel: CompiledKernel,
    operands: Sequence[np.ndarray],
    start: int | None = None,
    array: np.ndarray | None = None,
    flushes: bool = False,
    limit: int | None = None,
    late: int | None = None,
) -> list[np.ndarray]:
    """Runs all launches of a kernel whose PTX this is. Raises Fault for whatever it does wrong.

    Args:
        start: the result is an array, of which it writes a part from so many bytes on (`region.placed`).
        array: what that array is before; else the last operand.
        limit: instructions after which a launch does not end.
        late: a block of a cooperative launch that begins when the others wait, or behind `STALL` instructions of
            theirs, and takes turns with them from then on.
        flushes: arithmetic of float64 takes denormal numbers for zeros, as that of XLA's code for CPUs.
    """
    image = Image.unpack(kernel.object_code)
    results = [np.zeros(shape, numpy_dtype(dtype)) for shape, dtype in kernel.outputs]
    scratch = np.zeros(max(1, kernel.scratch_bytes), np.uint8)
    buffers = [*map(np.asarray, operands), *results, scratch]
    memory = Memory(buffers, [False] * len(operands) + [True] * (len(results) + 1))
    places = list(memory.places)
    if start is not None:
        here = slice(places[len(operands)] - BASE, places[len(operands)] - BASE + results[0].nbytes)
        before = operands[-1] if array is None else array
        memory.data[here] = np.ascontiguousarray(before).reshape(-1).view(np.uint8)
        places[len(operands)] += start
    module = parse(ptx)
    written = np.zeros(memory.data.size, bool)
    for (name, _), launch in zip(sorted(module.kernels.items()), image.launches, strict=True):
        arguments = [places[b] + offset for b, offset in launch.arguments]
        grid, block, cluster = launch.grid[0], launch.block[0], launch.cluster[0]
        machine = Machine(module, name, memory, arguments, grid, block, launch.shared, cluster, flushes)
        if launch.cooperative:
            machine.grid = ptx_grid.Grid(memory, memory.places[-1], scratch.nbytes, grid, block)
            machine.late = late
        machine.run(limit if limit is not None else LIMIT)
        written |= memory.writer >= 0
        memory.settle()
    found = []
    for place, result in zip(memory.places[len(operands) :], results, strict=False):
        here = slice(place - BASE, place - BASE + result.nbytes)
        if start is None and not written[here].all():
            raise Fault("a part of a result was not written")
        found.append(memory.data[here].copy().view(result.dtype).reshape(result.shape))
    return found
