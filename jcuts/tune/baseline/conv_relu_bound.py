"""Bounds XLA's fused conv+ReLU time from the unfused pair: it lies in [U - P, U].

For a convolution with bias and ReLU cuDNN compiles kernels at run time, seconds for every shape, before XLA can choose
one; its algorithms for the plain convolution exist, and XLA has timed them for the whole program already. With cuDNN's
fusion disabled (`OPTIONS`) XLA takes U, of which the element-wise passes over the result take at most P.  The fused
time is at most U and at least U - P: a kernel outside that interval wins or loses without further measurement, and only
within it XLA's side is compiled in full (`tune.parent.measure_order`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

OPTIONS: dict[str, Any] = {"xla_disable_hlo_passes": "cudnn-fused-convolution-rewriter"}
SHARE = 0.6
"""Of the memory's bandwidth, what a pass over a result uses at least."""
LAUNCH = 2e-6
"""Seconds that such a pass takes besides, at most."""
FASTER = 1.1
"""A kernel that takes so many times less than U - P wins."""

_CONVOLUTION = re.compile(r"v\d+:(\w+)\[([\d,]*)\] = conv_general_dilated\[(.*)\] (v\d+) v\d+$", re.MULTILINE)
_INPUTS = re.compile(r"^in (.*)$", re.MULTILINE)
_OPERATION = re.compile(r" = (\w+)")
_WITHIN = frozenset({"add", "broadcast_in_dim", "reshape", "squeeze", "copy"})
"""What may stand between a convolution and its ReLU."""
_SIZES = {"f32": 4, "f16": 2, "bf16": 2}


def conv_relu_result_bytes(text: str) -> list[int]:
    """Bytes of the results of a program's convolutions; [] if XLA has nothing to give to cuDNN besides.

    Nor where a convolution's operand comes as it is: there kernels and cuDNN's are mostly too close for U - P.  What
    stands before a convolution XLA computes in a pass of its own, which a kernel saves.

    Args: text: of the program (`trace.canonical`).
    """
    found = _CONVOLUTION.findall(text)
    given = _INPUTS.search(text)
    if given is None or any(f" {operand}:" in f" {given[1]}" for *_, operand in found):
        return []
    after = text[text.rfind(" = conv_general_dilated") :].split("\n")[1:] if found else []
    behind = [match[1] for line in after if (match := _OPERATION.search(line))]
    plain = all("feature_group_count=1 " in params and dtype in _SIZES for dtype, _, params, _ in found)
    if not plain or "max" not in behind or not _WITHIN.issuperset(behind[: behind.index("max")]):
        return []
    return [_SIZES[dtype] * math.prod(int(n) for n in shape.split(",") if n) for dtype, shape, *_ in found]


def memory_pass_seconds(sizes: Sequence[int], bandwidth: float) -> float:
    """Most that passes over results of these sizes take [s]. Args: bandwidth: of the memory [B/s]; 0: not known."""
    return sum(2 * size / (SHARE * bandwidth) + LAUNCH for size in sizes) if bandwidth > 0 else math.inf
