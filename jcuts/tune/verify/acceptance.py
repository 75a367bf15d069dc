"""The numerical acceptance rule: allowed error of a candidate against float64, relative to XLA's own error.

For one output let r be the float64 reference, x XLA's result, c the candidate's, eps the spacing of the output's dtype
at 1, K the reduction length, tiny the smallest normal number, and err(a) = max(0, |a - r| - tiny).

1.  *Classes.*  NaN, +inf, -inf and finite positions of c equal those of x.  Where x and r (rounded to the dtype) are
    of different classes, c may have either.  Where x is not finite although r is, XLA's arithmetic overflowed on the
    way to a finite result; what is then found depends on the order of sums and on fused multiply-adds, and c is free.
    Where abs(r) (1 + 4 eps sqrt(K)) reaches the largest finite number, c may be that infinity, or within
    8 eps sqrt(K) abs(r) of r.
2.  *Zeros.*  Where x = r = c = 0 and x and r have one sign, c has it too (elementwise outputs: K = 1).  Not where
    simulated rounding moves it off zero: the sign of a number that rounds to zero in some of the runs is no one's.
3.  *Output.*  With s the root mean square of r over all normal input sets,
        max_i err(c_i) / max(|r_i|, s)  <=  tolerance * max_i err(x_i) / max(|r_i|, s)  +  4 eps sqrt(K).
    XLA's own error is taken over all normal input sets together: on one it may be small by luck.
4.  *Magnitudes.*  An output-wide scale hides relative errors of small elements.  Elements are banded by exponent of r
    (8 binades, at least 16 different numbers: copies of one number tell of XLA's error once, and there it may be small
    by luck; where r = 0 there is no magnitude, rule 3 stands alone); in each band, with R its largest |r|,
        max err(c)  <=  4 tolerance * max err(x)  +  4 eps sqrt(K) R.
    Neighbours in a band may differ in condition: an element that simulated rounding of one ulp moves as far is no
    one's fault (a sum that cancels among numbers that are small by themselves, on which XLA was lucky).
5.  *Special inputs* (NaN, infinities, -0, denormals; huge values): rules 1, 2, and rule 3 with 4 tolerance.  An output
    that huge values saturate at both ends (a clip, a sigmoid) is judged at its ends: what lies between them is what
    huge terms left where they cancelled, on which XLA was as lucky as its order of summation; there c only stays
    between the ends.
6.  *Discrete outputs* (integers, booleans, argmax, comparisons): equal to x bit by bit.

Where runs of the reference with simulated rounding (`tune.verify.float64_eval`) disagree by more than rounding
explains, the float64 margin does not exceed rounding: there c must lie between the values seen (x's among them), within
the floor 4 eps sqrt(K) of the largest of them, and rules 1-6 do not apply.  Integers wrap around: a range of them that
reaches an end of their type (where a conversion of a float saturated) goes on at the other one, and bounds nothing.
Half of these runs take denormal inputs for zeros, as XLA's arithmetic does on a CPU: what depends on the difference is
bound to neither.

Where the program computes in float64 itself, float64 is no wider than what it judges: x - r is not XLA's error, most
often it is 0 because both made the same roundings.  There XLA's error is what rounding does to float64 arithmetic: the
largest distance from r of runs in which every float64 operation (no narrower one) is off by up to an ulp.
err(x) is the larger of this ``uncertainty`` and |x - r|; err(c) stays as it is.

On GPUs the default precision of float32 products lets operands be rounded to TF32, and XLA's autotuning decides by time
whether they are: the same function is more or less precise from one run, or one batch size, to the next.  Where XLA
took an algorithm that does not round, how far rounded operands move the reference counts as ``uncertainty`` too, and
where products are exponentiated (attention): what simulated rounding of float32 explains is little beside that.

Such rounding also changes classes: a denormal operand becomes 0, and NaN if it meets an infinity; a small sum changes
its sign before an infinite scale.  Where the reference with rounded operands is of another class than r on special
inputs, c may have that one; if it is finite and neither x nor r is, it takes the place of r in rules 3 and 5.  Whoever
computes with operands as they are, or rounded, has one of these classes; nothing else is free.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jcuts.base.errors import AccuracyRejected
from jcuts.tune.problem import Output
from jcuts.tune.verify.expected import OutputReference, first
from jcuts.tune.verify.float_rules import Accuracy, check_floats
from jcuts.tune.verify.inputs import dtype_of, is_float


def check_output(
    index: int, spec: Output, expected: Sequence[OutputReference], got: Sequence[np.ndarray], tolerance: float
) -> Accuracy:
    """Applies the rule to one output.

    Args:
        index: position of the output, for messages.
        spec: shape, dtype, reduction length, exactness.
        expected, got: one entry per set of inputs.
        tolerance: multiple of XLA's own error that is allowed (2.0).
    Returns: the errors on the normal input sets.
    Raises:
        AccuracyRejected: with the rule, the numbers, and the first offending position.
    """
    dtype = dtype_of(spec.dtype)
    for number, (want, have) in enumerate(zip(expected, got, strict=True)):
        if have.shape != want.xla.shape or have.dtype != want.xla.dtype:
            raise AccuracyRejected(
                f"output {index} is {have.dtype}{list(have.shape)}, XLA's is {want.xla.dtype}{list(want.xla.shape)}",
                output=index,
                seed=number,
                rule="shape",
            )
    if spec.exact or not (is_float(dtype) or dtype.kind == "c"):
        for number, (want, have) in enumerate(zip(expected, got, strict=True)):
            _check_exact(index, number, want, have)
        return Accuracy(0.0, 0.0, 0.0)
    if dtype.kind == "c":
        dtype = np.dtype(f"f{dtype.itemsize // 2}")
        expected = [_real_parts(e) for e in expected]
        got = [_parts(g) for g in got]
    return check_floats(index, spec, dtype, expected, got, tolerance)


def _parts(array: np.ndarray | None) -> np.ndarray:
    assert array is not None
    return np.stack([np.real(array), np.imag(array)], axis=-1)


def _real_parts(e: OutputReference) -> OutputReference:
    bounds = (None, None) if e.low is None else (_parts(e.low), _parts(e.high))
    unsure, rounded = (None if a is None else _parts(a) for a in (e.uncertainty, e.rounded))
    return OutputReference(e.kind, _parts(e.xla), _parts(e.reference), *bounds, unsure, rounded)


# Discrete outputs ----------------------------------------------------------------------------------------------------


def _check_exact(index: int, seed: int, want: OutputReference, have: np.ndarray) -> None:
    same = have == want.xla
    if have.dtype.kind not in "biu":
        same |= np.isnan(have) & np.isnan(want.xla)
        same &= np.signbit(have) == np.signbit(want.xla)
        same |= np.isnan(have) & np.isnan(want.xla)
    if same.all():
        return
    reference = want.reference.astype(have.dtype)
    seen = [want.xla, reference]
    if want.low is not None and want.high is not None:
        seen += [want.low.astype(have.dtype), want.high.astype(have.dtype)]
    low, high = np.minimum.reduce(seen), np.maximum.reduce(seen)
    settled = np.logical_and.reduce([s == want.xla for s in seen])
    wrong = ~same & (settled | (((have < low) | (have > high)) & ~_at_an_end(low, high)))
    if wrong.any():
        where = first(wrong)
        raise AccuracyRejected(
            f"output {index} must equal XLA's: {int(wrong.sum())} of {have.size} elements differ, the first at "
            f"{where} is {have[where]} instead of {want.xla[where]}",
            output=index,
            seed=seed,
            rule="exact",
            count=int(wrong.sum()),
            position=list(where),
            candidate=str(have[where]),
            xla=str(want.xla[where]),
        )


def _at_an_end(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Where a range of integers reaches the largest one, or the least, which negation makes of the largest."""
    if low.dtype.kind not in "iu":
        return np.zeros(low.shape, bool)
    info = np.iinfo(low.dtype)
    return (high == info.max) | ((low <= info.min + 1) if low.dtype.kind == "i" else False)
