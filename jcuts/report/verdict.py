"""What a report leads with: the verdict on the whole function, its gain, and the regions that matter most."""

from __future__ import annotations

from dataclasses import dataclass

from jcuts.microbatch.report import microseconds
from jcuts.report.report_data import (
    NO_TIME,
    NOT_CHECKED,
    NOT_MEASURED,
    ReportData,
    operations_text,
)

REGIONS = 3


@dataclass(frozen=True)
class Verdict:
    """One sentence, and the gain over plain ``jax.jit``: None where it is not known, 0 where plain XLA runs."""

    text: str
    gain: float | None


@dataclass(frozen=True)
class RegionLine:
    """A region that matters, in words. Attributes: gained: whether its kernel runs and is faster."""

    operations: str
    gain: str
    times: str
    where: str
    gained: bool


def verdict(report: ReportData) -> Verdict:
    """Whether jcuts' program runs, and how much faster it was measured to be."""
    guard = report.guard or {}
    if report.runs_plain_xla:
        return Verdict(f"plain jax.jit runs: {guard.get('reason') or 'no program of jcuts was faster'}", 0)
    measured = (guard.get("speed") or {}).get(str(guard.get("chosen")))
    if measured:
        low, high = min(measured), max(measured)
        spread = f" ({low:.2f} to {high:.2f})" if high > low else ""
        return Verdict(f"{measured[0]:.2f} times as fast as jax.jit{spread}", measured[0])
    if not report.kernels:
        return Verdict("XLA runs all of it: no kernel was chosen", None)
    waiting = sum(s.count for s in report.subsets if s.why in (NOT_MEASURED, NOT_CHECKED, NO_TIME))
    more = f"; {waiting} regions are not measured yet" if waiting else ""
    return Verdict(f"{report.kernels} kernel calls, the whole function not timed against jax.jit{more}", None)


def most_important(report: ReportData) -> list[RegionLine]:
    """The regions in which most time is gained, or where nothing is known, most is spent."""

    def weight(number: int) -> tuple[float, float]:
        s = report.subsets[number]
        ours = s.seconds if s.chosen != "xla" else s.xla_seconds
        gained = max((s.xla_seconds or 0) - (ours or 0), 0) if s.seconds and s.xla_seconds else 0
        return gained * s.count, (ours or s.predicted_seconds or s.bound_seconds) * s.count

    order = sorted(range(len(report.subsets)), key=weight, reverse=True)
    found = []
    for number in order[:REGIONS]:
        s = report.subsets[number]
        kernel = s.chosen != "xla"
        both = bool(s.seconds and s.xla_seconds)
        gain = f"{s.xla_seconds / s.seconds:.2f}x" if s.seconds and s.xla_seconds and kernel else "XLA's" * (not kernel)
        times = f"{s.count} x {microseconds(s.seconds if kernel else s.xla_seconds)} us"
        times += f" (XLA {microseconds(s.xla_seconds)})" if both and kernel else ""
        if kernel and s.bound_seconds and s.seconds:
            times += f", {s.bound_seconds / s.seconds:.0%} of its bound"
        found.append(
            RegionLine(
                operations_text(s.operations),
                gain or "not timed",
                times,
                "; ".join(s.where[:1]),
                both and kernel and (s.xla_seconds or 0) > (s.seconds or 0),
            )
        )
    return found
