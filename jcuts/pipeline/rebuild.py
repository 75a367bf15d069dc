"""Code emission passes: compiles the winning kernels, replaces their equations by custom calls, merges calls into
chains (GPU).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jcuts.base import knobs
from jcuts.base.errors import JcutsError
from jcuts.base.settings import Settings
from jcuts.codegen.artifact import CompiledKernel
from jcuts.kernel_ir.program import Program
from jcuts.pipeline import inplace_update
from jcuts.pipeline.computation import Computation, Region
from jcuts.pipeline.inplace_update import InplaceUpdate
from jcuts.rewrite.simplify import CONTROL_FLOW
from jcuts.trace import jaxapi
from jcuts.tune.parent import extra_kernels
from jcuts.xla import devices as xla_devices
from jcuts.xla.chains import fuse as chains_fuse
from jcuts.xla.chains.loop import scans_as_calls
from jcuts.xla.kernel_cache import kernel_for, source_text
from jcuts.xla.rebuild import in_order, kernel_eqns

log = logging.getLogger("jcuts.pipeline.passes")


@dataclass(frozen=True, eq=False)
class KernelCall:
    """A compiled kernel, and the equations that its call replaces.

    Attributes:
        number: where the call stands among the equations. covers: the numbers of those that go.
        like: the equation whose source line the call gets. place, aliases: see `xla.cpu_ffi_call.call_kernel`.
    """

    number: int
    covers: Sequence[int]
    kernel: CompiledKernel
    inputs: Sequence[Any]
    outputs: Sequence[Any]
    like: jaxapi.Eqn
    place: tuple[int | None, int] | None = None
    aliases: Mapping[int, int] = field(default_factory=dict)


Calls = Mapping[int, Sequence[KernelCall]]
"""The kernel calls of a function and of its loop bodies, by the place of each in `Computation.walk`."""


# -- compile --------------------------------------------------------------------------------------------------------
def compile_winners(top: Computation) -> Calls:
    """Compiles the winners of all regions; those that do not compile go back to XLA."""
    return {place: (*_region_calls(level), *_copy_calls(level)) for place, level in enumerate(top.walk())}


def _region_calls(level: Computation) -> list[KernelCall]:
    wanted = (program for subset in level.subsets for program in inplace_update.programs(level, subset))
    extra_kernels.compile_kernels(wanted)
    found = []
    for subset in level.subsets:
        if subset.chosen is None:
            continue
        update = inplace_update.find_inplace_update(level, subset)
        kernel = None if update is None else _compiled(update.placed.program, "update")
        if update is not None and kernel is not None:
            subset.kernel = kernel
            found.append(_updating_call(level, subset, update, kernel))
            continue
        kernel = _compiled(subset.chosen, "subset")
        if kernel is None:
            subset.chosen, subset.origin = None, "library"
            continue
        subset.kernel = kernel
        like, members = level.closed.jaxpr.eqns[max(subset.members)], sorted(subset.members)
        call = KernelCall(members[0], members, kernel, subset.inputs, subset.outputs, like, aliases=subset.aliases)
        found.append(call)
    return found


def _updating_call(level: Computation, subset: Region, update: InplaceUpdate, kernel: CompiledKernel) -> KernelCall:
    """The call of a kernel that writes into the array that its result becomes part of."""
    eqns, place = level.closed.jaxpr.eqns, (update.placed.operand, update.placed.start)
    inputs = update.inputs(subset.inputs)
    taken = [n for n in (update.number, update.zeros) if n is not None]
    level.updated += taken
    covers, like = sorted(subset.members | set(taken)), eqns[max(subset.members)]
    return KernelCall(min(subset.members), covers, kernel, inputs, eqns[update.number].outvars, like, place)


def _copy_calls(level: Computation) -> list[KernelCall]:
    """Kernels for the updates that are left of arrays to which other kernels write."""
    left = inplace_update.copy_kernels(level, xla_devices.machine()) if level.updated else []
    extra_kernels.compile_kernels(update.placed.program for update in left)
    found = []
    for update in left:
        if (kernel := _compiled(update.placed.program, "update")) is None:
            continue
        eqn, operand = level.closed.jaxpr.eqns[update.number], update.placed.operand
        inputs = update.inputs([eqn.invars[1]])
        covers = [n for n in (update.zeros, update.number) if n is not None]
        level.copied += covers
        place = operand, update.placed.start
        found.append(KernelCall(update.number, covers, kernel, inputs, eqn.outvars, eqn, place))
    return found


def _compiled(program: Program, what: str) -> CompiledKernel | None:
    try:
        return kernel_for(program)
    except JcutsError as error:
        log.warning("%s left to XLA: %s", what, error)
        return None


# -- rebuild --------------------------------------------------------------------------------------------------------
def with_calls(top: Computation, calls: Calls) -> jaxapi.Closed:
    """The function with its kernel calls, and those of its loop bodies, in place of the equations that they cover."""
    return _rebuilt(top, {id(level): calls[place] for place, level in enumerate(top.walk())})


def _rebuilt(level: Computation, calls: Mapping[int, Sequence[KernelCall]]) -> jaxapi.Closed:
    mine = calls[id(level)]
    units = {call.number: call.covers for call in mine}
    replacement = {c.number: kernel_eqns(c.kernel, c.inputs, c.outputs, c.like, c.place, c.aliases) for c in mine}
    count = len(level.closed.jaxpr.eqns)
    for number, bodies in level.bodies.items():
        rebuilt = [_rebuilt(body, calls) for body in bodies]
        units[count + number] = [number]
        replacement[count + number] = [jaxapi.with_inner_jaxprs(level.closed.jaxpr.eqns[number], rebuilt)]
    return in_order(level.closed, units, replacement)


# -- chain ----------------------------------------------------------------------------------------------------------
def with_chains(closed: jaxapi.Closed, settings: Settings, platform: str) -> jaxapi.Closed:
    """With one call for kernels that can follow each other, in the function and in its loop bodies; on a CPU also for
    scans whose body is such a call.
    """
    eqns = []
    for eqn in closed.jaxpr.eqns:
        if jaxapi.primitive_name(eqn) in CONTROL_FLOW:
            bodies = [body for _, _, body in jaxapi.inner_jaxprs(eqn)]
            chained = [with_chains(body, settings, platform) for body in bodies]
            if any(new is not old for new, old in zip(chained, bodies, strict=True)):
                eqn = jaxapi.with_inner_jaxprs(eqn, chained)
        eqns.append(eqn)
    if any(new is not old for new, old in zip(eqns, closed.jaxpr.eqns, strict=True)):
        closed = jaxapi.with_eqns(closed, eqns)
    return fuse_where_wanted(closed, settings, platform)


def fuse_where_wanted(closed: jaxapi.Closed, settings: Settings, platform: str) -> jaxapi.Closed:
    """One jaxpr with chains, where the variant has them; on a GPU, where it launches ahead."""
    wanted = knobs.current().chains and (settings.form is None or settings.form.chained)
    if wanted and platform == "cpu":
        closed = scans_as_calls(closed)
    if not wanted or not chains_fuse.calls(closed):
        return closed
    if platform != "cpu" and xla_devices.machine().capability < chains_fuse.EARLY:
        return closed
    return chains_fuse.fuse_calls(closed)


# -- show -----------------------------------------------------------------------------------------------------------
def winners(top: Computation) -> list[Program]:
    """The distinct chosen programs, in the order of their regions."""
    found: dict[str, Program] = {}
    for level in top.walk():
        for subset in level.subsets:
            if subset.chosen is not None:
                found.setdefault(subset.chosen.digest, subset.chosen)
    return list(found.values())


def kernel_texts(top: Computation) -> str:
    """The generated source of all winners."""
    return "\n".join(f"# {program.digest}\n{source_text(program)}" for program in winners(top))
