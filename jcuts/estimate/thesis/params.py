"""Kernel implementation parameters: Table 3.2 (given by the operation) and Table 3.3 (to be searched for)."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from itertools import permutations
from typing import Any

import numpy as np

from jcuts.base.errors import ModelError

KINDS = ("convolution", "matmul", "batch_norm", "winograd", "pooling", "unary", "binary")
"""Rows of Tables 3.5 to 3.7."""

COMPLEX = frozenset({"convolution", "matmul"})
"""Complex operations: their work grows faster than their input (thesis, Table 3.1)."""

FORMATS = tuple("".join(order) for order in permutations("NCHW"))
"""The 24 layouts FORMAT_shared, slowest dimension first."""

FORMULAS = ("printed", "corrected")
"""``printed`` follows the thesis to the letter; ``corrected`` (the default everywhere) repairs its misprints."""


def check_formula(formula: str) -> None:
    """Raises: ModelError unless ``formula`` is one of ``FORMULAS``."""
    if formula not in FORMULAS:
        raise ModelError(f"formula={formula!r} is unknown: choose one of {FORMULAS}", formula=formula)


@dataclass(frozen=True)
class Operation:
    """Table 3.2: parameters fixed by the definition of a tensor operation.

    A matrix product of (N, C) and (C, K) is a convolution whose H and W are one.  Simple operations work on K channels
    and leave C at one.

    Attributes:
        kind: one of ``KINDS``.
        n, c, k: batch, input channels, output channels.
        h, w: height and width of the *output* feature map.
        f_h, f_w, p_h, p_w, s_h, s_w: filter, padding and stride.
        element_bytes: SIZE_element.
    """

    kind: str
    n: int
    c: int = 1
    k: int = 1
    h: int = 1
    w: int = 1
    f_h: int = 1
    f_w: int = 1
    p_h: int = 0
    p_w: int = 0
    s_h: int = 1
    s_w: int = 1
    element_bytes: int = 4

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ModelError(f"kind={self.kind!r} is unknown: choose one of {KINDS}", kind=self.kind)
        for name in ("n", "c", "k", "h", "w", "f_h", "f_w", "s_h", "s_w", "element_bytes"):
            if getattr(self, name) < 1:
                raise ModelError(f"{name}={getattr(self, name)} must be at least 1", field=name)
        if self.p_h < 0 or self.p_w < 0:
            raise ModelError(f"padding ({self.p_h}, {self.p_w}) must not be negative", field="p_h")
        if self.kind == "matmul" and (self.h, self.w, self.f_h, self.f_w) != (1, 1, 1, 1):
            raise ModelError("a matrix product has H = W = F_H = F_W = 1", kind=self.kind)

    @property
    def is_complex(self) -> bool:
        """Whether its work grows faster than its input."""
        return self.kind in COMPLEX

    def used_input(self) -> int:
        """Input elements that some output depends on, each counted once (both operands of a binary operation)."""
        rows = _used(self.h, self.f_h, self.s_h, self.p_h)
        columns = _used(self.w, self.f_w, self.s_w, self.p_w)
        channels = self.c if self.is_complex else self.k
        return self.n * channels * rows * columns * (2 if self.kind == "binary" else 1)

    def weights(self) -> int:
        """Elements of the filter, the second matrix, or the per-channel constants."""
        if self.is_complex:
            return self.k * self.c * self.f_h * self.f_w
        return 3 * self.k if self.kind == "batch_norm" else 0

    def outputs(self) -> int:
        """Output elements."""
        return self.n * self.k * self.h * self.w


def _used(out: int, filter_: int, stride: int, padding: int) -> int:
    extent = (out - 1) * stride + filter_
    touched = extent if filter_ >= stride else out * filter_
    return max(1, min(touched, extent - 2 * padding))


@dataclass(frozen=True)
class Tiles:
    """Table 3.3 and further searched parameters: one candidate (integers) or many (equal-length arrays).

    Attributes:
        n_block, k_block, h_block, w_block: outputs of a thread block.
        n_thread, k_thread, h_thread, w_thread: outputs of a thread (of a warp, for tensor cores): powers of two.
        c_input: input channels per iteration of a looped operation.
        format_shared: index into ``FORMATS``.
        prefetch: 1 if the next iteration is fetched during the current one.
        vector: elements of one shared-memory load.
        split_k: thread blocks that share one output tile, each a part of the reduction.
    """

    n_block: Any = 1
    k_block: Any = 1
    h_block: Any = 1
    w_block: Any = 1
    n_thread: Any = 1
    k_thread: Any = 1
    h_thread: Any = 1
    w_thread: Any = 1
    c_input: Any = 1
    format_shared: Any = 0
    prefetch: Any = 0
    vector: Any = 1
    split_k: Any = 1

    def __post_init__(self) -> None:
        for f in fields(self):
            lowest = 0 if f.name in ("format_shared", "prefetch") else 1
            if np.any(np.asarray(getattr(self, f.name)) < lowest):
                raise ModelError(f"Tiles.{f.name} must be at least {lowest}", field=f.name)
        if np.any(np.asarray(self.format_shared) >= len(FORMATS)):
            raise ModelError(f"Tiles.format_shared must be below {len(FORMATS)}", field="format_shared")
        for axis in "nkhw":
            thread, block = np.asarray(getattr(self, f"{axis}_thread")), np.asarray(getattr(self, f"{axis}_block"))
            if np.any(thread & (thread - 1)):
                raise ModelError(f"Tiles.{axis}_thread must be a power of two", field=f"{axis}_thread")
            if np.any(block % thread):
                raise ModelError(f"Tiles.{axis}_block must be a multiple of {axis}_thread", field=f"{axis}_block")

    def __len__(self) -> int:
        columns = [np.asarray(getattr(self, f.name)) for f in fields(self)]
        sizes = {column.size for column in columns if column.ndim}
        # a single number stands for every candidate
        return 1 if not sizes else 0 if 0 in sizes else max(sizes)

    def take(self, index: Any) -> Tiles:
        """Some candidates (an array of indices or a mask), or one (an integer)."""
        values = {}
        for f in fields(self):
            column = np.asarray(getattr(self, f.name))
            picked = column if column.ndim == 0 else column[index]
            values[f.name] = int(picked) if np.ndim(picked) == 0 else picked
        return replace(self, **values)

    def rows(self) -> list[Tiles]:
        """Every candidate by itself, with plain integers."""
        return [self.take(i) for i in range(len(self))]

    @property
    def block(self) -> tuple[Any, Any, Any, Any]:
        """(N, K, H, W) of a thread block."""
        return self.n_block, self.k_block, self.h_block, self.w_block

    @property
    def thread(self) -> tuple[Any, Any, Any, Any]:
        """(N, K, H, W) of a thread."""
        return self.n_thread, self.k_thread, self.h_thread, self.w_thread
