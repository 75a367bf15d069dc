"""Test-data recipes by data-flow analysis: which values an input of a region may have, from the equations it reaches,
and how large they may be.

Recipes are those of `tune.problem.Input`; `tune.verify.inputs` makes the values.
"""

from __future__ import annotations

import math
from typing import Any

from jcuts.trace import jaxapi

FLOATS = ("float64", "float32", "bfloat16", "float16")
NEEDS_POSITIVE = frozenset({"sqrt", "rsqrt", "log", "log1p", "pow", "cbrt"})
MOVES = frozenset({"broadcast_in_dim", "convert_element_type", "copy", "reshape", "squeeze"})
MOST_DEGREE = 64
"""Degree that counts as any higher one."""
FACTOR = 4
"""Divisor of what a step multiplies element by element: of standard normal numbers hardly one is larger."""
MULTIPLY = frozenset({"mul", "dot_general", "conv_general_dilated", "div", "square", "pow"})


def input_recipe(closed: Any, var: Any) -> str:
    """The recipe (`tune.problem.Input`) of an input of a region, from where it goes."""
    dtype = var.aval.dtype.name
    if dtype == "bool":
        branch = _computed_branch(closed, var) if math.prod(var.aval.shape) == 1 else None
        return "bool" if branch is None else f"integers {branch}..{branch}"
    if dtype not in FLOATS:
        return "integers 0..100" if dtype.startswith("u") else "integers -100..100"
    kind = "positive" if _feeds(closed, var) else "normal"
    over = _steps_divisor(closed, var)
    kind += f" over {over}" * (over > 1)
    kind += " finite" * _meets_padding(closed, var)
    return kind + " divisor" * _divides_factors(closed, var)


def _computed_branch(closed: Any, var: Any) -> int | None:
    """Which case a boolean scalar has to select, where the other one is a number that other operands have no say in.

    A variance of no terms is NaN, a gradient behind a clipped scalar 0: with that case taken most results are the same
    number, whatever a kernel makes of its operands.  None: both are computed, or none is, or two selects disagree.
    """
    predicates, found = {var}, set()
    uniform = {v for v in closed.jaxpr.invars if math.prod(v.aval.shape) == 1}
    for eqn in closed.jaxpr.eqns:
        same = [hasattr(a, "val") or a in uniform for a in eqn.invars]
        if all(same):
            uniform.update(eqn.outvars)
        atoms = [a for a in eqn.invars if not hasattr(a, "val")]
        if eqn.primitive.name in MOVES and atoms and atoms[0] in predicates:
            predicates.update(eqn.outvars)
        elif eqn.primitive.name == "select_n" and atoms and atoms[0] in predicates and sum(same[1:]) == 1:
            found.add(same[1:].index(False))
    return found.pop() if len(found) == 1 else None


def _divides_factors(closed: Any, var: Any) -> bool:
    """Does this input divide something that is then multiplied? XLA may do that in another order."""
    divisors, quotients = {var}, set()
    for eqn in closed.jaxpr.eqns:
        name, atoms = eqn.primitive.name, [a for a in eqn.invars if not hasattr(a, "val")]
        if name in MOVES and atoms:
            for known in (divisors, quotients):
                known.update(eqn.outvars if atoms[0] in known else ())
        elif name == "div" and not hasattr(eqn.invars[1], "val") and eqn.invars[1] in divisors:
            quotients.update(eqn.outvars)
        elif name == "mul" and any(a in quotients for a in atoms):
            return True
    return False


def _meets_padding(closed: Any, var: Any) -> bool:
    """Is a convolution's filter, whose products with padding are left out by some algorithms, made of this input?

    Zero times an infinite number is NaN: such filters tell algorithms apart that XLA chooses between by time.
    """
    reached = {var}
    for eqn in closed.jaxpr.eqns:
        atoms = [not hasattr(a, "val") and a in reached for a in eqn.invars]
        if eqn.primitive.name == "conv_general_dilated" and any(atoms[1:]):
            holes = any(d != 1 for d in eqn.params["lhs_dilation"])
            if holes or any(n != 0 for pair in eqn.params["padding"] for n in pair):
                return True
        reached.update(eqn.outvars if any(atoms) else ())
    return False


def _steps_divisor(closed: Any, var: Any) -> int:
    """By what an operand is divided that every step of a loop multiplies what is carried with: then errors do not grow.

    Of standard normal numbers the products of one step are sqrt(K) times as large as those of the step before, and two
    right results have nothing in common after a few. A matrix of K rows, divided by 2 sqrt(K), has a norm of about 1.
    """
    for eqn in closed.jaxpr.eqns:
        if eqn.primitive.name == "scan":
            ((_, _, body),) = jaxapi.inner_jaxprs(eqn)
            inside = [body.jaxpr.invars[k] for k in range(jaxapi.scan_constants(eqn)) if eqn.invars[k] is var]
            if inside:
                return max(FACTOR, *(math.ceil(2 * _terms(body, v) ** 0.5) for v in inside))
    return 1


def _terms(body: Any, var: Any) -> int:
    """Most terms of a product in a loop's body that an operand is a factor of, moved or not; 0: of none."""
    moved, most = {var}, 0
    for eqn in body.jaxpr.eqns:
        atoms = [not hasattr(a, "val") and a in moved for a in eqn.invars]
        if any(atoms) and eqn.primitive.name in (*MOVES, "transpose", "slice"):
            moved.update(eqn.outvars)
        elif any(atoms) and eqn.primitive.name == "dot_general":
            (left, right), _ = eqn.params["dimension_numbers"]
            place = atoms.index(True)
            dims = (left, right)[place]
            most = max(most, math.prod(eqn.invars[place].aval.shape[d] for d in dims))
    return most


def _feeds(closed: Any, var: Any) -> bool:
    """Does this input reach a function that is only defined for positive numbers?"""
    reached = {var}
    for eqn in closed.jaxpr.eqns:
        if any(not hasattr(a, "val") and a in reached for a in eqn.invars):
            if eqn.primitive.name in NEEDS_POSITIVE:
                return True
            reached.update(eqn.outvars)
    return False


def degree(closed: Any) -> int:
    """Degree of the subset's results as polynomials in its inputs (1 where nothing is multiplied)."""
    known: dict[Any, int] = dict.fromkeys(closed.jaxpr.invars, 1)
    highest = 1
    for eqn in closed.jaxpr.eqns:
        inputs = [known.get(a, 1) for a in eqn.invars if not hasattr(a, "val")]
        name = eqn.primitive.name
        if name in MULTIPLY:
            power = sum(inputs) if name != "square" else 2 * sum(inputs)
        elif name == "integer_pow":
            power = max(inputs, default=1) * abs(int(eqn.params["y"]))
        elif name == "scan":  # what every step multiplies
            power = MOST_DEGREE
        else:
            power = max(inputs, default=1)
        highest = max(highest, min(power, MOST_DEGREE))
        known.update((v, min(power, MOST_DEGREE)) for v in eqn.outvars)
    return highest


def reduction_length(program: Any) -> int:
    """Most terms that are summed into one value: along reductions, and along what a cumulative operation or loop does
    one after the other.
    """
    longest = 1
    for phase in program.phases:
        carried = [a.extent for a in phase.axes if program.template in ("scan", "recurrence") and a.name == "t"]
        longest = max(longest, math.prod([*(r.extent for r in phase.reds), *carried]))
    return longest
