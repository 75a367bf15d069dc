"""The report of `jcuts.verify` as plain data: verdicts of every way, and what bisection found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from jcuts.differential.judge import OK, SPECIAL
from jcuts.differential.session import CRASHED, ERROR, HUNG, NO_REFERENCE

GOOD = (OK, NO_REFERENCE)
"""States in which nothing is known to be wrong."""


@dataclass(frozen=True)
class WayReport:
    """One way of running the function.

    Attributes:
        way, about: name and meaning.
        status: ``ok``, ``wrong``, ``special values``, ``crashes``, ``hangs``, ``error`` or ``no reference``.
        message: the broken rule, the signal, or the error.
        outputs: errors of every output (`judge.OutputErrors` as data).
        seconds: what it took, compilation included [s].
        equation: where a run equation by equation ended, if it did.
        kernels: calls of jcuts' kernels, None where jcuts did not run.
    """

    way: str
    about: str
    status: str
    message: str = ""
    outputs: tuple[Mapping[str, Any], ...] = ()
    seconds: float = 0.0
    equation: int | None = None
    kernels: int | None = None

    @classmethod
    def of(cls, way: str, about: str, answer: Mapping[str, Any]) -> WayReport:
        """From the answer of a child process."""
        return cls(
            way,
            about,
            answer["status"],
            answer.get("message", ""),
            tuple(answer.get("outputs", ())),
            answer.get("seconds", 0.0),
            answer.get("equation"),
            answer.get("notes", {}).get("kernels"),
        )

    @property
    def is_wrong(self) -> bool:
        """Whether something is known to be wrong."""
        return self.status not in GOOD


@dataclass(frozen=True)
class Finding:
    """What bisection found for one way that is wrong.

    Attributes:
        way: whose program is wrong; status, message: of the part that was found.
        equations: numbers of the equations of the smallest part that is wrong by itself.
        primitives, where: of these equations; user source lines, each once.
        alone: whether one equation, run by itself on right operands, is wrong.
        options: compiler options that make the part right, each by itself, with the reason of the registry.
        passes: HLO passes whose absence makes the part right.
        runs: how many runs it took.
    """

    way: str
    status: str
    message: str
    equations: tuple[int, int]
    primitives: tuple[str, ...]
    where: tuple[str, ...]
    alone: bool = False
    options: tuple[tuple[str, str], ...] = ()
    passes: tuple[str, ...] = ()
    runs: int = 0


@dataclass(frozen=True)
class VerifyReport:
    """What `jcuts.verify` found out about one function.

    Attributes:
        refused_options: options of the registry that the installed jaxlib does not know.
        findings: bisections of what is wrong; notes: what could not be done.
        reproducer: path of the file that fails without jcuts, '' if none was written.
        seconds: of everything [s].
    """

    name: str
    platform: str
    versions: Mapping[str, str]
    equations: int
    seeds: int
    special: bool
    refused_options: tuple[str, ...] = ()
    ways: tuple[WayReport, ...] = ()
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()
    reproducer: str = ""
    seconds: float = field(default=0.0, compare=False)

    @property
    def wrong(self) -> tuple[WayReport, ...]:
        """The ways that are wrong."""
        return tuple(way for way in self.ways if way.is_wrong)

    def of(self, way: str) -> WayReport | None:
        """The report of a way, None where it was not run."""
        return next((w for w in self.ways if w.way == way), None)

    def timed(self, seconds: float) -> VerifyReport:
        """The report with the time of everything [s]."""
        return replace(self, seconds=seconds)

    def noted(self, note: str) -> VerifyReport:
        """The report with a note more."""
        return replace(self, notes=(*self.notes, note))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        return asdict(self)

    @property
    def verdict(self) -> str:
        """One sentence: who is wrong."""
        wrong = self.wrong
        if not wrong:
            unknown = [way.way for way in self.ways if way.status == NO_REFERENCE]
            return f"not known: no float64 reference for {', '.join(unknown)}" if unknown else "every way is right"
        parts = []
        for status, verb in (
            (CRASHED, "crash"),
            (HUNG, "hang"),
            (ERROR, "fail"),
            ("wrong", "are wrong"),
            (SPECIAL, "differ on special values (NaN, infinities, denormals) alone"),
        ):
            names = [way.way for way in wrong if way.status == status]
            if names:
                parts.append(f"{_listed(names)} {_singular(verb) if len(names) == 1 else verb}")
        right = [way.way for way in self.ways if way.status == OK]
        rest = f"; {_listed(right)} {'is' if len(right) == 1 else 'are'} right" if right else ""
        return ", ".join(parts) + rest

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.verdict}"]
        lines += [f"  {w.way}: {w.status}{f' ({w.message})' if w.message else ''}" for w in self.ways]
        lines += [f"  {finding_text(f)}" for f in self.findings]
        lines += [f"  note: {note}" for note in self.notes]
        if self.reproducer:
            lines.append(f"  reproducer: {self.reproducer}")
        return "\n".join(lines)


def finding_text(found: Finding) -> str:
    """One line per finding: the equations with their source lines, then options and passes."""
    first, last = found.equations
    place = f"equation {first}" if last - first == 1 else f"equations {first} to {last - 1}"
    counted: dict[str, int] = {}
    for name in found.primitives:
        counted[name] = counted.get(name, 0) + 1
    names = ", ".join(name if count == 1 else f"{count} {name}" for name, count in counted.items())
    alone = ", by itself, op by op" if found.alone else ""
    lines = f" [{'; '.join(found.where[:3])}]" if found.where else ""
    text = f"{found.way} is bisected to {place} ({names}){alone}{lines}"
    if found.options:
        text += "; right with " + " or ".join(f"{option} ({reason})" for option, reason in found.options)
    if found.passes:
        text += f"; right without the HLO pass {' or '.join(found.passes)}"
    return text


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _singular(verb: str) -> str:
    return {"crash": "crashes", "hang": "hangs", "fail": "fails", "are wrong": "is wrong"}.get(
        verb, verb.replace("differ ", "differs ")
    )
