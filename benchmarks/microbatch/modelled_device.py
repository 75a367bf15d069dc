"""Convolutions of the paper's networks, and a made-up device for solvers to work on where none is at hand.

The shapes are real; the times and workspaces of `Modelled` are not measured anywhere.  They have what makes the problem
what it is: fast algorithms with large workspaces that grow with the batch, slow ones without, steps where a batch fills
one more wave of thread blocks, and small batches that use the device badly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from jcuts.microbatch.convolution import Convolution
from jcuts.microbatch.database import Device
from jcuts.microbatch.network import Network, Use
from jcuts.microbatch.timings import MicroConfig, Table

Shape = tuple[int, int, int, int, int]
"""(input extent, input channels, window, output channels, stride); padding keeps the extent at stride 1."""


def alexnet() -> list[Shape]:
    """The one-column AlexNet (2014)."""
    return [(224, 3, 11, 64, 4), (27, 64, 5, 192, 1), (13, 192, 3, 384, 1), (13, 384, 3, 256, 1), (13, 256, 3, 256, 1)]


def resnet(depth: int) -> list[Shape]:
    """ResNet-18, 34, 50, 101 or 152; strides in the first convolution of a block, as published."""
    blocks = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}[depth]
    made: list[Shape] = [(224, 3, 7, 64, 2)]
    extent, channels = 56, 64
    for stage, count in enumerate(blocks):
        width = 64 << stage
        wide = width if depth < 50 else 4 * width
        for block in range(count):
            stride = 2 if stage and not block else 1
            inner = extent // stride
            if depth < 50:
                made += [(extent, channels, 3, width, stride), (inner, width, 3, width, 1)]
            else:
                made += [(extent, channels, 1, width, stride), (inner, width, 3, width, 1), (inner, width, 1, wide, 1)]
            if not block and (stride > 1 or channels != wide):
                made.append((extent, channels, 1, wide, stride))
            extent, channels = inner, wide
    return made


def densenet40(growth: int = 40) -> list[Shape]:
    """DenseNet-40 without bottlenecks, on 32x32 images."""
    made: list[Shape] = [(32, 3, 3, 16, 1)]
    channels = 16
    for block, extent in enumerate((32, 16, 8)):
        for _ in range(12):
            made.append((extent, channels, 3, growth, 1))
            channels += growth
        if block < 2:
            made.append((extent, channels, 1, channels, 1))
    return made


NETWORKS = {
    "AlexNet": alexnet(),
    "ResNet-18": resnet(18),
    "ResNet-50": resnet(50),
    "ResNet-152": resnet(152),
    "DenseNet-40": densenet40(),
}


def convolution(shape: Shape, kind: str, dtype: str = "float32") -> Convolution:
    """One kernel of a layer."""
    extent, channels, window, outputs, stride = shape
    pad = (2, 2) if window == 11 else (window // 2, window // 2)
    return Convolution(
        kind, channels, outputs, (extent, extent), (window, window), (stride, stride), (pad, pad), dtype=dtype
    )


def training_step(name: str, batch: int, dtype: str = "float32") -> Network:
    """Every kernel of a step, one after the other: forward, then per layer from the last backward-filter and -data.

    Nobody needs the gradient of the images.
    """
    shapes = NETWORKS[name]
    uses = [Use(f"conv{k} forward", convolution(shape, "forward", dtype), batch) for k, shape in enumerate(shapes, 1)]
    for k in range(len(shapes), 0, -1):
        for kind in ("backward_filter", "backward_data")[: 2 if k > 1 else 1]:
            uses.append(Use(f"conv{k} {kind}", convolution(shapes[k - 1], kind, dtype), batch))
    return Network(f"{name}, batch {batch}", tuple(uses))


class Modelled:
    """A measurer of the made-up device.

    Args: flops, bytes_: peak rates per second; blocks: thread blocks that run at once.
    """

    def __init__(self, name: str = "made-up", flops: float = 15e12, bytes_: float = 8e11, blocks: int = 160) -> None:
        self.device = Device(name, "0", "no library")
        self.flops, self.bytes, self.blocks = flops, bytes_, blocks

    def __call__(self, convolution: Convolution, batch: int) -> Sequence[MicroConfig]:
        """Every algorithm that takes this convolution."""
        size = 2 if convolution.dtype == "float16" else 4
        c, k = convolution.channels, convolution.outputs
        (high, wide), (p, q), (r, s) = convolution.spatial, convolution.result, convolution.window
        flops = convolution.flops(batch)
        moved = size * (batch * (c * high * wide + k * p * q) + c * k * r * s)
        gemm_n = c * r * s if convolution.kind == "backward_filter" else batch * p * q
        waves = math.ceil(math.ceil(gemm_n / 128) * math.ceil(k / 64) / self.blocks)
        used = math.ceil(gemm_n / 128) * math.ceil(k / 64) / (waves * self.blocks)
        column = size * batch * c * r * s * p * q
        found = [("IMPLICIT_GEMM", 0.30, used, moved, 0), ("PRECOMP_GEMM", 0.50, used, moved, 4 * p * q * r * s)]
        found.append(("GEMM", 0.62, used, moved + 2 * column, column))
        if convolution.strides == (1, 1) and r > 1:
            spectrum = 8 * (batch * (c + k) + c * k)
            full = (2 ** math.ceil(math.log2(high + r))) * (2 ** math.ceil(math.log2(wide + s)) // 2 + 1)
            cheaper = r * s * p * q / (4.0 * full)
            fill = min(1.0, batch * c * k / 2**17)
            found.append(("FFT", 0.45 * cheaper, fill, moved + 2 * spectrum * full, spectrum * full))
            tiles = math.ceil(p / (32 - r + 1)) * math.ceil(q / (32 - s + 1))
            spectrum = 8 * (batch * (c + k) * tiles + c * k) * 32 * 17
            cheaper = r * s * p * q / (4.0 * tiles * 32 * 17)
            found.append(("FFT_TILING", 0.40 * cheaper, fill, moved + 2 * spectrum, spectrum))
            if r == s == 3:
                found.append(("WINOGRAD", 0.95, used, moved, 0 if c < 64 else 36 * size * c * k))
                tiles = batch * math.ceil(p / 4) * math.ceil(q / 4)
                space = 36 * size * (tiles * (c + k) + c * k)
                found.append(("WINOGRAD_NONFUSED", 1.90, min(1.0, tiles / 2048), moved + 2 * space, space))
        return [
            MicroConfig(
                batch,
                name,
                convolution.dtype,
                round((8e-6 + max(flops / (self.flops * rate * max(fill, 1e-3)), traffic / self.bytes)) * 1e9) / 1e9,
                space,
            )
            for name, rate, fill, traffic, space in found
        ]

    def table(self, convolution: Convolution, sizes: Sequence[int]) -> Table:
        """All times of some sizes."""
        return Table(convolution, tuple(micro for size in sizes for micro in self(convolution, size)))
