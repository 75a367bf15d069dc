"""Limits on a kernel's measured time relative to XLA's, by which program variants take or leave regions."""

from __future__ import annotations

NEAR_TIE_RATIO = 1.25
"""Times XLA's, up to which a kernel is chosen by the form that has ``every`` one."""
CLEAR_PERCENT = 150
"""Percent of a kernel's time, from which on XLA's code for a region is replaced in the form of ``clear`` gains.

Measured on an H100 with the GPT step: all kernels lose 1.11 of 14.3 ms, those of 1.25 lose 0.30 ms, of 1.5 gain 0.03.
"""


def is_near_tie(kernel: float | None, library: float | None) -> bool:
    """Whether a kernel is faster than XLA's code or loses to it by little: `NEAR_TIE_RATIO`.  Times in seconds."""
    return kernel is not None and library is not None and kernel <= NEAR_TIE_RATIO * library


def gains_clearly(kernel: float | None, library: float | None) -> bool:
    """Whether a kernel gains more than the border around it may cost: `CLEAR_PERCENT`.  Times in seconds."""
    return kernel is not None and library is not None and CLEAR_PERCENT * kernel <= 100 * library
