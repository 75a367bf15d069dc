"""Finds out which CPU this process runs on: ``/proc/cpuinfo``, sysfs, affinity, container quota; then measures it."""

from __future__ import annotations

import json
import logging
import math
import os
import platform
import re
import tempfile
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from jcuts.arch import measure
from jcuts.arch.cpu import CpuArch
from jcuts.arch.cpu_cores import TABLE, ports_of
from jcuts.base import keys
from jcuts.base.warn_once import unusable_cache

log = logging.getLogger(__name__)

MEASUREMENT_VERSION = 1
"""Part of the fingerprint: raise it when ``measure.py`` measures differently."""

_KEEP = re.compile(r"^(sse4_2|avx\w*|fma|f16c|amx_\w+|asimd\w*|fphp|bf16|sve2?|i8mm)$")


def detect_cpu(
    *, cache_dir: Path | None = None, measured: bool = True, root: Path = Path("/"), cores: int | None = None
) -> CpuArch:
    """The CPU of this process, with measured bandwidth when that is possible.

    Args:
        cache_dir: where measurements are kept as JSON, by fingerprint; None keeps them in this process only.
        measured: False skips measuring (constants per cycle and core are used instead): fully deterministic.
        root: directory that holds ``proc`` and ``sys``; tests pass a made-up one.
        cores: overrides the number of usable cores.
    Returns: never fails: what cannot be read is replaced by a cautious constant, and ``source`` says ``"fallback"``.
    """
    arch = describe_cpu(root, cores)
    if not measured:
        return arch
    found = _measurements(arch, cache_dir)
    return arch if found is None else arch.calibrated(found["bandwidth"], found["peak"], "measured")


def describe_cpu(root: Path = Path("/"), cores: int | None = None) -> CpuArch:
    """What files say about this CPU, nothing measured; deterministic."""
    text = _read(root / "proc/cpuinfo")
    info = _first_processor(text)
    machine = _machine(info)
    flags = frozenset(f for f in info.get("flags", info.get("Features", "")).split() if _KEEP.match(f))
    simd_bits, registers = _simd(machine, flags)
    ports = ports_of(machine, info, simd_bits)
    usable = cores if cores is not None else _usable_cores(root)
    caches = _caches(root)
    l3_groups = max(1, math.ceil(usable / max(1, caches["l3_sharers"])))
    name = info.get("model name") or _arm_name(info) or platform.processor() or machine
    arch = CpuArch(
        name=name,
        machine=machine,
        cores=usable,
        frequency=_frequency(root, info),
        simd_bits=simd_bits,
        fma_ports=ports.fma,
        alu_ports=ports.alu,
        load_ports=ports.load,
        store_ports=ports.store,
        vector_registers=registers,
        line=caches["line"],
        l1d=caches["l1d"],
        l2=caches["l2"],
        l3=caches["l3"] * l3_groups,
        features=flags,
        source="detected" if text else "fallback",
    )
    return replace(arch, fingerprint=_fingerprint(arch, info))


def _fingerprint(arch: CpuArch, info: dict[str, str]) -> str:
    ident = [info.get(k, "") for k in ("vendor_id", "cpu family", "model", "stepping", "CPU implementer", "CPU part")]
    fields = [arch.name, arch.cores, arch.frequency, arch.simd_bits, arch.l1d, arch.l2, arch.l3, sorted(arch.features)]
    return keys.cpu_arch([MEASUREMENT_VERSION, ident, fields])


def _measurements(arch: CpuArch, cache_dir: Path | None) -> dict[str, dict[str, float]] | None:
    path = None if cache_dir is None else Path(cache_dir) / f"cpu-{arch.fingerprint}.json"
    stored = None if path is None else _load(path)
    if stored is not None:
        return stored
    found = _measure_once(arch)
    if found is not None and path is not None:
        _store(path, found)
    return found


@lru_cache(maxsize=8)
def _measure_once(arch: CpuArch) -> dict[str, dict[str, float]] | None:
    try:
        return {"bandwidth": measure.measure_bandwidth(arch), "peak": measure.measure_peak()}
    except (MemoryError, RuntimeError, OSError) as error:
        log.warning("cannot measure this CPU (%s): using constants per cycle and core", error)
        return None


def _load(path: Path) -> dict[str, dict[str, float]] | None:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        bandwidth = {str(k): float(v) for k, v in data["bandwidth"].items()}
        peak = {str(k): float(v) for k, v in data["peak"].items()}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("ignoring the CPU measurement %s: %s", path, error)
        return None
    sound = all(math.isfinite(v) and v > 0 for v in (*bandwidth.values(), *peak.values()))
    known = set(bandwidth) <= {"copy", "l2", "l3", "dram"} and set(peak) <= {"float32", "float64"}
    if not (sound and known and "dram" in bandwidth):
        log.warning("ignoring the CPU measurement %s: impossible values", path)
        return None
    return {"bandwidth": bandwidth, "peak": peak}


def _store(path: Path, found: dict[str, dict[str, float]]) -> None:
    """Writes atomically: a reader sees the whole file or none.  A directory that cannot be written is no error."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as out:
                json.dump(found, out, sort_keys=True)
            os.replace(name, path)
        except OSError:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        unusable_cache(
            log,
            "nothing can be kept in %s (%s): every process measures and compiles again",
            path.parent,
            error,
            folder=path.parent,
        )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _first_processor(text: str) -> dict[str, str]:
    info: dict[str, str] = {}
    for line in text.splitlines():
        if not line.strip() and info:
            break
        key, colon, value = line.partition(":")
        if colon:
            info[key.strip()] = value.strip()
    return info


def _machine(info: dict[str, str]) -> str:
    if "CPU implementer" in info:
        return "aarch64"
    if "vendor_id" in info or "flags" in info:
        return "x86_64"
    return "aarch64" if platform.machine().lower() in ("aarch64", "arm64") else "x86_64"


def _arm_name(info: dict[str, str]) -> str:
    return f"ARM {info['CPU implementer']}:{info.get('CPU part', '?')}" if "CPU implementer" in info else ""


def _simd(machine: str, flags: frozenset[str]) -> tuple[int, int]:
    """Register width in bits and number of vector registers that emitted code may use."""
    if machine == "aarch64":
        # NEON: an SVE register's width is no compile-time constant, so kernels do not use it
        return 128, 32
    if {"avx512f", "avx512vl", "avx512dq"} <= flags:
        return 512, 32
    if {"avx2", "fma"} <= flags:
        return 256, 16
    return 128, 16


def _frequency(root: Path, info: dict[str, str]) -> float:
    """Highest clock in Hz.  Virtual machines list the base only: the highest turbo sold is assumed then."""
    if known := listed_clock(root):
        return known
    named = re.search(r"([\d.]+)\s*GHz", info.get("model name", ""))
    listed = max(_number(info.get("cpu MHz", "")) * 1e6, float(named.group(1)) * 1e9 if named else 0.0)
    return max(TABLE.clock.turbo_ratio * listed, TABLE.clock.assumed)


def listed_clock(root: Path = Path("/")) -> float:
    """Highest clock as the system lists it [Hz]; 0 where it does not, as in virtual machines."""
    khz = _read(root / "sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq").strip()
    return int(khz) * 1e3 if khz.isdigit() else 0.0


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


def _usable_cores(root: Path) -> int:
    """Physical cores in this process' affinity, no more than the container's quota."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    siblings = set()
    for cpu in sorted(allowed):
        group = _read(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").strip()
        siblings.add(group or str(cpu))
    quota, _, period = _read(root / "sys/fs/cgroup/cpu.max").strip().partition(" ")
    limit = math.ceil(int(quota) / int(period)) if quota.isdigit() and period.isdigit() and int(period) > 0 else None
    return max(1, len(siblings) if limit is None else min(len(siblings), limit))


def _caches(root: Path) -> dict[str, int]:
    found = {"line": 64, "l1d": 32 << 10, "l2": 512 << 10, "l3": 0, "l3_sharers": 1}
    seen = False
    for index in range(8):
        folder = root / f"sys/devices/system/cpu/cpu0/cache/index{index}"
        level, kind = _read(folder / "level").strip(), _read(folder / "type").strip()
        size = _bytes(_read(folder / "size").strip())
        if not level or not size or kind == "Instruction":
            continue
        seen = True
        found["line"] = int(_read(folder / "coherency_line_size").strip() or 0) or found["line"]
        sharers = _count(_read(folder / "shared_cpu_list").strip())
        if level == "1":
            found["l1d"] = size
        elif level == "2":
            # a level-2 cache shared by several cores is counted by each core's share
            found["l2"] = max(found["l1d"], size // max(1, sharers // _smt(root)))
        else:
            found["l3"], found["l3_sharers"] = size, max(1, sharers // _smt(root))
    if not seen:
        found["l3"] = 8 << 20
    return found


def _smt(root: Path) -> int:
    return max(1, _count(_read(root / "sys/devices/system/cpu/cpu0/topology/thread_siblings_list").strip()))


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+)([KMG]?)", text)
    return int(match.group(1)) << {"": 0, "K": 10, "M": 20, "G": 30}[match.group(2)] if match else 0


def _count(cpu_list: str) -> int:
    """Number of CPUs in a kernel list such as ``0-3,8``."""
    total = 0
    for part in filter(None, cpu_list.split(",")):
        low, _, high = part.partition("-")
        if low.isdigit():
            total += (int(high) - int(low) + 1) if high.isdigit() else 1
    return total
