"""What attention kernels share: the frame of a block's head, the counted loop over tiles, and the ring of stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jcuts.base.errors import CompileRejected, Refusal
from jcuts.codegen.cuda.ptx import global_memory as M
from jcuts.codegen.cuda.ptx.builder import GpuBuilder
from jcuts.codegen.llvm import lanes as L
from jcuts.kernel_ir.program import Axis, Program
from jcuts.lower.patterns.gemm import ROWS


def checked_tile(program: Program, tile: Any, what: str) -> Any:
    """The block tile of a schedule, which fits and has its number of threads.

    Raises: CompileRejected: its parameters are inconsistent. Args: what: said of the tiles there.
    """
    if isinstance(tile, Refusal):
        raise CompileRejected(f"{program.name}: {tile}")
    params = dict(program.params)
    if not tile.fits or tile.threads != int(str(params["threads"])):
        raise CompileRejected(f"{program.name}: no {what} {params['tile']} by warps {params['warps']}")
    return tile


def head_frame(
    builder: GpuBuilder, batch: Sequence[Axis], head: L.Value, row: L.Value, pointers: Mapping[str, L.Value]
) -> M.Frame:
    """The frame of a head's rows from ``row`` on. Args: head: its number."""
    variables: dict[str, L.Value] = {ROWS: row}
    for axis in reversed(batch):
        first = axis is batch[0]
        variables[axis.name] = head if first else builder.urem(head, L.I32(axis.extent))
        head = builder.udiv(head, L.I32(axis.extent))
    return M.Frame(builder, variables, pointers, {a.name: a.extent for a in batch}, {})


def counted_loop(
    builder: GpuBuilder,
    name: str,
    count: int,
    start: list[L.Value],
    body: Callable[[L.Value, list[L.Value]], list[L.Value]],
) -> list[L.Value]:
    """A counted loop with loop-carried values; returns the last ones."""
    before = builder.block
    loop, after = builder.append_basic_block(name), builder.append_basic_block(f"{name}.done")
    builder.branch(loop)
    builder.position_at_end(loop)
    number = builder.phi(L.I32)
    number.add_incoming(L.I32(0), before)
    carried = [builder.phi(value.type) for value in start]
    for variable, value in zip(carried, start, strict=True):
        variable.add_incoming(value, before)
    made = body(number, carried)
    following = builder.add(number, L.I32(1))
    number.add_incoming(following, builder.block)
    for variable, value in zip(carried, made, strict=True):
        variable.add_incoming(value, builder.block)
    builder.cbranch(builder.icmp_signed("<", following, L.I32(count)), loop, after)
    builder.position_at_end(after)
    return made


def next_stage(builder: GpuBuilder, stage: L.Value, size: int, stages: int) -> L.Value:
    """The stage that follows in a ring. Args: stage: bytes into it; size: bytes of a stage."""
    if stages == 1:
        return stage
    moved = builder.add(stage, L.I32(size))
    return builder.select(builder.icmp_signed("==", moved, L.I32(size * stages)), L.I32(0), moved)
