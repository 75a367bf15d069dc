"""Def-use index of a flat jaxpr: makers and users of values, dependence, and a walk over users in program order."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from typing import Any

from jcuts.trace import jaxapi


class EquationIndex:
    """Makers and users of the values of a flat jaxpr."""

    def __init__(self, closed: jaxapi.Closed) -> None:
        self.eqns = closed.jaxpr.eqns
        self.made = {v: e for e in self.eqns for v in e.outvars}
        self.place = {id(e): n for n, e in enumerate(self.eqns)}
        self.results = {v for v in closed.jaxpr.outvars if not jaxapi.is_literal(v)}
        self.users: dict[Any, list[Any]] = {}
        for eqn in self.eqns:
            for atom in {a for a in eqn.invars if not jaxapi.is_literal(a)}:
                self.users.setdefault(atom, []).append(eqn)

    def maker(self, atom: Any, name: str) -> Any:
        """The equation of this primitive that makes a value, or None."""
        made = None if jaxapi.is_literal(atom) else self.made.get(atom)
        return made if made is not None and jaxapi.primitive_name(made) == name else None

    def using(self, atom: Any, name: str = "") -> list[Any]:
        """The equations (of this primitive) that use a value."""
        found = self.users.get(atom, [])
        return [e for e in found if not name or jaxapi.primitive_name(e) == name]

    def depends_on(self, atom: Any, start: Any) -> bool:
        """Whether a value is made from another one."""
        first, seen, stack = self.place[id(self.made[start])], set(), [atom]
        while stack:
            value = stack.pop()
            if jaxapi.is_literal(value) or value in seen:
                continue
            if value is start:
                return True
            seen.add(value)
            made = self.made.get(value)
            if made is not None and self.place[id(made)] > first:
                stack += made.invars
        return False

    def behind(self, values: Iterable[Any], follow: Callable[[Any], bool]) -> None:
        """Visits the users of values in the order of the program, and users of the results that ``follow`` takes."""
        waiting: list[int] = []
        seen: set[int] = set()

        def push(value: Any) -> None:
            for user in self.using(value):
                if (place := self.place[id(user)]) not in seen:
                    seen.add(place)
                    heapq.heappush(waiting, place)

        for value in values:
            push(value)
        while waiting:
            eqn = self.eqns[heapq.heappop(waiting)]
            if follow(eqn):
                push(eqn.outvars[0])

    def in_order(self, eqns: Iterable[Any]) -> tuple[Any, ...]:
        """Equations in the order of the program."""
        return tuple(sorted({id(e): e for e in eqns}.values(), key=lambda e: self.place[id(e)]))
