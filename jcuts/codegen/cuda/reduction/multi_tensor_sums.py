"""Multi-tensor reduction: partial sums of many arrays in one launch, a chunk of one array per block.

This is the *partial_sums* form.  A block finds its array by a binary search on its number; address and length then are
values, so that arrays whose terms are the same function share one copy of the code.  A thread adds up 16-byte loads
(``ld.global.v4``), several in flight, in one accumulator per lane; the block's threads combine theirs by ``shfl.sync``
and through shared memory, and the first one stores.  The order of the sum is fixed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from llvmlite import ir

from jcuts.base.errors import CompileRejected
from jcuts.codegen.cuda.elementwise.horizontal import binary_dispatch
from jcuts.codegen.cuda.graph.accumulators import acc_start, acc_types, accumulate
from jcuts.codegen.cuda.graph.node_emitter import Emitter, to_word
from jcuts.codegen.cuda.ptx import global_memory as M
from jcuts.codegen.cuda.ptx.builder import GpuBuilder, asm
from jcuts.codegen.cuda.ptx.shuffle import WARP, allocate_static, read_word, shuffle, write_word
from jcuts.codegen.llvm import elementwise as E
from jcuts.codegen.llvm import lanes as L
from jcuts.kernel_ir.index import Index
from jcuts.kernel_ir.node import Graph
from jcuts.kernel_ir.program import Acc, Buffer, Program
from jcuts.lower.reduction.multi_tensor_sums import ARRAY, RESULT, TERM, THREADS, TYPE, PartialSums, partial_sums_of

LOADS = 4
"""Vector loads of a thread that are in flight at once."""
WORD = 4
SUM = Acc("add", TYPE, ())


@dataclass(frozen=True)
class SumsShape:
    """The arrays of one launch of partial sums.

    Attributes:
        parts: the sums of each array, in the order of their blocks.
        kinds: for each the number of its function.
        functions: one array's sums of each function.
    """

    parts: tuple[PartialSums, ...]
    kinds: tuple[int, ...]
    functions: tuple[PartialSums, ...]

    @property
    def blocks(self) -> int:
        """Partial sums of all arrays."""
        return self.parts[-1].first + self.parts[-1].blocks


def sums_shape(program: Program) -> SumsShape:
    """The arrays of a program of partial sums. Raises CompileRejected for any other program."""
    parts = partial_sums_of(program)
    if not parts or dict(program.params).get("threads") != THREADS:
        raise CompileRejected(f"{program.name}: not a program of partial sums by {THREADS} threads")
    if any(part.blocks > 1 and part.chunk * M.item_size(program.buffer(part.array).dtype) % M.WIDEST for part in parts):
        raise CompileRejected(f"{program.name}: a chunk does not begin at an aligned address")
    functions: dict[object, PartialSums] = {}
    keys = [(tuple(node.key() for node in part.function.nodes), part.value) for part in parts]
    for key, part in zip(keys, parts, strict=True):
        functions.setdefault(key, part)
    number = {key: k for k, key in enumerate(functions)}
    return SumsShape(tuple(parts), tuple(number[key] for key in keys), tuple(functions.values()))


class MultiTensorSumsKernel:
    """Emits one thread of the multi-tensor reduction."""

    def __init__(
        self,
        builder: GpuBuilder,
        program: Program,
        tile: SumsShape,
        buffers: Mapping[str, Buffer],
        pointers: Mapping[str, L.Value],
        integers: Mapping[str, L.Value],
        symbol: str,
        shared: L.Value,
    ) -> None:
        self.builder, self.shape, self.buffers, self.pointers = builder, tile, buffers, pointers
        self.block, self.thread = integers["block"], integers["thread"]
        self.longest = max(part.chunk for part in tile.parts)
        self.warps = allocate_static(builder, f"{symbol}_sums", THREADS // WARP * WORD)

    def emit(self) -> None:
        """The partial sum of this block."""
        builder = self.builder
        place, count, kind = self._chunk()
        with builder.goto_entry_block():
            total = builder.alloca(L.F32)
        functions = range(len(self.shape.functions))
        binary_dispatch(builder, kind, functions, lambda n: builder.store(self._thread_sum(n, place, count), total))
        value = self._block_sum(builder.load(total))
        frame = M.Frame(builder, {"block": self.block}, self.pointers, {"block": self.shape.blocks}, {})
        frame.live = builder.icmp_signed("==", self.thread, L.I32(0))
        M.store(frame, RESULT, WORD, Index.axis("block"), [to_word(builder, E.Lanes(value, TYPE))])

    # -- the chunk of a block -----------------------------------------------------------------------------------
    def _chunk(self) -> tuple[L.Value, L.Value, L.Value]:
        """Address (i64) of a block's chunk, its elements, and the number of its function."""
        builder, parts = self.builder, self.shape.parts
        found: list[tuple[ir.Block, tuple[L.Value, ...]]] = []

        def part(number: int) -> None:
            one = parts[number]
            chunk = builder.mul(builder.sub(self.block, L.I32(one.first)), L.I32(one.chunk))
            size = M.item_size(self.buffers[one.array].dtype)
            address = builder.add(self.pointers[one.array], builder.mul(builder.sext(chunk, L.I64), L.I64(size)))
            left = builder.sub(L.I32(one.size), chunk)
            whole = builder.icmp_signed("<", left, L.I32(one.chunk))
            values = (address, builder.select(whole, left, L.I32(one.chunk)), L.I32(self.shape.kinds[number]))
            found.append((builder.block, values))

        binary_dispatch(builder, self.block, [one.first for one in parts], part)
        joined = []
        for number, kind in enumerate((L.I64, L.I32, L.I32)):
            value = builder.phi(kind)
            for block, values in found:
                value.add_incoming(values[number], block)
            joined.append(value)
        return joined[0], joined[1], joined[2]

    # -- the terms of a thread ----------------------------------------------------------------------------------
    def _thread_sum(self, number: int, place: L.Value, count: L.Value) -> L.Value:
        """What a thread adds up of a chunk: whole steps of `LOADS` vectors, single vectors, an element behind them."""
        builder, one = self.builder, self.shape.functions[number]
        vector = M.WIDEST // M.item_size(self.buffers[one.array].dtype)
        step = THREADS * vector
        slots = []
        for _ in range(vector):
            with builder.goto_entry_block():
                slot = builder.alloca(acc_types(SUM)[0])
            builder.store(acc_start(SUM, False)[0], slot)
            slots.append(slot)
        start = builder.mul(self.thread, L.I32(vector))
        whole = builder.and_(count, L.I32(-step * LOADS))
        vectors = builder.and_(count, L.I32(-vector))

        def terms(base: L.Value, offsets: Sequence[int], multiple: int) -> None:
            self._add(one, place, base, offsets, multiple, slots)

        many = [step * load + lane for load in range(LOADS) for lane in range(vector)]
        self._loop(start, whole, step * LOADS, lambda base: terms(base, many, vector))
        self._loop(builder.add(whole, start), vectors, step, lambda base: terms(base, range(vector), vector))
        last = builder.add(vectors, self.thread)
        with builder.if_then(builder.icmp_signed("<", last, count)):
            terms(last, [0], 1)
        parts = [builder.load(slot) for slot in slots]
        while len(parts) > 1:
            parts = [builder.fadd(a, b) for a, b in zip(parts[::2], parts[1::2], strict=True)]
        return parts[0]

    def _loop(self, start: L.Value, stop: L.Value, step: int, emit: Callable[[L.Value], None]) -> None:
        """A loop of a thread of its own, without barriers."""
        builder = self.builder
        before = builder.block
        test, body, after = (builder.append_basic_block(f"terms.{name}") for name in ("test", "body", "after"))
        builder.branch(test)
        builder.position_at_end(test)
        base = builder.phi(L.I32, "base")
        base.add_incoming(start, before)
        builder.cbranch(builder.icmp_signed("<", base, stop), body, after)
        builder.position_at_end(body)
        emit(base)
        base.add_incoming(builder.add(base, L.I32(step)), builder.block)
        builder.branch(test)
        builder.position_at_end(after)

    def _add(
        self,
        one: PartialSums,
        place: L.Value,
        base: L.Value,
        offsets: Sequence[int],
        multiple: int,
        slots: Sequence[L.Value],
    ) -> None:
        """Adds the terms at some places of the chunk to the accumulators, in turn."""
        graph, ranges = Graph(), {TERM: self.longest}
        wanted = [
            one.function.copy_into(graph, [one.value], {TERM: Index.axis(TERM) + offset}, ranges)[0]
            for offset in offsets
        ]
        frame = M.Frame(self.builder, {TERM: base}, {**self.pointers, ARRAY: place}, ranges, {TERM: multiple})
        emitter = Emitter(frame, graph, self.buffers)
        emitter.vectorize_loads(wanted)
        for number, value in enumerate(wanted):
            accumulate(emitter, SUM, [slots[number % len(slots)]], (value,))

    # -- across threads -----------------------------------------------------------------------------------------
    def _block_sum(self, value: L.Value) -> L.Value:
        """The sum of all threads' values, in a fixed order; the first warp has it."""
        builder = self.builder
        value = self._shuffled(value, WARP)
        lane, warp = builder.urem(self.thread, L.I32(WARP)), builder.udiv(self.thread, L.I32(WARP))
        leads = builder.icmp_signed("==", lane, L.I32(0))
        write_word(builder, builder.add(self.warps, builder.mul(warp, L.I32(WORD))), 0, value, WORD, leads)
        asm(builder, "bar.sync 0;", ir.VoidType(), effects=True)
        slot = builder.urem(lane, L.I32(THREADS // WARP))
        value = read_word(builder, builder.add(self.warps, builder.mul(slot, L.I32(WORD))), 0, L.F32, WORD)
        return self._shuffled(value, THREADS // WARP)

    def _shuffled(self, value: L.Value, lanes: int) -> L.Value:
        distance = lanes // 2
        while distance:
            value = self.builder.fadd(value, shuffle(self.builder, value, distance))
            distance //= 2
        return value
