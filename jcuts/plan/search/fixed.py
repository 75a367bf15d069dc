"""A plan given by its settings (``data=4,tensor=2,zero=1,policy=ar``): parsed, completed, costed, and what to change
first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

from jcuts.base.errors import UsageError
from jcuts.plan.search.neighbours import Rejected, explain_neighbours, micro_batches
from jcuts.plan.search.plan import TIERS, Plan
from jcuts.plan.search.plan_space import Space
from jcuts.plan.search.ranked import Ranked, cost_plans
from jcuts.plan.spec import toml_file
from jcuts.plan.spec.cluster import GIB, Cluster
from jcuts.plan.spec.layers import Model
from jcuts.plan.spec.workload import Training

POLICIES = {"ar": "activation-resident", "pr": "parameter-resident"}
"""Scheduling policies by their short names."""


@dataclass(frozen=True)
class Fixed:
    """A given plan: ``ranked`` its cost, ``short`` what it lacks (empty: it fits), ``changes`` its neighbours, those
    first that save most; ``assumed``: settings that were not given."""

    ranked: Ranked
    short: str
    changes: tuple[Rejected, ...]
    assumed: str


def parse(text: str, gpus: int, batch: int) -> tuple[Plan, str]:
    """A plan from ``name=value`` pairs, separated by commas, and what was assumed for those that are missing.

    Names are the fields of ``Plan`` and ``policy`` (ar, pr).  ``data`` takes the GPUs that the other axes leave,
    ``micro`` all samples of a data-parallel group; a schedule of interleaved has two chunks.

    Raises: UsageError for an unknown name, a value of the wrong kind, or axes that do not make ``gpus``.
    """
    known = {field.name: field for field in fields(Plan)}
    values: dict[str, object] = {}
    policy = ""
    for pair in filter(None, text.replace(" ", "").split(",")):
        name, equals, value = pair.partition("=")
        if not equals:
            raise UsageError(f"--fix {pair!r}: settings are name=value, separated by commas", setting=pair)
        if name == "policy":
            if value not in POLICIES:
                raise UsageError(f"--fix policy={value}: choose ar (activation-resident) or pr (parameter-resident)")
            policy = value
        elif name not in known:
            raise UsageError(
                f"--fix {name!r} is no setting of a plan{toml_file.nearest(name, [*known, 'policy'])}", name=name
            )
        else:
            values[name] = _value(name, value, known[name].default)
    assumed = []
    rest = math.prod(int(values.get(axis, 1)) for axis in ("tensor", "pipeline", "context"))  # type: ignore[call-overload]
    if "data" not in values:
        values["data"] = max(gpus // rest, 1)
        assumed.append(f"data {values['data']}")
    data = int(values["data"])  # type: ignore[call-overload]
    if data * rest != gpus:
        raise UsageError(
            f"--fix takes {data * rest} GPUs (data {data} x tensor, pipeline and context {rest}), there are {gpus}: "
            f"change the axes or --gpus",
            gpus=gpus,
        )
    if "micro" not in values:
        values["micro"] = max(batch // data, 1)
        assumed.append(f"micro {values['micro']}")
    if values.get("schedule") == "interleaved":
        values.setdefault("chunks", 2)
    plan = Plan(**values)  # type: ignore[arg-type]
    if policy:
        plan = replace(plan, group=1 if policy == "ar" else micro_batches(plan, batch))
    return plan, ", ".join(assumed)


def _value(name: str, text: str, default: object) -> object:
    if isinstance(default, bool):
        if text.lower() not in ("0", "1", "false", "true", "off", "on"):
            raise UsageError(f"--fix {name}={text}: must be true or false", name=name)
        return text.lower() in ("1", "true", "on")
    if isinstance(default, int):
        try:
            return int(text)
        except ValueError:
            raise UsageError(f"--fix {name}={text}: must be a whole number", name=name) from None
    return text


def price(
    model: Model, cluster: Cluster, work: Training, plan: Plan, *, space: Space | None = None, assumed: str = ""
) -> Fixed:
    """Costs a given plan, whether it fits or not, and its neighbours: what to change first.

    Changes that fit come first, the fastest of them at the head.
    Raises: UsageError for a plan that does not divide the model or batch, or uses a tier that the cluster lacks.
    """
    for name in ("parameters", "gradients", "optimizer", "activations"):
        tier = getattr(plan, name)
        if tier != "gpu" and cluster.tier(TIERS.index(tier)) is None:
            raise UsageError(f"{name} {tier}: cluster {cluster.name} has no [{tier}]", tier=tier)
    (ranked,) = cost_plans(model, cluster, [plan], work)
    lacks = [
        f"{tier} memory by {(ranked.memory[tier] - capacity) / GIB:.1f} GiB"
        for tier, capacity in zip(TIERS, cluster.capacities, strict=True)
        if ranked.memory[tier] > capacity
    ]
    changes = explain_neighbours(model, cluster, work, ranked, space or Space(), None)
    return Fixed(ranked, ", ".join(lacks), changes, assumed)
