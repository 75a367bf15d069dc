"""Canonicalisation of a flat jaxpr: DCE, CSE, constant folding, ``split`` to slices, no-ops, cheap broadcasts, operands
of products.

Broadcasts, iotas and converted literals are rematerialised at each user; a cast to a wider type and back is removed,
and so are x + 0, x - 0, x * 1 and x / 1, as XLA does.  Values stay what they were, but for the last bits of folded
constants, which NumPy computes in place of XLA, and -0 + 0, which is -0.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jcuts.base.identity_memo import IdentityMemo
from jcuts.rewrite.exchange_products import exchange_products
from jcuts.trace import jaxapi
from jcuts.trace.canonical import is_immutable

CHEAP = ("broadcast_in_dim", "iota")
CONVERT = "convert_element_type"
WIDER = {"float32": ("float64",), "bfloat16": ("float32", "float64"), "float16": ("float32", "float64")}
"""Floats that hold all numbers of another type."""
REDUCTIONS = ("reduce_sum", "reduce_prod", "reduce_max", "reduce_min", "reduce_and", "reduce_or")
CONTROL_FLOW = ("scan", "while", "cond")
FOLD_LIMIT = 64 << 20  # bytes of one folded constant
IDENTITY_ELEMENTS = {"add": 0.0, "sub": 0.0, "mul": 1.0, "div": 1.0}
"""Of operations on floats; of subtraction and division as the second operand."""
SMALL = 1 << 16  # elements up to which a constant may grow by folding


def simplify(closed: jaxapi.Closed) -> jaxapi.Closed:
    """Applies the clean-ups of this file; bodies of control flow get DCE, CSE and copies of broadcasts.

    Closed-over weights are constants, so what depends on them alone is computed once (a folded batch norm, a transposed
    matrix); arguments never are.  A broadcast that several subsets use is copied to each of them, where it becomes an
    index map, instead of being written to memory by one of them.
    """
    closed = _fold(_merge_equal(jaxapi.dce(_without_no_ops(_peephole(closed)))))
    closed = exchange_products(closed)
    eqns = []
    for eqn in closed.jaxpr.eqns:
        if jaxapi.primitive_name(eqn) in CONTROL_FLOW:
            eqn = jaxapi.with_inner_jaxprs(
                eqn, [_copied(_merge_equal(jaxapi.dce(body))) for _, _, body in jaxapi.inner_jaxprs(eqn)]
            )
        eqns.append(eqn)
    return _copied(jaxapi.dce(jaxapi.with_eqns(closed, eqns)))


def _peephole(closed: jaxapi.Closed) -> jaxapi.Closed:
    """Peephole rewrites of single equations, as XLA does: `PARTS` (``split`` and ``unstack`` to one slice per part,
    ``one_minus_square``, of the gradient of tanh from jax 0.11 on, to the product that it is lowered to), reductions of
    single values to reshapes.

    A part then fuses into the kernel that uses it; one equation with results of several shapes would keep all parts in
    one kernel, or out of every kernel.
    """
    eqns: list[Any] = []
    for eqn in closed.jaxpr.eqns:
        if jaxapi.primitive_name(eqn) in CONTROL_FLOW:
            bodies = [body for _, _, body in jaxapi.inner_jaxprs(eqn)]
            new = [_peephole(body) for body in bodies]
            if any(a is not b for a, b in zip(bodies, new, strict=True)):
                eqn = jaxapi.with_inner_jaxprs(eqn, new)
        name = jaxapi.primitive_name(eqn)
        eqns.extend(PARTS[name](eqn) if name in PARTS else (_unreduced(eqn),))
    old = closed.jaxpr.eqns
    if len(old) == len(eqns) and all(a is b for a, b in zip(old, eqns, strict=True)):
        return closed
    return jaxapi.with_eqns(closed, eqns)


def _slices(eqn: Any) -> list[Any]:
    axis, start = eqn.params["axis"], 0
    shape = eqn.invars[0].aval.shape
    slices = []
    for size, part in zip(eqn.params["sizes"], eqn.outvars, strict=True):
        starts, limits = [0] * len(shape), list(shape)
        starts[axis], limits[axis] = start, start + size
        start += size
        if not jaxapi.is_dropvar(part):
            params = {"start_indices": tuple(starts), "limit_indices": tuple(limits), "strides": None}
            slices.append(jaxapi.new_eqn(eqn.invars, [part], jax.lax.slice_p, params, like=eqn))
    return slices


def _cropped(eqn: Any) -> list[Any]:
    """Padding by nothing or less as the slice that it is: automatic differentiation writes that of padding so."""
    source, (result,), config = eqn.invars[0], eqn.outvars, eqn.params["padding_config"]
    if jaxapi.is_literal(source) or any(low > 0 or high > 0 or inner for low, high, inner in config):
        return [eqn]
    starts = tuple(-int(low) for low, _, _ in config)
    limits = tuple(start + extent for start, extent in zip(starts, result.aval.shape, strict=True))
    params = {"start_indices": starts, "limit_indices": limits, "strides": None}
    return [jaxapi.new_eqn([source], [result], jax.lax.slice_p, params, like=eqn)]


def _expanded(function: Callable[..., Any], eqn: Any) -> list[Any]:
    """The equations of a function, in place of an equation that computes the same."""
    shapes = [jax.ShapeDtypeStruct(a.aval.shape, a.aval.dtype) for a in eqn.invars]
    inside = jaxapi.closed_jaxpr_of(functools.partial(function, **eqn.params), *shapes).jaxpr
    names = dict(zip((*inside.invars, *inside.outvars), (*eqn.invars, *eqn.outvars), strict=True))
    made = []
    for part in inside.eqns:
        atoms = [a if jaxapi.is_literal(a) else names[a] for a in part.invars]
        results = [names.setdefault(v, v) for v in part.outvars]
        made.append(jaxapi.new_eqn(atoms, results, part.primitive, part.params, like=eqn))
    return made


def _stack(*arrays: Any, axis: int) -> Any:
    """`jnp.stack`, a primitive from jax 0.10 on."""
    return jax.lax.concatenate([jax.lax.expand_dims(x, (axis,)) for x in arrays], axis)


def _unstack(array: Any, axis: int) -> list[Any]:
    """Its transpose."""
    rows = (jax.lax.slice_in_dim(array, k, k + 1, axis=axis) for k in range(array.shape[axis]))
    return [jax.lax.squeeze(row, (axis,)) for row in rows]


PARTS: dict[str, Callable[[Any], list[Any]]] = {
    "pad": _cropped,
    "split": _slices,
    "stack": functools.partial(_expanded, _stack),
    "unstack": functools.partial(_expanded, _unstack),
    "one_minus_square": functools.partial(_expanded, lambda x: (1 + x) * (1 - x)),
}
"""Primitives that become several equations."""


def _unreduced(eqn: Any) -> Any:
    """A reduction over dimensions of size one as a reshape: a sum with its initial value turns -0 into 0."""
    if jaxapi.primitive_name(eqn) not in REDUCTIONS:
        return eqn
    (source,), (result,) = eqn.invars, eqn.outvars
    if any(source.aval.shape[d] != 1 for d in eqn.params["axes"]):
        return eqn
    return jaxapi.reshape_eqn(source, result, eqn)


def _without_no_ops(closed: jaxapi.Closed) -> jaxapi.Closed:
    """Removes operations with `IDENTITY_ELEMENTS`, and conversions to a wider float and back (of a mixed-precision
    policy).
    """
    made: dict[Any, Any] = {}
    same: dict[Any, Any] = {}
    for eqn in closed.jaxpr.eqns:
        value = _unchanged_operand(eqn)
        if value is not None and eqn.outvars[0] not in closed.jaxpr.outvars:
            same[eqn.outvars[0]] = same.get(value, value)
        if jaxapi.primitive_name(eqn) != CONVERT or jaxapi.is_literal(eqn.invars[0]):
            continue
        (source,), (result,) = eqn.invars, eqn.outvars
        source = same.get(source, source)
        first = made.get(source)
        if first is not None and first.aval == result.aval and result not in closed.jaxpr.outvars:
            same[result] = first
        elif str(result.aval.dtype) in WIDER.get(str(source.aval.dtype), ()):
            made[result] = source
    if not same:
        return closed
    eqns = []
    for eqn in closed.jaxpr.eqns:
        if any(not jaxapi.is_literal(a) and a in same for a in eqn.invars):
            eqn = jaxapi.substituted(eqn, same)
        eqns.append(eqn)
    return jaxapi.with_eqns(closed, eqns)


def _unchanged_operand(eqn: Any) -> Any:
    """The value that a slice of all, or an operation with an identity element gives; None for other operations."""
    name = jaxapi.primitive_name(eqn)
    if name == "slice" and not jaxapi.is_literal(eqn.invars[0]) and eqn.invars[0].aval == eqn.outvars[0].aval:
        return eqn.invars[0]
    element = IDENTITY_ELEMENTS.get(name)
    if element is None or not jax.numpy.issubdtype(eqn.outvars[0].aval.dtype, jax.numpy.floating):
        return None
    orders = [eqn.invars, eqn.invars[::-1]] if name in ("add", "mul") else [eqn.invars]
    for value, number in orders:
        is_number = jaxapi.is_literal(number) and np.ndim(number.val) == 0 and float(number.val) == element
        if is_number and not jaxapi.is_literal(value) and value.aval == eqn.outvars[0].aval:
            return value
    return None


def _pure(eqn: Any) -> bool:
    if eqn.effects or jaxapi.inner_jaxprs(eqn) or jaxapi.primitive_name(eqn) == "ffi_call":
        return False
    return not any(isinstance(p, (np.ndarray, jax.Array)) for p in eqn.params.values())


MOST_PARAMS = 1 << 15
"""Equations whose parameters' text is kept: programs of all variants share their equations."""
_params_texts: IdentityMemo[str] = IdentityMemo(MOST_PARAMS)


def _params_text(params: dict[str, Any]) -> str:
    if (known := _params_texts.get(params)) is not None:
        return known
    text = str(sorted(params.items(), key=str))
    return _params_texts.keep(text, params) if all(map(is_immutable, params.values())) else text


def _merge_equal(closed: jaxapi.Closed) -> jaxapi.Closed:
    """CSE: equal equations on equal operands are computed once (one activation that three layers apply)."""
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
            key = (jaxapi.primitive_name(eqn), tuple(name(a) for a in invars), _params_text(eqn.params))
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
    """Constant folding: evaluates equations whose operands are all constants."""
    known: dict[Any, Any] = {
        v: c for v, c in zip(closed.jaxpr.constvars, closed.consts, strict=True) if not jaxapi.is_tracer(c)
    }
    known = {v: c for v, c in known.items() if hasattr(c, "shape") and hasattr(c, "dtype")}
    if not known:
        return closed
    constant = set(known)
    folding: list[Any] = []
    rest: list[Any] = []
    for eqn in closed.jaxpr.eqns:
        if _foldable(eqn, constant):
            folding.append(eqn)
            constant.add(eqn.outvars[0])
        else:
            rest.append(eqn)
    if not folding:
        return closed
    jaxpr = closed.jaxpr
    used = {a for e in rest for a in e.invars if not jaxapi.is_literal(a)}
    used |= {v for v in jaxpr.outvars if not jaxapi.is_literal(v)}
    made = [e.outvars[0] for e in folding if e.outvars[0] in used]
    values = _evaluate(folding, made, known)
    pairs = [(v, c) for v, c in zip(jaxpr.constvars, closed.consts, strict=True) if v in used]
    pairs += list(zip(made, values, strict=True))
    return jaxapi.make_closed(
        [v for v, _ in pairs], jaxpr.invars, jaxpr.outvars, rest, [c for _, c in pairs], like=closed
    )


def _evaluate(eqns: list[Any], wanted: list[Any], known: dict[Any, Any]) -> list[Any]:
    """The wanted values, by NumPy: nothing is compiled for a handful of small arrays."""
    values: dict[Any, np.ndarray] = {}

    def read(atom: Any) -> np.ndarray:
        if jaxapi.is_literal(atom):
            return np.asarray(atom.val, atom.aval.dtype)
        if atom not in values:
            values[atom] = np.asarray(known[atom])
        return values[atom]

    with np.errstate(all="ignore"):
        for eqn in eqns:
            aval = eqn.outvars[0].aval
            result = FOLD[jaxapi.primitive_name(eqn)]([read(a) for a in eqn.invars], eqn.params)
            values[eqn.outvars[0]] = np.broadcast_to(np.asarray(result, aval.dtype), aval.shape)
    return [jaxapi.constant(values[v]) for v in wanted]


def _broadcast(operands: list[np.ndarray], params: dict[str, Any]) -> np.ndarray:
    source, shape = operands[0], params["shape"]
    placed = [1] * len(shape)
    for own, target in enumerate(params["broadcast_dimensions"]):
        placed[target] = source.shape[own]
    return np.broadcast_to(source.reshape(placed), shape)


FOLD: dict[str, Any] = {
    "add": lambda x, p: x[0] + x[1],
    "sub": lambda x, p: x[0] - x[1],
    "mul": lambda x, p: x[0] * x[1],
    "div": lambda x, p: x[0] / x[1],
    "neg": lambda x, p: -x[0],
    "sqrt": lambda x, p: np.sqrt(x[0]),
    "rsqrt": lambda x, p: 1 / np.sqrt(x[0]),
    "square": lambda x, p: x[0] * x[0],
    "reshape": lambda x, p: x[0].reshape(p["new_sizes"]),
    "squeeze": lambda x, p: np.squeeze(x[0], tuple(p["dimensions"])),
    "expand_dims": lambda x, p: np.expand_dims(x[0], tuple(p["dimensions"])),
    "transpose": lambda x, p: np.ascontiguousarray(x[0].transpose(p["permutation"])),
    "broadcast_in_dim": _broadcast,
    CONVERT: lambda x, p: x[0],
}
"""What is folded, and how: arithmetic of float32 and float64, conversions among floats, and changes of layout."""

CONVERTED = frozenset({"float32", "bfloat16", "float16"})
ARITHMETIC = frozenset({"add", "sub", "mul", "div", "neg", "sqrt", "rsqrt", "square"})


def _foldable(eqn: Any, known: set[Any]) -> bool:
    name = jaxapi.primitive_name(eqn)
    if name not in FOLD or not _pure(eqn) or jaxapi.is_dropvar(eqn.outvars[0]):
        return False
    if name in ARITHMETIC and str(eqn.outvars[0].aval.dtype) not in ("float32", "float64"):
        return False
    operands = [a for a in eqn.invars if not jaxapi.is_literal(a)]
    if name == CONVERT and not _is_small(eqn):
        return False
    if not operands or any(a not in known for a in operands):
        return False
    out = eqn.outvars[0].aval
    if not hasattr(out, "dtype") or not isinstance(out.dtype, np.dtype) or out.size * out.dtype.itemsize > FOLD_LIMIT:
        return False
    return out.size <= SMALL or out.size <= 2 * max(int(np.prod(a.aval.shape)) for a in operands)


def _is_small(conversion: Any) -> bool:
    """Whether a conversion is one of floats to no more bytes, or of few: weights that are kept short stay so."""
    types = [v.aval.dtype for v in (conversion.invars[0], conversion.outvars[0])]
    if any(str(dtype) not in CONVERTED for dtype in types):
        return False
    return conversion.outvars[0].aval.size <= SMALL or types[1].itemsize <= types[0].itemsize


def _copied(closed: jaxapi.Closed) -> jaxapi.Closed:
    cheap: dict[Any, Any] = {}
    for eqn in closed.jaxpr.eqns:
        if (jaxapi.primitive_name(eqn) in CHEAP and _grows(eqn)) or _is_number(eqn):
            cheap[eqn.outvars[0]] = eqn
    uses: Counter[Any] = Counter()
    for eqn in closed.jaxpr.eqns:
        uses.update({a for a in eqn.invars if not jaxapi.is_literal(a)})
    shared = {v: e for v, e in cheap.items() if uses[v] > 1 or _is_number(e)}
    if not shared:
        return closed
    eqns: list[Any] = []
    for eqn in closed.jaxpr.eqns:
        new: dict[Any, Any] = {}
        for atom in eqn.invars:
            if not jaxapi.is_literal(atom) and atom in shared and atom not in new:
                if _is_number(shared[atom]):
                    new[atom] = _number(shared[atom])
                    continue
                new[atom] = jaxapi.new_var(atom.aval)
                eqns.append(shared[atom].replace(outvars=[new[atom]]))
        if new:
            eqn = jaxapi.substituted(eqn, new)
        eqns.append(eqn)
    return jaxapi.dce(jaxapi.with_eqns(closed, eqns))


def _is_number(eqn: Any) -> bool:
    """Whether an equation converts a literal, so that every region that uses it sees a literal."""
    return jaxapi.primitive_name(eqn) == CONVERT and jaxapi.is_literal(eqn.invars[0])


def _number(eqn: Any) -> Any:
    """The converted number as a literal."""
    aval = eqn.outvars[0].aval
    return jaxapi.new_literal(np.asarray(eqn.invars[0].val).astype(aval.dtype), aval)


def _grows(eqn: Any) -> bool:
    size = eqn.outvars[0].aval.size
    return not eqn.invars or all(getattr(a.aval, "size", 1) * 4 <= size or size <= 64 for a in eqn.invars)
