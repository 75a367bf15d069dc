"""Persistence of partitions: which equations form one region, as JSON rows in the tuning database."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jcuts.base.errors import Refusal
from jcuts.fusion.dag import Dag, is_acyclic_cover, is_convex
from jcuts.fusion.dag import NodeSet as Members
from jcuts.kernel_ir.program import Program
from jcuts.kernel_ir.verify import read
from jcuts.lower.layer_fusion import lower_region_or_layers
from jcuts.pipeline.computation import Computation, Region


def load_partition(level: Computation) -> dict[str, Any]:
    """The cover as JSON data, with programs: a GPU's are not all what `build` makes. Inverse of `restore`."""
    numbers: dict[str, int] = {}
    texts: list[str] = []

    def row(subset: Region) -> list[Any]:
        if subset.program.digest not in numbers:
            numbers[subset.program.digest] = len(texts)
            texts.append(subset.program.to_text())
        return [sorted(subset.members), numbers[subset.program.digest]]

    left = [[m, r.op, r.reason] for m, r in sorted(level.left_out.items())]
    return {
        "subsets": [row(s) for s in level.subsets],
        "library": [row(s) for s in level.library],
        "left": left,
        "programs": texts,
    }


def from_json(level: Computation, cover: Mapping[str, Any]) -> bool:
    """Takes what `stored` wrote; False where it is no cover of this graph.

        Then the level's cover is as it was, but ``level.made`` may hold programs of the other.
    Raises: IRError for a program that is none.
    """
    programs = [read(text, signed=True) for text in cover["programs"]]  # a GPU's partition of others is not taken
    found = [
        [(frozenset(map(int, members)), programs[number]) for members, number in cover[kind]]
        for kind in ("subsets", "library")
    ]
    if not is_partition(level, [members for members, _ in found[0]]):
        return False
    for members, program in (*found[0], *found[1]):
        if members in level.subset_cache and level.subset_cache[members].program.digest != program.digest:
            del level.subset_cache[members]
    made = [[level.subset(members, program) for members, program in part] for part in found]
    if not all(_is_of(subset) for part in made for subset in part):
        return False
    left_out = {int(m): Refusal(str(op), str(why)) for m, op, why in cover["left"]}
    if not left_out.keys() <= {n.number for n in level.graph.nodes}:
        return False
    level.left_out = left_out
    level.subsets, level.library = made
    return True


def _is_of(subset: Region) -> bool:
    """Whether a subset's program takes and gives what its equations do."""
    pairs = (subset.program.inputs, subset.inputs), (subset.program.outputs, subset.outputs)
    return all(
        [(tuple(b.shape), b.dtype) for b in buffers] == [(v.aval.shape, v.aval.dtype.name) for v in values]
        for buffers, values in pairs
    )


def is_partition(level: Computation, cover: Sequence[Members]) -> bool:
    """Whether subsets are of this graph, disjoint and convex, and can run one after the other."""
    dag = Dag.of((n.number for n in level.graph.nodes), level.graph.edges())
    covered: set[int] = set()
    for members in cover:
        if not members or members & covered or not members <= dag.nodes or not is_convex(dag, members):
            return False
        covered |= members
    return is_acyclic_cover(dag, [*cover, *(frozenset({n}) for n in dag.nodes - covered)])


def apply_stored(level: Computation, cover: Sequence[Sequence[int]]) -> bool:
    """Takes a cover from the database, after checking that it is one of this graph; False if it is not."""
    found: list[tuple[Members, Program]] = []
    sets = [frozenset(int(n) for n in numbers) for numbers in cover]
    if not is_partition(level, sets):
        return False
    for members in sets:
        program = lower_region_or_layers(level.graph, members)
        if isinstance(program, Refusal):
            return False
        found.append((members, program))
    level.set_partition(found)
    return True
