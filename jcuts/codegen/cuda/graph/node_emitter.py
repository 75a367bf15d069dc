"""Emits data-flow nodes as scalar GPU code, and vectorises loads and stores of neighbouring elements (up to 16 bytes).

The graph of a tile holds a copy of every node per point (`kernel_ir.register_tiling`), with equal addresses merged
already.  Here loads whose addresses differ by a constant are joined wherever the alignment can be proved.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from llvmlite import ir

from jcuts.base.errors import IRError
from jcuts.codegen.cuda.ptx import global_memory as M
from jcuts.codegen.cuda.ptx import sfu_math
from jcuts.codegen.cuda.ptx.builder import asm
from jcuts.codegen.cuda.toolchain.target import AMPERE
from jcuts.codegen.llvm import elementwise as E
from jcuts.codegen.llvm import lanes as L
from jcuts.kernel_ir.index import Index
from jcuts.kernel_ir.node import Graph, Node, Scalar
from jcuts.kernel_ir.program import Buffer

_PTX_HALF = {"bfloat16": "bf16", "float16": "f16"}
NEEDS_EXACT_DIVISION = frozenset({"rem", "cbrt", "pow", "log", "log1p", "atan2", "erf", "erfc", "erf_inv"})
"""Operations whose code rests on quotients that are rounded correctly."""


def from_word(builder: L.Builder, word: L.Value, dtype: str) -> E.Lanes:
    """Converts the bits of an element in memory to its register representation."""
    kind = L.I8 if dtype == "bool" else L.element_type(dtype)
    value = word if word.type == kind else builder.bitcast(word, kind)
    return E.from_memory(builder, value, dtype)


def to_word(builder: L.Builder, lanes: E.Lanes) -> L.Value:
    """Converts a register value to the bits of an element in memory (16-bit floats are rounded)."""
    if lanes.dtype in _PTX_HALF and (builder.capability >= AMPERE or lanes.dtype == "float16"):
        return asm(builder, f"cvt.rn.{_PTX_HALF[lanes.dtype]}.f32 $0, $1;", L.I16, [lanes.value])
    value = E.to_memory(builder, lanes)
    word = ir.IntType(8 * M.item_size(lanes.dtype))
    return value if value.type == word else builder.bitcast(value, word)


def to_words(builder: L.Builder, values: Sequence[E.Lanes]) -> tuple[list[L.Value], int]:
    """Neighbouring elements as integers and the size of each [B]: pairs of 16-bit floats are rounded together."""
    dtype = values[0].dtype
    if dtype not in _PTX_HALF or len(values) % 2 or builder.capability < AMPERE:
        return [to_word(builder, v) for v in values], M.item_size(dtype)
    text = f"cvt.rn.{_PTX_HALF[dtype]}x2.f32 $0, $1, $2;"
    pairs = zip(values[1::2], values[::2], strict=True)
    return [asm(builder, text, L.I32, [high.value, low.value]) for high, low in pairs], 4


def fill_bits(value: Scalar | None, dtype: str) -> int:
    """Bits of the constant that a predicated-off load returns."""
    import numpy as np

    from jcuts.kernel_ir.numpy_semantics import numpy_dtype

    size = M.item_size(dtype)
    with np.errstate(over="ignore"):
        array = np.asarray(0 if value is None else value).astype(numpy_dtype(dtype))
    return int(array.view(f"u{size}"))


class Emitter:
    """Emits nodes of one graph; values are kept by node number and may be emitted in several steps."""

    def __init__(self, frame: M.Frame, graph: Graph, buffers: Mapping[str, Buffer]) -> None:
        self.frame, self.graph, self.buffers = frame, graph, buffers
        self.done: dict[int, E.Lanes] = {}
        self.runs: dict[int, list[int]] = {}
        self.coarse: set[int] = set()
        """Accumulators of tensor cores, and values computed from them."""
        self.coarse_exp = False
        """Whether exponentials of float32 are those of `sfu_math.fast_exp_nonpositive`."""

    def bind(self, number: int, lanes: E.Lanes) -> None:
        """Sets the value of a node that is computed elsewhere (an accumulator)."""
        self.done[number] = lanes
        self.frame.values[number] = lanes.value

    def vectorize_loads(self, wanted: Iterable[int]) -> None:
        """Merges the loads that ``wanted`` needs into vector loads."""
        groups: dict[object, list[tuple[int, int]]] = {}
        for number in self.graph.needed(wanted, self.done):
            node = self.graph.nodes[number]
            if node.op != "load" or number in self.runs:
                continue
            assert node.index is not None
            moving = Index(0, node.index.terms)
            key = (node.buffer, moving, node.guards, fill_bits(node.value, node.dtype))
            groups.setdefault(key, []).append((node.index.const, number))
        for found in groups.values():
            found.sort()
            self._join(found)

    def _join(self, found: list[tuple[int, int]]) -> None:
        start = 0
        while start < len(found):
            stop = start + 1
            while stop < len(found) and found[stop][0] == found[stop - 1][0] + 1:
                stop += 1
            while start < stop:
                node = self.graph.nodes[found[start][1]]
                assert node.index is not None
                count = M.max_vector_width(self.frame, M.item_size(node.dtype), node.index, stop - start)
                members = [number for _, number in found[start : start + count]]
                for number in members:
                    self.runs[number] = members
                start += count

    def emit(self, wanted: Sequence[int]) -> list[E.Lanes]:
        """Values of ``wanted``; what they need is emitted first, in order."""
        for number in self.graph.needed(wanted, self.done):
            if number not in self.done:  # a load may have brought its neighbours
                self.bind(number, self._node(number))
        return [self.done[w] for w in wanted]

    def _node(self, number: int) -> E.Lanes:
        node, builder = self.graph.nodes[number], self.frame.builder
        if node.op == "const":
            assert node.value is not None
            return E.Lanes(E.constant(node.value, node.dtype), node.dtype)
        if node.op == "load":
            return self._load(number, node)
        if node.op == "index":
            assert node.index is not None
            return E._convert(builder, E.Lanes(M.index(self.frame, node.index), "int32"), node.dtype)
        if node.op == "guard":
            holds = M.condition(self.frame, node.guards)
            return E.Lanes(holds if holds is not None else L.I1(1), "bool")
        if node.op == "acc":
            raise IRError(f"accumulator {node.attr('number')} is used before it is known")
        args = [self.done[a] for a in node.args]
        coarse = not self.coarse.isdisjoint(node.args)
        if coarse:
            self.coarse.add(number)
        if self.coarse_exp and (node.op, node.dtype) == ("exp", "float32"):
            return E.Lanes(sfu_math.fast_exp_nonpositive(builder, args[0].value), node.dtype, True)
        if sfu_math.supported(node.op, node.dtype):
            value = sfu_math.emit(builder, node.op, node.dtype, [a.value for a in args], coarse=coarse)
            return E.Lanes(value, node.dtype, node.dtype not in E.HALVES)
        builder.exact_division = node.op in NEEDS_EXACT_DIVISION
        result = E.apply(builder, node.op, node.dtype, args, dict(node.attrs))
        builder.exact_division = False
        return result

    def _load(self, number: int, node: Node) -> E.Lanes:
        members = self.runs.get(number, [number])
        first = self.graph.nodes[members[0]]
        assert first.index is not None
        size = M.item_size(node.dtype)
        words = M.load(
            self.frame, node.buffer, size, first.index, len(members), first.guards, fill_bits(first.value, node.dtype)
        )
        for member, word in zip(members, words, strict=True):
            self.bind(member, from_word(self.frame.builder, word, node.dtype))
        return self.done[number]


def store_all(emitter: Emitter, rows: Sequence[tuple[str, Index, int]]) -> None:
    """Stores (buffer, address, node) rows; neighbours are merged into vector stores."""
    frame = emitter.frame
    groups: dict[tuple[str, Index], list[tuple[int, int]]] = {}
    for buffer, address, value in rows:
        if address.values():
            raise IRError(f"a store into {buffer} at an address known only at run time")
        groups.setdefault((buffer, Index(0, address.terms)), []).append((address.const, value))
    for (buffer, moving), found in groups.items():
        dtype = emitter.buffers[buffer].dtype
        size = M.item_size(dtype)
        found.sort()
        start = 0
        while start < len(found):
            stop = start + 1
            while stop < len(found) and found[stop][0] == found[stop - 1][0] + 1:
                stop += 1
            while start < stop:
                where = moving + found[start][0]
                count = M.max_vector_width(frame, size, where, stop - start)
                lanes = emitter.emit([value for _, value in found[start : start + count]])
                for one in lanes:
                    if one.dtype != dtype:
                        raise IRError(f"{one.dtype} value stored into {dtype} buffer {buffer}")
                M.store(frame, buffer, size, where, *to_words(frame.builder, lanes))
                start += count
