"""Cycles of products on matrix units, by warps (`gpu_products`) and by warp groups (`gpu_groups`).

A block is counted on its multiprocessor, together with the blocks that run beside it there:

    cycles = waves * (begin + tiles of terms * longest(units, shared memory, issue, L2 cache, loads under way) + exit)
             and what moves by the memory's rate: the longer of both, and a share of the shorter

Blocks of a cluster run at once, and clusters lie in groups of multiprocessors: fewer of them run at once than blocks
would.  The constants are fitted to 4,600 schedules of nine products and convolutions on an H200, drawn without the
model (`docs/gpu_proofs.md`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from jcuts.lower.patterns.gemm import GemmOperand, k_tiles_per_split
from jcuts.schedule.gpu.gemm import smem_layout_f64
from jcuts.schedule.gpu.gemm.problem import GemmProblem, MmaTile
from jcuts.schedule.gpu.gemm.wgmma_tile import WgmmaTile
from jcuts.schedule.gpu.machine import WARP

AT_ONCE = {1: 132, 2: 66, 3: 39, 4: 30, 5: 22, 6: 15, 7: 14, 8: 13}
"""Clusters of so many blocks that 132 multiprocessors have at once, one block each: they lie in groups.

The driver counts 42 of three on one H200; on others 42 took twice as long as 39.
"""
SHARED, FILE, BLOCKS, OWN = 228 << 10, 65536, 32, 1024
"""Of a multiprocessor: bytes of shared memory, registers, blocks; bytes that every block takes beside its own."""
LINE, STEP, HIGH = 128, 32, 64
"""Bytes of a line of the caches, and of terms per instruction; rows of a warp group's instruction."""
STREAM = 2400.0
"""Bytes of memory per cycle that partial results move at."""
EVEN, FMA_EVEN = 3, 8
"""Waves up to which the last one takes as long as the others; of fused multiply-adds, whose blocks end together."""


@dataclass(frozen=True)
class CostCoefficients:
    """Constants of one family: products and bytes per cycle, cycles, shares of what overlaps.

    Attributes:
        unit: products per cycle. port, cache, far, memory: bytes per cycle of shared memory, of the L2 cache, of other
            blocks' shared memory, of the whole GPU's memory.
        short: power with which lines of less than 128 bytes count more.
        fetch, round: of a load, over those under way; of a tile of terms.
        overlap, moving: what is left of shorter limits; of the shorter of work and memory.
        begin, warp: of a block; for every warp of the multiprocessor.
        leave, late: of an exit; of asking late for what is added there.
        cluster, member: of blocks that meet; for each of them.
        second, again: of a second launch; what its bytes count.
    """

    unit: float
    port: float
    cache: float
    far: float
    memory: float
    short: float
    fetch: float
    round: float
    overlap: float
    moving: float
    begin: float
    warp: float
    leave: float
    cluster: float
    member: float
    second: float
    again: float


def blocks_per_sm(machine_threads: int, threads: int, registers: float, shared: int) -> int:
    """Blocks that one multiprocessor holds at once."""
    taken = 8 * math.ceil(registers / 8) * threads
    return max(1, min(SHARED // (shared + OWN), int(FILE // taken), machine_threads // threads, BLOCKS))


def concurrent_clusters(cluster: int, sms: int) -> float:
    """Clusters of so many blocks that a GPU has at once, one block per multiprocessor."""
    return AT_ONCE.get(cluster, max(1, AT_ONCE[1] // cluster - 4)) * sms / AT_ONCE[1]


def occupancy(blocks: int, cluster: int, held: int, sms: int, even: int = EVEN) -> tuple[int, float]:
    """Blocks side by side on a multiprocessor, and how often they are replaced."""
    waves = blocks / (held * cluster * concurrent_clusters(cluster, sms))
    return min(held, -(-blocks // sms)), math.ceil(waves - 1e-9) if waves <= even else waves + 0.5


def global_bytes(sides: tuple[GemmOperand, GemmOperand], rows: int, columns: int, terms: int, short: float) -> float:
    """Bytes of a tile of both operands; short lines count more, as whole lines are what moves."""
    total = 0.0
    for side, size in zip(sides, (rows, columns), strict=True):
        line = (terms if side.along_terms else size) * side.item
        total += size * terms * side.item * max(1.0, LINE / line) ** short
    return total


def smem_bytes(sides: tuple[GemmOperand, GemmOperand], tiling: MmaTile) -> int:
    """Bytes of shared memory of one tile of both operands, with what keeps its lines in different banks."""
    total = 0
    for side, size in zip(sides, (tiling.rows, tiling.columns), strict=True):
        if side.item == smem_layout_f64.ITEM:
            total += smem_layout_f64.bytes_of(side, size, tiling.terms)
            continue
        lines, length = (size, tiling.terms) if side.along_terms else (tiling.terms, size)
        words, lone = length * side.item // 4, not side.along_terms and side.item == 4
        total += 4 * lines * (words + ((8 if lone else 4) - words) % (32 if lone else 8))
    return total


def block_smem(counter: GemmProblem, tiling: MmaTile) -> int:
    """Bytes of shared memory of a block, with padding."""
    alone = tiling.warps[2] == tiling.cluster == 1
    meet = 0 if alone else counter.total * tiling.rows * tiling.columns * tiling.warps[2]
    return max(smem_bytes(counter.sides, tiling) * tiling.stages, meet)


def _whole(counter: GemmProblem, rates: CostCoefficients, total: float, split: int) -> float:
    """With what the memory takes, and a second launch."""
    moved = counter.moved / rates.memory
    total = max(total, moved + rates.begin) + rates.moving * min(total, moved)
    if split > 1:
        total += rates.second + rates.again * (2 * split + 1) * counter.partial / STREAM
    return total


def _overlapped_max(limits: list[float], overlap: float) -> float:
    return max(limits) + overlap * (sum(limits) - max(limits))


# -- by warps ---------------------------------------------------------------------------------------------------------
WARPS = {
    item: CostCoefficients(
        unit, 253.0, 108.0, 43.0, 1820.0, 0.7, 500.0, 37.0, 0.86, 0.63, 160.0, 2.6, 117.0, 626.0, 460.0, 2630.0, 2.6
    )
    for item, unit in {4: 694.0, 2: 1900.0}.items()
}
FMA = replace(WARPS[4], unit=95.0, port=98.0, overlap=0.14, fetch=1090.0)
"""Fused multiply-adds, fitted to 130 schedules of ten products and convolutions on an H200 (11 % off).

Four schedulers could issue 128 a cycle; two operands that lie in one bank of the registers take two cycles.  What
shared memory gives counts for every lane that gets it (`LANES`), as it passes the same port for each.
"""
LANES, FMA_REGISTERS = (4, 8), (20.0, 1.0, 0.5)
"""Lanes of a warp that each take a row, and a column; as `OWN_REGISTERS`, with the next terms' values."""
DOUBLE = replace(WARPS[4], unit=125.0, port=90.0, overlap=0.14, round=298.0, begin=4700.0, fetch=530.0)
DOUBLE_REGISTERS = (26.0, 0.75, 0.75)
"""float64 on matrix units (128 a cycle), fitted to 80 schedules of ten products and convolutions (10 % off; the
schedule with the least cycles took at most 6 % more than the fastest); as `OWN_REGISTERS`, of two steps."""
BUSY = 32.0
"""Cycles of a unit for 16x8 totals of float64 and eight terms."""
ISSUE, CHAIN, MEET, MEMBERS = 0.235, (70.0, 6.7), 408.0, 4.9
"""Of an instruction; cycles of one warp, which waits for itself: per instruction along the terms, per product of a
step; of warps that add up; of blocks that do, for every warp."""
OWN_REGISTERS, MOST_REGISTERS = (26.0, 0.18, 0.18), 255.0
"""Registers of a thread besides its totals: a base, per row, per column of a warp's tile (1,900 kernels: 10 % off)."""


def rates_of(counter: GemmProblem) -> CostCoefficients:
    """Of products by warps."""
    return FMA if counter.fma else DOUBLE if counter.double else WARPS[counter.item]


def registers_of(counter: GemmProblem, tiling: MmaTile) -> float:
    """Registers that a thread would take, without the addresses of its copies."""
    taken = FMA_REGISTERS if counter.fma else DOUBLE_REGISTERS if counter.double else OWN_REGISTERS
    high, wide = tiling.rows // tiling.warps[0], tiling.columns // tiling.warps[1]
    return taken[0] + high * wide / WARP * counter.total / 4 + taken[1] * high + taken[2] * wide


def warp_cycles(counter: GemmProblem, tiling: MmaTile) -> float:
    """Estimated cycles of a launch, and of the second one where terms are split."""
    rates = rates_of(counter)
    rows, columns, (along, across, deep) = tiling.rows, tiling.columns, tiling.warps
    high, wide, count = rows // along, columns // across, along * across * deep
    alone = bool(counter.fma) or counter.double  # nothing but the products of all warps decides
    registers = min(registers_of(counter, tiling), MOST_REGISTERS)
    tiles = counter.batch * -(-counter.rows // rows) * -(-counter.columns // columns)
    held = blocks_per_sm(counter.machine.threads_per_sm, tiling.threads, registers, block_smem(counter, tiling))
    blocks, even = tiles * tiling.split * tiling.cluster, FMA_EVEN if alone else EVEN
    beside, waves = occupancy(blocks, tiling.cluster, held, counter.machine.sms, even)
    line = tiling.terms * counter.item
    steps = line / STEP / deep  # instructions along the terms of a warp
    each = (high / 16) * (wide / 8)
    share, _ = k_tiles_per_split(counter.terms, tiling.terms, tiling.split * tiling.cluster)
    limits = [
        (-(-beside * count // 4) * 4 / count if alone else beside) * rows * columns * tiling.terms / rates.unit,
        beside * (count * (LANES[0] * high + LANES[1] * wide) / deep + rows + columns) * line / FMA.port
        if counter.fma
        else beside * (count * (high + wide) / deep + rows + columns) * line / rates.port,
        0.0 if alone else ISSUE * beside * count * steps * (2 * each + high * 5 / 16 + wide * 5 / 8) / 4,
        beside * global_bytes(counter.sides, rows, columns, tiling.terms, rates.short) / rates.cache,
        rates.round + steps * each * BUSY / 2 if counter.double else 0.0,
        0.0 if alone else rates.round + steps * (CHAIN[0] + CHAIN[1] * each),
        rates.fetch / (tiling.stages - 1) if share > tiling.stages - 1 else 0.0,
    ]
    made = float(counter.total * rows * columns)
    written = made * (1.0 if tiling.split > 1 else counter.results / max(1.0, counter.partial))
    leave = rates.leave + beside * written / tiling.cluster / rates.cache
    if deep > 1 or tiling.cluster > 1:
        leave += MEET * deep + beside * 2.0 * made * deep / rates.port
    if tiling.cluster > 1:
        leave += rates.cluster + rates.member * tiling.cluster
        leave += beside * (made * deep / rates.far + MEMBERS * count)
    begin = rates.begin + rates.warp * beside * count
    total = waves * (begin + share * _overlapped_max(limits, rates.overlap) + leave)
    return _whole(counter, rates, total, tiling.split)


# -- by warp groups ---------------------------------------------------------------------------------------------------
GROUPS = {
    "float32": CostCoefficients(
        459.0, 123.0, 447.0, 62.7, 2714.0, 0.5, 139.0, 765.0, 0.1, 1.06, 132.0, 1.7, 146.0, 2031.0, 435.0, 3041.0, 2.6
    ),
    "copied": CostCoefficients(
        2050.0, 182.0, 79.0, 27.0, 1310.0, 0.47, 1185.0, 28.0, 0.07, 1.14, 922.0, 2.9, 495.0, 583.0, 356.0, 3170.0, 3.0
    ),
    "rounded": CostCoefficients(
        887.0, 151.0, 68.0, 12.5, 1812.0, 0.5, 1015.0, 40.0, 0.35, 0.4, 546.0, 2.7, 292.0, 419.0, 144.0, 4580.0, 2.4
    ),
}
"""Float32 that threads round and store, 16-bit types that are copied, float32 with rounded weights (few blocks)."""
STORE, TURN, GAP = 0.37, 9.1, {"float32": 51.0, "copied": 19.0, "rounded": 46.0}
"""What rounding and storing float32 takes beside the units, in passes through the port; of turned tiles, over that;
cycles per group of instructions of 64 rows that nobody hides where a multiprocessor has one block."""
PUSH, LATE = {"rounded": (721.0, 54.0), "copied": (781.0, 200.0)}, 42.0
"""Of blocks that store into each other's memory: all, each (of 16-bit floats fitted to 152 schedules of 16 layers of
networks at batch 1); of asking late for what is added to rounded products."""
BEFORE = 400.0
"""Of a norm before 16-bit floats, for 64 rows of a group and a line of terms: they are computed one by one, in every
block (43 kernels of DenseNet121 at batch 1: 0.36 us more for every line, where a product alone takes 0.13)."""


def coefficient_set(counter: GemmProblem, tiling: WgmmaTile) -> str:
    """Which constants are a schedule's."""
    return "copied" if counter.item == 2 else "rounded" if tiling.rounded else "float32"


def group_registers(counter: GemmProblem, tiling: WgmmaTile) -> float:
    """32-bit registers of a thread, as the assembler takes them on average."""
    totals = tiling.rows * tiling.columns / tiling.threads
    high = tiling.rows / tiling.groups[0] / HIGH
    if counter.item == 2:
        return 37 + totals + 4.3 * high
    if tiling.rounded:
        return min(FILE / tiling.threads, 248.0, 42 + totals + 6.3 * high * tiling.group)
    total = 27.4 + 1.03 * totals
    share, _ = k_tiles_per_split(counter.terms, tiling.terms, tiling.split * tiling.cluster)
    for side, size in zip(counter.sides, (tiling.rows, tiling.columns), strict=True):
        words = size * tiling.terms / tiling.threads  # of a tile on its way
        total += 0.0 if side.along_terms else 0.8
        if share > 1:
            total += words * (0.85 if side.along_terms else 1.29)
            total += words * 0.88 * max(0, min(tiling.flight, share) - 1)
        if side.along_terms and side.run != counter.terms:  # taps: addresses
            total += 16.5 + 0.83 * words
    return min(FILE / tiling.threads, 248.0, total)


def group_cycles(counter: GemmProblem, tiling: WgmmaTile, shared: int, *, before: bool = False) -> float:
    """Estimated cycles of a launch, and of the second one where terms are split.

    Args: shared: bytes of a block; before: whether something is computed before the product.
    """
    kind = coefficient_set(counter, tiling)
    rates, raw = GROUPS[kind], kind == "float32"
    rows, columns, line = tiling.rows, tiling.columns, tiling.terms * counter.item
    tiles = counter.batch * -(-counter.rows // rows) * -(-counter.columns // columns)
    registers = group_registers(counter, tiling)
    held = blocks_per_sm(counter.machine.threads_per_sm, tiling.threads, registers, shared)
    beside, waves = occupancy(tiles * tiling.split * tiling.cluster, tiling.cluster, held, counter.machine.sms)
    share, _ = k_tiles_per_split(counter.terms, tiling.terms, tiling.split * tiling.cluster)
    ahead = tiling.stages - 1 if raw else tiling.stages if tiling.stages >= share else tiling.stages - 2
    limits = [
        beside * rows * columns * tiling.terms / rates.unit,
        beside * (rows / HIGH * (HIGH + columns) + (rows + columns) * (2 if raw else 1)) * line / rates.port,
        beside * global_bytes(counter.sides, rows, columns, tiling.terms, rates.short) / rates.cache,
        rates.fetch / max(1, ahead) + rates.round,
    ]
    inner = _overlapped_max(limits, rates.overlap)
    if raw:
        sizes = zip(counter.sides, (rows, columns), strict=True)
        stored = sum(size * line * (1.0 if side.along_terms else TURN) for side, size in sizes)
        inner += beside * STORE * stored / LINE
    if beside == 1:  # nobody else fills the gaps between instructions
        inner += GAP[kind] * line / STEP / tiling.group * (rows // tiling.groups[0] // HIGH)
    if before and kind == "copied":
        inner += BEFORE * beside * line / LINE * (rows // tiling.groups[0] // HIGH)
    written = 4.0 * rows * columns * (1.0 if tiling.split > 1 else counter.results / max(1.0, counter.partial))
    leave = rates.leave + beside * written / tiling.cluster / rates.cache
    leave += LATE if tiling.rounded and not tiling.early else 0.0
    if tiling.cluster > 1:
        meet, member = PUSH[kind] if tiling.push else (rates.cluster, rates.member)
        leave += meet + member * tiling.cluster + beside * 4.0 * rows * columns / rates.far
    begin = rates.begin + rates.warp * beside * tiling.threads / WARP
    return _whole(counter, rates, waves * (begin + share * inner + leave), tiling.split)
