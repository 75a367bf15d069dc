"""What planning a function came to: its forms, and what is known of each before whole programs are compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from jcuts.base.settings import Variant
from jcuts.jit import variant_space
from jcuts.microbatch.report import DivisionReport
from jcuts.pipeline.outcome import Outcome
from jcuts.xla.chains import fuse as chains_fuse


@dataclass(frozen=True)
class PlanningResult:
    """What planning a function came to.

    Attributes:
        outcomes: of every form that was planned: one that could not be measured may change nothing.
        racing: the forms whose programs may race, the plainest first.
        rows: their convolutions under a workspace limit.
        behind: those of them that are left out, with the reason.
        joined: kernels in chains of two or more, as often as they run, of the forms that have any.
    """

    outcomes: Sequence[Outcome]
    racing: Sequence[Variant | None]
    rows: Mapping[Variant | None, Sequence[DivisionReport]]
    behind: Mapping[Variant | None, str] = field(default_factory=dict)
    joined: Mapping[Variant | None, float] = field(default_factory=dict)

    @classmethod
    def plain(cls, outcomes: Sequence[Outcome], uses_jcuts: bool) -> PlanningResult:
        """The plain form alone, of a function in one part or several."""
        rows: dict[Variant | None, Sequence[DivisionReport]] = {None: [row for o in outcomes for row in _divisions(o)]}
        return cls(outcomes, [None] if uses_jcuts else [], rows, joined=_joined({None: outcomes}))

    @classmethod
    def of_forms(cls, found: Mapping[Variant | None, Outcome], outcomes: Sequence[Outcome]) -> PlanningResult:
        """Several forms. Args: found: outcomes of those that may race; outcomes: of all."""
        rows = {form: _divisions(outcome) for form, outcome in found.items()}
        joined = _joined({form: [outcome] for form, outcome in found.items()})
        return cls(outcomes, list(found), rows, variant_space.dominated_variants(found), joined)

    @property
    def uses_jcuts(self) -> bool:
        """Whether any form has a kernel."""
        return bool(self.racing)


def _joined(outcomes: Mapping[Variant | None, Sequence[Outcome]]) -> dict[Variant | None, float]:
    counts = {form: sum(chains_fuse.joined(outcome.closed) for outcome in mine) for form, mine in outcomes.items()}
    return {form: count for form, count in counts.items() if count}


def _divisions(outcome: Outcome) -> Sequence[DivisionReport]:
    return outcome.report.divisions
