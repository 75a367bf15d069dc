"""Fitted coefficients of the analytical cost models: TOML data files, one per kernel family and GPU, read once.

    fit_h200.toml of a family:

        [memory_bound]
        source = "benchmarks/results/gpu_kernels/gpu_residual_h200_2026-11-22.json"  # of the fit
        samples = 194                                                      # measured schedules, or "unknown"
        error = "..."                                                      # of the fit on them, or "unknown"
        date = "2026-11-22"                                                # or "unknown"

        [memory_bound.coefficients]
        launch_latency_cycles = { value = 485.0, unit = "cycle", meaning = "..." }
        memory_bytes_per_cycle = { value = 2580.0, unit = "byte/cycle", scales_with = "bw_global" }

A table with ``inherits = "other"`` starts from the other table's coefficients.  A file that lacks a value, a unit or a
source, or carries an unknown key is refused with the file, the table and the key.

All GPUs read the H200's files: a coefficient with ``scales_with`` is that share of a rate of the H200 (``h200.toml``),
and on another GPU the same share of its own (`for_gpu`); one without is taken as it is.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from jcuts.arch.gpu import RATES, GpuArch
from jcuts.arch.load import load_gpu
from jcuts.base.errors import ModelError

ROOT = Path(__file__).resolve().parent
HEADER = frozenset({"source", "samples", "error", "date"})
"""What every table says about where its coefficients come from."""
ENTRY = frozenset({"value", "unit", "meaning", "scales_with"})
UNKNOWN = "unknown"
FITTED_GPU = "H200"
"""The GPU of the data files: its rates are what ``scales_with`` names."""

Record = TypeVar("Record")


@dataclass(frozen=True)
class Provenance:
    """Where a table's coefficients come from.

    Attributes:
        source: results file or section of the docs; samples: measured schedules, None where not recorded.
        error: of the fit on these samples; date: of the measurement; both "unknown" where not recorded.
    """

    source: str
    samples: int | None
    error: str
    date: str


@dataclass(frozen=True)
class Scaling:
    """How a coefficient follows the hardware. Args: rate: one of `jcuts.arch.gpu.RATES`; unit: of the coefficient."""

    rate: str
    unit: str

    def factor(self, arch: GpuArch, fitted: GpuArch) -> float:
        """A GPU's rate over that of the GPU of the fit, per cycle or per SM where the unit says so; 1 for compute units
        that either lacks."""
        pair = (arch.rate(self.rate), fitted.rate(self.rate))
        if not all(pair):
            return 1.0
        here, there = pair
        if "/cycle" in self.unit:
            here, there = here / arch.clock, there / fitted.clock
        if "/SM" in self.unit:
            here, there = here / arch.num_sm, there / fitted.num_sm
        return here / there


class Coefficients:
    """One table's coefficients as attributes, read-only; ``provenance`` says what they were fitted to."""

    provenance: Provenance
    scaling: Mapping[str, Scaling]

    def __init__(
        self, values: Mapping[str, float], provenance: Provenance, scaling: Mapping[str, Scaling] | None = None
    ) -> None:
        self.__dict__.update(values, provenance=provenance, scaling=MappingProxyType(dict(scaling or {})))

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> float: ...

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"fitted coefficients are data: {name!r} is not assigned, its data file is changed")

    def as_dict(self) -> dict[str, float]:
        """The coefficients by name."""
        return {name: value for name, value in vars(self).items() if name not in ("provenance", "scaling")}

    def for_gpu(self, arch: GpuArch) -> Coefficients:
        """The table for a GPU: what scales with a rate of the GPU of the fit is the same share of this GPU's."""
        fitted = load_gpu(FITTED_GPU)
        values = self.as_dict()
        factors = {name: scaling.factor(arch, fitted) for name, scaling in self.scaling.items()}
        if all(factor == 1.0 for factor in factors.values()):
            return self
        return Coefficients(values | {n: values[n] * f for n, f in factors.items()}, self.provenance, self.scaling)


def coefficients(family: str, table: str) -> Coefficients:
    """A table of a family's data file.

    Args: family: its folder below `jcuts.schedule`: ``"gpu/gemm"``, ``"cpu"``; table: of its file.
    Raises: ModelError for a table that there is not (with those that there are), or a malformed file.
    """
    tables = read_tables(family)
    if table not in tables:
        raise ModelError(f"{file_of(family)}: no table {table!r}, it has {sorted(tables)}", table=table)
    return tables[table]


def record(family: str, table: str, kind: type[Record], arch: GpuArch | None = None) -> Record:
    """A table as a dataclass whose fields are exactly its coefficients. Args: arch: the GPU to scale them for.

    Raises: ModelError where fields and coefficients differ.
    """
    found = coefficients(family, table)
    values = (found.for_gpu(arch) if arch is not None else found).as_dict()
    known = set(kind.__dataclass_fields__)  # type: ignore[attr-defined]
    if known != set(values):
        differ = sorted(known ^ set(values))
        raise ModelError(f"{file_of(family)}: {table}: missing or unknown coefficients {differ}", table=table)
    return kind(**values)


def file_of(family: str) -> Path:
    """The data file of a family for a GPU or an instruction set."""
    return ROOT / family / (f"fit_{FITTED_GPU.lower()}.toml" if family.startswith("gpu") else "fit_x86.toml")


@functools.cache
def read_tables(family: str) -> Mapping[str, Coefficients]:
    """All tables of a family's data file."""
    path = file_of(family)
    try:
        return parse_tables(path.read_text(encoding="utf-8"), path.name)
    except OSError as error:
        raise ModelError(f"{path}: cannot read the fitted coefficients: {error}", file=str(path)) from error


def parse_tables(text: str, file: str) -> Mapping[str, Coefficients]:
    """The tables in the text of a data file. Args: file: its name, for messages.

    Raises: ModelError with attributes ``file``, ``table`` and ``key``.
    """
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ModelError(f"{file}: not valid TOML: {error}", file=file, table=None, key=None) from error
    found: dict[str, Coefficients] = {}
    for name, table in content.items():
        found[name] = _parse_table(name, table, found, file)
    return MappingProxyType(found)


def _parse_table(name: str, table: Any, found: Mapping[str, Coefficients], file: str) -> Coefficients:
    def bad(key: str, reason: str) -> ModelError:
        return ModelError(f"{file}: {name}.{key}: {reason}", file=file, table=name, key=key)

    if not isinstance(table, dict):
        raise bad("", "must be a table")
    if unknown := sorted(set(table) - HEADER - {"coefficients", "inherits"}):
        raise bad(unknown[0], f"unknown key: allowed are {sorted(HEADER)}, inherits and coefficients")
    for key in ("source", "error", "date"):
        if not isinstance(table.get(key), str) or not table[key].strip():
            raise bad(key, "must say where the coefficients come from, or 'unknown'")
    samples = table.get("samples")
    if samples != UNKNOWN and (not isinstance(samples, int) or isinstance(samples, bool) or samples < 1):
        raise bad("samples", f"{samples!r} must be a positive number of measured schedules, or 'unknown'")
    values: dict[str, float] = {}
    scaling: dict[str, Scaling] = {}
    if "inherits" in table:
        if table["inherits"] not in found:
            raise bad("inherits", f"no table {table['inherits']!r} before this one")
        values.update(found[table["inherits"]].as_dict())
        scaling.update(found[table["inherits"]].scaling)
    entries = table.get("coefficients")
    if not isinstance(entries, dict) or not entries:
        raise bad("coefficients", "must be a table with at least one coefficient")
    for key, entry in entries.items():
        if not isinstance(entry, dict) or set(entry) - ENTRY:
            raise bad(key, f"must be a table with the keys {sorted(ENTRY)}")
        value = entry.get("value")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < float("inf"):
            raise bad(key, f"value {value!r} must be a finite number")
        if not isinstance(entry.get("unit"), str):
            raise bad(key, "has no unit")
        if (rate := entry.get("scales_with")) is not None:
            if rate not in RATES:
                raise bad(key, f"scales with {rate!r}: choose from {list(RATES)}")
            scaling[key] = Scaling(rate, entry["unit"])
        values[key] = value
    counted = None if samples == UNKNOWN else samples
    return Coefficients(values, Provenance(table["source"], counted, table["error"], table["date"]), scaling)
