"""Candidate schedules of a program for a GPU, best estimate first.

Three forms (`codegen.cuda`): *point*, in which a thread computes a register tile of output points by itself, *team*, in
which threads share the points of a reduced row, and *columns*, in which they share those of neighbouring outputs.  A
schedule is data in the program: ``params`` name the form, the
threads of a block and how rows are shared; ``unroll`` of the axes is the register tile.  Programs that no form fits get
no candidate and stay with XLA: dense products and convolutions are the vendor libraries' for now.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from jcuts.arch.load import list_gpus, load_gpu
from jcuts.dfg.index import Index
from jcuts.dfg.node import Node
from jcuts.dfg.program import ITEM_SIZE, Axis, Phase, Program
from jcuts.region import scan_gpu, statistics
from jcuts.region.graph import MOST_SWITCHED
from jcuts.region.scan_names import LANE, TIME
from jcuts.region.schedule import collapsed, rewritten

ACCESS = 16  # bytes of the widest access
TAPS = 64  # terms of a window that are unrolled in a thread; longer reductions are shared by a team
REGISTERS = 128  # 32-bit values that a tile may keep: twice that fits, but leaves few warps
RESIDENT = 32  # elements of a row that one thread keeps in registers
IN_FLIGHT = 6 << 20  # bytes: memory bandwidth times latency of the largest GPUs, with room
WARP = 32
SWITCH = "part"  # the axis that numbers a concatenation's operands
SHARED = 40 << 10  # bytes of shared memory that partial results of a block may take
TEAMS = (8, 16, 32, 64, 128, 256, 512, 1024)
MOST_STRIDE = 4  # of a window, or dilation, whose period a register tile covers
LEAST = 4  # candidates that are left whatever the share says


@dataclass(frozen=True)
class GpuMachine:
    """What the enumeration needs to know of the GPU."""

    sms: int
    threads_per_sm: int = 2048

    @property
    def threads(self) -> int:
        """Threads that the GPU holds at once."""
        return self.sms * self.threads_per_sm


@dataclass(frozen=True)
class GpuBound:
    """A lower bound on a kernel's time [s], and the bytes that it rests on."""

    seconds: float
    bytes: int


Candidate = tuple[Program, float]


def candidates(program: Program, machine: GpuMachine, limit: int, percent: float = 100.0) -> list[Candidate]:
    """Scheduled programs with a ranking score in (0, 1], best first; none where the GPU has no form for the program.

    Pruned twice: by share, but never below `LEAST`, and to at most ``limit``.
    """
    best: dict[str, Candidate] = {}
    for found, score in _all(program, machine):
        old = best.get(found.digest)
        if old is None or old[1] < score:
            best[found.digest] = (found, min(1.0, max(1e-6, score)))
    ranked = sorted(best.values(), key=lambda item: (-item[1], item[0].digest))
    return ranked[: min(limit, max(LEAST, math.ceil(len(ranked) * percent / 100)))]


def _all(program: Program, machine: GpuMachine) -> Iterator[Candidate]:
    if program.template == "scan":
        yield from _scan(program, machine)
        return
    phase = program.phases[0]
    if len(program.phases) > 1:
        if {g.axis for g in program.grid} == set(program.serial):
            yield from _team(program, machine, 1)
        else:
            plain = collapsed(program)
            yield from _column_rows(plain, machine)
            if statistics.recognise(plain) is not None:
                yield from _moments(plain, machine)
        return
    if not phase.reds:
        yield from _map(collapsed(program), machine)
        return
    length = math.prod(r.extent for r in phase.reds)
    if program.template == "reduction":
        if _along_rows(phase):
            yield from _rows(program, machine)
        else:
            yield from _columns(collapsed(program), machine)
    elif _side_by_side(phase):
        yield from _columns(collapsed(program), machine)
    elif length <= TAPS:
        yield from _window(collapsed(program), machine)


@functools.cache
def _fastest_memory() -> float:
    """Bytes per second of the fastest memory among the GPUs that jcuts knows."""
    return max(load_gpu(name).bw_global for name in list_gpus())


def bound(program: Program) -> GpuBound:
    """What must be written, and read where a load has no guard, over the memory bandwidth of the fastest known GPU.

    It holds where operands and results are not in the L2 cache already.
    """
    moved = sum(b.bytes for b in program.outputs)
    for buffer in program.inputs:
        loads = [n for p in program.phases for n in _loads(p) if n.buffer == buffer.name]
        whole = loads and all(not n.guards and n.index is not None and not n.index.values() for n in loads)
        covered = 1
        for axis in {a for n in loads if n.index is not None for a in n.index.axes()}:
            covered *= max((p.ranges().get(axis, 1) for p in program.phases), default=1)
        if whole and covered >= buffer.size:
            moved += buffer.bytes
    return GpuBound(moved / _fastest_memory(), moved)


# -- element-wise ---------------------------------------------------------------------------------------------------
def _map(program: Program, machine: GpuMachine) -> Iterator[Candidate]:
    phase = program.phases[0]
    if not phase.axes:
        yield _with(program, "point", 32), 1.0
        return
    switched = _switched(program)
    if switched is not None:
        yield from _switch(switched, machine)
    points = math.prod(a.extent for a in phase.axes)
    lane = phase.axes[-1]
    size = _narrowest(program)
    crossed = _crossed(phase, lane.name)
    for vector in _vectors(lane.extent, size):
        tiles = [(lane.name, vector)]
        options = [tiles]
        if crossed is not None:
            options = [[*tiles, (crossed.name, n)] for n in (4, 8) if n <= crossed.extent] or options
        elif len(phase.axes) > 1 and phase.axes[-2].extent % 2 == 0:
            options.append([*tiles, (phase.axes[-2].name, 2)])
        for option in options:
            unroll = dict(option)
            for threads in (256, 128):
                work = points / math.prod(unroll.values())
                fill = min(1.0, work / machine.threads)
                access = min(1.0, vector * size / ACCESS)
                score = (0.4 + 0.6 * access) * (0.3 + 0.7 * fill) * (1.0 if threads == 256 else 0.98)
                score *= 0.9 if crossed is not None else 1.0 if len(option) == 1 else 0.95
                tiled = _unrolled(program, unroll)
                if crossed is not None:
                    for along in (8, 16):  # threads along the operand's own direction: whole lines of it per block
                        shape = ((crossed.name, along), (lane.name, threads // along))
                        yield _with(tiled, "point", threads, ("block", shape)), score
                    score *= 0.9
                yield _with(tiled, "point", threads), score
    if crossed is not None:
        yield from _transposed(program, crossed, machine)


def _switched(program: Program) -> Program | None:
    """The program with an axis more, the first one, that numbers the operands of a concatenation of equal parts."""
    phase = program.phases[0]
    for axis in phase.axes:
        starts = {0, axis.extent}
        for node in phase.exit.nodes:
            for guard in node.guards:
                moving = Index(0, guard.index.terms)
                if moving == Index.axis(axis.name) and guard.low is not None and guard.high is not None:
                    starts |= {guard.low - guard.index.const, guard.high - guard.index.const + 1}
        places = sorted(s for s in starts if 0 <= s <= axis.extent)
        size = math.gcd(*places)
        count = axis.extent // size
        if not 2 < count <= MOST_SWITCHED or size < 2:
            continue
        inner = Index.axis(axis.name) + Index.axis(SWITCH) * size
        ranges = {**phase.ranges(), SWITCH: count, axis.name: size}
        made = rewritten(phase, lambda index, to=inner, name=axis.name, r=ranges: index.substitute({name: to}, r))
        axes = (Axis(SWITCH, count), *(replace(a, extent=size) if a.name == axis.name else a for a in phase.axes))
        return replace(program, phases=(replace(made, axes=axes),))
    return None


def _switch(program: Program, machine: GpuMachine) -> Iterator[Candidate]:
    """Concatenations: threads of a block mostly copy from one operand, and branch to code for it alone."""
    phase = program.phases[0]
    lane = phase.axes[-1]
    size = _narrowest(program)
    points = math.prod(a.extent for a in phase.axes)
    rows = phase.axes[-2]
    for vector in _vectors(lane.extent, ITEM_SIZE[program.outputs[0].dtype]):
        for deep in (1, 2, 4):
            if deep > 1 and (rows.name == SWITCH or rows.extent % deep):
                continue
            tiled = _unrolled(program, {lane.name: vector, rows.name: deep})
            for threads in (128, 256):
                fill = min(1.0, points / (vector * deep) / machine.threads)
                score = (0.3 + 0.7 * fill) * (0.4 + 0.6 * min(1.0, vector * size / ACCESS))
                yield _with(tiled, "point", threads, ("switch", SWITCH)), min(1.0, score * 1.2)


def _transposed(program: Program, crossed: Axis, machine: GpuMachine) -> Iterator[Candidate]:
    """Tiles of the operand's direction times the result's, through shared memory."""
    phase = program.phases[0]
    lane = phase.axes[-1]
    if min(crossed.extent, lane.extent) < 8:
        return
    size = max(ITEM_SIZE[b.dtype] for b in program.outputs)
    vector = next(v for v in (max(1, ACCESS // size), 8, 4, 2, 1) if v * size <= ACCESS and lane.extent % v == 0)
    lines = 8 * vector  # of a warp: eight accesses side by side
    for rows, columns in ((64, lines), (128, lines), (64, 2 * lines), (32, lines), (32, 2 * lines), (32, 64)):
        for threads in (256, 512):
            if columns % vector or threads * vector > rows * columns or rows % max(1, threads * vector // columns):
                continue
            if threads % (columns // vector) or rows * columns * size > SHARED:
                continue
            covered = 1.0
            for axis, side in ((crossed, rows), (lane, columns)):
                covered *= axis.extent / (-(-axis.extent // side) * side)
            tiles = math.prod(a.extent for a in phase.axes) / (rows * columns)
            fill = min(1.0, tiles * threads / machine.threads)
            score = covered * (0.3 + 0.7 * fill) * (0.5 + 0.5 * min(1.0, vector * size / ACCESS))
            score *= 1.0 if columns == lines else 0.97
            score *= (1.0 if rows == 64 else 0.99) * (1.0 if threads == 256 else 0.98)
            params = (("crossed", crossed.name), ("rows", rows), ("columns", columns))
            yield _with(_unrolled(program, {lane.name: vector}), "transposed", threads, *params), score


def _crossed(phase: Phase, lane: str) -> Axis | None:
    """The axis along which an operand is contiguous that is not contiguous along the lanes: a transpose."""
    for node in _loads(phase):
        assert node.index is not None
        if node.index.stride(lane) in (0, 1, None):
            continue
        for axis in phase.axes[:-1]:
            if node.index.stride(axis.name) == 1:
                return axis
    return None


# -- windows: pooling, depthwise convolution ------------------------------------------------------------------------
def _window(program: Program, machine: GpuMachine) -> Iterator[Candidate]:
    phase = program.phases[0]
    phase = replace(phase, reds=tuple(replace(r, unroll=r.extent, chains=1) for r in phase.reds))
    program = replace(program, phases=(phase,))
    if not phase.axes:
        yield _with(program, "point", 32), 0.5
        return
    lane = phase.axes[-1]
    size = _narrowest(program)
    points = math.prod(a.extent for a in phase.axes)
    slid = _slid(phase, lane.name)
    taps = math.prod(r.extent for r in phase.reds)
    periods = {a.name: min(a.extent, _period(phase, a.name)) for a in slid}
    narrow = max(1, ACCESS // size // 4)
    widths = [*_vectors(lane.extent, size), *([narrow] if size < 4 and lane.extent % narrow == 0 else [])]
    for vector in widths:
        for rows in (1, 2, 4, 7, 8):
            for columns in (1, 2, 4):
                unroll = {lane.name: vector}
                for axis, count in zip(reversed(slid), (columns, rows), strict=False):
                    unroll[axis.name] = count
                if any(unroll[a.name] % periods[a.name] for a in slid):
                    continue
                if (columns > 1 and not slid) or (rows > 1 and len(slid) < 2):
                    continue
                if any(count > a.extent for a in slid for count in [unroll[a.name]]):
                    continue
                tile = math.prod(unroll.values())
                values = _window_values(phase, unroll)
                if tile + values > 2 * REGISTERS:
                    continue
                loads_per_use = values / (tile * taps)
                waste = math.prod(a.extent / (-(-a.extent // unroll[a.name]) * unroll[a.name]) for a in slid)
                fill = min(1.0, points / tile / machine.threads)
                pressure = 1.0 if tile + values <= REGISTERS else 0.75
                access = min(1.0, vector * size / ACCESS)
                score = waste * pressure * (0.4 + 0.6 * access) * (0.25 + 0.75 * fill) / (1.0 + 2.0 * loads_per_use)
                for threads in (128, 256):
                    yield _with(_unrolled(program, unroll), "point", threads), score * (1 if threads == 128 else 0.99)


def _slid(phase: Phase, lane: str) -> list[Axis]:
    """Axes that a window slides along (not the lanes), outermost first: neighbouring points share loads."""
    found = []
    for axis in phase.axes:
        if axis.name == lane:
            continue
        for node in _loads(phase):
            assert node.index is not None
            step = node.index.stride(axis.name)
            if step is None and _period(phase, axis.name) <= MOST_STRIDE:
                found.append(axis)
                break
            if step and any((s := node.index.stride(r.name)) and step % s == 0 and step // s < r.extent + 1
                            for r in phase.reds):  # fmt: skip
                found.append(axis)
                break
    return found[-2:]


def _period(phase: Phase, axis: str) -> int:
    """After how many points along an axis all remainders in addresses and guards come back: stride or dilation."""
    period = 1

    def visit(index: Index) -> None:
        nonlocal period
        for atom, _ in index.terms:
            if atom.inner is not None:
                if axis in atom.inner.axes():
                    step = atom.inner.stride(axis)
                    period = math.lcm(period, atom.modulus // math.gcd(atom.modulus, step or 1))
                visit(atom.inner)

    for graph in (phase.body, phase.exit):
        for node in graph.nodes:
            for index in (node.index, *(g.index for g in node.guards)):
                if index is not None:
                    visit(index)
    return period


def _window_values(phase: Phase, unroll: dict[str, int]) -> int:
    """Values that a tile of a window loads."""
    return _distinct(phase, {**unroll, **{r.name: r.extent for r in phase.reds}})


def _distinct(phase: Phase, counts: dict[str, int]) -> int:
    """Values that so many points along each axis load (equal addresses once)."""
    total = 0
    for node in _loads(phase):
        assert node.index is not None
        index = node.index
        even = {n: c for n, c in counts.items() if index.stride(n) is not None and c > 1}
        odd = {n: c for n, c in counts.items() if index.stride(n) is None}
        distinct: set[object] = {0}
        if odd and not index.values():
            moduli = [g for g in node.guards if g.low == g.high]
            distinct = set()
            for point in itertools.product(*(range(c) for c in odd.values())):
                where = dict(zip(odd, point, strict=True))
                if all(_number(g.index, where) == g.low for g in moduli):
                    distinct.add(_number(index, where))
        for name, count in even.items():
            stride = index.stride(name)
            if stride:
                distinct = {d + stride * k for d in distinct for k in range(count)}  # type: ignore[operator]
        total += len(distinct)
    return total


def _number(index: Index, where: dict[str, int]) -> int:
    """The expression at a point of a tile that begins at a large multiple of every modulus."""
    total = index.const
    for atom, coef in index.terms:
        part = where.get(atom.name, 0) if atom.inner is None else _number(atom.inner, where)
        if atom.kind == "div":
            part //= atom.modulus
        elif atom.kind == "mod":
            part %= atom.modulus
        total += coef * part
    return total


# -- reductions -----------------------------------------------------------------------------------------------------
def _along_rows(phase: Phase) -> bool:
    """Whether the reduced points of an output lie next to each other (else neighbouring outputs do)."""
    last = phase.reds[-1].name
    strides = [n.index.stride(last) for n in _loads(phase) if n.index is not None and n.index.stride(last) != 0]
    return not phase.axes or any(s == 1 for s in strides) or not strides


def _side_by_side(phase: Phase) -> bool:
    """Long sums whose operands all lie along the last output axis: gradients of depthwise filters."""
    if not phase.axes or math.prod(r.extent for r in phase.reds) <= TAPS:
        return False
    lane = phase.axes[-1].name
    return all(n.index is not None and n.index.stride(lane) == 1 for n in _loads(phase))


def _rows(program: Program, machine: GpuMachine) -> Iterator[Candidate]:
    phase = program.phases[0]
    yield from _team(program, machine, 1)
    length = math.prod(r.extent for r in phase.reds)
    rows = math.prod(a.extent for a in phase.axes)
    if any(acc.index_dtype for acc in phase.accs):
        return
    wanted = machine.threads / max(1, rows)
    counts = {min(4096, int(min(wanted, length / per_thread)) // 256 * 2) for per_thread in (16, 64)}
    counts |= {k * machine.sms for k in (2, 4, 8) if rows * 16 <= machine.sms and length >= 4096 * k * machine.sms}
    for count in sorted(counts):
        if count > 1:
            yield from _team(program, machine, count)


def _team(program: Program, machine: GpuMachine, split: int) -> Iterator[Candidate]:
    rows, length = _row_shape(program)
    size = _narrowest(program)
    for vector in _vectors(length, size):
        share = -(-length // (split * vector)) * vector
        for team in TEAMS:
            pieces = -(-share // (team * vector))
            kept = pieces * vector
            if team > 8 and share < team * vector / 2:
                continue
            most = RESIDENT if len(program.phases) > 1 else max(RESIDENT, 256 // size)
            chunks = pieces if kept <= most else max(1, (8 if len(program.phases) > 1 else 16) // vector)
            threads = max(team, 256 if team <= 32 else team)
            # Measured on an H200: 32 elements per thread in teams of 128 to 256 keep most loads in flight.
            fill = min(1.0, rows * split * team / machine.threads)
            loops = -(-pieces // chunks)
            depth = min(1.0, kept / RESIDENT) if kept <= most else 0.7 * min(1.0, 16 / loops)
            # Measured as well: accesses of 8 bytes are as fast, two of 16 side by side leave lines half used.
            access = {32: 0.8, 16: 1.0, 8: 0.97, 4: 0.8}.get(vector * size, 0.5)
            lost = share / (pieces * team * vector)
            score = (0.4 + 0.6 * access) * (0.1 + 0.9 * fill) * (0.3 + 0.7 * depth) * lost
            score *= {256: 0.97, 512: 0.9, 1024: 0.8}.get(team, 1.0) * (0.95 if split > 1 else 1.0)
            if len(program.phases) > 1 and kept > RESIDENT:
                score *= 0.6  # the row is read again by every phase
            more = (("split", split),) if split > 1 else ()
            yield (
                _with(program, "team", threads, ("team", team), ("vector", vector), ("chunks", chunks), *more),
                score,
            )


def _row_shape(program: Program) -> tuple[int, int]:
    if len(program.phases) == 1:
        phase = program.phases[0]
        return math.prod(a.extent for a in phase.axes), math.prod(r.extent for r in phase.reds)
    rows = math.prod(g.extent for g in program.grid)
    return rows, max(
        math.prod([*(r.extent for r in p.reds), *(a.extent for a in p.axes if a.name not in program.serial)])
        for p in program.phases
    )


def _columns(program: Program, machine: GpuMachine) -> Iterator[Candidate]:
    """Neighbouring outputs in neighbouring threads; rows of threads, and blocks, share the terms."""
    phase = program.phases[0]
    # Terms that lie far apart change slowest: what neighbouring terms share is still in the cache.
    phase = replace(phase, reds=tuple(sorted(phase.reds, key=lambda r: _innermost(phase, r.name))))
    program = replace(program, phases=(phase,))
    lane = phase.axes[-1]
    size = _narrowest(program)
    results = math.prod(a.extent for a in phase.axes)
    splittable = not any(acc.index_dtype for acc in phase.accs)
    moved = float(sum(b.bytes for b in (*program.inputs, *program.outputs)))
    for taps, tile in _column_tiles(phase):
        terms = math.prod(r.extent // tile.get(r.name, 1) for r in phase.reds)
        inside = math.prod(tile.values())
        outer = math.prod(a.extent // taps.get(a.name, 1) for a in phase.axes[:-1])
        for vector in _vectors(lane.extent, size):
            kept = math.prod(taps.values()) * vector * len(phase.accs)
            loads = _distinct(phase, {**taps, **tile, lane.name: vector})
            if kept > 80 or loads > 2 * REGISTERS:
                continue
            vectors = lane.extent // vector
            for across, threads, flight in itertools.product(_across(vectors), (256, 512, 1024), (4, 8, 2, 1)):
                deep = threads // across
                if flight > 1 and (inside > 1 or kept + flight * loads > REGISTERS or deep * flight > 2 * terms):
                    continue
                if across * vector > threads or (threads == 1024 and kept + flight * loads > 40):
                    continue
                lanes = -(-vectors // across)
                held = 1 if kept + flight * loads > 80 else 2 if kept + flight * loads > 40 else 3
                resident = machine.sms * max(1, held * 768 // threads)  # blocks that run at once
                for waves in (1, 2, 4, 0):
                    split = 1 if waves == 0 else min(waves * resident // (lanes * outer), terms // (2 * deep * flight))
                    if split < 1 or (split == 1) != (waves == 0) or (split > 1 and not splittable):
                        continue
                    blocks = lanes * outer * split
                    rounds = -(-blocks // resident)
                    under_way = min(flight * loads * size, 4 * max(16, 96 - kept))  # bytes of a thread
                    under_way *= min(blocks, resident) * threads
                    even = -(-blocks // machine.sms) * machine.sms if rounds == 1 else rounds * resident
                    waste = even / blocks if rounds < 4 else 1.0
                    lines = min(1.0, 0.55 + 0.45 * across * vector * size / 128)
                    idle = lanes * across / vectors * threads / (across * deep)
                    whole = moved / _fastest_memory()
                    spent = whole * max(1.0, IN_FLIGHT / under_way) * max(1.0, idle * 0.8) / lines
                    spent *= 1.0 + 0.04 * (loads / (inside * vector) - 1.0)  # what the caches deliver again
                    spent = spent * (0.6 + 0.4 * waste) + 4e-6 + (2.5e-6 if split > 1 else 0.0)
                    spent += 4.0 * results * split * (split > 1) / _fastest_memory()
                    spent *= {4: 1.0, 8: 1.01, 2: 1.02, 1: 1.05}[flight] * {
                        512: 1.0,
                        256: 1.01,
                        1024: 1.02 if split > 1 else 0.97,
                    }[threads]
                    spent *= 1.0 if across & (across - 1) == 0 else 1.05  # no shuffles: more shared memory
                    spent *= 1.0 if not taps or kept <= 20 else 1.02  # few registers: more threads at once
                    spent *= (1.0 if vector * size == ACCESS or taps else 1.015) * {2: 1.01, 4: 1.03}.get(waves, 1.0)
                    params = (("across", across), ("flight", flight), *((("split", split),) if split > 1 else ()))
                    yield (
                        _with(_tiled(program, {**taps, lane.name: vector}, tile), "columns", threads, *params),
                        (whole / spent if whole else 1.0),
                    )


def _column_rows(program: Program, machine: GpuMachine) -> Iterator[Candidate]:
    """Programs of several phases along columns: a block has all points of its columns."""
    phase = next(p for p in program.phases if p.reds)
    lane = phase.axes[-1]
    size = _narrowest(program)
    length = math.prod(r.extent for r in phase.reds)
    outer = math.prod(a.extent for a in phase.axes[:-1])
    for vector in _vectors(lane.extent, size):
        for across, threads in itertools.product(_across(lane.extent // vector), (1024, 512, 256, 128)):
            unit = WARP // math.gcd(across, WARP)
            deep = threads // across // unit * unit
            if deep < 1 or vector > deep or deep > 2 * length:
                continue
            reduced = sum(len(p.accs) for p in program.phases)
            rows = across * deep // WARP if across < WARP and WARP % across == 0 else deep
            if 4 * reduced * rows * across * vector > SHARED:
                continue
            pieces = -(-length // deep)
            kept = pieces * vector
            if kept <= RESIDENT:
                chunks = pieces
            elif kept <= 2 * RESIDENT and threads <= 512:
                continue  # too much for registers at full occupancy, too little for a loop
            else:
                chunks = max(1, 8 // vector)
            blocks = -(-lane.extent // (vector * across)) * outer
            fill = min(1.0, blocks * across * deep / machine.threads)
            lines = min(1.0, 0.4 + 0.6 * across * vector * size / 128)
            depth = min(1.0, 0.3 + 0.7 * kept / 16) if chunks == pieces else 0.5
            score = lines * (0.1 + 0.9 * fill) * depth * length / (pieces * deep)
            score *= {1024: 0.93, 512: 1.0, 256: 0.98, 128: 0.9}[threads]
            params = (("across", across), ("vector", vector), ("chunks", chunks))
            yield _with(program, "column_rows", across * deep, *params), score


def _moments(program: Program, machine: GpuMachine) -> Iterator[Candidate]:
    """Statistics in one pass, split over the grid: results, and what is mapped, in kernels of their own."""
    phase = program.phases[0]
    lane = phase.axes[-1]
    size = _narrowest(program)
    length = math.prod(r.extent for r in phase.reds)
    outer = math.prod(a.extent for a in phase.axes[:-1])
    for vector in _vectors(lane.extent, size):
        for across, threads, chunks in itertools.product(_across(lane.extent // vector), (512, 256), (8, 4)):
            unit = WARP // math.gcd(across, WARP)
            deep = threads // across // unit * unit
            lines = across * deep // WARP if across < WARP and WARP % across == 0 else deep
            if deep < vector or chunks * vector > RESIDENT or 12 * lines * across * vector > SHARED:
                continue
            blocks = -(-lane.extent // (vector * across)) * outer
            for waves in (1, 2):
                split = min(waves * machine.sms * (1024 // threads) // blocks, length // (deep * chunks))
                if split < 2:
                    continue
                fill = min(1.0, blocks * split * across * deep / machine.threads)
                lines = min(1.0, 0.5 + 0.5 * across * vector * size / 128)
                access = min(1.0, vector * size / ACCESS)
                score = lines * (0.2 + 0.8 * fill) * (0.6 + 0.4 * access) * (1.0 if chunks == 8 else 0.97)
                params = (("across", across), ("vector", vector), ("chunks", chunks), ("split", split))
                yield (
                    _with(program, "moments", across * deep, *params),
                    score * (1.0 if waves == 1 else 0.99) * (1.0 if threads == 256 else 0.97),
                )


def _scan(program: Program, machine: GpuMachine) -> Iterator[Candidate]:
    """Cumulative operations: teams along rows, threads along columns (split into groups where they are few)."""
    phase = program.phases[0]
    time = next(a for a in phase.axes if a.name == TIME)
    size = _narrowest(program)
    others = math.prod(a.extent for a in phase.axes if a is not time)
    associates = scan_gpu.associative(program) is not None
    loads = [n.index for p in program.phases for n in p.exit.nodes if n.op == "load" and n.index is not None]
    along = any(abs(i.stride(TIME) or 0) == 1 for i in loads)
    if along and associates:
        for vector in _vectors(time.extent, size):
            for team in (32, 64, 128, 256, 512):
                if team > 32 and team * vector > 2 * time.extent:
                    continue
                pieces = -(-time.extent // (team * vector))
                fill = min(1.0, others * team / machine.threads)
                score = time.extent / (pieces * team * vector) * (0.2 + 0.8 * fill) * min(1.0, vector * size / ACCESS)
                params = (("team", team), ("vector", vector))
                yield _with(program, "scan_rows", 128 if team == WARP else team, *params), score
    lane = phase.axes[-1]
    if along or lane.name != LANE:
        return  # neighbouring threads would read far apart
    for vector in _vectors(lane.extent, size):
        threads = others / vector
        fill = min(1.0, threads / machine.threads)
        unroll = max(2, 16 // vector)
        params = (("vector", vector), ("unroll", unroll))
        yield _with(program, "scan_columns", 128, *params), 0.05 + 0.9 * fill
        wanted = int(machine.threads / threads)
        if associates and wanted > 1 and time.extent >= 8 * unroll:
            for groups in (min(wanted, time.extent // (2 * unroll)), min(wanted, time.extent // (2 * unroll)) // 2):
                if groups > 1:
                    covered = min(1.0, threads * groups / machine.threads)
                    yield (
                        _with(program, "scan_columns", 128, *params, ("split", groups)),
                        (0.05 + 0.9 * covered)
                        * (0.6 if covered < 1.5 * fill else 0.9)
                        * min(1.0, vector * size / ACCESS),
                    )


def _column_tiles(phase: Phase) -> list[tuple[dict[str, int], dict[str, int]]]:
    """Outputs and terms that a thread takes together: (axis -> unroll, reduction -> unroll).

    A single term of a single output but for windows (filter gradients), whose outputs at different taps share operands.
    """
    strides = {a.name: [n.index.stride(a.name) for n in _loads(phase) if n.index is not None] for a in phase.axes[:-1]}
    slides = {
        name for name, moves in strides.items()
        if any(m not in (0, None) for m in moves) and any(m == 0 for m in moves)
    }  # fmt: skip
    taps = {a.name: a.extent for a in phase.axes[:-1] if a.name in slides}
    if not taps or math.prod(taps.values()) > TAPS:
        return [({}, {})]
    last = phase.reds[-1] if len(phase.reds) == 1 else max(phase.reds, key=lambda r: _innermost(phase, r.name))
    others = [r for r in phase.reds if r is not last and any(_moves(phase, a, r.name) for a in taps)]
    tiles = [{last.name: n} for n in (8, 7, 6, 5, 4, 3, 2) if last.extent % n == 0][:3]
    for red in others[-1:]:  # rows of the window are shared as well
        tiles += [{**t, red.name: n} for t in tiles for n in (2, 4) if red.extent % n == 0 and t[last.name] <= 4]
    return [*((taps, tile) for tile in tiles), (taps, {})]


def _moves(phase: Phase, axis: str, red: str) -> bool:
    """Does some operand depend on an axis and a reduction through their sum?"""
    return any(
        n.index is not None and n.index.stride(axis) not in (0, None) and n.index.stride(red) not in (0, None)
        for n in _loads(phase)
    )


def _innermost(phase: Phase, name: str) -> float:
    """How close together the points of a reduction lie."""
    strides = [abs(s) for n in _loads(phase) if n.index is not None and (s := n.index.stride(name))]
    return -max(strides, default=math.inf)


def _across(vectors: int) -> list[int]:
    """Threads of a block along the outputs: whole lines, or a divisor that leaves no thread idle."""
    if vectors <= 8:
        return [vectors]
    found = [n for n in (8, 16, 32, 64) if n <= vectors]
    exact = [n for n in range(12, min(vectors, 64) + 1) if vectors % n == 0 and n % 4 == 0]
    return list(dict.fromkeys([*found, *exact[:1], *exact[-1:]]))


# -- helpers --------------------------------------------------------------------------------------------------------
def _with(program: Program, form: str, threads: int, *more: tuple[str, object]) -> Program:
    return replace(program, grid=program.grid if len(program.phases) > 1 else (), lanes=1,
                   params=(("cuda", form), ("threads", threads), *more))  # fmt: skip


def _unrolled(program: Program, unroll: dict[str, int]) -> Program:
    phase = program.phases[0]
    axes = tuple(replace(a, unroll=min(unroll.get(a.name, 1), a.extent)) for a in phase.axes)
    return replace(program, phases=(replace(phase, axes=axes),))


def _tiled(program: Program, unroll: dict[str, int], terms: dict[str, int]) -> Program:
    phase = _unrolled(program, unroll).phases[0]
    reds = tuple(replace(r, unroll=terms.get(r.name, 1), chains=1) for r in phase.reds)
    return replace(program, phases=(replace(phase, reds=reds),))


def _loads(phase: Phase) -> list[Node]:
    graphs = (phase.body, phase.exit) if phase.reds else (phase.exit,)
    return [n for g in graphs for n in g.nodes if n.op == "load" and isinstance(n.index, Index)]


def _narrowest(program: Program) -> int:
    """Bytes of an element of the largest operand or result: what fills an access."""
    largest = max((b for b in program.buffers if b.role != "local"), key=lambda b: (b.bytes, b.name))
    return ITEM_SIZE[largest.dtype]


def _vectors(extent: int, size: int) -> list[int]:
    """Neighbours per thread: those whose accesses stay aligned, widest first; 1 and an unaligned 4 where none do."""
    widest = max(1, ACCESS // size)
    found = [v for v in (2 * widest, widest, widest // 2) if v >= 1 and extent % v == 0]
    found += [v for v in (widest // 4,) if v > 1 and extent % v == 0 and not found]
    return found or [1]
