"""``jcuts.verify``: runs a function in several ways in child processes, judges each against float64, bisects."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jcuts.base.errors import UsageError
from jcuts.base.settings import TUNE, Settings
from jcuts.differential import bisect, reproducer
from jcuts.differential import options as xla_options
from jcuts.differential.judge import problem_of
from jcuts.differential.report import VerifyReport, WayReport
from jcuts.differential.session import Session, write_folder
from jcuts.differential.ways import WAYS
from jcuts.trace import jaxapi, source
from jcuts.trace.capture import function_name
from jcuts.trace.inline import inline
from jcuts.tune.input_recipes import FLOATS, input_recipe
from jcuts.tune.verify.inputs import NORMAL, SPECIAL, make_inputs

SEEDS = 3
SECONDS = 60


def verify(
    fn: Callable[..., Any],
    *args: Any,
    seeds: int = SEEDS,
    seed: int = 0,
    seconds: float = SECONDS,
    ways: Iterable[str] | None = None,
    tolerance: float = Settings().tolerance,
    special: bool = True,
    bisection: bool = True,
    tune: str = "off",
    write_to: str | Path | None = None,
    **keywords: Any,
) -> VerifyReport:
    """Says whether XLA's program of a function is right, and jcuts' (differential testing against float64).

    Every way of `differential.ways` runs the function's jaxpr in a child process on fresh random inputs: floats are
    drawn from the values of the examples (standard normal, or positive where a logarithm asks for it, for arrays of one
    value and for `jax.ShapeDtypeStruct`); integers and booleans stay as they are given.

    Args:
        fn: a JAX function, plain, jitted or optimised.
        args, keywords: example arguments.
        seeds: sets of ordinary inputs; seed: of the first.
        seconds: time limit of one run, compilation included [s]; what takes longer hangs.
        ways: names of the ways to run, all by default.
        tolerance: allowed error as a multiple of what simulated rounding does to the float64 reference.
        special: whether one more set has NaN, infinities, signed zeros and denormals in it.
        bisection: whether what is wrong is bisected to equations, options and passes of XLA.
        tune: of jcuts' program: ``off`` has kernels wherever there can be one, ``cached`` and ``auto`` are what a call
            runs.
        write_to: where to write a reproducer, a Python file that needs JAX and NumPy alone; None: none is written.
    Returns: the report.
    Raises: UsageError: an option is out of range, or the function has something that cannot be written as source
        (callbacks, random keys as arguments).
    """
    chosen = _checked(ways, seeds, seconds, tolerance, tune)
    begun = time.perf_counter()
    plain = getattr(fn, "__wrapped__", fn) if hasattr(fn, "explain") else fn
    leaves = jax.tree.leaves((args, keywords))
    closed = flat_program(plain, *args, **keywords)
    platform = _platform(leaves)
    sets = input_sets(closed, leaves, seeds, seed, special)
    refused = xla_options.refused(platform)
    lines = [source.place(eqn) for eqn in closed.jaxpr.eqns]
    names = [jaxapi.primitive_name(eqn) for eqn in closed.jaxpr.eqns]
    with tempfile.TemporaryDirectory(prefix="jcuts-verify-") as name:
        folder = Path(name)
        write_folder(folder, closed, sets, platform=platform, tolerance=tolerance, refused=refused)
        with Session(folder, platform, seconds) as session:
            found = []
            for way in chosen:
                answer = session.ask(way, tune=tune)
                found.append(WayReport.of(way, WAYS[way].about, answer))
            report = VerifyReport(
                name=function_name(plain),
                platform=platform,
                versions=versions(),
                equations=len(names),
                seeds=seeds,
                special=special,
                refused_options=tuple(sorted(refused)),
                ways=tuple(found),
            )
            if bisection and report.wrong:
                report = bisect.bisected(report, session, closed, names, lines, refused)
            if write_to is not None and report.wrong:
                report = reproducer.written(report, session, closed, Path(write_to))
    return report.timed(time.perf_counter() - begun)


def _checked(ways: Iterable[str] | None, seeds: int, seconds: float, tolerance: float, tune: str) -> tuple[str, ...]:
    chosen = tuple(WAYS) if ways is None else tuple(ways)
    if unknown := [way for way in chosen if way not in WAYS]:
        raise UsageError(f"there is no way {unknown[0]!r} to run a program: {', '.join(WAYS)}", ways=chosen)
    if not chosen:
        raise UsageError("ways is empty: nothing would be verified", ways=chosen)
    for what, value in (("seeds", seeds), ("seconds", seconds), ("tolerance", tolerance)):
        if not value > 0:
            raise UsageError(f"{what}={value} must be more than 0", **{what: value})
    if tune not in TUNE:
        raise UsageError(f"tune={tune!r} is unknown: use one of {', '.join(TUNE)}", tune=tune)
    return chosen


def _platform(leaves: Sequence[Any]) -> str:
    """Where the function's arguments are, or else JAX's default device: ``cpu`` or ``cuda``."""
    places = [next(iter(x.devices())).platform for x in leaves if isinstance(x, jax.Array)]
    found = places[0] if places else jax.default_backend()
    return "cuda" if found == "gpu" else found


def flat_program(fn: Callable[..., Any], *args: Any, **keywords: Any) -> jaxapi.Closed:
    """The function as one flat jaxpr, calls inlined, without conversions that change nothing or are of literals.

    Raises: UsageError: it has effects (callbacks), whose order and number a run in pieces would change.
    """
    closed = inline(jaxapi.closed_jaxpr_of(fn, *args, **keywords))
    for place, var in enumerate(closed.jaxpr.invars):
        if jax.numpy.issubdtype(var.aval.dtype, jax.dtypes.extended):
            raise UsageError(f"argument {place} is of type {var.aval.dtype}: make random keys inside of the function")
    if jaxapi.has_effects(closed):
        raise UsageError(f"{function_name(fn)} has effects ({', '.join(jaxapi.effects_of(closed))}): not verified")
    same: dict[Any, Any] = {}
    eqns = []
    for eqn in closed.jaxpr.eqns:
        eqn = jaxapi.substituted(eqn, same)
        if jaxapi.primitive_name(eqn) != "convert_element_type":
            eqns.append(eqn)
            continue
        operand: Any = eqn.invars[0]
        result: Any = eqn.outvars[0]
        if jaxapi.is_literal(operand):  # JAX converts it when it traces the program again
            value = np.asarray(operand.val, operand.aval.dtype).astype(result.aval.dtype)
            same[result] = jaxapi.new_literal(value, result.aval)
        elif operand.aval.dtype == result.aval.dtype:
            same[result] = operand
        else:
            eqns.append(eqn)
    jaxpr = closed.jaxpr
    outvars = [v if jaxapi.is_literal(v) else same.get(v, v) for v in jaxpr.outvars]
    made = jaxapi.make_closed(jaxpr.constvars, jaxpr.invars, outvars, eqns, closed.consts, like=closed)
    return jaxapi.dce(made)


def input_sets(
    closed: jaxapi.Closed, examples: Sequence[Any], seeds: int, seed: int, special: bool
) -> list[tuple[str, list[np.ndarray]]]:
    """Sets of inputs with their kinds (`tune.verify.inputs`): fresh ones, and one with special values."""
    recipes = [input_recipe(closed, v) if v.aval.dtype.name in FLOATS else "normal" for v in closed.jaxpr.invars]
    known = [None if isinstance(x, jax.ShapeDtypeStruct) else np.asarray(x) for x in examples]
    problem = problem_of(closed, 1.0, recipes)
    sets: list[tuple[str, list[np.ndarray]]] = []
    for number, kind in enumerate([NORMAL] * seeds + [SPECIAL] * special):
        rng = np.random.default_rng([seed, number])
        made = make_inputs(problem, kind, seed + number)
        inputs = [_fresh(value, example, kind, rng) for value, example in zip(made, known, strict=True)]
        sets.append((kind, inputs))
    return sets


def _fresh(made: np.ndarray, example: np.ndarray | None, kind: str, rng: np.random.Generator) -> np.ndarray:
    """One input: drawn from the example's values where it has several; special values stay where they are made."""
    if example is None:
        return made
    if made.dtype.name not in FLOATS:
        return np.asarray(example, made.dtype)
    wide = example.astype(np.float64).reshape(-1)
    wide = wide[np.isfinite(wide)]
    if wide.size < 2 or wide.min() == wide.max():
        return made
    drawn = rng.choice(wide, made.size) * (1 + (rng.random(made.size) - 1 / 2))
    fresh = np.clip(drawn, wide.min(), wide.max()).reshape(made.shape).astype(made.dtype)
    if kind == NORMAL:
        return fresh
    odd = ~np.isfinite(made.astype(np.float64)) | (made == 0)
    return np.where(odd, made, fresh)


def versions() -> dict[str, str]:
    """Versions that a finding belongs to."""
    import jaxlib

    return {"jax": jax.__version__, "jaxlib": jaxlib.version.__version__, "numpy": np.__version__}
