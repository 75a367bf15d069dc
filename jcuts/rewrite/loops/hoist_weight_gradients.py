"""Hoists weight-gradient products out of the backward pass of a scan: one GEMM over all steps (loop fission of an
accumulation).

    for t: w += a[t]^T b[t]          becomes        w + a^T b,  contracted over steps and rows
    for t: v += sum of b[t]'s rows   becomes        v + sum of b's rows, of all steps

Automatic differentiation carries the gradient of a recurrent weight through the loop: every step multiplies two thin
matrices, and reads and writes the whole gradient (``dot_general`` and ``add_any`` on a carry of ``lax.scan``).  Behind
the loop it is one product with steps * rows terms, as cuDNN's recurrences have it, and the loop carries less.

Operands must be there for all steps: what the loop scans over, what it stacks as a result, or what it can stack.  It
stacks an operand where a step's part is smaller than the carry (which every step would read and write), and where all
new stacks take no more memory than the carries that go, or than what the loop scans over: a backward pass's residuals.
The sum of a bias' gradient leaves the loop where its operand is stacked for a product.  The order of the sum changes,
not its terms.
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
SUM = "reduce_sum"
TRANSPOSE = "transpose"
RESHAPE = "reshape"


Views = tuple[tuple[str, tuple[int, ...]], ...]
"""Transpositions (with their permutations) and reshapes (with their new shapes) that follow each other."""


@dataclass(frozen=True)
class _Stack:
    """What stands for an operand over all steps.

    Attributes:
        kind: ``scanned``, ``result``, ``new`` (to be stacked), or "" where there is nothing.
        value: number of what is scanned or of the result; the value itself that is to be stacked.
        views: between that and the operand.
    """

    kind: str
    value: Any = None
    views: Views = ()

    @property
    def step_bytes(self) -> int:
        """Memory that stacking takes for a step [B]."""
        return jaxapi.nbytes(self.value) if self.kind == "new" else 0


@dataclass(frozen=True)
class _Accumulation:
    """A carry that a product, or a sum, is added to in every step.

    Attributes:
        carry: its number.
        eqn: what is added: the product or the sum.
        views: of its result, before it is added.
        operands: of the equation, over all steps.
    """

    carry: int
    eqn: Any
    views: Views
    operands: tuple[_Stack, ...]

    @property
    def is_product(self) -> bool:
        """Whether it is a product."""
        return jaxapi.primitive_name(self.eqn) == DOT

    def new_values(self) -> dict[Any, int]:
        """What is to be stacked, with the bytes of a step."""
        return {s.value: s.step_bytes for s in self.operands if s.kind == "new"}


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
            source, views = added
            operands = tuple(_over_steps(a, jaxpr, made, fixed, carries) for a in source.invars)
            if all(stack.kind for stack in operands):
                found.append(_Accumulation(number, source, views, operands))
    return _affordable(eqn, found)


def _affordable(eqn: Any, found: Sequence[_Accumulation]) -> list[_Accumulation]:
    """Accumulations whose operands may be stacked; products first, then sums of what is stacked anyway."""
    fixed, carries, steps = jaxapi.scan_constants(eqn), jaxapi.scan_carries(eqn), eqn.params["length"]
    scanned = sum(map(jaxapi.nbytes, eqn.invars[fixed + carries :]))
    taken: list[_Accumulation] = []
    stacked: dict[Any, int] = {}
    gone = 0
    for one in sorted(found, key=lambda a: not a.is_product):
        more = {value: size for value, size in one.new_values().items() if value not in stacked}
        carry = jaxapi.nbytes(eqn.invars[fixed + one.carry])
        needed = steps * (sum(stacked.values()) + sum(more.values()))
        fits = sum(more.values()) <= carry and needed <= max(gone + carry, scanned)
        if not more or (one.is_product and fits):
            taken.append(one)
            stacked |= more
            gone += carry
    return taken


def _added(before: Any, after: Any, made: dict[Any, Any], uses: dict[Any, int]) -> tuple[Any, Views] | None:
    """The product or sum that a carry's next value adds to it, and its views; None for anything else."""
    addition = None if jaxapi.is_literal(after) else made.get(after)
    if addition is None or jaxapi.primitive_name(addition) not in ADDITIONS:
        return None
    if before not in addition.invars or uses.get(before) != 1 or uses.get(after) != 1:
        return None
    term = addition.invars[1] if addition.invars[0] is before else addition.invars[0]
    source, views = _viewed(term, made)
    eqn = None if jaxapi.is_literal(source) else made.get(source)
    if eqn is None or jaxapi.primitive_name(eqn) not in (DOT, SUM) or uses[term] != 1 or uses[source] != 1:
        return None
    return eqn, views


def _viewed(atom: Any, made: dict[Any, Any]) -> tuple[Any, Views]:
    """What a value is a transposition or reshape of, and the views from there to it."""
    views: list[tuple[str, tuple[int, ...]]] = []
    while not jaxapi.is_literal(atom) and (eqn := made.get(atom)) is not None:
        name = jaxapi.primitive_name(eqn)
        if name == TRANSPOSE:
            views.insert(0, (name, tuple(eqn.params["permutation"])))
        elif name == RESHAPE and eqn.params["dimensions"] is None:
            views.insert(0, (name, tuple(eqn.outvars[0].aval.shape)))
        else:
            break
        atom = eqn.invars[0]
    return atom, tuple(views)


def _over_steps(atom: Any, jaxpr: Any, made: dict[Any, Any], fixed: int, carries: int) -> _Stack:
    """What stands for a value of all steps; nothing for a literal and what is the same in every step."""
    scanned, results = jaxpr.invars[fixed + carries :], jaxpr.outvars[carries:]
    source, views = _viewed(atom, made)
    if jaxapi.is_literal(source) or source in jaxpr.invars[:fixed]:
        return _Stack("")
    if source in scanned:
        return _Stack("scanned", scanned.index(source), views)
    if source in results:
        return _Stack("result", results.index(source), views)
    return _Stack("new", source, views)


def _hoisted(eqn: Any, found: Sequence[_Accumulation]) -> Any:
    """The call that computes a scan without some of its carries, and their products behind it."""
    jaxpr, fixed, carries = _body(eqn).jaxpr, jaxapi.scan_constants(eqn), jaxapi.scan_carries(eqn)
    gone = {a.carry for a in found}
    kept = [n for n in range(carries) if n not in gone]
    new: list[Any] = []
    for accumulation in found:
        new += [value for value in accumulation.new_values() if value not in new]
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
            over_steps = [_seen(sources[s.kind][s.value], s.views, 1) for s in accumulation.operands]
            final[accumulation.carry] = carried[accumulation.carry] + _over_all(accumulation, *over_steps)
        return [*final, *results]

    return jaxapi.call_eqn(looped, eqn.invars, eqn.outvars)


def _over_all(accumulation: _Accumulation, *operands: Any) -> Any:
    """The sum of the products, or sums, of all steps. Args: operands: with the steps in front."""
    value = (_product if accumulation.is_product else _sum)(accumulation.eqn, *operands)
    return _seen(value, accumulation.views, 0)


def _sum(eqn: Any, operand: Any) -> Any:
    return jax.lax.reduce_sum(operand, (0, *_moved(eqn.params["axes"])))


def _product(eqn: Any, a: Any, b: Any) -> Any:
    (left, right), (batch_left, batch_right) = eqn.params["dimension_numbers"]
    numbers = ((0, *_moved(left)), (0, *_moved(right))), (_moved(batch_left), _moved(batch_right))
    return jax.lax.dot_general(
        a,
        b,
        numbers,
        precision=precision_over_steps(eqn),
        preferred_element_type=eqn.params["preferred_element_type"],
    )


def _moved(dims: Sequence[int]) -> tuple[int, ...]:
    return tuple(d + 1 for d in dims)


def _seen(value: Any, views: Views, leading: int) -> Any:
    """A value through views of what is behind some leading dimensions."""
    for kind, numbers in views:
        if kind == TRANSPOSE:
            value = jax.lax.transpose(value, (*range(leading), *(d + leading for d in numbers)))
        else:
            value = jax.lax.reshape(value, (*value.shape[:leading], *numbers))
    return value
