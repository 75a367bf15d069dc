"""CPU architecture files: a measured `CpuArch` as TOML, every number with its unit and its source.

    cores = { value = 2, unit = "core", source = "affinity and quota of the process" }

`jcuts arch measure` writes them (`to_toml`); ``JCUTS_ARCH`` names the one to use (`arch.chosen`).
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from jcuts.arch.cpu import LEVELS, CpuArch
from jcuts.arch.cpu_cores import Core
from jcuts.arch.toml_entry import ArchFile, quoted, written, written_table
from jcuts.base import keys
from jcuts.base.errors import ModelError

UNITS = {
    "cores": "core",
    "frequency": "Hz",
    "simd_bits": "bit",
    "fma_ports": "instruction/cycle",
    "alu_ports": "instruction/cycle",
    "load_ports": "instruction/cycle",
    "store_ports": "instruction/cycle",
    "vector_registers": "register",
    "line": "byte",
    "l1d": "byte",
    "l2": "byte",
    "l3": "byte",
}
"""Numbers at the head of a file."""
CORE_UNITS = {
    "fma_latency": "cycle",
    "issue_width": "instruction/cycle",
    "address_registers": "register",
    "predicted_iterations": "iteration",
    "cache_ways": "way",
    "page_bytes": "byte",
}
OVERHEADS = ("call_seconds", "handover_seconds")
RATES = ("copy", *LEVELS[1:])
PEAKS = ("float32", "float64")
_MAY_BE_ZERO = "l3"


def parse_cpu(text: str, file: str) -> CpuArch:
    """Builds a ``CpuArch`` from the text of a file.

    Args: text: TOML; file: its name, for messages and as the source.
    Raises: ModelError with attributes ``file``, ``line`` and ``key``.
    """
    found = ArchFile(text, file)
    known = {"name", "machine", "features", "bandwidth", "measured_peak", "core", "overheads", *UNITS}
    for key in found.table:
        if key not in known:
            raise found.bad(key, "unknown key")
    features = found.table.get("features", [])
    if not isinstance(features, list) or not all(isinstance(one, str) for one in features):
        raise found.bad("features", "must be a list of texts")
    numbers: dict[str, Any] = {}
    for key in UNITS:
        whole = key != "frequency"
        value = found.number(key, whole=whole, zero=key == _MAY_BE_ZERO)
        numbers[key] = int(value) if whole else float(value)
    core = found.numbers("core", CORE_UNITS)
    missing = sorted(set(CORE_UNITS) - set(core))
    if missing:
        raise found.bad(missing[0], "missing from the table core")
    try:
        return CpuArch(
            name=found.name(),
            machine=found.name("machine"),
            features=frozenset(features),
            bandwidth=found.numbers("bandwidth", RATES),
            measured_peak=found.numbers("measured_peak", PEAKS),
            core=Core(**{key: int(value) for key, value in core.items()}),
            source=file,
            fingerprint=keys.cpu_arch([file, text]),
            sources=found.sources,
            **found.numbers("overheads", OVERHEADS),
            **numbers,
        )
    except ModelError as error:
        if "line" in error.values:
            raise
        raise found.bad(str(error.values.get("field", "")), error.message) from error


def to_toml(arch: CpuArch, head: str) -> str:
    """A CPU as the text of a file that `parse_cpu` reads.

    Args: arch: whose ``sources`` name every number; head: a line of what it is.
    """
    lines = [f"# {head}", f"name = {quoted(arch.name)}", f"machine = {quoted(arch.machine)}"]
    lines += [f"features = [{', '.join(quoted(one) for one in sorted(arch.features))}]", ""]
    lines += [written(key, getattr(arch, key), unit, arch.sources[key]) for key, unit in UNITS.items()]
    overheads = {key: getattr(arch, key) for key in OVERHEADS if getattr(arch, key)}
    tables = [
        written_table("core", asdict(arch.core), CORE_UNITS, arch.sources),
        written_table("bandwidth", dict(arch.bandwidth), {"": "byte/s"}, arch.sources),
        written_table("measured_peak", dict(arch.measured_peak), {"": "FLOP/s"}, arch.sources),
        written_table("overheads", overheads, {"": "s"}, arch.sources),
    ]
    return "\n".join([*lines, *filter(None, tables)]) + "\n"
