"""Dimension tracking of the rows of a matrix product (tokens): where they are in the operands and results of equations.

The *rows* of a value are its dimensions that together count the tokens in row-major order: ``(0, 1)`` in logits of
shape [batch, length, vocabulary], ``(0,)`` after a reshape to [tokens, vocabulary].  An equation works *row by row* if
every row of its results depends on the same row of its operands alone; it then computes a chunk of rows from chunks of
its operands.  An equation that *sums* over all rows (the gradient of the weights) gives a part of its result per chunk.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jcuts.rewrite.matmul_patterns import DOT
from jcuts.trace import jaxapi
from jcuts.trace.shard_rules import ShardRule, shard_rule

Rows = tuple[int, ...]
Shapes = Sequence[tuple[int, ...]]
SUM = "reduce_sum"
GATHER = "gather"
SCATTERS = ("scatter", "scatter-add", "scatter_add")
NOT_SPLIT = ("conv_general_dilated",)


@dataclass(frozen=True)
class RowRule:
    """How one equation works on a chunk of rows.

    Attributes:
        ins: rows of every operand; None where an operand has none (weights), so that every chunk needs all of it.
        outs: rows of every result; None for a sum over the rows.
        localise: shapes of the operands and of the results of a chunk -> the parameters that change.
        numbered: the operand whose first column holds the number of every row (``logits[arange(n), labels]``).
    """

    ins: tuple[Rows | None, ...]
    outs: tuple[Rows | None, ...]
    localise: Callable[[Shapes, Shapes], dict[str, Any]] | None = None
    numbered: int | None = None

    @property
    def sums(self) -> bool:
        """Whether the equation adds up over the rows."""
        return self.outs == (None,)


def row_rule(
    eqn: Any,
    ins: Sequence[Rows | None],
    outs: Sequence[Rows | None],
    is_numbered: Callable[[Any], bool] = lambda atom: False,
) -> RowRule | None:
    """The rule of an equation; None if it mixes rows or is unknown.

    Args:
        ins, outs: rows of the operands and of the results as far as they are known (one of them at least).
        is_numbered: whether the first column of an index array counts its rows.
    """
    name = jaxapi.primitive_name(eqn)
    if eqn.effects or name in NOT_SPLIT:
        return None
    if name == "reshape":
        return _reshape(eqn, ins[0], outs[0])
    if name == GATHER:
        return _gather(eqn, ins, outs, is_numbered)
    if name in SCATTERS:
        return _scatter(eqn, ins, outs, is_numbered)
    if name in ("top_k", "sort"):
        return _along_other(eqn, ins, outs)
    rule = shard_rule(eqn)
    if rule is None:
        return None
    known = next((rows for rows in outs if rows is not None), None)
    if known is None:
        if name in (SUM, DOT) and (summed := _summed(eqn, ins)) is not None:
            return summed
        known = _mapped(rule, ins)
    return None if known is None else _tied(eqn, rule, ins, known)


def _mapped(rule: ShardRule, ins: Sequence[Rows | None]) -> Rows | None:
    """Rows of the result, from those of an operand."""
    for i, rows in enumerate(ins):
        if rows is not None:
            places = {a[2]: b[2] for a, b in rule.tied if a[1] == i and b[1] == 0}
            return tuple(places[d] for d in rows) if all(d in places for d in rows) else None
    return None


def _tied(eqn: Any, rule: ShardRule, ins: Sequence[Rows | None], out: Rows) -> RowRule | None:
    found: list[Rows | None] = []
    for i, atom in enumerate(eqn.invars):
        places = {b[2]: a[2] for a, b in rule.tied if a[1] == i and b[1] == 0}
        mapped = [places[d] for d in out if d in places]
        rows = tuple(mapped) if len(mapped) == len(out) else None
        # A part of the rows alone ([length, 1] for [batch, length, 1]) is refused.
        if (rows is None and mapped) or (ins[i] is not None and ins[i] != rows):
            return None
        found.append(None if jaxapi.is_literal(atom) else rows)
    at = {("in", i): rows for i, rows in enumerate(found)}
    at.update({("out", o): out for o in range(len(eqn.outvars))})
    if any(d in (at.get((side, i)) or ()) for side, i, d in rule.whole):
        return None
    return RowRule(tuple(found), (out,) * len(eqn.outvars), rule.localise)


def _summed(eqn: Any, ins: Sequence[Rows | None]) -> RowRule | None:
    """A sum over all rows: of a value, or of products of two (contraction over the tokens)."""
    if jaxapi.primitive_name(eqn) == SUM:
        return RowRule((ins[0],), (None,)) if ins[0] and set(ins[0]) <= set(eqn.params["axes"]) else None
    contracted, _ = eqn.params["dimension_numbers"]
    side = next(i for i, rows in enumerate(ins) if rows is not None)
    mine, others = (tuple(dims) for dims in (contracted[side], contracted[1 - side]))
    rows = ins[side]
    if rows is None or not set(rows) <= set(mine):
        return None
    other = tuple(others[mine.index(d)] for d in rows)
    if ins[1 - side] not in (None, other):
        return None
    return RowRule((rows, other) if side == 0 else (other, rows), (None,))


def reshaped(old: Sequence[int], new: Sequence[int], rows: Rows) -> Rows | None:
    """Rows after a reshape; None where they are no group of neighbouring dimensions before or behind it."""
    if list(rows) != list(range(rows[0], rows[0] + len(rows))):
        return None
    before, count = math.prod(old[: rows[0]]), math.prod(old[d] for d in rows)
    found: list[int] = []
    product = 1
    for d, size in enumerate(new):
        if product < before or (product == before and size == 1 and not found):
            product *= size
        elif product < before * count:
            found.append(d)
            product *= size
    whole = bool(found) and math.prod(new[: found[0]]) == before and math.prod(new[d] for d in found) == count
    return tuple(found) if whole else None


def _reshape(eqn: Any, rows: Rows | None, out: Rows | None) -> RowRule | None:
    if eqn.params.get("dimensions") is not None or len(eqn.invars) != 1:
        return None
    old, new = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    if rows is None:
        rows = None if out is None else reshaped(new, old, out)
    elif out is None:
        out = reshaped(old, new, rows)
    if rows is None or out is None:
        return None
    return RowRule((rows,), (out,), lambda _, outs: {"new_sizes": outs[0]})


def _along_other(eqn: Any, ins: Sequence[Rows | None], outs: Sequence[Rows | None]) -> RowRule | None:
    """Operations along one dimension that keep the rank: sorting, the k largest."""
    rank = len(eqn.invars[0].aval.shape)
    along = eqn.params.get("dimension", eqn.params.get("axis", -1)) % rank
    known = next((rows for rows in (*ins, *outs) if rows is not None), None)
    if known is None or along in known or any(rows not in (None, known) for rows in ins):
        return None
    return RowRule((known,) * len(eqn.invars), (known,) * len(eqn.outvars))


def _gather(
    eqn: Any, ins: Sequence[Rows | None], outs: Sequence[Rows | None], is_numbered: Callable[[Any], bool]
) -> RowRule | None:
    """One entry per row: ``take_along_axis``, or an index array whose first column counts the rows; or one for all."""
    numbers, indices = eqn.params["dimension_numbers"], eqn.invars[1].aval.shape
    if ins[0] is not None and ins[1] is None:
        windows = _windows(ins[0], numbers.collapsed_slice_dims, numbers.operand_batching_dims, numbers.offset_dims)
        sizes, shape = eqn.params["slice_sizes"], eqn.invars[0].aval.shape
        if windows is not None and not set(ins[0]) & set(numbers.start_index_map):
            if any(sizes[d] != shape[d] for d in ins[0]):
                return None
            kept = set(ins[0])
            return RowRule(
                (ins[0], None),
                (windows,),
                lambda shapes, _: {"slice_sizes": tuple(shapes[0][d] if d in kept else n for d, n in enumerate(sizes))},
            )
    batch = [d for d in range(eqn.outvars[0].aval.ndim) if d not in numbers.offset_dims]
    pairs = _index_rows(
        ins[0],
        numbers.operand_batching_dims,
        numbers.start_indices_batching_dims,
        _is_indexed(numbers.start_index_map, numbers.collapsed_slice_dims),
        eqn.invars[0].aval.shape,
        indices,
        lambda: is_numbered(eqn.invars[1]),
    )
    if pairs is None or ins[1] not in (None, pairs[0]):
        return None
    out = tuple(batch[d] for d in pairs[0])  # index dimensions but the last, in order, are the batch of the result
    if outs[0] not in (None, out):
        return None
    return RowRule((ins[0], pairs[0]), (out,), numbered=1 if pairs[1] else None)


def _scatter(
    eqn: Any, ins: Sequence[Rows | None], outs: Sequence[Rows | None], is_numbered: Callable[[Any], bool]
) -> RowRule | None:
    """One entry per row is written or added: the transpose of `_gather`."""
    numbers = eqn.params["dimension_numbers"]
    known = next((rows for rows in (ins[0], outs[0]) if rows is not None), None)
    batch = [d for d in range(eqn.invars[2].aval.ndim) if d not in numbers.update_window_dims]
    if known is None and ins[2] is not None and numbers.operand_batching_dims:
        known = _scattered_rows(numbers, batch, ins[2])
    if known is None and ins[2] is not None:
        known = _of_windows(numbers, eqn.outvars[0].aval.ndim, ins[2])
    if known is not None and ins[1] is None and not set(known) & set(numbers.scatter_dims_to_operand_dims):
        windows = _windows(
            known, numbers.inserted_window_dims, numbers.operand_batching_dims, numbers.update_window_dims
        )
        if windows is not None:
            shapes = [eqn.outvars[0].aval.shape[d] for d in known], [eqn.invars[2].aval.shape[d] for d in windows]
            agrees = ins[2] in (None, windows) and ins[0] in (None, known) and shapes[0] == shapes[1]
            return RowRule((known, None, windows), (known,)) if agrees else None
    pairs = _index_rows(
        known,
        numbers.operand_batching_dims,
        numbers.scatter_indices_batching_dims,
        _is_indexed(numbers.scatter_dims_to_operand_dims, numbers.inserted_window_dims),
        eqn.outvars[0].aval.shape,
        eqn.invars[1].aval.shape,
        lambda: is_numbered(eqn.invars[1]),
    )
    if pairs is None or ins[1] not in (None, pairs[0]):
        return None
    updates = tuple(batch[d] for d in pairs[0])
    if ins[2] not in (None, updates) or ins[0] not in (None, known):
        return None
    return RowRule((known, pairs[0], updates), (known,), numbered=1 if pairs[1] else None)


def _scattered_rows(numbers: Any, batch: Sequence[int], updates: Rows) -> Rows | None:
    """Rows of a scatter's operand, from those of its updates."""
    pairs = dict(zip(numbers.scatter_indices_batching_dims, numbers.operand_batching_dims, strict=True))
    places = [batch.index(d) for d in updates if d in batch]
    return tuple(pairs[d] for d in places) if len(places) == len(updates) and all(d in pairs for d in places) else None


def _windows(rows: Rows, collapsed: Sequence[int], batch: Sequence[int], offsets: Sequence[int]) -> Rows | None:
    """Dimensions of a window (in a gather's result, a scatter's updates) that are an operand's rows, all of them."""
    kept = [d for d in range(len(offsets) + len(collapsed) + len(batch)) if d not in (*collapsed, *batch)]
    return tuple(offsets[kept.index(d)] for d in rows) if all(d in kept for d in rows) else None


def _of_windows(numbers: Any, rank: int, updates: Rows) -> Rows | None:
    """Rows of a scatter's operand, from those of the windows that it writes."""
    gone = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    kept = [d for d in range(rank) if d not in gone]
    windows = list(numbers.update_window_dims)
    return tuple(kept[windows.index(d)] for d in updates) if all(d in windows for d in updates) else None


def _is_indexed(starts: Sequence[int], collapsed: Sequence[int]) -> bool:
    """Whether the first index of every entry is a position along the operand's first dimension."""
    return bool(starts) and starts[0] == 0 and 0 in collapsed


def _index_rows(
    rows: Rows | None,
    operand_batch: Sequence[int],
    index_batch: Sequence[int],
    indexed: bool,
    operand: Sequence[int],
    indices: Sequence[int],
    is_numbered: Callable[[], bool],
) -> tuple[Rows, bool] | None:
    """Rows of an index array, and whether its first column counts them."""
    if rows is None:
        return None
    if all(d in operand_batch for d in rows):
        places = dict(zip(operand_batch, index_batch, strict=True))
        return tuple(places[d] for d in rows), False
    lead = indices[:-1]
    if rows == (0,) and indexed and not operand_batch and len(lead) == 1 and lead[0] == operand[0] and is_numbered():
        return (0,), True
    return None
