"""Memory traffic of the kernel families: 32-byte sectors and 128-byte lines moved, bytes in flight, the compute unit.

Transactions are counted, not guessed: the addresses of all loads and stores of a few thread blocks are computed, and
the distinct 32-byte sectors among them are what those blocks move.  Tiled GEMMs, convolutions and attention say from
their tiles what a block reads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from jcuts.base.errors import Refusal
from jcuts.estimate.gpu_kernel import SECTOR
from jcuts.kernel_ir.compulsory_traffic import compulsory_bytes
from jcuts.kernel_ir.index import Index
from jcuts.kernel_ir.node import Guard
from jcuts.kernel_ir.program import ITEM_SIZE, Phase, Program
from jcuts.lower.patterns.attention import match
from jcuts.lower.patterns.attention_backward import match_backward
from jcuts.lower.patterns.few_channel_conv import conv_geometry
from jcuts.lower.patterns.gemm import TYPES, WIDE, gemm_operands
from jcuts.lower.patterns.inverted_residual import match_inverted_residual
from jcuts.schedule.gpu.attention import backward_tile as attention_backward_tile
from jcuts.schedule.gpu.attention import tile as attention_tile
from jcuts.schedule.gpu.coalescing import CoalescingStats, distinct
from jcuts.schedule.gpu.conv.few_channels_tile import shape_of
from jcuts.schedule.gpu.gemm.problem import gemm_tile
from jcuts.schedule.gpu.inverted_residual.tile import WORD
from jcuts.schedule.gpu.inverted_residual.tile import shape_of as tile_of

LINE = 128  # bytes
WARP = 32  # threads
WIDEST = 16  # bytes of the widest access
TERMS = 1024  # terms of a reduction whose addresses are computed; longer ones are scaled up
SAMPLES = (1 / 6, 1 / 2, 5 / 6)  # blocks that are looked at, as parts of the grid
CACHED = 32 << 10  # an operand of less bytes, and a 16th of all, stays in the L1 cache from block to block
SMALL = 16
NOWHERE = np.iinfo(np.int64).min  # a number of no sector or line
MOST_POINTS = 1 << 21  # addresses per access and block; larger tiles count as compulsory traffic


class Traffic(NamedTuple):
    """Bytes of all sectors that a launch moves, 128-byte lines that its warps touch, share of threads with work."""

    moved: float
    lines: float
    active: float


# -- compute units ----------------------------------------------------------------------------------------------------
def ffma_unit(program: Program) -> str:
    """Fused multiply-adds and other arithmetic of single threads."""
    return "ffma"


def _tensor_core_unit(dtype: str) -> str:
    return "fp64" if dtype == WIDE else {"tf32": "tf32_mma", "bf16": "bf16_mma", "f16": "fp16_mma"}[TYPES[dtype]]


def mma_unit(program: Program) -> str:
    """The tensor cores, of a product's operand type."""
    return _tensor_core_unit(gemm_operands(program)[0].dtype)


def conv_unit(program: Program) -> str:
    """The tensor cores, of a convolution's type."""
    return _tensor_core_unit(conv_geometry(program).dtype)


def attention_unit(program: Program) -> str:
    """The tensor cores, of the keys' type."""
    return _tensor_core_unit(
        program.inputs[0].dtype if isinstance(found := match(program), Refusal) else found.key.dtype
    )


def attention_backward_unit(program: Program) -> str:
    """The tensor cores, of the operands' type."""
    found = match_backward(program)
    return _tensor_core_unit(program.inputs[0].dtype if isinstance(found, Refusal) else found.scores.dtype)


def inverted_residual_unit(program: Program) -> str:
    """The tensor cores, of an inverted residual's type."""
    is_float32 = isinstance(known := match_inverted_residual(program), Refusal) or known.item == WORD
    return "tf32_mma" if is_float32 else "bf16_mma"


# -- bytes that move --------------------------------------------------------------------------------------------------
def compulsory(program: Program) -> float:
    """Bytes of all operands and results; of tables those of the rows that are looked up."""
    return float(compulsory_bytes(program))


def compulsory_traffic(program: Program, blocks: int = 0, threads: int = 0) -> Traffic:
    """Of families that read and write everything once, in whole lines."""
    return Traffic(compulsory(program), compulsory(program) / LINE, 1.0)


def _at_least_compulsory(program: Program, moved: float) -> Traffic:
    """Of tiles that move so many bytes, where partial tiles may count less than all operands and results."""
    return Traffic(max(compulsory(program), moved), moved / LINE, 1.0)


def gemm_traffic(program: Program, blocks: int, threads: int) -> Traffic:
    """Of a matrix product: every block reads its rows and columns of the operands."""
    tile = gemm_tile(program)
    terms = program.phases[0].reds[0].extent / tile.split / tile.cluster
    item = gemm_operands(program)[0].item
    moved = blocks * (tile.rows + tile.columns) * terms * item + sum(b.bytes for b in program.outputs)
    return _at_least_compulsory(program, moved)


def attention_traffic(program: Program, blocks: int, threads: int) -> Traffic:
    """Of attention: every block reads all keys and values of its head."""
    if isinstance(tile := attention_tile.shape_of(program), Refusal):
        return compulsory_traffic(program)
    known = tile.attention
    line = known.key.length * known.key.item + known.value.length * known.value.item
    moved = math.prod(tile.blocks) * known.keys * line + sum(b.bytes for b in program.outputs)
    least = max(compulsory(program), moved)
    return Traffic(least, least / LINE, 1.0)


def attention_backward_traffic(program: Program, blocks: int, threads: int) -> Traffic:
    """Of the backward pass of attention: every block reads both operands of all columns of its head."""
    if isinstance(tile := attention_backward_tile.backward_tile(program), Refusal):
        return compulsory_traffic(program)
    known = tile.attention
    line = known.scores.length * known.scores.item + known.gradient.length * known.gradient.item
    moved = tile.block_count * known.columns * line + sum(b.bytes for b in program.outputs)
    return _at_least_compulsory(program, moved)


def few_channels_traffic(program: Program, blocks: int, threads: int) -> Traffic:
    """Of a convolution of few channels: image patches with their halo, and filters for every block."""
    shape = shape_of(program)
    read = shape.tiles * shape.blocks[0] * shape.lines * shape.length + math.prod(shape.blocks) * shape.filters // 4
    return _at_least_compulsory(program, float(shape.patches.item * read) + sum(b.bytes for b in program.outputs))


def inverted_residual_traffic(program: Program, blocks: int, threads: int) -> Traffic:
    """Of an inverted residual: every tile reads its pixels with their halo, and all weights."""
    if (tile := tile_of(program)) is None:
        return compulsory_traffic(program)
    weights = tile.block.expanded_channels * (tile.block.in_channels + tile.block.out_channels)
    moved = float(tile.item * tile.tiles * (tile.pixels * tile.block.in_channels + weights))
    moved += 2 * sum(b.bytes for b in program.outputs)
    return _at_least_compulsory(program, moved)


def coalesced_traffic(program: Program, access: CoalescingStats) -> Traffic:
    """Of a family that knows how its accesses use lines."""
    moved = compulsory(program)
    return Traffic(moved * access.passes, moved / LINE * access.lines, access.active)


def thread_tile_traffic(program: Program, blocks: int, threads: int) -> Traffic:
    """Of register tiles: the distinct sectors among the addresses of a few blocks."""
    params: Any = dict(program.params)
    if len(program.phases) != 1:
        return compulsory_traffic(program)
    phase = program.phases[0]
    if "walk" in params:  # a thread has all tiles of its walk
        name, tiles = params["walk"]
        axes = (replace(a, unroll=min(a.extent, a.unroll * tiles)) if a.name == name else a for a in phase.axes)
        phase = replace(phase, axes=tuple(axes))
    terms = math.prod(r.extent for r in phase.reds)
    split = int(str(params.get("split", 1)))
    if split > 1 or threads * math.prod(a.unroll for a in phase.axes) * min(terms, TERMS) > MOST_POINTS:
        return compulsory_traffic(program)
    places = sorted({int(blocks * part) for part in SAMPLES})
    found = np.mean(_blocks(program, phase, places, threads), axis=0)
    longer = max(1.0, terms / TERMS)
    small = sum(b.bytes for b in program.inputs if b.name in l1_resident(program))
    moved = max(compulsory(program), SECTOR * blocks * float(found[0]) * longer + small)
    return Traffic(moved, blocks * float(found[1]), float(found[2]))


def l1_resident(program: Program) -> set[str]:
    """Operands that the L1 cache keeps: they move once."""
    most = min(CACHED, compulsory(program) / SMALL)
    return {b.name for b in program.inputs if b.bytes <= most}


# -- bytes in flight ---------------------------------------------------------------------------------------------------
def gemm_bytes_in_flight(program: Program) -> float:
    """Of a matrix product: the stages of its shared-memory ring that are copied ahead, per thread."""
    tile = gemm_tile(program)
    stage = (tile.rows + tile.columns) * tile.terms * gemm_operands(program)[0].item
    kept = 2 if tile.fma and tile.stages > 2 else 1  # stages that are not asked for ahead
    return (tile.stages - kept) * stage / tile.threads


def few_channels_bytes_in_flight(program: Program) -> float:
    """Of a convolution of few channels: an image patch, per thread."""
    params: Any = dict(program.params)
    return shape_of(program).patch / params["threads"]


def inverted_residual_bytes_in_flight(program: Program) -> float:
    """Of an inverted residual: the weights of a chunk of channels, per thread."""
    params: Any = dict(program.params)
    if (tile := tile_of(program)) is None:
        return load_bytes_in_flight(program)
    return tile.item * tile.chunk * (tile.block.in_channels + tile.block.out_channels) / params["threads"]


def load_bytes_in_flight(program: Program) -> float:
    """Of a register tile: all different addresses that a thread loads."""
    total = 0.0
    for phase in program.phases[:1]:
        for graph in (phase.body, phase.exit):
            for node in graph.nodes:
                if node.op != "load" or node.index is None:
                    continue
                unrolled = [*((a.name, a.unroll) for a in phase.axes), *((r.name, r.unroll) for r in phase.reds)]
                count = distinct(node.index, dict(unrolled))
                total += count * ITEM_SIZE[next(b.dtype for b in program.buffers if b.name == node.buffer)]
    return max(total, 1.0)


# -- addresses of a block ---------------------------------------------------------------------------------------------
def _blocks(program: Program, phase: Phase, places: Sequence[int], threads: int) -> np.ndarray:
    """Of every one of these blocks: distinct sectors that it loads and stores, lines of all its warps' accesses, share
    of active threads.
    """
    env = _points(program, phase, places, threads)
    sizes = {b.name: ITEM_SIZE[b.dtype] for b in program.buffers}
    kept = l1_resident(program)
    touched: dict[str, list[np.ndarray]] = {}
    inside = np.ones([len(places) * threads, *([1] * (len(phase.axes) + len(phase.reds)))], bool)
    for axis in phase.axes:
        inside = inside & (env[axis.name] < axis.extent)
    for graph in (phase.body, phase.exit):
        for node in graph.nodes:
            if node.op == "load" and node.index is not None and node.buffer not in kept:
                held = inside & _holds(node.guards, env)
                touched.setdefault(node.buffer, []).append(_sectors(node.index, env, held, sizes[node.buffer]))
    for store in phase.stores:
        outside = {**env, **{r.name: np.int64(0) for r in phase.reds}}
        touched.setdefault(store.buffer, []).append(_sectors(store.address, outside, inside, sizes[store.buffer]))
    sectors = sum(
        (_distinct_of_rows([part.reshape(len(places), -1) for part in parts]) for parts in touched.values()),
        np.zeros(len(places), np.int64),
    )
    active = np.asarray(inside.reshape(len(places), threads, -1).any(axis=2))
    lines = _lines(phase, env, sizes, active)
    return np.stack([sectors, lines, active.mean(axis=1)], axis=1)


def _sectors(index: Index, env: Mapping[str, np.ndarray], held: np.ndarray, size: int) -> np.ndarray:
    """Sectors of all elements, -1 where the mask does not hold; numbers that depend on data count as if they were 0."""
    value, mask = np.broadcast_arrays(np.asarray(_value(index, env)), held)
    return np.where(mask, value * size // SECTOR, NOWHERE)


def _distinct_of_rows(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Different numbers, other than `NOWHERE`, in every row of some arrays side by side."""
    found = np.sort(np.concatenate(parts, axis=1), axis=1)
    is_new = found != NOWHERE
    is_new[:, 1:] &= found[:, 1:] != found[:, :-1]
    return is_new.sum(axis=1)


def _lines(phase: Phase, env: Mapping[str, np.ndarray], sizes: Mapping[str, int], active: np.ndarray) -> np.ndarray:
    """128-byte lines that the accesses of all warps of every block touch, each access for itself.

    Looked at is the first access of a tile; all others of the tile are taken to touch as many.
    """
    blocks, threads = active.shape
    lane = phase.axes[-1] if phase.axes else None
    tile = {**{a.name: a.unroll for a in phase.axes}, **{r.name: r.extent for r in phase.reds}}
    accesses = [
        (n.buffer, n.index, tile)
        for g in (phase.body, phase.exit)
        for n in g.nodes
        if n.op == "load" and n.index is not None
    ]
    outputs = {a.name: a.unroll for a in phase.axes}
    accesses += [(s.buffer, s.address, outputs) for s in phase.stores]
    here = {name: values.reshape(values.shape[0], -1)[:, :1] for name, values in env.items()}
    total = np.zeros(blocks)
    for buffer, index, counts in accesses:
        size = sizes[buffer]
        joined = 1
        if lane is not None and index.stride(lane.name) == 1:
            joined = math.gcd(lane.unroll, max(1, WIDEST // size))
        start = np.broadcast_to(np.asarray(_value(index, here)), (blocks * threads, 1)).reshape(active.shape) * size
        ends = np.where(active, (start + joined * size - 1) // LINE, NOWHERE)
        touched = _distinct_by_warp(np.where(active, start // LINE, NOWHERE), ends)
        total += touched * distinct(index, counts) / joined
    return total


def _distinct_by_warp(first: np.ndarray, last: np.ndarray) -> np.ndarray:
    """Different lines that a block's warps touch, added up. Args: of every thread: its first and last line."""
    blocks, threads = first.shape
    padded = np.full((2, blocks, -(-threads // WARP) * WARP), NOWHERE)
    padded[:, :, :threads] = first, last
    rows = np.where(padded < 0, NOWHERE, padded).reshape(2, -1, WARP)  # guards keep threads off what lies before
    return _distinct_of_rows(list(rows)).reshape(blocks, -1).sum(axis=1)


def _points(program: Program, phase: Phase, places: Sequence[int], threads: int) -> dict[str, np.ndarray]:
    """Coordinates of every point of some blocks: thread, unrolled axes, terms (as `codegen.cuda.elementwise.launch`
    numbers them).
    """
    counts = {a.name: -(-a.extent // a.unroll) for a in phase.axes}
    pairs: Any = dict(program.params).get("block", ())
    shape = {str(k): int(v) for k, v in dict(pairs).items()}
    lanes = np.tile(np.arange(threads, dtype=np.int64), len(places))
    block = np.repeat(np.array(places, np.int64), threads)
    if shape:
        inner = _delinearize(lanes, shape)
        outer = _delinearize(block, {n: -(-c // shape.get(n, 1)) for n, c in counts.items()})
        tiles = {n: outer[n] * shape.get(n, 1) + inner.get(n, np.int64(0)) for n in counts}
    else:
        tiles = _delinearize(block * threads + lanes, counts)
    dims = 1 + len(phase.axes) + len(phase.reds)
    env: dict[str, np.ndarray] = {}
    for place, axis in enumerate(phase.axes):
        start = np.asarray(tiles[axis.name]).reshape([-1, *([1] * (dims - 1))]) * axis.unroll
        env[axis.name] = start + _along(np.arange(axis.unroll), 1 + place, dims)
    left = TERMS
    for place, red in reversed(list(enumerate(phase.reds))):
        count = max(1, min(red.extent, left))
        left //= count
        env[red.name] = _along(np.arange(count), 1 + len(phase.axes) + place, dims)
    return env


def _along(values: np.ndarray, place: int, dims: int) -> np.ndarray:
    return values.astype(np.int64).reshape([-1 if k == place else 1 for k in range(dims)])


def _delinearize(number: Any, counts: Mapping[str, int]) -> dict[str, Any]:
    """Mixed-radix digits, last name fastest; the first takes what is left."""
    found: dict[str, Any] = {}
    names = list(counts)
    for name in reversed(names[1:]):
        found[name], number = number % counts[name], number // counts[name]
    if names:
        found[names[0]] = number
    return found


def _holds(guards: Sequence[Guard], env: Mapping[str, np.ndarray]) -> np.ndarray:
    holds = np.asarray(True)
    for guard in guards:
        if guard.index.values():
            continue
        value = np.asarray(_value(guard.index, env))
        if guard.low is not None:
            holds = holds & (value >= guard.low)
        if guard.high is not None:
            holds = holds & (value <= guard.high)
    return holds


def _value(index: Index, env: Mapping[str, np.ndarray]) -> Any:
    total: Any = np.int64(index.const)
    for atom, coefficient in index.terms:
        if atom.kind == "axis":
            total = total + coefficient * env[atom.name]
        elif atom.inner is not None:
            inner = _value(atom.inner, env)
            total = total + coefficient * (inner // atom.modulus if atom.kind == "div" else inner % atom.modulus)
    return total
