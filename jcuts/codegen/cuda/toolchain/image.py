"""The CUDA code generator's output: a cubin and its launch records, packed into one byte string.

The bytes take the place of object code in a `CompiledKernel`, so that kernels of both platforms share the object cache,
the tuner's protocol and everything that carries them.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from jcuts.base.errors import CacheError

MAGIC = b"jcuts cuda image 1\n"
SYMBOL = "cuda"
"""``CompiledKernel.symbol`` of a kernel whose object code is an image."""

Dim = tuple[int, int, int]


@dataclass(frozen=True)
class Resources:
    """Resource usage of one kernel, from its cubin: registers and stack bytes per thread, static shared bytes per
    block.
    """

    registers: int
    stack: int
    shared: int
    spills: int = 0


@dataclass(frozen=True)
class Launch:
    """One kernel launch.

    Attributes:
        arguments: pairs: operand or result number and 0, or -1 and an offset into the scratch memory.
        shared: dynamic shared memory of a block [B].
        waits: whether it may be launched before the kernel in front of it has ended (`programmatic_launch`).
    """

    symbol: str
    grid: Dim
    block: Dim
    arguments: tuple[tuple[int, int], ...]
    shared: int = 0
    cluster: Dim = (1, 1, 1)
    cooperative: bool = False
    waits: bool = False
    resources: Resources = Resources(0, 0, 0)


@dataclass(frozen=True)
class Image:
    """Cubin and launch records of one call.  ``arch`` is the architecture of the cubin, e.g. ``sm_90``."""

    arch: str
    region: str
    launches: tuple[Launch, ...]
    cubin: bytes

    def pack(self) -> bytes:
        """The image as bytes."""
        head = {"arch": self.arch, "region": self.region, "launches": [asdict(x) for x in self.launches]}
        return MAGIC + json.dumps(head, sort_keys=True, separators=(",", ":")).encode() + b"\n" + self.cubin

    @staticmethod
    def unpack(data: bytes) -> Image:
        """The inverse of `pack`. Raises CacheError for anything else."""
        if not is_image(data):
            raise CacheError("not a CUDA kernel image")
        line, _, cubin = data[len(MAGIC) :].partition(b"\n")
        try:
            head = json.loads(line)
            launches = tuple(_launch(x) for x in head["launches"])
            return Image(str(head["arch"]), str(head["region"]), launches, cubin)
        except (ValueError, KeyError, TypeError) as error:
            raise CacheError(f"a CUDA kernel image that cannot be read: {error!r}") from error


def is_image(data: bytes) -> bool:
    """Whether these bytes are a CUDA image (and not an object file for a CPU)."""
    return data.startswith(MAGIC)


def _launch(data: dict) -> Launch:
    return Launch(
        symbol=str(data["symbol"]),
        grid=_dim(data["grid"]),
        block=_dim(data["block"]),
        arguments=tuple((int(b), int(o)) for b, o in data["arguments"]),
        shared=int(data["shared"]),
        cluster=_dim(data["cluster"]),
        cooperative=bool(data["cooperative"]),
        waits=bool(data.get("waits", False)),
        resources=Resources(**{k: int(v) for k, v in data["resources"].items()}),
    )


def _dim(data: list) -> Dim:
    x, y, z = (int(n) for n in data)
    return x, y, z
