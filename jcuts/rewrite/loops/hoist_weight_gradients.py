"""Hoists weight-gradient products out of the backward pass of a scan: one GEMM over all steps (loop fission of an
accumulation).

    for t: w += a[t]^T b[t]          becomes        w + a^T b,  contracted over steps and rows

Automatic differentiation carries the gradient of a recurrent weight through the loop: every step multiplies two thin
matrices, and reads and writes the whole gradient (``dot_general`` and ``add_any`` on a carry of ``lax.scan``).  Behind
the loop it is one product with steps * rows terms, as cuDNN's recurrences have it, and the loop carries less.

Both operands must be there for all steps: what the loop scans over, what it stacks as a result, or what it can stack in
no more memory than the carry takes.  The order of the sum changes, not its terms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jcuts.rewrite.loops.step_precision import precision_over_steps
from jcuts.trace import jaxapi
from jcuts.trace.inline import inline
from jcuts.trace.loop_carries import ADDITIONS

DOT = "dot_general"
TRANSPOSE = "transpose"


Permutations = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class _Stack:
    """What stands for an operand over all steps.

    Attributes:
        kind: ``scanned``, ``result``, ``new`` (to be stacked), or "" where there is nothing.
        value: number of what is scanned or of the result; the value itself that is to be stacked.
        permutations: between that and the operand.
    """

    kind: str
    value: Any = None
    permutations: Permutations = ()

    @property
    def step_bytes(self) -> int:
        """Memory that stacking takes for a step [B]."""
        return jaxapi.nbytes(self.value) if self.kind == "new" else 0


@dataclass(frozen=True)
class _Accumulation:
    """A carry that a product is added to in every step.

    Attributes: carry: its number. dot: the equation of the product. permutations: of the product, before it is added.
    """

    carry: int
    dot: Any
    permutations: Permutations
    operands: tuple[_Stack, _Stack]


def hoist_weight_gradients(closed: jaxapi.Closed) -> tuple[jaxapi.Closed, int]:
    """Hoists accumulated products out of the scans of a flat program; the program and the number of products."""
    eqns, count = [], 0
    for eqn in closed.jaxpr.eqns:
        found = _accumulations(eqn) if jaxapi.primitive_name(eqn) == "scan" else []
        eqns.append(_hoisted(eqn, found) if found else eqn)
        count += len(found)
    if not count:
        return closed, 0
    return jaxapi.dce(inline(jaxapi.with_eqns(closed, eqns))), count


def _body(eqn: Any) -> jaxapi.Closed:
    ((_, _, body),) = jaxapi.inner_jaxprs(eqn)
    return body


def _accumulations(eqn: Any) -> list[_Accumulation]:
    body, fixed, carries = _body(eqn), jaxapi.scan_constants(eqn), jaxapi.scan_carries(eqn)
    if body.consts or jaxapi.has_effects(body):
        return []
    jaxpr = body.jaxpr
    made = {v: e for e in jaxpr.eqns for v in e.outvars}
    uses: dict[Any, int] = {}
    for atom in (*(a for e in jaxpr.eqns for a in e.invars), *jaxpr.outvars):
        if not jaxapi.is_literal(atom):
            uses[atom] = uses.get(atom, 0) + 1
    found = []
    for number in range(carries):
        before, after = jaxpr.invars[fixed + number], jaxpr.outvars[number]
        added = _added(before, after, made, uses)
        if added is not None:
            dot, permutations = added
            left, right = (_over_steps(a, jaxpr, made, fixed, carries) for a in dot.invars)
            stacked = eqn.params["length"] * (left.step_bytes + right.step_bytes)
            if left.kind and right.kind and stacked <= jaxapi.nbytes(before):
                found.append(_Accumulation(number, dot, permutations, (left, right)))
    return found


def _added(before: Any, after: Any, made: dict[Any, Any], uses: dict[Any, int]) -> tuple[Any, Permutations] | None:
    """The product that a carry's next value adds to it, and its transpositions; None where it is anything else."""
    addition = None if jaxapi.is_literal(after) else made.get(after)
    if addition is None or jaxapi.primitive_name(addition) not in ADDITIONS:
        return None
    if before not in addition.invars or uses.get(before) != 1 or uses.get(after) != 1:
        return None
    term = addition.invars[1] if addition.invars[0] is before else addition.invars[0]
    source, permutations = _transposed(term, made)
    dot = None if jaxapi.is_literal(source) else made.get(source)
    if dot is None or jaxapi.primitive_name(dot) != DOT or uses[term] != 1 or uses[source] != 1:
        return None
    return dot, permutations


def _transposed(atom: Any, made: dict[Any, Any]) -> tuple[Any, Permutations]:
    """What a value is a transposition of, and the permutations from there to it."""
    permutations: list[tuple[int, ...]] = []
    while not jaxapi.is_literal(atom) and (eqn := made.get(atom)) is not None:
        if jaxapi.primitive_name(eqn) != TRANSPOSE:
            break
        permutations.insert(0, tuple(eqn.params["permutation"]))
        atom = eqn.invars[0]
    return atom, tuple(permutations)


def _over_steps(atom: Any, jaxpr: Any, made: dict[Any, Any], fixed: int, carries: int) -> _Stack:
    """What stands for a value of all steps; nothing for a literal and what is the same in every step."""
    scanned, results = jaxpr.invars[fixed + carries :], jaxpr.outvars[carries:]
    source, permutations = _transposed(atom, made)
    if jaxapi.is_literal(source) or source in jaxpr.invars[:fixed]:
        return _Stack("")
    if source in scanned:
        return _Stack("scanned", scanned.index(source), permutations)
    if source in results:
        return _Stack("result", results.index(source), permutations)
    return _Stack("new", source, permutations)


def _hoisted(eqn: Any, found: Sequence[_Accumulation]) -> Any:
    """The call that computes a scan without some of its carries, and their products behind it."""
    jaxpr, fixed, carries = _body(eqn).jaxpr, jaxapi.scan_constants(eqn), jaxapi.scan_carries(eqn)
    gone = {a.carry for a in found}
    kept = [n for n in range(carries) if n not in gone]
    new: list[Any] = []
    for accumulation in found:
        new += [s.value for s in accumulation.operands if s.kind == "new" and s.value not in new]
    inputs = [*jaxpr.invars[:fixed], *(jaxpr.invars[fixed + n] for n in kept), *jaxpr.invars[fixed + carries :]]
    outputs = [*(jaxpr.outvars[n] for n in kept), *jaxpr.outvars[carries:], *new]
    lean = jaxapi.dce(jaxapi.make_closed([], inputs, outputs, jaxpr.eqns, [], like=_body(eqn)))
    params = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}

    def looped(*operands: Any) -> list[Any]:
        invariant, carried, scanned = operands[:fixed], operands[fixed : fixed + carries], operands[fixed + carries :]

        def step(carry: Any, xs: Any) -> tuple[Any, Any]:
            results = jaxapi.eval_closed(lean, *invariant, *carry, *xs)
            return results[: len(kept)], results[len(kept) :]

        last, stacks = jax.lax.scan(step, [carried[n] for n in kept], list(scanned), **params)
        every = iter(last)
        final = [None if n in gone else next(every) for n in range(carries)]
        results, more = stacks[: len(stacks) - len(new)], stacks[len(stacks) - len(new) :]
        sources = {"scanned": scanned, "result": results, "new": dict(zip(new, more, strict=True))}
        for accumulation in found:
            a, b = (_permuted(sources[s.kind][s.value], s.permutations, 1) for s in accumulation.operands)
            final[accumulation.carry] = carried[accumulation.carry] + _product(accumulation, a, b)
        return [*final, *results]

    return jaxapi.call_eqn(looped, eqn.invars, eqn.outvars)


def _product(accumulation: _Accumulation, a: Any, b: Any) -> Any:
    """The sum of the products of all steps. Args: a, b: operands with the steps in front."""
    params = accumulation.dot.params
    (left, right), (batch_left, batch_right) = params["dimension_numbers"]

    def moved(dims: Sequence[int]) -> tuple[int, ...]:
        return tuple(d + 1 for d in dims)

    numbers = ((0, *moved(left)), (0, *moved(right))), (moved(batch_left), moved(batch_right))
    precision = precision_over_steps(accumulation.dot)
    value = jax.lax.dot_general(
        a, b, numbers, precision=precision, preferred_element_type=params["preferred_element_type"]
    )
    return _permuted(value, accumulation.permutations, 0)


def _permuted(value: Any, permutations: Permutations, leading: int) -> Any:
    """A value transposed behind some leading dimensions."""
    for permutation in permutations:
        value = jax.lax.transpose(value, (*range(leading), *(d + leading for d in permutation)))
    return value
