"""Lowering of ``jcuts_call_p``: the pipeline runs here, and what it returns is emitted in place."""

from __future__ import annotations

import importlib.util
from typing import Any

from jcuts.base.settings import Settings
from jcuts.trace import jaxapi


def lower(ctx: Any, *args: Any, jaxpr: jaxapi.Closed, settings: Settings, name: str, placement: Any) -> Any:
    """Plan the jaxpr for this platform and emit the result.  Never measures: a lowering rule may run anywhere."""
    site = jaxapi.lowering_site(ctx)
    planned = _plan(jaxpr, settings, site)
    return jaxapi.lower_closed(ctx, args, planned, name)


def _plan(closed: jaxapi.Closed, settings: Settings, site: jaxapi.LoweringSite) -> jaxapi.Closed:
    if len(site.platforms) != 1 or site.for_export or site.symbolic:
        return closed
    if importlib.util.find_spec("jcuts.pipeline") is None:
        return closed
    from jcuts.pipeline import optimize_jaxpr

    return optimize_jaxpr(closed, settings, platform=site.platforms[0], may_measure=False).closed
