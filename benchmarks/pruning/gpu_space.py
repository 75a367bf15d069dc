"""Schedules of the pruning study on a GPU, drawn without the model from all that the forms can express.

`draw` gives one legal schedule of a program; `record` and `rebuilt` write a schedule down and make it again.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from jcuts.base.errors import JcutsError, Refusal
from jcuts.codegen.cuda.launch_source import emit_source
from jcuts.codegen.cuda.split_kernels import split_into_kernels
from jcuts.kernel_ir.loop_transforms import collapse_program
from jcuts.kernel_ir.program import Phase, Program
from jcuts.lower.patterns.attention import match
from jcuts.lower.patterns.few_channel_conv import as_few_channel_conv
from jcuts.lower.patterns.gemm import ROWS, as_gemm, gemm_operands
from jcuts.lower.patterns.inverted_residual import InvertedResidual, match_inverted_residual
from jcuts.lower.reduction import welford
from jcuts.schedule.gpu import candidates as gpu_candidates
from jcuts.schedule.gpu import contraction, launch_shapes
from jcuts.schedule.gpu import machine as gpu_machine
from jcuts.schedule.gpu.attention import schedules as attention_schedules
from jcuts.schedule.gpu.attention.tile import FlashTile
from jcuts.schedule.gpu.conv import few_channels
from jcuts.schedule.gpu.conv.few_channels_tile import FewChannelTile, conv_geometry
from jcuts.schedule.gpu.gemm.problem import STEP, MmaTile
from jcuts.schedule.gpu.gemm.wgmma_problem import WgmmaProblem
from jcuts.schedule.gpu.gemm.wgmma_tile import WgmmaTile
from jcuts.schedule.gpu.inverted_residual import schedules as inverted_residual_schedules
from jcuts.schedule.gpu.inverted_residual.tile import InvertedResidualTile
from jcuts.schedule.gpu.machine import GpuMachine, scheduled, tiled, transposed_axis, unroll_period
from jcuts.schedule.gpu.reduction import row as gpu_row
from jcuts.schedule.gpu.window import schedules as window_schedules

MACHINE = GpuMachine.named("H200")
THREADS = (32, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
MOST_SHARED = 227 << 10
MOST_UNROLLED = 600
"""Products of matrix units that one thread's code may have: more takes the assembler seconds."""
Draw = Callable[[random.Random], Program | None]


def space_of(program: Program) -> Draw:
    """Draws of a program: schedules that may be illegal, or None."""
    if program.template == "attention":
        return _attention(program)
    if program.template == "block":
        return _block(program)
    made = as_gemm(program) if program.template in ("contraction", "convolution") else None
    if made is not None and any(True for _ in contraction.contraction_schedules(made, MACHINE)):
        return _product(made)
    patched = as_few_channel_conv(program) if program.template == "convolution" else None
    if patched is not None:
        return _patch(patched)
    phase = program.phases[0]
    if len(program.phases) > 1:
        if {g.axis for g in program.grid} == set(program.serial):
            return lambda rng: _team(program, rng)
        return _column_rows(collapse_program(program))
    if phase.reds and gpu_row.reduces_rows(phase) and _terms(phase) > gpu_machine.TAPS:
        return lambda rng: _team(program, rng)
    plain = collapse_program(program)
    phase = plain.phases[0]
    if not phase.reds:
        return lambda rng: _transposed(plain, rng) if rng.random() < 0.3 else _point(plain, rng)
    if _terms(phase) <= gpu_machine.TAPS:
        return lambda rng: _walk(plain, rng) if rng.random() < 0.5 else _point(plain, rng)
    return _columns(plain)


def draw(space: Draw, rng: random.Random) -> Program | None:
    """One draw; None where it is no legal schedule."""
    try:
        found = space(rng)
        return found if found is not None and legal(found) else None
    except ZeroDivisionError:
        return None


def legal(program: Program) -> bool:
    """Whether code can be emitted, and a block's shared memory is there (spills show later)."""
    try:
        found, _ = split_into_kernels(program)
        return all(emit_source(part.program).shared <= MOST_SHARED for part in found)
    except (JcutsError, KeyError, StopIteration, IndexError, AssertionError):
        return False


def scratch_of(program: Program) -> int:
    """Bytes of scratch memory of a call."""
    return split_into_kernels(program)[1]


# -- matrix units -----------------------------------------------------------------------------------------------------
def _product(made: Program) -> Draw:
    grouped = WgmmaProblem(made, MACHINE)
    extents = made.phases[0].ranges()
    item = gemm_operands(made)[0].item

    def groups(rng: random.Random) -> Program | None:
        along, across = rng.choice((1, 1, 2, 2, 3, 4)), rng.choice((1, 1, 1, 1, 2))
        rows = 64 * along * rng.choice((1, 1, 1, 2))
        columns = 8 * across * rng.choice((2, 4, 6, 8, 8, 12, 12, 16, 16, 16, 20, 24, 24, 32, 32))
        if rows >= 2 * max(64, grouped.rows) or columns >= 2 * grouped.columns or rows * columns > along * across << 14:
            return None
        terms = rng.choice((1, 1, 1, 2)) * 128 // item
        cluster = rng.choice((1, 1, 2, 2, 3, 4, 5, 6, 7, 8))
        split = 1 if cluster > 1 else rng.choice((1, 1, 1, 1, 2, 3, 4, 6))
        through = item == 4 and not grouped.rounded
        stages = rng.choice((2, 3)) if through else rng.choice((3, 3, 4, 4, 5, 6, 8))
        more: dict[str, int] = {}
        if grouped.rounded:
            push = int(cluster > 1 and rng.random() < 0.6)
            more = {
                "rounded": 1,
                "spread": rng.randint(0, 1),
                "steps": rng.choice((0, 0, 1, 2)),
                "push": push,
                "early": rng.randint(0, 1),
                "cached": rng.randint(0, 1),
            }
            if more["steps"] == 0 and rng.random() < 0.7:
                more["spread"] = 0
        tiling = WgmmaTile(
            rows,
            columns,
            terms,
            (along, across),
            stages,
            rng.choice((1, 1, 2, 3)) if through else 0,
            split,
            cluster,
            **more,
        )
        return tiling.of(made) if grouped.registers(replace(tiling, flight=min(tiling.flight, 1))) <= 255 else None

    def warps(rng: random.Random) -> Program | None:
        sizes = (16, 32, 32, 48, 64, 64, 80, 96, 128, 128, 160, 192, 256)
        rows, columns = rng.choice(sizes), rng.choice(sizes)
        high, wide = rng.choice((16, 32, 32, 48, 64, 64, 96)), rng.choice((16, 32, 32, 48, 64, 64, 96))
        if (rows > 16 and rows >= 2 * extents[ROWS]) or rows % high or columns % wide or high * wide > 64 * 64:
            return None
        deep, size = rng.choice((1, 1, 1, 2, 4)), rng.choice((32, 64, 64, 128, 128, 256))
        count = rows // high * (columns // wide) * deep
        cluster = rng.choice((1, 1, 1, 2, 3, 4, 8))
        split = 1 if cluster > 1 else rng.choice((1, 1, 1, 2, 3, 4, 6, 8))
        if not 1 <= count <= 16 or size % (STEP * deep):
            return None
        tiling = MmaTile(
            rows,
            columns,
            size // item,
            (rows // high, columns // wide, deep),
            rng.choice((2, 3, 3, 4, 6)),
            split,
            cluster,
        )
        return tiling.of(made)

    return lambda rng: groups(rng) if rng.random() < 0.4 else warps(rng)


def _patch(made: Program) -> Draw:
    found = conv_geometry(made)

    def drawn(rng: random.Random) -> Program | None:
        rows = 1 if found.rows == 1 else rng.choice((1, 2, 3, 4, 4, 6, 7, 8, 8, 14, 16))
        pixels, columns = 16 * rng.choice((1, 1, 2, 2, 3, 4, 4, 7, 8)), 16 * rng.choice((1, 2, 2, 3, 4, 4, 6, 8))
        if columns >= found.columns + 16 or pixels >= 2 * max(16, found.outputs):
            return None
        down = [w for w in (1, 2, 3, 4, 6, 7, 8) if rows % w == 0]
        beside = [w for w in (1, 2, 3, 4, 7, 8) if pixels % (16 * w) == 0]
        across = [w for w in (1, 2, 3, 4, 6, 8) if columns % (16 * w) == 0]
        warps = (rng.choice(down), rng.choice(beside), rng.choice(across))
        share = rng.choice((1, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32))
        shape = FewChannelTile(found, rows, pixels, columns, warps, rng.choice((1, 2)) if share > 1 else 1, share)
        if not shape.fits or shape.shared > MOST_SHARED or not 1 <= math.prod(warps) <= 16:
            return None
        unrolled = shape.steps * math.prod(shape.warp) // (16 * 8)
        return few_channels.apply_tile(made, shape) if unrolled <= MOST_UNROLLED else None

    return drawn


def _block(program: Program) -> Draw:
    known = match_inverted_residual(program)
    assert isinstance(known, InvertedResidual)

    def drawn(rng: random.Random) -> Program | None:
        outputs, (count, *_) = known.window.outputs, known.window.image
        edges = (2, 4, 4, 7, 7, 8, 14, 14, 16, 28)
        rows, columns = rng.choice(edges), rng.choice(edges)
        images = rng.choice((1, 1, 2, 4)) if rows >= outputs[0] and columns >= outputs[1] else 1
        if rows >= 2 * outputs[0] or columns >= 2 * outputs[1] or images > count or images * rows * columns > 512:
            return None
        chunk, warps = rng.choice((16, 32, 32, 48, 64, 96)), rng.choice((2, 4, 4, 6, 7, 8, 8, 12, 14, 16))
        first = rng.choice([a for a in (1, 2, 3, 4, 6) if warps % a == 0])
        second = rng.choice([a for a in (1, 2, 3, 4, 6, 7, 8) if warps % a == 0])
        strip = (
            rng.choice([n for n in (1, 2, 4, 7, 8) if rows % n == 0]),
            rng.choice([n for n in (1, 2, 4, 7, 8) if columns % n == 0]),
        )
        shape = InvertedResidualTile(
            known,
            images,
            rows,
            columns,
            chunk,
            (warps // first, first),
            (warps // second, second),
            strip,
            rng.random() < 0.5,
            rng.choice((1, 1, 2, 3, 4)),
        )
        wide = shape.chunk // shape.expand[1] // 8
        unrolled = (
            shape.m_fragments_in * wide * shape.padded_in_channels // 8
            + shape.m_fragments_out * shape.n_per_warp // 8 * shape.chunk // 8
        )
        if not shape.fits or chunk >= known.expanded_channels + 16 or shape.shared > MOST_SHARED or unrolled > 800:
            return None
        if shape.threads * shape.beside > 2048 or shape.beside * (shape.shared + 1024) > 228 << 10:
            return None
        registers = inverted_residual_schedules._registers(shape)
        return (
            inverted_residual_schedules.of(program, shape)
            if shape.beside * shape.threads * registers <= 1.3 * 65536
            else None
        )

    return drawn


def _attention(program: Program) -> Draw:
    known = match(program)
    assert not isinstance(known, Refusal)

    def drawn(rng: random.Random) -> Program | None:
        high, wide = rng.choice((16, 16, 32, 48)), rng.choice((16, 32, 32, 48, 64, 64, 96, 128))
        along, across = rng.choice((1, 2, 2, 3, 4, 4, 5, 6, 7, 8, 12)), rng.choice((1, 1, 1, 2, 2, 3, 4, 6, 8))
        early = known.kind == "tf32" and rng.random() < 0.5
        shape = FlashTile(known, high * along, wide * across, (along, across), rng.choice((2, 2, 3, 4, 5)), early)
        if not shape.fits or not 1 <= along * across <= 16 or shape.shared > MOST_SHARED:
            return None
        if attention_schedules.registers(shape) > min(270.0, 1.1 * attention_schedules.register_budget(shape)):
            return None
        return attention_schedules.apply_tile(program, shape)

    return drawn


# -- points and walks -------------------------------------------------------------------------------------------------
def _terms(phase: Phase) -> int:
    return math.prod(r.extent for r in phase.reds)


def _point(plain: Program, rng: random.Random) -> Program | None:
    phase = plain.phases[0]
    axes = list(phase.axes)
    if rng.random() < 0.15:
        rng.shuffle(axes)
    unroll = {}
    for axis in axes:
        unroll[axis.name] = rng.choice([1, 2, 4, 8, 16] if axis is axes[-1] else [1, 1, 1, 2, 3, 4, 5, 7, 8])
        if unroll[axis.name] > axis.extent:
            return None
    tile = math.prod(unroll.values())
    if tile + tile * _terms(phase) / 2 > 3 * window_schedules.REGISTERS:
        return None
    reds = tuple(replace(r, unroll=r.extent, chains=1) for r in phase.reds)
    ordered = tuple(replace(a, unroll=unroll[a.name]) for a in axes)
    threads = rng.choice(THREADS)
    more: tuple[tuple[str, object], ...] = ()
    if len(axes) > 1 and rng.random() < 0.4:
        along = rng.choice([2, 4, 8, 16, 32])
        other = rng.choice(axes[:-1])
        if threads % along == 0 and threads // along >= 2:
            more = (("block", ((other.name, along), (axes[-1].name, threads // along))),)
    made = replace(plain, phases=(replace(phase, axes=ordered, reds=reds),))
    return scheduled(made, "point", threads, *more)


def _walk(plain: Program, rng: random.Random) -> Program | None:
    """Threads that walk along one of the axes that the window slides along."""
    program = window_schedules.fully_unrolled(plain)
    phase = program.phases[0]
    lane = phase.axes[-1]
    slid = window_schedules._reuse_axes(phase, lane.name)
    if not slid:
        return None
    unroll = {lane.name: rng.choice((1, 2, 4, 4, 4, 8))}
    for axis in slid:
        unroll[axis.name] = rng.choice((1, 1, 2, 2, 3, 4, 5, 7, 8))
        if axis.extent % unroll[axis.name] or unroll[axis.name] % unroll_period(phase, axis.name):
            return None
    along = rng.choice((slid[0], slid[0], slid[0], slid[-1]))
    count = along.extent // unroll[along.name]
    if lane.extent % unroll[lane.name] or count < 2:
        return None
    tile, values = math.prod(unroll.values()), window_schedules.window_values(phase, unroll)
    if tile + values > 2 * window_schedules.REGISTERS or tile * _terms(phase) > 500:
        return None
    made = window_schedules.unrolled(program, unroll)
    tiles = -(-count // rng.choice((1, 1, 2, 2, 3, 4, 5, 7, 8)))
    if tiles < 2:
        return None
    threads = rng.choice((64, 96, 128, 128, 192, 256, 512))
    return scheduled(made, "point", threads, ("walk", (along.name, tiles)), ("ahead", rng.choice((0, 1, 1, 2))))


def _transposed(plain: Program, rng: random.Random) -> Program | None:
    phase = plain.phases[0]
    lane = phase.axes[-1]
    crossed = transposed_axis(phase, lane.name)
    if crossed is None:
        return None
    rows, columns = (rng.choice((8, 16, 32, 64, 128)) for _ in range(2))
    vector = rng.choice((1, 2, 4))
    params = (("crossed", crossed.name), ("rows", rows), ("columns", columns))
    return scheduled(tiled(plain, {lane.name: vector}, {}), "transposed", rng.choice(THREADS), *params)


# -- rows and columns -------------------------------------------------------------------------------------------------
def _team(program: Program, rng: random.Random) -> Program | None:
    _, length = launch_shapes.row_shape(program)
    vector, team, chunks = rng.choice([1, 2, 4, 8]), rng.choice(gpu_row.TEAMS), rng.randint(1, 16)
    if length % vector or vector * chunks > 2 * gpu_machine.RESIDENT:
        return None
    threads = team if team > 32 else team * rng.choice([k for k in (1, 2, 4, 8, 16, 32) if team * k % 32 == 0])
    phase = program.phases[0]
    more: tuple[tuple[str, object], ...] = ()
    if len(program.phases) == 1 and not any(acc.index_dtype for acc in phase.accs):
        split = round(2 ** rng.uniform(-6, 12))
        if 1 < split < length // vector:
            more = (("split", split),)
    shape = (("team", team), ("vector", vector), ("chunks", chunks))
    return scheduled(program, "team", threads, *shape, *more)


def _columns(plain: Program) -> Draw:
    """Long sums whose terms lie far apart: blocks of columns, walks of gradients, single threads."""
    from jcuts.schedule.gpu.reduction.column import _column_tiles, innermost
    from jcuts.schedule.gpu.window import filter_gradient

    phase = plain.phases[0]
    phase = replace(phase, reds=tuple(sorted(phase.reds, key=lambda r: innermost(phase, r.name))))
    program = replace(plain, phases=(phase,))
    lane = phase.axes[-1]
    taps = filter_gradient.taps_of(phase)
    tiles = _column_tiles(phase)

    def drawn(rng: random.Random) -> Program | None:
        if not taps and rng.random() < 0.15:
            return _point_columns(program, rng)
        vector, across = rng.choice((1, 2, 2, 4, 4, 8)), rng.choice((4, 8, 12, 16, 24, 32, 48, 64, 96, 128))
        threads = rng.choice(THREADS)
        split = max(1, round(2 ** rng.uniform(0, 12)))
        if lane.extent % vector or across * vector > threads or across > 2 * lane.extent // vector:
            return None
        more: list[tuple[str, object]] = [("across", across)]
        if taps and rng.random() < 0.5:
            last, others = filter_gradient.inner_reduction(phase, taps)
            wide, rows = rng.choice((2, 4, 7, 8)), rng.choice((1, 2, 4))
            pieces = rng.choice((1, 2, 4, 7))
            if not others or last.extent % wide or others[-1].extent % (pieces * rows):
                return None
            down = others[-1]
            tile = {last.name: wide, down.name: down.extent // pieces}
            more += [("flight", 1), ("split", split), ("walk", (down.name, rows)), ("ahead", rng.choice((1, 2)))]
            if split == 1:
                return None
            return scheduled(tiled(program, {**taps, lane.name: vector}, tile), "columns", threads, *more)
        held, tile = rng.choice(tiles)
        inside = math.prod(tile.values())
        more += [("flight", 1 if inside > 1 else rng.choice((1, 2, 4, 4, 8, 16)))]
        more += [("split", split)] if split > 1 else []
        return scheduled(tiled(program, {**held, lane.name: vector}, tile), "columns", threads, *more)

    return drawn


def _point_columns(plain: Program, rng: random.Random) -> Program | None:
    phase = plain.phases[0]
    lane = phase.axes[-1]
    vector = rng.choice([1, 2, 4, 8])
    if lane.extent % vector:
        return None
    deep = rng.choice([1, 2, 4, 8, 16, 32])
    reds = tuple(
        replace(r, unroll=min(deep, r.extent) if k == len(phase.reds) - 1 else 1) for k, r in enumerate(phase.reds)
    )
    axes = tuple(replace(a, unroll=vector if a is lane else 1) for a in phase.axes)
    split = round(2 ** rng.uniform(4, 12))
    made = replace(plain, phases=(replace(phase, axes=axes, reds=reds),))
    return scheduled(made, "point", rng.choice(THREADS), ("split", split))


def _column_rows(plain: Program) -> Draw:
    phase = next(p for p in plain.phases if p.reds)
    lane = phase.axes[-1]
    length = math.prod(r.extent for r in phase.reds)
    known = welford.match_welford(plain) is not None

    def drawn(rng: random.Random) -> Program | None:
        vector, across = rng.choice((1, 2, 2, 4, 4, 8)), rng.choice((2, 4, 8, 12, 16, 24, 32, 48, 64))
        threads, chunks = rng.choice(THREADS), rng.choice((1, 2, 3, 4, 6, 8, 8, 12, 16, 24))
        unit = 32 // math.gcd(across, 32)
        deep = threads // across // unit * unit
        if deep < vector or lane.extent % vector or across * vector > 2 * lane.extent or chunks * vector > 64:
            return None
        params: tuple[tuple[str, object], ...] = (("across", across), ("vector", vector), ("chunks", chunks))
        if known and rng.random() < 0.75:
            split = round(2 ** rng.uniform(1, 9))
            if split >= length // deep:
                return None
            return scheduled(plain, "moments", across * deep, *params, ("split", split))
        return scheduled(plain, "column_rows", across * deep, *params)

    return drawn


# -- on paper ---------------------------------------------------------------------------------------------------------
def record(program: Program) -> dict[str, Any]:
    """What `rebuilt` needs to make the schedule again."""
    phases = [
        [[[a.name, a.unroll] for a in p.axes], [[r.name, r.unroll, r.chains] for r in p.reds]] for p in program.phases
    ]
    return {"digest": program.digest[:16], "params": [list(x) for x in program.params], "phases": phases}


def rebuilt(program: Program, found: dict[str, Any]) -> Program | None:
    """The schedule of an unscheduled program that a record tells of; None where it comes out differently."""
    params = tuple((str(name), _tuples(value)) for name, value in found["params"])
    for base in (as_gemm, as_few_channel_conv, collapse_program, lambda p: p):
        plain = base(program)
        if plain is None or len(plain.phases) != len(found["phases"]):
            continue
        phases = []
        for phase, (axes, reds) in zip(plain.phases, found["phases"], strict=True):
            known = {x.name: x for x in (*phase.axes, *phase.reds)}
            if {x[0] for x in (*axes, *reds)} != set(known):
                break
            phases.append(
                replace(
                    phase,
                    axes=tuple(replace(known[n], unroll=u) for n, u in axes),
                    reds=tuple(replace(known[n], unroll=u, chains=c) for n, u, c in reds),
                )
            )
        else:
            for grid in (plain.grid, ()):
                made = replace(plain, phases=tuple(phases), grid=grid, lanes=1, params=params)
                if made.digest[:16] == found["digest"]:
                    return made
    return None


def _tuples(value: Any) -> Any:
    return tuple(_tuples(x) for x in value) if isinstance(value, list) else value


def proposed(program: Program) -> list[str]:
    """What the tuner would measure: digests as records have them, best first."""
    from jcuts.base import knobs

    here = knobs.current()
    return [
        p.digest[:16] for p, _ in gpu_candidates.candidates(program, MACHINE, here.max_candidates, here.top_percent)
    ]


def pool(program: Program, count: int, seed: str) -> tuple[list[Program], list[str], dict[str, float]]:
    """Schedules of one operation: what the tuner would measure, what it ranks (at most a fifth), and draws.

    Returns: programs; digests of those that the tuner would measure, best first; scores of all that it ranks.
    """
    from jcuts.base import knobs

    here = knobs.current()
    ranked = gpu_candidates.candidates(program, MACHINE, 1 << 20)
    kept = [p for p, _ in gpu_candidates.candidates(program, MACHINE, here.max_candidates, here.top_percent)]
    rng = random.Random(seed)
    found = {p.digest: p for p in kept}
    rest = [p for p, _ in ranked if p.digest not in found]
    for p in rng.sample(rest, min(len(rest), count // 5)):
        found[p.digest] = p
    space = space_of(program)
    for _ in range(200 * count):
        if len(found) >= count:
            break
        made = draw(space, rng)
        if made is not None:
            found.setdefault(made.digest, made)
    few = len(kept)
    listed = list(found.values())
    return [*listed[:few], *_shuffled(listed[few:], rng)], [p.digest for p in kept], {p.digest: s for p, s in ranked}


def _shuffled(values: Sequence[Program], rng: random.Random) -> list[Program]:
    order = list(values)
    rng.shuffle(order)
    return order
