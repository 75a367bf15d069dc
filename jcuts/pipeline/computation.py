"""State of one jaxpr (the function, or a loop body) in the pass pipeline: its def-use graph, regions, nested bodies."""

from __future__ import annotations

import functools
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from jcuts.base import keys, knobs, warn_once
from jcuts.base.errors import JcutsError, Refusal
from jcuts.base.settings import Settings
from jcuts.codegen.artifact import CompiledKernel
from jcuts.fusion import greedy
from jcuts.fusion.dag import NodeSet as Members
from jcuts.fusion.match_attention import fuse_attention
from jcuts.fusion.match_attention_backward import fuse_attention_backward
from jcuts.kernel_ir.program import Program
from jcuts.lower.tensor_graph import MOST_JOINED, MOST_SWITCHED, TensorGraph, build_graph
from jcuts.ops.gather import IN_PLACE
from jcuts.rewrite.simplify import CONTROL_FLOW
from jcuts.rewrite.tf32_weight_args import rounded_operands
from jcuts.schedule.cpu import candidates as cpu_candidates
from jcuts.schedule.cpu import loop_candidates
from jcuts.schedule.cpu.bound import host_arch, machine_of
from jcuts.schedule.gpu import candidates as gpu_candidates
from jcuts.trace import jaxapi
from jcuts.trace.canonical import canonical_digest
from jcuts.trace.loop_carries import accumulations
from jcuts.trace.source import place
from jcuts.xla import devices as xla_devices
from jcuts.xla.rebuild import subset_closed

log = logging.getLogger("jcuts")

Ranked = list[tuple[Program, float]]
_Made = TypeVar("_Made")

MIN_WORK = 2_000  # element operations below which a subset is not worth a kernel call of its own
TOO_LITTLE = "too little work for a kernel call of its own"
TO_FUSE = "element-wise: XLA fuses it into what surrounds it"
CONSTANT = "depends on no argument: XLA computes it once"
MOST_RANKINGS = 1024
"""Programs whose ranked schedules a process remembers."""
MOST_GROUPED = 16
"""Functions whose regions a process remembers."""
NOT_ASKED = "the form has no kernels"
OF_LIBRARY = "a product: the form leaves it to XLA's libraries"
IN_CARRY = "a product that is added to a loop's carry: XLA's libraries do that in place"
BETWEEN = "the fastest partition leaves it to XLA"
CHOICES = (TOO_LITTLE, TO_FUSE, CONSTANT, NOT_ASKED, OF_LIBRARY, IN_CARRY, IN_PLACE, BETWEEN)
"""Reasons that are choices, where other refusals are inabilities."""


@dataclass
class Region:
    """A region: equations that could be one kernel, with its candidates and choice.

    Attributes:
        members: equation numbers. program: unscheduled. inputs, outputs: variables of the level's jaxpr.
        closed: the subset as a function of its own; identity: its canonical digest.
        ranking: makes `ranked`, once it is asked for: scoring every schedule takes time that a stored choice saves.
        space: text that determines the ranking. chosen: the winner, None where XLA keeps the subset.
        origin: 'measured', 'estimated' or 'library'; choice: the tuner's answer with every time.
        source: where the choice comes from (`tune.row_signature`), '' where nothing was measured.
        rounded: numbers of the inputs that hold TF32 numbers only (they are part of the identity).
        kernel: the compiled winner, once it is compiled.
        aliases: numbers of inputs that the winner overwrites -> of the outputs in their memory.
    """

    members: Members
    program: Program
    inputs: list[Any]
    outputs: list[Any]
    closed: jaxapi.Closed
    identity: str
    ranking: Callable[[], Ranked] = list
    space: str = ""
    chosen: Program | None = None
    origin: str = "library"
    choice: Any = None
    source: str = ""
    rounded: tuple[int, ...] = ()
    kernel: CompiledKernel | None = None
    aliases: Mapping[int, int] = field(default_factory=dict)

    @property
    def ranked(self) -> Ranked:
        """Scheduled programs with their ranking score, best first; none where there is no kernel form."""
        return self.ranking()


Part = tuple[list[Any], list[Any], Any, str, tuple[int, ...]]
"""Inputs, outputs, jaxpr, identity and rounded inputs of a subset."""


@dataclass
class Computation:
    """One jaxpr (the function, or a loop body) with its state between passes.

    ``library`` are subsets that XLA keeps without a measurement, such as the vendor libraries' products on a GPU.
    ``parts`` is what its subsets are, ``moved`` its covers after prologue and epilogue moves: the forms of a function
    share them, as they share its graph.
    ``updated`` are updates in place that kernels took over (`updates`), and what made arrays that they begin;
    ``copied`` those that kernels make of what XLA computed; ``accumulated`` add to a loop's carry
    (`trace.loop_carries`); ``loops`` are scans that are one kernel, regions of every cover; ``refused_loops`` says why
    others are none.  The greedy cover,
    ``grouping``, is looked for when it is first asked for: who takes a stored one never does.
    """

    closed: jaxapi.Closed
    graph: TensorGraph
    grouped: Callable[[], greedy.Grouping]
    mixed: bool
    parts: dict[Members, Part] = field(default_factory=dict)
    moved: dict[tuple[object, ...], list[tuple[Members, Program]]] = field(default_factory=dict)
    chosen_subsets: list[Region] = field(default_factory=list)
    left_out: dict[int, Refusal] = field(default_factory=dict)
    bodies: dict[int, list[Computation]] = field(default_factory=dict)
    subset_cache: dict[Members, Region] = field(default_factory=dict)
    library: list[Region] = field(default_factory=list)
    updated: list[int] = field(default_factory=list)
    copied: list[int] = field(default_factory=list)
    accumulated: Members = frozenset()
    loops: dict[int, Region] = field(default_factory=dict)
    refused_loops: dict[int, Refusal] = field(default_factory=dict)
    begun: bool = False

    @functools.cached_property
    def grouping(self) -> greedy.Grouping:
        """The greedy cover."""
        return self.grouped()

    @functools.cached_property
    def names(self) -> dict[int, Any]:
        """Variables of the jaxpr by their tensors."""
        return {number: var for var, number in self.graph.of_var.items()}

    @property
    def subsets(self) -> list[Region]:
        """The subsets of the level's cover: the greedy one, unless another was taken."""
        if not self.begun:
            self.set_partition(self.grouping.subsets)
        return self.chosen_subsets

    @subsets.setter
    def subsets(self, subsets: list[Region]) -> None:
        self.chosen_subsets, self.begun = subsets, True

    def walk(self) -> list[Computation]:
        """This level and all levels inside it."""
        return [self, *(inner for bodies in self.bodies.values() for body in bodies for inner in body.walk())]

    def is_small(self, program: Program) -> bool:
        """Too little work for a kernel call of its own (modes that ask for kernels get them all the same)."""
        return self.mixed and loop_candidates.work(program.phases[0]) < MIN_WORK

    def subset(self, members: Members, program: Program) -> Region:
        """The subset of these equations; the same object, with what is known of it, when asked again."""
        if members not in self.subset_cache:
            if members not in self.parts:
                self.parts[members] = self._part(members)
            inputs, outputs, part, identity, rounded = self.parts[members]
            self.subset_cache[members] = Region(
                members, program, list(inputs), list(outputs), part, identity, rounded=rounded
            )
        return self.subset_cache[members]

    def _part(self, members: Members) -> Part:
        """What a subset is, whichever form it belongs to."""
        inputs = [self.names[t] for t in self.graph.subset_inputs(members)]
        outputs = [self.names[t] for t in self.graph.subset_outputs(members)]
        part = subset_closed(self.closed, sorted(members), inputs, outputs)
        rounded = tuple(k for k, t in enumerate(self.graph.subset_inputs(members)) if self.graph.tensors[t].tf32)
        identity = canonical_digest(part) + (f" tf32 {rounded}" if rounded else "")
        return inputs, outputs, part, identity, rounded

    def small_regions(self) -> list[tuple[Members, Program]]:
        """Regions of the greedy partition that have too little work, and are in no subset."""
        covered = frozenset[int]().union(*(s.members for s in self.subsets))
        return [(m, program) for m, program in self.grouping.subsets if self.is_small(program) and not m & covered]

    def set_partition(self, cover: Iterable[tuple[Members, Program]], small: Collection[Members] = ()) -> None:
        """Makes these the level's subsets; all other equations are left to XLA, each with a reason. Args: small: those
        that are subsets with little work, too.
        """
        self.subsets = []
        for members, program in cover:
            if members in small or not self.is_small(program):
                self.subsets.append(self.subset(members, program))
        if self.loops:
            self.subsets = sorted([*self.subsets, *self.loops.values()], key=lambda s: max(s.members))
        covered = frozenset[int]().union(*(s.members for s in self.subsets))
        small = [members for members, program in self.grouping.subsets if self.is_small(program)]
        reasons = dict.fromkeys((n.number for n in self.graph.nodes), BETWEEN)
        reasons.update(dict.fromkeys((m for members in small for m in members), TOO_LITTLE))
        self.left_out = {m: Refusal(self.graph.nodes[m].prim, why) for m, why in reasons.items()}
        self.left_out.update(self.grouping.left_out)
        for number in (*covered, *self.bodies):
            self.left_out.pop(number, None)

    @property
    def fused(self) -> list[tuple[Members, Program]]:
        """The subsets that are no loop, with their programs."""
        return [(s.members, s.program) for s in self.subsets if self.loops.keys().isdisjoint(s.members)]

    def leave_to_xla(self, reason_of: Callable[[Region], str]) -> None:
        """Leaves the subsets to XLA for which ``reason_of`` gives a reason (not '')."""
        kept = []
        for subset in self.subsets:
            if reason := reason_of(subset):
                self.left_out.update(dict.fromkeys(subset.members, Refusal(subset.program.template, reason)))
                self.library.append(subset)
            else:
                kept.append(subset)
        self.subsets = kept

    def leave_all_to_xla(self, reason: str) -> None:
        """Leaves all equations to XLA, without looking for subsets."""
        self.subsets = []
        kept = [node for node in self.graph.nodes if node.number not in self.bodies]
        self.left_out = {node.number: node.refusal or Refusal(node.prim, reason) for node in kept}

    def leave_equations(self, members: Members) -> None:
        """Leaves equations to XLA, and takes the subsets that contain any of them apart."""
        self.subsets = [s for s in self.subsets if not s.members & members]
        self.left_out.update({m: Refusal(self.graph.nodes[m].prim, BETWEEN) for m in members})

    def merge_into(self, subset: Region) -> None:
        """Makes one subset of what its operations are in now: others, or left to XLA."""
        for kept in (self.subsets, self.library):
            kept[:] = [s for s in kept if not s.members & subset.members]
        self.left_out = {m: why for m, why in self.left_out.items() if m not in subset.members}
        self.subsets = sorted([*self.subsets, subset], key=lambda s: max(s.members))

    def has_reduction(self, members: Members) -> bool:
        """Whether an operation among them collects many elements into one."""
        return any(op is not None and op.is_root for op in (self.graph.nodes[m].op for m in members))


class Fuel:
    """Counts fusions down (``JCUTS_FUEL``)."""

    def __init__(self) -> None:
        self.left = knobs.current().fuel

    def __call__(self) -> bool:
        if self.left is None:
            return True
        self.left -= 1
        return self.left >= 0


_Grouped = tuple[TensorGraph, Callable[[], greedy.Grouping], dict[Members, Part], dict[Any, Any]]
_grouped: OrderedDict[tuple[int, bool, str], tuple[jaxapi.Closed, _Grouped]] = OrderedDict()
"""By the identity of a jaxpr, which is kept with it: forms of a function differ in less than their graph."""
_grouped_lock = threading.Lock()


def _grouping(closed: jaxapi.Closed, fuse: bool, fuel: Fuel, platform: str) -> _Grouped:
    key = (id(closed), fuse, platform)
    with _grouped_lock:
        known = _grouped.get(key)
    if known is not None and fuel.left is None:
        return known[1]
    parts: dict[Members, Part] = {}
    moved: dict[Any, Any] = {}
    if platform == "cpu":
        graph = build_graph(closed.jaxpr, place, joined=MOST_JOINED)
    else:
        graph = build_graph(closed.jaxpr, place, joined=MOST_SWITCHED, tf32=rounded_operands(closed))

    @functools.cache
    def grouped() -> greedy.Grouping:
        grouping = greedy.group(graph, fuse=fuse, fuel=fuel, column_sums=platform != "cpu")
        if fuse and platform != "cpu":
            subsets = fuse_attention(graph, grouping.subsets, fuel)
            grouping = replace(grouping, subsets=fuse_attention_backward(graph, subsets, fuel))
        return grouping

    if fuel.left is None:
        with _grouped_lock:
            _grouped[key] = (closed, (graph, grouped, parts, moved))
            while len(_grouped) > MOST_GROUPED:
                _grouped.popitem(last=False)
    return graph, grouped, parts, moved


def group(
    closed: jaxapi.Closed, settings: Settings, fuel: Fuel, platform: str = "cpu", *, wait: bool = False
) -> Computation:
    """The level of a flat jaxpr with its greedy cover, and the levels of its loop bodies.

    Args: wait: the cover is looked for when it is asked for, unless fusions are counted.
    """
    graph, grouped, parts, moved = _grouping(closed, settings.mode != "no_fusion", fuel, platform)
    level = Computation(closed, graph, grouped, settings.mode == "mixed", parts, moved)
    if not wait or fuel.left is not None:
        _ = level.grouping  # fuel is spent level by level
    for number, eqn in enumerate(closed.jaxpr.eqns):
        if jaxapi.primitive_name(eqn) in CONTROL_FLOW:
            level.bodies[number] = [
                group(body, settings, fuel, platform, wait=wait) for _, _, body in jaxapi.inner_jaxprs(eqn)
            ]
        if jaxapi.primitive_name(eqn) == "scan":
            for body in level.bodies[number]:
                body.accumulated = accumulations(eqn, body.closed)
    if not wait or fuel.left is not None:
        _ = level.subsets
    return level


def machine() -> loop_candidates.Machine:
    """This CPU as the candidate enumeration sees it."""
    from jcuts.codegen.cpu.target import host_target
    from jcuts.xla.cpu_ffi_call import pool_threads

    target = host_target()
    return machine_of(host_arch(), target.vector_bytes, target.registers, pool_threads())


_rankings: dict[str, Callable[[], Ranked]] = {}
"""By what determines them: the forms of a function have most subsets in common, and networks repeat theirs."""


_forms: dict[tuple[str, str], bool] = {}
"""Whether programs have a kernel form: by digest and GPU."""


def _ranking_of(platform: str) -> Callable[[Program], tuple[str, Callable[[], Ranked]]]:
    """A function that gives a program's ``space`` and ``ranking`` (see `Subset`) on the platform."""
    limit, percent = knobs.current().max_candidates, knobs.current().top_percent
    if platform == "cpu":
        here: Any = machine()
        schedules: Callable[..., Ranked] = cpu_candidates.candidates
    else:
        here, schedules = xla_devices.machine(), gpu_candidates.candidates

    def ranking_of(program: Program) -> tuple[str, Callable[[], Ranked]]:
        space = keys.ranking(program.digest, repr(here), limit, percent)
        if space not in _rankings:
            if len(_rankings) >= MOST_RANKINGS:
                _rankings.clear()
            make = functools.partial(schedules, program, here, limit, percent)
            _rankings[space] = functools.cache(functools.partial(_unless_it_fails, program.name, make, []))
        return space, _rankings[space]

    return ranking_of


def _unless_it_fails(name: str, make: Callable[[], _Made], otherwise: _Made) -> _Made:
    """What is made of a program's schedules; ``otherwise``, and a warning, where that fails by an error of jcuts.

    XLA then keeps the subset.
    """
    try:
        return make()
    except JcutsError:
        raise
    except Exception as error:
        if knobs.current().raise_errors:
            raise
        text = f"{type(error).__name__}: {error}"
        warn_once.warn_once(
            log, text, "%s is left to XLA: an error of jcuts, %s (JCUTS_RAISE_ERRORS=1 shows where)", name, text
        )
        return otherwise


def has_gpu_kernel(program: Program) -> bool:
    """Whether a program can be a kernel on this process' GPUs."""
    here = xla_devices.machine()
    key = program.digest, repr(here)
    if key not in _forms:
        if len(_forms) >= MOST_RANKINGS:
            _forms.clear()
        make = functools.partial(gpu_candidates.has_candidates, program, here)
        _forms[key] = _unless_it_fails(program.name, make, False)
    return _forms[key]


def add_candidates(subsets: Iterable[Region], platform: str = "cpu") -> None:
    """Gives subsets that have none yet their ranking; equal programs share one, made when it is first asked for."""
    ranking_of = _ranking_of(platform)
    for subset in subsets:
        if not subset.space:
            subset.space, subset.ranking = ranking_of(subset.program)
