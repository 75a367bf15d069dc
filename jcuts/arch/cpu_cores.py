"""Microarchitecture of CPU cores (ports, FMA latency, issue width, cache ways): read once from ``cpu_cores.toml``."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from jcuts.base.errors import ModelError

Numbers = TypeVar("Numbers", "Core", "MemoryRates", "Clock")


@dataclass(frozen=True)
class Core:
    """What the cycle model needs of a core besides its ports and caches.

    Attributes:
        fma_latency: cycles until an FMA's result can be accumulated again: fewer accumulators than latency * ports
            leave ports idle.
        issue_width: instructions that it decodes and retires per cycle.
        address_registers: addresses that general registers hold beside loop counters.
        predicted_iterations: of a loop whose end branch predictors know beforehand.
        cache_ways: of its data caches. page_bytes: at whose end prefetchers stop.
    """

    fma_latency: int
    issue_width: int
    address_registers: int
    predicted_iterations: int
    cache_ways: int
    page_bytes: int


@dataclass(frozen=True)
class MemoryRates:
    """Bytes per cycle and core of cache levels where nothing was measured, and what measurements are scaled by.

    Attributes:
        l2_ceiling, l3_ceiling, dram_ceiling: that no core takes from these levels.
        l2_sustained, l3_sustained, dram_sustained: that cores of the last decade sustain.
        copy_traffic: bytes moved over bytes counted by a plain copy. gemm_ceiling: peak over a library GEMM's rate, at
            least.
    """

    l2_ceiling: float
    l3_ceiling: float
    dram_ceiling: float
    l2_sustained: float
    l3_sustained: float
    dram_sustained: float
    copy_traffic: float
    gemm_ceiling: float


@dataclass(frozen=True)
class Clock:
    """The highest clock where the system does not list it: ``assumed`` [Hz], or ``turbo_ratio`` times the base."""

    assumed: float
    turbo_ratio: float


@dataclass(frozen=True)
class Ports:
    """Full-width vector instructions per cycle and core."""

    fma: int
    alu: int
    load: int
    store: int


@dataclass(frozen=True)
class PortRow:
    """Cores that have these ports; what is empty matches every core.

    Attributes:
        name: of the cores; machine: ``"x86_64"`` or ``"aarch64"``; vendor, families: of x86 cores; implementer, parts:
            of Arm's; simd_bits: width of a vector register that code may use; source: where the ports come from.
    """

    name: str
    machine: str
    ports: Ports
    source: str
    vendor: str = ""
    families: tuple[int, ...] = ()
    implementer: str = ""
    parts: tuple[str, ...] = ()
    simd_bits: int = 0

    def fits(self, machine: str, info: dict[str, str], simd_bits: int) -> bool:
        """Whether a core is one of these. Args: info: its entries of ``/proc/cpuinfo``."""
        text = info.get("cpu family", "")
        family = int(text) if text.isdigit() else 0
        return (
            self.machine == machine
            and self.vendor in ("", info.get("vendor_id", ""))
            and self.implementer in ("", info.get("CPU implementer", ""))
            and (not self.families or family in self.families)
            and (not self.parts or info.get("CPU part", "") in self.parts)
            and self.simd_bits in (0, simd_bits)
        )


@dataclass(frozen=True)
class CoreTable:
    """The data file: numbers of all cores, rates where nothing is measured, ports by kind of core; their sources."""

    core: Core
    memory: MemoryRates
    clock: Clock
    ports: tuple[PortRow, ...]
    sources: dict[str, str]


def parse_cores(text: str, file: str) -> CoreTable:
    """The numbers in the text of a data file. Args: file: its name, for messages.

    Raises: ModelError with attributes ``file`` and ``key`` where one is missing, unknown, not positive or without a
    source.
    """
    try:
        found = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ModelError(f"{file}: not valid TOML: {error}", file=file, key=None) from error
    sources: dict[str, str] = {}
    core = parse_numbers(found.get("core"), Core, file, "core", sources)
    memory = parse_numbers(found.get("memory"), MemoryRates, file, "memory", sources)
    clock = parse_numbers(found.get("clock"), Clock, file, "clock", sources)
    rows = []
    for row in found.get("ports", []):
        lists = {name: tuple(row[name]) for name in ("families", "parts") if name in row}
        try:
            rows.append(PortRow(**{**row, **lists, "ports": Ports(**row["ports"])}))
        except (KeyError, TypeError) as error:
            raise ModelError(f"{file}: ports of {row.get('name')!r}: {error}", file=file, key="ports") from error
    return CoreTable(core, memory, clock, tuple(rows), sources)


def parse_numbers(table: Any, kind: type[Numbers], file: str, name: str, sources: dict[str, str]) -> Numbers:
    """A table ``{field = {value, unit, source}}`` as a record; its sources are added to ``sources``.

    Raises: ModelError with attributes ``file`` and ``key``.
    """

    def bad(key: str, reason: str) -> ModelError:
        return ModelError(f"{file}: {name}.{key}: {reason}", file=file, key=key)

    if not isinstance(table, dict):
        raise bad("", "must be a table")
    kinds = {f.name: f.type for f in fields(kind)}
    for key in sorted(set(kinds) ^ set(table)):
        raise bad(key, "missing" if key in kinds else "unknown key")
    values: dict[str, Any] = {}
    for key, entry in table.items():
        if not isinstance(entry, dict) or set(entry) - {"value", "unit", "source"}:
            raise bad(key, "must be a table {value = ..., unit = ..., source = ...}")
        value, source = entry.get("value"), entry.get("source")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
            raise bad(key, f"value {value!r} must be positive and finite")
        if kinds[key] == "int" and value != int(value):
            raise bad(key, f"value {value!r} must be a whole number")
        if not isinstance(source, str) or not source.strip():
            raise bad(key, "has no source: say where the number comes from")
        values[key] = int(value) if kinds[key] == "int" else float(value)
        sources[f"{name}.{key}"] = source
    return kind(**values)


_FILE = Path(__file__).with_name("cpu_cores.toml")
TABLE = parse_cores(_FILE.read_text(encoding="utf-8"), _FILE.name)
CORE = TABLE.core
"""Numbers of a core that nothing else is known of."""
MEMORY = TABLE.memory


def ports_of(machine: str, info: dict[str, str], simd_bits: int) -> Ports:
    """Vector ports of a core: of the first row that fits, whose last one fits all.

    Args: machine: ``"x86_64"`` or ``"aarch64"``; info: its entries of ``/proc/cpuinfo``; simd_bits: that code may use.
    """
    return next(row.ports for row in TABLE.ports if row.fits(machine, info, simd_bits))
