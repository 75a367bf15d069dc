"""Time and workspace tables of one convolution by micro-batch size, algorithm and math; divisions of a batch."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from jcuts.base.errors import UsageError
from jcuts.microbatch.convolution import Convolution, admitted

TICK = 1e-12
"""Seconds of one tick.  Solvers add times as whole picoseconds, finer than any clock: sums are exact."""

POLICIES = ("all", "powerOfTwo", "undivided")
_SLICES = "/slices="


def sliced(algorithm: str, slices: int) -> str:
    """Name of an algorithm run on so many slices of the output channels, one after the other.

    >>> sliced("FFT", 3), sliced("FFT", 1)
    ('FFT/slices=3', 'FFT')
    """
    return f"{algorithm}{_SLICES}{slices}" if slices > 1 else algorithm


def unsliced(name: str) -> tuple[str, int]:
    """Algorithm and number of slices of a name: the inverse of `sliced`.

    >>> unsliced("FFT/slices=3"), unsliced("FFT")
    (('FFT', 3), ('FFT', 1))
    """
    algorithm, mark, number = name.partition(_SLICES)
    return (algorithm, int(number)) if mark and number.isdigit() and int(number) > 1 else (name, 1)


def policy_sizes(policy: str, batch: int) -> tuple[int, ...]:
    """Micro-batch sizes that a policy measures, ascending (paper III-B).

    all: 1, 2, ..., B.  powerOfTwo: 1, 2, 4, ..., and B itself.  undivided: B.

    >>> policy_sizes("powerOfTwo", 20)
    (1, 2, 4, 8, 16, 20)

    Raises: UsageError for an unknown policy or a batch < 1.
    """
    check_batch(batch)
    if policy == "all":
        return tuple(range(1, batch + 1))
    if policy == "powerOfTwo":
        powers = {1 << k for k in range(batch.bit_length())}
        return tuple(sorted(powers | {batch}))
    if policy == "undivided":
        return (batch,)
    raise UsageError(f"policy {policy!r} is unknown: choose one of {POLICIES}", policy=policy)


def usable_sizes(sizes: Iterable[int], batch: int, unit: int) -> tuple[int, ...]:
    """Those micro-batch sizes that a division of ``batch`` may use, and the remainder of whole units.

    >>> usable_sizes((1, 2, 4, 8, 16, 20), 20, 8)
    (4, 8, 16, 20)
    """
    rest = batch % unit
    found = {s for s in sizes if s == batch or s % unit in (0, rest)}
    return tuple(sorted(found | ({rest} if rest and len(found) > 1 else set())))


def check_batch(batch: object) -> None:
    """Raises: UsageError unless ``batch`` is an integer >= 1."""
    if not isinstance(batch, int) or isinstance(batch, bool) or batch < 1:
        raise UsageError(f"batch={batch!r} must be an integer >= 1", batch=batch)


def check_bytes(name: str, value: object) -> None:
    """Raises: UsageError unless ``value`` is a number of bytes (less than 2^60), or None."""
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**60):
        raise UsageError(f"{name}={value!r} must be a number of bytes >= 0, or None", **{name: value})


@dataclass(frozen=True)
class MicroConfig:
    """A micro-configuration: ``batch`` samples by one algorithm, with its measured time and workspace.

    Attributes:
        math: a name of `convolution.MATHS`.
        seconds: > 0, finite.
        workspace: bytes.
    """

    batch: int
    algorithm: str
    math: str
    seconds: float
    workspace: int

    def __post_init__(self) -> None:
        check_batch(self.batch)
        if self.workspace is None:
            raise UsageError("workspace=None must be a number of bytes >= 0")
        check_bytes("workspace", self.workspace)
        if not (isinstance(self.seconds, (int, float)) and math.isfinite(self.seconds) and 0 < self.seconds < 1e4):
            raise UsageError(f"seconds={self.seconds!r} must be in (0, 10000)", seconds=self.seconds)

    @property
    def ticks(self) -> int:
        """The time in whole picoseconds, at least 1."""
        return max(1, round(self.seconds / TICK))


@dataclass(frozen=True)
class Division:
    """A configuration of the paper: micro-batches that run one after the other and share one workspace.

    ``parts``: the largest first; equal ones together; last one that is no multiple of the table's unit.
    """

    parts: tuple[MicroConfig, ...]

    @classmethod
    def of(cls, parts: Iterable[MicroConfig], unit: int = 1) -> Division:
        """Orders parts canonically: the largest first, but last one that is no multiple of ``unit``."""

        def key(m: MicroConfig) -> tuple[object, ...]:
            return (m.batch % unit != 0, -m.batch, m.algorithm, m.math, m.workspace, m.seconds)

        return cls(tuple(sorted(parts, key=key)))

    @property
    def batch(self) -> int:
        """Samples of all parts."""
        return sum(part.batch for part in self.parts)

    @property
    def ticks(self) -> int:
        """Time of all parts [ps]."""
        return sum(part.ticks for part in self.parts)

    @property
    def seconds(self) -> float:
        """Time of all parts [s]."""
        return self.ticks * TICK

    @property
    def workspace(self) -> int:
        """The largest part's workspace [B]: parts use it one after the other."""
        return max((part.workspace for part in self.parts), default=0)

    @property
    def offsets(self) -> tuple[tuple[int, MicroConfig], ...]:
        """(first sample, part) of every part: what a caller launches."""
        found, start = [], 0
        for part in self.parts:
            found.append((start, part))
            start += part.batch
        return tuple(found)

    @property
    def runs(self) -> tuple[tuple[int, MicroConfig], ...]:
        """Run-length encoding: (count, part) of equal parts."""
        found: list[tuple[int, MicroConfig]] = []
        for part in self.parts:
            if found and found[-1][1] == part:
                found[-1] = (found[-1][0] + 1, part)
            else:
                found.append((1, part))
        return tuple(found)

    def __str__(self) -> str:
        return " + ".join(f"{n} x {m.batch} {m.algorithm}:{m.math}" for n, m in self.runs)


@dataclass(frozen=True)
class Table:
    """All measurements of one convolution on one device.

    Attributes: unit: micro-batches begin at multiples of so many samples (`Convolution.unit`).
    Raises: UsageError for a math that the dtype does not have, or two entries of one (batch, algorithm, math).
    """

    convolution: Convolution
    micros: tuple[MicroConfig, ...]
    unit: int = 1

    def __post_init__(self) -> None:
        maths = admitted(self.convolution.dtype, _loosest(self.convolution.dtype))
        seen = set()
        for micro in self.micros:
            if micro.math not in maths:
                raise UsageError(f"{self.convolution.dtype} has no math {micro.math!r}: {maths}", math=micro.math)
            key = (micro.batch, micro.algorithm, micro.math)
            if key in seen:
                raise UsageError(f"two times for batch {key[0]}, {key[1]}, {key[2]}", key=key)
            seen.add(key)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Micro-batch sizes with at least one time, ascending."""
        return tuple(sorted({micro.batch for micro in self.micros}))

    def candidates(
        self, batch: int, *, limit: int | None = None, policy: str = "all", precision: str | None = None
    ) -> list[MicroConfig]:
        """Micro-configurations usable for a batch: sizes of the policy, within the limit, exact enough.

        ``undivided`` is one call: it has no slices of the outputs either.
        Args: limit [B], or None; precision: least precision of the arithmetic, by default the dtype's own.
        """
        check_bytes("limit", limit)
        maths = admitted(self.convolution.dtype, precision or self.convolution.dtype)
        sizes = set(policy_sizes(policy, batch))
        return [
            micro
            for micro in self.micros
            if micro.batch in sizes
            and micro.math in maths
            and (limit is None or micro.workspace <= limit)
            and (policy != "undivided" or unsliced(micro.algorithm)[1] == 1)
        ]


def _loosest(dtype: str) -> str:
    """The precision that admits every math of a dtype."""
    return {"float32": "tf32"}.get(dtype, dtype)
