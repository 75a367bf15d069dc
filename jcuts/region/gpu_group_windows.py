"""Candidate schedules of convolutions by warp groups that keep pixels in shared memory, ranked by counted cycles."""

from __future__ import annotations

from dataclasses import dataclass

from jcuts.dfg.program import Program
from jcuts.region.gpu_group_tiling import GROUP, LINE
from jcuts.region.gpu_tiles import scheduled


@dataclass(frozen=True)
class WindowTiling:
    """One schedule: a block's tile, warp groups along its rows, tiles of weights and runs of pixels in shared memory.

    Attributes:
        rounds: tiles of outputs of a block. spread: whether copies are started among the steps of products.
        steps: of terms, that are one group of instructions.
    """

    rows: int
    columns: int
    groups: int
    stages: int
    pixels: int
    rounds: int = 1
    spread: int = 0
    steps: int = 1

    @property
    def threads(self) -> int:
        """Of a block."""
        return GROUP * self.groups

    def of(self, program: Program) -> Program:
        """The scheduled program."""
        found = (("rounds", self.rounds, 1), ("spread", self.spread, 0), ("steps", self.steps, 1))
        more = tuple((name, count) for name, count, least in found if count > least)
        tile = (self.rows, self.columns, LINE // 4)
        params = (("tile", tile), ("groups", (self.groups, 1)), ("stages", self.stages), ("pixels", self.pixels))
        return scheduled(program, "product", self.threads, *params, ("rounded", 1), *more)
