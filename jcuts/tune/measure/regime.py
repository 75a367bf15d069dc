"""Measurement regime of a choice: state of the caches, what ran beside the measurement, power cap, share of the cores.

Kernels on a CPU are timed with warm caches (``JCUTS_TUNE_CACHES=cold`` evicts them before every sample), on a GPU with
a cold L2 cache (`tune.measure.gpu_timing`).  Measurements have the machine to themselves, or, where tuning goes on
beside the user's calls, slices of it between two of them.  A GPU's power limit below its default one, and a control
group's share of the cores, change which kernel is the fastest as well.

What differs from the usual regime is part of a row's key, so that rows of several regimes stay side by side.  A row of
another one counts where nothing may be measured and in first calls; explicit tuning (``.tune()``) measures it anew.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jcuts.base import fingerprint, knobs
from jcuts.tune import device_slices

CACHES = "caches"
BESIDE = "beside"
POWER = "power"
CORES = "cores"
CODE = "code"
EARLIER = "earlier"
"""Code of a shipped choice's kernel that other schedules made than those here."""
KEPT = (CACHES, BESIDE, POWER, CORES, CODE)
"""What a regime consists of; what is as usual is left out."""
WARM = "warm"
COLD = "cold"
CALLS = "calls"
"""Measured in slices between the user's calls."""
_CONTROL_GROUP = Path("/sys/fs/cgroup/cpu.max")


def caches(platform: str) -> str:
    """State of the caches in which a platform's kernels are timed: ``warm`` or ``cold``."""
    return knobs.current().tune_caches if platform == "cpu" else COLD


def now(platform: str) -> dict[str, str]:
    """The regime of a measurement on this thread: what differs from the usual one (`KEPT`)."""
    asked = caches(platform)
    found = {
        CACHES: "" if asked == (WARM if platform == "cpu" else COLD) else asked,
        BESIDE: CALLS if device_slices.current().beside else "",
        POWER: "" if platform == "cpu" else power_cap(),
        CORES: share_of_cores() if platform == "cpu" else "",
    }
    return {name: value for name, value in found.items() if value}


def recorded(value: Mapping[str, Any]) -> dict[str, str]:
    """The regime that a stored choice records; none for the usual one, and for what a person made of it."""
    found = value.get("regime")
    known = found.items() if isinstance(found, dict) else ()
    return {str(name): str(text) for name, text in known if name in KEPT}


def key_text(regime: Mapping[str, str]) -> str:
    """A regime as part of a row's key; '' for the usual one."""
    return ", ".join(f"{name} {regime[name]}" for name in KEPT if regime.get(name))


def described(regime: Mapping[str, str], platform: str) -> str:
    """A regime for people: ``warm caches, alone``."""
    usual = WARM if platform == "cpu" else COLD
    beside = "between calls" if regime.get(BESIDE) else "alone"
    more = [f"{name} {regime[name]}" for name in (POWER, CORES, CODE) if regime.get(name)]
    return ", ".join([f"{regime.get(CACHES, usual)} caches", beside, *more])


def platform_of(schedules: Mapping[str, str]) -> str:
    """The platform of a choice, by the kernel families that it records (`keys.schedules`)."""
    return "cpu" if not schedules or "cpu" in schedules else "cuda"


def is_as_asked(regime: Mapping[str, str], platform: str) -> bool:
    """Whether a choice was measured with the caches that are asked for here."""
    return regime.get(CACHES, WARM if platform == "cpu" else COLD) == caches(platform)


def distance(regime: Mapping[str, str], platform: str) -> int:
    """How far a choice's regime is from this thread's, if that measured alone: 0 for the same."""
    alone, here = ({name: value for name, value in one.items() if name != BESIDE} for one in (regime, now(platform)))
    return 2 * (len(KEPT) if not is_as_asked(regime, platform) else alone != here) + bool(regime.get(BESIDE))


def share_of_cores(path: Path = _CONTROL_GROUP) -> str:
    """``1.5 of 2`` where the control group gives this process less than the cores that it may run on, else ''."""
    cores = fingerprint.usable_cores()
    try:
        quota, period = (int(word) for word in path.read_text().split()[:2])
        share = quota / period
    except (OSError, ValueError, ZeroDivisionError):  # another kind of group, or "max"
        return ""
    return f"{share:.1f} of {cores}" if share < cores else ""


@functools.cache
def power_cap() -> str:
    """``450 of 700 W`` where a GPU's power limit is below its default one (NVML), else ''."""
    try:
        return cap_of(ctypes.CDLL("libnvidia-ml.so.1"))
    except (OSError, AttributeError):  # no driver, or one without these functions
        return ""


def cap_of(nvml: Any) -> str:
    """`power_cap` of the first GPU that a loaded NVML library tells of."""
    device, limit, usual = ctypes.c_void_p(), ctypes.c_uint(), ctypes.c_uint()
    if nvml.nvmlInit_v2():
        return ""
    try:
        failed = (
            nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(device))
            or nvml.nvmlDeviceGetPowerManagementLimit(device, ctypes.byref(limit))
            or nvml.nvmlDeviceGetPowerManagementDefaultLimit(device, ctypes.byref(usual))
        )
    finally:
        nvml.nvmlShutdown()
    watts, most = limit.value // 1000, usual.value // 1000
    return f"{watts} of {most} W" if not failed and watts < most else ""
