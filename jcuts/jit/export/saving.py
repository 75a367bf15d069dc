"""Ahead-of-time export of decided programs: what ``Optimized.save`` writes into an artefact.

The program that a call runs is exported twice: as planned, with its custom calls, and as the user wrote it.  Constants
become operands, so that each is stored once and both programs share them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
from jax import export

from jcuts.artifact.manifest import WEIGHTS, Static, static_value
from jcuts.artifact.save import ExportedProgram, SavedCall, rename_kernels, save
from jcuts.base.errors import ArtifactError, NativeError, UnsupportedError, UsageError, summary
from jcuts.codegen.artifact import CompiledKernel
from jcuts.jit import variant_space
from jcuts.jit.decision import Decision
from jcuts.jit.export import acceptance_record
from jcuts.jit.traced_call import TracedCall
from jcuts.trace import jaxapi
from jcuts.xla import cpu_launcher, cuda_launcher

_FFI_CALL = "ffi_call"
_ON_CPU = cpu_launcher.TARGETS
_LAUNCHERS = (*_ON_CPU, cuda_launcher.TARGET, cuda_launcher.CHAIN)
_EVERYWHERE = ("cpu", "cuda")
"""Platforms of the fallback."""


def write(path: Path, name: str, calls: Sequence[SavedCall], *, weights: str, names: Any, key: Any) -> str:
    """Writes the artefact of some calls; see `jcuts.jit.optimized.Optimized.save`. Returns: its identity."""
    if weights not in WEIGHTS:
        raise UsageError(f"weights={weights!r} must be one of {', '.join(WEIGHTS)}", weights=weights)
    x64 = jaxapi.x64_enabled()
    platforms = {call.platform for call in calls}
    if len(platforms) > 1:
        raise UsageError(f"the calls run on {' and '.join(sorted(platforms))}: save an artefact for each")
    return save(path, name, calls, platform=platforms.pop(), x64=x64, mode=weights, names=names, key=key)


def saved_call(traced: TracedCall, decision: Decision, out_tree: Any, seeds: Sequence[int]) -> SavedCall:
    """One decided call as data. Args: out_tree: of its result. seeds: of the inputs of the acceptance record.

    Raises: UnsupportedError: it has no form in an artefact. AccuracyRejected: the tuned program is too inaccurate.
    """
    closed, call = traced.closed, traced.call
    if call.placement.shardings:
        raise UnsupportedError(
            "the arguments lie on several devices: save the function of one device's part, and call it under shard_map"
        )
    if decision.deferred:
        raise ArtifactError(f"not saved: {decision.reason}; try again when no other process measures")
    if jaxapi.has_effects(closed):
        raise UnsupportedError(f"the function has effects ({', '.join(jaxapi.effects_of(closed))}): it cannot be saved")
    platform = "cuda" if traced.on_gpu else traced.platform
    if platform not in _EVERYWHERE:
        raise UnsupportedError(f"artefacts are for CPUs and NVIDIA GPUs, not for {platform}", platform=platform)
    planned, rows = closed, []
    if not variant_space.is_xla(decision.chosen):
        outcome = traced.plan(variant_space.form_of(decision.chosen), may_measure=False)
        planned, rows = outcome.closed, [asdict(row) for row in outcome.report.subsets]
    renamed, kernels, targets = _with_names_of_code(planned)
    programs = {
        "plain": _everywhere(closed, platform),
        "program": _exported(renamed, (platform,), targets, _options(traced, decision)),
    }
    dynamic, statics = traced.arguments.split(call.args, call.kwargs)
    return SavedCall(
        platform=platform,
        in_tree=jax.tree.structure(dynamic),
        out_tree=out_tree,
        inputs=closed.in_avals,
        outputs=closed.out_avals,
        statics=[_static(name, value) for name, value in statics],
        donated=_donated(traced),
        kernels=kernels,
        targets=targets,
        decision=_plain(decision.to_dict()),
        choices=_plain(rows),
        evidence=_plain(acceptance_record.record(traced, planned, seeds)) if kernels else [],
        **programs,
    )


def _options(traced: TracedCall, decision: Decision) -> Mapping[str, Any]:
    return variant_space.compiler_options(decision.chosen, traced.platform) or {}


def _exported(
    closed: jaxapi.Closed, platforms: Sequence[str], targets: Sequence[str], options: Mapping[str, Any]
) -> ExportedProgram:
    kept = [jax.numpy.ndim(c) > 0 for c in closed.consts]
    weights = [c for c, keep in zip(closed.consts, kept, strict=True) if keep]

    def program(weights: tuple[Any, ...], *xs: Any) -> list[Any]:
        rest = iter(weights)
        consts = [next(rest) if keep else c for c, keep in zip(closed.consts, kept, strict=True)]
        jaxpr = closed.jaxpr
        opened = jaxapi.make_closed([], [*jaxpr.constvars, *jaxpr.invars], jaxpr.outvars, jaxpr.eqns, [], like=closed)
        return jaxapi.eval_closed(opened, *consts, *xs)

    checks = [export.DisabledSafetyCheck.custom_call(target) for target in targets]
    types = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in closed.in_avals]
    shapes = tuple(jax.ShapeDtypeStruct(w.shape, w.dtype) for w in weights)

    def serialise(name: str) -> bytes:
        program.__name__ = name
        try:
            made = export.export(jax.jit(program), platforms=platforms, disabled_checks=checks)(shapes, *types)
            return bytes(made.serialize())
        except Exception as error:  # JAX's own kinds of errors, for effects, callbacks, foreign custom calls, ...
            raise UnsupportedError(f"jax.export does not export the function: {summary(error)}") from error

    return ExportedProgram(serialise, weights, options)


def _everywhere(closed: jaxapi.Closed, platform: str) -> ExportedProgram:
    """The user's program for every platform that a fallback may run on, or for the one at hand."""
    alone, everywhere = (_exported(closed, names, (), {}) for names in ((platform,), sorted({*_EVERYWHERE, platform})))

    def serialise(name: str) -> bytes:
        try:
            return everywhere.export(name)
        except UnsupportedError:
            return alone.export(name)

    return ExportedProgram(serialise, alone.weights)


# -- kernels ----------------------------------------------------------------------------------------------------------
def _with_names_of_code(closed: jaxapi.Closed) -> tuple[jaxapi.Closed, dict[str, CompiledKernel], tuple[str, ...]]:
    """The program with kernels named by their code, these kernels by name, and the FFI targets."""
    found: dict[str, CompiledKernel] = {}
    targets: set[str] = set()
    for eqn in _ffi_calls(closed):
        target = eqn.params["target_name"]
        if target not in _LAUNCHERS:
            raise UnsupportedError(
                f"the program calls {target}, of which an artefact holds no code (convolutions by cuDNN under a "
                "workspace limit, and FFI calls of your own, cannot be saved)",
                target=target,
            )
        targets.add(target)
        for digest in _digests(eqn):
            found[digest] = _kernel(digest, target)
    if not found:
        return closed, {}, ()
    named = rename_kernels(found)
    renamed = _renamed(closed, {digest: kernel.digest for digest, kernel in named.items()})
    return renamed, {kernel.digest: kernel for kernel in named.values()}, tuple(sorted(targets))


def _ffi_calls(closed: jaxapi.Closed) -> Iterator[Any]:
    for eqn in closed.jaxpr.eqns:
        if jaxapi.primitive_name(eqn) == _FFI_CALL:
            yield eqn
        for _, _, body in jaxapi.inner_jaxprs(eqn):
            yield from _ffi_calls(body)


def _digests(eqn: Any) -> list[str]:
    found = dict(eqn.params["attributes"])
    return str(found.get("digests") or found.get("digest") or "").split()


def _kernel(digest: str, target: str) -> CompiledKernel:
    launcher = cpu_launcher if target in _ON_CPU else cuda_launcher
    kernel = launcher.kernel_of(digest)
    if kernel is None:
        raise NativeError(f"kernel {digest} is neither in this process nor in the object cache", digest=digest)
    return kernel


def _renamed(closed: jaxapi.Closed, names: Mapping[str, str]) -> jaxapi.Closed:
    eqns = []
    for eqn in closed.jaxpr.eqns:
        if jaxapi.primitive_name(eqn) == _FFI_CALL:
            eqn = eqn.replace(params={**eqn.params, "attributes": _renamed_attributes(eqn, names)})
        elif bodies := jaxapi.inner_jaxprs(eqn):
            eqn = jaxapi.with_inner_jaxprs(eqn, [_renamed(body, names) for _, _, body in bodies])
        eqns.append(eqn)
    return jaxapi.with_eqns(closed, eqns)


def _renamed_attributes(eqn: Any, names: Mapping[str, str]) -> tuple[tuple[str, Any], ...]:
    def value(name: str, old: Any) -> Any:
        if name == "digest":
            return names[str(old)]
        return "".join(f"{names[digest]} " for digest in str(old).split()) if name == "digests" else old

    return tuple((name, value(name, old)) for name, old in eqn.params["attributes"])


# -- records ----------------------------------------------------------------------------------------------------------
def _static(name: Any, value: Any) -> Static:
    try:
        kept = static_value(value)
    except TypeError as error:
        raise UnsupportedError(f"static argument {name!r} cannot be saved: {error}", argument=name) from error
    return Static(name, "", kept) if isinstance(name, int) else Static(None, name, kept)


def _donated(traced: TracedCall) -> list[int]:
    """Numbers of the donated leaves."""
    args, kwargs = traced.arguments.donated_leaves(traced.call.args, traced.call.kwargs)
    return [n for n, flag in enumerate(jax.tree.leaves((args, kwargs))) if flag]


def _plain(value: Any) -> Any:
    """JSON of a report: numbers that JSON lacks, and what is no data, become text."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, float):
        return value if abs(value) < float("inf") else str(value)
    return value if value is None or isinstance(value, (str, int, bool)) else str(value)
