"""Lowering of ``jcuts_call_p``: the pipeline runs here, and what it returns is emitted in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from jcuts.base import knobs
from jcuts.base.settings import Settings
from jcuts.primitive.sharding import Placement, lowering_is_partitioned
from jcuts.trace import jaxapi


class Planned(NamedTuple):
    """The pipeline's outcome in the absence of a pipeline: the program as it was."""

    closed: jaxapi.Closed
    report: Any = None


def lower(ctx: Any, *args: Any, jaxpr: jaxapi.Closed, settings: Settings, name: str,
          placement: Placement | None) -> Sequence[Any]:
    """Plan the jaxpr for this platform and emit the result.  Never measures: a lowering rule may run anywhere."""
    planned = jaxpr
    if left_to_xla(ctx) is None:
        platform = jaxapi.lowering_site(ctx).platforms[0]
        planned = plan(jaxpr, settings, platform, may_measure=False).closed
    return jaxapi.lower_closed(ctx, args, planned, name)


def left_to_xla(ctx: Any) -> str | None:
    """Why this place must get XLA's own code, or None."""
    site = jaxapi.lowering_site(ctx)
    if knobs.current().disable:
        return "JCUTS_DISABLE is set"
    if site.for_export:
        return "exported programs hold no custom calls of jcuts, so that they run without it"
    if len(site.platforms) != 1:
        return f"lowered for several platforms at once: {', '.join(site.platforms)}"
    if site.symbolic:
        return "shapes have symbolic dimensions"
    if lowering_is_partitioned(ctx):
        return f"the partitioner spreads the program over {site.devices} devices"
    return None


def plan(closed: jaxapi.Closed, settings: Settings, platform: str, *, may_measure: bool,
         examples: Sequence[Any] | None = None) -> Any:
    """The pipeline's ``Outcome`` for a program (``Planned`` with the program unchanged without a pipeline)."""
    if jaxapi.has_references(closed):
        return Planned(closed)
    try:
        # Imported when first needed: the pipeline brings numba with it.
        import jcuts.pipeline as pipeline
    except ModuleNotFoundError as error:
        if error.name != "jcuts.pipeline":
            raise
        return Planned(closed)
    return pipeline.optimize_jaxpr(closed, settings, platform=platform, may_measure=may_measure, examples=examples)
