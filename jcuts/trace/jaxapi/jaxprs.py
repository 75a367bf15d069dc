"""Reading, rebuilding and evaluating jaxprs, spelled alike for jax 0.10 and 0.11."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import core as _core
from jax._src import source_info_util as _source
from jax._src.interpreters import partial_eval as _pe
from jax._src.state import types as _state_types

from jcuts.trace.jaxapi.types import UNSPECIFIED, Closed, Eqn, Jaxpr, Literal, Primitive, Var


def is_literal(atom: Any) -> bool:
    """Whether an operand of an equation is a literal (``atom.val``) rather than a variable."""
    return isinstance(atom, _core.Literal)


def substituted(eqn: Eqn, values: Mapping[Any, Any]) -> Eqn:
    """An equation that reads other values in place of some."""
    return eqn.replace(invars=[a if is_literal(a) else values.get(a, a) for a in eqn.invars])


def is_dropvar(var: Any) -> bool:
    """Whether an output of an equation is dropped (printed ``_``)."""
    return isinstance(var, _core.DropVar)


def new_var(aval: Any) -> Var:
    """A fresh variable of type ``aval``."""
    return Var(aval)


def constant(values: Any, dtype: Any = None) -> Any:
    """The values as a JAX array; unlike by ``jnp.asarray``, no copy is compiled for their shape."""
    if isinstance(values, jax.Array):
        return values if values.dtype == (dtype or values.dtype) else jax.numpy.asarray(values, dtype)
    return jax.device_put(np.array(values, dtype))  # a device may use the memory of a NumPy array, which may change


def new_literal(value: Any, aval: Any) -> Literal:
    """A literal operand."""
    return Literal(value, aval)


def new_eqn(
    invars: Sequence[Any],
    outvars: Sequence[Any],
    primitive: Primitive,
    params: dict[str, Any],
    *,
    effects: Any = _core.no_effects,
    like: Eqn | None = None,
) -> Eqn:
    """A new equation; source line and context are taken from ``like``."""
    info, ctx = (like.source_info, like.ctx) if like is not None else (None, None)
    return _core.new_jaxpr_eqn(list(invars), list(outvars), primitive, params, effects, info, ctx)


def reshape_eqn(source: Any, target: Any, like: Eqn) -> Eqn:
    """An equation that reshapes one value into another."""
    params = {"new_sizes": tuple(target.aval.shape), "dimensions": None, "sharding": None}
    return new_eqn([source], [target], jax.lax.reshape_p, params, like=like)


def make_closed(
    constvars: Sequence[Var],
    invars: Sequence[Var],
    outvars: Sequence[Any],
    eqns: Sequence[Eqn],
    consts: Sequence[Any],
    *,
    like: Closed | None = None,
) -> Closed:
    """Assemble a closed jaxpr; its effects are computed from the equations."""
    effects = _pe.make_jaxpr_effects(list(constvars), list(invars), list(outvars), list(eqns))
    info = like.jaxpr.debug_info.with_unknown_names() if like is not None else None
    jaxpr = Jaxpr(list(constvars), list(invars), list(outvars), list(eqns), effects, info)  # type: ignore[arg-type]
    return Closed(jaxpr, list(consts))


def with_eqns(closed: Closed, eqns: Sequence[Eqn]) -> Closed:
    """The same signature and constants with other equations (which must define every output)."""
    jaxpr = closed.jaxpr
    return make_closed(jaxpr.constvars, jaxpr.invars, jaxpr.outvars, eqns, closed.consts, like=closed)


def close(jaxpr: Any) -> Closed:
    """A closed jaxpr from an open one without constants; closed jaxprs pass through."""
    if isinstance(jaxpr, Closed):
        return jaxpr
    return _pe.close_jaxpr(jaxpr)


def eval_closed(closed: Closed, *args: Any) -> list[Any]:
    """Evaluate (or, inside a trace, inline) a closed jaxpr at ``args``."""
    return _core.eval_jaxpr(closed.jaxpr, closed.consts, *args)


def bind_eqn(eqn: Eqn, args: Sequence[Any], **params: Any) -> list[Any]:
    """Run (or, inside a trace, emit) one equation at ``args``, with some parameters replaced; keeps its user line."""
    options = eqn.primitive.get_bind_params({**eqn.params, **params})
    with _source.user_context(eqn.source_info.traceback, name_stack=eqn.source_info.name_stack):
        outs = eqn.primitive.bind(*args, **options)
    return list(outs) if eqn.primitive.multiple_results else [outs]


def eval_in_scopes(closed: Closed, prefix: str, *args: Any) -> list[Any]:
    """`eval_closed` inside a trace, with a name scope (`jax.named_scope`) per equation: ``prefix`` and its number."""
    jaxpr = closed.jaxpr
    env: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*closed.consts, *args), strict=True))

    def value(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else env[atom]

    for number, eqn in enumerate(jaxpr.eqns):
        with jax.named_scope(f"{prefix}{number}"):
            outs = eqn.primitive.bind(*map(value, eqn.invars), **eqn.primitive.get_bind_params(eqn.params))
        env.update(zip(eqn.outvars, outs if eqn.primitive.multiple_results else [outs], strict=True))
    return [value(atom) for atom in jaxpr.outvars]


def dce(closed: Closed, used_outputs: Sequence[bool] | None = None) -> Closed:
    """Drop equations that no (used) output and no effect needs.  Arguments are kept."""
    jaxpr = closed.jaxpr
    used = [True] * len(jaxpr.outvars) if used_outputs is None else list(used_outputs)
    new, _ = _pe.dce_jaxpr(jaxpr, used, instantiate=True)
    return Closed(new, closed.consts)


def check(closed: Closed) -> None:
    """Verify types and scoping (JAX's own checker).  Raises: JaxprTypeError."""
    _core.check_jaxpr(closed.jaxpr)


def inner_jaxprs(eqn: Eqn) -> list[tuple[str, int, Closed]]:
    """Jaxprs in the parameters of an equation (bodies of scan, while, cond, jit, ...).

    Returns: ``(parameter name, index within a tuple parameter or 0, closed jaxpr)`` in a fixed order.
    """
    found = []
    for name in sorted(eqn.params):
        value = eqn.params[name]
        items = value if isinstance(value, (tuple, list)) else (value,)
        found.extend((name, i, close(item)) for i, item in enumerate(items) if isinstance(item, (Closed, Jaxpr)))
    return found


def with_inner_jaxprs(eqn: Eqn, new: Sequence[Closed]) -> Eqn:
    """Replace the jaxprs of ``inner_jaxprs(eqn)``, in the same order, by ``new`` (same signatures)."""
    params = dict(eqn.params)
    replacement = iter(new)
    for name in sorted(params):
        value = params[name]
        if isinstance(value, (tuple, list)):
            if any(isinstance(item, (Closed, Jaxpr)) for item in value):
                items = [
                    _like_kind(item, next(replacement)) if isinstance(item, (Closed, Jaxpr)) else item for item in value
                ]
                params[name] = type(value)(items)
        elif isinstance(value, (Closed, Jaxpr)):
            params[name] = _like_kind(value, next(replacement))
    return eqn.replace(params=params)


def _like_kind(old: Any, new: Closed) -> Any:
    if isinstance(old, Closed):
        return new
    if new.consts:
        raise ValueError("an open jaxpr parameter cannot carry constants")
    return new.jaxpr


def scan_constants(eqn: Eqn) -> int:
    """Number of loop-invariant operands of a ``scan`` (its first ones)."""
    if "ft_in" in eqn.params:  # jax 0.11
        return len(eqn.params["ft_in"].unpack()[0])
    return eqn.params["num_consts"]


def scan_carries(eqn: Eqn) -> int:
    """Number of carried values of a ``scan``: the operands behind the loop-invariant ones, and its first results."""
    if "ft_in" in eqn.params:  # jax 0.11
        return len(eqn.params["ft_in"].unpack()[1])
    return eqn.params["num_carry"]


def with_scan_body(eqn: Eqn, operands: Sequence[Any], constants: int, body: Closed) -> Eqn:
    """A ``scan`` with another body and other operands, of which the first ``constants`` are loop-invariant.

    Carried values, what is scanned and results stay as they are.
    """
    params = dict(with_inner_jaxprs(eqn, [body]).params)
    if "ft_in" in params:
        trees: Any = importlib.import_module("jax._src.flattree")
        _, carried, scanned = params["ft_in"].unpack()
        params["ft_in"] = trees.pack((trees.nones(constants), carried, scanned))
    else:
        params["num_consts"] = constants
    return eqn.replace(invars=list(operands), params=params)


def primitive_name(eqn: Eqn) -> str:
    """Name of an equation's primitive."""
    return eqn.primitive.name


def call_target(eqn: Eqn) -> str:
    """FFI target of an equation's custom call, '' where it is none."""
    return str(eqn.params.get("target_name", "")) if primitive_name(eqn) == "ffi_call" else ""


def call_attributes(eqn: Eqn) -> dict[str, Any]:
    """Attributes of a custom call, arrays as NumPy has them."""
    return {name: getattr(value, "val", value) for name, value in dict(eqn.params["attributes"]).items()}


def nbytes(value: Any) -> int:
    """Bytes of a variable's or literal's value; 0 for what is not an array."""
    shape, dtype = getattr(value.aval, "shape", ()), getattr(value.aval, "dtype", None)
    return math.prod(shape) * getattr(dtype, "itemsize", 0)


def has_effects(closed: Closed) -> bool:
    """Whether the function has side effects (prints, callbacks, mutable references)."""
    return bool(closed.jaxpr.effects)


def effects_of(closed: Closed) -> list[str]:
    """The effects by name, sorted."""
    return sorted({type(e).__name__ if type(e).__str__ is object.__str__ else str(e) for e in closed.jaxpr.effects})


def has_references(closed: Closed) -> bool:
    """Whether the function reads or writes mutable references (``jax.new_ref``)."""
    jaxpr = closed.jaxpr
    if any(isinstance(e, (_state_types.RefEffect, _core.InternalMutableArrayEffect)) for e in jaxpr.effects):
        return True
    return any(isinstance(v.aval, _state_types.AbstractRef) for v in (*jaxpr.invars, *jaxpr.constvars))


def is_unspecified(sharding: Any) -> bool:
    """Whether a ``jit`` parameter says nothing about a sharding."""
    return sharding is None or isinstance(sharding, UNSPECIFIED)
