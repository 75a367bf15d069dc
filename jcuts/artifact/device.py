"""Compatibility check: the device and the versions that an artefact was made for, compared with those that are here.

Two kinds of differences, each a sentence that names both sides.  Where kernels cannot run (another platform, a CPU
without the instructions, a GPU of another compute capability, a driver that is too old) nothing but the fallback can.
Where they would run, but neither bits nor speed are those that were accepted (another CPU model, jax or jaxlib), the
caller may insist (``on_mismatch="run"``).
"""

from __future__ import annotations

import ctypes
import platform as _platform
import re
from dataclasses import dataclass
from typing import Any

import jax

from jcuts.artifact.manifest import Manifest
from jcuts.base import fingerprint

_INSTRUCTIONS = re.compile(
    r"mmx|ss?se[0-9a-z_]*|avx[0-9a-z_]*|fma|fma4|f16c|bmi[12]|adx|aes|vaes|v?pclmulqdq|gfni|popcnt|abm|lzcnt|movbe|cx16|"
    r"amx_[a-z0-9_]+|sha_ni|pni|asimd[a-z0-9]*|sve[a-z0-9_]*|fphp|bf16|i8mm|fcma|atomics"
)
"""Names in /proc/cpuinfo of instruction sets that object code may use."""
_MADE = ("jax", "jaxlib")


@dataclass(frozen=True)
class Differences:
    """What differs: ``blocking`` keeps kernels from running, ``other`` does not."""

    blocking: tuple[str, ...]
    other: tuple[str, ...]

    @property
    def all(self) -> tuple[str, ...]:
        """Both, the blocking ones first."""
        return (*self.blocking, *self.other)


def this_cpu(external: tuple[str, ...]) -> dict[str, Any]:
    """This CPU as an artefact records it. Args: external: symbols that its kernels take from the C library."""
    cpu = fingerprint.cpu()
    features: Any = cpu["features"]
    used = tuple(name for name in features if _INSTRUCTIONS.fullmatch(name))
    known = {"machine": cpu["machine"], "model": cpu["model"], "features": used, "cores": cpu["cores"]}
    return {"platform": "cpu", "external": external, **known}


def this_gpu() -> dict[str, Any]:
    """The first GPU of this process as an artefact records it."""
    device: Any = jax.local_devices(backend="cuda")[0]
    found = re.fullmatch(r"(\d+)\.(\d+)", str(getattr(device, "compute_capability", "")))
    capability = (int(found[1]), int(found[2])) if found else (0, 0)
    return {"platform": "cuda", "name": device.device_kind, "capability": capability, "driver": cuda_driver()}


def cuda_driver() -> tuple[int, ...]:
    """CUDA version that the driver supports, (0, 0) where there is none."""
    number = ctypes.c_int()
    try:
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number)):
            return 0, 0
    except (OSError, AttributeError):
        return 0, 0
    return number.value // 1000, number.value % 1000 // 10


def platform_here() -> str:
    """Where jitted functions run by default: 'cpu', 'cuda', or JAX's name of another platform."""
    default: Any = jax.config.values["jax_default_device"]
    found = default if isinstance(default, str) else getattr(default, "platform", None) or jax.default_backend()
    return "cuda" if found == "gpu" else found


def versions_here() -> dict[str, str]:
    """Versions of what an artefact was made with, and of what runs it."""
    found = {name: fingerprint.package_version(name) for name in ("jax", "jaxlib", "numba", "llvmlite", "numpy")}
    found["python"] = _platform.python_version()
    found["libc"] = " ".join(_platform.libc_ver())
    return found


def differences(manifest: Manifest) -> Differences:
    """What is other here than where the artefact was saved."""
    blocking: list[str] = []
    other: list[str] = []
    made = manifest.device
    here = platform_here()
    if here != made["platform"]:
        blocking.append(f"platform: made for {made['platform']}, here {here}")
    elif here == "cpu":
        _compare_cpu(made, blocking, other)
        if made["external"] and manifest.made.get("libc") != versions_here()["libc"]:
            other.append(f"C library: made with {manifest.made.get('libc')}, here {versions_here()['libc']}")
    else:
        _compare_gpu(made, blocking, other)
    for name in _MADE:
        found = fingerprint.package_version(name)
        if manifest.made.get(name) != found:
            other.append(f"{name}: made with {manifest.made.get(name)}, here {found}")
    if manifest.x64 != bool(jax.config.values["jax_enable_x64"]):
        blocking.append(f"jax_enable_x64: made with {manifest.x64}, here {not manifest.x64}")
    return Differences(tuple(blocking), tuple(other))


def note_on_cores(manifest: Manifest) -> str:
    """What another number of cores means for speed, '' for the same: kernels have scratch memory for those they had."""
    made, here = manifest.device.get("cores"), fingerprint.usable_cores()
    if manifest.device["platform"] != "cpu" or made == here:
        return ""
    return f"tuned for {made} cores, here are {here}: bits are the same, speed is not; kernels use {made} at most"


def _compare_cpu(made: dict[str, Any], blocking: list[str], other: list[str]) -> None:
    here = this_cpu(())
    if made["machine"] != here["machine"]:
        blocking.append(f"machine: made for {made['machine']}, here {here['machine']}")
        return
    missing = sorted(set(made["features"]) - set(here["features"]))
    if missing:
        blocking.append(f"CPU: made for {made['model']}, this {here['model']} lacks {', '.join(missing)}")
    elif made["model"] != here["model"]:
        other.append(f"CPU: made for {made['model']}, here {here['model']}")


def _compare_gpu(made: dict[str, Any], blocking: list[str], other: list[str]) -> None:
    here = this_gpu()

    def text(pair: Any) -> str:
        return ".".join(map(str, pair))

    if tuple(made["capability"]) != here["capability"]:
        blocking.append(
            f"GPU: made for {made['name']} ({text(made['capability'])}), here {here['name']} "
            f"({text(here['capability'])})"
        )
    elif made["name"] != here["name"]:
        other.append(f"GPU: made for {made['name']}, here {here['name']}")
    if tuple(here["driver"])[:1] < tuple(made["driver"])[:1]:
        blocking.append(f"CUDA driver: made with {text(made['driver'])}, here {text(here['driver'])}")
    elif tuple(made["driver"]) != tuple(here["driver"]):
        other.append(f"CUDA driver: made with {text(made['driver'])}, here {text(here['driver'])}")
