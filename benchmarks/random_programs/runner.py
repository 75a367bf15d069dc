"""Runs one random program with jcuts' kernels and with `jax.jit`, and applies the acceptance rule to every output."""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jcuts
from benchmarks.random_programs import oracle
from benchmarks.random_programs.draw import FLOATS
from benchmarks.random_programs.generator import Program, program, signature
from benchmarks.random_programs.plans import every_kernel
from jcuts.base.errors import AccuracyRejected
from jcuts.pipeline import computation
from jcuts.trace import jaxapi
from jcuts.trace.inline import inline
from jcuts.tune.input_recipes import degree
from jcuts.tune.measure.cpu_launch import Launcher, Schedule
from jcuts.tune.problem import Input, Output, Problem
from jcuts.tune.verify import sum_rounding
from jcuts.tune.verify.acceptance import check_output
from jcuts.tune.verify.expected import OutputReference
from jcuts.tune.verify.float64_eval import evaluate
from jcuts.tune.verify.inputs import flushed, make_inputs, seed_kinds
from jcuts.tune.verify.reference import TRUST_ULP, distance, value_range, widen
from jcuts.tune.verify.rounding_traits import is_wide
from jcuts.tune.verify.tolerances import NOISE_ULP
from jcuts.xla.cpu_ffi_call import call_kernel
from jcuts.xla.kernel_cache import kernel_for

TOLERANCE = 2.0
NOISE_RUNS = 40
"""More than the tuner makes: it tries a few kernels of a subset, thousands of whole programs would find a gap."""
UNSIMPLIFIED = {"xla_disable_hlo_passes": "algsimp"}
FAST = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    # It must mean what it says: the simplifier multiplies by a converted bool with a selection (no NaN * 0), and more.
    **UNSIMPLIFIED,
}
"""The float64 reference is compiled quickly: its speed does not matter."""
TRANSFORMS = ("plain", "grad", "vmap")
NUMBER = re.compile(r"0x[0-9a-f]+")


@dataclass
class Verdict:
    """What one program showed.

    ``status``: ``ok``; ``mismatch``: the rule was broken; ``error``: jcuts raised; ``unsuitable``: JAX itself cannot
    trace or run the program.  ``accepted``, in this order: ``at once``; ``without simplifier``: the same as `jax.jit`
    with XLA's algebraic simplifier off (which turns some NaN * 0 into 0); ``under rounding``: runs of the reference
    with simulated rounding show results that rounding alone moves that far; ``by kernel``: the whole program amplifies
    rounding beyond what those runs cover, and every kernel alone keeps the rule on the values that XLA computes for
    it.  The latter excuses no NaN, infinity or sign of zero.

    ``forms``: of every kernel the schedule parameter ``cuda``, on a CPU its template.

    ``nan_unlike_xla``: so many elements of accepted results are NaN where XLA's are not, or the reverse.  ``xla_lost``:
    by primitive, the results in which XLA has lost a NaN according to NumPy (`oracle`).  ``nan_unlike_any``: elements
    where this also holds for XLA without its simplifier and operation by operation; ``nan_unlike_float64``: and for
    float64 too (where XLA is not finite although float64 is, the rule lets candidates have anything).
    """

    seed: int
    transform: str
    status: str = "ok"
    reason: str = ""
    equations: list[str] = field(default_factory=list)
    primitives: list[str] = field(default_factory=list)
    kernels: int = 0
    forms: list[str] = field(default_factory=list)
    most_tiles: int = 0
    accepted: str = ""
    nan_unlike_xla: int = 0
    nan_unlike_any: int = 0
    nan_unlike_float64: int = 0
    xla_lost: dict[str, int] = field(default_factory=dict)


def equation_key(eqn: Any) -> str:
    """Names an equation by primitive, shapes, types and parameters."""
    types = [f"{v.aval.dtype}{list(v.aval.shape)}" for v in (*eqn.invars, *eqn.outvars)]
    params = sorted((k, NUMBER.sub("", str(v))) for k, v in eqn.params.items())
    return hashlib.sha256(repr((eqn.primitive.name, types, params)).encode()).hexdigest()[:16]


# -- functions --------------------------------------------------------------------------------------------------------
def transformed(of: Program, transform: str, optimise: Callable[..., Any]) -> tuple[Callable[..., Any], list[Any]]:
    """The program under a transformation, its function wrapped by ``optimise``, and the argument types."""
    args = signature(of)
    if transform == "vmap":
        extent = 3 + of.seed % 3
        batched = [jax.ShapeDtypeStruct((extent, *a.shape), a.dtype) if k % 3 != 1 else a for k, a in enumerate(args)]
        axes = tuple(0 if k % 3 != 1 else None for k in range(len(args)))
        return jax.vmap(optimise(of.function), in_axes=axes), batched
    if transform == "grad":

        def loss(*values: Any) -> Any:
            total = 0.0
            for k, out in enumerate(optimise(of.function)(*values)):
                if jnp.issubdtype(out.dtype, jnp.floating):
                    total = total + jnp.sum(jnp.tanh(out)) * (1.0 + 0.5 * k)
            return total

        return jax.value_and_grad(loss, argnums=tuple(range(len(args)))), args
    return optimise(of.function), args


def reduction_lengths(closed: Any) -> list[int]:
    """For every output, how many terms are summed into one element along the longest chain."""
    return _lengths(closed, [1] * len(closed.jaxpr.invars))


def _lengths(closed: Any, start: Sequence[int]) -> list[int]:
    known: dict[Any, int] = dict(zip(closed.jaxpr.invars, start, strict=True))
    for eqn in closed.jaxpr.eqns:
        before = max((known.get(a, 1) for a in eqn.invars if not jaxapi.is_literal(a)), default=1)
        inner = 1
        for _, _, body in jaxapi.inner_jaxprs(eqn):
            inner = max(inner, *_lengths(body, [1] * len(body.jaxpr.invars)), 1)
        if eqn.primitive.name == "scan":
            inner *= max(1, int(eqn.params["length"]))
        here = min(2**20, before * inner * sum_rounding.terms(eqn))
        known.update((v, here) for v in eqn.outvars)
    return [1 if jaxapi.is_literal(v) else known.get(v, 1) for v in closed.jaxpr.outvars]


# -- one program ------------------------------------------------------------------------------------------------------
def run(seed: int, transform: str = "plain", *, small: bool = False, keep: dict[str, Any] | None = None) -> Verdict:
    """Runs the program of a seed and judges it. ``keep`` receives intermediate results (for debugging)."""
    of = program(seed, smooth=transform == "grad", small=small)
    verdict = Verdict(seed, transform)
    keep = {} if keep is None else keep
    with jax.enable_x64(of.kind.x64):
        try:
            _run(of, transform, verdict, keep)
        except AccuracyRejected as error:
            verdict.status, verdict.reason = "mismatch", error.message[:2000]
        except Exception as error:  # whatever it is, the seed is worth a look
            verdict.status, verdict.reason = "error", f"outside jcuts: {type(error).__name__}: {error}"[:2000]
        if verdict.status == "ok":
            _prove(verdict, keep)
    return verdict


def _prove(verdict: Verdict, keep: dict[str, Any]) -> None:
    """Counts where the kernels have NaN and XLA has none, or the reverse; asks NumPy and XLA itself who is wrong."""
    closed = keep["closed"]
    exact = _reference(closed, noisy=False)
    for values, x, c in zip(keep["inputs"], keep["wanted"], keep["got"], strict=True):
        unlike = oracle.nan_unlike([x], c)
        if not unlike:
            continue
        others = [x]
        for one in _other_runs(closed):
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # XLA:CPU has no code for some operations alone
                others.append(_leaves(one(*values)))
        with jax.enable_x64(True):
            wide = _leaves(exact(*(widen(np.asarray(v)) for v in values)))
        verdict.nan_unlike_xla += unlike
        verdict.nan_unlike_any += oracle.nan_unlike(others, c)
        verdict.nan_unlike_float64 += oracle.nan_unlike([*others, wide], c)
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            for name, count in oracle.lost_nans(closed, values).items():
                verdict.xla_lost[name] = verdict.xla_lost.get(name, 0) + count


def _other_runs(closed: Any) -> tuple[Callable[..., Any], ...]:
    """The program in XLA without its algebraic simplifier, and operation by operation.

    Inside a fusion XLA (jax 0.11) takes x / x for 1 even where x is 0.
    """

    def evaluated(*values: Any) -> Any:
        return jaxapi.eval_closed(closed, *values)

    return jax.jit(evaluated, compiler_options=UNSIMPLIFIED), evaluated


def _run(of: Program, transform: str, verdict: Verdict, keep: dict[str, Any]) -> None:
    try:
        plain, args = transformed(of, transform, lambda fn: fn)
        closed = inline(jaxapi.closed_jaxpr_of(lambda *xs: jax.tree.leaves(plain(*xs)), *args))
    except Exception as error:  # a random program that JAX refuses says nothing about jcuts
        verdict.status, verdict.reason = "unsuitable", f"{type(error).__name__}: {error}"[:300]
        return
    problem = _problem(closed, f"random program {of.seed}")
    kinds = seed_kinds(problem)
    inputs = [make_inputs(problem, kind, 1000 * of.seed % 2**31 + k) for k, kind in enumerate(kinds)]
    library = jax.jit(lambda *xs: jaxapi.eval_closed(closed, *xs))
    try:
        wanted = [_leaves(library(*values)) for values in inputs]
    except jax.errors.JaxRuntimeError as error:  # XLA:CPU of jax 0.11 lacks some products of bfloat16
        verdict.status, verdict.reason = "unsuitable", f"XLA alone: {error}"[:300]
        return
    keep.update(closed=closed, inputs=inputs, kinds=kinds, wanted=wanted, problem=problem)
    try:
        with every_kernel(of.seed) as (planned, watch):
            optimised, _ = transformed(of, transform, lambda fn: jcuts.optimize(fn, mode="fusion", tune="off"))
            call = jax.jit(lambda *xs: jax.tree.leaves(optimised(*xs)))
            got = [_leaves(call(*values)) for values in inputs]
    except Exception as error:
        verdict.status, verdict.reason = "error", f"{type(error).__name__}: {error}"[:2000]
        keep["error"] = error
        return
    keep.update(planned=planned, got=got)
    fenced(planned)
    verdict.accepted = "at once"
    _count(planned, verdict)
    if watch.messages:
        verdict.status, verdict.reason = "error", "; ".join(watch.messages)[:2000]
        return
    try:
        judge(closed, problem, inputs, wanted, got)
        return
    except AccuracyRejected as error:
        verdict.reason = error.message[:300]

    others = []
    for one in _other_runs(closed):
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # XLA:CPU has no code for some operations alone
            others.append([_leaves(one(*values)) for values in inputs])
    for other in others:
        try:
            judge(closed, problem, inputs, other, got)
            verdict.accepted = "without simplifier"
            return
        except AccuracyRejected:
            pass
    rule = None
    for other in (*others[-1:], wanted):
        try:
            judge(closed, problem, inputs, other, got, noisy=True)
            verdict.accepted = "under rounding"
            return
        except AccuracyRejected as error:
            verdict.accepted, verdict.reason = "by kernel", error.message[:2000]
            rule = error.values.get("rule")
    if rule in ("class", "zero"):  # no matter of rounding
        verdict.status, verdict.accepted = "mismatch", ""
        return
    try:
        each_kernel(planned, closed, inputs)
    except AccuracyRejected as error:
        verdict.status, verdict.accepted = "mismatch", ""
        verdict.reason = f"{verdict.reason}; kernel: {error.message}"[:3000]


def alone(seed: int, transform: str = "plain") -> None:
    """What `run` asks of XLA, without jcuts: dies where XLA's own code or compiler does."""
    of = program(seed, smooth=transform == "grad")
    with jax.enable_x64(of.kind.x64):
        plain, args = transformed(of, transform, lambda fn: fn)
        closed = inline(jaxapi.closed_jaxpr_of(lambda *xs: jax.tree.leaves(plain(*xs)), *args))
        problem = _problem(closed, "alone")
        kinds = seed_kinds(problem)
        inputs = [make_inputs(problem, kind, 1000 * seed % 2**31 + k) for k, kind in enumerate(kinds)]
        wanted = [_leaves(jax.jit(lambda *xs: jaxapi.eval_closed(closed, *xs))(*values)) for values in inputs]
        for noisy in (False, True):
            with contextlib.suppress(AccuracyRejected):
                judge(closed, problem, inputs, wanted, wanted, noisy=noisy)


def _count(planned: Sequence[computation.Computation], verdict: Verdict) -> None:
    equations: dict[str, None] = {}
    primitives: dict[str, None] = {}
    for subset in (s for top in planned for level in top.walk() for s in level.subsets):
        if subset.chosen is None:
            continue
        verdict.kernels += 1
        verdict.forms.append(str(dict(subset.chosen.params).get("cuda", subset.chosen.template)))
        verdict.most_tiles = max(verdict.most_tiles, subset.chosen.tiles)
        for eqn in subset.closed.jaxpr.eqns:
            equations.setdefault(equation_key(eqn))
            primitives.setdefault(eqn.primitive.name)
    verdict.equations, verdict.primitives = list(equations), sorted(primitives)


def _problem(closed: Any, name: str) -> Problem:
    lengths = reduction_lengths(closed)
    inputs = tuple(Input(tuple(v.aval.shape), v.aval.dtype.name) for v in closed.jaxpr.invars)
    outputs = tuple(
        Output(tuple(v.aval.shape), v.aval.dtype.name, k, v.aval.dtype.name not in FLOATS)
        for v, k in zip(closed.jaxpr.outvars, lengths, strict=True)
    )
    return Problem(name, inputs, outputs, tolerance=TOLERANCE, degree=degree(closed), name=name)


def judge(
    closed: Any,
    problem: Problem,
    inputs: Sequence[Any],
    wanted: Sequence[Any],
    got: Sequence[Any],
    *,
    noisy: bool = False,
) -> None:
    """Applies the rule of `jcuts.tune.verify.acceptance`. Simulated rounding takes long: it is asked where the rule
    fails without.

    Raises: AccuracyRejected.
    """
    expected = []
    run_wide = _reference(closed, noisy=noisy)
    unsure = noisy and is_wide(closed)
    with jax.enable_x64(True):
        for kind, values, results in zip(seed_kinds(problem), inputs, wanted, strict=True):
            wide = [widen(np.asarray(x)) for x in values]
            if not noisy:
                expected.append(
                    [OutputReference(kind, x, r) for x, r in zip(results, _leaves(run_wide(*wide)), strict=True)]
                )
                continue

            both = (wide, [widen(flushed(np.asarray(x))) for x in values])  # every other run without denormals

            def runs(*amplitudes: float, both: tuple[list[Any], ...] = both) -> list[list[np.ndarray]]:
                noise = np.array(amplitudes)
                return [_leaves(run_wide(np.uint64(n + 1), noise, *both[n % len(both)])) for n in range(NOISE_RUNS)]

            exact = _leaves(run_wide(np.uint64(0), np.zeros(2), *wide))
            ranged = runs(NOISE_ULP, NOISE_ULP)
            ranges = [value_range([r, *(run[i] for run in ranged)]) for i, r in enumerate(exact)]
            trust: list[Any] = [None] * len(exact)
            if unsure:
                moved = runs(0.0, TRUST_ULP, both=(wide,))
                trust = [distance(r, [run[i] for run in moved]) for i, r in enumerate(exact)]
            seen = zip(results, exact, ranges, trust, strict=True)
            expected.append([OutputReference(kind, x, r, *b, t) for x, r, b, t in seen])
    for i, spec in enumerate(problem.outputs):
        check_output(i, spec, [e[i] for e in expected], [g[i] for g in got], problem.tolerance)


def fenced(planned: Sequence[computation.Computation]) -> None:
    """Runs every kernel on buffers with fences, its tiles in two orders: nothing may be written outside a result.

    Raises: AccuracyRejected.
    """
    for top in planned:
        for subset in (s for level in top.walk() for s in level.subsets):
            if subset.chosen is None:
                continue
            launcher = Launcher(kernel_for(subset.chosen))
            inputs = make_inputs(_problem(subset.closed, subset.identity), "normal", 5)
            one = launcher.run(inputs)
            other = launcher.run(inputs, Schedule(1, backward=True), poison=0xFF)
            for k, (a, b) in enumerate(zip(one, other, strict=True)):
                if a.tobytes() != b.tobytes():
                    raise AccuracyRejected(f"result {k} depends on the order of tiles, or is not written in full")


def each_kernel(planned: Sequence[computation.Computation], closed: Any, inputs: Sequence[Any]) -> None:
    """The rule for every kernel alone: on what XLA computes for it; inside loops and transforms on inputs of its own.

    Raises: AccuracyRejected.
    """
    for top in planned:
        for level in top.walk():
            for subset in level.subsets:
                if subset.chosen is None:
                    continue
                problem = _problem(subset.closed, subset.identity)
                kinds = seed_kinds(problem)
                own = [make_inputs(problem, kind, 77 + k) for k, kind in enumerate(kinds)]
                here = [v.aval.str_short() for v in level.closed.jaxpr.invars]
                if level is top and here == [v.aval.str_short() for v in closed.jaxpr.invars]:
                    part = jaxapi.make_closed(
                        level.closed.jaxpr.constvars,
                        level.closed.jaxpr.invars,
                        subset.inputs,
                        level.closed.jaxpr.eqns,
                        level.closed.consts,
                        like=level.closed,
                    )
                    feed = jax.jit(lambda *xs, part=part: jaxapi.eval_closed(part, *xs))
                    for k in range(min(len(kinds), len(inputs))):  # from the end: special and huge inputs too
                        own[-1 - k] = _leaves(feed(*inputs[-1 - k]))
                kernel = kernel_for(subset.chosen)
                call = jax.jit(lambda *xs, kernel=kernel: call_kernel(kernel, *xs))
                _judge_kernel(subset.closed, problem, own, [_leaves(call(*xs)) for xs in own])


def _judge_kernel(closed: Any, problem: Problem, inputs: Sequence[Any], got: Sequence[Any]) -> None:
    """The rule against `jax.jit`, or else against XLA's other runs."""
    library = jax.jit(lambda *xs: jaxapi.eval_closed(closed, *xs))
    refused: AccuracyRejected | None = None
    for one in (library, *_other_runs(closed)):
        try:
            judge(closed, problem, inputs, [_leaves(one(*xs)) for xs in inputs], got, noisy=True)
            return
        except AccuracyRejected as error:
            refused = refused or error
        except jax.errors.JaxRuntimeError:  # XLA:CPU has no code for some operations alone
            continue
    if refused is not None:
        raise refused


def _reference(closed: Any, *, noisy: bool) -> Callable[..., Any]:
    """The float64 form of the program, compiled for these types (called under ``enable_x64``)."""

    def exact(*values: Any) -> Any:
        return evaluate(closed, values)

    def perturbed(seed: Any, amplitude: Any, *values: Any) -> Any:
        return evaluate(closed, values, noise=(seed, amplitude))

    return jax.jit(perturbed if noisy else exact, compiler_options=FAST, keep_unused=True)


def _leaves(tree: Any) -> list[np.ndarray]:
    return [np.asarray(x) for x in jax.tree.leaves(tree)]
