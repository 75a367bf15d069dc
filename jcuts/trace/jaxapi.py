"""The only file of jcuts that touches the inside of JAX.

Everything here works on jax 0.10 and 0.11.  The two differ mainly in that ``ClosedJaxpr`` and ``Jaxpr`` are two
classes in 0.10 and one class in 0.11, and in what linearisation returns.  ``Closed`` below always means "a jaxpr
with its constants attached"; read it only through ``.jaxpr.eqns``, ``.jaxpr.invars``, ``.jaxpr.outvars``,
``.jaxpr.constvars`` and ``.consts``, which are spelled the same in both.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import math
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax._src import ad_util as _ad_util
from jax._src import api_util as _api_util
from jax._src import checkify as _checkify
from jax._src import config as _config
from jax._src import core as _core
from jax._src import dispatch as _dispatch
from jax._src import effects as _effects
from jax._src import linear_util as _lu
from jax._src import mesh as _mesh
from jax._src import sharding_impls as _sharding_impls
from jax._src import source_info_util as _source
from jax._src import stages as _stages
from jax._src import traceback_util as _traceback_util
from jax._src.interpreters import ad as _ad
from jax._src.interpreters import batching as _batching
from jax._src.interpreters import mlir as _mlir
from jax._src.interpreters import partial_eval as _pe
from jax._src.state import discharge as _discharge
from jax._src.state import types as _state_types
from jax._src.util import weakref_lru_cache as _weakref_lru_cache

from jcuts.trace.canonical import canonical_digest, canonical_text

Closed = _core.ClosedJaxpr
Jaxpr = _core.Jaxpr
Eqn = _core.JaxprEqn
Var = _core.Var
Literal = _core.Literal
DropVar = _core.DropVar
Tracer = _core.Tracer
ShapedArray = _core.ShapedArray
Primitive = _core.Primitive
Zero = _ad_util.Zero
JaxWrapped = _stages.Wrapped

__reexported__ = (canonical_text, canonical_digest)

ONE_JAXPR_CLASS: bool = Closed is Jaxpr

# Frames of jcuts are never "the user's line", and are cut out of the tracebacks that users see, as JAX's own are.
_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_source.register_exclusion(_HERE)
_traceback_util.register_exclusion(_HERE)

_UNSPECIFIED: Any = type(getattr(_sharding_impls, "UNSPECIFIED"))  # noqa: B009  (not exported by name)

api_boundary = _traceback_util.api_boundary
cached_by_jaxpr = _weakref_lru_cache  # of a function whose first argument is a jaxpr: kept as long as the jaxpr lives


# ---------------------------------------------------------------- tracing


def trace_state_clean() -> bool:
    """Whether no JAX trace (jit, grad, vmap, ...) surrounds the caller: its arguments are concrete."""
    return _core.trace_state_clean()


def jit_disabled() -> bool:
    """Whether ``jax.disable_jit`` is in force."""
    return bool(_config.disable_jit.value)


def x64_enabled() -> bool:
    """Whether 64-bit types are in force."""
    return bool(_config.enable_x64.value)


def aval_of(x: Any) -> Any:
    """Abstract value (shape, dtype, weak type, sharding) of an array, tracer, scalar or ShapeDtypeStruct."""
    return _core.shaped_abstractify(x)


def is_tracer(x: Any) -> bool:
    """Whether ``x`` is a value inside a trace."""
    return isinstance(x, _core.Tracer)


def new_closed_jaxpr(fn_flat: Callable[..., Sequence[Any]], in_avals: Sequence[Any], *, name: str = "jcuts") -> Closed:
    """Trace ``fn_flat``, a function of flat arrays that returns a flat sequence, at ``in_avals``.

    Values of outer traces over which the function closes end up in ``.consts`` (see ``hoist_tracer_consts``).

    Raises: whatever the function raises while it is traced.
    """
    info = _api_util.debug_info(name, fn_flat, tuple(in_avals), {})
    wrapped = _lu.wrap_init(lambda *xs: list(fn_flat(*xs)), debug_info=info.with_unknown_names())
    jaxpr, _, consts = _pe.trace_to_jaxpr_dynamic(wrapped, list(in_avals))
    return Closed(jaxpr, consts)


def without_mesh() -> Any:
    """A context in which traced equations remember no mesh: such a jaxpr may run inside any ``shard_map``."""
    return _mesh.use_abstract_mesh(_mesh.empty_abstract_mesh)


class Traced(NamedTuple):
    """A function as one closed jaxpr over flat arrays.

    Attributes:
        closed: the jaxpr.  in_tree: structure of ``(args, kwargs)``.  out_tree: structure of the result.
    """

    closed: Closed
    in_tree: Any
    out_tree: Any


def static_positions(fn: Callable[..., Any], argnums: Any, argnames: Any) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Positions and names that ``jax.jit`` derives from ``argnums``/``argnames`` (each from the other)."""
    try:
        signature = inspect.signature(fn)
    except (ValueError, TypeError):
        names = (argnames,) if isinstance(argnames, str) else tuple(argnames or ())
        nums = (argnums,) if isinstance(argnums, int) else tuple(argnums or ())
        return nums, names
    nums, names = _api_util.infer_argnums_and_argnames(signature, argnums, argnames)
    return tuple(nums), tuple(names)


def trace_function(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Traced:
    """Trace ``fn(*args, **kwargs)``; every leaf of the arguments is an array-like (or ShapeDtypeStruct)."""
    leaves, in_tree = jax.tree.flatten((args, kwargs))
    out_trees: list[Any] = []

    def flat(*xs: Any) -> Sequence[Any]:
        inner_args, inner_kwargs = jax.tree.unflatten(in_tree, xs)
        outs, out_tree = jax.tree.flatten(fn(*inner_args, **inner_kwargs))
        out_trees.append(out_tree)
        return outs

    flat.__name__ = getattr(fn, "__name__", "function")
    closed = new_closed_jaxpr(flat, [aval_of(leaf) for leaf in leaves], name=flat.__name__)
    return Traced(closed, in_tree, out_trees[-1])


def closed_jaxpr_of(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Closed:
    """The closed jaxpr of ``fn`` at the shapes of ``args`` (arrays, scalars or ShapeDtypeStructs)."""
    return trace_function(fn, args, kwargs).closed


def call_eqn(fn: Callable[..., Any], operands: Sequence[Any], results: Sequence[Any]) -> Eqn:
    """The equation that calls a function of its own: ``fn`` takes the operands' values and gives those of results."""
    shapes = [jax.ShapeDtypeStruct(a.aval.shape, a.aval.dtype) for a in operands]
    (eqn,) = closed_jaxpr_of(jax.jit(fn), *shapes).jaxpr.eqns
    return eqn.replace(invars=list(operands), outvars=list(results))


def hoist_tracer_consts(closed: Closed) -> tuple[list[Any], Closed]:
    """Turn constants that are tracers (closed-over values of an outer trace) into leading arguments.

    Returns: the tracers, and a closed jaxpr that takes them before its own arguments.  Concrete constants stay.
    """
    moved = [is_tracer(c) for c in closed.consts]
    if not any(moved):
        return [], closed
    jaxpr = closed.jaxpr
    kept_vars = [v for v, m in zip(jaxpr.constvars, moved, strict=False) if not m]
    moved_vars = [v for v, m in zip(jaxpr.constvars, moved, strict=False) if m]
    kept = [c for c, m in zip(closed.consts, moved, strict=False) if not m]
    tracers = [c for c, m in zip(closed.consts, moved, strict=False) if m]
    new = make_closed(kept_vars, [*moved_vars, *jaxpr.invars], jaxpr.outvars, jaxpr.eqns, kept, like=closed)
    return tracers, new


# ---------------------------------------------------------------- reading and rebuilding jaxprs


def is_literal(atom: Any) -> bool:
    """Whether an operand of an equation is a literal (``atom.val``) rather than a variable."""
    return isinstance(atom, _core.Literal)


def is_dropvar(var: Any) -> bool:
    """Whether an output of an equation is dropped (printed ``_``)."""
    return isinstance(var, _core.DropVar)


def new_var(aval: Any) -> Var:
    """A fresh variable of type ``aval``."""
    return Var(aval)


def constant(values: Any, dtype: Any = None) -> Any:
    """The values as an array of JAX's own; unlike by ``jnp.asarray``, no copy is compiled for their shape."""
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
    """How many operands of a ``scan``, its first, every step reads."""
    if "ft_in" in eqn.params:  # jax 0.11
        return len(eqn.params["ft_in"].unpack()[0])
    return eqn.params["num_consts"]


def with_scan_body(eqn: Eqn, operands: Sequence[Any], constants: int, body: Closed) -> Eqn:
    """A ``scan`` with another body and other operands, of which every step reads the first ``constants``.

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
    """Which handler an equation calls through the FFI, '' where it calls none."""
    return str(eqn.params.get("target_name", "")) if primitive_name(eqn) == "ffi_call" else ""


def nbytes(value: Any) -> int:
    """Bytes of a variable's or literal's value; 0 for what is no array."""
    shape, dtype = getattr(value.aval, "shape", ()), getattr(value.aval, "dtype", None)
    return math.prod(shape) * getattr(dtype, "itemsize", 0)


def has_effects(closed: Closed) -> bool:
    """Whether running the function twice could be observed (prints, callbacks, mutable references)."""
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
    return sharding is None or isinstance(sharding, _UNSPECIFIED)


# ---------------------------------------------------------------- where in the user's source


class SourceLine(NamedTuple):
    """A line of the user's program."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} ({self.function})"


def user_line(eqn: Eqn) -> SourceLine | None:
    """The innermost frame outside JAX and jcuts that made the equation, or None."""
    frame = _source.user_frame(eqn.source_info.traceback)
    return None if frame is None else SourceLine(frame.file_name, frame.start_line, frame.function_name)


def user_frame(eqn: Eqn) -> str:
    """The user's line that made the equation as ``file:line (function)``, or ``unknown``."""
    line = user_line(eqn)
    return "unknown" if line is None else str(line)


def name_stack(eqn: Eqn) -> str:
    """``jax.named_scope`` path of an equation."""
    return str(eqn.source_info.name_stack)


def is_library_function(closed: Closed) -> bool:
    """Whether a jaxpr is the body of a function of JAX itself (``jnp.where``, ``nn.relu``, ...)."""
    return _JAX_FOLDER in (closed.jaxpr.debug_info.func_src_info or "")


_JAX_FOLDER = os.path.dirname(os.path.abspath(jax.__file__)) + os.sep


def seen_from(eqn: Eqn, outer: Eqn, library: bool) -> Any:
    """Source info of ``eqn`` seen from the caller ``outer`` of the jaxpr that holds it (its scopes come first).

    JAX traces a library function once, for its first caller; ``library`` says to name this caller's line instead.
    """
    inner = eqn.source_info
    if library or _source.user_frame(inner.traceback) is None:
        inner = inner.replace(traceback=outer.source_info.traceback)
    return inner.replace(name_stack=outer.source_info.name_stack + inner.name_stack)


# ---------------------------------------------------------------- rules of a call-like primitive


def jvp_of(closed: Closed, nonzero: Sequence[bool]) -> tuple[Closed, list[bool]]:
    """JVP jaxpr: arguments are primals then non-zero tangents.  Returns it and which output tangents exist."""
    new, out = _ad.jvp_jaxpr(closed, list(nonzero), False)
    return new, list(out)


class Linearized(NamedTuple):
    """``forward``: primals -> (primal outputs, residuals); ``tangent``: (residuals, tangents, structured) -> tangents.

    Attributes:
        primal_outs: number of primal outputs of ``forward``.  res_forward: for each residual, the index of the
        constant or argument that it equals, or None.  plain_residuals: outputs of ``forward`` after the primals
        that fill the None entries; what follows them are structured residuals with tree ``structured`` (0.11).
        nonzero_out: which tangents exist.
    """

    forward: Closed
    primal_outs: int
    nonzero_out: list[bool]
    res_forward: list[int | None]
    plain_residuals: int
    structured: Any
    tangent: Closed


def linearize_of(closed: Closed, nonzero: Sequence[bool], is_vjp: bool) -> Linearized:
    """Split a function at the arguments marked ``nonzero`` into its forward part and its linear tangent part."""
    second: Any
    forward, second, nzs_out, fwds, tangent = _ad.linearize_jaxpr(closed, list(nonzero), is_vjp=is_vjp)
    if isinstance(second, int):
        outs = len(forward.out_avals) - second
        return Linearized(forward, outs, list(nzs_out), list(fwds), second, None, tangent)
    primals, plain, structured = second.unpack()
    return Linearized(forward, len(primals), list(nzs_out), list(fwds), len(plain), structured, tangent)


class Kept(NamedTuple):
    """Which outputs of a call remain after forwarding, and how to restore the others.

    Attributes: ``from_input[i]`` is the argument that output i equals, or None; ``from_output[j]``, over what is
    left, is the earlier remaining output that it equals, or None.
    """

    from_input: list[int | None]
    from_output: list[int | None]

    def restore(self, outs: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        """All outputs, in the original order."""
        it, left = iter(outs), []
        for source in self.from_output:
            left.append(next(it) if source is None else left[source])
        rest = iter(left)
        return [next(rest) if source is None else args[source] for source in self.from_input]


def without_forwarded_outputs(closed: Closed) -> tuple[Closed, Kept]:
    """Remove outputs that are arguments, or repeat an earlier output: no copies of residuals are materialised."""
    jaxpr = closed.jaxpr
    position = {id(v): i for i, v in enumerate(jaxpr.invars)}
    from_input = [None if is_literal(v) else position.get(id(v)) for v in jaxpr.outvars]
    left = [v for v, f in zip(jaxpr.outvars, from_input, strict=False) if f is None]
    first: dict[int, int] = {}
    from_output: list[int | None] = []
    for i, v in enumerate(left):
        seen = None if is_literal(v) else first.get(id(v))
        from_output.append(seen)
        if seen is None:
            first[id(v)] = i
    keep_left = iter([f is None for f in from_output])
    keep = [next(keep_left) if f is None else False for f in from_input]
    if all(keep):
        return closed, Kept(from_input, from_output)
    return _pe.prune_closed_jaxpr_outputs(closed, keep), Kept(from_input, from_output)


def instantiate(tangent: Any) -> Any:
    """A symbolic zero as an array of zeros; other tangents unchanged."""
    return _ad.instantiate_zeros(tangent)


def linearization(result: tuple[Any, ...]) -> tuple[Any, ...]:
    """Bring ``(outs, nonzeros, residuals, structured, tangent_fn)`` to what this JAX expects of the rule."""
    if _LINEARIZE_HAS_STRUCTURED:
        return result
    outs, nonzeros, residuals, _, tangent = result
    return outs, nonzeros, residuals, lambda res, *ts: tangent(res, None, *ts)


_LINEARIZE_HAS_STRUCTURED = hasattr(_ad, "LinearizeTrace") and ONE_JAXPR_CLASS


def transpose_of(
    closed: Closed, cotangents: Sequence[Any], args: Sequence[Any], bind: Callable[..., Sequence[Any]]
) -> Any:
    """Apply the transpose of ``closed`` through ``bind(*flat_inputs, jaxpr=transposed)`` and accumulate the result."""
    primals, specs = _ad.project_accums(args)
    flat, in_tree = jax.tree.flatten((primals, list(cotangents)))
    avals = tuple(_core.typeof(x) for x in flat)
    transposed, out_tree = _transposed(closed, in_tree, avals, tuple(specs))
    outs, logs = jax.tree.unflatten(out_tree, bind(*flat, jaxpr=transposed))
    for arg, ct in zip(args, outs, strict=False):
        if isinstance(arg, _ad.ValAccum):
            arg.accum(ct)
    return logs


@_weakref_lru_cache
def _transposed(closed: Closed, in_tree: Any, avals: tuple[Any, ...], specs: tuple[Any, ...]) -> tuple[Closed, Any]:
    trees: list[Any] = []

    def transposed(*flat: Any) -> list[Any]:
        primals, cotangents = jax.tree.unflatten(in_tree, flat)
        args = _ad.unproject_accums(specs, primals)
        logs = _ad.backward_pass3(closed.jaxpr, False, closed.consts, args, cotangents)
        outs = [x.freeze() if isinstance(x, _ad.ValAccum) else None for x in args]
        leaves, tree = jax.tree.flatten((outs, logs))
        trees.append(tree)
        return leaves

    info = closed.jaxpr.debug_info.with_unknown_names()
    jaxpr, _, consts = _pe.trace_to_jaxpr_dynamic(_lu.wrap_init(transposed, debug_info=info), list(avals))
    return Closed(jaxpr, consts), trees[-1]


def batch_of(closed: Closed, axis_data: Any, dims: Sequence[Any]) -> tuple[Closed, tuple[Any, ...]]:
    """Batched jaxpr for arguments mapped along ``dims``; returns it and the mapped axis of each output."""
    return _batching.batch_jaxpr2(closed, axis_data, tuple(dims))


def checkify_rule(bind: Callable[..., Sequence[Any]]) -> Callable[..., Any]:
    """The ``checkify`` rule of a call-like primitive: one call, by ``bind(*args, jaxpr=checked, **params)``, of the
    original with its errors as values (which come first, among its arguments and its results)."""

    def rule(*args: Any, jaxpr: Closed, **params: Any) -> tuple[Any, list[Any]]:
        # 0.11 counts the codes of errors in a context, which it passes before the error.
        context = () if isinstance(args[0], _checkify.Error) else args[:1]
        error, enabled, *values = args[len(context) :]
        error_values, error_tree = jax.tree.flatten(error)
        values = [*error_values, *values]
        checked, out_tree, _ = _checkify.jaxpr_to_checkify_jaxpr(
            *context, jaxpr, enabled, error_tree, *(_core.typeof(x) for x in values)
        )
        error, outs = jax.tree.unflatten(out_tree, bind(*values, jaxpr=checked, **params))
        return error, list(outs)

    return rule


class PartialEval(NamedTuple):
    """``known``: known arguments -> (known outputs, residuals); ``unknown``: (unknown arguments, residuals) -> rest."""

    known: Closed
    unknown: Closed
    unknown_outs: list[bool]
    res_avals: list[Any]
    res_forward: list[int | None]


def partial_eval_of(closed: Closed, unknown_ins: Sequence[bool]) -> PartialEval:
    """Split a closed jaxpr by which arguments are known; residuals come last in ``unknown``'s arguments."""
    known, unknown, unknown_outs, res_avals, fwd = _pe.partial_eval_jaxpr_nounits_fwd(
        closed, tuple(unknown_ins), instantiate=False
    )
    count = len(fwd)
    unknown = _pe.move_binders_to_back(unknown, [True] * count + [False] * sum(unknown_ins))
    return PartialEval(known, unknown, list(unknown_outs), list(res_avals), list(fwd))


def partial_eval_rule(primitive: Primitive) -> Callable[..., Any]:
    """The rule for ``JaxprTrace`` (used where JAX still partially evaluates traces) of a call-like primitive."""

    def rule(trace: Any, *tracers: Any, jaxpr: Closed, **params: Any) -> list[Any]:
        unknown_ins = [not t.pval.is_known() for t in tracers]
        split = partial_eval_of(jaxpr, unknown_ins)
        known_in = [t.pval.get_known() for t in tracers if t.pval.is_known()]
        known_out = primitive.bind(*known_in, jaxpr=split.known, **params)
        count = len(known_out) - len(split.res_avals)
        outs, new_res = known_out[:count], iter(known_out[count:])
        pool = [*jaxpr.consts, *known_in]
        residuals = [next(new_res) if f is None else pool[f] for f in split.res_forward]
        ins = [*(t for t in tracers if not t.pval.is_known()), *map(trace.new_instantiated_const, residuals)]
        unknown_tracers = [
            _pe.JaxprTracer(trace, _pe.PartialVal.unknown(aval), None) for aval in split.unknown.out_avals
        ]
        effects = _core.positional_effects(split.unknown)
        eqn = _pe.new_eqn_recipe(
            trace, ins, unknown_tracers, primitive, dict(params, jaxpr=split.unknown), effects, _source.current()
        )
        for tracer in unknown_tracers:
            tracer.recipe = eqn
        if _effects.partial_eval_kept_effects.filter_in(split.unknown.effects):
            trace.effect_handles.append(_pe.EffectHandle(ins, eqn))
        known_iter, unknown_iter = iter(outs), iter(unknown_tracers)
        return [next(unknown_iter) if u else next(known_iter) for u in split.unknown_outs]

    return rule


def dce_rule(used_outputs: list[bool], eqn: Eqn) -> tuple[list[bool], Eqn | None]:
    """Dead-code rule of a call-like primitive whose jaxpr is the parameter ``jaxpr``."""
    if not any(used_outputs) and not _pe.has_effects(eqn):
        return [False] * len(eqn.invars), None
    closed, used_inputs = _dce_closed(eqn.params["jaxpr"], tuple(used_outputs))
    if not any(used_inputs) and not any(used_outputs) and not closed.effects:
        return used_inputs, None
    invars = [v for v, used in zip(eqn.invars, used_inputs, strict=False) if used]
    outvars = [v for v, used in zip(eqn.outvars, used_outputs, strict=False) if used]
    new = _core.new_jaxpr_eqn(
        invars,
        outvars,
        eqn.primitive,
        dict(eqn.params, jaxpr=closed),
        _core.eqn_effects(closed, invars),
        eqn.source_info,
        eqn.ctx,
    )
    return used_inputs, new


@_weakref_lru_cache
def _dce_closed(closed: Closed, used: tuple[bool, ...]) -> tuple[Closed, list[bool]]:
    jaxpr, used_inputs = _pe.dce_jaxpr(closed.jaxpr, list(used))
    return Closed(jaxpr, closed.consts), list(used_inputs)


def _discharge_rule(primitive: Primitive) -> Callable[..., Any]:
    def rule(context: Any, *args: Any, jaxpr: Closed, **params: Any) -> Any:
        # 0.10 passes the argument and result types as two positional arguments, 0.11 a context object.
        options: dict[str, Any] = {}
        if hasattr(context, "in_avals"):
            in_avals, options["strip_memory_space"] = context.in_avals, context.strip_memory_space
        else:
            in_avals, args = context, args[1:]
        discharged = _discharge.discharge_state(jaxpr, **options)
        outs = primitive.bind(*args, jaxpr=discharged, **params)
        values, refs = outs[: len(jaxpr.out_avals)], iter(outs[len(jaxpr.out_avals) :])
        return [next(refs) if isinstance(a, _state_types.AbstractRef) else None for a in in_avals], values

    return rule


def new_call_primitive(
    name: str,
    *,
    jvp: Callable[..., Any],
    linearize: Callable[..., Any],
    transpose: Callable[..., Any],
    batch: Callable[..., Any],
    derive: Callable[..., Sequence[Any]],
    lower: Callable[..., Any],
) -> Primitive:
    """Create a call-like primitive whose function is the parameter ``jaxpr`` (a closed jaxpr).

    The effects, dead code, partial evaluation, reference-discharge and ``checkify`` rules are the same for every such
    primitive and are installed here; the others are the caller's.  ``derive(*args, jaxpr=..., **params)`` binds the
    primitive for another jaxpr than the user's, at other arguments.
    """
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.skip_canonicalization = True
    primitive.is_effectful = lambda params: bool(params["jaxpr"].effects)  # type: ignore[attr-defined]
    primitive.def_impl(functools.partial(_dispatch.apply_primitive, primitive))
    primitive.def_effectful_abstract_eval(
        lambda *_, jaxpr, **__: (list(jaxpr.out_avals), _core.positional_effects(jaxpr))
    )
    _ad.primitive_jvps[primitive] = jvp
    _ad.primitive_linearizations[primitive] = linearize
    _ad.fancy_transposes[primitive] = transpose
    _batching.fancy_primitive_batchers[primitive] = batch
    _pe.custom_partial_eval_rules[primitive] = partial_eval_rule(primitive)
    custom_rule: Any = functools.partial(
        _pe.closed_call_partial_eval_custom_rule, "jaxpr", lambda *xs: (xs[-2], xs[-1])
    )
    _pe.partial_eval_jaxpr_custom_rules[primitive] = custom_rule
    _pe.dce_rules[primitive] = dce_rule
    _discharge.register_discharge_rule(primitive)(_discharge_rule(primitive))
    _checkify.error_checks[primitive] = checkify_rule(derive)
    _mlir.register_lowering(primitive, lower, cacheable=False)
    return primitive


# ---------------------------------------------------------------- lowering


class LoweringSite(NamedTuple):
    """What a lowering rule knows of the program around it.

    Attributes:
        platforms: names such as ``cpu`` or ``cuda``; more than one only when exporting.
        devices: number of devices of the computation.  manual: whether avals are shard-local (all mesh axes are
        manual, as inside ``shard_map``).  for_export: the result will be serialised.  symbolic: shapes have
        unknown dimensions.  axis_env: names of manual axes.
    """

    platforms: tuple[str, ...]
    devices: int
    manual: bool
    for_export: bool
    symbolic: bool


def lowering_site(ctx: Any) -> LoweringSite:
    """Read a ``LoweringRuleContext``."""
    module = ctx.module_context
    platforms = tuple(ctx.platforms or module.platforms)
    axis = module.axis_context
    devices, manual = 1, False
    if isinstance(axis, _sharding_impls.ShardingContext):
        devices = axis.num_devices
    elif isinstance(axis, _sharding_impls.SPMDAxisContext):
        devices = axis.mesh.size
        manual = set(axis.manual_axes) == set(axis.mesh.axis_names)
    elif hasattr(axis, "axis_env"):
        devices = getattr(axis.axis_env, "nreps", 1)
        manual = True
    symbolic = bool(ctx.dim_var_values) or bool(module.shape_poly_state.dim_vars)
    return LoweringSite(platforms, devices, manual, bool(module.lowering_parameters.for_export), symbolic)


def lower_closed(ctx: Any, args: Sequence[Any], closed: Closed, name: str) -> Sequence[Any]:
    """Emit a closed jaxpr at a lowering rule's place, effect tokens included."""
    return _mlir.core_call_lowering(ctx, *args, name=name, call_jaxpr=closed)
