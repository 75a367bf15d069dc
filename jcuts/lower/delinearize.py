"""Delinearises axes: an axis m used as m // 14 and m % 14 becomes two loop axes, so that every address is affine.

x[25088 (m // 196) + 1792 (m // 14 % 14) + ...]  for m in 784   becomes   x[25088 a + 1792 b + ...]  for a, b, c
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace

from jcuts.kernel_ir.index import Index
from jcuts.kernel_ir.loop_transforms import map_indices
from jcuts.kernel_ir.program import Axis, Phase, Program, Red


def delinearize(program: Program) -> Program:
    """The program (of one phase) with an axis split wherever that makes all of its addresses affine; else unchanged."""
    phase = program.phases[0]
    found = {x.name: _digits(phase, x.name, x.extent) for x in (*phase.axes, *phase.reds)}
    found = {name: shape for name, shape in found.items() if len(shape) > 1}
    if not found:
        return program
    axes = [(f"{a.name}_{k}", n) for a in phase.axes for k, n in enumerate(found.get(a.name, (a.extent,)))]
    reds = [(f"{r.name}_{k}", n) for r in phase.reds for k, n in enumerate(found.get(r.name, (r.extent,)))]
    ranges = dict((*axes, *reds))
    where: dict[str, Index] = {}
    for x in (*phase.axes, *phase.reds):
        names = [n for n in ranges if n.rpartition("_")[0] == x.name]
        total, stride = Index(), 1
        for name in reversed(names):
            total, stride = total + Index.axis(name) * stride, stride * ranges[name]
        where[x.name] = total
    made = map_indices(phase, lambda index: index.substitute(where, ranges))
    made = replace(made, axes=tuple(Axis(*a) for a in axes), reds=tuple(Red(*r) for r in reds))
    linear = not any(atom.inner is not None for index in _indices(made) for atom, _ in index.terms)
    return replace(program, phases=(made,)) if linear else program


def _digits(phase: Phase, name: str, extent: int) -> tuple[int, ...]:
    """Extents of the sub-axes into which quotients and remainders split an axis, outermost first."""
    cuts = sorted({1, extent, *(m for index in _indices(phase) for m in _divisors(index, name))})
    if any(b % a for a, b in itertools.pairwise(cuts)):
        return (extent,)
    return tuple(b // a for a, b in itertools.pairwise(cuts))[::-1]


def _divisors(index: Index, name: str) -> Iterable[int]:
    """Divisors that an address applies to an axis, nested ones multiplied; other quotients are only searched."""
    for atom, _ in index.terms:
        if atom.inner is None or name not in atom.inner.axes():
            continue
        yield from _divisors(atom.inner, name)
        alone = _alone(atom.inner, name)
        if alone is not None:
            yield alone * atom.modulus


def _alone(index: Index, name: str) -> int | None:
    """The divisor, where an expression is exactly a quotient of the axis."""
    if index.const or len(index.terms) != 1 or index.terms[0][1] != 1:
        return None
    atom = index.terms[0][0]
    if atom.inner is None:
        return 1 if atom.name == name else None
    inner = _alone(atom.inner, name)
    return inner * atom.modulus if inner is not None and atom.kind == "div" else None


def _indices(phase: Phase) -> Iterable[Index]:
    for graph in (phase.body, phase.exit):
        for node in graph.nodes:
            if node.index is not None:
                yield node.index
            yield from (g.index for g in node.guards)
    for store in phase.stores:
        yield store.address
        yield from (g.index for g in store.guards)
