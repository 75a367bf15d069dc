"""Op rules: one per JAX primitive, by op family; importing this package registers all of them."""

from jcuts.ops import contraction, convolution, cumulative, elementwise, gather, layout, reduction, window
from jcuts.ops.registry import Equation, Op, TensorType, describe, supported_primitives

__all__ = [
    "Equation",
    "Op",
    "TensorType",
    "contraction",
    "convolution",
    "cumulative",
    "describe",
    "elementwise",
    "gather",
    "layout",
    "reduction",
    "supported_primitives",
    "window",
]
