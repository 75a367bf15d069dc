"""What a block of warp groups does that computes several tiles of a product one after the other."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from jcuts.base.errors import CompileRejected
from jcuts.codegen.cuda.group_shape import GroupShape, group_shape
from jcuts.dfg.program import Program
from jcuts.region.products import B, S, prologue

MOST_TILES = 32
"""Tiles of terms, each of which has code of its own."""


@dataclass(frozen=True)
class SteadyShape(GroupShape):
    """A block's work. Attributes: rounds: tiles of outputs."""

    rounds: int = 1

    @property
    def tiles_of_outputs(self) -> int:
        """Of the whole product."""
        return -(-self.left.extent // self.left.size) * -(-self.right.extent // self.right.size)

    @property
    def blocks(self) -> int:
        """Blocks of the grid."""
        return -(-self.tiles_of_outputs // self.rounds)


def steady_shape(program: Program) -> SteadyShape:
    """The work that a schedule gives to a block. Raises CompileRejected where its numbers do not fit each other."""
    rounds = int(str(dict(program.params)["rounds"]))
    plain = group_shape(replace(program, params=tuple((k, v) for k, v in program.params if k != "rounds")))
    shape = SteadyShape(**{f.name: getattr(plain, f.name) for f in fields(GroupShape)}, rounds=rounds)
    fits = rounds > 1 and shape.rounded and shape.cluster == 1 and {S, B}.isdisjoint(program.phases[0].ranges())
    fits = fits and 3 <= shape.stages <= shape.share <= MOST_TILES and shape.ahead < shape.share
    fits = fits and not (shape.held.loaded or shape.held.stored or shape.cached) and prologue(program) is None
    if not fits:
        raise CompileRejected(f"{program.name}: no blocks of {rounds} tiles of outputs")
    return shape
