"""Products by warp groups whose units do not wait for exits: a block computes several tiles, and finishes each beside
the products of the next.

Totals of the tile before stay in registers and go through the exit graph, a few neighbours at a time, among the
products of the tile at hand; copies of the next tile's first terms are under way before this one's last are multiplied.
The units and memory then work all the time; but twice the registers of a tile limit its size, and every tile of terms
has code of its own.  Before the first tile there is none: its place lies behind the last row, where nothing is stored.

float32 with rounded weights, sums of up to 1024 terms (see `product_groups`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from jcuts.codegen import lanes as L
from jcuts.codegen.cuda import tensor, wgmma
from jcuts.codegen.cuda.group_fragments import Rows
from jcuts.codegen.cuda.product_exit import Totals, finishing
from jcuts.codegen.cuda.product_groups import GroupEmitter
from jcuts.codegen.cuda.product_tiles import Copier
from jcuts.codegen.cuda.steady_shape import SteadyShape
from jcuts.region.products import COLUMNS, ROWS


class SteadyEmitter(GroupEmitter):
    """Emits the work of one thread."""

    shape: SteadyShape
    number: L.Value | None = None
    """Of the block."""

    def _places(self, block: L.Value) -> dict[str, L.Value]:
        if self.number is None:
            self.number = block
        return super()._places(block)

    def emit(self) -> None:
        """All tiles of the block."""
        builder, shape = self.builder, self.shape
        assert self.number is not None
        self.rows = Rows(builder, shape.left, self.shared, self.row_warp, self.lane)
        self.bases = [
            self._descriptor(tile, warp)
            for tile, warp in ((shape.left, self.group_row), (shape.right, self.column_warp))
        ]
        copiers = self._copiers(self.variables)
        for number in range(shape.ahead):
            for part in self._parts(copiers, number, L.I32(number * shape.stage), None):
                next(part)
            tensor.commit(builder)
        before = builder.block
        loop, after = builder.append_basic_block("tiles"), builder.append_basic_block("tiles.done")
        builder.branch(loop)
        builder.position_at_end(loop)

        def carried(kind: L.Type, start: L.Value) -> L.Value:
            found = builder.phi(kind)
            found.add_incoming(start, before)
            return found

        high, wide = shape.left.warp // wgmma.ROWS, shape.right.warp // 8
        nowhere = -(-shape.left.extent // shape.left.size) * shape.left.size
        tile = carried(L.I32, self.number)
        stages = [carried(L.I32, L.I32(0)), carried(L.I32, L.I32(shape.ahead * shape.stage))]
        last = [carried(L.I32, L.I32(nowhere)), carried(L.I32, L.I32(0))]
        old = [[[carried(L.F32, L.F32(0.0)) for _ in range(4)] for _ in range(wide)] for _ in range(high)]
        here = super()._places(tile)
        following = builder.add(tile, L.I32(shape.blocks))
        there = builder.icmp_signed("<", following, L.I32(shape.tiles_of_outputs))
        ahead = super()._places(builder.select(there, following, tile))
        totals, places = self._tile(here, ahead, there, stages, self._leaving(old, last))
        for phi, value in zip(
            [tile, *stages, *last, *_flat(old)],
            [following, *places, here[ROWS], here[COLUMNS], *_flat(totals)], strict=True,
        ):  # fmt: skip
            phi.add_incoming(value, builder.block)
        builder.cbranch(there, loop, after)
        builder.position_at_end(after)
        tensor.wait(builder, 0)
        for _ in self._leaving(totals, [here[ROWS], here[COLUMNS]]):
            pass

    def _tile(
        self, here: dict[str, L.Value], following: dict[str, L.Value], there: L.Value, stages: list[L.Value],
        leaving: Iterator[None],
    ) -> tuple[Totals, list[L.Value]]:  # fmt: skip
        """The totals of a tile, and where in shared memory the next one begins to be read and to be written.

        Args: following: the place of the next tile; there: whether there is one; leaving: the exit of the one before.
        """
        builder, shape = self.builder, self.shape
        mine, others = self._copiers(here), self._copiers(following)
        reading, writing = stages
        high, wide = shape.left.warp // wgmma.ROWS, shape.right.warp // 8
        totals: Totals = [[[L.F32(0.0) for _ in range(4)] for _ in range(wide)] for _ in range(high)]
        each = -(-high * wide * 2 // (shape.right.beside * shape.share))
        rest = _endless(leaving)
        for number in range(shape.share):
            tensor.wait(builder, shape.ahead - 1)
            wgmma.proxy_fence(builder)
            tensor.barrier(builder)
            later = number + shape.ahead
            if later < shape.share:
                parts = self._parts(mine, later, writing, None)
            else:
                parts = self._parts(others, later - shape.share, writing, there)
            totals = self.products(L.I32(number), reading, totals, _among(parts, [rest] * each))
            tensor.commit(builder)
            reading, writing = self.next_stage(reading), self.next_stage(writing)
        for _ in leaving:
            pass
        return wgmma.finished(builder, totals), [reading, writing]

    # -- copies -------------------------------------------------------------------------------------------------
    def _copiers(self, places: dict[str, L.Value]) -> list[Copier]:
        shape = self.shape
        return [
            Copier(self.frame, tile, shape.threads, self.thread, places[axis], self.shared)
            for tile, axis in ((shape.left, ROWS), (shape.right, COLUMNS))
        ]

    def _parts(self, copiers: list[Copier], number: int, stage: L.Value, where: L.Value | None) -> list[Iterator[None]]:
        """Copies of a tile of terms, one after the other. Args: where: a condition under which it is read."""
        first = number * self.shape.left.terms
        found: list[Iterator[None]] = []
        for copier in copiers:
            copies = copier.copies(L.I32(first), stage, L.I32(self.shape.terms - first), where)
            found += [copies] * len(copier.places)
        return found

    # -- the exit -----------------------------------------------------------------------------------------------
    def _leaving(self, totals: Totals, place: list[L.Value]) -> Iterator[None]:
        """The exit graph on the totals of a tile, a few neighbours at a time."""
        builder, shape = self.builder, self.shape
        variables = {
            **self.variables,
            ROWS: builder.add(place[0], self.row_warp), COLUMNS: builder.add(place[1], self.column_warp),
        }  # fmt: skip
        frame = replace(self.frame, variables=variables, cache={})
        tiles = (shape.left, shape.right)
        return finishing(frame, self.phase, tiles, self.buffers, self.lane, totals, beyond=shape.left.size)


def _flat(totals: Totals) -> list[L.Value]:
    return [value for rows in totals for tile in rows for value in tile]


def _endless(parts: Iterator[None]) -> Iterator[None]:
    yield from parts
    while True:
        yield


def _among(many: list[Iterator[None]], few: list[Iterator[None]]) -> list[Iterator[None]]:
    """Two lists as one, evenly mixed."""
    keyed = [((k + 0.5) / len(found), part) for found in (many, few) for k, part in enumerate(found)]
    return [part for _, part in sorted(keyed, key=lambda item: item[0])]
