"""Reduction accumulators in registers: initial value, update; sum, product, min/max, argmin/argmax, and/or/xor."""

from __future__ import annotations

from llvmlite import ir

from jcuts.codegen.cuda.graph.node_emitter import Emitter
from jcuts.codegen.cuda.ptx.builder import GpuBuilder
from jcuts.codegen.llvm import elementwise as E
from jcuts.codegen.llvm import lanes as L
from jcuts.kernel_ir.node import Node
from jcuts.kernel_ir.program import Acc
from jcuts.ops.window import identity


def acc_types(acc: Acc) -> list[L.Type]:
    """LLVM types of an accumulator's values."""
    return [E.register_type(acc.dtype)] + ([L.element_type(acc.index_dtype)] if acc.index_dtype else [])


def acc_start(acc: Acc, single: bool) -> list[ir.Constant]:
    """Initial value of an accumulator; ``single``: one element only, which keeps its sign."""
    kinds = acc_types(acc)
    first = identity(acc.combine, acc.dtype)
    if acc.combine == "add" and isinstance(first, float) and single:
        first = -0.0
    start = [ir.Constant(kinds[0], first if not isinstance(first, bool) else int(first))]
    if acc.index_dtype:  # a position after every real one (unsigned), so that ties with the identity lose
        start.append(ir.Constant(kinds[1], -1))
    return start


def accumulate(
    emitter: Emitter, acc: Acc, slots: list[L.Value], values: tuple[int, ...], *, several: bool = False
) -> None:
    """Adds one element to an accumulator in memory slots (LLVM promotes them to registers).

    Args: several: the accumulator has started from 0.0, not from -0.0 as that of a single addend.
    """
    builder = emitter.frame.builder
    old = [builder.load(slot) for slot in slots]
    node = emitter.graph.nodes[values[0]]
    fused = (
        acc.combine == "add" and acc.dtype in ("float32", "float64") and node.op == "mul" and node.dtype == acc.dtype
    )
    if fused:
        x, y = (v.value for v in emitter.emit(node.args))
        new = (L.fma(builder, x, y, old[0]),)
    elif several and _adds_or_not(emitter, acc, node):
        holds, x, _ = (v.value for v in emitter.emit(node.args))
        new = (predicated_add(builder, holds, old[0], x),)
    else:
        new = E.combine(builder, acc.combine, acc.dtype, tuple(old), tuple(v.value for v in emitter.emit(values)))
    for value, slot in zip(new, slots, strict=True):
        builder.store(value, slot)


def _adds_or_not(emitter: Emitter, acc: Acc, node: Node) -> bool:
    """Whether an addend of a float32 sum is 0 unless a run-time condition holds."""
    if acc.combine != "add" or acc.dtype != "float32" or node.op != "select" or node.dtype != "float32":
        return False
    holds, _, nothing = (emitter.graph.nodes[k] for k in node.args)
    return nothing.op == "const" and nothing.value == 0 and holds.op not in ("const", "guard")


def predicated_add(builder: GpuBuilder, holds: L.Value, total: L.Value, value: L.Value) -> L.Value:
    """One predicated addition: ``total + value`` where the condition (i1) holds, else ``total``, which is not -0.0."""
    text = "{ .reg .pred p; setp.ne.b32 p, $3, 0; mov.f32 $0, $1; @p add.rn.f32 $0, $1, $2; }"
    kind = ir.FunctionType(total.type, [total.type, value.type, L.I32])
    return builder.call(ir.InlineAsm(kind, text, "=&f,f,f,r"), [total, value, builder.zext(holds, L.I32)])
