"""CPU machine model: cores, SIMD width, caches, ports, bandwidths (an extension of the thesis' Table 3.4,
``docs/estimate.md``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from jcuts.arch.cpu_cores import CORE, MEMORY, Core
from jcuts.base.errors import ModelError

LEVELS = ("l1", "l2", "l3", "dram")
"""Where data may lie, fastest first."""


@dataclass(frozen=True)
class CpuArch:
    """The cores that this process may use, in base units (byte, second, hertz).

    Attributes:
        name: as the processor calls itself.
        machine: ``"x86_64"`` or ``"aarch64"``.
        cores: physical cores usable by this process (affinity and container quota respected).
        frequency: highest clock, Hz: a ceiling, so that the bound stays a bound.
        simd_bits: width of one vector register.
        fma_ports, alu_ports, load_ports, store_ports: full-width instructions of that kind per cycle and core.
        vector_registers: 32 with AVX-512 or NEON, 16 with AVX2 or SSE.
        line: bytes of a cache line.
        l1d, l2: bytes per core; l3: bytes of all last-level caches these cores reach (0 if there is none).
        features: instruction-set flags that matter here (``avx2``, ``avx512f``, ``asimd``, ...).
        bandwidth: measured byte/s over all cores: ``copy`` (large arrays), ``l2``, ``l3``, ``dram``.
        measured_peak: FLOP/s that a library GEMM reached over all cores, per dtype name; may be empty.
        core: latency, issue width, ... of a core (``cpu_cores.toml``, or measured).
        source: where the numbers come from (``"detected"``, ``"measured"``, ``"fallback"``, or a file).
        fingerprint: names this processor and this version of the measurement.
        call_seconds: of a custom call that XLA makes in a program, 0 where it was not measured; handover_seconds: what
            it takes longer where its tasks go to the thread pool.
        sources: of numbers from a file: where each comes from.
    """

    name: str
    machine: str
    cores: int
    frequency: float
    simd_bits: int
    fma_ports: int
    alu_ports: int
    load_ports: int
    store_ports: int
    vector_registers: int
    line: int
    l1d: int
    l2: int
    l3: int
    features: frozenset[str] = frozenset()
    bandwidth: Mapping[str, float] = field(default_factory=dict)
    measured_peak: Mapping[str, float] = field(default_factory=dict)
    core: Core = CORE
    source: str = "detected"
    fingerprint: str = ""
    call_seconds: float = 0.0
    handover_seconds: float = 0.0
    sources: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("cores", "frequency", "simd_bits", "fma_ports", "alu_ports", "load_ports", "store_ports"):
            if not getattr(self, name) > 0:
                raise ModelError(f"CpuArch.{name}={getattr(self, name)!r} must be positive", field=name)
        for name in ("vector_registers", "line", "l1d", "l2"):
            if not getattr(self, name) > 0:
                raise ModelError(f"CpuArch.{name}={getattr(self, name)!r} must be positive", field=name)
        if self.l3 < 0:
            raise ModelError(f"CpuArch.l3={self.l3!r} must not be negative", field="l3")

    def __hash__(self) -> int:
        return hash((self.name, self.cores, self.frequency, self.simd_bits, self.fingerprint))

    def lanes(self, dtype_bytes: int) -> int:
        """Elements in one vector register."""
        if dtype_bytes <= 0 or self.simd_bits % (8 * dtype_bytes):
            raise ModelError(
                f"elements of {dtype_bytes} bytes do not fill a register of {self.simd_bits} bits",
                dtype_bytes=dtype_bytes,
            )
        return self.simd_bits // (8 * dtype_bytes)

    def flop_per_clock(self, kind: str) -> float:
        """FLOP per cycle and core at full rate, for a dtype name (an FMA counts 2, an integer operation 1).

        bfloat16 and float16 count at their own rate only when an instruction for it exists; otherwise they are
        converted and run at float32's rate.  Raises: ModelError for an unknown kind.
        """
        f32 = 2.0 * self.fma_ports * self.lanes(4)
        if kind == "float32":
            return f32
        if kind == "float64":
            return f32 / 2
        if kind == "bfloat16":
            if "amx_bf16" in self.features:
                return 16 * f32
            return 2 * f32 if self.features & {"avx512_bf16", "bf16"} else f32
        if kind == "float16":
            return 2 * f32 if self.features & {"avx512_fp16", "fphp", "asimdhp"} else f32
        width = {"int8": 1, "uint8": 1, "bool": 1, "int16": 2, "uint16": 2, "int32": 4, "uint32": 4}.get(kind, 0)
        width = width or {"int64": 8, "uint64": 8, "complex64": 4, "complex128": 8}.get(kind, 0)
        if not width:
            raise ModelError(f"no peak is known for the kind {kind!r}", kind=kind)
        if kind.startswith("complex"):
            return 2.0 * self.fma_ports * self.lanes(width)
        return float(self.alu_ports * self.lanes(width))

    def peak(self, kind: str = "float32") -> float:
        """Ceiling of FLOP/s over all cores: cores * frequency * ``flop_per_clock(kind)``."""
        return self.cores * self.frequency * self.flop_per_clock(kind)

    def capacity(self, level: str) -> float:
        """Bytes that fit at a level over all cores (private caches add up; DRAM is unlimited here)."""
        self._check(level)
        if level == "dram":
            return float("inf")
        return float({"l1": self.l1d * self.cores, "l2": self.l2 * self.cores, "l3": self.l3}[level])

    def measured(self, level: str) -> float:
        """Byte/s that this machine was seen to sustain at a level (what ranking uses)."""
        self._check(level)
        if level == "l1":
            return self.cores * self.frequency * (self.load_ports + self.store_ports) * self.simd_bits / 8
        if level in self.bandwidth:
            return float(self.bandwidth[level])
        return self.cores * self.frequency * getattr(MEMORY, f"{level}_sustained")

    def ceiling(self, level: str) -> float:
        """Byte/s that no access pattern exceeds at a level (what the bound uses).

        L1 is bounded by the load and store ports, L2 by a 64-byte bus each way per cycle, L3 and DRAM by the
        measured copy times what a copy moves beyond what it counts, or by `MemoryRates` where nothing was measured.  A
        slower level is never allowed a higher ceiling than a faster one.
        """
        self._check(level)
        l1 = self.measured("l1")
        l2 = min(l1, max(self.cores * self.frequency * MEMORY.l2_ceiling, MEMORY.copy_traffic * self.measured("l2")))
        if level == "l1":
            return l1
        if level == "l2":
            return l2
        dram = self._far_ceiling("dram")
        l3 = min(l2, max(self._far_ceiling("l3"), dram))
        return l3 if level == "l3" else min(l3, dram)

    def _far_ceiling(self, level: str) -> float:
        if level in self.bandwidth:
            return MEMORY.copy_traffic * self.bandwidth[level]
        return self.cores * self.frequency * getattr(MEMORY, f"{level}_ceiling")

    def likely(self, level: str) -> float:
        """Byte/s that a good kernel reaches at a level: what predictions use, between `measured` and `ceiling`."""
        if level in ("l1", "l2"):
            return self.ceiling(level)
        return min(self.ceiling(level), MEMORY.copy_traffic * max(self.measured(level), self.measured("dram")))

    def above(self, level: str) -> float:
        """Bytes that the faster levels may hold together, each of other data (the next one's victims)."""
        self._check(level)
        return sum(self.capacity(faster) for faster in LEVELS[: LEVELS.index(level)])

    def resident_level(self, footprint: float) -> str:
        """The fastest level whose size over all cores holds ``footprint`` bytes."""
        for level in LEVELS:
            if footprint <= self.capacity(level):
                return level
        return "dram"

    def calibrated(self, bandwidth: Mapping[str, float], gemm: Mapping[str, float], source: str) -> CpuArch:
        """The same processor with measurements; the clock is raised if a GEMM ran faster than it explains.

        Virtual machines report the base clock only, so the observed rate is evidence of a higher one:

            frequency >= 1.1 * GEMM FLOP/s / (cores * FLOP per cycle)
        """
        frequency = self.frequency
        for kind, rate in gemm.items():
            frequency = max(frequency, MEMORY.gemm_ceiling * rate / (self.cores * self.flop_per_clock(kind)))
        return replace(self, frequency=frequency, bandwidth=dict(bandwidth), measured_peak=dict(gemm), source=source)

    @staticmethod
    def _check(level: str) -> None:
        if level not in LEVELS:
            raise ModelError(f"unknown memory level {level!r}: choose from {LEVELS}", level=level)
