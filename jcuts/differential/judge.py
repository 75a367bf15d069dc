"""Judges one run by the acceptance rule of single kernels (`tune.verify.acceptance`), without XLA as a yardstick.

The rule allows a multiple of XLA's own error.  Where XLA is on trial its place is taken by simulated rounding (discrete
stochastic arithmetic, `tune.verify.float64_eval`): how far runs of the float64 reference get in which every operation
is off by up to 4 ulp of its own type.  Errors are also counted in ulp of each element, and NaN and infinities apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import jax
import ml_dtypes
import numpy as np

from jcuts.base.errors import AccuracyRejected
from jcuts.differential import options as xla_options
from jcuts.trace import jaxapi
from jcuts.tune.input_recipes import FLOATS, degree
from jcuts.tune.problem import Input, Output, Problem
from jcuts.tune.verify import sum_rounding
from jcuts.tune.verify.acceptance import check_output
from jcuts.tune.verify.expected import OutputReference, classes
from jcuts.tune.verify.float64_eval import evaluate
from jcuts.tune.verify.inputs import NORMAL, dtype_of, flushed, is_float
from jcuts.tune.verify.reference import NOISE_RUNS, distance, value_range, widen
from jcuts.tune.verify.rounding_traits import is_amplified, is_discrete
from jcuts.tune.verify.tolerances import NOISE_ULP

_VALUES = {"rms_ulp": "error_ulp", "limit_ulp": "limit_ulp"}
BINS = (1 / 2, 1, 2, 4, 16, 256, 65536)
"""Upper ends of the histogram's bins [ulp], which belong to them; the last bin is open."""
OK = "ok"
WRONG = "wrong"
SPECIAL = "special values"
"""Right on ordinary inputs; NaN, infinities or their neighbours differ from float64 on special ones."""


@dataclass(frozen=True)
class OutputErrors:
    """Errors of one output against float64.

    Attributes:
        histogram: elements of ordinary inputs per bin of `BINS`, the open one last; both sides finite.
        most_ulp: the largest of these errors, in ulp of the element itself.
        rms_ulp: the largest, in ulp of the output's root mean square, and its limit by the rule (0: not computed).
        nan_lost, nan_made: elements that are NaN in float64 alone, or here alone; infinite: other differences of
            infinities.  Over all inputs, special ones included.
        unequal: elements of a discrete output that differ.
        message: which rule is broken, '' if none.
    """

    output: int
    dtype: str
    shape: tuple[int, ...]
    histogram: tuple[int, ...]
    most_ulp: float
    rms_ulp: float = 0.0
    limit_ulp: float = 0.0
    nan_lost: int = 0
    nan_made: int = 0
    infinite: int = 0
    unequal: int = 0
    status: str = OK
    message: str = ""


@dataclass(frozen=True)
class Verdict:
    """What one run showed: ``ok``, ``wrong`` or ``special values``, and the errors of every output."""

    status: str
    message: str = ""
    outputs: tuple[OutputErrors, ...] = field(default=())

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        return asdict(self)


def longest_sums(closed: jaxapi.Closed) -> list[int]:
    """For every output, the most terms that any one equation on the way to it sums into an element, loops as one sum.

    It sets the floor of the limit; how errors add up along chains of equations is known from simulated rounding.
    """
    known: dict[Any, int] = {}
    for eqn in closed.jaxpr.eqns:
        before = [known.get(a, 1) for a in eqn.invars if not jaxapi.is_literal(a)]
        inner = [length for _, _, body in jaxapi.inner_jaxprs(eqn) for length in longest_sums(body)]
        turns = max(1, int(eqn.params["length"])) if eqn.primitive.name == "scan" else 1
        here = max([1, *before, sum_rounding.terms(eqn), *(turns * length for length in inner)])
        known.update((v, here) for v in eqn.outvars)
    return [1 if jaxapi.is_literal(v) else known.get(v, 1) for v in closed.jaxpr.outvars]


def problem_of(closed: jaxapi.Closed, tolerance: float, recipes: Sequence[str] | None = None) -> Problem:
    """The function as a problem of the acceptance rule. Args: recipes: of the inputs (`tune.problem.Input`)."""
    outputs = tuple(
        Output(tuple(v.aval.shape), v.aval.dtype.name, length, v.aval.dtype.name not in FLOATS)
        for v, length in zip(closed.jaxpr.outvars, longest_sums(closed), strict=True)
    )
    kinds = recipes or ["normal"] * len(closed.jaxpr.invars)
    inputs = tuple(
        Input(tuple(v.aval.shape), v.aval.dtype.name, kind) for v, kind in zip(closed.jaxpr.invars, kinds, strict=True)
    )
    return Problem("verify", inputs, outputs, tolerance=tolerance, degree=degree(closed), name="verify")


class Reference:
    """The float64 form of a function, compiled without the suspicious options, and its runs with simulated rounding.

    Args: platform: where it runs; refused: options that the installed jaxlib does not know.
    """

    def __init__(self, closed: jaxapi.Closed, platform: str, refused: frozenset[str]) -> None:
        groups = (xla_options.SUSPICIOUS, xla_options.REFERENCE)
        chosen = xla_options.compiler_options(xla_options.of_group(platform, *groups), refused)

        def wide(seed: Any, amplitude: Any, *values: Any) -> Any:
            return evaluate(closed, values, noise=(seed, amplitude))

        self._run = jax.jit(wide, compiler_options=chosen, keep_unused=True)
        self._ranged = is_discrete(closed) or is_amplified(closed)
        self._discrete = [v.aval.dtype.name not in FLOATS for v in closed.jaxpr.outvars]
        self.dtypes = [np.dtype(v.aval.dtype) for v in closed.jaxpr.outvars]

    def expected(self, kind: str, inputs: Sequence[np.ndarray]) -> list[OutputReference]:
        """What the outputs have to be on one set of inputs."""
        wide = [widen(np.asarray(x)) for x in inputs]
        other = [widen(flushed(np.asarray(x))) for x in inputs]  # XLA may take denormals for zeros
        with jax.enable_x64(True):
            exact = self._once(0, 0.0, wide)
            runs = [self._once(n + 1, NOISE_ULP, (wide, other)[n % 2]) for n in range(NOISE_RUNS)]
        found = []
        for k, (r, dtype) in enumerate(zip(exact, self.dtypes, strict=True)):
            noisy = [run[k] for run in runs]
            low, high = value_range([r, *noisy]) if self._ranged or kind != NORMAL else (None, None)
            with np.errstate(all="ignore"):
                rounded = r.astype(dtype)
            unsure = None if self._discrete[k] else distance(r, noisy)
            found.append(OutputReference(kind, rounded, r, low, high, unsure))
        return found

    def _once(self, seed: int, amplitude: float, values: Sequence[Any]) -> list[np.ndarray]:
        return [np.asarray(x) for x in self._run(np.uint64(seed), np.array([amplitude] * 2), *values)]


def judge(
    problem: Problem, expected: Sequence[Sequence[OutputReference]], got: Sequence[Sequence[np.ndarray]]
) -> Verdict:
    """Applies the rule to every output. Args: expected, got: per set of inputs, per output."""
    errors = []
    for index, spec in enumerate(problem.outputs):
        pairs = [(want[index], have[index]) for want, have in zip(expected, got, strict=True)]
        normal = [(w, h) for w, h in pairs if w.kind == NORMAL]
        counted = _count(index, spec, pairs)
        status, message, known = OK, "", {}
        for which, part in ((WRONG, normal), (SPECIAL, pairs)):
            try:
                accuracy = check_output(index, spec, [w for w, _ in part], [h for _, h in part], problem.tolerance)
            except AccuracyRejected as error:
                status, message = which, _of_float64(error.message)
                known = {name: error.values[key] for name, key in _VALUES.items() if key in error.values}
                break
            known = {"rms_ulp": accuracy.candidate, "limit_ulp": accuracy.limit}
        errors.append(OutputErrors(**{**asdict(counted), **known, "status": status, "message": message}))
    worst = max(errors, key=lambda e: (OK, SPECIAL, WRONG).index(e.status), default=None)
    if worst is None:
        return Verdict(OK)
    return Verdict(worst.status, worst.message, tuple(errors))


def _of_float64(message: str) -> str:
    """A message of the rule, in which rounded float64 and simulated rounding stand where it speaks of XLA."""
    for old, new in (
        ("XLA's own error is", "simulated rounding reaches"),
        ("from XLA's", "from float64's"),
        ("equal XLA's", "equal float64's"),
        ("XLA has", "rounded float64 has"),
    ):
        message = message.replace(old, new)
    return message


def _count(index: int, spec: Output, pairs: Sequence[tuple[OutputReference, np.ndarray]]) -> OutputErrors:
    """The histogram, and what differs in class."""
    dtype = dtype_of(spec.dtype)
    bins, most, unequal = np.zeros(len(BINS) + 1, np.int64), 0.0, 0
    lost, made, infinite = 0, 0, 0
    for want, have in pairs:
        if not is_float(dtype) and dtype.kind != "c":
            unequal += int(np.count_nonzero(have != want.xla)) if have.shape == want.xla.shape else have.size
            continue
        for part in (np.real, np.imag) if dtype.kind == "c" else (np.asarray,):
            c, x, r = (np.asarray(part(a)).astype(np.float64).reshape(-1) for a in (have, want.xla, want.reference))
            here, there = classes(c), classes(x)
            lost += int(np.count_nonzero((there == 1) & (here != 1)))
            made += int(np.count_nonzero((here == 1) & (there != 1)))
            infinite += int(np.count_nonzero((here != there) & (here != 1) & (there != 1)))
            if want.kind != NORMAL:
                continue
            both = (here == 0) & (there == 0)
            apart = np.abs(c[both] - r[both]) / ulp(r[both], dtype)
            bins += np.bincount(np.searchsorted(BINS, apart), minlength=len(bins))
            most = max(most, float(apart.max(initial=0.0)))
    return OutputErrors(
        index, spec.dtype, spec.shape, tuple(map(int, bins)), most, 0.0, 0.0, lost, made, infinite, unequal
    )


def ulp(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Spacing of a type at float64 values, that of its smallest normal number below it.

    >>> ulp(np.array([1.0, 3.0, 0.0]), np.dtype(np.float32)).tolist() == [2.0**-23, 2.0**-22, 2.0**-149]
    True
    """
    info = ml_dtypes.finfo(np.dtype(f"f{dtype.itemsize // 2}") if dtype.kind == "c" else dtype)
    _, exponent = np.frexp(np.maximum(np.abs(values), float(info.smallest_normal)))
    return np.ldexp(float(info.eps), exponent - 1)


def first_wrong_equation(
    closed: jaxapi.Closed,
    sets: Sequence[tuple[str, Sequence[np.ndarray]]],
    check: Callable[[jaxapi.Closed, Sequence[tuple[str, Sequence[np.ndarray]]], Sequence[Any]], Verdict],
) -> tuple[int, Verdict] | None:
    """The first equation whose result, op by op, is outside the limit on the operands that it got.

    Args: sets: kind and inputs; check: judges a function of one equation on sets of its operands and its results.
    """
    from jcuts.differential.program_text import window

    values = [operand_values(closed, inputs) for _, inputs in sets]
    for number, eqn in enumerate(closed.jaxpr.eqns):
        alone = window(closed, number, number + 1, [v for v in eqn.outvars if not jaxapi.is_dropvar(v)])
        if not alone.jaxpr.eqns:
            continue
        operands = [
            (kind, [np.asarray(known[v]) for v in alone.jaxpr.invars])
            for (kind, _), known in zip(sets, values, strict=True)
        ]
        got = [[np.asarray(known[v]) for v in alone.jaxpr.outvars] for known in values]
        verdict = check(alone, operands, got)
        if verdict.status != OK:
            return number, verdict
    return None


def operand_values(
    closed: jaxapi.Closed, inputs: Sequence[Any], tell: Callable[[int], None] = lambda number: None
) -> dict[Any, Any]:
    """All values of a jaxpr, computed equation by equation. Args: tell: called with the number of each equation."""
    known: dict[Any, Any] = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    known.update(zip(closed.jaxpr.invars, inputs, strict=True))
    for number, eqn in enumerate(closed.jaxpr.eqns):
        tell(number)
        operands = [a.val if jaxapi.is_literal(a) else known[a] for a in eqn.invars]
        known.update(zip(eqn.outvars, jaxapi.bind_eqn(eqn, operands), strict=True))
    return known
