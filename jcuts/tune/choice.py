"""Tuning result of one region: the winner, every time and every rejection, as plain data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from jcuts.base import json_fields
from jcuts.base.errors import CacheError, CandidateRejected

LIBRARY = "xla"
"""Label of the library candidate: the subset left to XLA."""

POSTPONED = "Postponed"
"""Error name of a rejection that stands for a wait in vain: nothing is known about the subset yet."""

UNVERIFIED = "Unverified"
"""Error name of a rejection that stands for a stored choice that was not checked here, where nothing may be."""

OVER_BUDGET = "OverBudget"
"""Error name of a rejection that stands for candidates that were not measured because the time was up."""

ORIGINS = ("measured", "estimated", "library")
SCREENED = "screen"
"""Method of a time from the quick screening alone."""
FAMILY = "family"
"""Method of a time of XLA's side that follows from those of two other problems (`tune.baseline.interpolate`)."""
PROFILED = "profile"
"""Method of a time of XLA's side that a profile of the whole program gives (`tune.baseline.xla_profile`)."""
DERIVED = frozenset({FAMILY, PROFILED})
"""Methods of times that were not measured of the problem's own program."""
UNCHECKED = "unchecked"
"""Method of a time of a candidate that could not win, so that nobody looked whether it is right."""


@dataclass(frozen=True)
class Measurement:
    """Time of one candidate, per execution and free of dispatch overhead.

    Attributes:
        label: the candidate.
        seconds: median [s].
        low, high: first and third quartile [s].
        runs: number of timed samples.
        method: how it was timed (``loop``, ``call`` and ``chain`` go through a jitted JAX callable, ``direct`` does
            not; `FAMILY` and `PROFILED` are of no program of its own; `SCREENED` and `UNCHECKED` are for reports only).
        bound_seconds: lower bound of the estimator [s], 0 where unknown.
        pul: estimator's upper bound on the share of peak, 0 where unknown.
    """

    label: str
    seconds: float
    low: float
    high: float
    runs: int
    method: str
    bound_seconds: float = 0.0
    pul: float = 0.0

    @property
    def is_contest(self) -> bool:
        """Whether it may decide who wins."""
        return self.method not in (SCREENED, UNCHECKED)

    @property
    def spread(self) -> float:
        """Interquartile range over median, >= 0."""
        return (self.high - self.low) / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True)
class Rejection:
    """Why one candidate was rejected: the error class, its sentence and its numbers (JSON values only)."""

    label: str
    error: str
    message: str
    values: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, label: str, error: CandidateRejected) -> Rejection:
        """The rejection that an error stands for; values that JSON lacks become text."""
        return cls(label, type(error).__name__, error.message, plain(error.values))


@dataclass(frozen=True)
class Choice:
    """The tuner's result for one problem.

    Attributes:
        problem: digest of the problem.
        winner: label of the winner; `LIBRARY` leaves the subset to XLA.
        winner_digest: digest of the winning candidate, '' for the library.
        origin: ``measured``, ``estimated`` (``tune="off"``) or ``library`` (nothing known: XLA).
        measurements: a time for every candidate that was measured, the library included.
        rejections: every candidate that is out, with the reason.
        margin: relative noise margin inside which times counted as equal.
        overhead_seconds: cost of dispatching an empty jitted function, reported, not part of the times [s].
        name: human-readable name of the subset.
        kernels: label -> digest of the compiled kernel, for those that were measured and are right (object cache key).
        digests: label -> digest of the candidate, for the same.
        programs: label -> text of the kernel program, for those that some mode chooses: with it nobody has to make the
            candidates again to know the winner.
        schedules: kernel family -> its version, of those that were asked for candidates (`keys.schedules`): the choice
            counts while they are the same.  Choices of older databases have none.
        pinned: it stays the choice in other versions of jcuts, too, where it is right.
        regime: how it was measured, as far as that is not as usual (`tune.measure.regime`).
    """

    problem: str
    winner: str
    winner_digest: str
    origin: str
    measurements: tuple[Measurement, ...] = ()
    rejections: tuple[Rejection, ...] = ()
    margin: float = 0.0
    overhead_seconds: float = 0.0
    name: str = ""
    kernels: dict[str, str] = field(default_factory=dict, hash=False)
    digests: dict[str, str] = field(default_factory=dict, hash=False)
    programs: dict[str, str] = field(default_factory=dict, hash=False, repr=False)
    schedules: dict[str, str] = field(default_factory=dict, hash=False)
    pinned: bool = False
    regime: dict[str, str] = field(default_factory=dict, hash=False)

    @property
    def kernel(self) -> str:
        """Digest of the winner's compiled kernel, '' if it is not known (or the winner is XLA)."""
        return self.kernels.get(self.winner, "")

    @property
    def uses_library(self) -> bool:
        """Whether the subset stays with XLA."""
        return self.winner == LIBRARY

    @property
    def is_postponed(self) -> bool:
        """Whether another process kept the machine or its memory, so that a later call is to measure."""
        return any(r.error == POSTPONED for r in self.rejections)

    @property
    def is_cut(self) -> bool:
        """Whether candidates were not measured because the tuning budget was spent: a later session goes on."""
        return any(r.error == OVER_BUDGET for r in self.rejections)

    @property
    def is_open(self) -> bool:
        """Whether a session with time measures what is missing."""
        return self.is_cut and not self.pinned

    @property
    def unmeasured(self) -> int:
        """How many kernels were not measured because the tuning budget was spent."""
        counts = [r.values.get("kernels", 1) for r in self.rejections if r.error == OVER_BUDGET]
        return sum(count if isinstance(count, int) else 1 for count in counts)

    @property
    def is_unverified(self) -> bool:
        """Whether the database has a choice that is to be checked before it is used."""
        return any(r.error == UNVERIFIED for r in self.rejections)

    def seconds(self, label: str) -> float | None:
        """Measured time of a candidate [s], None if it was not measured."""
        return next((m.seconds for m in self.measurements if m.label == label), None)

    def measured_seconds(self, label: str) -> float | None:
        """The same, None also for a time that follows from those of others, or from a profile."""
        return next((m.seconds for m in self.measurements if m.label == label and m.method not in DERIVED), None)

    def is_enough(self, mode: str) -> bool:
        """Whether a mode can choose by it: those that want a kernel need one that was checked, if there is any."""
        ours = [m for m in self.measurements if m.label != LIBRARY]
        return mode == "mixed" or not ours or any(m.is_contest or m.label in self.kernels for m in ours)

    @property
    def speedup(self) -> float | None:
        """XLA's time over the winner's, None unless both were measured."""
        library, winner = self.seconds(LIBRARY), self.seconds(self.winner)
        return library / winner if library is not None and winner else None

    def with_winner(self, winner: str, winner_digest: str, origin: str | None = None) -> Choice:
        """The same measurements with another winner (another mode)."""
        return replace(self, winner=winner, winner_digest=winner_digest, origin=origin or self.origin)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON value; inverse of `from_json`."""
        data = asdict(self)
        if not self.pinned:
            del data["pinned"]  # which older versions do not know
        if not self.regime:
            del data["regime"]  # nor this
        return data

    @classmethod
    def from_json(cls, data: Any) -> Choice:
        """Reads what `to_json` wrote (or what a person edited).

        Raises:
            CacheError: a field is missing or has an impossible value.
        """
        try:
            odd = sorted(data.keys() - {f.name for f in fields(cls)})
            if odd:
                raise TypeError(f"unknown fields {odd}")
            names = ("kernels", "digests", "programs", "schedules", "regime")
            texts = {name: json_fields.texts(data.get(name, {})) for name in names}
            choice = cls(
                problem=json_fields.text(data["problem"]),
                winner=json_fields.text(data["winner"]),
                winner_digest=json_fields.text(data["winner_digest"]),
                origin=json_fields.text(data["origin"]),
                measurements=tuple(_measurement(m) for m in data.get("measurements", ())),
                rejections=tuple(_rejection(r) for r in data.get("rejections", ())),
                margin=json_fields.non_negative(data.get("margin", 0.0)),
                overhead_seconds=json_fields.non_negative(data.get("overhead_seconds", 0.0)),
                name=json_fields.text(data.get("name", "")),
                pinned=json_fields.flag(data.get("pinned", False)),
                **texts,
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CacheError(f"not a tuning choice: {type(error).__name__}: {error}", found=repr(data)[:200]) from None
        times = [m.seconds for m in choice.measurements]
        if choice.origin not in ORIGINS or not all(t > 0 for t in times):
            raise CacheError(
                f"tuning choice {choice.problem[:12]} has origin={choice.origin!r} and times {times}: times must be "
                f"positive and the origin one of {ORIGINS}",
                problem=choice.problem,
                origin=choice.origin,
                times=times,
            )
        return choice


def describe(choice: Choice) -> dict[str, Any]:
    """One line of a choice for tables: name, winner, times and speed-up."""
    return {
        "name": choice.name or choice.problem[:12],
        "winner": choice.winner,
        "origin": choice.origin,
        "seconds": choice.seconds(choice.winner),
        "xla_seconds": choice.seconds(LIBRARY),
        "speedup": choice.speedup,
        "rejected": len(choice.rejections),
    }


def _measurement(data: Any) -> Measurement:
    made = Measurement(**data)
    numbers = {
        name: json_fields.non_negative(getattr(made, name)) for name in ("seconds", "low", "high", "bound_seconds")
    }
    if isinstance(made.pul, bool) or not isinstance(made.pul, (int, float)) or not math.isfinite(made.pul):
        raise ValueError(f"{repr(made.pul)[:40]} is no estimate")
    if type(made.runs) is not int or made.runs < 0:
        raise ValueError(f"{repr(made.runs)[:40]} runs")
    return replace(made, label=json_fields.text(made.label), method=json_fields.text(made.method), **numbers)


def _rejection(data: Any) -> Rejection:
    made = Rejection(**data)
    if not isinstance(made.values, dict):
        raise TypeError(f"values {repr(made.values)[:40]} of a rejection")
    return replace(
        made,
        label=json_fields.text(made.label),
        error=json_fields.text(made.error),
        message=json_fields.text(made.message),
    )


def plain(values: Mapping[str, object]) -> dict[str, Any]:
    """A copy that JSON can carry: numbers and text stay, other values become their repr; NaN and inf become text."""
    return {str(name): _plain(value) for name, value in values.items()}


def _plain(value: object) -> Any:
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return plain(value)
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        return _plain(value.item())  # type: ignore[attr-defined]  # a NumPy scalar
    return repr(value)[:500]
