"""Roofline bound of a kernel on a CPU from the work that no code can avoid, and the thesis' PUL of tilings
(``docs/estimate.md``).

The same two quantities as on a GPU.  ``bound`` is a true lower bound on a kernel's time, whatever its code: it is read
from the terms of its work (`work_terms`), which are part of the kernel's time model (`estimate.cpu_kernel`).  ``pul``
is a product of balance ratios in [0, 1] that ranks tilings without code (`estimate.thesis.cpu_gemm`); that of a
scheduled program is read from its time model, too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from jcuts.arch.cpu import LEVELS, CpuArch
from jcuts.base.errors import ModelError
from jcuts.estimate.time_model import Resource, TimeTerm, amounts_by_unit, longest, on_cores, serial, term

OPERATIONS = ("fma", "alu", "load", "store", "special")
"""Kinds of vector instructions; ``special`` is one step of a division, square root, exponential, ..."""


@dataclass(frozen=True)
class CpuWork:
    """Work and traffic of one kernel, in base units, over all of its tiles.

    Attributes:
        flop: FLOP per compute kind (a dtype name); useful work only.
        vector_ops: full-width vector instructions per kind of ``OPERATIONS`` that no code could avoid.
        input_bytes, output_bytes: compulsory traffic: every input read once, every output written once.
        l2_bytes: bytes that move from L2 (or beyond) to L1 with these tile sizes, all tiles together; 0 if unknown.
        l1_bytes: bytes that move between L1 and registers; 0 if unknown.
        panel_bytes: what a core reuses while it works on a tile (a GEMM's B strip); 0 if nothing is reused.
        tiles: independent full tiles; edge_share: share of the work in further, cut-off tiles.
        rows, vectors: register tile of ``rows`` x ``vectors`` accumulators; 0 where there is none.
        vector_extent: elements along the vectorised dimension; 0 if it never leaves a tail.
        dtype_bytes: bytes of an element.
    """

    flop: Mapping[str, float] = field(default_factory=dict)
    vector_ops: Mapping[str, float] = field(default_factory=dict)
    input_bytes: float = 0.0
    output_bytes: float = 0.0
    l2_bytes: float = 0.0
    l1_bytes: float = 0.0
    panel_bytes: float = 0.0
    tiles: int = 1
    edge_share: float = 0.0
    rows: int = 0
    vectors: int = 0
    vector_extent: int = 0
    dtype_bytes: int = 4

    def __post_init__(self) -> None:
        numbers = {
            **{f"flop[{kind}]": value for kind, value in self.flop.items()},
            **{f"vector_ops[{kind}]": value for kind, value in self.vector_ops.items()},
            **{name: getattr(self, name) for name in ("input_bytes", "output_bytes", "l2_bytes", "l1_bytes")},
            **{name: getattr(self, name) for name in ("panel_bytes", "rows", "vectors", "vector_extent")},
        }
        for name, value in numbers.items():
            if not 0 <= value < math.inf:
                raise ModelError(f"CpuWork.{name} = {value} must be finite and not negative", field=name)
        unknown = set(self.vector_ops) - set(OPERATIONS)
        if unknown:
            raise ModelError(f"unknown vector operation {min(unknown)!r}: choose from {OPERATIONS}", field=min(unknown))
        if self.tiles < 1 or not 0 <= self.edge_share < 1 or self.dtype_bytes < 1:
            raise ModelError(
                f"tiles={self.tiles}, edge_share={self.edge_share}, dtype_bytes={self.dtype_bytes} are impossible",
                field="tiles",
            )


@dataclass(frozen=True)
class BoundReport:
    """A roofline bound on time, and its terms.

    Attributes:
        seconds: no kernel that does this work is faster.
        terms: every limit by itself, seconds: ``flop``, ``integer``, ``fma``, ``alu``, ``load``, ``store``, ``memory``,
            ``l2``, ``l1``.
        balance: factor >= 1 by which cores without a tile lengthen the compute terms (already in them).
        level: the fastest level that holds all of the compulsory traffic (``l1``, ``l2``, ``l3``, ``dram``).
    """

    seconds: float
    terms: Mapping[str, float]
    balance: float
    level: str

    @property
    def limit(self) -> str:
        """The largest term (what limits the kernel)."""
        return max(self.terms, key=lambda name: (self.terms[name], name))


def core_balance(tiles: int, cores: int) -> float:
    """Fraction of the cores that tiles keep busy: (tiles / cores) / ceil(tiles / cores), the CPU's WBRatio, in (0, 1].

    Raises: ModelError if a count is not positive.
    """
    if tiles < 1 or cores < 1:
        raise ModelError(f"{tiles} tiles on {cores} cores", tiles=tiles, cores=cores)
    return tiles / (cores * math.ceil(tiles / cores))


def work_terms(work: CpuWork, arch: CpuArch) -> TimeTerm:
    """The work that no code can avoid, as terms [cycles]: all resources at once, ports and caches at their peak.

    Memory takes what a good kernel reaches (`CpuArch.likely`); its amount is what bounds.  The busiest core has
    ceil(tiles / cores) of the full tiles.  Floating-point kinds share the same ports, so their times add up.
    """
    ops = {kind: work.vector_ops.get(kind, 0.0) for kind in OPERATIONS}
    widest = max(arch.fma_ports, arch.alu_ports)
    flop = {
        is_float: serial(
            [
                term(Resource.COMPUTE, amount / arch.flop_per_clock(kind), amount, kind)
                for kind, amount in work.flop.items()
                if _is_float(kind) == is_float
            ]
        )
        for is_float in (True, False)
    }
    rest = [term(Resource.ALU, ops[kind] / widest, ops[kind], kind) for kind in ("alu", "special")]
    core = longest(
        [
            *flop.values(),
            term(Resource.ALU, ops["fma"] / arch.fma_ports, ops["fma"], "fma"),
            serial([term(Resource.ALU, ops["fma"] / widest), *rest]),
            term(Resource.LOAD, ops["load"] / arch.load_ports, ops["load"]),
            term(Resource.STORE, ops["store"] / arch.store_ports, ops["store"]),
        ]
    )
    footprint = work.input_bytes + work.output_bytes
    memory = footprint / arch.likely(arch.resident_level(footprint)) if footprint else 0.0
    return longest(
        [
            on_cores(core, _busiest_share(work, arch.cores)),
            term(Resource.DRAM, memory * arch.frequency, footprint),
            term(Resource.L2, work.l2_bytes / arch.ceiling("l2") * arch.frequency, work.l2_bytes),
            term(Resource.L1, work.l1_bytes / arch.ceiling("l1") * arch.frequency, work.l1_bytes),
        ]
    )


def _busiest_share(work: CpuWork, cores: int) -> float:
    """Share of the work that the busiest core has at least: ceil(tiles / cores) full tiles, or an even share."""
    return max(1.0 / cores, math.ceil(work.tiles / cores) / (work.tiles / (1 - work.edge_share)))


def bound(work: CpuWork, arch: CpuArch) -> BoundReport:
    """Roofline lower bound on the time of a kernel: `bound_of` the terms of its work."""
    return bound_of(work_terms(work, arch), arch)


def bound_of(root: TimeTerm, arch: CpuArch) -> BoundReport:
    """Roofline lower bound on the time of a kernel, from the amounts of `work_terms`.

        seconds = max( balance * (FLOP / peak, instructions / ports),
                       for every level: (compulsory bytes - what faster levels hold) / ceiling of the level,
                       L2 bytes / L2 ceiling,  L1 bytes / L1 ceiling )

    Inputs may still be in a cache from the previous call: only what the faster levels cannot hold must come from a
    slower one.  ``balance`` counts full tiles only: the busiest core has ceil(tiles / cores) of them.  Floating-point
    kinds share the same ports, so their times add up.

    Returns: a ``BoundReport``; seconds >= 0.
    """
    found = amounts_by_unit(root)

    def on_busiest(resource: Resource, unit: str = "") -> float:
        return found.get((resource.value, unit), (0.0, 0.0))[0]

    def of_all(resource: Resource) -> float:
        return found.get((resource.value, ""), (0.0, 0.0))[1]

    kinds = [unit for name, unit in found if name == Resource.COMPUTE]
    cycles = {kind: on_busiest(Resource.COMPUTE, kind) / arch.flop_per_clock(kind) for kind in kinds}
    fma, *others = (on_busiest(Resource.ALU, kind) for kind in ("fma", "alu", "special"))
    core = {
        "flop": sum(cycles[kind] for kind in kinds if _is_float(kind)),
        "integer": sum(cycles[kind] for kind in kinds if not _is_float(kind)),
        "fma": fma / arch.fma_ports,
        "alu": (fma + sum(others)) / max(arch.fma_ports, arch.alu_ports),
        "load": on_busiest(Resource.LOAD) / arch.load_ports,
        "store": on_busiest(Resource.STORE) / arch.store_ports,
    }
    footprint = of_all(Resource.DRAM)
    terms = {name: count / arch.frequency for name, count in core.items()}
    terms["memory"] = max((footprint - arch.above(level)) / arch.ceiling(level) for level in LEVELS)
    terms["l2"] = of_all(Resource.L2) / arch.ceiling("l2")
    terms["l1"] = of_all(Resource.L1) / arch.ceiling("l1")
    balance = max(1.0, arch.cores * busiest_share(root))
    return BoundReport(max(terms.values()), terms, balance, arch.resident_level(footprint))


def busiest_share(root: TimeTerm) -> float:
    """Share of a kernel's tasks that its busiest core has, by the first such node of an expression; 1 without one."""
    if root.kind == "on_cores":
        return root.times
    return next((node.busiest for node in root.parts if node.kind == "on_cores"), 1.0)


def register_ratio(rows: int, vectors: int, arch: CpuArch) -> float:
    """Fraction of the FMA rate that a register tile of rows x vectors accumulators sustains, in (0, 1].

    Per step of the reduction it issues rows * vectors FMAs and rows + vectors loads (broadcasts and vectors), and every
    accumulator waits for its own FMA of the step before:

        cycles = max(rows * vectors / FMA ports, (rows + vectors) / load ports, latency)
        ratio  = (rows * vectors / FMA ports) / cycles

    A tile whose rows * vectors + vectors + 1 registers exceed the register file spills: times (registers / needed)^2.
    """
    if rows < 1 or vectors < 1:
        raise ModelError(f"a register tile of {rows} x {vectors} is impossible", rows=rows, vectors=vectors)
    busy = rows * vectors / arch.fma_ports
    ratio = busy / max(busy, (rows + vectors) / arch.load_ports, arch.core.fma_latency)
    needed = rows * vectors + vectors + 1
    return ratio * min(1.0, arch.vector_registers / needed) ** 2


def simd_ratio(extent: int, width: int) -> float:
    """Fraction of useful lanes when ``extent`` elements are computed ``width`` at a time, in (0, 1]."""
    if extent < 1 or width < 1:
        raise ModelError(f"{extent} elements in steps of {width}", extent=extent, width=width)
    return extent / (math.ceil(extent / width) * width)


def cache_ratio(work: CpuWork, arch: CpuArch) -> float:
    """Fraction of the compute rate that the caches sustain with these tiles, in (0, 1]; 1 if the panel stays in L1.

        min(1, compute seconds / (L2 bytes / measured bandwidth of the level that holds the panel))

    Half a cache counts as usable: the other operand streams through the rest.
    """
    if 2 * work.panel_bytes <= arch.l1d:
        return 1.0
    level = "l2" if 2 * work.panel_bytes <= arch.l2 else "l3" if 2 * work.panel_bytes <= arch.l3 else "dram"
    return _share(_compute_seconds(work, arch), work.l2_bytes / arch.measured(level))


def memory_ratio(work: CpuWork, arch: CpuArch) -> float:
    """The CPU's GMRatio: min(1, compute seconds / compulsory bytes at the measured rate of their level), in [0, 1]."""
    footprint = work.input_bytes + work.output_bytes
    return _share(_compute_seconds(work, arch), footprint / arch.measured(arch.resident_level(footprint)))


def pul(work: CpuWork, arch: CpuArch) -> float:
    """Ranking score of a candidate in [0, 1]: a product, hence no bound.

    PUL = memory ratio * cache ratio * register ratio * SIMD ratio * core balance
    """
    score = memory_ratio(work, arch) * cache_ratio(work, arch) * core_balance(work.tiles, arch.cores)
    if work.rows and work.vectors:
        score *= register_ratio(work.rows, work.vectors, arch)
    if work.vector_extent:
        width = arch.lanes(work.dtype_bytes) * max(1, work.vectors)
        score *= simd_ratio(work.vector_extent, width)
    return score


def _share(useful: float, needed: float) -> float:
    """min(1, useful / needed); 1 if nothing is needed (also after underflow)."""
    return min(1.0, useful / needed) if needed else 1.0


def _compute_seconds(work: CpuWork, arch: CpuArch) -> float:
    flop = sum(amount / arch.peak(kind) for kind, amount in work.flop.items())
    clocks = arch.cores * arch.frequency
    ops = sum(work.vector_ops.get(kind, 0.0) for kind in ("fma", "alu", "special"))
    return max(flop, ops / (max(arch.fma_ports, arch.alu_ports) * clocks))


def _is_float(kind: str) -> bool:
    return kind.startswith(("float", "bfloat", "complex"))
