"""Element-wise operations between two fused GEMMs (bias, GELU, norm, ReLU6), vectors along the hidden dimension."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from jcuts.codegen.cuda.graph.node_emitter import Emitter, fill_bits
from jcuts.codegen.cuda.ptx import global_memory as M
from jcuts.codegen.cuda.ptx.builder import asm
from jcuts.codegen.llvm import elementwise as E
from jcuts.codegen.llvm import lanes as L
from jcuts.kernel_ir.index import Index
from jcuts.kernel_ir.node import Graph, Guard, Node, Scalar
from jcuts.kernel_ir.program import Buffer, Phase

HALF = "bfloat16"


class MidEpilogue:
    """Element-wise exit graph of a phase that stores one value per channel and pixel."""

    def __init__(
        self, frame: M.Frame, phase: Phase, axis: str, channels: int, chunk: int, buffers: Mapping[str, Buffer]
    ) -> None:
        """Args: axis: that of channels; chunk: a piece of them, of which the last may have some that there are not."""
        self.frame, self.axis, self.buffers = frame, axis, buffers
        self.range = -(-channels // chunk) * chunk
        self.wanted, self.after = _cut(phase.exit, phase.stores[0].value)
        self.graph = Graph()
        for node in phase.exit.nodes:
            if node.op == "load" and node.index is not None and axis in node.index.axes() and channels % chunk:
                node = replace(node, guards=(Guard(Index.axis(axis), None, channels - 1),), value=0.0)
            self.graph.add(node)
        self.accs = [k for k, node in enumerate(self.graph.nodes) if node.op == "acc"]

    def apply(
        self, first: L.Value, multiple: int, runs: Sequence[Sequence[tuple[int, Sequence[L.Value]]]]
    ) -> list[list[list[E.Lanes]]]:
        """The values of the channels from ``first`` on, for `words`.

        Args: multiple: a number that divides it; runs: neighbouring channels (offset, sums of pixels).
        """
        reach = max((offset for run in runs for offset, _ in run), default=0)
        frame = replace(
            self.frame,
            variables={**self.frame.variables, self.axis: first},
            values={},
            cache={},
            ranges={**self.frame.ranges, self.axis: self.range - reach},
            multiples={self.axis: multiple},
        )
        graph = Graph()
        emitter = Emitter(frame, graph, self.buffers)
        numbers = []
        for run in runs:
            numbers.append([])
            for offset, sums in run:
                where = {self.axis: Index.axis(self.axis) + offset}
                numbers[-1].append([])
                for pixel, value in enumerate(sums):
                    given = graph.add(Node("acc", "float32", attrs=(("number", 0), ("point", (offset, pixel)))))
                    emitter.bind(given, E.Lanes(value, "float32"))
                    accs = dict.fromkeys(self.accs, given)
                    (made,) = self.graph.copy_into(graph, [self.wanted], where, frame.ranges, accs)
                    numbers[-1][-1].append(made)
        emitter.vectorize_loads(n for run in numbers for column in run for n in column)
        return [[emitter.emit(column) for column in run] for run in numbers]

    def words(self, values: Sequence[E.Lanes]) -> list[L.Value]:
        """Neighbouring values packed into 32-bit words: float32, or pairs of bfloat16 rounded, then clamped,
        together.
        """
        builder = self.frame.builder
        if values[0].dtype != HALF:
            return [builder.bitcast(v.value, L.I32) for v in values]
        after = self.after
        relu = bool(after) and after[0] == ("max", 0)
        text = f"cvt.rn{'.relu' if relu else ''}.bf16x2.f32 $0, $1, $2;"
        found = []
        for low, high in zip(values[::2], values[1::2], strict=True):
            word = asm(builder, text, L.I32, [high.value, low.value])
            for op, limit in after[relu:]:
                both = fill_bits(limit, HALF) * 0x10001
                word = asm(builder, f"{op}.NaN.bf16x2 $0, $1, $2;", L.I32, [word, L.I32(both)])
            found.append(word)
        return found


def _cut(graph: Graph, wanted: int) -> tuple[int, list[tuple[str, Scalar]]]:
    """Splits off the final clamps at constants (ReLU6), which bfloat16 applies in pairs: the value before them, and the
    clamps.
    """
    after: list[tuple[str, Scalar]] = []
    while graph.nodes[wanted].op in ("max", "min") and graph.nodes[wanted].dtype == HALF:
        args = sorted(graph.nodes[wanted].args, key=lambda a: graph.nodes[a].op == "const")
        limit = graph.nodes[args[1]].value
        if graph.nodes[args[1]].op != "const" or limit is None:
            break
        after.append((graph.nodes[wanted].op, limit))
        wanted = args[0]
    return wanted, after[::-1]
