"""Lowering rule of ``jcuts_call_p``: runs the pipeline when JAX lowers a function, and emits the result inline."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from jcuts.base import knobs
from jcuts.base.errors import JcutsError
from jcuts.base.settings import Settings
from jcuts.pipeline.outcome import Outcome
from jcuts.primitive import planned_outcomes, shard_local
from jcuts.primitive.sharding import OtherPlacement, Placement, expected, lowering_is_partitioned
from jcuts.report.completeness import incomplete, unmeasured
from jcuts.report.function_report import FunctionReport
from jcuts.trace import jaxapi

if TYPE_CHECKING:
    from jcuts.tune.session import RegionProblems

log = logging.getLogger("jcuts")
_told: set[str] = set()


class Started(NamedTuple):
    """A function whose planning has come to its tuning problems.

    Attributes:
        problems: what would be tuned next, None where nothing is.
        finish: gives the ``Outcome``, with what the tuning database holds by then; measures what it lacks.
    """

    problems: RegionProblems | None
    finish: Callable[[], Outcome]


def lower(
    ctx: Any, *args: Any, jaxpr: jaxapi.Closed, settings: Settings, name: str, placement: Placement | None
) -> Sequence[Any]:
    """Plans the jaxpr for this platform and emits the result.  Never measures: a lowering rule may run anywhere.

    Raises: IncompleteTuning: something was not measured, and the options require all of it.
    """
    if placement is not None and expected.placement != placement:
        raise OtherPlacement
    site = jaxapi.lowering_site(ctx)
    planned = jaxpr
    if left_to_xla(ctx) is None:
        known = planned_outcomes.find(jaxpr, settings)
        outcome = known or plan(jaxpr, settings, site.platforms[0], may_measure=False)
        if settings.require is not None and (missing := unmeasured(outcome.report)):
            raise incomplete(name, jaxpr.in_avals, missing)
        planned = outcome.closed
    elif placement and lowering_is_partitioned(ctx) and may_split(site):
        found = shard_local.split(jaxpr, placement)
        if not isinstance(found, str) and _any_kernel(found, settings, site.platforms[0]):
            # Each part is a call of this primitive again, planned when its own lowering finds local types.  (Its
            # planned equations are not evaluated here: they may hold types of the mesh they were traced under.)
            planned = shard_local.assemble(
                found,
                lambda part, xs: ctx.primitive.bind(*xs, jaxpr=part, settings=settings, name=name, placement=None),
            )
    return jaxapi.lower_closed(ctx, args, planned, name)


def may_split(site: jaxapi.LoweringSite) -> bool:
    """Whether kernels may run in the local parts of a program that is spread over devices."""
    return not knobs.current().disable and not lacks_agreement(site)


def lacks_agreement(site: jaxapi.LoweringSite) -> bool:
    """Whether several processes run a program that they have not agreed on (`jit.multi_controller`)."""
    return site.processes and not expected.agreed


def _any_kernel(found: shard_local.Split, settings: Settings, platform: str) -> bool:
    outcomes = shard_local.plan_parts(found, lambda part: plan(part, settings, platform, may_measure=False))
    return any(o.closed is not p.closed for p, o in zip(found.parts, outcomes, strict=True))


def left_to_xla(ctx: Any) -> str | None:
    """Why this call site must use XLA's own code, or None."""
    site = jaxapi.lowering_site(ctx)
    if knobs.current().disable:
        return "JCUTS_DISABLE is set"
    if site.for_export:
        return "exported programs hold no custom calls of jcuts, so that they run without it"
    if len(site.platforms) != 1:
        return f"lowered for several platforms at once: {', '.join(site.platforms)}"
    if site.symbolic:
        return "shapes have symbolic dimensions"
    if lacks_agreement(site):
        return "several processes run it, and only a call of its own has a program that all of them agree on"
    if lowering_is_partitioned(ctx):
        return f"the partitioner spreads the program over {site.devices} devices"
    return None


def plan(
    closed: jaxapi.Closed,
    settings: Settings,
    platform: str,
    *,
    may_measure: bool,
    examples: Sequence[Any] | None = None,
) -> Outcome:
    """The pipeline's ``Outcome`` for a program (which is unchanged where the pipeline cannot run)."""

    def make(passes: Any) -> Outcome:
        return passes.optimize_jaxpr(closed, settings, platform=platform, may_measure=may_measure, examples=examples)

    return _contained(closed, settings, platform, make)


def start_planning(
    closed: jaxapi.Closed,
    settings: Settings,
    platform: str,
    *,
    may_measure: bool,
    examples: Sequence[Any] | None = None,
) -> Started:
    """`plan` up to where its tuning problems are known, so that those of several programs are tuned in one session."""

    def make(passes: Any) -> Any:
        return passes.start_planning(closed, settings, platform=platform, may_measure=may_measure, examples=examples)

    started = _contained(closed, settings, platform, make)
    if isinstance(started, Outcome):
        return Started(None, lambda: started)
    return Started(started.problems, lambda: _contained(closed, settings, platform, lambda _: started.finish()))


def _contained(closed: jaxapi.Closed, settings: Settings, platform: str, make: Callable[[Any], Any]) -> Any:
    """What ``make`` gives, called with the pipeline; the program unchanged, and a note, where jcuts itself fails."""
    name = getattr(closed.jaxpr.debug_info, "func_name", "") or "function"

    def unchanged(note: str, failed: bool = False) -> Outcome:
        return Outcome(closed, FunctionReport(name, settings.mode, platform, notes=(note,)), failed)

    if jaxapi.has_references(closed):
        return unchanged("left to XLA: the function uses mutable references")
    try:
        # Imported when first needed: the pipeline brings numba with it.
        from jcuts.pipeline import passes as pipeline_passes

        return make(pipeline_passes)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in ("numba", "llvmlite"):
            raise
        note = f"left to XLA: {error.name} is not installed, and jcuts compiles its kernels with it"
    except JcutsError:
        raise
    except Exception as error:
        if knobs.current().raise_errors:
            raise
        note = f"left to XLA: an error of jcuts, {type(error).__name__}: {error} (JCUTS_RAISE_ERRORS=1 shows where)"
    if note not in _told:
        _told.add(note)
        log.warning("%s", note)
    return unchanged(note, failed=True)
