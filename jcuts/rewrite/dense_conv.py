"""Channels-last view of a dense two-dimensional convolution, for rewrites that replace its algorithm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax

from jcuts.rewrite.matmul_patterns import CONVOLUTION, Program
from jcuts.trace import jaxapi
from jcuts.trace.inline import inline
from jcuts.trace.precision import asked

RANK = 4
"""Dimensions of operands: batch, features, two of space."""


@dataclass(frozen=True)
class DenseConv:
    """A float32 convolution without groups and dilation of the image.

    Attributes:
        eqn: the equation. taps, strides, dilation: per spatial dimension. padding: low and high, per dimension.
        image: its extents. channels, filters: of the image and of the result. batch: images.
        beyond_tf32: whether it asks for more precision than TF32's.
    """

    eqn: Any
    taps: tuple[int, int]
    strides: tuple[int, int]
    dilation: tuple[int, int]
    padding: tuple[tuple[int, int], tuple[int, int]]
    image: tuple[int, int]
    batch: int
    channels: int
    filters: int
    beyond_tf32: bool

    @classmethod
    def of(cls, eqn: Any) -> DenseConv | None:
        """The view of an equation; None for anything else than such a convolution."""
        if jaxapi.primitive_name(eqn) != CONVOLUTION:
            return None
        x, w = (a.aval for a in eqn.invars)
        p = eqn.params
        plain = p["feature_group_count"] == p["batch_group_count"] == 1 and all(n == 1 for n in p["lhs_dilation"])
        types = {str(a.dtype) for a in (x, w, eqn.outvars[0].aval)} == {"float32"}
        if x.ndim != RANK or not plain or not types or 0 in (x.size, w.size, eqn.outvars[0].aval.size):
            return None
        lhs, rhs, _ = p["dimension_numbers"]
        return cls(
            eqn,
            (w.shape[rhs[2]], w.shape[rhs[3]]),
            tuple(p["window_strides"]),
            tuple(p["rhs_dilation"]),
            tuple(p["padding"]),
            (x.shape[lhs[2]], x.shape[lhs[3]]),
            x.shape[lhs[0]],
            x.shape[lhs[1]],
            w.shape[rhs[0]],
            bool(asked(p["precision"])),
        )

    @property
    def outputs(self) -> tuple[int, int]:
        """Spatial extents of the result."""
        _, _, out = self.eqn.params["dimension_numbers"]
        return self.eqn.outvars[0].aval.shape[out[2]], self.eqn.outvars[0].aval.shape[out[3]]

    def image_last(self, x: Any) -> Any:
        """The image as [batch, rows, columns, channels]."""
        lhs, _, _ = self.eqn.params["dimension_numbers"]
        return jnp.transpose(x, (lhs[0], lhs[2], lhs[3], lhs[1]))

    def filters_last(self, w: Any) -> Any:
        """The weights as [rows, columns, channels, filters]."""
        _, rhs, _ = self.eqn.params["dimension_numbers"]
        return jnp.transpose(w, (rhs[2], rhs[3], rhs[1], rhs[0]))

    def result(self, y: Any) -> Any:
        """[batch, rows, columns, filters] in the order of the equation's result."""
        _, _, out = self.eqn.params["dimension_numbers"]
        places = (out[0], out[2], out[3], out[1])
        return jnp.transpose(y, [places.index(d) for d in range(RANK)])

    def padded(self, x: Any, low: tuple[int, int], high: tuple[int, int]) -> Any:
        """The channels-last image with zeros around it; negative numbers cut it."""
        zero = jnp.zeros((), x.dtype)
        return lax.pad(x, zero, [(0, 0, 0), (low[0], high[0], 0), (low[1], high[1], 0), (0, 0, 0)])


def replace_convs(
    closed: jaxapi.Closed, is_worth: Callable[[DenseConv], bool], call: Callable[[DenseConv, Program], Any]
) -> tuple[jaxapi.Closed, int]:
    """Replaces dense convolutions by calls, inlined; returns the program and their number.

    Args: is_worth: which of them; call: the equation in place of one.
    """
    program = Program(closed)
    convs = [conv for eqn in closed.jaxpr.eqns if (conv := DenseConv.of(eqn)) is not None and is_worth(conv)]
    if not convs:
        return closed, 0
    return inline(program.with_eqns({id(conv.eqn): [call(conv, program)] for conv in convs})), len(convs)
