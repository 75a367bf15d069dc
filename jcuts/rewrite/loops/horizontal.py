"""Horizontal fusion of loops: two independent scans of as many steps become one, whose step takes one of each.

    h = scan(f, xs);  g = scan(f', ys, reverse)      becomes      h, g = scan((f, f'), (xs, reversed ys))

The directions of a bidirectional recurrence wait for nothing but each other's launch.  As one persistent kernel they
share the exchange between the blocks, which most of a step's time is spent on, as cuDNN's bidirectional recurrences do;
so do their backward loops.  Whether that is faster depends on where the weights fit (`pipeline.loop_bodies` asks the
time model).  Every step computes what it did before: no value changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from jcuts.trace import jaxapi
from jcuts.trace.inline import inline

MOST_PARTNERS = 8
"""Loops that follow one, of which it may be merged with any."""
Gains = Callable[[Sequence[jaxapi.Closed], jaxapi.Closed], bool]
"""Whether programs of one loop each are slower together than one of both."""


def merge_loops(closed: jaxapi.Closed, gains: Gains) -> tuple[jaxapi.Closed, int]:
    """Merges pairs of loops of a flat program where they gain; the program, and the number of pairs."""
    eqns = list(closed.jaxpr.eqns)
    refused: set[frozenset[Any]] = set()
    count = 0
    while (found := _first_that_gains(closed, eqns, gains, refused)) is not None:
        eqns = _in_place(eqns, *found)
        count += 1
    return (inline(jaxapi.with_eqns(closed, eqns)), count) if count else (closed, 0)


def _first_that_gains(
    closed: jaxapi.Closed, eqns: Sequence[Any], gains: Gains, refused: set[frozenset[Any]]
) -> tuple[int, int, Any] | None:
    """The numbers of two loops and the call that computes both. Args: refused: pairs that do not gain; filled."""
    loops = [n for n, eqn in enumerate(eqns) if _is_plain(eqn)]
    needs = _needed_loops(eqns, loops) if len(loops) > 1 else {}
    for place, first in enumerate(loops):
        for second in loops[place + 1 : place + 1 + MOST_PARTNERS]:
            one, other = eqns[first], eqns[second]
            pair = frozenset({one.outvars[0], other.outvars[0]})
            if pair in refused or _kind(one) != _kind(other) or needs[second] >> place & 1:
                continue
            call = _both(one, other)
            apart = not any(eqn.effects for eqn in eqns[first + 1 : second])
            if apart and gains([_alone(closed, one), _alone(closed, other)], inline(_alone(closed, call))):
                return first, second, call
            refused.add(pair)
    return None


def _needed_loops(eqns: Sequence[Any], loops: Sequence[int]) -> dict[int, int]:
    """For each loop those that it needs, a bit for each in their order."""
    places = {number: place for place, number in enumerate(loops)}
    needed: dict[Any, int] = {}
    found = {}
    for number, eqn in enumerate(eqns):
        mask = 0
        for atom in eqn.invars:
            mask |= 0 if jaxapi.is_literal(atom) else needed.get(atom, 0)
        if number in places:
            found[number] = mask
            mask |= 1 << places[number]
        if mask:
            needed.update(dict.fromkeys(eqn.outvars, mask))
    return found


def _is_plain(eqn: Any) -> bool:
    """Whether an equation is a scan of some steps that carries something, without effects or constants."""
    if jaxapi.primitive_name(eqn) != "scan" or eqn.params["length"] < 2 or not jaxapi.scan_carries(eqn):
        return False
    ((_, _, body),) = jaxapi.inner_jaxprs(eqn)
    return not body.consts and not jaxapi.has_effects(body)


def _kind(eqn: Any) -> tuple[Any, ...]:
    """What merged loops have in common: steps, and what they carry."""
    ((_, _, body),) = jaxapi.inner_jaxprs(eqn)
    fixed, carries = jaxapi.scan_constants(eqn), jaxapi.scan_carries(eqn)
    carried = body.jaxpr.invars[fixed : fixed + carries]
    return eqn.params["length"], tuple((v.aval.shape, str(v.aval.dtype)) for v in carried)


def _behind(eqns: Sequence[Any], first: int, last: int) -> set[int]:
    """Equations up to another one that need the results of the first."""
    made, found = set(eqns[first].outvars), set()
    for number in range(first + 1, last + 1):
        if any(not jaxapi.is_literal(a) and a in made for a in eqns[number].invars):
            found.add(number)
            made.update(eqns[number].outvars)
    return found


def _alone(closed: jaxapi.Closed, eqn: Any) -> jaxapi.Closed:
    """The program of one equation."""
    inputs = list(dict.fromkeys(a for a in eqn.invars if not jaxapi.is_literal(a)))
    return jaxapi.make_closed([], inputs, list(eqn.outvars), [eqn], [], like=closed)


def _in_place(eqns: Sequence[Any], first: int, second: int, call: Any) -> list[Any]:
    """Equations with a call in place of two loops; what reads the first one's results follows it."""
    behind = _behind(eqns, first, second)
    before = [eqns[n] for n in range(second) if n != first and n not in behind]
    after = [eqns[n] for n in sorted(behind)]
    return [*before, call, *after, *eqns[second + 1 :]]


def _both(one: Any, other: Any) -> Any:
    """The call that computes two loops in one, in the first one's direction: the other's stacks are reversed for it."""
    halves = [_Half(eqn) for eqn in (one, other)]
    reverse = bool(one.params["reverse"])
    count = len(one.invars)

    def looped(*operands: Any) -> list[Any]:
        given = (operands[:count], operands[count:])
        turned = [bool(half.eqn.params["reverse"]) != reverse for half in halves]
        start = [half.carried(values) for half, values in zip(halves, given, strict=True)]
        scanned = [half.scanned(v, turn) for half, v, turn in zip(halves, given, turned, strict=True)]

        def step(carries: Any, xs: Any) -> tuple[Any, Any]:
            found = [h.step(v, c, x) for h, v, c, x in zip(halves, given, carries, xs, strict=True)]
            return [carry for carry, _ in found], [results for _, results in found]

        last, stacks = jax.lax.scan(step, start, scanned, length=one.params["length"], reverse=reverse)
        results: list[Any] = []
        for carry, stack, turn in zip(last, stacks, turned, strict=True):
            results += [*carry, *(_reversed(s) if turn else s for s in stack)]
        return results

    return jaxapi.call_eqn(looped, [*one.invars, *other.invars], [*one.outvars, *other.outvars])


class _Half:
    """One of two loops that become one."""

    def __init__(self, eqn: Any) -> None:
        self.eqn = eqn
        ((_, _, self.body),) = jaxapi.inner_jaxprs(eqn)
        self.fixed, self.carries = jaxapi.scan_constants(eqn), jaxapi.scan_carries(eqn)

    def carried(self, operands: Sequence[Any]) -> list[Any]:
        """What it carries at first."""
        return list(operands[self.fixed : self.fixed + self.carries])

    def scanned(self, operands: Sequence[Any], turn: bool) -> list[Any]:
        """What it scans over. Args: turn: from the end."""
        values = operands[self.fixed + self.carries :]
        return [_reversed(v) if turn else v for v in values]

    def step(self, operands: Sequence[Any], carry: Sequence[Any], xs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """A step: what it carries, and its results."""
        results = jaxapi.eval_closed(self.body, *operands[: self.fixed], *carry, *xs)
        return list(results[: self.carries]), list(results[self.carries :])


def _reversed(stack: Any) -> Any:
    return jax.lax.rev(stack, (0,))
