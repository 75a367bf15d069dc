"""Restores 1x1 convolutions: products of the rewrite `dots` that no kernel took (``JCUTS_RESTORE_CONVS``, default off).

    y = dot(x, w)  of `rewrite.pointwise_conv`, left to XLA   ->  y = conv(x, w)

`dots` is for kernels.  Where none takes a product, XLA runs it by a GEMM library or a fused matmul, the convolution by
cuDNN; which is faster was measured with whole programs without kernels (`docs/kernels/execution.md`, "Restored
convolutions").  So small products stay, and large ones are convolutions again.  Those between stay
where XLA may fuse the operand's element-wise operations into the product, and are convolutions where a convolution that
XLA keeps reads the operand, too: it is in memory then.  In training that is the rule, for the gradient of the weights
reads what the product reads.

That holds for GPUs on which XLA gives convolutions the layout of products and kernels, channels innermost, and for the
precision that was measured.  A variant without kernels keeps its products: it is there to race them against XLA's own
convolutions.  That is ``JCUTS_RESTORE_CONVS=auto``; ``all`` restores all that it can.  In a program with kernels the
rule gained nothing where it was timed, so the default is ``off``.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from jcuts.base import knobs
from jcuts.pipeline.state import State
from jcuts.rewrite.matmul_patterns import CONVOLUTION
from jcuts.rewrite.pointwise_conv import Product, dot_to_conv
from jcuts.schedule import fit
from jcuts.trace import jaxapi, precision
from jcuts.xla import devices as xla_devices

CHANNELS_LAST = (9, 0)
"""Compute capability from which on XLA's convolutions have channels innermost in every type but float64."""
TYPES = ("float32", "bfloat16", "float16")
_FIT = fit.coefficients("gpu/conv", "xla_convolution")


def restore_convs(state: State) -> State:
    """The pass: products that XLA keeps as convolutions, where that is faster."""
    mode = knobs.current().restore_convs
    if mode == "off" or not state.convolutions or not (mode == "all" or _is_wanted(state)):
        return state
    wanted = (lambda product: True) if mode == "all" else is_faster
    closed, count = dot_to_conv(state.closed, state.convolutions, wanted)
    if not count:
        return state
    note = f"{count} products of 1x1 convolutions that XLA keeps are convolutions again"
    return replace(state, closed=closed, rewrites=state.rewrites - count, restored=count).noted(note)


def _is_wanted(state: State) -> bool:
    """Whether a variant's products are there for kernels, on a GPU for which the rule is known."""
    has_kernels = state.settings.form is None or state.settings.form.regions != "none"
    return has_kernels and state.platform != "cpu" and xla_devices.machine().capability >= CHANNELS_LAST


def is_faster(product: Product) -> bool:
    """Whether XLA's convolution is expected to be faster than its product."""
    eqn = product.eqn
    if str(eqn.invars[0].aval.dtype) not in TYPES or precision.asked(eqn.params["precision"]):
        return False
    operations = _operations(eqn)
    if operations >= _FIT.surely_operations:
        return True
    convolved = any(jaxapi.primitive_name(reader) == CONVOLUTION for reader in product.readers)
    return operations >= _FIT.least_operations and convolved


def _operations(eqn: Any) -> int:
    (contracted, _), _ = eqn.params["dimension_numbers"]
    return 2 * eqn.outvars[0].aval.size * math.prod(eqn.invars[0].aval.shape[d] for d in contracted)
