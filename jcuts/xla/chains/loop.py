"""Loops as one call on a CPU: a ``scan`` whose body is a chain of kernels runs inside one custom call, its state in the
cache (`custom_calls/launch_cpu_loop.h`).

XLA's while loop runs its body as a list of thunks, copies what it carries and cuts every step's part out of what is
scanned: 2 us and more a step.  Here carried values are pointers, scanned operands and stacked results are read and
written in place, and what passes from one step to the next lies in two buffers of the call's arena in turns.

A loop is one where its body is one call of kernels, or one kernel, but for reshapes, and every value that it carries or
stacks is made by these, scanned, invariant, or (as a result) the old state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jcuts.trace import jaxapi
from jcuts.xla import cpu_ffi_call, cpu_launcher
from jcuts.xla.chains.buffer_assignment import OPERAND, RESULT
from jcuts.xla.chains.dataflow import VIEWS, Dataflow
from jcuts.xla.rebuild import traced_eqns

INVARIANT = 0
"""Kind of what a body reads (`FeedKind` in the launcher): the same in every step."""
CARRIED = 1
"""A value of the step before."""
SCANNED = 2
"""A step's part of an operand."""
FROM_RESULT = 0
"""Kind of what a carried value becomes (`SourceKind`): a result of the body."""
FROM_OPERAND = 1
"""What the body reads."""
UNSTACKED = -1
"""Number of the result that stacks a result of the body, where there is none."""


def scans_as_calls(closed: jaxapi.Closed) -> jaxapi.Closed:
    """The jaxpr with one call for every scan that can be one; the same values."""
    eqns: list[Any] = []
    count = 0
    for eqn in closed.jaxpr.eqns:
        loop = Loop.of(eqn) if jaxapi.primitive_name(eqn) == "scan" else None
        eqns += [eqn] if loop is None else loop.equations()
        count += loop is not None
    return jaxapi.with_eqns(closed, eqns) if count else closed


def has_scans(closed: jaxapi.Closed) -> bool:
    """Whether a program, or a loop's body in it, has a scan."""
    return _holds_anywhere(closed, lambda eqn: jaxapi.primitive_name(eqn) == "scan")


def has_calls(closed: jaxapi.Closed) -> bool:
    """Whether a program, or a loop's body in it, has a scan that is one call."""
    return _holds_anywhere(closed, lambda eqn: jaxapi.call_target(eqn) == cpu_launcher.LOOP)


def _holds_anywhere(closed: jaxapi.Closed, holds: Callable[[Any], bool]) -> bool:
    return any(
        holds(eqn) or any(_holds_anywhere(body, holds) for _, _, body in jaxapi.inner_jaxprs(eqn))
        for eqn in closed.jaxpr.eqns
    )


@dataclass
class Loop:
    """A scan and the call of kernels that its body is.

    Attributes:
        eqn: the scan. body: its body's jaxpr. call: the equation of the kernels.
        roots: results of reshapes in the body -> what was reshaped. feeds: what the body reads.
    """

    eqn: Any
    body: Any
    call: Any
    roots: dict[Any, Any]
    feeds: list[Any] = field(default_factory=list)

    @classmethod
    def of(cls, eqn: Any) -> Loop | None:
        """The loop of a scan, None where it is not one call of this CPU's kernels."""
        ((_, _, body),) = jaxapi.inner_jaxprs(eqn)
        calls = [e for e in body.jaxpr.eqns if jaxapi.primitive_name(e) not in VIEWS]
        if len(calls) != 1 or jaxapi.call_target(calls[0]) not in (cpu_launcher.TARGET, cpu_launcher.CHAIN):
            return None
        reads = Dataflow(body)
        found = cls(eqn, body.jaxpr, calls[0], reads.roots)
        reshaped = {v for e in body.jaxpr.eqns if e is not calls[0] for v in e.outvars}
        if body.consts or jaxapi.has_effects(body) or not reshaped <= set(reads.roots):
            return None
        found.feeds = [found.root(a) for a in calls[0].invars]
        return found if found._is_one_call() else None

    @property
    def fixed(self) -> int:
        """Number of loop-invariant operands."""
        return jaxapi.scan_constants(self.eqn)

    @property
    def carries(self) -> int:
        """Number of carried values."""
        return jaxapi.scan_carries(self.eqn)

    @property
    def results(self) -> list[Any]:
        """What the body's kernels write."""
        return list(self.call.outvars)

    def root(self, atom: Any) -> Any:
        """A value of the body as it was before any reshape."""
        return atom if jaxapi.is_literal(atom) else self.roots.get(atom, atom)

    def equations(self) -> list[Any]:
        """The equations of the one call."""
        attributes, drains = self._chain()
        feeds = [number for atom in self._all_feeds() for number in self._feed(atom)]
        carries = [number for k in range(self.carries) for number in self._carry(k)]
        copies = self._copies()
        counts = [len(self._all_feeds()), len(self.results), self.carries, len(copies) // 3]
        plan = [*counts, *feeds, *drains, *carries, *copies]
        params, shapes = self.eqn.params, [v.aval for v in self.eqn.outvars]

        def call(*xs: Any) -> Any:
            return cpu_ffi_call.call_loop(
                attributes, plan, xs, shapes, length=params["length"], reverse=params["reverse"]
            )

        return traced_eqns(call, self.eqn.invars, self.eqn.outvars, self.eqn)

    # ------------------------------------------------------------ what can be one call

    def _is_one_call(self) -> bool:
        inputs, outputs = list(self.body.invars), [self.root(a) for a in self.body.outvars]
        made = set(self.results)
        if any(map(jaxapi.is_literal, (*self.feeds, *outputs))) or any(a not in inputs for a in self.feeds):
            return False
        if any(a not in made and a not in inputs for a in outputs):
            return False
        carried = inputs[self.fixed : self.fixed + self.carries]
        for k, after in enumerate(outputs[: self.carries]):  # another carry's old value may be overwritten
            if after in carried and after is not carried[k]:
                return False
        stacked = [a for a in outputs[self.carries :] if a in made]
        return len(set(stacked)) == len(stacked)

    # ------------------------------------------------------------ the plan

    def _all_feeds(self) -> list[Any]:
        """What the kernels read, in their order, and what is carried or copied without being read."""
        others = [a for a in map(self.root, self.body.outvars) if a not in self.results and a not in self.feeds]
        return [*self.feeds, *dict.fromkeys(others)]

    def _feed(self, atom: Any) -> tuple[int, int, int]:
        number = self.body.invars.index(atom)
        if number < self.fixed:
            return INVARIANT, number, 0
        if number < self.fixed + self.carries:
            return CARRIED, number - self.fixed, 0
        return SCANNED, number, jaxapi.nbytes(atom)

    def _carry(self, number: int) -> tuple[int, ...]:
        before, after = self.fixed + number, self.root(self.body.outvars[number])
        kind = FROM_RESULT if after in self.results else FROM_OPERAND
        place = (self.results if kind == FROM_RESULT else self._all_feeds()).index(after)
        return before, number, jaxapi.nbytes(after), kind, place

    def _copies(self) -> list[int]:
        """Feed, result and bytes of what is stacked without being made."""
        found: list[int] = []
        for k, value in enumerate(self.body.outvars[self.carries :], self.carries):
            source = self.root(value)
            if source not in self.results:
                found += [self._all_feeds().index(source), k, jaxapi.nbytes(source)]
        return found

    def _chain(self) -> tuple[dict[str, Any], list[int]]:
        """Attributes of the body's chain, and result, bytes of a step and two offsets of each of its results."""
        attributes = self._attributes()
        stacked = {self.root(v): k for k, v in enumerate(self.body.outvars) if k >= self.carries}
        end, drains = int(attributes["arena_bytes"]), list[int]()
        for value in self.results:
            size = -(-jaxapi.nbytes(value) // cpu_ffi_call.ALIGNMENT) * cpu_ffi_call.ALIGNMENT
            if value in stacked:
                drains += [stacked[value], jaxapi.nbytes(value), 0, 0]
                continue
            end = -(-end // cpu_ffi_call.ALIGNMENT) * cpu_ffi_call.ALIGNMENT
            drains += [UNSTACKED, 0, end, end + size]
            end += 2 * size
        return {**attributes, "arena_bytes": np.int64(end)}, drains

    def _attributes(self) -> dict[str, Any]:
        """Those of the body's chain; of a single kernel those of the chain that it alone would be."""
        found = jaxapi.call_attributes(self.call)
        if jaxapi.call_target(self.call) == cpu_launcher.CHAIN:
            return found
        count, outputs = len(self.call.invars), int(found["num_outputs"])
        scratch, slots = int(found["scratch_bytes"]), int(found["slots"])
        kinds = [(OPERAND, k) for k in range(count)] + [(RESULT, k) for k in range(outputs)]
        places = [n for kind, k in kinds for n in (kind, k, 0)]
        return cpu_ffi_call.chain_attributes(
            [str(found["digest"])],
            [count + outputs, 0, *places],
            [int(found["tiles"]), scratch, slots],
            cpu_ffi_call.scratch_result_bytes(scratch, slots),
        )
