"""Online softmax state of a warp: row maxima, exponential sums and rescaled outputs; merging the states of split keys.

A lane has two rows of every sixteen, or one (`FlashTile.lane_rows`); four lanes share a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from jcuts.codegen.cuda.attention.kv_tiles import WIDEST
from jcuts.codegen.cuda.attention.score_mod import LEAST, Tile
from jcuts.codegen.cuda.graph.node_emitter import Emitter, store_all
from jcuts.codegen.cuda.ptx import global_memory as M
from jcuts.codegen.cuda.ptx import mma as ptx_mma
from jcuts.codegen.cuda.ptx import sfu_math
from jcuts.codegen.cuda.ptx.builder import GpuBuilder, asm
from jcuts.codegen.cuda.ptx.shuffle import WARP, shuffle, vote_all
from jcuts.codegen.llvm import elementwise as E
from jcuts.codegen.llvm import lanes as L
from jcuts.kernel_ir.index import Index
from jcuts.kernel_ir.node import Graph, Guard, Node
from jcuts.kernel_ir.program import Buffer
from jcuts.lower.patterns.attention import Attention
from jcuts.lower.patterns.gemm import ROWS
from jcuts.schedule.gpu.attention.tile import EIGHT, FOUR, SIXTEEN, FlashTile

NEGLIGIBLE = 150
"""Scores this far below their row's maximum have no weight."""
LOWEST = -(10**30)
"""No row's maximum is lower once it has seen a key."""


@dataclass
class OnlineSoftmaxState:
    """A warp's running online-softmax state.

    Attributes:
        largest: maximum score of each of the lane's rows.
        sums: sum of exponentials per row.
        out: accumulators of the values.
    """

    largest: list[L.Value]
    sums: list[L.Value]
    out: Tile

    def values(self) -> list[L.Value]:
        """The state as one flat list of values."""
        return [*self.largest, *self.sums, *(v for row in self.out for tile in row for v in tile)]

    @staticmethod
    def of(values: Sequence[L.Value], shape: FlashTile) -> OnlineSoftmaxState:
        """The inverse of `values`."""
        rows = shape.lane_rows * shape.warp[0] // SIXTEEN
        out = tiles_of(values[2 * rows :], rows // shape.lane_rows, 2 * shape.lane_rows)
        return OnlineSoftmaxState(list(values[:rows]), list(values[rows : 2 * rows]), out)

    @staticmethod
    def none(shape: FlashTile) -> OnlineSoftmaxState:
        """The initial state, before the first key."""
        rows = shape.lane_rows * shape.warp[0] // SIXTEEN
        out = [L.F32(0.0)] * (rows * shape.padded_head_dim // EIGHT * 2)
        return OnlineSoftmaxState.of([*[LEAST] * rows, *[L.F32(0.0)] * rows, *out], shape)


def tiles_of(values: Sequence[L.Value], bands: int, each: int) -> Tile:
    """Accumulators as 16-row tiles, from one flat list. Args: each: of them in a tile."""
    tiles = [list(values[k : k + each]) for k in range(0, len(values), each)]
    across = len(tiles) // bands
    return [tiles[k : k + across] for k in range(0, len(tiles), across)]


def softmax(
    builder: GpuBuilder, state: OnlineSoftmaxState, scores: Tile
) -> tuple[OnlineSoftmaxState, list[list[L.Value]]]:
    """Updates the state with a tile of scores: the state without its PV sums, and the weights of the lane's rows."""
    rows = _lane_rows(scores)
    made, factors, weights = OnlineSoftmaxState([], [], []), [], []
    for row, old, total in zip(rows, state.largest, state.sums, strict=True):
        most = larger(builder, old, quad_reduce(builder, _pairwise(row, lambda a, b: larger(builder, a, b)), larger))
        base = _finite(builder, most)
        factors.append(sfu_math.fast_exp_nonpositive(builder, builder.fsub(old, base)))
        weights.append([sfu_math.fast_exp_nonpositive(builder, builder.fsub(score, base)) for score in row])
        made.largest.append(most)
        made.sums.append(builder.fadd(builder.fmul(total, factors[-1]), _pairwise(weights[-1], builder.fadd)))
    made.out = scaled(builder, state.out, factors)
    return made, weights


def is_negligible(builder: GpuBuilder, state: OnlineSoftmaxState, score: float) -> L.Value:
    """Whether scores up to a bound have no weight in any row of a warp: its state stays (``vote.sync.all``)."""
    holds: L.Value = L.I1(1)
    least = L.F32(max(score, LOWEST) + NEGLIGIBLE)
    for largest in state.largest:
        holds = builder.and_(holds, builder.fcmp_ordered(">=", largest, least))
    return vote_all(builder, holds)


def _lane_rows(scores: Tile) -> list[list[L.Value]]:
    """The lane's scores by row."""
    halves = [(band, first) for band in scores for first in range(0, len(band[0]), 2)]
    return [[value for tile in band for value in tile[first : first + 2]] for band, first in halves]


def larger(builder: GpuBuilder, a: L.Value, b: L.Value) -> L.Value:
    """The larger of two scores; a NaN wins."""
    return asm(builder, "max.NaN.f32 $0, $1, $2;", L.F32, [a, b])


def quad_reduce(
    builder: GpuBuilder, value: L.Value, join: Callable[[GpuBuilder, L.Value, L.Value], L.Value]
) -> L.Value:
    """Reduces over the four lanes that share a row (``shfl.sync``)."""
    for distance in (1, 2):
        value = join(builder, value, shuffle(builder, value, distance))
    return value


def scaled(builder: GpuBuilder, out: Tile, factors: Sequence[L.Value]) -> Tile:
    """Accumulators times a factor per row."""
    rows = len(factors) // len(out)
    return [
        [[builder.fmul(v, factors[rows * i + k // 2]) for k, v in enumerate(tile)] for tile in row]
        for i, row in enumerate(out)
    ]


def _pairwise(values: list[L.Value], join: Callable[[L.Value, L.Value], L.Value]) -> L.Value:
    """Tree reduction of all values."""
    while len(values) > 1:
        values = [join(*values[k : k + 2]) if k + 1 < len(values) else values[k] for k in range(0, len(values), 2)]
    return values[0]


def _finite(builder: GpuBuilder, most: L.Value) -> L.Value:
    """The row maximum, 0 where it is still -inf, so that exponentials become 0 and not NaN."""
    return builder.select(builder.fcmp_ordered("==", most, LEAST), L.F32(0.0), most)


# -- warps that share keys ------------------------------------------------------------------------------------------
def store_state(builder: GpuBuilder, state: OnlineSoftmaxState, place: L.Value) -> None:
    """Stores a warp's state in shared memory, from this lane's address on (`OnlineSoftmaxState.values`, padded)."""
    words = state.values()
    words += [L.F32(0.0)] * (-len(words) % FOUR)
    for number, first in enumerate(range(0, len(words), FOUR)):
        ptx_mma.st_shared_v4_f32(builder, place, number * WIDEST * WARP, words[first : first + FOUR])


def load_state(
    builder: GpuBuilder, shape: FlashTile, place: L.Value, offset: int = 0, *, cluster: bool = False
) -> OnlineSoftmaxState:
    """A state that a warp of this block, or of the ``cluster``, has stored (`store_state`)."""
    starts = [offset + number * WIDEST * WARP for number in range(shape.state_words // FOUR)]
    fours = [ptx_mma.ld_shared_v4_f32(builder, place, start, cluster=cluster) for start in starts]
    words = [word for four in fours for word in four]
    return OnlineSoftmaxState.of(words[: len(OnlineSoftmaxState.none(shape).values())], shape)


def merge_states(builder: GpuBuilder, mine: OnlineSoftmaxState, other: OnlineSoftmaxState) -> OnlineSoftmaxState:
    """The state of the keys of two."""
    largest, sums, factors = [], [], []
    for r, most in enumerate(larger(builder, a, b) for a, b in zip(mine.largest, other.largest, strict=True)):
        base = _finite(builder, most)
        pair = [sfu_math.fast_exp_nonpositive(builder, builder.fsub(state.largest[r], base)) for state in (mine, other)]
        totals = [builder.fmul(state.sums[r], factor) for state, factor in zip((mine, other), pair, strict=True)]
        largest.append(most)
        sums.append(builder.fadd(*totals))
        factors.append(pair)
    ours = scaled(builder, mine.out, [pair[0] for pair in factors])
    theirs = scaled(builder, other.out, [pair[1] for pair in factors])
    out = [
        [[builder.fadd(v, w) for v, w in zip(*tiles, strict=True)] for tiles in zip(*rows, strict=True)]
        for rows in zip(ours, theirs, strict=True)
    ]
    return OnlineSoftmaxState(largest, sums, out)


# -- statistics of rows ---------------------------------------------------------------------------------------------
def store_row_values(
    frame: M.Frame,
    attention: Attention,
    buffers: Mapping[str, Buffer],
    down: int,
    values: tuple[L.Value, L.Value],
    mine: L.Value,
) -> None:
    """Stores the statistics of one row, ``down`` below the frame's.

    Args: values: maximum and sum; mine: a predicate.
    """
    phase = attention.statistics
    assert phase is not None
    where = {ROWS: Index.axis(ROWS) + down}
    graph, numbers = Graph(), dict[int, int]()
    emitter = Emitter(frame, graph, buffers)
    for number, node in enumerate(phase.exit.nodes):
        if node.op == "load":
            place = attention.row_values.index(node.buffer)
            numbers[number] = graph.add(Node("acc", "float32", attrs=(("number", place),)))
            emitter.bind(numbers[number], E.Lanes(values[place], "float32"))
        else:
            numbers[number] = graph.add(replace(node, args=tuple(numbers[a] for a in node.args)))
    there = M.condition(frame, [Guard(where[ROWS], None, attention.rows - 1)])
    frame.live = mine if there is None else frame.builder.and_(mine, there)
    rows = [(s.buffer, s.address.substitute(where, frame.ranges), numbers[s.value]) for s in phase.stores]
    store_all(emitter, rows)
