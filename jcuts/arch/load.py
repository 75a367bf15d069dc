"""Reads architecture data files: TOML, every number with its unit and its source.

    num_sm = { value = 80, source = "V100 white paper, table 1" }

A file that lacks a number, a source, or carries an unknown key is refused with the file, the line and the key.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import fields, replace
from functools import lru_cache
from importlib import resources
from pathlib import Path

from jcuts.arch.cpu import CpuArch
from jcuts.arch.cpu_file import parse_cpu
from jcuts.arch.gpu import COMPUTE_UNITS, MEASURED, GpuArch
from jcuts.arch.toml_entry import ArchFile
from jcuts.base.errors import ModelError

SAME_PERCENT = 5
"""Difference up to which a device's bandwidth or clock is taken for that of its file."""
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
        return parse_gpu(_content(text), text)
    shipped = _shipped()
    found = shipped.get(_key(text))
    if found is not None:
        return found
    near = difflib.get_close_matches(_key(text), list(shipped), n=1, cutoff=0.0)
    suggestion = shipped[near[0]].name if near else None
    raise ModelError(
        f"no GPU named {text!r}: did you mean {suggestion!r}? known: {list_gpus()}", name=text, suggestion=suggestion
    )


def load_cpu(path: str | Path) -> CpuArch:
    """A CPU from a TOML file, as `jcuts arch measure` writes it.

    Raises: ModelError for a file that cannot be read or is malformed (with file, line, key).
    """
    return parse_cpu(_content(str(path)), str(path))


def load_arch(name: str | Path) -> CpuArch | GpuArch:
    """A CPU or a GPU from a TOML file, or a shipped GPU by name.

    Args: name: a path that ends in ``.toml``: a file that says how many ``cores`` there are is a CPU's; else a name.
    Raises: as `load_gpu`.
    """
    text = str(name)
    if not text.endswith(".toml"):
        return load_gpu(text)
    content = _content(text)
    return parse_cpu(content, text) if "cores" in ArchFile(content, text).table else parse_gpu(content, text)


def _content(text: str) -> str:
    path = Path(text)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"cannot read the architecture file {path}: {error}", file=str(path)) from error


def nearest_gpu(capability: tuple[int, int]) -> GpuArch:
    """The shipped GPU of a compute capability (major, minor), or of the newest one before it (of the oldest, if there
    is none before); among several that with the fastest memory."""
    found = sorted(_shipped().values(), key=lambda gpu: (gpu.compute_capability, gpu.bw_global))
    newest = max(10 * capability[0] + capability[1], found[0].compute_capability)
    return [gpu for gpu in found if gpu.compute_capability <= newest][-1]


def gpu_of_device(
    name: str, capability: tuple[int, int], sms: int, bandwidth: float = 0.0, clock: float = 0.0
) -> tuple[GpuArch, bool]:
    """The architecture of a device: the shipped GPU that its name contains, else the nearest one, scaled.

    Args: name: as the driver says it, such as "NVIDIA H100 80GB HBM3"; sms: its multiprocessors; bandwidth: of its
        memory [byte/s], clock: its highest SM clock [Hz], both as its attributes say, 0 where unknown.
    Returns: (architecture, whether a file has its name).  Multiprocessors are the device's, rates of all
        multiprocessors scale with their number.  So are clock and bandwidth where a file has others (boards of one name
        with other memory or power), and rates per cycle scale with the clock; where they differ by little, the file's
        are taken, so that rankings do not depend on digits.
    """
    key = _key(name)
    named = [
        gpu for known, gpu in _shipped().items() if known in key and divmod(gpu.compute_capability, 10) == capability
    ]
    arch = max(named, key=lambda gpu: len(gpu.name)) if named else nearest_gpu(capability)
    own = {"bw_global": _own(bandwidth, arch.bw_global), "clock": _own(clock, arch.clock)}
    ratio = sms / arch.num_sm * (own["clock"] / arch.clock)
    more = {"perf_peak": arch.perf_peak * ratio, "bw_l2": arch.bw_l2 * ratio}
    return replace(arch, num_sm=sms, **own, **more), bool(named)


def _own(device: float, file: float) -> float:
    """The device's number where it is known and another one than the file's."""
    return device if device and 100 * abs(device / file - 1) > SAME_PERCENT else file


def parse_gpu(text: str, file: str) -> GpuArch:
    """Builds a ``GpuArch`` from the text of a data file.

    Args: text: TOML; file: its name, for messages only.
    Raises: ModelError with attributes ``file``, ``line`` and ``key``.
    """
    found = ArchFile(text, file)
    known = {"name", "flop_per_clock_sm", "measured", *_NUMBERS}
    for key in found.table:
        if key not in known:
            near = difflib.get_close_matches(key, sorted(known), n=1)
            raise found.bad(key, "unknown key" + (f", did you mean {near[0]!r}?" if near else ""))
    name = found.name()
    values: dict[str, int | float] = {}
    for key in _NUMBERS:
        # shared_reserved is honestly zero before compute capability 8.0
        value = found.number(key, whole=key in _INTEGERS, zero=key == "shared_reserved")
        values[key] = int(value) if key in _INTEGERS else float(value)
    units = found.table.get("flop_per_clock_sm")
    if not isinstance(units, dict) or "ffma" not in units:
        raise found.bad("flop_per_clock_sm", "must be a table of compute units that has at least 'ffma'")
    for unit in units:
        if unit not in COMPUTE_UNITS:
            raise found.bad(unit, f"unknown compute unit, choose from {list(COMPUTE_UNITS)}")
    flop = {unit: float(value) for unit, value in found.numbers("flop_per_clock_sm", None).items()}
    seen = found.numbers("measured", MEASURED)
    arch = GpuArch(name=name, flop_per_clock_sm=flop, measured=seen, sources=found.sources, **values)  # pyright: ignore[reportArgumentType]
    if arch.max_shared > arch.shared_per_sm:
        raise found.bad("max_shared", f"value {arch.max_shared} exceeds shared_per_sm = {arch.shared_per_sm}")
    if arch.max_thread > arch.max_threads_per_sm:
        raise found.bad("max_thread", f"value {arch.max_thread} exceeds max_threads_per_sm = {arch.max_threads_per_sm}")
    return arch


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
