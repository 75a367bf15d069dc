"""The phases that are measured: sizes, tiles, packed weights and float64 references; the CUDA side is `phases.cuh`.

Every phase has an input, an output, constants and tiles.  Tiles are for one block per multiprocessor (about 130 of
them) or, `fine`, for two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

CHUNK = 2048
"""Floats of weights that one bulk copy brings."""
GEMV_COLUMNS = 8
GEMV_TERMS = 256
POOL_CHANNELS = 16
TAPS = 9
"""Of a 3x3 window."""


class Geometry(NamedTuple):
    """Tiles of a phase; chunks of weights of a tile; counters of its rows, and how many tiles count in each."""

    tiles: int
    row_tiles: int
    chunks: int
    ranges: int
    range_rows: int
    target: int


def rounded(x: np.ndarray) -> np.ndarray:
    """Float32 values to TF32, halves away from zero (``cvt.rna.tf32``)."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)


def patches(x: np.ndarray) -> np.ndarray:
    """im2col of a 3x3 window with padding 1. Args: x: [H, W, C]. Returns: [H, W, 9, C]."""
    height, width, _ = x.shape
    wide = np.pad(x, ((1, 1), (1, 1), (0, 0)))
    return np.stack([wide[k // 3 : k // 3 + height, k % 3 : k % 3 + width] for k in range(TAPS)], 2)


@dataclass(frozen=True)
class Phase:
    """One phase. Args: source: the phase whose output it reads ("" the one before it); side: of a second operand."""

    name: str
    source: str = ""
    side: str = ""
    kind = ""

    def body(self, fine: bool, tag: int = -1) -> str:
        """The C++ type of its body. Args: tag: makes the code of equal bodies distinct."""
        raise NotImplementedError

    def geometry(self, fine: bool) -> Geometry:
        """Its tiles."""
        raise NotImplementedError

    def shape(self) -> tuple[int, ...]:
        """Of the output; of a product in parts with the parts first."""
        raise NotImplementedError

    def constants(self, rng: np.random.Generator) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Weights as a matrix [K, N], and small operands such as a bias."""
        return None, None

    def packed(self, weights: np.ndarray, fine: bool) -> np.ndarray:
        """The weights in the order in which tiles read them: chunks of 2,048 floats."""
        raise NotImplementedError

    def reference(self, x: np.ndarray, side: np.ndarray, weights: np.ndarray, small: np.ndarray) -> np.ndarray:
        """The output in float64 from float32 operands."""
        raise NotImplementedError


@dataclass(frozen=True)
class Matmul(Phase):
    """1x1 convolution, 3x3 convolution (implicit GEMM), product of a few rows: TF32 with rounded operands."""

    size: tuple[int, int] = (1, 1)
    channels: tuple[int, int] = (1, 1)
    taps: int = 1
    tile: tuple[int, int] = (32, 64)
    split: int = 1
    partial: bool = False
    relu: bool = True

    @property
    def kind(self) -> str:  # type: ignore[override]
        """Convolution of 1x1 or 3x3, or few rows; split-K or not."""
        name = "3x3 convolution" if self.taps == TAPS else "1x1 convolution" if self.size[0] > 1 else "few-row GEMM"
        return name + (", partial sums" if self.partial else ", split-K" if self.split > 1 else "")

    @property
    def rows(self) -> int:
        return self.size[0] * self.size[1]

    def tiled(self, fine: bool) -> tuple[int, int]:
        """Rows and columns of a tile."""
        rows, columns = self.tile
        if not fine:
            return rows, columns
        return (rows // 2, columns) if rows > 16 else (rows, min(columns, 32))

    def body(self, fine: bool, tag: int = -1) -> str:
        sizes = (*self.size, self.rows, *self.channels, self.taps, *self.tiled(fine), self.split)
        return f"Matmul<{', '.join(map(str, (*sizes, int(self.partial), int(self.relu), tag)))}>"

    def geometry(self, fine: bool) -> Geometry:
        rows, columns = self.tiled(fine)
        row_tiles, column_tiles = -(-self.rows // rows), self.channels[1] // columns
        chunks = self.taps * self.channels[0] // self.split * columns // CHUNK
        target = column_tiles * (self.split if self.partial else 1)
        return Geometry(row_tiles * column_tiles * self.split, row_tiles, chunks, row_tiles, rows, target)

    def shape(self) -> tuple[int, ...]:
        found = (self.rows, self.channels[1])
        return (self.split, *found) if self.partial else found

    def constants(self, rng: np.random.Generator) -> tuple[np.ndarray | None, np.ndarray | None]:
        terms = self.taps * self.channels[0]
        weights = rng.standard_normal((terms, self.channels[1]), np.float32) * np.float32((2 / terms) ** 0.5)
        return weights, rng.standard_normal(self.channels[1], np.float32)

    def packed(self, weights: np.ndarray, fine: bool) -> np.ndarray:
        """As the fragments of ``mma.m16n8k8``: a lane's values of two column groups are 16 bytes."""
        columns = self.tiled(fine)[1]
        steps = CHUNK // columns // 8
        blocks = rounded(weights).reshape(self.split, -1, steps, 2, 4, self.channels[1] // columns, columns // 16, 2, 8)
        return np.ascontiguousarray(blocks.transpose(5, 0, 1, 2, 6, 8, 4, 7, 3)).reshape(-1)

    def reference(self, x: np.ndarray, side: np.ndarray, weights: np.ndarray, small: np.ndarray) -> np.ndarray:
        height, width = self.size
        image = rounded(x.reshape(-1, self.channels[0])[: self.rows])
        if self.taps == TAPS:
            image = patches(image.reshape(height, width, -1)).reshape(self.rows, -1)
        left = image.astype(np.float64).reshape(self.rows, self.split, -1).transpose(1, 0, 2)
        parts = left @ rounded(weights).astype(np.float64).reshape(self.split, -1, self.channels[1])
        if self.partial:
            return parts
        found = parts.sum(0) + small
        return np.maximum(found, 0) if self.relu else found


@dataclass(frozen=True)
class Depthwise(Phase):
    """Depthwise 3x3 with padding 1, bias and ReLU."""

    size: tuple[int, int] = (1, 1)
    channels: int = 1
    stride: int = 1
    block: int = 64
    kind = "depthwise 3x3"

    def tiled(self, fine: bool) -> int:
        """Channels of a tile, which is one row."""
        return 32 if fine else self.block

    def body(self, fine: bool, tag: int = -1) -> str:
        sizes = (*self.size, self.channels, self.stride, self.tiled(fine), 1, tag)
        return f"Depthwise<{', '.join(map(str, sizes))}>"

    def geometry(self, fine: bool) -> Geometry:
        rows, blocks = self.size[0] // self.stride, self.channels // self.tiled(fine)
        return Geometry(rows * blocks, rows, 0, rows, self.size[1] // self.stride, blocks)

    def shape(self) -> tuple[int, ...]:
        return self.size[0] // self.stride * (self.size[1] // self.stride), self.channels

    def constants(self, rng: np.random.Generator) -> tuple[np.ndarray | None, np.ndarray | None]:
        return None, rng.standard_normal((TAPS + 1, self.channels), np.float32) * np.float32(0.5)

    def reference(self, x: np.ndarray, side: np.ndarray, weights: np.ndarray, small: np.ndarray) -> np.ndarray:
        wide = patches(x.reshape(*self.size, self.channels).astype(np.float64))[:: self.stride, :: self.stride]
        filters = small.reshape(TAPS + 1, -1).astype(np.float64)
        return np.maximum((wide * filters[:TAPS]).sum(2) + filters[TAPS], 0).reshape(-1, self.channels)


@dataclass(frozen=True)
class Rows(Phase):
    """Phases whose tile is a few whole rows: residual, layer norm, sum of split-K parts."""

    rows: int = 1
    channels: int = 1
    step: int = 2

    def geometry(self, fine: bool) -> Geometry:
        tiles = -(-self.rows // self.step)
        return Geometry(tiles, tiles, 0, tiles, self.step, 1)

    def shape(self) -> tuple[int, ...]:
        return self.rows, self.channels


@dataclass(frozen=True)
class Add(Rows):
    """ReLU of a sum of two tensors."""

    kind = "residual"

    def body(self, fine: bool, tag: int = -1) -> str:
        return f"Add<{self.rows}, {self.channels}, {self.step}, {tag}>"

    def reference(self, x: np.ndarray, side: np.ndarray, weights: np.ndarray, small: np.ndarray) -> np.ndarray:
        return np.maximum(x.astype(np.float64) + side, 0)


@dataclass(frozen=True)
class Norm(Rows):
    """Layer norm of rows."""

    kind = "layer norm"

    def body(self, fine: bool, tag: int = -1) -> str:
        return f"Norm<{self.rows}, {self.channels}, {tag}>"

    def constants(self, rng: np.random.Generator) -> tuple[np.ndarray | None, np.ndarray | None]:
        return None, rng.standard_normal((2, self.channels), np.float32)

    def reference(self, x: np.ndarray, side: np.ndarray, weights: np.ndarray, small: np.ndarray) -> np.ndarray:
        wide, (scale, offset) = x.astype(np.float64), small.reshape(2, -1)
        deviation = wide - wide.mean(1, keepdims=True)
        return deviation / np.sqrt((deviation**2).mean(1, keepdims=True) + 1e-5) * scale + offset


@dataclass(frozen=True)
class SumParts(Rows):
    """Sum of the parts of a split-K product, bias and ReLU."""

    parts: int = 1
    kind = "sum of split-K parts"

    def body(self, fine: bool, tag: int = -1) -> str:
        return f"SumParts<{self.rows}, {self.channels}, {self.parts}, {self.step}, {tag}>"

    def constants(self, rng: np.random.Generator) -> tuple[np.ndarray | None, np.ndarray | None]:
        return None, rng.standard_normal(self.channels, np.float32)

    def reference(self, x: np.ndarray, side: np.ndarray, weights: np.ndarray, small: np.ndarray) -> np.ndarray:
        return np.maximum(x.astype(np.float64).sum(0) + small, 0)


@dataclass(frozen=True)
class Pool(Phase):
    """Global average pool."""

    pixels: int = 1
    channels: int = 1
    kind = "global average pool"

    def body(self, fine: bool, tag: int = -1) -> str:
        return f"Pool<{self.pixels}, {self.channels}, {tag}>"

    def geometry(self, fine: bool) -> Geometry:
        tiles = self.channels // POOL_CHANNELS
        return Geometry(tiles, 1, 0, 1, 1, tiles)

    def shape(self) -> tuple[int, ...]:
        return 1, self.channels

    def reference(self, x: np.ndarray, side: np.ndarray, weights: np.ndarray, small: np.ndarray) -> np.ndarray:
        return x.astype(np.float64).mean(0, keepdims=True)


@dataclass(frozen=True)
class Gemv(Phase):
    """A vector times a matrix, and bias; float32."""

    terms: int = 1
    columns: int = 1
    kind = "GEMV"

    def body(self, fine: bool, tag: int = -1) -> str:
        return f"Gemv<{self.terms}, {self.columns}, {tag}>"

    def geometry(self, fine: bool) -> Geometry:
        tiles = self.columns // GEMV_COLUMNS
        return Geometry(tiles, 1, self.terms // GEMV_TERMS, 1, 1, tiles)

    def shape(self) -> tuple[int, ...]:
        return 1, self.columns

    def constants(self, rng: np.random.Generator) -> tuple[np.ndarray | None, np.ndarray | None]:
        weights = rng.standard_normal((self.terms, self.columns), np.float32) * np.float32(self.terms**-0.5)
        return weights, rng.standard_normal(self.columns, np.float32)

    def packed(self, weights: np.ndarray, fine: bool) -> np.ndarray:
        blocks = weights.reshape(-1, GEMV_TERMS, self.columns // GEMV_COLUMNS, GEMV_COLUMNS)
        return np.ascontiguousarray(blocks.transpose(2, 0, 3, 1)).reshape(-1)

    def reference(self, x: np.ndarray, side: np.ndarray, weights: np.ndarray, small: np.ndarray) -> np.ndarray:
        return x.astype(np.float64) @ weights.astype(np.float64) + small


@dataclass(frozen=True)
class Nothing(Phase):
    """A phase without work: what the barrier and the walk over the list cost."""

    kind = "nothing"

    def body(self, fine: bool, tag: int = -1) -> str:
        return "Nothing"

    def geometry(self, fine: bool) -> Geometry:
        return Geometry(128, 128, 0, 128, 1, 1)

    def shape(self) -> tuple[int, ...]:
        return (1,)


INPUT = (784, 64)
"""Shape of what the first phase reads: 28 x 28 pixels of 64 channels."""
MOBILE = (
    Matmul("expand 28x28 64-192", size=(28, 28), channels=(64, 192)),
    Depthwise("window 28x28x192", size=(28, 28), channels=192),
    Matmul("project 28x28 192-64", size=(28, 28), channels=(192, 64), tile=(16, 32), relu=False),
    Add("residual 28x28x64", side="input", rows=784, channels=64, step=8),
    Matmul("expand 28x28 64-256", size=(28, 28), channels=(64, 256)),
    Depthwise("window 28x28x256 stride 2", size=(28, 28), channels=256, stride=2, block=32),
)
CONVOLUTIONS = (
    Matmul("conv 14x14 256-256", size=(14, 14), channels=(256, 256), taps=TAPS, tile=(64, 64), split=8),
    Matmul("conv 14x14 in parts", size=(14, 14), channels=(256, 256), taps=TAPS, tile=(64, 64), split=8, partial=True),
    SumParts("sum of 8 parts", rows=196, channels=256, parts=8),
    Matmul("expand 14x14 256-1024", size=(14, 14), channels=(256, 1024), relu=False),
    Norm("layer norm 196x1024", rows=196, channels=1024),
    Add("residual 14x14x1024", side="expand 14x14 256-1024", rows=196, channels=1024),
    Matmul("few rows 8 1024-1024", size=(1, 8), channels=(1024, 1024), tile=(16, 32), split=4),
    Matmul("reduce 14x14 1024-256", "residual 14x14x1024", size=(14, 14), channels=(1024, 256), tile=(64, 64), split=8),
)
LAST = (
    Depthwise("window 14x14x256", size=(14, 14), channels=256, block=32),
    Matmul("expand 14x14 256-512", size=(14, 14), channels=(256, 512), tile=(32, 32)),
    Depthwise("window 14x14x512 stride 2", size=(14, 14), channels=512, stride=2, block=32),
    Matmul("conv 7x7 512-512", size=(7, 7), channels=(512, 512), taps=TAPS, tile=(64, 64), split=16),
    Matmul("expand 7x7 512-2048", size=(7, 7), channels=(512, 2048), tile=(16, 64)),
    Pool("average pool 7x7x2048", pixels=49, channels=2048),
    Gemv("dense 2048-1000", terms=2048, columns=1000),
)
SEQUENCE: tuple[Phase, ...] = MOBILE + CONVOLUTIONS + LAST
NOTHING = Nothing("nothing")
BODIES: tuple[Phase, ...] = (*SEQUENCE, NOTHING)
COPIES = 20
"""Bodies of equal work and distinct code."""
COPIED: tuple[Phase, ...] = (SEQUENCE[9], SEQUENCE[1])
