"""Code motion of slices and zero padding of rows across a product (``(h @ w)[:, :-1]``, a loss of shifted logits).

    slice(f(x, y)) -> f(slice(x), slice(y))      slice(x . w) -> slice(x) . w
    pad(d) . w -> pad(d . w)      pad(d)^T . x -> d^T . slice(x)      sum of pad(d) over padded dimensions -> sum of d

The first line moves slices of the logits to the hidden state, the second what automatic differentiation makes of them;
after that, logits and their gradient have the same rows.  Values stay the same, but for sums of fewer zeros.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jcuts.rewrite.cross_entropy.rows import SUM
from jcuts.rewrite.matmul_patterns import DOT, Program
from jcuts.trace import jaxapi
from jcuts.trace.inline import inline
from jcuts.trace.shard_rules import ELEMENTWISE

MOST_STEPS = 32
"""Equations that slices are moved across, one after the other: biases, casts, soft caps."""

Window = dict[int, tuple[int, int]]
"""Dimension -> first position and the one behind the last, of the dimensions that a slice or a pad changes."""


def move_row_slices(closed: jaxapi.Closed, least_bytes: int) -> jaxapi.Closed:
    """The program with slices and zero padding of large values moved to the smaller operands of products."""
    for _ in range(MOST_STEPS):
        program = Program(closed)
        replaced = _step(program, least_bytes)
        if not replaced:
            break
        closed = jaxapi.dce(inline(program.with_eqns(replaced)))
    return closed


def _step(program: Program, least_bytes: int) -> dict[int, list[Any]]:
    """One equation to replace."""
    for eqn in program.closed.jaxpr.eqns:
        if jaxapi.primitive_name(eqn) == "slice" and jaxapi.nbytes(eqn.invars[0]) >= least_bytes:
            maker, window = program.maker(eqn.invars[0]), _sliced(eqn)
            call = None if maker is None or not window else _before(maker, window, eqn)
            if maker is not None and call is not None:
                return {id(maker): [], id(eqn): [call]}
        for atom in eqn.invars:
            pad = None if jaxapi.is_literal(atom) else program.made.get(atom)
            if pad is not None and jaxapi.primitive_name(pad) == "pad" and jaxapi.nbytes(atom) >= least_bytes:
                window = _padded(pad)
                call = _behind(eqn, pad, window) if window else None
                if call is not None:
                    return {id(eqn): [call]}
    return {}


def _sliced(eqn: Any) -> Window:
    p, shape = eqn.params, eqn.invars[0].aval.shape
    if p["strides"] is not None and any(n != 1 for n in p["strides"]):
        return {}
    pairs = enumerate(zip(p["start_indices"], p["limit_indices"], strict=True))
    return {d: (low, high) for d, (low, high) in pairs if (low, high) != (0, shape[d])}


def _padded(pad: Any) -> Window:
    """Where the operand is in the result; {} where it is not surrounded by zeros."""
    value = pad.invars[1]
    if not jaxapi.is_literal(value) or np.asarray(value.val) != 0:
        return {}
    window: Window = {}
    for d, (low, high, inner) in enumerate(pad.params["padding_config"]):
        if low < 0 or high < 0 or inner:
            return {}
        if low or high:
            window[d] = low, low + pad.invars[0].aval.shape[d]
    return window


def _cut(x: Any, window: Window) -> Any:
    for d, (low, high) in window.items():
        x = lax.slice_in_dim(x, low, high, axis=d)
    return x


def _free(eqn: Any) -> dict[int, tuple[int, int]]:
    """Dimension of a product's result -> operand and its dimension, without batch dimensions."""
    contracted, _ = eqn.params["dimension_numbers"]
    pairs = [(i, d) for i in (0, 1) for d in range(eqn.invars[i].aval.ndim) if d not in contracted[i]]
    return dict(enumerate(pairs))


def _is_dot(eqn: Any) -> bool:
    return jaxapi.primitive_name(eqn) == DOT and not any(eqn.params["dimension_numbers"][1])


def _before(maker: Any, window: Window, cut: Any) -> Any:
    """The call that computes a slice of an equation's result from slices of its operands; None for other equations."""
    name, shape = jaxapi.primitive_name(maker), maker.outvars[0].aval.shape
    outputs, operands = cut.outvars, [a for a in maker.invars if not jaxapi.is_literal(a)]
    new_shape = outputs[0].aval.shape
    if name in ELEMENTWISE:
        parts = [
            {d: w for d, w in window.items() if a.aval.shape[d] == shape[d]} if a.aval.ndim else {} for a in operands
        ]
        params = {}
    elif name == "broadcast_in_dim" and len(maker.invars) == 1:
        where = maker.params["broadcast_dimensions"]
        kept = [{i: window[d] for i, d in enumerate(where) if d in window and a.aval.shape[i] > 1} for a in operands]
        parts, params = kept, {"shape": new_shape}
    elif _is_dot(maker) and len(operands) == 2:
        free = _free(maker)
        parts = [{free[d][1]: w for d, w in window.items() if free[d][0] == i} for i in (0, 1)]
        params = {}
        if all(parts) or any(
            p and a.aval.size > maker.outvars[0].aval.size for p, a in zip(parts, operands, strict=True)
        ):
            return None
    else:
        return None

    def run(*args: Any) -> Any:
        cuts = iter([_cut(x, part) for x, part in zip(args, parts, strict=True)])
        return jaxapi.bind_eqn(maker, [a.val if jaxapi.is_literal(a) else next(cuts) for a in maker.invars], **params)

    return jaxapi.call_eqn(run, operands, outputs)


def _behind(eqn: Any, pad: Any, window: Window) -> Any:
    """The call that computes an equation of a padded value from the value without padding; None for other equations."""
    source, padded, name = pad.invars[0], pad.outvars[0], jaxapi.primitive_name(eqn)
    config = pad.params["padding_config"]
    if name == SUM and set(window) <= set(eqn.params["axes"]):
        return jaxapi.call_eqn(lambda x: jaxapi.bind_eqn(eqn, [x]), [source], eqn.outvars)
    if name in ("convert_element_type", "neg"):
        out = eqn.outvars[0].aval.dtype
        return jaxapi.call_eqn(
            lambda x: [lax.pad(jaxapi.bind_eqn(eqn, [x])[0], jnp.zeros((), out), config)], [source], eqn.outvars
        )
    if not _is_dot(eqn) or sum(a is padded for a in eqn.invars) != 1 or any(map(jaxapi.is_literal, eqn.invars)):
        return None
    side = 0 if eqn.invars[0] is padded else 1
    contracted, _ = eqn.params["dimension_numbers"]
    inner = {contracted[1 - side][contracted[side].index(d)]: w for d, w in window.items() if d in contracted[side]}
    outer = {d: config[place[1]] for d, place in _free(eqn).items() if place[0] == side and place[1] in window}
    other = eqn.invars[1 - side]
    rank, dtype = eqn.outvars[0].aval.ndim, eqn.outvars[0].aval.dtype

    def run(x: Any, y: Any) -> list[Any]:
        pair = [x, _cut(y, inner)]
        (made,) = jaxapi.bind_eqn(eqn, pair if side == 0 else pair[::-1])
        return [lax.pad(made, jnp.zeros((), dtype), [outer.get(d, (0, 0, 0)) for d in range(rank)])]

    return jaxapi.call_eqn(run, [source, other], eqn.outvars)
