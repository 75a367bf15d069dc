"""The pass that lowers convolutions to cuDNN with the batch divided into micro-batches under a workspace limit.

See docs/microbatch.md.

Enabled by ``optimize(workspace_limit=...)`` (WR: a limit per convolution) or ``total_workspace=...`` (WD: a limit for
all that is live at once; XLA reuses workspaces of calls that run one after the other).  Times come from the benchmark
database; missing ones are measured, where that is allowed.

In ``mixed`` mode XLA's own convolution is a candidate like any other, with its measured time and workspace: it keeps
the equation unless something faster is within the limit.  In the other modes cuDNN's division is used wherever there is
one.  Whole programs that take more than the limit are no candidates while others keep it (`over_limit`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jcuts.base import keys, knobs
from jcuts.base.errors import JcutsError, Refusal
from jcuts.base.settings import Settings
from jcuts.microbatch import batch_division_dp
from jcuts.microbatch.convolution import Convolution
from jcuts.microbatch.errors import NoDivisionError
from jcuts.microbatch.network import Network, Use
from jcuts.microbatch.pareto import desirable
from jcuts.microbatch.report import DivisionReport, size_text
from jcuts.microbatch.shared_workspace_ilp import divide_network
from jcuts.microbatch.timings import Division, Table
from jcuts.trace import jaxapi
from jcuts.trace.source import place
from jcuts.tune.cudnn.measurer import database_path
from jcuts.tune.cudnn.tables import DivisionRequest, only_cudnn, remember_network, tables_of, xla_times
from jcuts.xla.cudnn import call as cudnn_call
from jcuts.xla.cudnn.match import LIBRARY, PRIMITIVE, Site, call_site, recognise
from jcuts.xla.rebuild import traced_eqns

log = logging.getLogger("jcuts.pipeline.microbatch_convs")

LOOPS = ("scan", "while", "cond")
CONSTRAINT = "liveness"
EVERY = "all"
"""Every size that was measured."""
MARGIN = 0.05
"""A division must be faster by this than a single call: times of many short calls add up their errors."""
NOT_TIMED = "not timed yet"
RACE = "mixed: plain XLA competes as a whole where its convolutions keep to the limit; mode='fusion' always divides"
"""Said where something is divided."""


@dataclass
class _Use:
    """State of one convolution equation in this pass."""

    layer: str
    eqn: Any
    site: Site | Refusal
    table: Table | None = None
    front: tuple[Division, ...] = ()
    chosen: Division | None = None
    why: str = ""

    @property
    def workspace(self) -> int:
        return self.chosen.workspace if self.chosen else 0

    @property
    def replaced(self) -> bool:
        return self.chosen is not None and all(cudnn_call.is_cudnn(part.algorithm) for part in self.chosen.parts)


@dataclass(frozen=True)
class Divided:
    """Result of the pass.

    Attributes:
        closed: the program with its divided convolutions as calls.  rows: every convolution, for the report.
        note: why none was looked at, or what to know of the answer, or ''.  postponed: another process was measuring.
    """

    closed: jaxapi.Closed
    rows: tuple[DivisionReport, ...] = ()
    note: str = ""
    postponed: bool = False

    @property
    def count(self) -> int:
        """Convolutions that cuDNN computes."""
        return sum(bool(row.division) for row in self.rows)


def is_asked(settings: Settings) -> bool:
    """Whether the user set a limit."""
    return settings.workspace_limit is not None or settings.total_workspace is not None


def is_ours(eqn: Any) -> bool:
    """Whether an equation is a call that this stage made."""
    return jaxapi.call_target(eqn) in (*cudnn_call.TARGETS.values(), cudnn_call.GRAPH_TARGET)


def generation(settings: Settings) -> str:
    """Changes whenever the database may hold other times; '' where it is not read."""
    if not is_asked(settings):
        return ""
    current = knobs.current()
    path = database_path()
    known = f"{current.cudnn} {current.cudnn_graphs} {settings.division_sizes} {path}"
    try:
        found = path.stat()
        return f"{known} {found.st_mtime_ns} {found.st_size}"
    except OSError:
        return known


def divide_convolutions(
    closed: jaxapi.Closed, settings: Settings, platform: str, *, may_measure: bool, name: str = "function"
) -> Divided:
    """Replaces convolutions of a flat program, and of its loops' bodies, by divided ones within the limits.

    Args: platform: 'cpu' or 'cuda'; may_measure: as for the whole pipeline: the network is then stored, too; name: of
    the function.
    """
    if not is_asked(settings):
        return Divided(closed)
    uses = [_Use(name, eqn, site) for name, eqn, site in _found(closed)]
    if not uses:
        return Divided(closed)
    if settings.tune == "off":
        return Divided(closed, note="no convolution is divided: tune='off' reads no times")
    if why := cudnn_call.unusable(platform):
        return Divided(closed, note=f"no convolution is divided: {why}")
    try:
        measuring = may_measure and settings.tune == "auto"
        postponed = _take_times(uses, settings, platform, measuring)
        if measuring and not (settings.form and settings.form.rewrites):
            remember_network(named_network(closed, name))
        _choose(uses, settings)
    except (JcutsError, OSError) as error:  # no database, no device, no disk: XLA computes everything
        log.warning("no convolution is divided: %s", error)
        return Divided(closed, note=f"no convolution is divided: {error}")
    rows = tuple(_row(use, settings) for use in uses)
    broken = _not_kept(rows, settings)
    if not any(use.replaced for use in uses):
        return Divided(closed, rows, note=broken, postponed=postponed)
    rebuilt = _rebuilt(closed, {id(use.eqn): use for use in uses if use.replaced}, platform)
    sizes = settings.division_sizes
    notes = (RACE if settings.mode == "mixed" else "", f"micro-batch sizes: {sizes}" if sizes else "", broken)
    return Divided(jaxapi.dce(rebuilt), rows, note="; ".join(filter(None, notes)), postponed=postponed)


def over_limit(rows: Sequence[DivisionReport], settings: Settings, *, by_xla: bool) -> list[str]:
    """Convolutions that take more workspace than the limit, as far as that was measured: name and bytes.

    Args: rows: of a program's report; by_xla: XLA computes all of them, as in the user's own program.
    """
    if not is_asked(settings):
        return []
    left = [row for row in rows if by_xla or not row.division]
    return [
        f"{row.layer} ({size_text(row.xla_workspace)})" for row in left if (row.xla_workspace or 0) > _limit(settings)
    ]


def _not_kept(rows: Sequence[DivisionReport], settings: Settings) -> str:
    """What to know where the limit is not kept, or ''."""
    broken = over_limit(rows, settings, by_xla=False)
    if not broken:
        return ""
    limit = size_text(_limit(settings))
    return f"XLA's own convolutions take more than {limit}, and nothing else fits: {', '.join(broken)}"


def sites(closed: jaxapi.Closed) -> list[Site | Refusal]:
    """The convolutions of a flat program and of its loops' bodies, in program order."""
    return [site for _, site in _walk(closed)]


def network_of(closed: jaxapi.Closed, name: str) -> Network:
    """The convolutions of a flat program that cuDNN can do, for `microbatch.analysis` and its command line."""
    found = ((layer, site) for layer, _, site in _found(closed))
    return Network(
        name,
        tuple(
            Use(layer, site.convolution, site.batch, site.precision) for layer, site in found if isinstance(site, Site)
        ),
    )


def named_network(closed: jaxapi.Closed, function: str) -> Network:
    """`network_of`, named by the function and a digest of its convolutions: other shapes are another network."""
    made = network_of(closed, function)
    name = f"{function} {keys.convolution_network(made.to_json()['uses'])}"
    return replace(made, name=name, held=held_at(closed))


def held_at(closed: jaxapi.Closed) -> tuple[int, ...]:
    """Bytes that are live anyway while each convolution of `network_of` runs: weights, activations, gradients, results.

    By liveness of the program as XLA would fuse it (`plan.cost.program_memory`); () where that is not known.
    """
    from jcuts.plan.cost.program_memory.jaxpr_liveness import live_at  # the planner, which few programs need

    try:
        found = live_at(closed, PRIMITIVE)
    except (JcutsError, LookupError, TypeError, ValueError) as error:
        log.info("what convolutions hold beside their workspaces is not known: %s", error)
        return ()
    every = sites(closed)
    if len(found) != len(every):
        return ()
    return tuple(size for size, site in zip(found, every, strict=True) if isinstance(site, Site))


# -- finding --------------------------------------------------------------------------------------------------------
def _found(closed: jaxapi.Closed) -> Iterator[tuple[str, Any, Site | Refusal]]:
    """Convolutions in program order: name, equation, kernel."""
    for number, (eqn, site) in enumerate(_walk(closed), start=1):
        kind = site.convolution.kind.replace("_", "-") if isinstance(site, Site) else ""
        yield f"conv{number} {kind}".strip(), eqn, site


def _walk(closed: jaxapi.Closed) -> Iterator[tuple[Any, Site | Refusal]]:
    made = {v: eqn for eqn in closed.jaxpr.eqns for v in eqn.outvars}
    for eqn in closed.jaxpr.eqns:
        if jaxapi.primitive_name(eqn) == PRIMITIVE:
            yield eqn, recognise(eqn, made.get)
        elif jaxapi.primitive_name(eqn) in LOOPS:
            for _, _, body in jaxapi.inner_jaxprs(eqn):
                yield from _walk(body)


# -- times ----------------------------------------------------------------------------------------------------------
def _take_times(uses: Sequence[_Use], settings: Settings, platform: str, may_measure: bool) -> bool:
    """Gives every use its table, measured now if need be; whether another process kept this one from measuring."""
    wanted: dict[tuple[Convolution, int], set[str]] = {}
    for use in uses:
        if isinstance(use.site, Site):
            wanted.setdefault((use.site.convolution, use.site.batch), set()).add(use.site.precision)
    asked = DivisionRequest(
        platform,
        limit=_limit(settings),
        accuracy=settings.convolution_accuracy,
        library=settings.mode == "mixed",
        policy=settings.division_sizes,
    )
    found, postponed = tables_of(wanted, asked, may_measure=may_measure)
    for use in uses:
        if isinstance(use.site, Site):
            use.table = found[use.site.convolution, use.site.batch]
            use.why = "" if use.table else NOT_TIMED
        else:
            use.why = use.site.reason
    return postponed


# -- choosing -------------------------------------------------------------------------------------------------------
def _choose(uses: Sequence[_Use], settings: Settings) -> None:
    """Sets every use's division, or why it has none."""
    limit = _limit(settings)
    open_: list[_Use] = []
    for use in uses:
        if use.table is None or not isinstance(use.site, Site):
            continue
        batch, precision = use.site.batch, use.site.precision
        candidates = _candidates(use.table, batch, mixed=settings.mode == "mixed")
        if isinstance(candidates, str):
            use.why = candidates
            continue
        try:
            use.front = desirable(
                candidates, batch, limit, precision=precision, policy=settings.division_sizes or EVERY
            )
            open_.append(use)
        except NoDivisionError as error:
            use.why = error.message
    if settings.total_workspace is None:
        for use in open_:
            use.chosen = use.front[-1]
    elif open_:
        sets = [use.front for use in open_]
        shares = divide_network(sets, settings.total_workspace, constraint=CONSTRAINT)
        for use, division in zip(open_, shares.divisions, strict=True):
            use.chosen = division
    adds_up = settings.total_workspace is not None and CONSTRAINT == "paper"
    for use in open_:
        _prefer_simpler(use, use.workspace if adds_up else limit, mixed=settings.mode == "mixed")
        if not use.replaced:
            use.why = "its own convolution is the fastest within the limit"


def _prefer_simpler(use: _Use, limit: int, *, mixed: bool) -> None:
    """Takes a single call, or XLA's own convolution, where the division is not faster by more than `MARGIN`."""
    assert use.table is not None and use.chosen is not None and isinstance(use.site, Site)
    batch, precision = use.site.batch, use.site.precision
    for table in (only_cudnn(use.table), _only_library(use.table) if mixed else None):
        one = batch_division_dp.undivided(table, batch, limit, precision=precision) if table is not None else None
        if one is not None and one.ticks <= (1 + MARGIN) * use.chosen.ticks:
            use.chosen = one


def _limit(settings: Settings) -> int:
    """Most that the workspace of one convolution may take [B]."""
    return min(n for n in (settings.workspace_limit, settings.total_workspace) if n is not None)


def _only_library(table: Table) -> Table:
    return replace(table, micros=tuple(m for m in table.micros if m.algorithm == LIBRARY))


def _candidates(table: Table, batch: int, *, mixed: bool) -> Table | str:
    """What may be chosen: cuDNN's algorithms, in mixed mode XLA's own for the whole batch; or why nothing may."""
    own = xla_times(table, batch)
    if mixed and not own:
        return "its own convolution was not timed, so nothing is known to be faster"
    return replace(table, micros=(*(own if mixed else ()), *only_cudnn(table).micros))


def _row(use: _Use, settings: Settings) -> DivisionReport:
    where = place(use.eqn)
    if not isinstance(use.site, Site):
        return DivisionReport(use.layer, PRIMITIVE, where, 0, why=use.why)
    site = use.site
    row = DivisionReport(use.layer, str(site.convolution), where, site.batch, why=use.why)
    if use.table is None:
        return row
    own = batch_division_dp.undivided(_only_library(use.table), site.batch, precision=site.precision)
    single = batch_division_dp.undivided(only_cudnn(use.table), site.batch, _limit(settings), precision=site.precision)
    row = replace(
        row,
        undivided=single.seconds if single else None,
        xla_seconds=own.seconds if own else None,
        xla_workspace=own.workspace if own else None,
        front=tuple((d.workspace, d.seconds, str(d)) for d in use.front),
    )
    if not use.replaced or use.chosen is None:
        return row
    return replace(row, division=str(use.chosen), seconds=use.chosen.seconds, workspace=use.chosen.workspace)


# -- rebuilding -----------------------------------------------------------------------------------------------------
def _rebuilt(closed: jaxapi.Closed, chosen: dict[int, _Use], platform: str) -> jaxapi.Closed:
    eqns: list[Any] = []
    for eqn in closed.jaxpr.eqns:
        use = chosen.get(id(eqn))
        if use is not None:
            eqns += _call_eqns(use, platform)
        elif jaxapi.primitive_name(eqn) in LOOPS:
            bodies = [_rebuilt(body, chosen, platform) for _, _, body in jaxapi.inner_jaxprs(eqn)]
            eqns.append(jaxapi.with_inner_jaxprs(eqn, bodies))
        else:
            eqns.append(eqn)
    return jaxapi.with_eqns(closed, eqns)


def _call_eqns(use: _Use, platform: str) -> list[Any]:
    site, division, (out,) = use.site, use.chosen, use.eqn.outvars
    assert isinstance(site, Site) and division is not None  # `replaced` says so
    name = f"{use.layer} [{place(use.eqn)}]"

    def call(a: Any, b: Any) -> list[Any]:
        graph = knobs.current().cudnn_graphs
        return [call_site(site, division, out.aval, a, b, layer=name, platform=platform, graph=graph)]

    return traced_eqns(call, site.operands, [out], use.eqn)
