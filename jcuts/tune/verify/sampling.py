"""Statistical verification of large results: a sample is held to the acceptance rule, all elements to XLA's result.

A float64 reference of a hundred million elements costs seconds and gigabytes for every set of inputs.  Of such an
output the rule (`tune.verify.acceptance`) sees whole runs of neighbours, drawn at random, with the first and the last
ones among them; on ordinary inputs every single element is compared with XLA's as well.

A subset that turns floats into discrete values (a mask `x > 0`, and what is chosen by it) may rightly differ from XLA's
code in single elements, wherever a float lies within rounding of its threshold.  There every element is compared, too,
but so many may be apart as the sample makes likely, and no more of them side by side than the sample has.

The largest difference of two correct results among N elements, of which n are sampled, is extrapolated by extreme-value
statistics: distances with a light tail hardly grow from n elements to N, those with a heavy one (quotients by numbers
that may be next to nothing, sums that cancel) grow as (N / n)^(1 / a), with a the tail's index.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import ml_dtypes
import numpy as np

from jcuts.base.errors import AccuracyRejected
from jcuts.tune.problem import Output, Problem
from jcuts.tune.verify import blocked_numpy
from jcuts.tune.verify.float_rules import Accuracy
from jcuts.tune.verify.inputs import dtype_of, is_float
from jcuts.tune.verify.magnitude_bands import rms
from jcuts.tune.verify.tolerances import ELEMENT_FACTOR, MOST_APART

LARGEST = 1 << 22
"""Elements up to which the rule sees all of an output."""
LARGEST_THAT_FLIP = 1 << 20
"""The same for subsets that turn floats into discrete values, of which there are a dozen references: the rule takes
0.5 us per element and set of inputs, 7 s for each candidate's output of four million elements."""
RUN = 512
"""Neighbours that are looked at together."""
RUNS = 1 << 11
FLIPS = 8
"""Elements of a run that may be apart where the sample has none: flips come singly, a wrong tile does not."""
UNSEEN = 10
"""Elements that the sample may have missed, as if it had seen so many more."""
ENDS = 64
"""Runs at either end that are always looked at."""
CERTAIN = 1.0 - 2.0**-20
"""Share of a limit up to which single precision can tell: its few roundings are smaller."""
TAIL = 64
"""Largest distances of the sample that its tail is known by."""


def sample_positions(problem: Problem, spec: Output) -> np.ndarray | None:
    """Flat positions of the elements that the rule sees, ascending; None: all of them.

    Of discrete outputs it sees all, but where the subset turns floats into them (`Problem.perturb`): there one set of
    inputs takes a dozen references, and gigabytes of each.
    """
    size, dtype = math.prod(spec.shape), dtype_of(spec.dtype)
    most = LARGEST_THAT_FLIP if problem.perturb else LARGEST
    if size <= most or dtype.kind == "c" or not (problem.perturb or (is_float(dtype) and not spec.exact)):
        return None
    return _drawn(size)


@functools.lru_cache(maxsize=2)
def _drawn(size: int) -> np.ndarray:
    count = -(-size // RUN)
    drawn = np.random.default_rng(size).choice(count, RUNS, replace=False)
    runs = np.union1d(drawn, np.concatenate([np.arange(ENDS), np.arange(count - ENDS, count)]))
    found = (runs[:, None] * RUN + np.arange(RUN)).reshape(-1)
    return found[found < size]


def compare(
    index: int, xla: np.ndarray, have: np.ndarray, found: Accuracy, seen: np.ndarray, *, may_flip: bool = False
) -> None:
    """Compares every element with XLA's; what the sample showed of both errors bounds how far they may be apart.

        |c_i - x_i| - tiny  <=  4 (limit + XLA's error) growth * max(|x_i|, rms),     (`tune.verify.acceptance`, rule 3)
        growth = (N / n)^(1 / a)  with Hill's estimate of a from the sample's distances; nothing beyond 1/4

    Infinities count as the largest finite number: beside it a result may be either (rule 1).
    Args:
        index: position of the output, for messages.
        xla, have: both results on ordinary inputs, whole.
        found: errors of the sample.
        seen: positions of the sample.
        may_flip: whether floats become discrete values on the way: single elements may be apart (`_check_flips`).
    Raises:
        AccuracyRejected: with the first offending position.
    """
    x, c = xla.reshape(-1), have.reshape(-1)
    if not is_float(have.dtype):
        _check_flips(index, c.size, seen, lambda slab: c[slab] != x[slab])
        return
    info = ml_dtypes.finfo(have.dtype)
    tiny, most_finite = float(info.smallest_normal), float(info.max)
    looked = x[seen].astype(np.float64)
    scale = max(rms(looked[np.isfinite(looked)]), float(np.finfo(np.float32).tiny))

    def distances(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        a, b = (np.clip(v.astype(np.float64), -most_finite, most_finite) for v in (a, b))
        apart = np.maximum(np.abs(a - b) - tiny, 0.0) / np.maximum(np.abs(b), scale)
        return np.where(np.isnan(a) & np.isnan(b), 0.0, np.where(np.isnan(apart), np.inf, apart))

    growth = _growth(distances(c[seen], x[seen]), x.size)
    limit = ELEMENT_FACTOR * (found.limit + found.xla) * _eps(have.dtype)
    limit = max(limit, min(limit * growth, MOST_APART))

    near = functools.partial(_all_near, scale=scale, limit=limit)

    def is_apart(slab: slice) -> np.ndarray:
        a, b = c[slab], x[slab]
        return np.zeros(a.shape, bool) if near(a, b) else distances(a, b) > limit

    if may_flip:
        _check_flips(index, c.size, seen, is_apart)
        return

    def worst(slab: slice) -> float:
        a, b = c[slab], x[slab]
        return 0.0 if near(a, b) else float(np.max(distances(a, b), initial=0.0))

    parts = blocked_numpy.parallel_blocks(c.size, worst)
    if max(parts, default=0.0) <= limit:
        return
    first = next(k for k, part in enumerate(parts) if part > limit)
    apart, most = parts[first] / _eps(have.dtype), limit / _eps(have.dtype)
    raise AccuracyRejected(
        f"output {index}: one of the elements from {first * blocked_numpy.SLAB} on is {apart:.3g} ulp from XLA's, "
        f"more than {most:.3g}, although a sample of all elements is accurate",
        output=index,
        rule="everywhere",
        first=first * blocked_numpy.SLAB,
        apart_ulp=apart,
        limit_ulp=most,
    )


def _all_near(a: np.ndarray, b: np.ndarray, *, scale: float, limit: float) -> bool:
    """Whether all elements are certainly within ``limit`` of XLA's, by one pass in float32, or in their own type where
    that is wider; False decides nothing: of infinities, NaN and what is close to the limit float64 has the last word.
    """
    a, b = _widened(a), _widened(b)
    if a.dtype not in (np.float32, np.float64):
        return False
    kind = a.dtype.type
    with np.errstate(all="ignore"):
        apart, bound = a - b, np.abs(b)
        np.abs(apart, out=apart)
        np.clip(bound, kind(scale), np.finfo(kind).max, out=bound)
        bound *= kind(limit * CERTAIN)
        return bool((apart <= bound).all())


def _widened(array: np.ndarray) -> np.ndarray:
    """16-bit floats as float32: exact, and those of bfloat16 by a shift, since NumPy converts them one by one."""
    if array.dtype == ml_dtypes.bfloat16:
        return (array.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32) if array.dtype == np.float16 else array


def _check_flips(index: int, size: int, seen: np.ndarray, apart: Callable[[slice], np.ndarray]) -> None:
    """Checks that elements that are apart from XLA's are as rare, and as much alone, as in the sample.

    Args: apart: which elements of a slab are. Raises: AccuracyRejected with the first run that has too many of them.
    """
    parts = blocked_numpy.parallel_blocks(size, apart)
    if not any(part.any() for part in parts):
        return
    mask = np.concatenate(parts)
    padded = np.zeros(-(-size // RUN) * RUN, bool)
    padded[:size] = mask
    counts = padded.reshape(-1, RUN).sum(axis=1)
    known = int(mask[seen].sum())
    most = max(FLIPS, 2 * int(counts[np.unique(seen // RUN)].max(initial=0)))
    everywhere = size / max(1, seen.size) * (known + 3 * math.sqrt(known) + UNSEEN)
    if counts.max(initial=0) <= most and mask.sum() <= everywhere:
        return
    run = int(np.argmax(counts))
    raise AccuracyRejected(
        f"output {index}: {int(mask.sum())} of {size} elements are apart from XLA's, {int(counts[run])} of them among "
        f"the {RUN} from {run * RUN} on; as the sample of {seen.size} has {known}, {int(everywhere)} and {most} may be",
        output=index,
        rule="everywhere",
        first=run * RUN,
        count=int(mask.sum()),
    )


def _growth(seen: np.ndarray, size: int) -> float:
    """How much larger the largest of ``size`` distances may be than the largest of a sample; 1 for light tails."""
    top = np.sort(seen[np.isfinite(seen) & (seen > 0)])[-TAIL - 1 :]
    if len(top) <= TAIL or seen.size >= size:
        return 1.0
    heaviness = float(np.mean(np.log(top[1:] / top[0])))  # Hill: 1 / a
    return (size / seen.size) ** heaviness


def _eps(dtype: np.dtype) -> float:
    return float(ml_dtypes.finfo(dtype).eps)
