"""Operator fusion and kernel selection by autotuning: which regions of a jaxpr become kernels, and which kernels.

CPU: partition search with measured kernel times (`pipeline.measured_partition`).  GPU: the greedy partition, with
kernels per region and merges (inverted residuals, back-to-back GEMMs) chosen by measurement; the variant whose regions
are ``searched`` goes on from there with the same search, and races against the others as a whole program.

The result is stored as a whole: a later process, or one that may not measure, takes the stored partition and reads the
choices of its regions without a search.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jcuts.base import keys, knobs
from jcuts.base.errors import IRError
from jcuts.base.settings import ATTENTION, CLEAR, LOOP_BODIES, SEARCHED, UNBROKEN, Settings, Variant
from jcuts.fusion.dag import NodeSet as Members
from jcuts.fusion.join_regions import region_groups
from jcuts.fusion.move_epilogue import fuse_prologues, is_library_contraction, move_epilogues, split_prologues
from jcuts.fusion.sink_outputs import sink_outputs
from jcuts.kernel_ir.compulsory_traffic import compulsory_bytes
from jcuts.kernel_ir.program import Program
from jcuts.pipeline import inplace_update, loop_bodies, measured_partition, partition_store
from jcuts.pipeline.computation import (
    CONSTANT,
    IN_CARRY,
    NOT_ASKED,
    OF_LIBRARY,
    TO_FUSE,
    Computation,
    Region,
    add_candidates,
    has_gpu_kernel,
)
from jcuts.pipeline.loop_bodies import add_small_regions, keep_where_faster, regions_of, take_loop_bodies
from jcuts.pipeline.measured_partition import LEAST_MOVED, Summary, library_seconds, measured_seconds, postponed
from jcuts.report.gain_limits import gains_clearly, is_near_tie
from jcuts.trace.canonical import canonical_digest
from jcuts.tune import session
from jcuts.tune.row_signature import FOREIGN
from jcuts.tune.session import RegionProblems, TunedChoices
from jcuts.xla import devices as xla_devices

log = logging.getLogger("jcuts.pipeline.kernel_selection")

BLOCK_CANDIDATES = 8
"""Kernels tried for a block of several reductions."""
MOST_ELEMENTWISE = 12
"""Distinct element-wise subsets that are tried on a GPU."""
FUSED_PRODUCTS = ("attention", "attention_backward")
"""Templates of several products, which no library has."""


@dataclass(frozen=True, eq=False)
class Partition:
    """The regions of a function and of its loop bodies, from their choice to the rebuilt program.

    Attributes:
        top: the function; its regions, and theirs in the bodies, are the partition.
        platform: 'cpu' or 'cuda'. key: what the partition is stored under.
        origin: 'none' (the variant has no kernels), 'stored', or 'greedy', which measured times may still improve.
        shares: candidates per region identity where the partition decides them.
        blocks: regions that could be one kernel in place of several, each with its computation and its parts.
        found: of a stored partition, what its search said.
    """

    top: Computation
    settings: Settings
    platform: str
    key: str = ""
    origin: str = "greedy"
    shares: dict[str, int] | None = None
    blocks: tuple[tuple[Computation, Region, list[Region]], ...] = ()
    found: Summary | None = None

    @property
    def levels(self) -> list[Computation]:
        """The function and its loop bodies."""
        return self.top.walk()

    @property
    def regions(self) -> list[Region]:
        """All regions."""
        return regions_of(self.levels)

    @property
    def is_lasting(self) -> bool:
        """Whether it may be stored."""
        return self.settings.tune != "off" and knobs.current().fuel is None

    @property
    def is_searched(self) -> bool:
        """Whether measured times may change which equations are a region (`search`).

        On a GPU in the variant that is there for it; where nothing races (mode ``fusion``) in the plain one.
        """
        if self.settings.mode == "no_fusion" or not self.is_lasting or any(level.loops for level in self.levels):
            return False
        alone = self.settings.mode == "fusion" and self.settings.form is None
        if self.platform == "cpu":
            return not self.takes_loop_bodies
        return alone or _regions_of(self.settings) == SEARCHED

    @property
    def takes_loop_bodies(self) -> bool:
        """Whether scans' bodies are kernels altogether (`loop_bodies`)."""
        return _regions_of(self.settings) == LOOP_BODIES

    @property
    def takes_near_ties(self) -> bool:
        """Whether kernels that lost to XLA by little win: the variant has ``every`` one."""
        return self.origin == "stored" and self.settings.form is not None and self.settings.form.regions == "every"


def select(top: Computation, settings: Settings, *, may_measure: bool, platform: str = "cpu") -> Summary:
    """Sets every level's subsets and every subset's winner: all steps below, one after the other."""
    with session.shared_worker_session():
        chosen = choose_partition(top, settings, platform)
        problems = collect_problems(chosen)
        resolve(chosen, problems, session.tune_problems(problems, may_measure=may_measure))
        return search(chosen, problems, may_measure=may_measure)


def choose_partition(top: Computation, settings: Settings, platform: str = "cpu") -> Partition:
    """The stored partition of a function, else the greedy one; nothing is measured."""
    if settings.form is not None and settings.form.regions == "none":
        for level in top.walk():
            level.leave_all_to_xla(NOT_ASKED)
        return Partition(top, settings, platform, origin="none")
    chosen = Partition(top, settings, platform, partition_key(top, settings, platform))
    use_stored = chosen.is_searched or (chosen.is_lasting and platform != "cpu")
    stored = _stored(chosen.key, platform) if use_stored else None
    if stored is not None and _restore(chosen.levels, stored, platform):
        chosen = replace(chosen, origin="stored", shares=_shares(stored), found=Summary.stored(stored.get("search")))
        for level in chosen.levels if chosen.takes_near_ties else ():
            add_small_regions(level)
    elif platform != "cpu":
        return _choose_on_gpu(chosen)
    elif chosen.takes_loop_bodies and not take_loop_bodies(top):
        return replace(chosen, origin="none")
    add_candidates(chosen.regions, platform)
    return chosen


def _move_operations(level: Computation, move: Callable[..., list[tuple[Members, Program]]]) -> None:
    """Moves prologues and epilogues of the level's products to where they have kernels, once for all variants."""
    key = move.__name__, level.mixed, repr(xla_devices.machine())
    if key not in level.moved:
        for cover in (split_prologues, move, sink_outputs):
            level.set_partition(cover(level.graph, level.fused, has_gpu_kernel))
            add_candidates(level.subsets, "cuda")
        level.moved[key] = level.fused
    level.set_partition(level.moved[key])


def _regions_of(settings: Settings) -> str:
    """Which subsets the variant's regions are (`base.settings.Variant`)."""
    return "all" if settings.form is None else settings.form.regions


def _stored(key: str, platform: str) -> dict[str, Any] | None:
    """The stored partition; those of GPUs hold programs, and count only where this cache has made them."""
    partition, source = session.store().entry("partition", key)
    if partition is not None and platform != "cpu" and source == FOREIGN:
        log.info("a stored partition of another cache is not used")
        return None
    return partition


def _choose_on_gpu(chosen: Partition) -> Partition:
    """The greedy partition with what the variant's regions are on a GPU."""
    levels, settings = chosen.levels, chosen.settings
    regions = _regions_of(settings)
    if regions == ATTENTION:
        for level in levels:
            level.leave_to_xla(lambda s: "" if s.program.template in FUSED_PRODUCTS else NOT_ASKED)
    add_candidates(regions_of(levels), chosen.platform)
    if regions in (SEARCHED, CLEAR):  # what they begin with
        regions = "all"
    if settings.mode != "no_fusion" and regions != ATTENTION:
        for level in levels:
            _move_operations(level, move_epilogues if regions == "absorbing" else fuse_prologues)
            if regions == UNBROKEN:
                loop_bodies.take_chain_gaps(level)
        add_candidates(regions_of(levels), chosen.platform)
    # Before any are left: the forms that leave some share the problems, and so the times, of those that do not.
    shares = session.candidate_budget([s for s in regions_of(levels) if s.ranked], on_gpu=True)
    blocks: list[tuple[Computation, Region, list[Region]]] = []
    if regions in ("all", "anchored", UNBROKEN) and settings.mode != "no_fusion" and settings.tune != "off":
        blocks = _blocks(levels)
        shares.update({s.identity: BLOCK_CANDIDATES for _, s, _ in blocks})
    _leave_on_gpu(levels, regions, measured=settings.tune != "off")
    return replace(chosen, shares=shares, blocks=tuple(blocks))


def collect_problems(partition: Partition) -> RegionProblems:
    """What has to be known to choose the kernels of a partition's regions; nothing is measured for it."""
    settings = partition.settings
    if partition.origin == "none":
        return session.collect_problems((), settings)
    if partition.takes_near_ties or partition.takes_loop_bodies:
        return session.collect_problems(partition.regions, replace(settings, mode="fusion"), shares=partition.shares)
    device, wanted = _device(partition.platform), loop_bodies.wanted(partition.levels, _regions_of(settings))
    if partition.origin == "stored" or partition.platform == "cpu":
        return session.collect_problems(
            partition.regions, settings, shares=partition.shares, device=device, wanted=wanted
        )
    rivals = [subset for _, subset, _ in partition.blocks]
    level_of = {id(subset): level for level in partition.levels for subset in level.subsets}
    level_of.update({id(subset): level for level, subset, _ in partition.blocks})

    def further(subset: Region, chosen: Program) -> list[Program]:
        return inplace_update.programs(level_of[id(subset)], subset, chosen)

    return session.collect_problems(
        [*partition.regions, *rivals],
        settings,
        shares=partition.shares,
        device=device,
        parts={subset.identity: [part.identity for part in parts] for _, subset, parts in partition.blocks},
        further=further,
        wanted=wanted,
    )


def resolve(partition: Partition, problems: RegionProblems, tuned: TunedChoices) -> None:
    """Sets the winner of every region, and takes the blocks that are better than their parts."""
    session.resolve(problems, tuned)
    if partition.takes_near_ties:
        for subset in partition.regions:
            if subset.origin != "measured" or not is_near_tie(measured_seconds(subset), library_seconds(subset)):
                subset.chosen = None
    if partition.takes_loop_bodies and partition.is_lasting:
        keep_where_faster(partition.top)
    for level, subset, parts in partition.blocks:
        if _is_better(subset, parts):
            level.merge_into(subset)
    if _regions_of(partition.settings) == CLEAR:
        for subset in partition.regions:  # plain jax.jit has not XLA's code for a recomputed attention
            clear = gains_clearly(measured_seconds(subset), library_seconds(subset))
            subset.chosen = subset.chosen if clear or subset.program.template in FUSED_PRODUCTS else None


def search(partition: Partition, problems: RegionProblems, *, may_measure: bool) -> Summary:
    """Improves a greedy partition by measured times, and stores it.

    Modes without fusion, ``tune="off"`` (estimates rank kernels, they are not fit to overrule the greedy cover), a
    limited ``JCUTS_FUEL`` and most variants on a GPU keep the greedy partition.
    """
    if partition.origin == "stored" and partition.settings.tune == "auto" and may_measure:
        session.store().adopt_partition(partition.key, keys.partition_code(partition.platform))
    if partition.origin != "greedy":
        return partition.found or Summary(partition.origin)
    levels, shares, on_gpu = partition.levels, dict(problems.shares), partition.platform != "cpu"
    unknown = postponed([s for level in levels for s in level.subset_cache.values()])
    if partition.settings.tune != "auto" or not may_measure or unknown:
        return Summary("greedy")
    found = measured_partition.NOT_SEARCHED
    if partition.is_searched and partition.regions:
        found = measured_partition.search(levels, partition.settings, shares, _device(partition.platform))
    is_known = all(s.choice is not None and s.choice.origin == "measured" for s in partition.regions)
    if found.is_complete and on_gpu and partition.is_lasting and is_known:
        _store_partition(levels, shares, partition.key, found.summary)
    elif found.is_complete and found.summary.origin == "measured" and not on_gpu:
        _store_sets(levels, shares, partition.key, found.summary)
    return found.summary


def _device(platform: str) -> str:
    return "" if platform == "cpu" else xla_devices.this().identity()


def _store_partition(levels: Sequence[Computation], shares: dict[str, int], key: str, found: Summary) -> None:
    """Stores the cover of a GPU's form: with it a later process need not rank what has a kernel form at all."""
    used = {s.identity for s in regions_of(levels)}
    session.store().put_partition(
        key,
        {
            "covers": [partition_store.load_partition(level) for level in levels],
            "schedules": keys.partition_code("cuda"),
            "shares": {k: n for k, n in sorted(shares.items()) if k in used},
            **({"search": found.to_json()} if found.explored else {}),
        },
        is_news=False,  # it is what plans that are remembered have come to
    )


def _store_sets(levels: Sequence[Computation], shares: dict[str, int], key: str, found: Summary) -> None:
    """Stores the cover of a CPU's function: lowering makes the programs of its regions again."""
    used = {s.identity for s in regions_of(levels)}
    session.store().put_partition(
        key,
        {
            "levels": [[sorted(s.members) for s in level.subsets] for level in levels],
            "schedules": keys.partition_code("cpu"),
            "shares": {k: n for k, n in sorted(shares.items()) if k in used},
            **({"search": found.to_json()} if found.explored else {}),
        },
    )


def _blocks(levels: Sequence[Computation]) -> list[tuple[Computation, Region, list[Region]]]:
    """Subsets that could be one kernel, each with its level and its parts (`fusion.join_regions`)."""
    if knobs.current().fuel is not None:
        return []
    found = []
    for level in levels:
        for block in region_groups(level.graph, level.fused, has_gpu_kernel):
            parts = [level.subset(members, program) for members, program in block.parts]
            found.append((level, level.subset(block.members, block.program), parts))
    add_candidates([subset for _, subset, _ in found], "cuda")
    return found


def _is_better(subset: Region, parts: Sequence[Region]) -> bool:
    """Whether a kernel was measured to be faster than XLA's code for its operations, and than its parts together."""
    mine, each = measured_seconds(subset), [measured_seconds(part) for part in parts]
    if subset.chosen is None or mine is None:
        return False
    return mine < sum(time if time is not None else math.inf for time in each)


def _leave_on_gpu(levels: Sequence[Computation], regions: str, *, measured: bool = True) -> None:
    """Leaves subsets to XLA that have no kernel form on a GPU, or no business being one.

    Element-wise subsets gain little over XLA's fusions, and cutting them out may cost more than that: only ``all``
    tries them, the large ones, those that move most bytes.  Products compete with the libraries wherever they are
    ``measured``, but for ``absorbing``: their element-wise tails belong to the kernels that read them there.
    """
    traffic: dict[str, int] = {}
    wanted = loop_bodies.wanted(levels, regions)
    for level in levels:
        for subset in level.subsets:
            if subset.ranked and not level.has_reduction(subset.members):
                traffic[subset.identity] = traffic.get(subset.identity, 0) + compulsory_bytes(subset.program)
    worth = sorted((k for k in traffic if traffic[k] >= LEAST_MOVED), key=lambda k: -traffic[k])[:MOST_ELEMENTWISE]
    for level in levels:
        constants = set(level.closed.jaxpr.constvars)

        def reason(subset: Region, level: Computation = level, constants: set[Any] = constants) -> str:
            if not subset.ranked:
                return "no kernel form on cuda"
            if constants.issuperset(subset.inputs):
                return CONSTANT
            if not level.loops.keys().isdisjoint(subset.members):
                return ""
            if (
                level.mixed
                and not level.has_reduction(subset.members)
                and subset.identity not in wanted
                and (regions not in ("all", UNBROKEN) or subset.identity not in worth)
            ):
                return TO_FUSE
            alone = subset.program.template not in FUSED_PRODUCTS
            if not (level.mixed and alone and is_library_contraction(level.graph, subset.members)):
                return ""
            if subset.members & level.accumulated:
                return IN_CARRY
            return OF_LIBRARY if regions == "absorbing" or not measured else ""

        level.leave_to_xla(reason)


def partition_key(top: Computation, settings: Settings, platform: str = "cpu") -> str:
    """What a stored cover belongs to: the function and everything that decides which kernels may win."""
    more: tuple[str, ...] = ()
    if platform != "cpu":
        rounded = [[t.tf32 for t in level.graph.tensors] for level in top.walk()]
        more = (_device(platform), repr(xla_devices.machine()), str(Variant.tuned(settings.form)), repr(rounded))
    return keys.partition(canonical_digest(top.closed), settings.mode, settings.tolerance, more)


def _restore(levels: Sequence[Computation], stored: dict[str, Any], platform: str = "cpu") -> bool:
    """Takes over a stored cover of every level; False (and the greedy covers) if it does not fit."""
    found = stored.get("levels" if platform == "cpu" else "covers")
    usable = isinstance(found, list) and len(found) == len(levels)
    take = partition_store.apply_stored if platform == "cpu" else partition_store.from_json
    try:
        usable = usable and all(take(level, cover) for level, cover in zip(levels, found or [], strict=True))
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, IRError):
        usable = False
    if not usable:
        log.warning("the stored partition does not fit the function: searching again")
        for level in levels:
            level.library = []
            level.subset_cache.clear()  # with programs of the stored cover
            level.set_partition(level.grouping.subsets)
    return usable


def _shares(stored: dict[str, Any]) -> dict[str, int]:
    found = stored.get("shares")
    if not isinstance(found, dict):
        return {}
    return {str(k): n for k, n in found.items() if isinstance(n, int) and n > 0}
