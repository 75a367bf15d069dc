"""Flag-in-data exchange of carried values between blocks (as NCCL's LL protocol): ``st.relaxed.gpu.b64`` of a value
with the number of its step, ``ld.relaxed.gpu.b64`` until that number is there.

In place of a grid barrier and a load behind it, one trip through the L2 cache: every block loads all carried values
that products read, again until each has its step's number, and keeps them in shared memory for the step.  A word of 64
bits is written and read as one, so a value and its number belong together.

Values lie in two copies.  A block overwrites what was read two steps ago: it has all values of the step in between,
every block's among them, and a block writes those after it has read the copy before (`schedule.gpu.recurrence.exchange`
says which loops are so).

All blocks read the same few lines at once, which one slice of the L2 cache serves one after the other: writers store to
several replicas, of which a block reads one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from llvmlite import ir

from jcuts.codegen.cuda.ptx import global_memory as M
from jcuts.codegen.cuda.ptx.builder import GpuBuilder, asm
from jcuts.codegen.cuda.ptx.grid_barrier import poll
from jcuts.codegen.cuda.ptx.mma import barrier
from jcuts.codegen.llvm import lanes as L
from jcuts.kernel_ir.index import Index
from jcuts.kernel_ir.program import ITEM_SIZE, Buffer
from jcuts.schedule.gpu.recurrence.exchange import FLAGGED_BYTES

TOGETHER = 8
"""Words of a thread that are under way."""
PLACE = "place"
"""Of a value, in addresses."""
Words = Callable[[Buffer, Sequence[L.Value], L.Value], list[L.Value]]
"""Loads of a buffer's values at some places, for a step."""


def flags_of(name: str) -> str:
    """The buffer of the flagged copies of a carried value."""
    return f"f{name[1:]}"


@dataclass(frozen=True)
class FlagExchange:
    """The exchange of one kernel.

    Attributes:
        builder: at the thread's code. carried: buffers of two copies that are exchanged. replicas: of all copies.
        threads: of a block. block, thread: the numbers of this one. pointers: addresses (i64). shared: those of copies
            in shared memory (i32).
    """

    builder: GpuBuilder
    carried: Sequence[Buffer]
    replicas: int
    threads: int
    block: L.Value
    thread: L.Value
    pointers: Mapping[str, L.Value]
    shared: Mapping[str, L.Value]

    def stores(self, step: L.Value) -> dict[str, M.Flagged]:
        """Where the stores of a step go, with the number of the next one."""
        number = self.builder.add(step, L.I32(1))
        return {b.name: M.Flagged(flags_of(b.name), number, self.replicas, b.size) for b in self.carried}

    def gather(self, step: L.Value) -> None:
        """Brings the values that a step reads into shared memory, all of them, and passes a ``bar.sync``."""
        builder = self.builder
        is_first = builder.icmp_signed("==", step, L.I32(0))
        with builder.if_else(is_first) as (then, otherwise):
            with then:
                self._copies(step, self._initial)
            with otherwise:
                self._copies(step, self._awaited)
        barrier(builder)

    def _copies(self, step: L.Value, words_of: Words) -> None:
        builder = self.builder
        copy = builder.and_(step, L.I32(1))
        for buffer in self.carried:
            count, size = buffer.size // 2, ITEM_SIZE[buffer.dtype]
            start = builder.mul(copy, L.I32(count))
            for first in range(0, count, TOGETHER * self.threads):
                numbers = range(first, min(count, first + TOGETHER * self.threads), self.threads)
                places = [builder.add(self.thread, L.I32(n)) for n in numbers]
                inside = [builder.icmp_signed("<", place, L.I32(count)) for place in places]
                places = [builder.select(i, p, L.I32(count - 1)) for i, p in zip(inside, places, strict=True)]
                places = [builder.add(start, place) for place in places]
                for place, live, word in zip(places, inside, words_of(buffer, places, step), strict=True):
                    frame = M.Frame(builder, {PLACE: place}, {}, {}, {}, live=live, shared=self.shared)
                    M.store(frame, buffer.name, size, Index.axis(PLACE), [builder.trunc(word, ir.IntType(8 * size))])

    def _initial(self, buffer: Buffer, places: Sequence[L.Value], step: L.Value) -> list[L.Value]:
        """What a launch before this one has written (`split`)."""
        frames = [M.Frame(self.builder, {PLACE: place}, self.pointers, {}, {}, in_place=True) for place in places]
        size, here = ITEM_SIZE[buffer.dtype], Index.axis(PLACE)
        return [word for frame in frames for word in M.load(frame, buffer.name, size, here, 1, (), 0)]

    def _awaited(self, buffer: Buffer, places: Sequence[L.Value], step: L.Value) -> list[L.Value]:
        builder, base = self.builder, self.pointers[flags_of(buffer.name)]
        if self.replicas > 1:
            base = self._address(base, builder.urem(self.block, L.I32(self.replicas)), FLAGGED_BYTES * buffer.size)
        where = [self._address(base, place, FLAGGED_BYTES) for place in places]

        def load() -> tuple[L.Value, list[L.Value]]:
            text = "ld.relaxed.gpu.global.b64 $0, [$1];"
            words = [asm(builder, text, L.I64, [there], effects=True) for there in where]
            missing: L.Value | None = None
            for word in words:
                number = builder.trunc(builder.lshr(word, L.I64(32)), L.I32)
                differs = builder.xor(number, step)
                missing = differs if missing is None else builder.or_(missing, differs)
            return builder.icmp_signed("!=", missing, L.I32(0)), words

        return poll(builder, load)

    def _address(self, base: L.Value, place: L.Value, size: int) -> L.Value:
        builder = self.builder
        return builder.add(base, builder.mul(builder.zext(place, L.I64), L.I64(size)))
