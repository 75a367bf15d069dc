"""GPU machine model (`GpuArch`): SM count, bandwidths, register, shared-memory and occupancy limits, FLOP/s per unit.

The first fields are Table 3.4 of the thesis (``docs/estimate.md``), the others what the roofline bound needs besides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from jcuts.base.errors import ModelError

COMPUTE_UNITS = ("ffma", "fp64", "tf32_mma", "bf16_mma", "fp16_mma")
"""The compute units a candidate can use; a GPU has a subset of them."""
RATES = ("clock", "bw_global", "bw_l2", "shared", *COMPUTE_UNITS)
"""What `GpuArch.rate` knows."""
MEASURED = ("dram_read", "l2_read", "dram_latency", "l2_latency", "launch_seconds", "grid_barrier_seconds")
"""What `jcuts arch measure` writes besides: rates that were reached [byte/s], latencies [cycle], overheads [s]."""


@dataclass(frozen=True)
class GpuArch:
    """One GPU, in base units (FLOP, byte, second, hertz).

    The first block is Table 3.4 of the thesis; the second is what registers, occupancy and the true bound need.

    Attributes:
        name: the name under which the data file is found.
        num_sm: NUM_SM, streaming multiprocessors.
        perf_peak: PERF_peak, single-precision FLOP/s as the vendor states it.
        bw_global: BW_global, byte/s.
        transaction_bytes: bytes of one full global-memory transaction (TRANS_global times the element size).
        lat_shared: LAT_shared, cycles of a shared-memory load.
        max_shared: MAX_shared, bytes of shared memory that one block may ask for (opt-in limit).
        max_thread: MAX_thread, threads of one block.
        clock: highest SM clock, Hz: a ceiling, so that the bound stays a bound.
        compute_capability: major * 10 + minor.
        warp_size, max_threads_per_sm, max_blocks_per_sm: occupancy limits.
        registers_per_thread, registers_per_sm: 32-bit registers.
        shared_per_sm, shared_reserved: bytes of an SM's shared memory; bytes the system takes from it per block.
        shared_banks, shared_bank_bytes: one bank delivers one word of that size per cycle.
        issue_per_clock: warp instructions that an SM issues per cycle.
        l2_bytes, bw_l2: size of the L2 cache; its read bandwidth in byte/s.
        flop_per_clock_sm: FLOP per cycle and SM of every compute unit that exists (an FMA counts 2).
        measured: what was seen on such a device (`MEASURED`), for the reader: rankings use the fields above.
        sources: for every field, where its number comes from.
    """

    name: str
    num_sm: int
    perf_peak: float
    bw_global: float
    transaction_bytes: int
    lat_shared: float
    max_shared: int
    max_thread: int
    clock: float
    compute_capability: int
    warp_size: int
    max_threads_per_sm: int
    max_blocks_per_sm: int
    registers_per_thread: int
    registers_per_sm: int
    shared_per_sm: int
    shared_reserved: int
    shared_banks: int
    shared_bank_bytes: int
    issue_per_clock: int
    l2_bytes: int
    bw_l2: float
    flop_per_clock_sm: Mapping[str, float]
    measured: Mapping[str, float] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    def __hash__(self) -> int:
        return hash((self.name, self.num_sm, self.bw_global, self.clock))

    def peak(self, unit: str = "ffma") -> float:
        """Ceiling of one compute unit over the whole GPU, FLOP/s.

            peak = NUM_SM * FLOP per cycle and SM * highest clock

        It may exceed the vendor's figure, which assumes a lower clock for tensor cores: a bound needs the ceiling.

        Raises: ModelError if this GPU has no such unit.
        """
        if unit not in self.flop_per_clock_sm:
            raise ModelError(
                f"{self.name} has no compute unit {unit!r}: it has {sorted(self.flop_per_clock_sm)}",
                unit=unit,
                arch=self.name,
            )
        return self.num_sm * self.flop_per_clock_sm[unit] * self.clock

    def rate(self, name: str) -> float:
        """A rate of the whole GPU by its name in `RATES`: Hz, byte/s, or FLOP/s of a unit; 0 of one that it lacks."""
        if name in ("clock", "bw_global", "bw_l2"):
            return getattr(self, name)
        if name == "shared":
            return self.num_sm * self.shared_bytes_per_clock * self.clock
        return self.peak(name) if name in self.flop_per_clock_sm else 0.0

    def trans_global(self, element_bytes: int = 4) -> int:
        """TRANS_global: input elements in one global-memory transaction (32 for single precision)."""
        if element_bytes <= 0 or self.transaction_bytes % element_bytes:
            raise ModelError(
                f"an element of {element_bytes} bytes does not divide a transaction of {self.transaction_bytes} bytes",
                element_bytes=element_bytes,
            )
        return self.transaction_bytes // element_bytes

    @property
    def shared_bytes_per_clock(self) -> int:
        """Bytes that the shared memory of one SM delivers per cycle without conflicts."""
        return self.shared_banks * self.shared_bank_bytes
