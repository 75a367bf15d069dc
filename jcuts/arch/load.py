"""Reads architecture data files: TOML, every number with its unit and its source.

    num_sm = { value = 80, source = "V100 white paper, table 1" }

A file that lacks a number, a source, or carries an unknown key is refused with the file, the line and the key.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Callable
from dataclasses import fields, replace
from functools import lru_cache
from importlib import resources
from pathlib import Path

from jcuts.arch.gpu import COMPUTE_UNITS, GpuArch
from jcuts.base.errors import ModelError

SAME_MEMORY_PERCENT = 5
"""Difference up to which a device's bandwidth is taken for that of its file."""
_INTEGERS = {f.name for f in fields(GpuArch) if f.type == "int"}
_NUMBERS = [f.name for f in fields(GpuArch) if f.type in ("int", "float")]


def list_gpus() -> list[str]:
    """Names of the GPUs that ship with jcuts, sorted."""
    return sorted(gpu.name for gpu in _shipped().values())


def load_gpu(name: str | Path) -> GpuArch:
    """A shipped GPU by name (case and punctuation do not matter), or one from a TOML file of the user's.

    Args: name: ``"V100"``, ``"rtx 2080"``, ... or a path that ends in ``.toml``.
    Raises: ModelError for an unknown name (with the nearest known one) or a malformed file (with file, line, key).
    """
    text = str(name)
    if text.endswith(".toml"):
        path = Path(text)
        try:
            content = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"cannot read the architecture file {path}: {error}", file=str(path)) from error
        return parse_gpu(content, str(path))
    shipped = _shipped()
    found = shipped.get(_key(text))
    if found is not None:
        return found
    near = difflib.get_close_matches(_key(text), list(shipped), n=1, cutoff=0.0)
    suggestion = shipped[near[0]].name if near else None
    raise ModelError(
        f"no GPU named {text!r}: did you mean {suggestion!r}? known: {list_gpus()}", name=text, suggestion=suggestion
    )


def nearest_gpu(capability: tuple[int, int]) -> GpuArch:
    """The shipped GPU of a compute capability (major, minor), or of the newest one before it (of the oldest, if there
    is none before); among several that with the fastest memory."""
    found = sorted(_shipped().values(), key=lambda gpu: (gpu.compute_capability, gpu.bw_global))
    newest = max(10 * capability[0] + capability[1], found[0].compute_capability)
    return [gpu for gpu in found if gpu.compute_capability <= newest][-1]


def gpu_of_device(name: str, capability: tuple[int, int], sms: int, bandwidth: float = 0.0) -> tuple[GpuArch, bool]:
    """The architecture of a device: the shipped GPU that its name contains, else the nearest one, scaled.

    Args: name: as the driver says it, such as "NVIDIA H100 80GB HBM3"; sms: its multiprocessors; bandwidth: of its
        memory as its attributes say [byte/s], 0 where unknown.
    Returns: (architecture, whether a file has its name).  Multiprocessors are the device's, rates of all
        multiprocessors scale with their number.  So is the bandwidth where a file has another one (boards of one name
        with other memory); where they differ by little, the file's is taken, so that rankings do not depend on digits.
    """
    key = _key(name)
    named = [
        gpu for known, gpu in _shipped().items() if known in key and divmod(gpu.compute_capability, 10) == capability
    ]
    arch = max(named, key=lambda gpu: len(gpu.name)) if named else nearest_gpu(capability)
    ratio, apart = sms / arch.num_sm, 100 * abs(bandwidth / arch.bw_global - 1)
    bandwidth = bandwidth if bandwidth and apart > SAME_MEMORY_PERCENT else arch.bw_global
    more = {"perf_peak": arch.perf_peak * ratio, "bw_l2": arch.bw_l2 * ratio, "bw_global": bandwidth}
    return replace(arch, num_sm=sms, **more), bool(named)


def parse_gpu(text: str, file: str) -> GpuArch:
    """Builds a ``GpuArch`` from the text of a data file.

    Args: text: TOML; file: its name, for messages only.
    Raises: ModelError with attributes ``file``, ``line`` and ``key``.
    """
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        where = re.search(r"line (\d+)", str(error))
        line = int(where.group(1)) if where else len(text.splitlines())
        raise ModelError(f"{file}:{line}: not valid TOML: {error}", file=file, line=line, key=None) from error

    def bad(key: str, reason: str) -> ModelError:
        line = _line_of(text, key)
        return ModelError(f"{file}:{line}: {key}: {reason}", file=file, line=line, key=key)

    known = {"name", "flop_per_clock_sm", *_NUMBERS}
    for key in table:
        if key not in known:
            near = difflib.get_close_matches(key, sorted(known), n=1)
            raise bad(key, "unknown key" + (f", did you mean {near[0]!r}?" if near else ""))
    name = table.get("name")
    if not isinstance(name, str) or not name:
        raise bad("name", "must be a non-empty string")

    values: dict[str, int | float] = {}
    sources: dict[str, str] = {}
    for key in _NUMBERS:
        if key not in table:
            raise bad(key, "missing")
        value, sources[key] = _entry(table[key], key, bad)
        if key in _INTEGERS and value != int(value):
            raise bad(key, f"value {value!r} must be a whole number")
        values[key] = int(value) if key in _INTEGERS else float(value)
    units = table.get("flop_per_clock_sm")
    if not isinstance(units, dict) or "ffma" not in units:
        raise bad("flop_per_clock_sm", "must be a table of compute units that has at least 'ffma'")
    flop: dict[str, float] = {}
    for unit, entry in units.items():
        if unit not in COMPUTE_UNITS:
            raise bad(unit, f"unknown compute unit, choose from {list(COMPUTE_UNITS)}")
        value, sources[f"flop_per_clock_sm.{unit}"] = _entry(entry, unit, bad)
        flop[unit] = float(value)
    arch = GpuArch(name=name, flop_per_clock_sm=flop, sources=sources, **values)  # pyright: ignore[reportArgumentType]
    if arch.max_shared > arch.shared_per_sm:
        raise bad("max_shared", f"value {arch.max_shared} exceeds shared_per_sm = {arch.shared_per_sm}")
    if arch.max_thread > arch.max_threads_per_sm:
        raise bad("max_thread", f"value {arch.max_thread} exceeds max_threads_per_sm = {arch.max_threads_per_sm}")
    return arch


def _entry(entry: object, key: str, bad: Callable[[str, str], ModelError]) -> tuple[int | float, str]:
    if not isinstance(entry, dict):
        raise bad(key, "must be a table {value = ..., source = ...}")
    extra = sorted(set(entry) - {"value", "source", "unit"})
    if extra:
        raise bad(key, f"unknown part {extra[0]!r}: allowed are value, unit and source")
    value, source = entry.get("value"), entry.get("source")
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise bad(key, f"value {value!r} must be a number")
    # shared_reserved is honestly zero before compute capability 8.0
    if not 0 <= value < float("inf") or (value == 0 and key != "shared_reserved"):
        raise bad(key, f"value {value!r} must be positive and finite")
    if not isinstance(source, str) or not source.strip():
        raise bad(key, "has no source: say where the number comes from")
    return value, source


def _line_of(text: str, key: str) -> int:
    """Line (from 1) on which ``key`` is set; the last line if it is nowhere, which is where it is missing."""
    pattern = re.compile(rf"^\s*(\[?\s*\"?){re.escape(key)}\b")
    lines = text.splitlines()
    for number, line in enumerate(lines, start=1):
        if pattern.match(line):
            return number
    return max(1, len(lines))


def _key(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


@lru_cache(maxsize=1)
def _shipped() -> dict[str, GpuArch]:
    folder = resources.files("jcuts.arch") / "data"
    found: dict[str, GpuArch] = {}
    for entry in sorted(folder.iterdir(), key=lambda item: item.name):
        if entry.name.endswith(".toml"):
            arch = parse_gpu(entry.read_text(encoding="utf-8"), entry.name)
            found[_key(arch.name)] = arch
    return found
