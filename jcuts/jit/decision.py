"""Decision record: which program variant runs for a call signature, and the store in which it outlives the process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from jcuts.base import json_fields

XLA = "xla"
JCUTS = "jcuts"
# So many processes measure a program again whose decision was taken in noise; then it stays.
MOST_TRIES = 4


class DecisionStore(Protocol):
    """Interface of a persistent store of decisions (``jcuts.tune.database.Store`` is one)."""

    def guard(self, key: str) -> Mapping[str, Any] | None:
        """The decision under ``key``, or None."""
        ...

    def is_own(self, key: str) -> bool:
        """Whether the decision under ``key`` was taken here; one that was imported, or edited, is taken again."""
        ...

    def put_guard(self, key: str, decision: Mapping[str, Any], *, on_gpu: bool = False) -> None:
        """Keep a decision. Args: on_gpu: about programs of a GPU: the host's CPU is no part of it."""
        ...


class MemoryStore:
    """In-memory store: decisions of this process only."""

    def __init__(self) -> None:
        self._kept: dict[str, dict[str, Any]] = {}

    def guard(self, key: str) -> Mapping[str, Any] | None:
        """The decision under ``key``, or None."""
        return self._kept.get(key)

    def is_own(self, key: str) -> bool:
        """All of them are."""
        return True

    def put_guard(self, key: str, decision: Mapping[str, Any], *, on_gpu: bool = False) -> None:
        """Keep a decision."""
        self._kept[key] = dict(decision)


@dataclass(frozen=True)
class Decision:
    """Which program variant runs, and why.

    Attributes:
        chosen: ``xla`` or ``jcuts``, with ``/<form>`` and ``:<options name>`` (`jit.variant_names`).
        reason: one sentence.
        seconds: time per candidate [s]: the median of plain XLA, for the others that time over ``speed``; empty when
            nothing was timed.
        margin: relative difference below which two programs counted as equal.
        rejected: candidates that were out, with the reason.
        measured: whether it rests on a measurement (of this or an earlier process).
        speed: candidate -> how many times as fast as plain XLA, over pairs of neighbouring runs: median and quartiles.
        noisy: the runs scattered too much to decide for good: a later process measures again.
        tries: how many processes have measured.
        deferred: tuning waits for another process; a later call decides.
        partial: kernels were not measured for want of time (``tune_seconds``): a later process decides again, among
            all programs.
        pinned: it stays, in other versions of jcuts, too (`jit.checked_in.pinning`).
        spent: wall time of this first call [s], by what it went into; not stored.
    """

    chosen: str
    reason: str
    seconds: dict[str, float] = field(default_factory=dict)
    margin: float = 0.0
    rejected: dict[str, str] = field(default_factory=dict)
    measured: bool = False
    speed: dict[str, tuple[float, float, float]] = field(default_factory=dict)
    noisy: bool = False
    tries: int = 1
    deferred: bool = False
    partial: bool = False
    pinned: bool = False
    spent: Mapping[str, float] = field(default_factory=dict, compare=False)

    @property
    def is_final(self) -> bool:
        """Whether no later process should measure again."""
        return self.pinned or (not self.partial and (not self.noisy or self.tries >= MOST_TRIES))

    def still_contending(self, names: Sequence[str]) -> list[str]:
        """Of these candidates plain XLA and those that a second look may still prefer (all where nothing was timed).

        Who was timed and is none of them does not count: it follows one that is (`singles`).
        """
        best = max((self.speed[n][0] for n in names if n in self.speed), default=0.0)
        return [n for n in names if n == XLA or not self.speed or self.speed.get(n, (0.0,) * 3)[2] > 0.9 * best]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for the database and for ``explain``."""
        return {
            "chosen": self.chosen,
            "reason": self.reason,
            "seconds": dict(self.seconds),
            "margin": self.margin,
            "rejected": dict(self.rejected),
            "measured": self.measured,
            "speed": {k: list(v) for k, v in self.speed.items()},
            "noisy": self.noisy,
            "tries": self.tries,
            "is_final": self.is_final,
            **({"partial": True} if self.partial else {}),
            **({"pinned": True} if self.pinned else {}),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Decision | None:
        """The decision, or None if the stored data has another form."""
        try:
            if not data.keys() <= {
                "chosen",
                "reason",
                "seconds",
                "margin",
                "rejected",
                "measured",
                "speed",
                "noisy",
                "tries",
                "is_final",
                "partial",
                "pinned",
            }:
                return None
            speed = {
                json_fields.text(k): tuple(map(json_fields.non_negative, v)) for k, v in data.get("speed", {}).items()
            }
            return cls(
                json_fields.text(data["chosen"]),
                json_fields.text(data["reason"]),
                {json_fields.text(k): json_fields.non_negative(v) for k, v in data["seconds"].items()},
                json_fields.non_negative(data["margin"]),
                {json_fields.text(k): json_fields.text(v) for k, v in data["rejected"].items()},
                json_fields.flag(data["measured"]),
                {k: (v[0], v[1], v[2]) for k, v in speed.items()},
                json_fields.flag(data.get("noisy", False)),
                int(json_fields.non_negative(data.get("tries", 1))),
                partial=json_fields.flag(data.get("partial", False)),
                pinned=json_fields.flag(data.get("pinned", False)),
            )
        except (AttributeError, KeyError, TypeError, ValueError, IndexError):
            return None


class _Default:
    """Where decisions are kept from now on, and how often that was set."""

    store: DecisionStore | None = None
    changes = 0


def set_default_store(store: DecisionStore | None) -> None:
    """Where every ``Optimized`` keeps decisions from now on; None for the user's tuning database."""
    _Default.store, _Default.changes = store, _Default.changes + 1


def default_store() -> DecisionStore | None:
    """What `set_default_store` has set; None for the user's tuning database."""
    return _Default.store


def default_stores() -> int:
    """How often the default store was set."""
    return _Default.changes
