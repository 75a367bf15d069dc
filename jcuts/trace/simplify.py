"""Small rewrites of a flat jaxpr before subsets are formed. None changes a value."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import numpy as np

from jcuts.trace import jaxapi

CHEAP = ("broadcast_in_dim", "iota")
CONTROL_FLOW = ("scan", "while", "cond")
FOLD_LIMIT = 64 << 20  # bytes of one folded constant
SMALL = 1 << 16  # elements up to which a constant may grow by folding


def simplify(closed: jaxapi.Closed) -> jaxapi.Closed:
    """Dead code, equal equations, constants, shared broadcasts; bodies of control flow as well.

    Closed-over weights are constants, so what depends on them alone is computed once (a folded batch norm, a transposed
    matrix); arguments never are.  A broadcast that several subsets use is copied to each of them, where it becomes an
    index map, instead of being written to memory by one of them.
    """
    closed = _fold(_merge_equal(jaxapi.dce(closed)))
    eqns = []
    for eqn in closed.jaxpr.eqns:
        if jaxapi.primitive_name(eqn) in CONTROL_FLOW:
            eqn = jaxapi.with_inner_jaxprs(
                eqn, [_copied(_merge_equal(body)) for _, _, body in jaxapi.inner_jaxprs(eqn)]
            )
        eqns.append(eqn)
    return _copied(jaxapi.dce(jaxapi.with_eqns(closed, eqns)))


def _pure(eqn: Any) -> bool:
    if eqn.effects or jaxapi.inner_jaxprs(eqn) or jaxapi.primitive_name(eqn) == "ffi_call":
        return False
    return not any(isinstance(p, (np.ndarray, jax.Array)) for p in eqn.params.values())


def _merge_equal(closed: jaxapi.Closed) -> jaxapi.Closed:
    """Equal equations on equal operands are computed once (one activation that three layers apply)."""
    seen: dict[Any, Any] = {}
    renamed: dict[Any, Any] = {}
    eqns: list[Any] = []

    def current(atom: Any) -> Any:
        return atom if jaxapi.is_literal(atom) else renamed.get(atom, atom)

    def name(atom: Any) -> Any:
        if not jaxapi.is_literal(atom):
            return atom
        value = np.asarray(atom.val)
        return (str(atom.aval), value.tobytes()) if value.size <= 16 else id(atom)

    for eqn in closed.jaxpr.eqns:
        invars = [current(a) for a in eqn.invars]
        if any(a is not b for a, b in zip(invars, eqn.invars, strict=True)):
            eqn = eqn.replace(invars=invars)
        if _pure(eqn) and len(eqn.outvars) == 1 and not jaxapi.is_dropvar(eqn.outvars[0]):
            key = (jaxapi.primitive_name(eqn), tuple(name(a) for a in invars), str(sorted(eqn.params.items(), key=str)))
            first = seen.setdefault(key, eqn.outvars[0])
            if first is not eqn.outvars[0] and first.aval == eqn.outvars[0].aval:
                renamed[eqn.outvars[0]] = first
                continue
        eqns.append(eqn)
    if not renamed:
        return closed
    outvars = [current(v) for v in closed.jaxpr.outvars]
    jaxpr = closed.jaxpr
    return jaxapi.make_closed(jaxpr.constvars, jaxpr.invars, outvars, eqns, closed.consts, like=closed)


def _fold(closed: jaxapi.Closed) -> jaxapi.Closed:
    """Evaluates equations whose operands are all constants, on the CPU backend by JAX itself."""
    known: dict[Any, Any] = {
        v: c for v, c in zip(closed.jaxpr.constvars, closed.consts, strict=True) if not jaxapi.is_tracer(c)
    }
    known = {v: c for v, c in known.items() if hasattr(c, "shape") and hasattr(c, "dtype")}
    if not known:
        return closed
    folded: dict[Any, Any] = {}
    eqns: list[Any] = []
    for eqn in closed.jaxpr.eqns:
        if _foldable(eqn, known):
            with jax.ensure_compile_time_eval():
                values = [a.val if jaxapi.is_literal(a) else known[a] for a in eqn.invars]
                result = eqn.primitive.bind(*values, **eqn.params)
            folded[eqn.outvars[0]] = known[eqn.outvars[0]] = result
        else:
            eqns.append(eqn)
    if not folded:
        return closed
    jaxpr = closed.jaxpr
    used = {a for e in eqns for a in e.invars if not jaxapi.is_literal(a)} | {
        v for v in jaxpr.outvars if not jaxapi.is_literal(v)
    }
    pairs = [(v, c) for v, c in zip(jaxpr.constvars, closed.consts, strict=True) if v in used]
    pairs += [(v, c) for v, c in folded.items() if v in used]
    return jaxapi.make_closed(
        [v for v, _ in pairs], jaxpr.invars, jaxpr.outvars, eqns, [c for _, c in pairs], like=closed
    )


def _foldable(eqn: Any, known: dict[Any, Any]) -> bool:
    if not _pure(eqn) or len(eqn.outvars) != 1 or jaxapi.is_dropvar(eqn.outvars[0]):
        return False
    operands = [a for a in eqn.invars if not jaxapi.is_literal(a)]
    if not operands or any(a not in known for a in operands):
        return False
    out = eqn.outvars[0].aval
    if not hasattr(out, "dtype") or not isinstance(out.dtype, np.dtype) or out.size * out.dtype.itemsize > FOLD_LIMIT:
        return False
    return out.size <= SMALL or out.size <= 2 * max(int(np.prod(a.aval.shape)) for a in operands)


def _copied(closed: jaxapi.Closed) -> jaxapi.Closed:
    cheap: dict[Any, Any] = {}
    for eqn in closed.jaxpr.eqns:
        if jaxapi.primitive_name(eqn) in CHEAP and _grows(eqn):
            cheap[eqn.outvars[0]] = eqn
    uses: Counter[Any] = Counter()
    for eqn in closed.jaxpr.eqns:
        uses.update({a for a in eqn.invars if not jaxapi.is_literal(a)})
    shared = {v: e for v, e in cheap.items() if uses[v] > 1}
    if not shared:
        return closed
    eqns: list[Any] = []
    for eqn in closed.jaxpr.eqns:
        new: dict[Any, Any] = {}
        for atom in eqn.invars:
            if not jaxapi.is_literal(atom) and atom in shared and atom not in new:
                new[atom] = jaxapi.new_var(atom.aval)
                eqns.append(shared[atom].replace(outvars=[new[atom]]))
        if new:
            eqn = eqn.replace(invars=[a if jaxapi.is_literal(a) else new.get(a, a) for a in eqn.invars])
        eqns.append(eqn)
    return jaxapi.dce(jaxapi.with_eqns(closed, eqns))


def _grows(eqn: Any) -> bool:
    size = eqn.outvars[0].aval.size
    return not eqn.invars or all(getattr(a.aval, "size", 1) * 4 <= size or size <= 64 for a in eqn.invars)
