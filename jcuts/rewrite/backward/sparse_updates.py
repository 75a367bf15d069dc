"""Sparse updates of embedding tables (`jax.lax.scatter` of the rows that were looked up) in place of dense ones.

    p - rate * scatter_add(zeros, i, u)     becomes     scatter(p, i, p[i] - rate * sums[i])

The gradient of a look-up is a table of zeros with a few rows added, and an update that is linear in it (SGD without
momentum, the sum of gradients of micro-batches, a head tied to its embedding) leaves all other rows as they are.  XLA
writes the zeros, and reads and writes the whole table: gigabytes for thousands of rows.  Here only those rows move.

Rows that occur several times in a batch are summed before they meet p, as they were, so that each of them is rounded
once.  The table itself holds the sums meanwhile, in the rows that are going to be overwritten:

    old = p[i];   p[i] = 0;   p[i] += u;   sums = p[i];   p[i] = old - rate * sums

All of these are in place where p is donated or dies here: what reads the old rows is before them in the data flow.  Any
scatter-add is rewritten so, with its own mode: an index out of bounds writes nothing, or is clamped, in all five.

The values are those of the dense update, but that -0 stays -0 in rows nothing is added to.  Factors have to be finite
for that (an infinite rate makes zeros NaN): numbers, and schedules of a step count (`scalar_range`).
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from jcuts.rewrite.backward.scalar_range import value_range
from jcuts.trace import jaxapi
from jcuts.trace.equation_index import EquationIndex
from jcuts.trace.inline import inline

SCATTER = "scatter-add"
BROADCAST = "broadcast_in_dim"
SCALING = ("mul", "div")
SIGN_AND_TYPE = ("neg", "convert_element_type")
ADDITIONS = ("add", "add_any", "sub")
LEAST_BYTES = 4 << 20
"""Smaller tables are updated whole: they are in a cache, and five small operations take longer."""
LEAST_SHARE = 4
"""A table has at least as many times the elements that are added to it."""


def sparse_updates(closed: jaxapi.Closed) -> tuple[jaxapi.Closed, int]:
    """Rewrites additions of scatters into zeros as scatters into the other operand; the program and their number."""
    if not any(jaxapi.primitive_name(eqn) == SCATTER for eqn in closed.jaxpr.eqns):
        return closed, 0
    index = EquationIndex(closed)
    replaced: dict[int, Any] = {}
    for eqn in index.eqns:
        if jaxapi.primitive_name(eqn) == SCATTER and _is_sparse(eqn, index):
            chain = _chain(eqn, index)
            if chain is not None and _holds_sums(chain) and id(chain[-1]) not in replaced:
                replaced[id(chain[-1])] = _updated(chain, index)
    if not replaced:
        return closed, 0
    eqns = [replaced.get(id(eqn), eqn) for eqn in index.eqns]
    return jaxapi.dce(inline(jaxapi.with_eqns(closed, eqns))), len(replaced)


def _is_sparse(eqn: Any, index: EquationIndex) -> bool:
    """Whether a scatter adds few elements to a large array of zeros."""
    table, _, updates = (atom.aval for atom in eqn.invars)
    zeros = index.maker(eqn.invars[0], BROADCAST)
    return (
        jnp.issubdtype(table.dtype, jnp.floating)
        and table.size * table.dtype.itemsize >= LEAST_BYTES
        and table.size >= LEAST_SHARE * updates.size
        and zeros is not None
        and jaxapi.is_literal(zeros.invars[0])
        and not zeros.invars[0].val
    )


def _chain(scatter: Any, index: EquationIndex) -> list[Any] | None:
    """The scatter, what scales it, and the addition to another array of its shape; None where there is none."""
    chain = [scatter]
    while True:
        (value,) = chain[-1].outvars
        users = index.using(value)
        if value in index.results or len(users) != 1 or list(users[0].invars).count(value) != 1:
            return None
        (user,) = users
        name = jaxapi.primitive_name(user)
        if name in ADDITIONS:
            return [*chain, user] if _is_added(user, value) else None
        if not (_is_scaled(user, value, index) or (name in SIGN_AND_TYPE and _is_floating(user))):
            return None
        chain.append(user)


def _holds_sums(chain: list[Any]) -> bool:
    """Whether the array that is added to is of a type that sums of the scatter fit in."""
    sums, table = (eqn.outvars[0].aval.dtype for eqn in (chain[0], chain[-1]))
    return jnp.promote_types(sums, table) == table


def _is_floating(eqn: Any) -> bool:
    return jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.floating)


def _is_added(eqn: Any, value: Any) -> bool:
    """Whether the other operand is an array that stays itself where zero is added (zero minus an array is not)."""
    left, right = eqn.invars
    other = right if left is value else left
    whole = not jaxapi.is_literal(other) and other.aval.shape == value.aval.shape
    return whole and not (jaxapi.primitive_name(eqn) == "sub" and left is value)


def _is_scaled(eqn: Any, value: Any, index: EquationIndex) -> bool:
    """Whether a value is multiplied or divided by a scalar that leaves zero as it is."""
    name = jaxapi.primitive_name(eqn)
    if name not in SCALING or (name == "div" and eqn.invars[0] is not value):
        return False
    (factor,) = [atom for atom in eqn.invars if atom is not value]
    found = value_range(factor, index.made) if _scalar(factor, index) is not None else None
    return found is not None and not (name == "div" and found[0] <= 0 <= found[1])


def _scalar(atom: Any, index: EquationIndex) -> Any:
    """The scalar that an operand is, or is the broadcast of; None for an array."""
    if atom.aval.ndim == 0:
        return atom
    eqn = index.maker(atom, BROADCAST)
    return eqn.invars[0] if eqn is not None and eqn.invars[0].aval.ndim == 0 else None


def _updated(chain: list[Any], index: EquationIndex) -> Any:
    """The addition at the end of a chain, as scatters into the array that is added to."""
    scatter, *scalings, addition = chain
    (last,) = scalings[-1].outvars if scalings else scatter.outvars
    (table,) = [atom for atom in addition.invars if atom is not last]
    _, indices, updates = scatter.invars
    factors = [_factor(eqn, before, index) for before, eqn in zip(chain, scalings, strict=False)]
    scalars = [f for f in factors if f is not None and not jaxapi.is_literal(f)]
    numbers, mode = scatter.params["dimension_numbers"], scatter.params["mode"]
    gathered = _gather_numbers(numbers)
    sizes = _window(scatter.invars[0].aval.shape, updates.aval.shape, numbers)

    def rows(array: Any, at: Any) -> Any:
        return lax.gather(array, at, gathered, sizes, mode=mode)

    def update(table: Any, indices: Any, updates: Any, *scalars: Any) -> Any:
        old = _materialized(rows(table, indices))
        zeros = _zeros_behind(old, updates)
        cleared = lax.scatter(table, indices, zeros, numbers, mode=mode)
        added_to = lax.scatter_add(cleared, indices, updates.astype(table.dtype), numbers, mode=mode)
        sums = rows(added_to, indices).astype(updates.dtype)
        values = iter(scalars)
        for eqn, factor in zip(scalings, factors, strict=True):
            sums = _scaled(eqn, sums, factor, values)
        new = old - sums if jaxapi.primitive_name(addition) == "sub" else old + sums
        return lax.scatter(added_to, indices, new, numbers, mode=mode)

    return jaxapi.call_eqn(update, [table, indices, updates, *scalars], addition.outvars)


def _materialized(old: Any) -> Any:
    """The same array, as a scatter into an array of its own, which XLA does not fuse into its readers.

    It fused the gather of old rows with the subtraction otherwise (and removes `jax.lax.optimization_barrier` before it
    fuses): old rows would be read after they were overwritten, and XLA copied the table.
    """
    flat = old.reshape(-1, old.shape[-1] if old.ndim > 1 else 1)
    place = lax.iota(jnp.int32, flat.shape[0])
    return jnp.zeros_like(flat).at[place].set(flat, mode="promise_in_bounds").reshape(old.shape)


def _zeros_behind(old: Any, updates: Any) -> Any:
    """Zeros that are known when both operands are; NaN where one of them is NaN, as the result will be there.

    XLA does not fold the comparisons.  All that reads the rows of a batch is before the updates in the data flow, so
    that these zeros may overwrite them in place.
    """
    is_known = (old == old) & (updates == updates)
    return jnp.where(is_known, jnp.zeros((), old.dtype), jnp.full((), jnp.nan, old.dtype))


def _factor(eqn: Any, before: Any, index: EquationIndex) -> Any:
    """The scalar that an equation scales by; None where it changes sign or type."""
    if jaxapi.primitive_name(eqn) not in SCALING:
        return None
    (value,) = before.outvars
    (factor,) = [atom for atom in eqn.invars if atom is not value]
    return _scalar(factor, index)


def _scaled(eqn: Any, sums: Any, factor: Any, values: Any) -> Any:
    """An equation of a chain, for the rows alone."""
    name = jaxapi.primitive_name(eqn)
    if factor is None:
        return -sums if name == "neg" else sums.astype(eqn.params["new_dtype"])
    number = jnp.asarray(factor.val if jaxapi.is_literal(factor) else next(values), sums.dtype)
    return sums * number if name == "mul" else sums / number


def _gather_numbers(numbers: lax.ScatterDimensionNumbers) -> lax.GatherDimensionNumbers:
    """The gather that reads what a scatter writes."""
    return lax.GatherDimensionNumbers(
        offset_dims=tuple(numbers.update_window_dims),
        collapsed_slice_dims=tuple(numbers.inserted_window_dims),
        start_index_map=tuple(numbers.scatter_dims_to_operand_dims),
        operand_batching_dims=tuple(numbers.operand_batching_dims),
        start_indices_batching_dims=tuple(numbers.scatter_indices_batching_dims),
    )


def _window(shape: tuple[int, ...], updates: tuple[int, ...], numbers: lax.ScatterDimensionNumbers) -> tuple[int, ...]:
    """The extents of what one index writes, one for each dimension of the operand."""
    extents = iter([updates[d] for d in numbers.update_window_dims])
    single = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    return tuple(1 if d in single else next(extents) for d in range(len(shape)))
