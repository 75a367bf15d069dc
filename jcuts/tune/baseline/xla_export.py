"""Exports a region for XLA (`jax.export`): the baseline program, and its float64 form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jcuts.base.errors import CandidateRejected
from jcuts.trace import jaxapi
from jcuts.tune.problem import Problem
from jcuts.tune.verify.float64_eval import evaluate, widened_dtype
from jcuts.tune.verify.rounding_traits import is_amplified, is_discrete, is_wide, rounds_operands


@dataclass(frozen=True)
class Exports:
    """Serialised `jax.export` artifacts of one subset.

    Attributes:
        library: the subset as it is.
        reference: its float64 form, a function of (uint64 seed, float64[3], *widened inputs): two amplitudes of
            noise, and whether operands are rounded (see `widen.evaluate`).
        perturb: whether it turns floats into discrete values, or exponentiates sums, so that the reference must be run
            with noise too.
        unsure: whether it computes in float64 itself, so that noise must tell how far the reference is to be trusted,
            or exponentiates products of rounded operands, which move it by far more than such noise.
        rounds: whether its products may round their operands to TF32.
    """

    library: bytes
    reference: bytes
    perturb: bool
    unsure: bool = False
    rounds: bool = False


def export_subset(closed: Any, *, platform: str = "cpu", name: str = "subset", runs_on: str = "") -> Exports:
    """Exports a subset for the measuring process; nothing is run or compiled.

    Args:
        closed: closed jaxpr of the subset, without effects; its constants travel in the artifact.
        platform: where the candidates will run, whose roundings the float64 form knows.
        runs_on: where the artifacts will run, if elsewhere.
    Raises:
        CandidateRejected: JAX cannot export the subset (a primitive without a stable form, a missing package): it then
            cannot be measured, and stays with XLA.
    """
    avals = [v.aval for v in closed.jaxpr.invars]

    def library(*args: Any) -> Any:
        return jaxapi.eval_closed(closed, *args)

    def reference(seed: Any, amplitude: Any, *args: Any) -> Any:
        noise = (seed, amplitude[:2]) if perturb or wide_itself else None
        cut = amplitude[2] if rounds else None
        return evaluate(closed, args, noise=noise, rounded=cut, taps=platform != "cpu")

    wide_itself, amplified = is_wide(closed), is_amplified(closed)
    rounds = platform != "cpu" and rounds_operands(closed)
    perturb, unsure = is_discrete(closed) or (amplified and not rounds), wide_itself or (amplified and rounds)
    try:
        plain = jax.export.export(jax.jit(library), platforms=[runs_on or platform])(
            *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals)
        )
        with jax.enable_x64(True):
            wide = jax.export.export(jax.jit(reference, keep_unused=True), platforms=[runs_on or platform])(
                jax.ShapeDtypeStruct((), np.dtype(np.uint64)),
                jax.ShapeDtypeStruct((3,), np.dtype(np.float64)),
                *(jax.ShapeDtypeStruct(a.shape, widened_dtype(a.dtype)) for a in avals),
            )
        return Exports(bytes(plain.serialize()), bytes(wide.serialize()), perturb, unsure, rounds)
    except Exception as error:  # JAX raises many kinds here; all of them mean that this subset cannot be exported
        raise CandidateRejected(
            f"{name} cannot be exported for measuring: {type(error).__name__}: {error}", subset=name
        ) from error


def with_exports(problem: Problem, closed: Any, *, platform: str = "cpu", runs_on: str = "") -> Problem:
    """The problem with its artifacts (`export_subset`)."""
    exports = export_subset(closed, platform=platform, name=problem.name or problem.digest[:12], runs_on=runs_on)
    return problem.with_exports(exports.library, exports.reference, exports.perturb, exports.unsure, exports.rounds)
