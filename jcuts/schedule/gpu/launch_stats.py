"""Launch statistics of a GPU kernel for the PUL score: 32-byte sectors moved, bytes in flight, operations.

Transactions are counted, not guessed: the addresses of all loads and stores of a few thread blocks are computed, and
the distinct sectors among them are what those blocks move.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from jcuts.arch.gpu import GpuArch
from jcuts.base.errors import Refusal
from jcuts.estimate.gpu_kernel import SECTOR, LaunchScore, LaunchUse, score
from jcuts.kernel_ir.index import Index
from jcuts.kernel_ir.node import Guard
from jcuts.kernel_ir.program import ITEM_SIZE, Phase, Program
from jcuts.lower import welford
from jcuts.lower.patterns.attention import match
from jcuts.lower.patterns.few_channel_conv import conv_geometry
from jcuts.lower.patterns.gemm import TYPES, WIDE, gemm_operands
from jcuts.lower.patterns.inverted_residual import match_inverted_residual
from jcuts.schedule.cpu.loop_candidates import work
from jcuts.schedule.gpu.attention import tile as attention_tile
from jcuts.schedule.gpu.coalescing import access_of, distinct
from jcuts.schedule.gpu.conv.few_channels_tile import shape_of
from jcuts.schedule.gpu.inverted_residual.tile import WORD
from jcuts.schedule.gpu.inverted_residual.tile import shape_of as tile_of

LINE = 128  # bytes
WARP = 32  # threads
WIDEST = 16  # bytes of the widest access
TERMS = 1024  # terms of a reduction whose addresses are computed; longer ones are scaled up
SAMPLES = (1 / 6, 1 / 2, 5 / 6)  # blocks that are looked at, as parts of the grid
CACHED = 32 << 10  # an operand of less bytes, and a 16th of all, stays in the L1 cache from block to block
SMALL = 16
MOST_POINTS = 1 << 21  # addresses per access and block; larger tiles count as compulsory traffic

Taken = tuple[int, int, int, int]
"""Blocks, threads, registers and shared bytes of one launch, as the compiled kernel says."""


def score_of(program: Program, taken: Sequence[Taken], arch: GpuArch) -> LaunchScore:
    """PUL of a compiled program. Args: taken: one entry per launch, in order."""
    return score(launch_stats(program, taken), arch, unit=unit_of(program))


def unit_of(program: Program) -> str:
    """The compute unit that does the work."""
    form = dict(program.params).get("cuda")
    if form == "block":
        return (
            "tf32_mma"
            if isinstance(known := match_inverted_residual(program), Refusal) or known.item == WORD
            else "bf16_mma"
        )
    if form not in ("product", "patch", "attention") or "fma" in dict(program.params):
        return "ffma"
    if form == "attention":
        dtype = program.inputs[0].dtype if isinstance(found := match(program), Refusal) else found.key.dtype
    else:
        dtype = gemm_operands(program)[0].dtype if form == "product" else conv_geometry(program).dtype
    return "fp64" if dtype == WIDE else {"tf32": "tf32_mma", "bf16": "bf16_mma", "f16": "fp16_mma"}[TYPES[dtype]]


def launch_stats(program: Program, taken: Sequence[Taken]) -> list[LaunchUse]:
    """The launches in numbers: the first does the work; later ones combine partial results of a split."""
    flop = float(sum(work(p) for p in program.phases))
    if dict(program.params).get("cuda") == "moments":
        made = welford.split_kernels(program).programs
        return [_independent_kernel(program, part, one) for part, one in zip(made, taken, strict=True)]
    found = []
    partial = 0.0
    for number, (blocks, threads, registers, shared) in enumerate(taken):
        if number == 0:
            moved, lines, active = _traffic(program, blocks, threads)
            compulsory = _compulsory(program)
            split = int(str(dict(program.params).get("split", 1)))
            if len(taken) > 1:
                partial = float(split * sum(b.size * 4 for b in program.outputs))
                moved, compulsory = moved + partial, compulsory + partial
            under_way = _bytes_in_flight(program) * active
            found.append(
                LaunchUse(blocks, threads, registers, shared, flop, compulsory, moved, lines, under_way, active)
            )
        else:
            total = partial + float(sum(b.bytes for b in program.outputs))
            found.append(
                LaunchUse(blocks, threads, registers, shared, partial / 4, total, total, total / LINE, float(SECTOR))
            )
    return found


def _independent_kernel(program: Program, part: Program, taken: Taken) -> LaunchUse:
    """One of several kernels that have operands and results of their own."""
    blocks, threads, registers, shared = taken
    moved = _compulsory(part)
    flop = float(sum(work(p) for p in part.phases))
    lines, under_way = moved / LINE, float(WIDEST)
    if (access := access_of(program)) is not None and any(p.reds for p in part.phases):
        lines, under_way = lines * access.lines, access.under_way
    return LaunchUse(blocks, threads, registers, shared, flop, moved, moved, lines, under_way)


def _compulsory(program: Program) -> float:
    return float(sum(b.bytes for b in (*program.inputs, *program.outputs)))


def _traffic(program: Program, blocks: int, threads: int) -> tuple[float, float, float]:
    """Bytes of all sectors that the launch's blocks move, lines that its warps touch, share of threads with work."""
    compulsory = _compulsory(program)
    params: Any = dict(program.params)
    if params.get("cuda") == "product":  # every block reads its rows and columns of the operands
        rows, columns, _ = params["tile"]
        terms = program.phases[0].reds[0].extent / params.get("split", 1) / params.get("cluster", 1)
        moved = blocks * (rows + columns) * terms * gemm_operands(program)[0].item + sum(
            b.bytes for b in program.outputs
        )
        return max(compulsory, moved), moved / LINE, 1.0
    if params.get("cuda") == "attention" and not isinstance(tile := attention_tile.shape_of(program), Refusal):
        known = tile.attention  # every block reads all keys and values of its head
        line = known.key.length * known.key.item + known.value.length * known.value.item
        moved = max(compulsory, math.prod(tile.blocks) * known.keys * line + sum(b.bytes for b in program.outputs))
        return moved, moved / LINE, 1.0
    if params.get("cuda") == "patch":
        shape = shape_of(program)
        read = shape.tiles * shape.blocks[0] * shape.lines * shape.length + math.prod(shape.blocks) * shape.filters // 4
        moved = float(shape.patches.item * read) + sum(b.bytes for b in program.outputs)
        return max(compulsory, moved), moved / LINE, 1.0
    if params.get("cuda") == "block" and (tile := tile_of(program)) is not None:
        weights = tile.block.expanded_channels * (tile.block.in_channels + tile.block.out_channels)
        moved = float(tile.item * tile.tiles * (tile.pixels * tile.block.in_channels + weights))
        moved += 2 * sum(b.bytes for b in program.outputs)
        return max(compulsory, moved), moved / LINE, 1.0
    if (access := access_of(program)) is not None:
        return compulsory * access.passes, compulsory / LINE * access.lines, access.active
    if params.get("cuda") != "point" or len(program.phases) != 1:
        return compulsory, compulsory / LINE, 1.0
    phase = program.phases[0]
    if "walk" in params:  # a thread has all tiles of its walk
        name, tiles = params["walk"]
        axes = (replace(a, unroll=min(a.extent, a.unroll * tiles)) if a.name == name else a for a in phase.axes)
        phase = replace(phase, axes=tuple(axes))
    terms = math.prod(r.extent for r in phase.reds)
    split = int(str(params.get("split", 1)))
    if split > 1 or threads * math.prod(a.unroll for a in phase.axes) * min(terms, TERMS) > MOST_POINTS:
        return compulsory, compulsory / LINE, 1.0
    places = sorted({int(blocks * part) for part in SAMPLES})
    found = np.mean([_block(program, phase, place, threads) for place in places], axis=0)
    longer = max(1.0, terms / TERMS)
    small = sum(b.bytes for b in program.inputs if b.name in _l1_resident(program))
    moved = max(compulsory, SECTOR * blocks * float(found[0]) * longer + small)
    return moved, blocks * float(found[1]), float(found[2])


def _l1_resident(program: Program) -> set[str]:
    """Operands that the L1 cache keeps: they move once."""
    most = min(CACHED, _compulsory(program) / SMALL)
    return {b.name for b in program.inputs if b.bytes <= most}


def _bytes_in_flight(program: Program) -> float:
    """Bytes that a thread asks for before it needs the first of them."""
    params: Any = dict(program.params)
    if params.get("cuda") == "product":
        rows, columns, terms = params["tile"]
        stage = (rows + columns) * terms * gemm_operands(program)[0].item
        kept = 2 if "fma" in params and params["stages"] > 2 else 1  # stages that are not asked for ahead
        return (params["stages"] - kept) * stage / params["threads"]
    if params.get("cuda") == "patch":
        return shape_of(program).patch / params["threads"]
    if params.get("cuda") == "block" and (tile := tile_of(program)) is not None:
        return tile.item * tile.chunk * (tile.block.in_channels + tile.block.out_channels) / params["threads"]
    if (access := access_of(program)) is not None:
        return max(access.under_way, 1.0)
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
def _block(program: Program, phase: Phase, block: int, threads: int) -> tuple[float, float, float]:
    """Of one block: distinct sectors that it loads and stores, lines of all its warps' accesses, active threads."""
    env = _points(program, phase, block, threads)
    sizes = {b.name: ITEM_SIZE[b.dtype] for b in program.buffers}
    kept = _l1_resident(program)
    touched: dict[str, list[np.ndarray]] = {}
    inside = np.asarray(True)
    for axis in phase.axes:
        inside = inside & (env[axis.name] < axis.extent)
    for graph in (phase.body, phase.exit):
        for node in graph.nodes:
            if node.op == "load" and node.index is not None and node.buffer not in kept:
                held = inside & _holds(node.guards, env)
                touched.setdefault(node.buffer, []).append(_numbers(node.index, env, held) * sizes[node.buffer])
    for store in phase.stores:
        outside = {**env, **{r.name: np.int64(0) for r in phase.reds}}
        touched.setdefault(store.buffer, []).append(_numbers(store.address, outside, inside) * sizes[store.buffer])
    sectors = sum(np.unique(np.concatenate(found) // SECTOR).size for found in touched.values())
    starts = np.broadcast_to(inside, (threads, *inside.shape[1:])) if inside.ndim else np.ones((threads, 1), bool)
    active = np.asarray(starts.reshape(threads, -1).any(axis=1))
    return sectors, _lines(phase, env, sizes, active), float(active.mean())


def _lines(phase: Phase, env: Mapping[str, np.ndarray], sizes: Mapping[str, int], active: np.ndarray) -> float:
    """128-byte lines that the accesses of all warps of a block touch, each access for itself.

    Looked at is the first access of a tile; all others of the tile are taken to touch as many.
    """
    threads = active.size
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
    total = 0.0
    for buffer, index, counts in accesses:
        size = sizes[buffer]
        joined = 1
        if lane is not None and index.stride(lane.name) == 1:
            joined = math.gcd(lane.unroll, max(1, WIDEST // size))
        here = {name: values.reshape(values.shape[0], -1)[:, :1] for name, values in env.items()}
        start = np.broadcast_to(np.asarray(_value(index, here)), (threads, 1)).reshape(-1) * size
        numbers = np.where(active, start // LINE, -1)
        ends = np.where(active, (start + joined * size - 1) // LINE, -1)
        for warp in range(0, threads, WARP):
            part = np.concatenate([numbers[warp : warp + WARP], ends[warp : warp + WARP]])
            total += np.unique(part[part >= 0]).size * distinct(index, counts) / joined
    return total


def _points(program: Program, phase: Phase, block: int, threads: int) -> dict[str, np.ndarray]:
    """Coordinates of every point of a block: thread, unrolled axes, terms (as `codegen.cuda.launch_source` numbers
    them).
    """
    counts = {a.name: -(-a.extent // a.unroll) for a in phase.axes}
    pairs: Any = dict(program.params).get("block", ())
    shape = {str(k): int(v) for k, v in dict(pairs).items()}
    lanes = np.arange(threads, dtype=np.int64)
    if shape:
        inner = _delinearize(lanes, shape)
        outer = _delinearize(np.int64(block), {n: -(-c // shape.get(n, 1)) for n, c in counts.items()})
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


def _numbers(index: Index, env: Mapping[str, np.ndarray], held: np.ndarray) -> np.ndarray:
    """All element numbers at which the mask holds; numbers that depend on data count as if they were 0."""
    value, mask = np.broadcast_arrays(np.asarray(_value(index, env)), held)
    return value[mask].reshape(-1)


def _value(index: Index, env: Mapping[str, np.ndarray]) -> Any:
    total: Any = np.int64(index.const)
    for atom, coefficient in index.terms:
        if atom.kind == "axis":
            total = total + coefficient * env[atom.name]
        elif atom.inner is not None:
            inner = _value(atom.inner, env)
            total = total + coefficient * (inner // atom.modulus if atom.kind == "div" else inner % atom.modulus)
    return total
