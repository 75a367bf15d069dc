"""Selects which regions of a CPU's loop bodies and which with little work become kernels, whatever XLA takes for them
alone; on a GPU, scans that are one persistent kernel, and what stands between two kernels of a chain.

A region of a few hundred operations is no faster as a custom call than in XLA's fusions.  Where a scan's whole body are
kernels, the scan is one call (`xla.chains.loop`), which no measurement of its regions can show: such programs race as
wholes.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from jcuts.base.errors import Refusal
from jcuts.base.settings import UNBROKEN
from jcuts.fusion.chain_gaps import chain_gaps, join_elementwise
from jcuts.kernel_ir.program import Program
from jcuts.lower.recurrence.program import lower_recurrence, lower_scans
from jcuts.pipeline import partition_store
from jcuts.pipeline.computation import NOT_ASKED, Computation, Region, add_candidates, has_gpu_kernel
from jcuts.pipeline.measured_partition import library_seconds, measured_seconds
from jcuts.schedule.gpu import candidates as gpu_candidates
from jcuts.schedule.gpu.kernel_time import kernel_time
from jcuts.schedule.gpu.machine import GpuMachine
from jcuts.trace import jaxapi
from jcuts.xla import devices as xla_devices

log = logging.getLogger("jcuts.pipeline.loop_bodies")

NO_ROOM = "no block has a thread for every point of its columns, and registers and shared memory for what it keeps"
RANKED = 4
"""Schedules of a loop, best first, of which the fastest counts."""
MOST_LOOPS = 256
"""Loops whose predicted times a process remembers."""
MOST_SMALL = 4
"""Distinct subsets with little work that this form tries."""


def take_loop_bodies(top: Computation) -> bool:
    """Makes regions of all that scans' bodies do, where all of it has a kernel form; whether there is any such body.

    Other bodies are left to XLA.  Without any such body everything is.
    """
    taken = [_take(body) for body in _scan_bodies(top)]
    if not any(taken):
        for level in top.walk():
            level.leave_all_to_xla(NOT_ASKED)
    return any(taken)


def keep_where_faster(top: Computation) -> None:
    """Leaves regions outside of such bodies to XLA where kernels were not measured to be faster."""
    for level in top.walk():
        if level.mixed:
            for region in level.subsets:
                mine, library = measured_seconds(region), library_seconds(region)
                if mine is None or library is None or mine >= library:
                    region.chosen = None


def add_small_regions(level: Computation) -> None:
    """Makes subsets of what has little work, too, where few kernels do for that."""
    small = [level.subset(members, program) for members, program in level.small_regions()]
    if not small or len({s.identity for s in small}) > MOST_SMALL:
        return
    if partition_store.is_partition(level, [s.members for s in (*level.subsets, *small)]):
        for subset in small:
            level.merge_into(subset)


def take_chain_gaps(level: Computation) -> None:
    """Makes subsets of what stands between two kernels of a chain, whatever work it has (`fusion.chain_gaps`)."""
    joined = join_elementwise(level.graph, [*level.fused, *level.small_regions()], has_gpu_kernel)
    gaps = chain_gaps(level.graph, [members for members, _ in joined])
    taken = frozenset[int]().union(*gaps)
    rest = [(members, program) for members, program in level.fused if not members & taken]
    cover = [*rest, *((members, program) for members, program in joined if members in gaps)]
    level.set_partition(sorted(cover, key=lambda entry: max(entry[0])), gaps)


def wanted(levels: Sequence[Computation], regions: str) -> set[str]:
    """Identities of regions that are to be kernels even where XLA's code alone is faster: left to XLA they end a chain,
    which only a race of whole programs shows. Args: regions: of the variant.
    """
    if regions != UNBROKEN:
        return set()
    gaps = [(level, chain_gaps(level.graph, [s.members for s in level.subsets])) for level in levels]
    return {subset.identity for level, found in gaps for subset in level.subsets if subset.members in found}


def regions_of(levels: Sequence[Computation]) -> list[Region]:
    """The regions of a function and of its loop bodies."""
    return [subset for level in levels for subset in level.subsets]


def _scan_bodies(level: Computation) -> list[Computation]:
    """Bodies of the scans of a function, and of the loops in their bodies."""
    found: list[Computation] = []
    for number, bodies in level.bodies.items():
        if jaxapi.primitive_name(level.closed.jaxpr.eqns[number]) == "scan":
            found += bodies
        found += [inner for body in bodies for inner in _scan_bodies(body)]
    return found


def _take(body: Computation) -> bool:
    """Makes regions of a body's equations; False, and none, where some have no kernel form or are loops themselves."""
    body.mixed = False
    body.set_partition(body.grouping.subsets)
    if body.left_out or body.bodies or not body.subsets:
        body.mixed = True
        body.leave_all_to_xla(NOT_ASKED)
        return False
    return True


def gain_as_one(apart: Sequence[jaxapi.Closed], merged: jaxapi.Closed) -> bool:
    """Whether the time model prefers one persistent kernel of two scans to one of each (`rewrite.loops.horizontal`)."""
    together = _kernel_seconds(merged)
    known = [s for s in map(_kernel_seconds, apart) if s is not None]
    return together is not None and len(known) == len(apart) and together < sum(known)


def _kernel_seconds(closed: jaxapi.Closed) -> float | None:
    """Predicted time of the one scan of a program as a persistent kernel on this GPU, with that of reversing stacks for
    it; None where it has no kernel.
    """
    (program,), machine = lower_scans(closed), xla_devices.machine()
    seconds = None if isinstance(program, Refusal) else _fastest(program, machine)
    reversed_ = sum(jaxapi.nbytes(e.outvars[0]) for e in closed.jaxpr.eqns if jaxapi.primitive_name(e) == "rev")
    return None if seconds is None else seconds + 2 * reversed_ / machine.arch.bw_global


def _fastest(program: Program, machine: GpuMachine) -> float | None:
    key = program.digest, repr(machine)
    if key not in _seconds:
        if len(_seconds) >= MOST_LOOPS:
            _seconds.clear()
        found = gpu_candidates.candidates(program, machine, RANKED)
        _seconds[key] = min((kernel_time(made, machine).seconds for made, _ in found), default=None)
    return _seconds[key]


_seconds: dict[tuple[str, str], float | None] = {}
"""Of loops by their program and GPU: the loops of a network are few kinds, and every variant of it asks."""


def take_recurrences(top: Computation, *, fuse: bool) -> None:
    """Makes a region of every scan that can be one kernel on this GPU (`lower.recurrence`), in place of its body's.

    Args: fuse: False: there is none.
    """
    for level in top.walk() if fuse else ():
        for number, bodies in list(level.bodies.items()):
            eqn, node = level.closed.jaxpr.eqns[number], level.graph.nodes[number]
            if jaxapi.primitive_name(eqn) != "scan":
                continue
            program = lower_recurrence(level.graph, node, eqn, bodies[0].graph, f"scan_{number}")
            refusal = program if isinstance(program, Refusal) else Refusal("schedule", NO_ROOM)
            if isinstance(program, Refusal) or not has_gpu_kernel(program):
                log.info("scan is no single kernel: %s", refusal)
                level.refused_loops[number] = Refusal("scan", f"its steps are no single kernel: {refusal}")
            else:
                level.loops[number] = level.subset(frozenset({number}), program)
                add_candidates([level.loops[number]], "cuda")
                del level.bodies[number]
        if level.loops:
            level.set_partition(level.grouping.subsets)
