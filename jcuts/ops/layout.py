"""Op rules of data movement (reshape, transpose, slice, pad, concatenate, ...): index maps, guarded where they can
miss.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

from jcuts.base.errors import Refusal
from jcuts.kernel_ir.index import Index, flatten, unflatten
from jcuts.kernel_ir.node import Guard
from jcuts.ops.registry import Context, Equation, IndexTuple, Op, PushRule, op_rule

REGROUPED = 1 << 14
"""Indices in another shape that are kept: fusion lowers regions that grow by one equation after the other."""


@op_rule("broadcast_in_dim")
def broadcast_in_dim(eqn: Equation) -> Op | Refusal:
    """Operand dimension k becomes output dimension ``broadcast_dimensions[k]``; size-1 dimensions repeat."""
    if len(eqn.inputs) != 1:
        return Refusal(eqn.prim, "dynamic shape")
    dims = tuple(eqn.params["broadcast_dimensions"])
    source, target = eqn.inputs[0].shape, eqn.outputs[0].shape

    def pull(ctx: Context, index: IndexTuple) -> int:
        return ctx.input(0, tuple(index[d] if source[k] != 1 else Index() for k, d in enumerate(dims)))

    push: PushRule | None = None
    if eqn.inputs[0].size == eqn.outputs[0].size:  # only adds dimensions of size 1

        def widened(index: IndexTuple, ranges: Mapping[str, int]) -> IndexTuple:
            result = [Index()] * len(target)
            for k, d in enumerate(dims):
                result[d] = index[k]
            return tuple(result)

        push = widened

    return Op(eqn.prim, "layout", eqn.inputs, eqn.outputs, pull=pull, push=push, cost=0)


@op_rule("reshape", "squeeze", "expand_dims")
def reshape(eqn: Equation) -> Op | Refusal:
    """Same elements in row-major order under another shape (of a permutation, where ``dimensions`` asks for one)."""
    source, target = eqn.inputs[0].shape, eqn.outputs[0].shape
    asked = eqn.params.get("dimensions") if eqn.prim == "reshape" else None
    order = tuple(range(len(source))) if asked is None else tuple(map(int, asked))
    permuted = tuple(source[d] for d in order)

    def pull(ctx: Context, index: IndexTuple) -> int:
        where = regroup(index, target, permuted, ctx.ranges)
        return ctx.input(0, tuple(where[order.index(d)] for d in range(len(source))))

    def push(index: IndexTuple, ranges: Mapping[str, int]) -> IndexTuple:
        return regroup(tuple(index[d] for d in order), permuted, target, ranges)

    return Op(eqn.prim, "layout", eqn.inputs, eqn.outputs, pull=pull, push=push, cost=0)


def regroup(index: IndexTuple, old: tuple[int, ...], new: tuple[int, ...], ranges: Mapping[str, int]) -> IndexTuple:
    """The index in shape ``new`` of the point at ``index`` in shape ``old``.

    Works group by group (smallest runs of dimensions with equal products), so that a dimension which the reshape does
    not touch keeps its own expression.
    """
    return _regrouped(index, old, new, tuple(ranges.items()))


@functools.lru_cache(maxsize=REGROUPED)
def _regrouped(
    index: IndexTuple, old: tuple[int, ...], new: tuple[int, ...], extents: tuple[tuple[str, int], ...]
) -> IndexTuple:
    result: list[Index] = []
    ranges = dict(extents)
    i = j = 0
    while i < len(old) or j < len(new):
        i0, j0 = i, j
        left = old[i] if i < len(old) else 1
        right = new[j] if j < len(new) else 1
        i, j = min(i + 1, len(old)), min(j + 1, len(new))
        while left != right:
            if left < right:
                left *= old[i]
                i += 1
            else:
                right *= new[j]
                j += 1
        if old[i0:i] == new[j0:j]:
            result.extend(index[i0:i])
        else:
            result.extend(unflatten(flatten(index[i0:i], old[i0:i]), new[j0:j], ranges))
    return tuple(part if new[k] != 1 else Index() for k, part in enumerate(result))


@op_rule("transpose")
def transpose(eqn: Equation) -> Op | Refusal:
    """Output dimension k is operand dimension ``permutation[k]``."""
    permutation = tuple(eqn.params["permutation"])

    def pull(ctx: Context, index: IndexTuple) -> int:
        source: list[Index] = [Index()] * len(index)
        for k, p in enumerate(permutation):
            source[p] = index[k]
        return ctx.input(0, tuple(source))

    def push(index: IndexTuple, ranges: Mapping[str, int]) -> IndexTuple:
        return tuple(index[p] for p in permutation)

    return Op(eqn.prim, "layout", eqn.inputs, eqn.outputs, pull=pull, push=push, cost=0)


@op_rule("rev")
def rev(eqn: Equation) -> Op | Refusal:
    """Reverses some dimensions."""
    dims = set(eqn.params["dimensions"])
    shape = eqn.inputs[0].shape

    def flip(index: IndexTuple) -> IndexTuple:
        return tuple(shape[k] - 1 - part if k in dims else part for k, part in enumerate(index))

    def pull(ctx: Context, index: IndexTuple) -> int:
        return ctx.input(0, flip(index))

    def push(index: IndexTuple, ranges: Mapping[str, int]) -> IndexTuple:
        return flip(index)

    return Op(eqn.prim, "layout", eqn.inputs, eqn.outputs, pull=pull, push=push, cost=0)


@op_rule("slice")
def slice_(eqn: Equation) -> Op | Refusal:
    """Strided slice."""
    starts = tuple(map(int, eqn.params["start_indices"]))
    strides = tuple(map(int, eqn.params["strides"] or (1,) * len(starts)))

    def pull(ctx: Context, index: IndexTuple) -> int:
        return ctx.input(0, tuple(p * s + b for p, s, b in zip(index, strides, starts, strict=True)))

    return Op(eqn.prim, "layout", eqn.inputs, eqn.outputs, pull=pull, cost=0)


@op_rule("iota")
def iota(eqn: Equation) -> Op | Refusal:
    """Counts along one dimension."""
    if eqn.inputs:
        return Refusal(eqn.prim, "dynamic shape")
    dim = int(eqn.params["dimension"])
    dtype = eqn.outputs[0].dtype

    def pull(ctx: Context, index: IndexTuple) -> int:
        return ctx.index_value(index[dim], dtype)

    return Op(eqn.prim, "constant", eqn.inputs, eqn.outputs, pull=pull, cost=1)


@op_rule("pad")
def pad(eqn: Equation) -> Op | Refusal:
    """Edge padding (low and high may be negative: they crop) and interior padding."""
    config = tuple((int(lo), int(hi), int(mid)) for lo, hi, mid in eqn.params["padding_config"])
    shape = eqn.inputs[0].shape

    def pull(ctx: Context, index: IndexTuple) -> int:
        guards: list[Guard] = []
        source: list[Index] = []
        for part, extent, (low, _, interior) in zip(index, shape, config, strict=True):
            moved = part - low
            if interior:
                step = interior + 1
                guards.append(Guard(moved.mod(step, ctx.ranges), 0, 0))
                guards.append(Guard(moved, 0, (extent - 1) * step))
                moved = moved.floordiv(step, ctx.ranges)
            else:
                guards.append(Guard(moved, 0, extent - 1))
            source.append(moved)
        return guarded_input(ctx, 0, tuple(source), guards, 1)

    return Op(eqn.prim, "select", eqn.inputs, eqn.outputs, pull=pull, cost=1)


def guarded_input(ctx: Context, number: int, index: IndexTuple, guards: list[Guard], pad_input: int) -> int:
    """Operand ``number`` where the guards hold, else the scalar operand ``pad_input``."""
    live = tuple(g for g in guards if not g.always(ctx.ranges))
    if not live:
        return ctx.input(number, index)
    fill = ctx.known(pad_input)
    if fill is not None:
        return ctx.input(number, index, live, fill)
    value = ctx.input(number, index, live, 0)
    padding = ctx.input(pad_input, ())
    op = ctx.guard_value(live)
    return ctx.apply("select", _dtype_of(ctx, number), op, value, padding)


def _dtype_of(ctx: Context, number: int) -> str:
    return ctx.input_type(number).dtype  # type: ignore[attr-defined]


@op_rule("concatenate")
def concatenate(eqn: Equation) -> Op | Refusal:
    """Operands one after another along a dimension."""
    dim = int(eqn.params["dimension"])
    dtype = eqn.outputs[0].dtype
    if len(eqn.inputs) > 64:
        return Refusal(eqn.prim, f"{len(eqn.inputs)} operands would need as many guards per point")

    def pull(ctx: Context, index: IndexTuple) -> int:
        start, result = 0, None
        for number, tensor in enumerate(eqn.inputs):
            extent = tensor.shape[dim]
            moved = index[dim] - start
            guards = tuple(g for g in (Guard(moved, 0, extent - 1),) if not g.always(ctx.ranges))
            place = (*index[:dim], moved, *index[dim + 1 :])
            start += extent
            if any(g.never(ctx.ranges) for g in guards):
                continue
            value = ctx.input(number, place, guards, 0)
            if result is None or not guards:
                result = value
            else:
                result = ctx.apply("select", dtype, ctx.guard_value(guards), value, result)
        assert result is not None
        return result

    return Op(eqn.prim, "select", eqn.inputs, eqn.outputs, pull=pull, cost=len(eqn.inputs) - 1)
