"""Emits loops over chunks of rows: operands sliced, row results written in place, sums accumulated in float32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from jcuts.rewrite.chunk_batch import read
from jcuts.rewrite.cross_entropy.chunks import Part, finest, local_shape, parts, positions
from jcuts.rewrite.cross_entropy.region import Loop, Region
from jcuts.rewrite.cross_entropy.rows import SUM, RowRule, Rows
from jcuts.rewrite.matmul_patterns import DOT, Program
from jcuts.trace import jaxapi

SHORT = ("bfloat16", "float16")
"""Types of sums over rows that are accumulated in float32."""


def chunk_region(region: Region, wanted: int) -> jaxapi.Closed | str:
    """The program with a region as loops over chunks of about ``wanted`` rows, or why that cannot be."""
    loops = [_untransposed(loop, region) for loop in region.loops()]
    calls = []
    for loop in loops:
        rows = [(v.aval.shape, r) for v, r in _row_values(loop, region)]
        dims = finest({tuple(shape[d] for d in r if shape[d] > 1) for shape, r in rows})
        if not dims:
            return "values merge the rows' dimensions in ways that have no common chunks"
        plan = parts(dims, wanted)
        if sum(part.turns for part in plan) < 2:
            return "the rows are one chunk"
        run = _runner(loop, region.rules, plan)
        operands = list(dict.fromkeys(v for v, _ in loop.inputs))
        calls.append(jaxapi.call_eqn(run, operands, [*loop.rows, *loop.sums]))
    return _replaced(region.program, calls)


def _row_values(loop: Loop, region: Region) -> list[tuple[Any, Rows]]:
    """Every value that a chunk has a part of, with its rows."""
    found = [(v, rows) for v, rows in loop.inputs if rows is not None]
    for eqn in loop.eqns:
        found += [(v, region.rows_of[v]) for v in eqn.outvars if v in region.rows_of]
    return found


def _untransposed(loop: Loop, region: Region) -> Loop:
    """Products with a transposed matrix from outside multiply the matrix itself: no transpose is written to memory."""
    eqns, inputs = [], dict.fromkeys(loop.inputs)
    for eqn in loop.eqns:
        rule = region.rules[id(eqn)]
        for side in (0, 1) if jaxapi.primitive_name(eqn) == DOT else ():
            atom = eqn.invars[side]
            maker = None if rule.ins[side] is not None or jaxapi.is_literal(atom) else region.program.made.get(atom)
            if maker is not None and jaxapi.primitive_name(maker) == "transpose" and maker.outvars[0].aval.ndim == 2:
                contracted, batch = eqn.params["dimension_numbers"]
                dims = tuple(maker.params["permutation"][d] for d in contracted[side])
                pair = (dims, contracted[1]) if side == 0 else (contracted[0], dims)
                invars = [*eqn.invars]
                invars[side] = maker.invars[0]
                params = {**eqn.params, "dimension_numbers": (pair, batch)}
                eqn = eqn.replace(invars=invars, params=params)
                inputs[(maker.invars[0], None)] = None
        region.rules[id(eqn)] = rule
        eqns.append(eqn)
    used = {a for e in eqns for a in e.invars if not jaxapi.is_literal(a)}
    return Loop(tuple(eqns), tuple(pair for pair in inputs if pair[0] in used), loop.rows, loop.sums)


def _runner(loop: Loop, rules: dict[int, RowRule], plan: Sequence[Part]) -> Callable[..., list[Any]]:
    """The function that computes a loop's results from the values in `Loop.inputs`."""
    names = list(dict.fromkeys(v for v, _ in loop.inputs))
    rows_of = {v: rows for e in loop.eqns for v, rows in zip(e.outvars, rules[id(e)].outs, strict=True)}

    def run(*args: Any) -> list[Any]:
        outside = dict(zip(names, args, strict=True))

        def turn(start: Any, size: int, results: list[Any]) -> list[Any]:
            values = _chunk_values(loop, rules, outside, start, size)
            done = []
            for var, whole in zip((*loop.rows, *loop.sums), results, strict=True):
                rows = rows_of[var]
                if rows is None:
                    done.append(whole + values[var].astype(whole.dtype))
                else:
                    at = positions(var.aval.shape, rows, start)
                    done.append(lax.dynamic_update_slice(whole, values[var], at))
            return done

        results = [jnp.zeros(v.aval.shape, v.aval.dtype) for v in loop.rows]
        results += [jnp.zeros(v.aval.shape, _sum_type(v.aval.dtype)) for v in loop.sums]
        for part in plan:
            step = _step(part, turn)
            results = step(0, results) if part.turns == 1 else lax.fori_loop(0, part.turns, step, results)
        return [x.astype(v.aval.dtype) for v, x in zip((*loop.rows, *loop.sums), results, strict=True)]

    return run


def _step(part: Part, turn: Callable[[Any, int, list[Any]], list[Any]]) -> Callable[[Any, list[Any]], list[Any]]:
    return lambda number, results: turn(part.start(number), part.size, results)


def _chunk_values(
    loop: Loop, rules: dict[int, RowRule], outside: dict[Any, Any], start: Any, size: int
) -> dict[Any, Any]:
    """The values of a loop's equations at ``size`` rows from ``start`` on."""
    made: dict[Any, Any] = {}
    sliced: dict[Any, Any] = {}
    for var, rows in loop.inputs:
        value = outside[var]
        if rows is not None:
            at = positions(var.aval.shape, rows, start)
            value = lax.dynamic_slice(value, at, local_shape(var.aval.shape, rows, size))
        sliced[var, rows] = value
    for eqn in loop.eqns:
        rule = rules[id(eqn)]
        operands = [
            read(a, made) if jaxapi.is_literal(a) or a in made else sliced[a, rows]
            for a, rows in zip(eqn.invars, rule.ins, strict=True)
        ]
        if rule.numbered is not None:
            operands[rule.numbered] = _renumbered(operands[rule.numbered], start)
        params = {}
        if rule.localise is not None:
            params = rule.localise(_shapes(eqn.invars, rule.ins, size), _shapes(eqn.outvars, rule.outs, size))
        if rule.sums:
            wide = _sum_type(eqn.outvars[0].aval.dtype)
            if jaxapi.primitive_name(eqn) == SUM:
                operands = [x.astype(wide) for x in operands]
            elif isinstance(eqn.params.get("precision"), (tuple, type(None))):  # an algorithm has its own type of sums
                params = {"preferred_element_type": wide}
        made.update(zip(eqn.outvars, jaxapi.bind_eqn(eqn, operands, **params), strict=True))
    return made


def _shapes(atoms: Sequence[Any], rows: Sequence[Rows | None], size: int) -> list[tuple[int, ...]]:
    pairs = zip(atoms, rows, strict=True)
    return [tuple(a.aval.shape) if r is None else local_shape(a.aval.shape, r, size) for a, r in pairs]


def _renumbered(indices: Any, start: Any) -> Any:
    """Indices with the number of the row in the chunk in the first column, in place of the number in all rows."""
    first = indices[:, :1] - jnp.asarray(start, indices.dtype)
    return jnp.concatenate([first, indices[:, 1:]], 1)


def _sum_type(dtype: Any) -> Any:
    return jnp.float32 if str(dtype) in SHORT else dtype


def _replaced(program: Program, calls: Sequence[Any]) -> jaxapi.Closed:
    """The program with calls that define some of its values, each behind what it needs; unused equations removed."""
    defined = {v for call in calls for v in call.outvars}
    kept = [e for e in program.closed.jaxpr.eqns if not defined.intersection(e.outvars)]
    makers = {v: e for e in (*kept, *calls) for v in e.outvars}
    ordered: dict[int, Any] = {}
    for last in kept + list(calls):
        stack = [last]
        while stack:
            eqn = stack[-1]
            needed = [makers[a] for a in eqn.invars if not jaxapi.is_literal(a) and a in makers]
            missing = [e for e in needed if id(e) not in ordered]
            if missing and id(eqn) not in ordered:
                stack += missing
            else:
                ordered.setdefault(id(eqn), eqn)
                stack.pop()
    return jaxapi.dce(jaxapi.with_eqns(program.closed, list(ordered.values())))
