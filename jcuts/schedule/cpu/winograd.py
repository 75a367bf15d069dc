"""Winograd convolution (minimal filtering) on a CPU: stride-1 convolutions with fewer multiplications, as one fused
kernel.

Recognised is any sum of products ``sum_{t, c} data[d + t, c] * weight[t, c, k]`` of an unscheduled program: one or two
output axes ``d`` on which the data factor depends only through ``d + t``.  Padding of any kind, element operations
before and after, batches and odd sizes are handled as in the direct form: by the same graphs, instantiated at other
points.  `base.toom_cook` has the matrices, their source and their error.

A task iterates over blocks of tiles (and of features) and runs, each in a core's second-level cache,

    filter    U[p, c, k] = G g G^T               once per block of features
    input     V[q, p, c] = B^T d B               once per block of tiles
    product   M[q, p, k] = sum_c V[q, p, c] U[p, c, k]      for every point p: a small matrix product
    output    Y = A^T M A, then the exit graph on its m x m values, straight to the results
    check     is any result of the block not finite?
    again     if so: the block once more by the direct form

The last two are needed because transforms mix neighbouring values: one NaN or infinity would spread over its tile, and
sums that cancel exactly in the direct form may overflow.  A finite Y was computed from finite values only.

The filter's transform is part of the kernel: n^2 / r^2 times fewer bytes come from memory than with transformed filters
kept there, which matters more than its arithmetic (batch 1), and weights may be arguments.

With n points per dimension and tiles of m = n - r + 1 outputs, the multiplications are (n / m)^2 per output and
channel instead of r^2: 2.25 for F(4x4, 3x3), 4 for F(2x2, 3x3), against 9.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from jcuts.kernel_ir.index import Index
from jcuts.kernel_ir.node import Graph, Guard, Node
from jcuts.kernel_ir.program import Acc, Axis, Buffer, Grid, Phase, Program, Red, Store
from jcuts.lower import toom_cook
from jcuts.lower.patterns.winograd import Dim, WinogradRoles, axes_of, indices_of

FLAG = "again"


@dataclass(frozen=True)
class Plan:
    """Parameters of one kernel.

    Attributes:
        points: n, per transformed dimension.
        tiles: (axis, tiles per block), for every tiled axis.
        features: features per block; divides their number.
        channels: channels per step; divides their number. Short sums that are added to what earlier steps left are also
            more accurate than one long one.
        filters_first: blocks of features are the outermost loop (filters are transformed once), else the innermost one
            (inputs are).
        rows, vectors: register tile of the product: tiles x vectors of features.
        lanes: elements per vector.
        split: (serial axis, blocks per task).
    """

    points: int
    tiles: tuple[tuple[str, int], ...]
    features: int
    channels: int
    filters_first: bool
    rows: int
    vectors: int
    lanes: int
    split: tuple[tuple[str, int], ...] = ()


# -- the program ----------------------------------------------------------------------------------------------------
class _WinogradBuilder:
    """Names, addresses and axes of one program in the making."""

    def __init__(self, program: Program, form: WinogradRoles, plan: Plan) -> None:
        self.program, self.form, self.plan = program, form, plan
        self.phase = program.phases[0]
        self.dtype = self.phase.accs[0].dtype
        self.block = dict(plan.tiles)
        self.points = plan.points ** len(form.transformed)
        self.tiles = math.prod(self.block.values())
        lanes = plan.lanes
        # One more vector per row: rows a power of two apart would evict each other from the cache.
        self.width = -(-plan.features // lanes) * lanes
        self.u_channel = self.points * self.width + lanes
        self.m_tile = self.points * self.width + lanes
        tiled = [Axis(f"{d.axis}s", -(-d.count(plan.points) // self.block[d.axis])) for d in form.dims]
        blocks = Axis(f"{form.feature.name}s", form.feature.extent // plan.features)
        order = [blocks, *tiled] if plan.filters_first else [*tiled, blocks]
        steps = Axis(f"{form.channel.name}s", form.channel.extent // plan.channels)
        self.outer = [a for a in order if a.extent > 1]
        self.steps = [steps] if steps.extent > 1 else []
        self.serial = [*self.outer, *self.steps]
        self.of_tiles = [a for a in self.outer if a is not blocks]
        self.of_features = [a for a in self.outer if a is blocks]
        self.feature = Axis(f"{form.feature.name}u", plan.features, 1, True)
        self.channel = Axis(f"{form.channel.name}u", plan.channels)
        self.inner = [Axis(f"{d.axis}u", self.block[d.axis]) for d in form.dims if self.block[d.axis] > 1]
        self.ranges = {a.name: a.extent for a in (*self.serial, *self.inner, self.feature, self.channel)}
        # What is made once and used in later steps of outer loops is kept for all channels, else for those of a step.
        self.u_once, self.v_once = self._once(self.of_features), self._once(self.of_tiles)
        self.u_channels = form.channel.extent if self.u_once else plan.channels
        v_channels = form.channel.extent if self.v_once else plan.channels
        self.v_point = -(-v_channels // lanes) * lanes + lanes
        self.v_tile = self.points * self.v_point + lanes

    def _of(self, name: str) -> Index:
        return Index.axis(name) if name in self.ranges else Index()

    def tile(self, dim: Dim) -> Index:
        """Number of the current tile along a dimension."""
        return self._of(f"{dim.axis}s") * self.block[dim.axis] + self._of(f"{dim.axis}u")

    def feature_index(self) -> Index:
        """The current feature."""
        return self._of(f"{self.form.feature.name}s") * self.plan.features + Index.axis(self.feature.name)

    def place(self) -> Index:
        """Number of the current tile in its block."""
        total = Index()
        for dim in self.form.dims:
            total = total * self.block[dim.axis] + self._of(f"{dim.axis}u")
        return total

    def at(self, offsets: Sequence[int]) -> dict[str, Index]:
        """Output axes at an offset in the current tile."""
        offset = iter(offsets)
        found = {self.form.feature.name: self.feature_index()}
        for dim in self.form.dims:
            base = self.tile(dim) * dim.unit(self.plan.points)
            found[dim.axis] = base + next(offset) if dim.tap else base
        return found

    def _once(self, own: Sequence[Axis]) -> tuple[str, ...]:
        """Outer serial axes inside the innermost one that a phase depends on."""
        last = max((self.outer.index(a) for a in own), default=-1)
        return tuple(a.name for a in self.outer[last + 1 :])

    def channel_index(self) -> Index:
        """The current channel."""
        return self._of(f"{self.form.channel.name}s") * self.plan.channels + Index.axis(self.channel.name)

    def kept_channel(self, once: tuple[str, ...]) -> Index:
        """Where the current channel stands in a local buffer."""
        return self.channel_index() if once else Index.axis(self.channel.name)

    @property
    def last(self) -> tuple[str, ...]:
        """The axes of channel steps: results are complete at the last one."""
        return tuple(a.name for a in self.steps)

    def guarded(self, graph: Graph, is_data: bool) -> Graph:
        """The graph with every load guarded against tiles that reach beyond the results."""
        nodes = []
        for node in graph.nodes:
            if node.op == "load" and node.index is not None:
                reach = node.index.axes().union(*(axes_of(indices_of(graph, v)) for v in node.index.values()))
                added = tuple(g for g in self.limits(is_data) if g.index.axes() & reach)
                if added:
                    node = replace(node, guards=(*node.guards, *added), value=node.value if node.guards else 0)
            nodes.append(node)
        return Graph(nodes)  # not added one by one: numbers must stay what they are

    def limits(self, is_data: bool) -> list[Guard]:
        """What holds inside the results, or inside what the data are read at for them."""
        found = []
        for dim in self.form.dims:
            index, last = Index.axis(dim.axis), dim.extent - 1
            if is_data and dim.tap:
                index, last = index + Index.axis(dim.tap), last + dim.taps - 1
            found.append(Guard(index, None, last))
        return found


def apply(program: Program, form: WinogradRoles, plan: Plan) -> Program:
    """The scheduled program."""
    maker = _WinogradBuilder(program, form, plan)
    elements = {
        "filters": maker.u_channels * maker.u_channel,
        "inputs": maker.tiles * maker.v_tile,
        "products": maker.tiles * maker.m_tile,
        "sums": maker.tiles * maker.width,
    }
    buffers = [Buffer(name, maker.dtype, (size,), "local") for name, size in elements.items()]
    buffers.append(Buffer(FLAG, "bool", (1,), "local"))
    split = dict(plan.split)
    grid = tuple(Grid(a.name, a.extent, split.get(a.name, a.extent)) for a in maker.serial)
    phases = (_filter(maker), _input(maker), _product(maker), _output(maker), _check(maker), _direct_fallback(maker))
    params = (
        ("lanes", plan.lanes),
        ("points", plan.points),
        ("outputs", tuple(d.unit(plan.points) for d in form.transformed)),
        ("tiles", plan.tiles),
        ("features", plan.features),
        ("channels", plan.channels),
        ("outer", "features" if plan.filters_first else "tiles"),
        ("unroll", (("q", plan.rows), (maker.feature.name, plan.vectors))),
        ("split", plan.split),
    )
    return replace(
        program,
        buffers=(*program.buffers, *buffers),
        grid=grid,
        serial=tuple(a.name for a in maker.serial),
        phases=phases,
        lanes=plan.lanes,
        template="winograd",
        params=params,
    )


Get = Callable[[tuple[int, ...]], int]


def _transformed(
    graph: Graph, matrices: Sequence[toom_cook.Matrix], get: Get, dtype: str
) -> dict[tuple[int, ...], int]:
    """Applies one matrix per dimension to a grid of values."""
    extents = [len(m[0]) for m in matrices]
    values = {at: get(at) for at in itertools.product(*map(range, extents))}
    for d, matrix in enumerate(matrices):
        rest = [range(len(m)) if k < d else range(extents[k]) for k, m in enumerate(matrices) if k != d]
        changed: dict[tuple[int, ...], int] = {}
        for others in itertools.product(*rest):
            line = [(*others[:d], k, *others[d:]) for k in range(extents[d])]
            for k, value in enumerate(toom_cook.emit(graph, matrix, [values[at] for at in line], dtype)):
                changed[(*others[:d], k, *others[d:])] = value
        values = changed
    return values


def _matrices(maker: _WinogradBuilder, which: int) -> list[toom_cook.Matrix]:
    return [toom_cook.matrices(maker.plan.points, d.taps)[which] for d in maker.form.transformed]


def _number(at: tuple[int, ...], base: int) -> int:
    total = 0
    for part in at:
        total = total * base + part
    return total


def _filter(maker: _WinogradBuilder) -> Phase:
    form, graph, source = maker.form, Graph(), maker.phase.body

    def get(at: tuple[int, ...]) -> int:
        taps = {d.tap: Index(k) for d, k in zip(form.transformed, at, strict=True)}
        where: Mapping[str, Index] = {
            **taps,
            form.feature.name: maker.feature_index(),
            form.channel.name: maker.channel_index(),
        }
        return source.copy_into(graph, [form.weight], where, maker.ranges)[0]

    values = _transformed(graph, _matrices(maker, 1), get, maker.dtype)
    # A channel's points lie side by side: stores that jump by a large power of two stall.
    address = maker.kept_channel(maker.u_once) * maker.u_channel + Index.axis(maker.feature.name)
    stores = tuple(
        Store("filters", address + _number(at, maker.plan.points) * maker.width, value)
        for at, value in sorted(values.items())
    )
    axes = (*maker.of_features, *maker.steps, maker.channel, maker.feature)
    return Phase("winograd.filter", axes, (), (), Graph(), graph, stores, maker.u_once)


def _input(maker: _WinogradBuilder) -> Phase:
    form, graph = maker.form, Graph()
    source = maker.guarded(maker.phase.body, True)

    def get(at: tuple[int, ...]) -> int:
        where = {**maker.at(at), **{d.tap: Index() for d in form.transformed}}
        where[form.channel.name] = maker.channel_index()
        return source.copy_into(graph, [form.data], where, maker.ranges)[0]

    values = _transformed(graph, _matrices(maker, 2), get, maker.dtype)
    address = maker.place() * maker.v_tile + maker.kept_channel(maker.v_once)
    stores = tuple(
        Store("inputs", address + _number(at, maker.plan.points) * maker.v_point, value)
        for at, value in sorted(values.items())
    )
    axes = (*maker.of_tiles, *maker.steps, *maker.inner, replace(maker.channel, vector=True))
    return Phase("winograd.input", axes, (), (), Graph(), graph, stores, maker.v_once)


def _product(maker: _WinogradBuilder) -> Phase:
    plan, body, exit_ = maker.plan, Graph(), Graph()
    p, q, k = (Index.axis(n) for n in ("p", "q", maker.feature.name))
    of_v, of_u = maker.kept_channel(maker.v_once), maker.kept_channel(maker.u_once)
    v = body.load("inputs", q * maker.v_tile + p * maker.v_point + of_v, maker.dtype)
    u = body.load("filters", of_u * maker.u_channel + p * maker.width + k, maker.dtype)
    term = body.apply("mul", maker.dtype, v, u)
    value = exit_.add(Node("acc", maker.dtype, attrs=(("number", 0),)))
    place = q * maker.m_tile + p * maker.width + k
    if maker.steps:
        later = (Guard(Index.axis(maker.steps[0].name), 1, None),)
        value = exit_.apply("add", maker.dtype, value, exit_.load("products", place, maker.dtype, later, 0.0))
    axes = (
        *maker.serial,
        Axis("p", maker.points),
        replace(maker.feature, unroll=plan.vectors),
        Axis("q", maker.tiles, plan.rows),
    )
    reds = (Red(maker.channel.name, maker.channel.extent, min(2, maker.channel.extent)),)
    store = Store("products", place, value)
    return Phase("winograd.product", axes, reds, (Acc("add", maker.dtype, (term,)),), body, exit_, (store,))


def _output(maker: _WinogradBuilder) -> Phase:
    graph, width = Graph(), Index.axis(maker.feature.name)
    address = maker.place() * maker.m_tile + width

    def get(at: tuple[int, ...]) -> int:
        return graph.load("products", address + _number(at, maker.plan.points) * maker.width, maker.dtype)

    values = _transformed(graph, _matrices(maker, 0), get, maker.dtype)
    total = -1
    for value in values.values():
        total = value if total < 0 else graph.apply("add", maker.dtype, total, value)
    stores = [Store("sums", maker.place() * maker.width + width, total)]
    source = maker.guarded(maker.phase.exit, False)
    for at, value in sorted(values.items()):
        stores += _results(maker, graph, source, maker.at(at), value)
    axes = (*maker.outer, *maker.inner, maker.feature)
    return Phase("winograd.output", axes, (), (), Graph(), graph, tuple(stores), (), maker.last)


def _results(
    maker: _WinogradBuilder, graph: Graph, source: Graph, where: Mapping[str, Index], value: int | None = None
) -> list[Store]:
    """The exit graph at one point, on a value (or on the accumulator)."""
    accs = None
    if value is not None:
        accs = {k: value for k, node in enumerate(source.nodes) if node.op == "acc"}
    original = maker.phase.stores
    numbers = source.copy_into(graph, [s.value for s in original], where, maker.ranges, accs)
    guards = [Guard(g.index.substitute(where, maker.ranges), g.low, g.high) for g in maker.limits(False)]
    live = tuple(g for g in guards if not g.always(maker.ranges))
    return [
        Store(s.buffer, s.address.substitute(where, maker.ranges), number, live)
        for s, number in zip(original, numbers, strict=True)
    ]


def _check(maker: _WinogradBuilder) -> Phase:
    """0 * x is 0 for finite x, NaN for others."""
    body, exit_ = Graph(), Graph()
    address = Index.axis("q") * maker.width + Index.axis(maker.feature.name)
    term = body.apply("mul", maker.dtype, body.load("sums", address, maker.dtype), body.const(0.0, maker.dtype))
    total = exit_.add(Node("acc", maker.dtype, attrs=(("number", 0),)))
    flag = exit_.apply("not", "bool", exit_.apply("is_finite", "bool", total))
    reds = (Red("q", maker.tiles), Red(maker.feature.name, maker.feature.extent, 1, True))
    accs = (Acc("add", maker.dtype, (term,)),)
    store = Store(FLAG, Index(), flag)
    return Phase("winograd.check", tuple(maker.outer), reds, accs, body, exit_, (store,), (), maker.last)


def _direct_fallback(maker: _WinogradBuilder) -> Phase:
    """The direct form on the block of tiles."""
    form, points, old = maker.form, maker.plan.points, maker.phase
    where: dict[str, Index] = {form.feature.name: maker.feature_index()}
    inner = []
    ranges = dict(maker.ranges)
    for dim in form.dims:
        span = min(maker.block[dim.axis] * dim.unit(points), dim.extent)
        step = maker.block[dim.axis] * dim.unit(points)
        axis = Axis(f"{dim.axis}v", span)
        where[dim.axis] = maker._of(f"{dim.axis}s") * step + (Index.axis(axis.name) if span > 1 else 0)
        if span > 1:
            inner.append(axis)
            ranges[axis.name] = span
    maker.ranges.update(ranges)
    reds = {r.name: r.extent for r in old.reds}
    body, exit_ = Graph(), Graph()
    source = maker.guarded(old.body, True)
    (acc,) = old.accs
    values = source.copy_into(body, acc.values, where, {**ranges, **reds})
    stores = _results(maker, exit_, maker.guarded(old.exit, False), where)
    axes = (*maker.outer, *inner, maker.feature)
    plain = tuple(Red(r.name, r.extent) for r in old.reds)
    return Phase(
        f"{old.name}.again",
        axes,
        plain,
        (replace(acc, values=tuple(values)),),
        body,
        exit_,
        tuple(stores),
        (),
        maker.last,
        FLAG,
    )
