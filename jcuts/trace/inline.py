"""Inlining: flattens the calls inside a jaxpr, only for programs that will not be differentiated any more.

Inlining a ``custom_jvp_call`` drops its rule, so this runs at lowering (JAX has differentiated by then) and nowhere
else.  Variables are renamed, the user's source lines and named scopes are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jcuts.trace import jaxapi

# Call-like primitives and the parameter that holds their function.
CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "call": "call_jaxpr",
    "eval_jaxpr": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
    "jcuts_call": "jaxpr",
    "checkpoint": "jaxpr",
    "remat2": "jaxpr",
}
# Control flow: the equation stays, the calls inside its bodies are flattened.
_REMAT = ("checkpoint", "remat2")
BODIES = ("scan", "while", "cond", "shard_map", *_REMAT)


def inline(closed: jaxapi.Closed) -> jaxapi.Closed:
    """The same function with its calls inlined, here and inside the bodies of control flow.

    A rematerialised body (``checkpoint`` after differentiation) stays one equation: its barrier is what makes XLA
    compute it again, and without it peak memory grows.  A ``jit`` with shardings or layouts of its own stays, too.
    """
    if jaxapi.has_references(closed):
        return closed
    work = _Inliner(closed)
    jaxpr = closed.jaxpr
    env: dict[Any, Any] = {v: v for v in (*jaxpr.constvars, *jaxpr.invars)}
    work.run(jaxpr.eqns, env, outer=None, library=False)
    outvars = [work.read(env, v) for v in jaxpr.outvars]
    return jaxapi.make_closed(work.constvars, jaxpr.invars, outvars, work.eqns, work.consts, like=closed)


def callee(eqn: jaxapi.Eqn) -> jaxapi.Closed | None:
    """The function of a call that may be inlined, or None if the equation must stay."""
    parameter = CALLS.get(jaxapi.primitive_name(eqn))
    if parameter is None or parameter not in eqn.params:
        return None
    params = eqn.params
    if jaxapi.primitive_name(eqn) in _REMAT and params.get("differentiated", True):
        return None
    for key in ("in_shardings", "out_shardings"):
        if not all(jaxapi.is_unspecified(s) for s in params.get(key, ())):
            return None
    for key in ("in_layouts", "out_layouts"):
        if any(layout is not None for layout in params.get(key, ())):
            return None
    if params.get("compiler_options_kvs"):
        return None
    return jaxapi.close(params[parameter])


class _Inliner:
    """Collects flat equations; constants of inlined functions join those of the whole."""

    def __init__(self, closed: jaxapi.Closed) -> None:
        self.eqns: list[jaxapi.Eqn] = []
        self.constvars: list[Any] = list(closed.jaxpr.constvars)
        self.consts: list[Any] = list(closed.consts)
        self._const_of = {id(c): v for c, v in zip(self.consts, self.constvars, strict=False)}

    @staticmethod
    def read(env: dict[Any, Any], atom: Any) -> Any:
        return atom if jaxapi.is_literal(atom) else env[atom]

    def constant(self, value: Any, var: Any) -> Any:
        # The same array closed over in two inner functions is one constant (weights are large).
        found = self._const_of.get(id(value))
        if found is not None and found.aval == var.aval:
            return found
        new = jaxapi.new_var(var.aval)
        self.constvars.append(new)
        self.consts.append(value)
        self._const_of[id(value)] = new
        return new

    def run(self, eqns: Sequence[jaxapi.Eqn], env: dict[Any, Any], outer: jaxapi.Eqn | None, library: bool) -> None:
        for eqn in eqns:
            args = [self.read(env, a) for a in eqn.invars]
            seen = eqn if outer is None else eqn.replace(source_info=jaxapi.seen_from(eqn, outer, library))
            body = callee(eqn)
            if body is None:
                self.emit(seen, args, env, fresh=outer is not None)
                continue
            inner: dict[Any, Any] = dict(zip(body.jaxpr.invars, args, strict=False))
            inner.update((v, self.constant(c, v)) for v, c in zip(body.jaxpr.constvars, body.consts, strict=False))
            self.run(body.jaxpr.eqns, inner, seen, library=jaxapi.is_library_function(body))
            env.update((v, self.read(inner, o)) for v, o in zip(eqn.outvars, body.jaxpr.outvars, strict=False))

    def emit(self, eqn: jaxapi.Eqn, args: list[Any], env: dict[Any, Any], fresh: bool) -> None:
        if jaxapi.primitive_name(eqn) in BODIES:
            eqn = _with_flat_bodies(eqn)
        outs = [v if jaxapi.is_dropvar(v) or not fresh else jaxapi.new_var(v.aval) for v in eqn.outvars]
        env.update(zip(eqn.outvars, outs, strict=False))
        self.eqns.append(eqn.replace(invars=args, outvars=outs))


def _with_flat_bodies(eqn: jaxapi.Eqn) -> jaxapi.Eqn:
    old = [body for _, _, body in jaxapi.inner_jaxprs(eqn)]
    # These primitives pass no constants to their bodies: a body whose inlined calls had some stays as it is.
    closed_bodies = jaxapi.primitive_name(eqn) in ("scan", "while", "cond")
    new = []
    for body in old:
        flat = inline(body)
        new.append(flat if closed_bodies or len(flat.consts) == len(body.consts) else body)
    return jaxapi.with_inner_jaxprs(eqn, new)
