"""Multi-tensor reduction: the sums over all leaves of a global norm are one call, of blocked partial sums.

    sum(g1 * g1) + sum(g2 * g2) + ...   ->   sum(partial_sums(g1, g2, ...))

(Apex' ``multi_tensor_l2norm``, torch's ``_foreach_norm``.)  Clipping by the global norm adds up the squares of all
gradients.  XLA launches a reduction for every leaf, most of them small; here one launch reads all leaves
(`lower.reduction.multi_tensor_sums`, `pipeline.weight_prep`) and a second adds up what its blocks leave, in a fixed
order, without atomic additions.

A leaf is a full reduction (``reduce_sum``, float32) of an element-wise function of one array and of single numbers, and
a term of a chain of scalar additions that alone reads it.  What else the chain adds stays in it.  The array must be in
memory in any case: where the reduction alone reads what an element-wise operation makes, XLA's fusion writes nothing.
The sums have the same terms in another order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jcuts.rewrite.backward.rematerialize import ELEMENTWISE, TYPES
from jcuts.rewrite.hoist_vectors import LAYOUTS, MOST, barrier_call, body
from jcuts.trace import jaxapi

NAME = "partial_sums"
"""Of the calls."""
LEAST_LEAVES = 8
"""Fewer sums are left where they are."""
CHUNK = 1 << 14
"""Elements of one partial sum: 64 KiB of float32, which a block reads in some 14 us at an eighth of a multiprocessor's
share of an H200's bandwidth, an order of magnitude above its start and its shuffles; the partial sums are 1/16384 of
what is read, and a parameter of a few million elements still is several hundred blocks."""
MOST_OPERATIONS = 8
"""Element-wise operations between an array and its sum, at most."""
ADD = ("add", "add_any")
BROADCASTS = ("broadcast_in_dim", "iota")
REPEATED = ("abs", "integer_pow", "square")
"""Operations that are computed again where something else reads their result, and so are casts to wider types and the
product of an array with itself: the array is in memory, not they."""
TYPE = "float32"


@dataclass(frozen=True)
class Leaf:
    """A term of the chain.

    Attributes: eqns: numbers of the element-wise equations, in order. operands: what these read, the array among them;
        value: what is summed.
    """

    eqns: tuple[int, ...]
    operands: tuple[Any, ...]
    value: Any


@dataclass(frozen=True)
class LeafSums:
    """The partial sums of one leaf in a call.

    Attributes: operands: the numbers of the call's operands that ``function``, the element-wise one, takes.
        blocks, chunk: partial sums, and the elements of each (the last may have fewer).
    """

    operands: tuple[int, ...]
    function: jaxapi.Closed
    blocks: int
    chunk: int


def multi_tensor_norms(closed: jaxapi.Closed) -> tuple[jaxapi.Closed, int]:
    """Collects the sums of global norms in calls; returns the program and the number of these sums."""
    chains = _Chains(closed)
    eqns: list[Any] = []
    count = 0
    for number, eqn in enumerate(closed.jaxpr.eqns):
        terms = chains.terms(number)
        leaves = {term: leaf for term in terms if (leaf := chains.leaf(term)) is not None}
        if len(leaves) < LEAST_LEAVES:
            eqns.append(eqn)
            continue
        count += len(leaves)
        reduction = closed.jaxpr.eqns[chains.made[next(iter(leaves))]]
        rest = [term for term in terms if jaxapi.is_literal(term) or term not in leaves]
        eqns += _replacement(closed, eqn, reduction, list(leaves.values()), rest)
    return (jaxapi.dce(jaxapi.with_eqns(closed, eqns)), count) if count else (closed, 0)


def is_norm(call: Any) -> bool:
    """Whether an equation is a call of partial sums."""
    return leaf_sums(call) is not None


def leaf_sums(call: Any) -> list[LeafSums] | None:
    """The leaves of a call of partial sums, in the order of its result; None for any other equation."""
    inside = body(call) if call.params.get("name") == NAME else None
    if inside is None or len(inside.jaxpr.outvars) != 1:
        return None
    made = {v: eqn for eqn in inside.jaxpr.eqns for v in eqn.outvars}
    last = made.get(inside.jaxpr.outvars[0])
    if last is None or jaxapi.primitive_name(last) != "concatenate":
        return None
    leaves = [_leaf_sums(inside, made, part) for part in last.invars]
    found = [leaf for leaf in leaves if leaf is not None]
    return found if len(found) == len(leaves) else None


class _Chains:
    """The def-use chains of a flat program, and the chains of scalar additions in it."""

    def __init__(self, closed: jaxapi.Closed) -> None:
        self.eqns = closed.jaxpr.eqns
        self.made = {v: number for number, eqn in enumerate(self.eqns) for v in eqn.outvars}
        self.users: dict[Any, list[int]] = defaultdict(list)
        for number, eqn in enumerate(self.eqns):
            for atom in eqn.invars:
                if not jaxapi.is_literal(atom):
                    self.users[atom].append(number)
        self.results = {v for v in closed.jaxpr.outvars if not jaxapi.is_literal(v)}

    def terms(self, root: int) -> list[Any]:
        """What a chain of additions adds up, in order; none where an equation is not the last addition of a chain."""
        if not self._is_addition(root):
            return []
        (total,) = self.eqns[root].outvars
        if self._is_private(total) and self._is_addition(self.users[total][0]):
            return []
        found: list[Any] = []
        stack = list(reversed(self.eqns[root].invars))
        while stack:
            atom = stack.pop()
            if not jaxapi.is_literal(atom) and self._is_private(atom) and self._is_addition(self.made.get(atom)):
                stack += reversed(self.eqns[self.made[atom]].invars)
            else:
                found.append(atom)
        return found

    def leaf(self, term: Any) -> Leaf | None:
        """The leaf that a term is the sum of; None where it is no such sum."""
        number = None if jaxapi.is_literal(term) else self.made.get(term)
        if number is None or not self._is_private(term):
            return None
        eqn = self.eqns[number]
        value = eqn.invars[0]
        if jaxapi.primitive_name(eqn) != "reduce_sum" or jaxapi.is_literal(value) or term.aval.shape:
            return None
        if value.aval.dtype.name != TYPE or value.aval.size < 2:
            return None
        return self._cone(value, number)

    def _is_addition(self, number: int | None) -> bool:
        """Whether an equation adds two single numbers of float32."""
        if number is None:
            return False
        eqn = self.eqns[number]
        made = eqn.outvars[0].aval
        return jaxapi.primitive_name(eqn) in ADD and not made.shape and made.dtype.name == TYPE

    def _is_private(self, value: Any) -> bool:
        """Whether one equation alone reads a value, once."""
        return len(self.users[value]) == 1 and value not in self.results

    def _cone(self, value: Any, reduction: int) -> Leaf | None:
        """The element-wise equations between one array and the value that is summed."""
        shape, members, readers, front = value.aval.shape, set[int](), {reduction}, {value}
        while len(readers) <= MOST_OPERATIONS + 1:
            latest = max(front, key=lambda v: self.made.get(v, -1))
            step = self._step(latest, shape, readers)
            if step is None:
                break
            number, arrays, broadcasts = step
            readers.add(number)
            members |= {number, *broadcasts}
            front = (front - {latest}) | arrays
        if len(front) != 1 or not self._is_in_memory(*front):
            return None
        eqns = [self.eqns[n] for n in sorted(members)]
        inside = {v for eqn in eqns for v in eqn.outvars}
        atoms = [a for eqn in eqns for a in eqn.invars if not jaxapi.is_literal(a) and a not in inside]
        return Leaf(tuple(sorted(members)), tuple(dict.fromkeys([*front, *atoms])), value)

    def _step(self, value: Any, shape: tuple[int, ...], readers: set[int]) -> tuple[int, set[Any], list[int]] | None:
        """The element-wise equation that makes a value: its number, the arrays that it reads, and the broadcasts of
        single numbers.  None where there is none, or something else than ``readers`` needs the value (but for those in
        `REPEATED`)."""
        number = self.made.get(value)
        if number is None:
            return None
        eqn = self.eqns[number]
        name = jaxapi.primitive_name(eqn)
        if name not in ELEMENTWISE or len(eqn.outvars) != 1:
            return None
        if not _is_repeated(eqn) and (value in self.results or not readers.issuperset(self.users[value])):
            return None
        arrays: set[Any] = set()
        broadcasts = []
        for atom in eqn.invars:
            if jaxapi.is_literal(atom) or atom.aval.size == 1:
                continue
            maker = self.made.get(atom)
            if maker is not None and self._is_broadcast_number(maker):
                broadcasts.append(maker)
            else:
                arrays.add(atom)
        if not arrays or any(a.aval.shape != shape or a.aval.dtype.name not in TYPES for a in arrays):
            return None
        return number, arrays, broadcasts

    def _is_broadcast_number(self, number: int) -> bool:
        eqn = self.eqns[number]
        if jaxapi.primitive_name(eqn) != "broadcast_in_dim" or len(eqn.invars) != 1:
            return False
        return jaxapi.is_literal(eqn.invars[0]) or eqn.invars[0].aval.size == 1

    def _is_in_memory(self, array: Any) -> bool:
        """Whether an array is written in any case: an argument, a result, what several equations read, or what no
        element-wise operation makes."""
        number = self.made.get(array)
        if number is None or array in self.results:
            return True
        name = jaxapi.primitive_name(self.eqns[number])
        if name in BROADCASTS:
            return False
        return name not in ELEMENTWISE | LAYOUTS or len(set(self.users[array])) > 1


def _is_repeated(eqn: Any) -> bool:
    """Whether an element-wise equation is computed again rather than stored."""
    name = jaxapi.primitive_name(eqn)
    if name == "convert_element_type" and not jaxapi.is_literal(eqn.invars[0]):
        return eqn.invars[0].aval.dtype.itemsize <= eqn.outvars[0].aval.dtype.itemsize
    return name in REPEATED or (name == "mul" and eqn.invars[0] is eqn.invars[1])


def _replacement(
    closed: jaxapi.Closed, root: Any, reduction: Any, leaves: Sequence[Leaf], rest: list[Any]
) -> list[Any]:
    """The equations in place of a chain's last addition: the calls, the sums of their results, and the additions.

    Args: reduction: one of the leaves' sums. rest: the terms of the chain that are no leaves.
    """
    eqns, totals = [], []
    groups = _groups(leaves)
    for group in groups:
        call = _call(closed, group)
        is_all = len(groups) == 1 and not rest
        total = root.outvars[0] if is_all else jaxapi.new_var(reduction.outvars[0].aval)
        params = {**reduction.params, "axes": (0,)}
        eqns += [call, reduction.replace(invars=list(call.outvars), outvars=[total], params=params)]
        totals.append(total)
    terms = [*totals, *rest]
    before = terms[0]
    for number, term in enumerate(terms[1:], 2):
        total = root.outvars[0] if number == len(terms) else jaxapi.new_var(root.outvars[0].aval)
        eqns.append(root.replace(invars=[before, term], outvars=[total]))
        before = total
    return eqns


def _groups(leaves: Sequence[Leaf]) -> list[list[Leaf]]:
    """Leaves in their order, as many together as a kernel has parameters for."""
    found: list[list[Leaf]] = []
    names: set[Any] = set()
    for leaf in leaves:
        if not found or len(names | {*leaf.operands}) + 1 > MOST:
            found.append([])
            names = set()
        found[-1].append(leaf)
        names |= {*leaf.operands}
    return found


def _call(closed: jaxapi.Closed, leaves: Sequence[Leaf]) -> Any:
    """The call equation of some leaves."""
    eqns = [closed.jaxpr.eqns[n] for n in sorted({n for leaf in leaves for n in leaf.eqns})]
    operands = list(dict.fromkeys(a for leaf in leaves for a in leaf.operands))
    maps = jaxapi.make_closed([], operands, [leaf.value for leaf in leaves], eqns, [], like=closed)

    def partial_sums(*xs: Any) -> Any:
        return jax.lax.concatenate([_blocked_sums(value) for value in jaxapi.eval_closed(maps, *xs)], 0)

    shapes = [jax.ShapeDtypeStruct(a.aval.shape, a.aval.dtype) for a in operands]
    inside = jaxapi.closed_jaxpr_of(partial_sums, *shapes)
    return barrier_call(NAME, inside, operands, [jaxapi.new_var(inside.jaxpr.outvars[0].aval)])


def _blocked_sums(value: Any) -> Any:
    """The partial sums of an array: of blocks of `CHUNK` elements, behind the last of which there are zeros."""
    size = value.size
    chunk = min(CHUNK, size)
    blocks = -(-size // chunk)
    flat = jax.lax.reshape(value, (size,))
    if blocks * chunk > size:
        flat = jax.lax.pad(flat, np.float32(0), [(0, blocks * chunk - size, 0)])
    return jax.lax.reduce(jax.lax.reshape(flat, (blocks, chunk)), np.float32(0), jax.lax.add, (1,))


def _leaf_sums(inside: jaxapi.Closed, made: dict[Any, Any], part: Any) -> LeafSums | None:
    """The leaf of one part of a call's result: what `_blocked_sums` has made of its value, read backwards."""
    eqn = made.get(part)
    if eqn is None or jaxapi.primitive_name(eqn) != "reduce_sum" or tuple(eqn.params["axes"]) != (1,):
        return None
    value, padding = eqn.invars[0], 0
    blocks, chunk = value.aval.shape
    while (eqn := made.get(value)) is not None and jaxapi.primitive_name(eqn) in ("reshape", "pad"):
        if jaxapi.primitive_name(eqn) == "pad":
            ((low, padding, inner),) = eqn.params["padding_config"]
            if low or inner or not jaxapi.is_literal(eqn.invars[1]) or eqn.invars[1].val != 0:
                return None
        value = eqn.invars[0]
    if blocks * chunk - padding != value.aval.size or not 0 <= padding < chunk:
        return None
    needed: set[Any] = set()
    stack = [value]
    while stack:
        atom = stack.pop()
        if not jaxapi.is_literal(atom) and atom in made and atom not in needed:
            needed.add(atom)
            stack += made[atom].invars
    eqns = [eqn for eqn in inside.jaxpr.eqns if not needed.isdisjoint(eqn.outvars)]
    read = {a for eqn in eqns for a in eqn.invars if not jaxapi.is_literal(a)} | {value}
    operands = [(k, v) for k, v in enumerate(inside.jaxpr.invars) if v in read]
    function = jaxapi.make_closed([], [v for _, v in operands], [value], eqns, [], like=inside)
    return LeafSums(tuple(k for k, _ in operands), function, blocks, chunk)
