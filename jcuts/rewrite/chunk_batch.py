"""Batch chunking (cache blocking across operations): runs a part of a program over chunks of its batch in a loop.

Intermediate values then stay in cache.  A *batch dimension* is a class of dimensions that equations tie together
(`trace.shard_rules`): splitting one splits them all, and no equation of the part mixes positions along it.  What does
not depend on the batch (weights) is computed once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
from jax import lax

from jcuts.trace import jaxapi
from jcuts.trace.shard_rules import Dimension, DimensionClasses, ShardRule, shard_rule

INNER = 0.25  # weight of values whose pieces are not contiguous, when dimensions compete


@dataclass(frozen=True)
class Segment:
    """Equations ``eqns[begin:end]`` of `Batch.eqns`, run on chunks of ``size`` positions of the batch."""

    begin: int
    end: int
    size: int


@dataclass
class Batch:
    """The batch dimension of a flat jaxpr.

    Attributes:
        closed: the program.
        extent: size of the batch.
        dims: variable -> its batch dimension, for every variable that has one.
        eqns: the leading equations that work along the batch, each position for itself, in program order.
        before: equations among and before them that do not depend on the batch.
        after: all others, in order.
    """

    closed: jaxapi.Closed
    extent: int
    dims: dict[Any, int]
    eqns: list[jaxapi.Eqn]
    ties: list[ShardRule]
    before: list[jaxapi.Eqn]
    after: list[jaxapi.Eqn]

    def crossing(self, place: int) -> list[Any]:
        """Values along the batch that are live across ``eqns[place]`` (defined before, used at or after it)."""
        return [v for eqn in self.eqns[:place] for v in eqn.outvars if v in self.dims and self._last_use(v) >= place]

    def _last_use(self, var: Any) -> int:
        return self._lasts.get(var, -1)

    @cached_property
    def _lasts(self) -> dict[Any, int]:
        last: dict[Any, int] = {}
        for place, eqn in enumerate(self.eqns):
            last.update((a, place) for a in eqn.invars if not jaxapi.is_literal(a))
        later = [a for eqn in self.after for a in eqn.invars] + list(self.closed.jaxpr.outvars)
        last.update((a, len(self.eqns)) for a in later if not jaxapi.is_literal(a))
        return last

    def local(self, begin: int, end: int, size: int) -> tuple[jaxapi.Closed, list[Any], list[Any]]:
        """``eqns[begin:end]`` at ``size`` positions of the batch.

        Returns: the closed jaxpr, the program's variables that are its inputs, and those that are its results.
        """
        group, ties = self.eqns[begin:end], self.ties[begin:end]
        made = {v for e in group for v in e.outvars}
        inputs = list(dict.fromkeys(a for e in group for a in e.invars if not jaxapi.is_literal(a) and a not in made))
        outputs = [v for e in group for v in e.outvars if self._last_use(v) >= end]

        def run(*args: Any) -> list[Any]:
            env: dict[Any, Any] = dict(zip(inputs, args, strict=True))
            for eqn, tied in zip(group, ties, strict=True):
                values = [read(a, env) for a in eqn.invars]
                params = {}
                if tied.localise is not None:
                    shapes = ([self._shape(a, size) for a in eqn.invars], [self._shape(v, size) for v in eqn.outvars])
                    params = tied.localise(*shapes)
                env.update(zip(eqn.outvars, jaxapi.bind_eqn(eqn, values, **params), strict=True))
            return [env[v] for v in outputs]

        types: list[Any] = [v.aval for v in inputs]
        avals = [
            jaxapi.ShapedArray(self._shape(v, size), t.dtype, weak_type=t.weak_type)
            for v, t in zip(inputs, types, strict=True)
        ]
        return jaxapi.new_closed_jaxpr(run, avals, name="piece"), inputs, outputs

    def _shape(self, atom: Any, size: int) -> tuple[int, ...]:
        shape = tuple(atom.aval.shape)
        d = None if jaxapi.is_literal(atom) else self.dims.get(atom)
        return shape if d is None else (*shape[:d], size, *shape[d + 1 :])

    def looped(self, segments: Sequence[Segment]) -> jaxapi.Closed:
        """The program with every segment as a loop over chunks; a segment at the whole batch's size stays as it is.

        Args: segments: covering `eqns` in order; every size divides the extent.
        """
        jaxpr = self.closed.jaxpr

        def run(*args: Any) -> list[Any]:
            env: dict[Any, Any] = dict(zip(jaxpr.invars, args, strict=True))
            env.update(zip(jaxpr.constvars, self.closed.consts, strict=True))
            _bind_all(self.before, env)
            for segment in segments:
                if segment.size == self.extent:
                    _bind_all(self.eqns[segment.begin : segment.end], env)
                else:
                    self._loop(segment, env)
            _bind_all(self.after, env)
            return [read(a, env) for a in jaxpr.outvars]

        return jaxapi.new_closed_jaxpr(run, [v.aval for v in jaxpr.invars], name="pieces")

    def _loop(self, segment: Segment, env: dict[Any, Any]) -> None:
        piece, inputs, outputs = self.local(segment.begin, segment.end, segment.size)
        outer = [env[v] for v in inputs]

        def body(number: Any, results: list[Any]) -> list[Any]:
            start = number * segment.size
            parts = [
                lax.dynamic_slice_in_dim(x, start, segment.size, self.dims[v]) if v in self.dims else x
                for v, x in zip(inputs, outer, strict=True)
            ]
            made = jaxapi.eval_closed(piece, *parts)
            return [
                lax.dynamic_update_slice_in_dim(whole, part, start, self.dims[v])
                for v, whole, part in zip(outputs, results, made, strict=True)
            ]

        blank = [jax.numpy.zeros(v.aval.shape, v.aval.dtype) for v in outputs]
        env.update(zip(outputs, lax.fori_loop(0, self.extent // segment.size, body, blank), strict=True))


def find_batch_dimension(closed: jaxapi.Closed) -> Batch | str:
    """The batch dimension along which a flat jaxpr's leading equations have the most bytes, or why there is none."""
    jaxpr = closed.jaxpr
    if jaxapi.has_effects(closed) or jaxapi.has_references(closed):
        return "the function has effects"
    ties = [shard_rule(eqn) for eqn in jaxpr.eqns]
    classes = DimensionClasses(jaxpr.eqns, ties)
    best: Batch | None = None
    best_bytes = 0.0
    for root in dict.fromkeys(classes.root((v, d)) for v in jaxpr.invars for d, n in enumerate(v.aval.shape) if n > 1):
        batch = _batch_of(closed, ties, classes.members(root))
        if batch is not None:
            results = [v for e in batch.eqns for v in e.outvars]
            total = sum(jaxapi.nbytes(v) * (1.0 if batch.dims[v] == 0 else INNER) for v in results)
            if total > best_bytes:
                best, best_bytes = batch, total
    return best if best is not None else "no dimension of an argument is a batch"


def _batch_of(closed: jaxapi.Closed, ties: Sequence[ShardRule | None], members: list[Dimension]) -> Batch | None:
    dims: dict[Any, int] = {}
    twice: set[Any] = set()
    for var, d in members:
        if var in dims:
            twice.add(var)
        dims[var] = d
    extents = {v.aval.shape[d] for v, d in members}
    if len(extents) != 1:
        return None
    local: list[jaxapi.Eqn] = []
    local_ties: list[ShardRule] = []
    before: list[jaxapi.Eqn] = []
    jaxpr = closed.jaxpr
    end = len(jaxpr.eqns)
    for place, (eqn, tied) in enumerate(zip(jaxpr.eqns, ties, strict=True)):
        atoms = [a for a in (*eqn.invars, *eqn.outvars) if not jaxapi.is_literal(a)]
        if not any(a in dims for a in atoms):
            before.append(eqn)
        elif tied is None or any(a in twice for a in atoms) or _needs_whole(eqn, tied, dims):
            end = place
            break
        else:
            local.append(eqn)
            local_ties.append(tied)
    if not local:
        return None
    return Batch(closed, extents.pop(), dims, local, local_ties, before, list(jaxpr.eqns[end:]))


def _needs_whole(eqn: jaxapi.Eqn, ties: ShardRule, dims: dict[Any, int]) -> bool:
    for side, i, d in ties.whole:
        atom = (eqn.invars if side == "in" else eqn.outvars)[i]
        if not jaxapi.is_literal(atom) and dims.get(atom) == d:
            return True
    # a result without the batch dimension although an operand has it: it would be made once per piece
    return any(v not in dims for v in eqn.outvars if not jaxapi.is_dropvar(v))


def read(atom: Any, env: dict[Any, Any]) -> Any:
    """The value of a literal or a variable."""
    return atom.val if jaxapi.is_literal(atom) else env[atom]


def _bind_all(eqns: Sequence[jaxapi.Eqn], env: dict[Any, Any]) -> None:
    for eqn in eqns:
        values = [read(a, env) for a in eqn.invars]
        env.update(zip(eqn.outvars, jaxapi.bind_eqn(eqn, values), strict=True))
