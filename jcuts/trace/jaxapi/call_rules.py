"""Transformation rules (jvp, linearize, transpose, batching, partial evaluation, ...) of a call-like primitive."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax._src import checkify as _checkify
from jax._src import core as _core
from jax._src import dispatch as _dispatch
from jax._src import effects as _effects
from jax._src import linear_util as _lu
from jax._src import source_info_util as _source
from jax._src.interpreters import ad as _ad
from jax._src.interpreters import batching as _batching
from jax._src.interpreters import mlir as _mlir
from jax._src.interpreters import partial_eval as _pe
from jax._src.state import discharge as _discharge
from jax._src.state import types as _state_types
from jax._src.util import weakref_lru_cache as _weakref_lru_cache

from jcuts.trace.jaxapi.jaxprs import is_literal
from jcuts.trace.jaxapi.types import ONE_JAXPR_CLASS, Closed, Eqn, Primitive


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
    """Which outputs of a call remain after output forwarding, and how to restore the others.

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
    """Removes outputs that are arguments, or repeat an earlier output (output forwarding): residuals are not copied."""
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
    """Adapts ``(outs, nonzeros, residuals, structured, tangent_fn)`` to what this JAX version expects of the rule."""
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
    jaxpr with its errors functionalised (they come first, among its arguments and its results).
    """

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
