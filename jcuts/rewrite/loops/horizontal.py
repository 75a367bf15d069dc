"""Horizontal fusion of loops: two independent scans of as many steps become one, whose step takes one of each.

    h = scan(f, xs);  g = scan(f', ys, reverse)      becomes      h, g = scan((f, f'), (xs, reversed ys))

The directions of a bidirectional recurrence wait for nothing but each other's launch.  As one persistent kernel they
share the exchange between the blocks, which most of a step's time is spent on, as cuDNN's bidirectional recurrences do;
so do their backward loops.  Whether that is faster depends on where the weights fit (`pipeline.loop_bodies` asks the
time model).  Every step computes what it did before: no value changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

import jax

from jcuts.trace import jaxapi
from jcuts.trace.inline import inline

Gains = Callable[[Sequence[jaxapi.Closed], jaxapi.Closed], bool]
"""Whether programs of one loop each are slower together than one of both."""


def merge_loops(closed: jaxapi.Closed, gains: Gains) -> tuple[jaxapi.Closed, int]:
    """Merges pairs of loops of a flat program where they gain; the program, and the number of pairs."""
    count = 0
    while (found := _first_that_gains(closed, gains)) is not None:
        first, second, call = found
        closed = _in_place(closed, first, second, call)
        count += 1
    return closed, count


def _first_that_gains(closed: jaxapi.Closed, gains: Gains) -> tuple[int, int, Any] | None:
    """The numbers of two loops and the call that computes both."""
    eqns = closed.jaxpr.eqns
    loops = [n for n, eqn in enumerate(eqns) if _is_plain(eqn)]
    for first, second in combinations(loops, 2):
        one, other = eqns[first], eqns[second]
        if _kind(one) == _kind(other) and not _depends(eqns, first, second):
            call = _both(one, other)
            if gains([_alone(closed, one), _alone(closed, other)], inline(_alone(closed, call))):
                return first, second, call
    return None


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


def _depends(eqns: Sequence[Any], first: int, second: int) -> bool:
    """Whether an equation needs an earlier one's results."""
    return second in _behind(eqns, first, second)


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


def _in_place(closed: jaxapi.Closed, first: int, second: int, call: Any) -> jaxapi.Closed:
    """The program with a call in place of two loops; what reads the first one's results follows it."""
    eqns = closed.jaxpr.eqns
    behind = _behind(eqns, first, second)
    before = [eqns[n] for n in range(second) if n != first and n not in behind]
    after = [eqns[n] for n in sorted(behind)]
    return inline(jaxapi.with_eqns(closed, [*before, call, *after, *eqns[second + 1 :]]))


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
