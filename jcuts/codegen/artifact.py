"""Output of the code generator: one compiled kernel (object code and its ABI data) as a plain record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jcuts.base.errors import IRError

Aval = tuple[tuple[int, ...], str]
"""Shape and dtype name of one row-major buffer, e.g. ``((1, 56, 56, 64), "float32")``."""


@dataclass(frozen=True)
class CompiledKernel:
    """Object code of one kernel and what a caller must know to run it.

    The kernel ABI is ``void symbol(void** buffers, int64 tile_begin, int64 tile_end, void* scratch)``; ``buffers`` are
    the operands, then the results (docs/architecture.md, "Kernel ABI").

    Attributes:
        digest: content hash of the program, the target and the compilers; names the kernel in HLO and on disk.
        symbol: name of the entry point in ``object_code``.
        object_code: a relocatable ELF file, self-contained but for libm symbols.
        tiles: number of independent tiles, >= 1.
        scratch_bytes: private scratch per running thread [B]; 0 if none.
        inputs: shape and dtype name of every operand.
        outputs: shape and dtype name of every result, at least one.
    """

    digest: str
    symbol: str
    object_code: bytes = field(repr=False)
    tiles: int
    scratch_bytes: int
    inputs: tuple[Aval, ...]
    outputs: tuple[Aval, ...]

    def __post_init__(self) -> None:
        if not self.digest or not self.symbol:
            raise IRError(
                f"a compiled kernel needs a digest and a symbol, got digest={self.digest!r} symbol={self.symbol!r}",
                digest=self.digest,
                symbol=self.symbol,
            )
        if self.tiles < 1 or self.scratch_bytes < 0 or not self.outputs:
            raise IRError(
                f"kernel {self.digest}: tiles={self.tiles} must be >= 1, scratch_bytes={self.scratch_bytes} >= 0, and "
                f"there must be an output (there are {len(self.outputs)})",
                digest=self.digest,
                tiles=self.tiles,
                scratch_bytes=self.scratch_bytes,
            )

    def header(self) -> dict[str, Any]:
        """Everything but the object code, as JSON data: what the files of kernels begin with."""
        return {
            "digest": self.digest,
            "symbol": self.symbol,
            "tiles": self.tiles,
            "scratch_bytes": self.scratch_bytes,
            "inputs": self.inputs,
            "outputs": self.outputs,
        }

    @classmethod
    def from_header(cls, header: Mapping[str, Any], object_code: bytes) -> CompiledKernel:
        """The inverse of `header`.

        Raises: KeyError, TypeError, ValueError, IRError where it is none.
        """
        return cls(
            digest=str(header["digest"]),
            symbol=str(header["symbol"]),
            object_code=object_code,
            tiles=int(header["tiles"]),
            scratch_bytes=int(header["scratch_bytes"]),
            inputs=_avals(header["inputs"]),
            outputs=_avals(header["outputs"]),
        )


def _avals(value: object) -> tuple[Aval, ...]:
    if not isinstance(value, list):
        raise ValueError("shapes are not a list")
    return tuple((tuple(int(n) for n in shape), str(dtype)) for shape, dtype in value)
