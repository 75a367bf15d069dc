"""Stages whose products are matrix products of tensor cores: rows that a step reads times weights that stay the same.

    sums[a][row, column] = sum over k of left[row, k] * weights_a[k, column]

Rows are those of ``mma``, padded to 16; its columns are a block's columns of all products that read the same rows, side
by side, in tiles of 8; the terms are divided over the warps of the block (split K), in groups of which a lane reads 16
neighbouring bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from jcuts.arch.sm_limits import SM_90
from jcuts.kernel_ir.node import Graph, Node
from jcuts.kernel_ir.program import ITEM_SIZE, Axis, Phase, Program, Red
from jcuts.lower.patterns.gemm import TYPES
from jcuts.lower.recurrence.program import STEP
from jcuts.schedule.gpu.machine import ACCESS, WARP
from jcuts.schedule.gpu.recurrence.parameters import MMA

SHORT = 32
"""Terms of a product, at most, that one thread adds up by itself."""
MOST_ROWS = 64
"""Rows of a stage that tensor cores multiply."""
M_TILE = 16
"""Rows of an ``mma``."""
HALF_TILE = 8
"""Rows that the lanes of a register of an ``mma`` have."""
N_TILE = 8
"""Columns of an ``mma``."""
LANES = 4
"""Lanes of a warp with different terms."""
WORDS = 4
"""Registers of a lane's access: two steps of ``mma``."""
WORD = 4
"""Bytes of a register, and of a sum."""
OTHER_REGISTERS = 32
"""Of a thread, beside fragments and sums: addresses, counters, what points need besides sums."""
LEAST_AT_ONCE = 4
"""Groups of terms under way, or all that a warp has: with fewer, steps wait for the L2 cache too often."""
QUARTERS = 4
"""Parts of an SM, each with registers for a quarter of the warps."""


@dataclass(frozen=True)
class StageProduct:
    """The products of a phase.

    Attributes:
        kind: operands' type of ``mma``. item: bytes of an element. steps: of the loop. axes: rows. lane: the columns.
        red: the terms.
        lefts: loads of rows, [row, term], terms side by side. weights: of each accumulator, the number of its rows'
            load, and the load of its weights.
    """

    kind: str
    item: int
    steps: int
    axes: tuple[Axis, ...]
    lane: Axis
    red: Red
    lefts: tuple[Node, ...]
    weights: tuple[tuple[int, Node], ...]

    @property
    def rows(self) -> int:
        """Their number."""
        return math.prod(axis.extent for axis in self.axes)


@dataclass(frozen=True)
class MmaStage:
    """A stage's products on the warps of a block.

    Attributes:
        number: of the phase. blocks: of the grid. across: columns of a block. warps: of a block.
        held: registers of a thread that other stages' weights take.
    """

    number: int
    product: StageProduct
    blocks: int
    across: int
    warps: int
    held: int = 0

    @property
    def width(self) -> int:
        """Columns of an accumulator side by side: a divisor or a multiple of those of an ``mma``."""
        lane = -(-self.product.lane.extent // N_TILE) * N_TILE
        return self.across if self.across < N_TILE else min(self.across, lane)

    @property
    def vector(self) -> int:
        """Terms of a lane's access."""
        return ACCESS // self.product.item

    @property
    def group(self) -> int:
        """Terms of an access of a warp: two steps of ``mma``."""
        return LANES * self.vector

    @property
    def share(self) -> int:
        """Groups of a warp."""
        return -(-self.product.red.extent // (self.group * self.warps))

    @property
    def halves(self) -> int:
        """Row blocks of 8: the upper one of the last 16 rows may lack."""
        return -(-self.product.rows // HALF_TILE)

    @property
    def row_tiles(self) -> int:
        """Tiles of 16 rows."""
        return -(-self.product.rows // M_TILE)

    def members(self, left: int) -> list[int]:
        """Accumulators that read the same rows."""
        return [number for number, (mine, _) in enumerate(self.product.weights) if mine == left]

    @property
    def tiles(self) -> tuple[int, ...]:
        """Tiles of 8 columns for each load of rows."""
        counts = (len(self.members(left)) for left in range(len(self.product.lefts)))
        return tuple(-(-count * self.width // N_TILE) for count in counts)

    @property
    def pairs(self) -> tuple[int, ...]:
        """Tiles of 16 columns for each load of rows."""
        return tuple(-(-tiles // 2) for tiles in self.tiles)

    @property
    def is_turned(self) -> bool:
        """Whether 16 columns of weights are the rows of an ``mma`` and 8 rows its columns: no more of them than in the
        other order, and a lane's words of a row are the operand as they were loaded.
        """
        return sum(self.pairs) * self.halves <= sum(self.tiles) * self.row_tiles

    @property
    def multiplied(self) -> int:
        """Products of a warp in a step of ``mma``."""
        return sum(self.pairs) * self.halves if self.is_turned else sum(self.tiles) * self.row_tiles

    @property
    def tile_bytes(self) -> int:
        """Of a tile of sums in shared memory: [row][column]."""
        return self.halves * HALF_TILE * N_TILE * WORD

    @property
    def warp_bytes(self) -> int:
        """Of a warp's sums in shared memory: [tile][row][column]."""
        return sum(self.tiles) * self.tile_bytes

    @property
    def sum_bytes(self) -> int:
        """Of the sums in shared memory."""
        return self.warps * self.warp_bytes

    @property
    def points(self) -> int:
        """Points of a block, those of columns beyond the end among them."""
        return self.product.rows * self.width

    @property
    def weight_registers(self) -> int:
        """Of a thread, over all steps."""
        return WORDS * self.share * (2 * sum(self.pairs) if self.is_turned else sum(self.tiles))

    @property
    def sum_registers(self) -> int:
        """Of a thread."""
        return WORDS * self.multiplied

    @property
    def at_once(self) -> int:
        """Groups of 16 rows that a thread has under way, as registers allow; 0: fewer than pays."""
        in_quarter = SM_90.registers_per_sm // (QUARTERS * WARP)
        most = min(SM_90.registers_per_thread, in_quarter // -(-self.warps // QUARTERS))
        left = most - OTHER_REGISTERS - self.held - self.weight_registers - self.sum_registers
        fit = left // (WORDS * min(2, self.halves) * len(self.product.lefts))
        return 0 if fit < min(self.share, LEAST_AT_ONCE) else min(fit, self.share * self.row_tiles)

    @property
    def pieces(self) -> list[tuple[range, range]]:
        """(tiles of rows, groups of terms) whose loads are under way together: whole tiles, or parts of one."""
        most, tiles, groups = max(1, self.at_once), self.row_tiles, self.share
        if most < groups:
            most = -(-groups // -(-groups // most))  # parts of the same size
            parts = [range(k, min(k + most, groups)) for k in range(0, groups, most)]
            return [(range(tile, tile + 1), part) for tile in range(tiles) for part in parts]
        high = most // groups
        return [(range(k, min(k + high, tiles)), range(groups)) for k in range(0, tiles, high)]


def columns_in(phase: Phase) -> int:
    """Columns of a phase's result."""
    return phase.axes[-1].extent if phase.axes and phase.axes[-1].name != STEP else 1


def columns_of(phase: Phase, blocks: int) -> int:
    """Neighbouring columns of a block: a power of two."""
    return 1 << (-(-columns_in(phase) // blocks) - 1).bit_length()


def is_short(phase: Phase) -> bool:
    """Whether a thread computes points by itself: no product, or one of few terms."""
    return math.prod(r.extent for r in phase.reds) <= SHORT


def stage_product(program: Program, phase: Phase) -> StageProduct | None:
    """A phase's products in this form; None where any has another, or where there is one float32 row.

    XLA does not round the operands of that (`rewrite.loops.step_precision`).
    """
    if is_short(phase) or len(phase.reds) != 1 or not phase.axes or phase.axes[-1].name == STEP:
        return None
    lane, rows = phase.axes[-1], tuple(axis for axis in phase.axes[:-1] if axis.name != STEP)
    count = math.prod(axis.extent for axis in rows)
    if count > MOST_ROWS:
        return None
    lefts: list[Node] = []
    weights: list[tuple[int, Node]] = []
    for acc in phase.accs:
        pair = _factors(phase.body, acc.values[0]) if acc.combine == "add" and acc.dtype == "float32" else None
        if pair is None:
            return None
        found = [(x, w) for x, w in (pair, pair[::-1]) if _is_pair(program, phase, x, w)]
        if not found:
            return None
        left, weight = found[0]
        if left not in lefts:
            lefts.append(left)
        weights.append((lefts.index(left), weight))
    kinds = {node.dtype for node in (*lefts, *(weight for _, weight in weights))}
    if len(kinds) != 1 or not kinds <= TYPES.keys():
        return None
    (dtype,) = kinds
    if dtype == "float32" and count == 1:
        return None
    steps = phase.ranges().get(STEP, 1)
    return StageProduct(TYPES[dtype], ITEM_SIZE[dtype], steps, rows, lane, phase.reds[0], tuple(lefts), tuple(weights))


def mma_stages(program: Program, blocks: int, threads: int) -> list[MmaStage]:
    """The stages of a scheduled loop that tensor cores multiply: those of the type that the schedule names."""
    kind = dict(program.params).get(MMA)
    found = []
    for number, phase in enumerate(program.phases) if kind else ():
        product = stage_product(program, phase)
        if product is not None and product.kind == kind:
            found.append(MmaStage(number, product, blocks, columns_of(phase, blocks), threads // WARP))
    if len(found) > 1 and threads:
        total = sum(stage.weight_registers for stage in found)
        found = [replace(stage, held=total - stage.weight_registers) for stage in found]
    return found


def _factors(body: Graph, value: int) -> tuple[Node, Node] | None:
    """The two loads that a value is the product of, as they lie in memory."""
    product = body.nodes[value]
    if product.op != "mul":
        return None
    found = []
    for number in product.args:
        node = body.nodes[number]
        if node.op == "widen":
            node = body.nodes[node.args[0]]
        if node.op != "load" or node.guards or node.index is None or node.index.values():
            return None
        found.append(node)
    return found[0], found[1]


def _is_pair(program: Program, phase: Phase, left: Node, weight: Node) -> bool:
    """Whether a load is one of rows, terms side by side, and the other one of weights that stay the same."""
    assert left.index is not None and weight.index is not None
    lane, red = phase.axes[-1].name, phase.reds[0].name
    return (
        program.buffer(weight.buffer).role == "in"
        and weight.index.axes() <= {lane, red}
        and bool(weight.index.stride(lane) and weight.index.stride(red))
        and lane not in left.index.axes()
        and left.index.stride(red) == 1
    )
