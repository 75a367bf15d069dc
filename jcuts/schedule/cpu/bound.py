"""Roofline inputs of a scheduled program on a CPU: its compulsory work and traffic, for `estimate.cpu`."""

from __future__ import annotations

import functools
import math
from typing import Any

from jcuts.arch.chosen import chosen_cpu
from jcuts.arch.cpu import CpuArch
from jcuts.arch.detect import describe_cpu
from jcuts.estimate.cpu import CpuWork
from jcuts.kernel_ir.program import ITEM_SIZE, Phase, Program
from jcuts.schedule.cpu.machine import Machine

ACCUMULATIONS = "accumulations"
"""Parameter of fused layers: accumulated terms of every layer, of which tiles compute some beyond it or twice."""

FLOATS = frozenset({"float64", "float32", "bfloat16", "float16"})


def host_arch() -> CpuArch:
    """This CPU as ``JCUTS_ARCH`` says, else from system files without measuring: a bound is reproducible."""
    return chosen_cpu() or _described()


@functools.cache
def _described() -> CpuArch:
    return describe_cpu()


def machine_of(arch: CpuArch, vector_bytes: int, registers: int, threads: int) -> Machine:
    """The CPU's machine description for schedule enumeration, with the registers that the code generator uses."""
    return Machine(
        *(vector_bytes, registers, threads, arch.l1d, arch.l2, arch.fma_ports, arch.load_ports, arch.store_ports),
        line=arch.line,
        core=arch.core,
    )


def work_of(program: Program, arch: CpuArch) -> CpuWork:
    """Compulsory work of a kernel, whatever its code: accumulations, results, operands read.

    Counted are only operations that no compiler can remove: one multiply-add (2 FLOP) or one operation per accumulated
    term. Element operations of exit graphs are left out (invariant ones are hoisted), so the bound stays a bound.
    """
    known: Any = dict(program.params).get(ACCUMULATIONS)
    layers = iter(known or ())
    flop: dict[str, float] = {}
    touched: dict[str, float] = {}
    for phase in program.phases:
        if phase.when:  # runs rarely, or never
            continue
        terms = next(layers) if phase.accs and not phase.once and known else 0
        if not known:
            terms = math.prod(a.extent for a in phase.axes) * math.prod(r.extent for r in phase.reds)
        for acc in phase.accs:
            kind = "float32" if acc.dtype in ("bfloat16", "float16") else acc.dtype
            if kind in FLOATS:
                fused = phase.body.nodes[acc.values[0]].op == "mul" and acc.combine == "add"
                flop[kind] = flop.get(kind, 0.0) + (2.0 if fused else 1.0) * terms
        for name, count in _reads(phase).items():
            touched[name] = touched.get(name, 0.0) + count
    reads = sum(min(b.bytes, touched.get(b.name, 0.0) * ITEM_SIZE[b.dtype]) for b in program.inputs)
    written = float(sum(b.bytes for b in program.outputs))
    stores = sum(b.bytes / (arch.simd_bits / 8) for b in program.outputs)
    # Tasks are handed out as cores become free and the last may be short: only a single task is surely unbalanced.
    tiles = 1 if program.tiles == 1 else 1 << 20
    return CpuWork(flop=flop, vector_ops={"store": stores}, input_bytes=reads, output_bytes=written, tiles=tiles)


def _reads(phase: Phase) -> dict[str, float]:
    """At most this many elements of each operand are read (points of the axes that the address depends on)."""
    ranges = phase.ranges()
    found: dict[str, float] = {}
    for graph in (phase.body, phase.exit):
        for node in graph.nodes:
            if node.op != "load" or node.index is None:
                continue
            axes = node.index.axes()
            for value in node.index.values():
                for needed in graph.needed([value]):
                    index = graph.nodes[needed].index
                    axes |= index.axes() if index is not None else frozenset()
            # A guarded load reads nothing where its guard fails.
            share = 0.0 if node.guards else 1.0
            count = share * math.prod(ranges.get(a, 1) for a in axes)
            found[node.buffer] = found.get(node.buffer, 0.0) + count
    return found
