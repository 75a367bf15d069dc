"""Rematerialisation in the backward pass of attention (FlashAttention-2): P is recomputed from Q, K and the logsumexp.

    forward   O = P V,  P = softmax(S),  S = score_mod(Q K^T)       lse = log(rowsum(exp(S - max))) + max
    before    dP = dO V^T,  dS = P (dP - rowsum(P dP)),  dQ = dS K,  dK = dS^T Q,  dV = P^T dO     all from P in memory
    after     delta = rowsum(dO O);   P = exp(S - lse),  dS = P (dP - delta),  once for dQ, once for dK and dV

Then P has one user, the forward's product, and `fusion.match_attention` and `fusion.match_attention_backward` make one
kernel each of O with lse, dQ, and dK with dV: no array of (queries, keys) is in memory.  Whatever autodiff wrote is
recognised by `softmax_algebra`.  delta is the same number as rowsum(P dP); dO is rounded to TF32 for it as the products
round it, so that both errors are alike where a row has one large weight.

Copies of an equation would be merged again (`simplify`): the product of dQ's copy names its default precision, those of
dK and dV have their operands exchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jcuts.rewrite.attention.equations import BackwardEquations, find_backward_equations
from jcuts.rewrite.matmul_patterns import DOT, Program
from jcuts.trace import jaxapi
from jcuts.trace.equation_index import EquationIndex
from jcuts.trace.inline import inline
from jcuts.trace.precision import rounded_type

TF32_MANTISSA = 10
FLOAT32_EXPONENT = 8


def recompute_attention(closed: jaxapi.Closed) -> tuple[jaxapi.Closed, int]:
    """Rewrites the backward pass of every attention that it recognises; returns the program and how many."""
    given = closed
    if jaxapi.has_effects(closed):
        return closed, 0
    closed = _untransposed(closed)
    program, index, count = Program(closed), EquationIndex(closed), 0
    replaced: dict[int, list[Any]] = {}
    for eqn in closed.jaxpr.eqns:
        found = find_backward_equations(index, eqn) if jaxapi.primitive_name(eqn) == "exp" else None
        if found is None or any(id(e) in replaced for e in found.ends):
            continue
        replaced |= _recomputed(found)
        count += 1
    if not count:
        return given, 0
    made = program.with_eqns(replaced)
    return jaxapi.dce(jaxapi.with_eqns(made, _ordered(made.jaxpr.eqns))), count


# -- equations ------------------------------------------------------------------------------------------------------
def _recomputed(found: BackwardEquations) -> dict[int, list[Any]]:
    """What stands in place of the products of the results, by the ids of their equations."""
    lse, first = _logsumexp(found)
    delta, second = _delta(found)
    weights, queries = _weights(found, _named(found.scores), lse)
    gradient = found.gradient[-1].outvars[0]
    changed, more = _change(found, weights, gradient, delta)
    queries += [*more, *_end(found.query, found.change, {found.changed: changed})]
    weights, keys = _weights(found, _exchanged(found.scores), lse)
    start = _exchanged(found.gradient[0])
    keys += start
    gradient, more = _copies(found.gradient[1:], {found.gradient[0].outvars[0]: start[-1].outvars[0]})
    keys += more
    changed, more = _change(found, weights, gradient or start[-1].outvars[0], delta)
    keys += [*more, *_end(found.key, found.change, {found.changed: changed})]
    weights, more = _spliced(lambda x: x.astype(found.weight.aval.dtype), [weights], found.query)
    values = [*more, *_end(found.value, found.weights, {found.weight: weights})]
    return {id(found.query): [*first, *second, *queries], id(found.key): keys, id(found.value): values}


def _logsumexp(found: BackwardEquations) -> tuple[Any, list[Any]]:
    kept = found.rows.kept

    def logsumexp(total: jax.Array, most: jax.Array) -> jax.Array:
        total, most = (jax.lax.reshape(x, kept).astype(jnp.float32) for x in (total, most))
        return jax.lax.add(jax.lax.log(total), most)

    return _spliced(logsumexp, [found.total, found.largest], found.query)


def _delta(found: BackwardEquations) -> tuple[Any, list[Any]]:
    """rowsum(dO * O) as one value per row; dO is rounded to TF32."""
    kept, sums = found.rows.kept, found.row_sums

    def delta(out: jax.Array, gradient: jax.Array) -> jax.Array:
        if sums.shape is not None:
            out = jax.lax.reshape(out, sums.shape)
        if sums.turn is not None:
            out = jax.lax.transpose(out, sums.turn)
        if gradient.dtype == jnp.float32:
            gradient = jax.lax.reduce_precision(gradient, FLOAT32_EXPONENT, TF32_MANTISSA)
        product = jax.lax.mul(out.astype(jnp.float32), gradient.astype(jnp.float32))
        return jax.lax.reshape(jax.lax.transpose(jax.lax.reduce_sum(product, (sums.axis,)), sums.order), kept)

    return _spliced(delta, [sums.out, sums.gradient], found.query)


def _weights(found: BackwardEquations, product: list[Any], lse: Any) -> tuple[Any, list[Any]]:
    """P = exp(score_mod(Q K^T) - lse), with a copy of the product."""
    scores, eqns = _copies(found.score_mod, {found.scores.outvars[0]: product[-1].outvars[0]})
    scores = scores or product[-1].outvars[0]

    def weights(scores: jax.Array, lse: jax.Array) -> jax.Array:
        return jax.lax.exp(jax.lax.sub(scores.astype(jnp.float32), _wide(lse, scores.shape)))

    made, more = _spliced(weights, [scores, lse], found.query)
    return made, [*product, *eqns, *more]


def _change(found: BackwardEquations, weights: Any, gradient: Any, delta: Any) -> tuple[Any, list[Any]]:
    """P (dP - delta)."""

    def change(weights: jax.Array, gradient: jax.Array, delta: jax.Array) -> jax.Array:
        moved = jax.lax.sub(gradient.astype(jnp.float32), _wide(delta, weights.shape))
        return jax.lax.mul(weights, moved).astype(found.changed.aval.dtype)

    return _spliced(change, [weights, gradient, delta], found.query)


def _end(product: Any, chain: Sequence[Any], names: dict[Any, Any]) -> list[Any]:
    """A result's product behind a copy of what stands before it, with operands rounded as its algorithm does."""
    names = dict(names)
    _, eqns = _copies(chain, names)
    invars = [a if jaxapi.is_literal(a) else names.get(a, a) for a in product.invars]
    narrow = rounded_type(product.params["precision"])
    for side, atom in enumerate(invars):
        if narrow and str(atom.aval.dtype) != narrow:
            invars[side], more = _spliced(lambda x: x.astype(narrow), [atom], product)
            eqns += more
    return [*eqns, product.replace(invars=invars)]


def _copies(eqns: Sequence[Any], names: dict[Any, Any]) -> tuple[Any, list[Any]]:
    """Copies of equations, and the last one's result (None without any). Args: names: replaced operands, which grow."""
    made = []
    for eqn in eqns:
        outvars = [jaxapi.new_var(v.aval) for v in eqn.outvars]
        made.append(jaxapi.substituted(eqn, names).replace(outvars=outvars))
        names.update(zip(eqn.outvars, outvars, strict=True))
    return (made[-1].outvars[0] if made else None), made


def _named(product: Any) -> list[Any]:
    """The same product of the default precision, said in other words."""
    default = (jax.lax.Precision.DEFAULT, jax.lax.Precision.DEFAULT)
    precision = None if product.params["precision"] == default else default
    params = {**product.params, "precision": precision}
    return [product.replace(params=params, outvars=[jaxapi.new_var(product.outvars[0].aval)])]


def _exchanged(product: Any) -> list[Any]:
    """The same product with its operands exchanged, and the transpose of its result."""
    (left, right), (batch_left, batch_right) = product.params["dimension_numbers"]
    params = {**product.params, "dimension_numbers": ((right, left), (batch_right, batch_left))}
    aval = product.outvars[0].aval
    batch = len(batch_left)
    rows = product.invars[0].aval.ndim - batch - len(left)
    order = (*range(batch), *range(batch + rows, aval.ndim), *range(batch, batch + rows))
    inner = jaxapi.new_var(jaxapi.ShapedArray(tuple(aval.shape[d] for d in order), aval.dtype))
    back = tuple(order.index(d) for d in range(aval.ndim))
    made = product.replace(invars=product.invars[::-1], params=params, outvars=[inner])
    turned = jaxapi.new_eqn([inner], [jaxapi.new_var(aval)], jax.lax.transpose_p, {"permutation": back}, like=product)
    return [made, turned]


def _untransposed(closed: jaxapi.Closed) -> jaxapi.Closed:
    """The program with products that read the operands of transposes, where that changes nothing else.

    Several kernels then read one array as it lies, and nothing has to write the transposed one.
    """
    made = {v: e for e in closed.jaxpr.eqns for v in e.outvars if jaxapi.primitive_name(e) == "transpose"}
    eqns: list[Any] = []
    for eqn in closed.jaxpr.eqns:
        eqns += _reading_through(eqn, made) if jaxapi.primitive_name(eqn) == DOT else [eqn]
    return jaxapi.with_eqns(closed, eqns)


def _reading_through(product: Any, made: dict[Any, Any]) -> list[Any]:
    """The product of what its operands are transposes of; free dimensions of 1 may move, and are moved back."""
    result, aval = product.outvars[0], product.outvars[0].aval
    labels = list(range(aval.ndim))  # of the result, by the dimensions of the given one
    for side in range(2):
        while not jaxapi.is_literal(product.invars[side]) and product.invars[side] in made:
            turned = made[product.invars[side]]
            order = [int(d) for d in turned.params["permutation"]]
            contract, batch = (list(dims) for dims in product.params["dimension_numbers"])
            free = [d for d in range(len(order)) if d not in (*contract[side], *batch[side])]
            wide = [order[d] for d in free if turned.outvars[0].aval.shape[d] != 1]
            if wide != sorted(wide):
                break
            first = len(batch[0]) if side == 0 else len(labels) - len(free)
            mine = dict(zip([order[d] for d in free], labels[first : first + len(free)], strict=True))
            labels[first : first + len(free)] = [mine[d] for d in sorted(mine)]
            for dims in (contract, batch):
                dims[side] = tuple(order[d] for d in dims[side])
            invars = list(product.invars)
            invars[side] = turned.invars[0]
            params = {**product.params, "dimension_numbers": (tuple(contract), tuple(batch))}
            product = product.replace(invars=invars, params=params)
    if labels == sorted(labels):
        return [product]
    inner = jaxapi.new_var(jaxapi.ShapedArray(tuple(aval.shape[label] for label in labels), aval.dtype))
    back = {"permutation": tuple(labels.index(d) for d in range(aval.ndim))}
    turn = jaxapi.new_eqn([inner], [result], jax.lax.transpose_p, back, like=product)
    return [product.replace(outvars=[inner]), turn]


def _wide(row: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jax.lax.broadcast_in_dim(row, shape, tuple(range(len(shape))))


def _spliced(fn: Any, operands: Sequence[Any], like: Any) -> tuple[Any, list[Any]]:
    """Equations of a function of values of the program, and its result."""
    avals = [jax.ShapeDtypeStruct(a.aval.shape, a.aval.dtype) for a in operands]
    closed = inline(jaxapi.closed_jaxpr_of(fn, *avals))
    names = dict(zip(closed.jaxpr.invars, operands, strict=True))
    _, made = _copies(closed.jaxpr.eqns, names)
    return names[closed.jaxpr.outvars[0]], made


def _ordered(eqns: Sequence[Any]) -> list[Any]:
    """The equations in an order in which operands come first, otherwise as they are."""
    maker = {v: e for e in eqns for v in e.outvars}
    done: set[int] = set()
    found: list[Any] = []
    for eqn in eqns:
        stack = [eqn]
        while stack:
            top = stack[-1]
            if id(top) in done:
                stack.pop()
                continue
            before = [maker[a] for a in top.invars if not jaxapi.is_literal(a) and a in maker]
            missing = [e for e in before if id(e) not in done]
            if missing:
                stack += missing
                continue
            done.add(id(top))
            found.append(stack.pop())
    return found
