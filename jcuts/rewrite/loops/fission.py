"""Loop fission of recurrences: products with loop-invariant weights leave a `scan`, as one GEMM over all steps.

    for t: g = x[t] W + b; h = cell(g, h)     becomes     g = x W + b;  for t: h = cell(g[t], h)      input projection
    for t: h = cell(h); y[t] = h V            becomes     for t: h = cell(h), h[t] = h;  y = h V      output projection

A step multiplies few rows by weights that it reads in full; all steps' rows together are one product, as cuDNN's
recurrences have it (their "input GEMM"; Appleyard et al., Optimizing Performance of Recurrent Neural Networks on GPUs,
2016, section 3.1).  Of a backward pass the gradients of inputs leave the loop by the same rule, those of weights by
`hoist_weight_gradients`.

Ahead of the loop goes what depends on scanned values alone, as far as it takes part in such a product or is added to
one; behind it go such products that no carry depends on, with all that reads them.  What they exchange with the loop is
stacked, so a product moves only where a step has fewer rows than half the weights' terms (reading the weights costs
more than the stack), and where stacks take at most `MOST_STACKED` times the loop's operands and results.  On a CPU
weights have to be large for a core's L2 cache, too: from there XLA's loop multiplies as fast.

A product of a single row stays as precise as it is (`step_precision`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jcuts.rewrite.loops.step_precision import precision_over_steps, rows_of, terms_of
from jcuts.trace import jaxapi
from jcuts.trace.inline import inline

DOT = "dot_general"
SAME_SHAPE = frozenset({"add", "sub", "mul", "neg", "convert_element_type"})
"""What moves ahead of the loop with a product that it reads, where the result has the product's shape."""
MOST_STACKED = 4
"""Bytes that new stacks may take, over those of the loop's operands and results."""
PARTS_OF_CACHE = 4
"""Weights of this part of a cache are large for it: a step has others, beside its activations (GRUs of 128 to 800 units
on two cores with 2 MiB of L2 each, 2026-11-28: 0.84 times as fast at a tenth of it, 1.21 at a third, 1.3 to 2.7
beyond)."""


@dataclass(frozen=True)
class _Loop:
    """The body of a scan, and what its values depend on.

    Attributes:
        eqn: the scan. jaxpr: its body. fixed, carries: numbers of loop-invariant and carried operands.
        least_bytes: of weights whose products move.
    """

    eqn: Any
    jaxpr: Any
    fixed: int
    carries: int
    least_bytes: int

    @classmethod
    def of(cls, eqn: Any, least_bytes: int) -> _Loop | None:
        """The loop of a scan whose equations may move; None for effects, constants, nested loops and one turn."""
        ((_, _, body),) = jaxapi.inner_jaxprs(eqn)
        nested = any(jaxapi.inner_jaxprs(inner) for inner in body.jaxpr.eqns)
        if body.consts or jaxapi.has_effects(body) or nested or eqn.params["length"] < 2:
            return None
        if any(map(jaxapi.is_literal, body.jaxpr.outvars)):
            return None
        return cls(eqn, body.jaxpr, jaxapi.scan_constants(eqn), jaxapi.scan_carries(eqn), least_bytes)

    @property
    def invariant(self) -> set[Any]:
        """Loop-invariant values of the body, and what is computed from them alone."""
        return self._from(self.jaxpr.invars[: self.fixed])

    @property
    def scanned(self) -> list[Any]:
        """A step's parts of what is scanned."""
        return list(self.jaxpr.invars[self.fixed + self.carries :])

    @property
    def step_bytes(self) -> float:
        """Bytes of operands and results, divided by the steps."""
        outside = [*self.eqn.invars, *self.eqn.outvars]
        return sum(jaxapi.nbytes(a) for a in outside if not jaxapi.is_literal(a)) / self.eqn.params["length"]

    def ahead(self) -> set[Any]:
        """Values that depend on no carry."""
        return self._from([*self.jaxpr.invars[: self.fixed], *self.scanned])

    def _from(self, sources: Iterable[Any]) -> set[Any]:
        known = set(sources)
        for eqn in self.jaxpr.eqns:
            if all(jaxapi.is_literal(a) or a in known for a in eqn.invars):
                known.update(eqn.outvars)
        return known

    def needed(self, roots: Iterable[Any]) -> list[Any]:
        """Equations that compute some values, in their order."""
        wanted = set(roots)
        found = []
        for eqn in reversed(self.jaxpr.eqns):
            if any(v in wanted for v in eqn.outvars):
                found.append(eqn)
                wanted.update(a for a in eqn.invars if not jaxapi.is_literal(a))
        return found[::-1]

    def is_projection(self, eqn: Any, invariant: set[Any]) -> bool:
        """Whether an equation multiplies few rows of a step by loop-invariant weights."""
        if jaxapi.primitive_name(eqn) != DOT:
            return False
        fixed = [not jaxapi.is_literal(a) and a in invariant for a in eqn.invars]
        if fixed.count(True) != 1 or any(map(jaxapi.is_literal, eqn.invars)):
            return False
        _, (batch, _) = eqn.params["dimension_numbers"]
        weights = eqn.invars[fixed.index(True)]
        rows, terms = rows_of(eqn, fixed.index(False)), terms_of(eqn)
        return not batch and jaxapi.nbytes(weights) > self.least_bytes and 2 * rows < terms


def loop_fission(closed: jaxapi.Closed, cache_bytes: int = 0) -> tuple[jaxapi.Closed, int]:
    """Moves projections out of the scans of a flat program; the program, and how often a scan was divided.

    Args: cache_bytes: of a core's cache that weights have to be large for; 0 on a GPU.
    """
    count = 0
    for move in (_ahead, _behind):
        eqns, moved = [], 0
        for eqn in closed.jaxpr.eqns:
            is_scan = jaxapi.primitive_name(eqn) == "scan"
            loop = _Loop.of(eqn, cache_bytes // PARTS_OF_CACHE) if is_scan else None
            try:
                divided = None if loop is None else move(loop)
            except NotImplementedError:  # a primitive that cannot be batched
                divided = None
            eqns.append(eqn if divided is None else divided)
            moved += divided is not None
        if moved:
            closed = jaxapi.dce(inline(jaxapi.with_eqns(closed, eqns)))
        count += moved
    return closed, count


# -- input projections ------------------------------------------------------------------------------------------------
def _ahead(loop: _Loop) -> Any:
    """The call that computes input projections of all steps before the loop; None where there are none."""
    invariant, ahead = loop.invariant, loop.ahead()
    moved: dict[Any, None] = {}
    for eqn in loop.jaxpr.eqns:
        (result, *_) = eqn.outvars
        if loop.is_projection(eqn, invariant) and all(a in ahead for a in eqn.invars):
            moved[result] = None
        elif jaxapi.primitive_name(eqn) in SAME_SHAPE and result in ahead:
            operands = [a for a in eqn.invars if not jaxapi.is_literal(a)]
            if any(a in moved and a.aval.shape == result.aval.shape for a in operands):
                moved[result] = None
    gone = {v for eqn in loop.needed(moved) for v in eqn.outvars}
    rest = [eqn for eqn in loop.jaxpr.eqns if eqn.outvars[0] not in gone]
    readers = {a for eqn in rest for a in eqn.invars if not jaxapi.is_literal(a)} | set(loop.jaxpr.outvars)
    crossing = [v for v in moved if v in readers]
    if not crossing or sum(map(jaxapi.nbytes, crossing)) > MOST_STACKED * loop.step_bytes:
        return None
    head = _closed(loop, [*loop.jaxpr.invars[: loop.fixed], *loop.scanned], crossing)
    body = _closed(loop, [*loop.jaxpr.invars, *crossing], loop.jaxpr.outvars, without=crossing)

    def divided(*operands: Any) -> list[Any]:
        fixed, carried, scanned = _parts(loop, operands)
        stacks = _over_steps(head, fixed, scanned)
        last, results = _scan(loop, body, fixed, carried, [*scanned, *stacks])
        return [*last, *results]

    return jaxapi.call_eqn(divided, loop.eqn.invars, loop.eqn.outvars)


# -- output projections -----------------------------------------------------------------------------------------------
def _behind(loop: _Loop) -> Any:
    """The call that computes output projections of all steps after the loop; None where there are none."""
    invariant = loop.invariant
    recurrent = {v for eqn in loop.needed(loop.jaxpr.outvars[: loop.carries]) for v in eqn.outvars}
    moved: list[Any] = []
    late: set[Any] = set()
    for eqn in loop.jaxpr.eqns:
        reads = any(not jaxapi.is_literal(a) and a in late for a in eqn.invars)
        if reads or (loop.is_projection(eqn, invariant) and eqn.outvars[0] not in recurrent):
            moved.append(eqn)
            late.update(eqn.outvars)
    results = loop.jaxpr.outvars[loop.carries :]
    wanted = [k for k, v in enumerate(results) if v in late]
    if not wanted:
        return None
    inputs = [a for eqn in moved for a in eqn.invars if not jaxapi.is_literal(a) and a not in late]
    given = set(loop.jaxpr.invars[: loop.fixed])
    crossing = [a for a in dict.fromkeys(inputs) if a not in given]
    known = {*loop.scanned, *(v for k, v in enumerate(results) if k not in wanted)}
    new = [a for a in crossing if a not in known]
    if sum(map(jaxapi.nbytes, new)) > MOST_STACKED * loop.step_bytes:
        return None
    kept = [k for k in range(len(results)) if k not in wanted]
    stacked = [*(results[k] for k in kept), *new]
    body = _closed(loop, loop.jaxpr.invars, [*loop.jaxpr.outvars[: loop.carries], *stacked])
    tail = _closed(loop, [*loop.jaxpr.invars[: loop.fixed], *crossing], [results[k] for k in wanted], moved)

    def divided(*operands: Any) -> list[Any]:
        fixed, carried, scanned = _parts(loop, operands)
        last, stacks = _scan(loop, body, fixed, carried, scanned)
        found = dict(zip((*loop.scanned, *stacked), (*scanned, *stacks), strict=True))
        every: list[Any] = [None] * len(results)
        for k, stack in zip(kept, stacks, strict=False):
            every[k] = stack
        for k, stack in zip(wanted, _over_steps(tail, fixed, [found[a] for a in crossing]), strict=True):
            every[k] = stack
        return [*last, *every]

    return jaxapi.call_eqn(divided, loop.eqn.invars, loop.eqn.outvars)


def _as_precise(eqn: Any) -> Any:
    if jaxapi.primitive_name(eqn) != DOT:
        return eqn
    return eqn.replace(params={**eqn.params, "precision": precision_over_steps(eqn)})


# -- the parts of a loop ----------------------------------------------------------------------------------------------
def _closed(
    loop: _Loop,
    inputs: Sequence[Any],
    outputs: Sequence[Any],
    eqns: Sequence[Any] | None = None,
    without: Sequence[Any] = (),
) -> jaxapi.Closed:
    """Equations of a body as a function. Args: eqns: all, if None; without: values that are among the inputs."""
    given = set(without)
    taken = loop.jaxpr.eqns if eqns is None else eqns
    kept = [eqn for eqn in taken if not any(v in given for v in eqn.outvars)]
    ((_, _, body),) = jaxapi.inner_jaxprs(loop.eqn)
    return jaxapi.dce(jaxapi.make_closed([], list(inputs), list(outputs), kept, [], like=body))


def _parts(loop: _Loop, operands: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
    """Loop-invariant, carried and scanned operands."""
    end = loop.fixed + loop.carries
    return list(operands[: loop.fixed]), list(operands[loop.fixed : end]), list(operands[end:])


def _over_steps(part: jaxapi.Closed, fixed: Sequence[Any], stacks: Sequence[Any]) -> list[Any]:
    """A part's results for all steps: batched over them, which makes one product of a step's."""
    part = jaxapi.with_eqns(part, [_as_precise(eqn) for eqn in part.jaxpr.eqns])
    step: Callable[..., list[Any]] = lambda *each: jaxapi.eval_closed(part, *fixed, *each)  # noqa: E731
    return jax.vmap(step)(*stacks)


def _scan(
    loop: _Loop, body: jaxapi.Closed, fixed: Sequence[Any], carried: Sequence[Any], scanned: Sequence[Any]
) -> tuple[list[Any], list[Any]]:
    """The loop with another body: last carries and stacked results."""
    params = {name: loop.eqn.params[name] for name in ("length", "reverse", "unroll")}

    def step(carry: Any, xs: Any) -> tuple[Any, Any]:
        results = jaxapi.eval_closed(body, *fixed, *carry, *xs)
        return results[: loop.carries], results[loop.carries :]

    last, results = jax.lax.scan(step, list(carried), list(scanned), **params)
    return list(last), list(results)
