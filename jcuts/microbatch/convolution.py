"""Cache key of a convolution measurement: kernel kind (forward, backward-data, backward-filter), shape, precision."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from jcuts.base import keys
from jcuts.base.errors import UsageError

ALIGNMENT = 16
"""Bytes that kernels may load at once: every micro-batch begins at a multiple of it."""
LEAST_SLICE = 8
"""Channels of the outputs that are worth a call of their own."""
KINDS = ("forward", "backward_data", "backward_filter")
LAYOUTS = ("NCHW", "NHWC")

MATHS: dict[str, dict[str, str]] = {
    "float64": {"float64": "float64"},
    "float32": {"float32": "float32", "tf32": "tf32"},
    "float16": {"float16": "float16", "float16+tensor": "float16", "float32": "float32", "float32+tensor": "float32"},
    "bfloat16": {"float32": "float32", "float32+tensor": "float32"},
}
"""Storage dtype to the ways of computing with it, each with the precision of its arithmetic.

``+tensor``: on tensor cores; 16-bit products are exact there, so with ``float32`` sums this is as exact as without.
float32 storage converted to 16 bits on the way in is no way of computing in float32, and has no name here.
"""

ADMITS = {
    "float64": ("float64",),
    "float32": ("float32", "float64"),
    "tf32": ("tf32", "float32", "float64"),
    "float16": ("float16", "float32", "float64"),
    "bfloat16": ("float32", "float64"),
}
"""Precision asked for to the precisions that are at least as exact (paper III-D: more is welcome, less never)."""


def admitted(dtype: str, precision: str) -> tuple[str, ...]:
    """Math modes at least as exact as the requested one, for a storage dtype.

    >>> admitted("float16", "float16")
    ('float16', 'float16+tensor', 'float32', 'float32+tensor')
    >>> admitted("float32", "float32"), admitted("float32", "tf32")
    (('float32',), ('float32', 'tf32'))

    Raises: UsageError for an unknown dtype or precision, or where nothing is exact enough.
    """
    if dtype not in MATHS:
        raise UsageError(f"dtype {dtype!r} is unknown: choose one of {tuple(MATHS)}", dtype=dtype)
    if precision not in ADMITS:
        raise UsageError(f"precision {precision!r} is unknown: choose one of {tuple(ADMITS)}", precision=precision)
    found = tuple(name for name, exact in MATHS[dtype].items() if exact in ADMITS[precision])
    if not found:
        raise UsageError(f"{dtype} convolutions cannot compute in {precision}", dtype=dtype, precision=precision)
    return found


@dataclass(frozen=True)
class Convolution:
    """One convolution (kind, shape, dtype, math) without its batch size: times of all batch sizes belong together.

    Attributes:
        kind: which of the three kernels of a layer.
        channels, outputs: C and K, over all groups.
        spatial: extents of the layer's input (of the image, whatever the kernel's own operands are).
        window, strides, dilation: per spatial dimension.
        padding: (low, high) per spatial dimension.
        dtype: of the tensors in memory.
        layout: of images (filters accordingly).
    Raises: UsageError for values that no convolution has.
    """

    kind: str
    channels: int
    outputs: int
    spatial: tuple[int, ...]
    window: tuple[int, ...]
    strides: tuple[int, ...] = ()
    padding: tuple[tuple[int, int], ...] = ()
    dilation: tuple[int, ...] = ()
    groups: int = 1
    dtype: str = "float32"
    layout: str = "NCHW"

    def __post_init__(self) -> None:
        rank = len(self.spatial)
        fill = {"strides": (1,) * rank, "padding": ((0, 0),) * rank, "dilation": (1,) * rank}
        for name in ("spatial", "window", "strides", "dilation"):
            value = tuple(getattr(self, name)) or fill.get(name, ())
            if len(value) != rank or not all(_integer(v, 1) for v in value):
                raise UsageError(f"{name}={value!r} must be {rank} positive integers", **{name: value})
            object.__setattr__(self, name, value)
        padding = tuple(tuple(pair) for pair in self.padding) or fill["padding"]
        if len(padding) != rank or not all(len(pair) == 2 and all(_integer(v, 0) for v in pair) for pair in padding):
            raise UsageError(f"padding={padding!r} must be {rank} pairs (low, high) >= 0", padding=padding)
        object.__setattr__(self, "padding", padding)
        for name, known in (("kind", KINDS), ("layout", LAYOUTS), ("dtype", tuple(MATHS))):
            if getattr(self, name) not in known:
                value = getattr(self, name)
                raise UsageError(f"{name}={value!r} is unknown: choose one of {known}", **{name: value})
        for name in ("channels", "outputs", "groups"):
            value = getattr(self, name)
            if not _integer(value, 1) or value % self.groups:
                raise UsageError(f"{name}={value!r} must be a positive multiple of groups={self.groups!r}", value=value)
        if not rank or min(self.result) < 1:
            raise UsageError(f"a window of {self.window} does not fit into {self.spatial}", window=self.window)

    @property
    def result(self) -> tuple[int, ...]:
        """Spatial extents of the layer's output."""
        dims = zip(self.spatial, self.window, self.strides, self.padding, self.dilation, strict=True)
        return tuple((n + low + high - (r - 1) * d - 1) // s + 1 for n, r, s, (low, high), d in dims)

    @property
    def key(self) -> str:
        """Digest of all that a time depends on, except device and batch size."""
        return keys.convolution(self.to_json())

    @property
    def unit(self) -> int:
        """Smallest number of samples after which image and result are aligned to `ALIGNMENT` bytes again."""
        image = self.item * math.prod(self.spatial) * self.channels
        return ALIGNMENT // math.gcd(ALIGNMENT, image, self.result_bytes)

    @property
    def item(self) -> int:
        """Bytes of an element."""
        return {"float64": 8, "float32": 4}.get(self.dtype, 2)

    @property
    def result_bytes(self) -> int:
        """Bytes of one sample of the layer's output."""
        return self.item * math.prod(self.result) * self.outputs

    @property
    def slices(self) -> tuple[int, ...]:
        """Numbers of equal slices into which the output channels can be divided, ascending; without 1.

        Slices are contiguous in the filter and in every sample of the result, and begin at multiples of `ALIGNMENT`.

        >>> Convolution("forward", 64, 192, (27, 27), (5, 5)).slices
        (2, 3, 4, 6, 8, 12, 16, 24)
        """
        if self.groups > 1 or self.layout != "NCHW":
            return ()
        place, taps = self.result_bytes // self.outputs, self.item * math.prod(self.window) * self.channels
        return tuple(
            n
            for n in range(2, self.outputs // LEAST_SLICE + 1)
            if self.outputs % n == 0 and not any(self.outputs // n * size % ALIGNMENT for size in (place, taps))
        )

    def flops(self, batch: int) -> int:
        """Multiply-adds of a batch, counted twice [FLOP]; the same for the three kinds."""
        count = 2 * batch * self.outputs * (self.channels // self.groups)
        for extent in (*self.result, *self.window):
            count *= extent
        return count

    def to_json(self) -> dict[str, Any]:
        """Plain data; `from_json` makes an equal object of it."""
        return {field.name: _plain(getattr(self, field.name)) for field in fields(self)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Convolution:
        """Raises: UsageError if the data is not a convolution's."""
        try:
            values = {name: _tuple(value) for name, value in data.items()}
            return cls(**values)
        except (TypeError, AttributeError) as error:
            raise UsageError(f"{json.dumps(data, default=str)[:200]} is not a convolution: {error}") from None

    def __str__(self) -> str:
        image = "x".join(map(str, self.spatial))
        window = "x".join(map(str, self.window))
        extra = f" /{max(self.strides)}" * (max(self.strides) > 1) + f" g{self.groups}" * (self.groups > 1)
        return f"{self.kind} {image}x{self.channels} {window}x{self.outputs}{extra} {self.dtype}"


def _integer(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _plain(value: Any) -> Any:
    return [_plain(v) for v in value] if isinstance(value, tuple) else value


def _tuple(value: Any) -> Any:
    return tuple(_tuple(v) for v in value) if isinstance(value, list) else value
