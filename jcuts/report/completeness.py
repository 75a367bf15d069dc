"""What a report lacks of measurements, as the error that ``require="complete"`` raises."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jcuts.base import knobs
from jcuts.base.errors import IncompleteTuning
from jcuts.report.report_data import (
    NO_TIME,
    NOT_CHECKED,
    NOT_MEASURED,
    ReportData,
)
from jcuts.tune.choice import LIBRARY

MOST_LISTED = 8
BY_ESTIMATE = "not measured, or not checked here: a kernel would run by estimate"


def unmeasured(report: ReportData) -> list[str]:
    """The regions that nothing usable is known of, each with the reason."""
    found = []
    for subset in report.subsets:
        by_estimate = subset.chosen != LIBRARY and not subset.source
        if by_estimate or subset.why in (NOT_MEASURED, NOT_CHECKED, NO_TIME):
            why = BY_ESTIMATE if by_estimate else subset.why
            found.append(f"{subset.name} ({'; '.join(subset.where[:2])}): {why}")
    return found


def incomplete(name: str, types: Sequence[Any], missing: Sequence[str]) -> IncompleteTuning:
    """The error that lists what is missing for a call. Args: types: of its arguments."""
    listed = "".join(f"\n  {what}" for what in missing[:MOST_LISTED])
    more = len(missing) - MOST_LISTED
    left = f"\n  and {more} more" if more > 0 else ""
    folders = ", ".join(knobs.current().databases) or "none in JCUTS_DATABASES"
    shapes = ", ".join(map(str, types[-3:]))
    return IncompleteTuning(
        f"{name}(..., {shapes}) is not completely tuned for this machine and these versions; missing:{listed}{left}\n"
        f"`jcuts tune`, or a call without require='complete', measures it (database: {knobs.current().cache_dir}, "
        f"folders: {folders})",
        function=name,
        missing=tuple(missing),
    )
