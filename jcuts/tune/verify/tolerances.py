"""Numeric tolerances of all acceptance rules: single kernels, rewritten programs, vendor convolutions, end-to-end
check.

The rules are stated in `tune.verify.acceptance`, `jit.accuracy.float64_check`, `tune.cudnn.worker` and
`jit.end_to_end_benchmark`; the multiple of XLA's own error that is allowed is a setting (`Settings.tolerance`, 2).
One ulp is the spacing of the output's dtype at 1.
"""

from __future__ import annotations

FLOOR_ULP = 4.0
"""Error that is always allowed, in ulp times the square root of the reduction length: of kernels and programs."""
ELEMENT_FACTOR = 4.0
"""A single element, a band of magnitudes or special inputs may be that many times as far off as the whole output."""
NOISE_ULP = 4.0
"""Amplitude of simulated rounding: XLA's own transcendental functions stay within a few ulp."""
FLIP_FLOORS = 16.0
"""Spread of runs with simulated rounding, over what rounding explains, from which on only their range bounds a result:
an operation flips between discrete values."""
SATURATED = 1 / 16
"""Share of an output on huge inputs that is at its least value, and share at its largest, from which on it is taken to
be clipped: what lies between is what huge terms left where they cancelled."""
TRUST_ULP = 1.0
"""Simulated rounding of a float64 operation, where it stands for XLA's own error (see `tune.verify.acceptance`)."""
FINER = 2.0**-15
"""An error of a product relative to its result below this is none of TF32 operands, whose roundings are up to 2^-11."""
MOST_APART = 0.25
"""Relative distance from XLA's result that no tail of a sample explains: numbers of another place must show."""
GROSS_SQRT_EPS = 64
"""Relative L2 distance of a whole program's output from plain ``jax.jit``'s, in square roots of eps, from which on a
variant is disqualified."""
CONVOLUTION_L2 = {"float64": 1e-10, "float32": 1e-4, "tf32": 1e-3, "float16": 5e-2}
"""Distance from the first cuDNN algorithm's result, in L2 norm, from which an algorithm is out.  In float32 it must be
more exact than TF32, which is off by 3e-4; Winograd's algorithm with 5x5 windows is not (1e-3 to 5e-3 on an H200)."""
VENDOR_CONVOLUTION_L2 = {**CONVOLUTION_L2, "float32": 1e-2, "tf32": 1e-2}
"""The same with the accuracy ``vendor``: all of cuDNN's float32 arithmetic is in, and what is wrong is out."""
CONVOLUTION_RUN_FACTOR = 8.0
"""A run of neighbours may be off by this times as much as all of them: an error of one place does not hide among the
others."""
