"""Multi-tensor apply: the optimiser's updates of all parameters as one element-wise kernel launch, in place.

    p1' = f(p1, m1, g1), m1' = h(m1, g1), p2' = ...   ->   p1', m1', p2', ... = updates(p1, m1, g1, p2, ...)

(Apex' ``multi_tensor_apply``, torch's ``foreach`` optimisers.)  XLA computes an update where its gradient is made, in
a fusion whose result often cannot have the parameter's memory: another layer still reads the old value, or the
gradient has another layout.  With donated arguments it then copies parameters and results, two launches per leaf.
Here all gradients of a group come first and one call overwrites parameters and optimiser state
(`lower.horizontal`, `pipeline.weight_prep`).

A leaf is a set of results of the function that are element-wise in arguments of their own shape and type, in
gradients and in single numbers (learning rate, clipping factor, bias corrections).  Values that another equation reads
stay outside, so that none depends on the call.  No value changes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jcuts.rewrite.backward.rematerialize import ELEMENTWISE
from jcuts.rewrite.hoist_vectors import MOST, TYPES, barrier_call, body
from jcuts.trace import jaxapi

NAME = "updates"
"""Of the calls."""
LEAST_LEAVES = 8
"""Fewer updates are left where they are."""


@dataclass(frozen=True)
class Leaf:
    """Updates that share operations: of one parameter, and of the optimiser's state for it.

    Attributes: eqns: numbers of its equations, in order. operands, results: what these read from elsewhere, and make.
    """

    eqns: tuple[int, ...]
    operands: tuple[Any, ...]
    results: tuple[Any, ...]


def multi_tensor_updates(closed: jaxapi.Closed) -> tuple[jaxapi.Closed, int]:
    """Collects the updates of a training step in calls; returns the program and the number of their results."""
    leaves = _Updates(closed).leaves()
    if len(leaves) < LEAST_LEAVES:
        return closed, 0
    taken = {number for leaf in leaves for number in leaf.eqns}
    left = [eqn for number, eqn in enumerate(closed.jaxpr.eqns) if number not in taken]
    groups = _groups(leaves)
    made = jaxapi.with_eqns(closed, [*left, *(_call(closed, group) for group in groups)])
    return made, sum(len(leaf.results) for leaf in leaves)


def is_update(call: Any) -> bool:
    """Whether an equation is a call of updates."""
    return call.params.get("name") == NAME and body(call) is not None


def in_place(call: Any, arguments: Sequence[Any], results_of_function: Sequence[Any] = ()) -> dict[int, int]:
    """Which operands of a call of updates become which of its results.

    A result has the memory of the one argument of the function, of its shape and type, that its own operations read and
    no other result has: the new momentum that of the old one, the new parameter that of the old one.  Where it reads
    several (a momentum and a gradient that is an argument, too), it has that of the argument which `jax.jit` pairs with
    it where donated arguments come first: the n-th result of a shape and type with the n-th argument of them.

    Args: arguments, results_of_function: of the function.
    """
    inside = body(call)
    if inside is None:
        return {}
    made = {v: eqn for eqn in inside.jaxpr.eqns for v in eqn.outvars}
    place = {v: k for k, v in enumerate(inside.jaxpr.invars)}
    results = set(inside.jaxpr.outvars)
    known = set(arguments)
    like: list[set[int]] = []
    for result in inside.jaxpr.outvars:
        reads: set[int] = set()
        stack = [result]
        while stack:
            for atom in made[stack.pop()].invars:
                if jaxapi.is_literal(atom):
                    continue
                if atom in place:
                    reads.add(place[atom])
                elif atom not in results:
                    stack.append(atom)
        like.append({k for k in reads if call.invars[k] in known and call.invars[k].aval == result.aval})
    pairs = _paired(arguments, results_of_function)
    for number, ks in enumerate(like):
        paired = {k for k in ks if call.invars[k] is pairs.get(call.outvars[number])}
        like[number] = paired or ks
    found: dict[int, int] = {}
    while True:  # a result whose operand is certain leaves fewer to the others
        certain = {next(iter(ks)): n for n, ks in enumerate(like) if len(ks) == 1}
        if not certain:
            return found
        found |= certain
        like = [ks - certain.keys() for ks in like]


def _paired(arguments: Sequence[Any], results: Sequence[Any]) -> dict[Any, Any]:
    """Arguments by the result of their shape and type that is as many from the first."""
    alike: dict[Any, list[Any]] = defaultdict(list)
    for argument in arguments:
        alike[argument.aval.shape, argument.aval.dtype].append(argument)
    found = {}
    for result in results:
        waiting = [] if jaxapi.is_literal(result) else alike[result.aval.shape, result.aval.dtype]
        if waiting:
            found[result] = waiting.pop(0)
    return found


class _Updates:
    """The def-use chains of a flat program, and the updates in it."""

    def __init__(self, closed: jaxapi.Closed) -> None:
        jaxpr = closed.jaxpr
        self.eqns = jaxpr.eqns
        self.made = {v: number for number, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}
        self.users: dict[Any, set[int]] = defaultdict(set)
        for number, eqn in enumerate(jaxpr.eqns):
            for atom in eqn.invars:
                if not jaxapi.is_literal(atom):
                    self.users[atom].add(number)
        self.results = dict.fromkeys(v for v in jaxpr.outvars if not jaxapi.is_literal(v) and v in self.made)
        self.arguments = set(jaxpr.invars)

    def leaves(self) -> list[Leaf]:
        """All updates, in the order of the function's results."""
        leaves = (self._leaf(self._closed_under_use(members)) for members in self._connected())
        return _together([leaf for leaf in leaves if leaf is not None])

    def _connected(self) -> list[set[int]]:
        """Element-wise operations that results are made of, those of results that share one together."""
        parts: list[set[int]] = []
        of_eqn: dict[int, int] = {}
        for result in self.results:
            if not _is_array(result):
                continue
            mine: set[int] = set()
            stack = [self.made[result]]
            while stack:
                number = stack.pop()
                if number in mine or not self._is_member(number, result.aval.shape):
                    continue
                mine.add(number)
                stack += self._makers(number)
            for before in sorted({of_eqn[n] for n in mine if n in of_eqn}):
                mine |= parts[before]
                parts[before] = set()
            parts.append(mine)
            of_eqn |= dict.fromkeys(mine, len(parts) - 1)
        return [part for part in parts if part]

    def _makers(self, number: int) -> list[int]:
        """The equations that make what an equation reads."""
        return [self.made[a] for a in self.eqns[number].invars if not jaxapi.is_literal(a) and a in self.made]

    def _is_member(self, number: int, shape: tuple[int, ...]) -> bool:
        eqn = self.eqns[number]
        made = eqn.outvars[0].aval
        if jaxapi.primitive_name(eqn) == "broadcast_in_dim":
            return made.shape == shape and (jaxapi.is_literal(eqn.invars[0]) or eqn.invars[0].aval.size == 1)
        return jaxapi.primitive_name(eqn) in ELEMENTWISE and made.shape == shape and made.dtype.name in TYPES

    def _closed_under_use(self, members: set[int]) -> set[int]:
        """Those whose values nothing else reads, and that some result still needs."""
        while True:
            kept = {n for n in members if all(self.users[v] <= members for v in self.eqns[n].outvars)}
            needed: set[int] = set()
            stack = [n for n in kept if any(v in self.results for v in self.eqns[n].outvars)]
            while stack:
                number = stack.pop()
                if number in kept and number not in needed:
                    needed.add(number)
                    stack += self._makers(number)
            if needed == members:
                return members
            members = needed

    def _leaf(self, members: set[int]) -> Leaf | None:
        """The leaf of some operations; None where they are no update."""
        eqns = [self.eqns[n] for n in sorted(members)]
        inside = {v for eqn in eqns for v in eqn.outvars}
        atoms = [a for eqn in eqns for a in eqn.invars if not jaxapi.is_literal(a) and a not in inside]
        results = [v for eqn in eqns for v in eqn.outvars if v in self.results]
        if not results:
            return None
        shape = results[0].aval.shape
        for atom in atoms:
            if atom.aval.shape != shape and atom.aval.size != 1:
                return None
            if atom.aval.size != 1 and atom in self.made and _is_broadcast(self.eqns[self.made[atom]]):
                return None
        if not any(a in self.arguments and a.aval == v.aval for a in atoms for v in results):
            return None
        return Leaf(tuple(sorted(members)), tuple(dict.fromkeys(atoms)), tuple(results))


def _together(leaves: Sequence[Leaf]) -> list[Leaf]:
    """Leaves that read the same array as one: what overwrites it must be where it is read."""
    found: list[Leaf] = []
    place: dict[Any, int] = {}
    for leaf in leaves:
        arrays = [a for a in leaf.operands if a.aval.size > 1]
        for before in sorted({place[a] for a in arrays if a in place}):
            other, found[before] = found[before], Leaf((), (), ())
            operands = tuple(dict.fromkeys((*other.operands, *leaf.operands)))
            leaf = Leaf(tuple(sorted((*other.eqns, *leaf.eqns))), operands, (*other.results, *leaf.results))
        place |= dict.fromkeys((a for a in leaf.operands if a.aval.size > 1), len(found))
        found.append(leaf)
    return [leaf for leaf in found if leaf.eqns]


def _is_array(var: Any) -> bool:
    return getattr(var.aval.dtype, "name", "") in TYPES and var.aval.size > 1


def _is_broadcast(eqn: Any) -> bool:
    return jaxapi.primitive_name(eqn) in ("broadcast_in_dim", "iota")


def _groups(leaves: Sequence[Leaf]) -> list[list[Leaf]]:
    """Leaves in their order, as many together as a kernel has parameters for."""
    found: list[list[Leaf]] = []
    names: set[Any] = set()
    for leaf in leaves:
        mine = {*leaf.operands, *leaf.results}
        if not found or len(names | mine) > MOST:
            found.append([])
            names = set()
        found[-1].append(leaf)
        names |= mine
    return found


def _call(closed: jaxapi.Closed, leaves: Sequence[Leaf]) -> Any:
    """The call equation of some leaves."""
    eqns = [closed.jaxpr.eqns[n] for n in sorted(n for leaf in leaves for n in leaf.eqns)]
    operands = list(dict.fromkeys(a for leaf in leaves for a in leaf.operands))
    results = [v for leaf in leaves for v in leaf.results]
    inside = jaxapi.make_closed([], operands, results, eqns, [], like=closed)
    return barrier_call(NAME, inside, operands, results)
