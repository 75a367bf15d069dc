"""Shard-local partitioning: splits a program over Auto-sharded arguments into parts that need no communication.

Dimensions that one equation ties together form a class; the arguments' shardings give some classes mesh axes.  An
equation is local if every dimension that must be replicated is unsplit, no class gets two different splittings, and no
mesh axis occurs twice in one of its values.  Local equations become ``shard_map``s around planned calls at local
shapes; the others (a sum over the batch, a weight's gradient) stay with XLA, whose partitioner communicates for them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jcuts.primitive.sharding import Placement
from jcuts.trace import jaxapi
from jcuts.trace.inline import inline
from jcuts.trace.shard_rules import DimensionClasses, ShardRule, shard_rule

Axes = tuple[str, ...]


@dataclass(frozen=True)
class Part:
    """A local part: ``closed`` at local shapes, from the program's variables ``inputs`` to ``outputs``."""

    closed: jaxapi.Closed
    inputs: list[Any]
    outputs: list[Any]


@dataclass(frozen=True)
class Split:
    """A program in order: each step is a local part or an equation left to XLA."""

    flat: jaxapi.Closed
    steps: list[Part | jaxapi.Eqn]
    mesh: Any
    spec: Callable[[Any], P]

    @property
    def parts(self) -> list[Part]:
        """The local parts."""
        return [step for step in self.steps if isinstance(step, Part)]


def split(closed: jaxapi.Closed, placement: Placement) -> Split | str:
    """Find the local parts of a program whose flat arguments have the shardings of ``placement``.

    Returns: the split, or the reason why there is nothing to split.
    """
    mesh = _mesh(placement)
    if isinstance(mesh, str):
        return mesh
    if jaxapi.has_effects(closed) or jaxapi.has_references(closed):
        return "the function has effects"
    flat = jaxapi.dce(inline(closed))
    classes = _Classes(flat, placement)
    local = {
        id(e): ties
        for e, ties in zip(flat.jaxpr.eqns, classes.ties, strict=True)
        if ties is not None and classes.is_local(e, ties)
    }
    steps: list[Part | jaxapi.Eqn] = []
    used = _uses(flat)
    for level in _levels(flat, local):
        for group, is_local in level:
            if is_local and any(classes.is_split(v) for e in group for v in (*e.invars, *e.outvars)):
                steps.append(_part(group, local, classes, mesh, used))
            else:
                steps.extend(group)
    found = Split(flat, steps, mesh, classes.spec)
    return found if found.parts else "no equation is local to a shard"


def plan_parts(found: Split, plan: Callable[[jaxapi.Closed], Any]) -> list[Any]:
    """``plan(closed)`` of every part, in a context in which its result may run inside ``shard_map``."""
    with jaxapi.without_mesh():
        return [plan(part.closed) for part in found.parts]


def assemble(found: Split, call: Callable[[jaxapi.Closed, Sequence[Any]], Sequence[Any]]) -> jaxapi.Closed:
    """The whole program again, each local part as ``shard_map`` of ``call(part at local shapes, its arguments)``."""
    jaxpr = found.flat.jaxpr

    def run(*args: Any) -> list[Any]:
        env: dict[Any, Any] = dict(zip(jaxpr.invars, args, strict=True))
        env.update(zip(jaxpr.constvars, found.flat.consts, strict=True))

        def read(atom: Any) -> Any:
            return atom.val if jaxapi.is_literal(atom) else env[atom]

        for step in found.steps:
            if isinstance(step, Part):
                body = jax.shard_map(
                    lambda *xs, part=step: tuple(call(part.closed, xs)),
                    mesh=found.mesh,
                    in_specs=tuple(found.spec(v) for v in step.inputs),
                    out_specs=tuple(found.spec(v) for v in step.outputs),
                    check_vma=False,
                )
                env.update(zip(step.outputs, body(*(env[v] for v in step.inputs)), strict=True))
            else:
                outs = jaxapi.bind_eqn(step, [read(a) for a in step.invars])
                env.update(zip(step.outvars, outs, strict=True))
        return [read(v) for v in jaxpr.outvars]

    return jaxapi.new_closed_jaxpr(run, [v.aval for v in jaxpr.invars])


def _mesh(placement: Placement) -> Any:
    meshes = {s.mesh for s in placement.shardings if isinstance(s, NamedSharding)}
    if len(meshes) != 1:
        return "the arguments are not all on one mesh"
    if any(not isinstance(s, NamedSharding) and s is not None and len(s.device_set) > 1 for s in placement.shardings):
        return "an argument has a sharding that names no mesh"
    (mesh,) = meshes
    if any(kind != AxisType.Auto for kind in mesh.axis_types):
        return "a mesh axis is Explicit"
    return mesh


def _levels(flat: jaxapi.Closed, local: dict[int, ShardRule]) -> list[list[tuple[list[jaxapi.Eqn], bool]]]:
    """Equations by level: the local ones of a level together, then the others; producers always come first."""
    level_of: dict[Any, tuple[int, bool]] = {}
    levels: list[list[tuple[list[jaxapi.Eqn], bool]]] = []
    for eqn in flat.jaxpr.eqns:
        mine = id(eqn) in local
        level = 0
        for atom in eqn.invars:
            if not jaxapi.is_literal(atom) and atom in level_of:
                before, was_local = level_of[atom]
                level = max(level, before + (1 if mine and not was_local else 0))
        level_of.update((v, (level, mine)) for v in eqn.outvars)
        while len(levels) <= level:
            levels.append([([], True), ([], False)])
        levels[level][0 if mine else 1][0].append(eqn)
    return levels


def _uses(flat: jaxapi.Closed) -> dict[Any, set[int]]:
    used: dict[Any, set[int]] = {}
    for eqn in flat.jaxpr.eqns:
        for atom in eqn.invars:
            if not jaxapi.is_literal(atom):
                used.setdefault(atom, set()).add(id(eqn))
    for atom in flat.jaxpr.outvars:
        if not jaxapi.is_literal(atom):
            used.setdefault(atom, set()).add(0)  # 0 is no equation: used outside every part
    return used


def _part(
    group: list[jaxapi.Eqn], local: dict[int, ShardRule], classes: _Classes, mesh: Any, used: dict[Any, set[int]]
) -> Part:
    inside = {id(e) for e in group}
    made = {v for e in group for v in e.outvars}
    inputs: list[Any] = list(
        dict.fromkeys(a for e in group for a in e.invars if not jaxapi.is_literal(a) and a not in made)
    )
    outputs = [v for e in group for v in e.outvars if used.get(v, set()) - inside]

    def shape(atom: Any) -> tuple[int, ...]:
        axes = classes.axes(atom)
        return tuple(n // math.prod(mesh.shape[a] for a in axes[d]) for d, n in enumerate(atom.aval.shape))

    def run(*args: Any) -> list[Any]:
        env: dict[Any, Any] = dict(zip(inputs, args, strict=True))

        def read(atom: Any) -> Any:
            return atom.val if jaxapi.is_literal(atom) else env[atom]

        for eqn in group:
            ties = local[id(eqn)]
            params = {k: None for k in ("sharding", "out_sharding") if k in eqn.params}
            if ties.localise is not None:
                params |= ties.localise([shape(a) for a in eqn.invars], [shape(v) for v in eqn.outvars])
            values = [read(a) for a in eqn.invars]
            env.update(zip(eqn.outvars, jaxapi.bind_eqn(eqn, values, **params), strict=True))
        return [env[v] for v in outputs]

    types: list[Any] = [v.aval for v in inputs]
    avals = [jaxapi.ShapedArray(shape(v), t.dtype, weak_type=t.weak_type) for v, t in zip(inputs, types, strict=True)]
    with jaxapi.without_mesh():
        return Part(jaxapi.new_closed_jaxpr(run, avals, name="shard"), inputs, outputs)


class _Classes:
    """Classes of dimensions, and the mesh axes of each."""

    def __init__(self, flat: jaxapi.Closed, placement: Placement) -> None:
        self.ties = [shard_rule(e) for e in flat.jaxpr.eqns]
        self._classes = DimensionClasses(flat.jaxpr.eqns, self.ties)
        self._axes: dict[tuple[Any, int], Axes | None] = {}
        for var, sharding in zip(flat.jaxpr.invars, placement.shardings, strict=True):
            spec = sharding.spec if isinstance(sharding, NamedSharding) else ()
            for d, entry in enumerate(spec):
                axes = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
                if axes:
                    root = self._classes.root((var, d))
                    # Two different splittings of one class: None, and whatever touches it stays with XLA.
                    self._axes[root] = axes if self._axes.get(root, axes) == axes else None

    def _of(self, atom: Any, d: int) -> Axes | None:
        return () if jaxapi.is_literal(atom) else self._axes.get(self._classes.root((atom, d)), ())

    def axes(self, atom: Any) -> list[Axes]:
        """Mesh axes of every dimension of a value."""
        return [self._of(atom, d) or () for d in range(len(atom.aval.shape))]

    def is_split(self, atom: Any) -> bool:
        """Whether any dimension of a value is split."""
        return any(self.axes(atom))

    def spec(self, atom: Any) -> P:
        """The value's partition."""
        return P(*(axes if len(axes) > 1 else axes[0] if axes else None for axes in self.axes(atom)))

    def is_local(self, eqn: jaxapi.Eqn, ties: ShardRule) -> bool:
        """Whether each device can compute its part of the equation from its parts of the operands."""
        for dim in ties.whole:
            key = self._classes.key(eqn, dim)
            if key is not None and self._of(*key) != ():
                return False
        atoms: list[Any] = [a for a in (*eqn.invars, *eqn.outvars) if not jaxapi.is_literal(a)]
        for atom in atoms:
            axes = [self._of(atom, d) for d in range(len(atom.aval.shape))]
            named = [a for entry in axes if entry for a in entry]
            if None in axes or len(named) != len(set(named)):
                return False
        return True
