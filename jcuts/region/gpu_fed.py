"""Schedules of products whose operands are brought by warps of their own."""

from __future__ import annotations

from dataclasses import dataclass

from jcuts.dfg.program import Program
from jcuts.region.gpu_group_tiling import GROUP, LINE
from jcuts.region.gpu_tiles import WARP, scheduled
from jcuts.region.products import sides


@dataclass(frozen=True)
class FedTiling:
    """One schedule: a block's tile, groups along its rows, stages, warps that copy.

    Attributes:
        pixels: runs of pixels that are kept for all taps, 0 where none are. rounds: tiles of outputs of a block.
        early: whether what the exit adds is asked for before.
    """

    rows: int
    columns: int
    groups: int
    stages: int
    carriers: int
    pixels: int = 0
    rounds: int = 1
    early: int = 0

    @property
    def threads(self) -> int:
        """Of a block."""
        return GROUP * self.groups + WARP * self.carriers

    def of(self, program: Program) -> Program:
        """The scheduled program."""
        found = (("pixels", self.pixels, 0), ("rounds", self.rounds, 1), ("early", self.early, 0))
        more = tuple((name, count) for name, count, least in found if count > least)
        tile = (self.rows, self.columns, LINE // sides(program)[0].item)
        params = (("tile", tile), ("groups", (self.groups, 1)), ("stages", self.stages), ("fed", self.carriers))
        return scheduled(program, "product", self.threads, *params, ("rounded", 1), *more)
