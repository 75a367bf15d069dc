"""Analytic time model of a kernel: an expression of resource terms (roofline, occupancy, latency, caches, launch).

A kernel family counts what a launch does and builds one expression; it is read in three ways:

    predicted time   every term at its fitted rate, overlapping as fitted: ranks schedules
    bound            every resource at the architecture's peak, all at once, no latency and no launch: a lower bound
    PUL              COEF_r * GMRatio * SMRatio * WBRatio of the same counts (`estimate.kernel_pul`)

GPUs read them by `KernelTime`, CPUs by `estimate.cpu_kernel`.

The nodes are

    term(resource, value, amount)          one resource for so many cycles; amount: what it does, in its unit
    overlap(remainder, parts)              resources that work at the same time: the longest, and a share of the others
    serial(parts)                          one after the other
    per_sm(times, part, ...)               what the resident blocks of an SM take, for every wave of blocks
    on_cores(part, share)                  what one core takes for everything, shared out to a CPU's cores
    scaled(name, factor, part)             a ratio that lengthens its part (occupancy, access width, last wave)
    soft_maximum(power, parts)             near the longest part, more where they are alike

Values are cycles or seconds, one of them in an expression; arrays where it prices a batch of schedules at once, of
which `of_schedule` reads one.  Source: thesis 3.2; Williams et al., Roofline (2009).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from jcuts.arch.gpu import GpuArch
from jcuts.estimate import batch


class Resource(StrEnum):
    """What a term is spent on.  Terms of the first five say how much they do; `PER_SM` and memory bound the time.

    A CPU core has those of the last group besides; its FMA ports are `COMPUTE`, its decoder is `ISSUE`, what comes from
    its second-level cache `L2`.
    """

    COMPUTE = "compute unit"
    """FLOP of tensor cores or FMA units, padding of tiles included (a CPU's bound: without)."""
    SMEM = "shared memory"
    """Bytes that pass the shared-memory port."""
    ISSUE = "issue"
    """Warp instructions; a CPU core's instructions of any kind."""
    L2 = "L2 cache"
    """Bytes that blocks ask the L2 cache for."""
    DRAM = "memory"
    """Compulsory bytes: operands and results."""
    ALU = "arithmetic"
    """Operations of single threads, as the program has them: an estimate, code may need fewer."""
    L1 = "L1 cache"
    DSMEM = "DSMEM"
    LATENCY = "load latency"
    CHAIN = "dependent instructions"
    GAP = "issue gaps"
    BARRIER = "barriers"
    START = "block start"
    EPILOGUE = "epilogue"
    REDUCE = "partial sums"
    LAUNCH = "launch"

    LOAD = "load ports"
    """Vector loads; rows that straddle lines and gathers take several slots."""
    STORE = "store ports"
    """Vector stores."""
    L3 = "L3 cache"
    """Bytes that come from beyond a core's second-level cache."""
    SPILL = "register spills"
    """Stores and loads of what does not fit the registers."""
    TILE = "tile overhead"
    """Prologue, epilogue and refilled pipelines of a register tile."""
    LOOP_END = "loop ends"
    """Mispredicted branches."""
    ADDRESS = "guarded addresses"
    """Scalar instructions outside the innermost loop."""
    TRANSFORM = "transforms"
    """Winograd's, of inputs, filters and outputs."""


PER_SM = (Resource.COMPUTE, Resource.SMEM, Resource.ISSUE)
"""Resources of which every SM has its own: the SM with most blocks decides."""


class TimeTerm:
    """A node of the expression. Its ``value`` is computed when it is made.

    Attributes:
        kind: 'term', 'overlap', 'serial', 'repeat', 'per_sm', 'on_cores', 'scaled' or 'soft_maximum'.
        name: the resource of a term, what a factor or a series stands for; value: cycles or seconds.
        parts: what it is made of.
        amount: of a term, in the resource's unit: FLOP, bytes, warp instructions; per SM inside `per_sm`.
        unit: of a term of a CPU, what does the amount: a dtype, a kind of instruction; '' elsewhere.
        times: how often the parts take place, or the factor; busiest, balanced: how often the blocks that the amounts
            count take place on the SM with most of them, and on average over all SMs.
    """

    __slots__ = ("amount", "balanced", "busiest", "kind", "name", "parts", "times", "unit", "value")

    def __init__(
        self,
        kind: str,
        name: str,
        value: float,
        parts: Sequence[TimeTerm] = (),
        amount: float = 0.0,
        times: float = 1.0,
        busiest: float = 1.0,
        balanced: float = 1.0,
        unit: str = "",
    ) -> None:
        self.kind, self.name, self.value, self.parts, self.amount = kind, name, value, parts, amount
        self.times, self.busiest, self.balanced, self.unit = times, busiest, balanced, unit


def term(resource: Resource, value: float, amount: float = 0.0, unit: str = "") -> TimeTerm:
    """One resource at work. Args: amount: what bounds the time at the resource's peak; 0 where nothing does."""
    return TimeTerm("term", resource.value, value, (), amount, unit=unit)


def overlap(remainder: float, parts: Sequence[TimeTerm]) -> TimeTerm:
    """Resources that work concurrently: the longest part, and ``remainder`` of the sum of the others."""
    values = [part.value for part in parts]
    longest = batch.maximum(*values)
    return TimeTerm("overlap", "", longest + remainder * (sum(values) - longest), parts, times=remainder)


def serial(parts: Sequence[TimeTerm], name: str = "") -> TimeTerm:
    """Parts that follow each other. Args: name: what they are together, for `named`."""
    value = 0.0
    for part in parts:
        value += part.value
    return TimeTerm("serial", name, value, parts)


def repeat(times: float, part: TimeTerm) -> TimeTerm:
    """A loop of so many iterations, such as the k-tiles of a mainloop."""
    return TimeTerm("repeat", "", times * part.value, (part,), times=times, busiest=times, balanced=times)


def per_sm(waves: float, part: TimeTerm, *, resident: float, blocks: float, sms: int) -> TimeTerm:
    """Waves of resident blocks on every SM.

    Args: part: what ``resident`` blocks of one SM take, amounts of all of them; blocks: of the launch.
    """
    busiest = batch.ceil(blocks / sms) / resident
    return TimeTerm("per_sm", "", waves * part.value, (part,), times=waves, busiest=busiest, balanced=blocks / resident)


def on_sms(part: TimeTerm, *, blocks: int, sms: int) -> TimeTerm:
    """A part whose amounts are those of one block, and whose value is that of the whole launch."""
    return TimeTerm("per_sm", "", part.value, (part,), busiest=math.ceil(blocks / sms), balanced=blocks)


def on_cores(part: TimeTerm, share: float) -> TimeTerm:
    """A part whose value and amounts are one core's for all tasks. Args: share: of the tasks on the busiest core."""
    return TimeTerm("on_cores", "", share * part.value, (part,), times=share, busiest=share)


def scaled(name: str, factor: float, part: TimeTerm) -> TimeTerm:
    """A part that a ratio lengthens. Args: name: what it stands for; factor: > 1 lengthens."""
    return TimeTerm("scaled", name, factor * part.value, (part,), times=factor)


def by_ratios(part: TimeTerm, ratios: Mapping[str, float]) -> TimeTerm:
    """A part that reaches only a share of its rate. Args: ratios: shares in (0, 1] by what they stand for."""
    for name, share in ratios.items():
        part = scaled(name, 1.0 / share, part)
    return part


def soft_maximum(power: int, *parts: TimeTerm) -> TimeTerm:
    """(a^p + b^p + ...)^(1/p): near the longest part, more where they are alike. Args: power: 2 or 4."""
    values = [part.value for part in parts]
    value = math.hypot(*values)
    if power == 4:
        value = math.sqrt(math.hypot(*(v**2 for v in values)))
    return TimeTerm("soft_maximum", "", value, parts, times=power)


def longest(parts: Sequence[TimeTerm]) -> TimeTerm:
    """Resources that overlap perfectly."""
    return overlap(0.0, parts)


def soft_longest(remainder: float, total: TimeTerm, memory: TimeTerm, start: TimeTerm) -> TimeTerm:
    """The launch beside its memory traffic: the longer of both, and a share of the shorter.

    max(total, memory + start) + remainder * min(total, memory)
    """
    longer = batch.maximum(total.value, memory.value + start.value)
    value = longer + remainder * batch.minimum(total.value, memory.value)
    return TimeTerm("overlap", "", value, (total, memory), times=remainder)


def at_least(value: float, part: TimeTerm) -> TimeTerm:
    """A part that takes no less than a floor, such as the latency of one load."""
    return part if part.value >= value else overlap(0.0, (part, term(Resource.LATENCY, value)))


def of_schedule(root: TimeTerm, place: int) -> TimeTerm:
    """The expression of one schedule of a batch, without the parts that do and take nothing there."""
    parts = [of_schedule(part, place) for part in root.parts]
    parts = [part for part in parts if part.kind != "term" or part.value or part.amount]
    if root.kind == "serial" and len(parts) == 1:
        return parts[0]
    value, amount, times, busiest, balanced = (
        batch.pick(x, place) for x in (root.value, root.amount, root.times, root.busiest, root.balanced)
    )
    return TimeTerm(root.kind, root.name, value, parts, amount, times, busiest, balanced, root.unit)


@dataclass(frozen=True)
class KernelTime:
    """The model of one call of a kernel.

    Attributes:
        root: the expression. hertz: clock of its cycles [1/s]; 1 where it is in seconds.
        unit: the compute unit that its FLOP are done by, as `GpuArch.flop_per_clock_sm` names it.
        compulsory: bytes that any kernel of the operation has to read or write at least once.
        fits: whether a multiprocessor holds a block (COEF_r).
        flop: operations of a kernel whose terms do not say them: PUL alone reads it.
    """

    root: TimeTerm
    hertz: float = 1.0
    unit: str = "ffma"
    compulsory: float = 0.0
    fits: bool = True
    flop: float = 0.0

    @property
    def seconds(self) -> float:
        """Predicted time [s]; infinite where no block fits."""
        return self.root.value / self.hertz if self.fits else math.inf

    def bound(self, arch: GpuArch, resident: float = 0.0) -> float:
        """Lower bound on the time [s]. Args: resident: bytes of operands and results that the L2 cache may hold."""
        return max(self.limits(arch, resident).values())

    def limits(self, arch: GpuArch, resident: float = 0.0) -> dict[str, float]:
        """Seconds that every resource takes at its peak: units and shared memory of the SM that has most blocks, the
        compulsory bytes by the L2 cache, and what of them it cannot hold by the memory.

        Source: roofline; the traffic that blocks repeat is left out: caches may serve it.
        """
        moved = max(0.0, self.compulsory - min(resident, arch.l2_bytes))
        found = {Resource.DRAM.value: moved / arch.bw_global, Resource.L2.value: self.compulsory / arch.bw_l2}
        for name, (busiest, _) in amounts(self.root).items():
            if name in PER_SM:
                found[name] = busiest / peak_rate(arch, name, self.unit)
        return found


def peak_rate(arch: GpuArch, resource: str, unit: str) -> float:
    """Ceiling of one SM for a resource of `PER_SM`, in its unit per second."""
    if resource == Resource.COMPUTE:
        return arch.peak(unit) / arch.num_sm
    return (arch.shared_bytes_per_clock if resource == Resource.SMEM else arch.issue_per_clock) * arch.clock


def amounts(root: TimeTerm) -> dict[str, tuple[float, float]]:
    """What resources do in a call, in their units: on the SM with most blocks, and over all SMs together."""
    found: dict[str, tuple[float, float]] = {}
    for (name, _), (busiest, balanced) in amounts_by_unit(root).items():
        old = found.get(name, (0.0, 0.0))
        found[name] = (old[0] + busiest, old[1] + balanced)
    return found


def amounts_by_unit(root: TimeTerm) -> dict[tuple[str, str], tuple[float, float]]:
    """The same by resource and unit: FLOP of one dtype, vector instructions of one kind."""
    found: dict[tuple[str, str], tuple[float, float]] = {}
    for node, busiest, balanced in _leaves(root, 1.0, 1.0):
        if node.amount:
            key = node.name, node.unit
            old = found.get(key, (0.0, 0.0))
            found[key] = (old[0] + busiest * node.amount, old[1] + balanced * node.amount)
    return found


def _leaves(node: TimeTerm, busiest: float, balanced: float) -> Iterator[tuple[TimeTerm, float, float]]:
    if node.kind == "term":
        yield node, busiest, balanced
    for part in node.parts:
        yield from _leaves(part, busiest * node.busiest, balanced * node.balanced)


def breakdown(root: TimeTerm) -> Mapping[str, float]:
    """What every resource takes by itself over the whole call, in the unit of the expression."""
    found: dict[str, float] = {}
    for node, times in _nodes(root, 1.0):
        if node.kind == "term":
            found[node.name] = found.get(node.name, 0.0) + times * node.value
    return found


def named(root: TimeTerm, name: str) -> float:
    """What the series of this name take over the whole call, in the unit of the expression."""
    return sum(times * node.value for node, times in _nodes(root, 1.0) if node.kind == "serial" and node.name == name)


def _nodes(node: TimeTerm, times: float) -> Iterator[tuple[TimeTerm, float]]:
    """Every node, with how often it takes place."""
    yield node, times
    inner = times * node.times if node.kind in ("repeat", "per_sm", "on_cores", "scaled") else times
    for part in node.parts:
        yield from _nodes(part, inner)


def text(root: TimeTerm, indent: int = 0) -> str:
    """The expression as an indented tree: value, node, and what it stands for."""
    how = {
        "term": root.name,
        "overlap": f"overlap, {root.times:g} of the shorter",
        "serial": root.name or "serial",
        "on_cores": f"on the busiest core: x {root.times:.3g}",
        "repeat": f"{root.times:g} x",
        "per_sm": f"{root.times:g} waves",
        "scaled": f"{root.name}: x {root.times:.3g}",
        "soft_maximum": f"soft maximum, power {root.times:g}",
    }[root.kind]
    amount = f" ({root.amount:.4g})" if root.amount else ""
    lines = [f"{'  ' * indent}{root.value:12.5g}  {how}{amount}"]
    return "\n".join([*lines, *(text(part, indent + 1) for part in root.parts)])
