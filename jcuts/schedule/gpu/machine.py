"""The GPU as the scheduler sees it (SMs, threads, capability), and register-tile helpers that all families share."""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from jcuts.arch.gpu import GpuArch
from jcuts.arch.load import list_gpus, load_gpu, nearest_gpu
from jcuts.arch.sm_limits import SM_90, SmLimits, nearest_limits
from jcuts.estimate import batch
from jcuts.kernel_ir.index import Index
from jcuts.kernel_ir.node import Node
from jcuts.kernel_ir.program import ITEM_SIZE, Axis, Phase, Program
from jcuts.lower.patterns.column_sums import SUMS, match_column_sums
from jcuts.schedule import fit

ACCESS = 16  # bytes of the widest access
TAPS = 64  # terms of a window that are unrolled in a thread; longer reductions are shared by a team
REGISTERS = 128  # 32-bit values that a tile may keep: twice that fits, but leaves few warps
MOST_REGISTERS = 168  # of a thread that walks, as estimated
SECTOR = SM_90.sector_bytes
RESIDENT = 32  # elements of a row that one thread keeps in registers
IN_FLIGHT = 6 << 20  # bytes: memory bandwidth times latency of the largest GPUs, with room
WARP = SM_90.warp_threads
SHARED = 40 << 10  # bytes of shared memory that partial results of a block may take

Candidate = tuple[Program, float]
Record = TypeVar("Record")


@dataclass(frozen=True)
class GpuMachine:
    """Machine description of a GPU for schedule enumeration.

    Attributes:
        sms: multiprocessors.
        threads_per_sm: resident threads per multiprocessor; by default those of the capability.
        capability: compute capability (major, minor).
        arch: its rates; by default the shipped GPU of the capability with the fastest memory.
    """

    sms: int
    threads_per_sm: int = 0
    capability: tuple[int, int] = (9, 0)
    arch: GpuArch = field(default=None, repr=False)  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if not self.threads_per_sm:
            object.__setattr__(self, "threads_per_sm", self.limits.threads_per_sm)
        if self.arch is None:
            object.__setattr__(self, "arch", nearest_gpu(self.capability))

    @classmethod
    def of(cls, arch: GpuArch) -> GpuMachine:
        """The machine of an architecture (`arch.load.load_gpu`)."""
        return cls(arch.num_sm, arch.max_threads_per_sm, divmod(arch.compute_capability, 10), arch)

    @classmethod
    def named(cls, name: str) -> GpuMachine:
        """The machine of a GPU that ships with jcuts, such as "H200".  Raises: as `load_gpu`."""
        return cls.of(load_gpu(name))

    @functools.cached_property
    def _scaled(self) -> dict[tuple[str, str], object]:
        """Tables of fitted coefficients that were scaled for this GPU."""
        return {}

    def coefficients(self, family: str, table: str) -> fit.Coefficients:
        """A table of fitted coefficients, scaled by this GPU's rates (`fit.Coefficients.for_gpu`)."""
        found = self._scaled.get((family, table))
        if found is None:
            found = self._scaled[family, table] = fit.coefficients(family, table).for_gpu(self.arch)
        return found  # type: ignore[return-value]

    def record(self, family: str, table: str, kind: type[Record]) -> Record:
        """The same as a dataclass of the coefficients (`fit.record`)."""
        found = self._scaled.get((family, table))
        if not isinstance(found, kind):
            found = self._scaled[family, table] = fit.record(family, table, kind, self.arch)
        return found

    @property
    def bandwidth(self) -> float:
        """Of its memory [byte/s]."""
        return self.arch.bw_global

    @property
    def clock_hertz(self) -> float:
        """Clock at which cycles of the fitted models pass [Hz]: below the highest one, as under load."""
        return self.coefficients("gpu/window", "cost").clock_hertz

    @property
    def limits(self) -> SmLimits:
        """What a multiprocessor has, by capability."""
        return nearest_limits(self.capability)

    def resident_blocks(self, threads: int, registers: float, shared: int) -> int:
        """Occupancy: blocks that a multiprocessor holds at once, 0 if it holds none.

        Args: threads: of a block; registers: of a thread, allocated in eights; shared: bytes of shared memory of a
            block, without what the system takes for each. All may be arrays of one number per schedule.
        """
        has = self.limits
        by_shared = has.smem_per_sm_bytes // batch.maximum(1, shared + has.smem_reserved_per_block_bytes)
        by_registers = has.registers_per_sm // (8 * batch.ceil(registers / 8) * threads)
        return batch.minimum(by_shared, by_registers, self.threads_per_sm // threads, has.blocks_per_sm)

    @property
    def threads(self) -> int:
        """Resident threads of the whole GPU."""
        return self.sms * self.threads_per_sm

    @property
    def multiplies(self) -> bool:
        """Whether GEMMs have tensor-core schedules: `cp.async` exists, and float32 may be rounded to TF32."""
        return self.capability >= (8, 0)


def unit_rate(table: fit.Coefficients, item: int) -> float:
    """Products per cycle and SM of a table's tensor cores. Args: item: bytes of an operand: 4 TF32, 2 of 16 bits."""
    return table.half_products_per_cycle if item == 2 else table.tf32_products_per_cycle


@functools.cache
def fastest_memory() -> float:
    """Bytes per second of the fastest memory among the GPUs that jcuts knows."""
    return max(load_gpu(name).bw_global for name in list_gpus())


def scheduled(program: Program, form: str, threads: int, *more: tuple[str, object]) -> Program:
    return replace(
        program,
        grid=program.grid if len(program.phases) > 1 else (),
        lanes=1,
        params=(("cuda", form), ("threads", threads), *more, *_column_sums(program)),
    )


def _column_sums(program: Program) -> tuple[tuple[str, object], ...]:
    """What tells the schedules of a program with column sums from others (`families`, ``excluded``)."""
    found = match_column_sums(program)
    return () if found is None else ((SUMS, found.partials),)


def unrolled(program: Program, unroll: Mapping[str, int]) -> Program:
    phase = program.phases[0]
    # Not `replace`, which looks at every field: enumerations make thousands of tiles.
    axes = tuple(Axis(a.name, a.extent, min(unroll.get(a.name, 1), a.extent), a.vector) for a in phase.axes)
    return replace(program, phases=(replace(phase, axes=axes),))


def tiled(program: Program, unroll: dict[str, int], terms: dict[str, int]) -> Program:
    phase = unrolled(program, unroll).phases[0]
    reds = tuple(replace(r, unroll=terms.get(r.name, 1), chains=1) for r in phase.reds)
    return replace(program, phases=(replace(phase, reds=reds),))


def loads_of(phase: Phase) -> list[Node]:
    graphs = (phase.body, phase.exit) if phase.reds else (phase.exit,)
    return [n for g in graphs for n in g.nodes if n.op == "load" and isinstance(n.index, Index)]


def narrowest(program: Program) -> int:
    """Bytes of an element of the largest operand or result, which decides the vector width."""
    largest = max((b for b in program.buffers if b.role != "local"), key=lambda b: (b.bytes, b.name))
    return ITEM_SIZE[largest.dtype]


def vectors(extent: int, size: int) -> list[int]:
    """Vector widths (elements per thread) with aligned accesses, widest first; 1 and an unaligned 4 where there are
    none.
    """
    widest = max(1, ACCESS // size)
    found = [v for v in (2 * widest, widest, widest // 2) if v >= 1 and extent % v == 0]
    found += [v for v in (widest // 4,) if v > 1 and extent % v == 0 and not found]
    return found or [1]


def transposed_axis(phase: Phase, lane: str) -> Axis | None:
    """The axis along which an operand is contiguous but not along the lanes: a transpose."""
    for node in loads_of(phase):
        assert node.index is not None
        if node.index.stride(lane) in (0, 1, None):
            continue
        for axis in phase.axes[:-1]:
            if node.index.stride(axis.name) == 1:
                return axis
    return None


def unroll_period(phase: Phase, axis: str) -> int:
    """Period of all remainders in addresses and guards along an axis: stride or dilation."""
    period = 1

    def visit(index: Index) -> None:
        nonlocal period
        for atom, _ in index.terms:
            if atom.inner is not None:
                if axis in atom.inner.axes():
                    step = atom.inner.stride(axis)
                    period = math.lcm(period, atom.modulus // math.gcd(atom.modulus, step or 1))
                visit(atom.inner)

    for graph in (phase.body, phase.exit):
        for node in graph.nodes:
            for index in (node.index, *(g.index for g in node.guards)):
                if index is not None:
                    visit(index)
    return period


def window_values(phase: Phase, unroll: dict[str, int]) -> int:
    """Values that a window's register tile loads."""
    return distinct_loads(phase, {**unroll, **{r.name: r.extent for r in phase.reds}})


def distinct_loads(phase: Phase, counts: dict[str, int]) -> int:
    """Distinct addresses that a register tile of so many points per axis loads."""
    total = 0
    for node in loads_of(phase):
        assert node.index is not None
        index = node.index
        even = {n: c for n, c in counts.items() if index.stride(n) is not None and c > 1}
        odd = {n: c for n, c in counts.items() if index.stride(n) is None}
        distinct: set[object] = {0}
        if odd and not index.values():
            moduli = [g for g in node.guards if g.low == g.high]
            distinct = set()
            for point in itertools.product(*(range(c) for c in odd.values())):
                where = dict(zip(odd, point, strict=True))
                if all(_number(g.index, where) == g.low for g in moduli):
                    distinct.add(_number(index, where))
        for name, count in even.items():
            stride = index.stride(name)
            if stride:
                distinct = {d + stride * k for d in distinct for k in range(count)}  # type: ignore[operator]
        total += max(1, len(distinct))  # a tile between padding reads something elsewhere
    return total


def _number(index: Index, where: dict[str, int]) -> int:
    """The expression at a point of a tile that begins at a large multiple of every modulus."""
    total = index.const
    for atom, coef in index.terms:
        part = where.get(atom.name, 0) if atom.inner is None else _number(atom.inner, where)
        if atom.kind == "div":
            part //= atom.modulus
        elif atom.kind == "mod":
            part %= atom.modulus
        total += coef * part
    return total


def diverse_best(found: Iterable[Candidate], most: int = 32) -> list[Candidate]:
    """The best schedules, best first, at most two per register tile and prefetch distance."""
    seen: Counter[object] = Counter()
    kept = []
    for program, score in sorted(found, key=lambda item: (-item[1], item[0].params)):
        phase = program.phases[0]
        key = (*(a.unroll for a in phase.axes), *(r.unroll for r in phase.reds), dict(program.params).get("ahead"))
        seen[key] += 1
        if seen[key] <= 2:
            kept.append((program, score))
    return kept[:most]


def rescale_to(found: Sequence[Candidate], others: Sequence[Candidate]) -> list[Candidate]:
    """The schedules, rescaled so that their best score equals the best of the others: neither family crowds the other
    out.

    Measured on an H200, walks win in some operations and lose in some, by up to a tenth.
    """
    if not found or not others:
        return list(found)
    scale = max(score for _, score in others) / max(score for _, score in found)
    return [(program, score * scale) for program, score in found]


def lane_counts(vectors: int) -> list[int]:
    """Block sizes along the outputs: whole lines, or a divisor that leaves no thread idle."""
    if vectors <= 8:
        return [vectors]
    found = [n for n in (8, 16, 32, 64) if n <= vectors]
    exact = [n for n in range(12, min(vectors, 64) + 1) if vectors % n == 0 and n % 4 == 0]
    whole = [vectors] if vectors <= 64 else []
    return list(dict.fromkeys([*found, *exact, *whole]))


def block_threads(across: int, wanted: Sequence[int]) -> list[int]:
    """Block size near a wanted one: whole rows of threads in whole warps, so that none is idle."""
    unit = math.lcm(across, WARP)
    most = SM_90.threads_per_block // unit
    return list(dict.fromkeys(min(most, max(1, round(n / unit))) * unit for n in wanted if most))
