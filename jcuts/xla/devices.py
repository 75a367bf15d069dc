"""Device query: GPU properties of this process as JAX's CUDA backend reports them, for code generator and scheduler."""

from __future__ import annotations

import functools
import os
import re
from dataclasses import dataclass
from typing import Any

import jax

from jcuts.arch.chosen import chosen_gpu
from jcuts.arch.gpu import GpuArch
from jcuts.arch.load import gpu_of_device, load_gpu
from jcuts.arch.sm_limits import NEWEST_CAPABILITY
from jcuts.base.errors import UsageError
from jcuts.codegen.cuda.toolchain.target import AMPERE, CudaTarget
from jcuts.schedule.gpu.candidates import GpuMachine
from jcuts.xla import cuda_launcher

NAMES = ("cuda", "gpu")
"""What JAX calls the platform, in lowering rules and on devices."""
_DEFAULT_SMS = load_gpu("A100").num_sm
"""Multiprocessors of a device that does not say how many it has."""


@dataclass(frozen=True)
class Gpu:
    """One GPU model with its properties.

    Attributes:
        name: as the driver reports it.
        capability: compute capability (major, minor).
        sms: multiprocessors.
    """

    name: str
    capability: tuple[int, int]
    sms: int

    def identity(self) -> str:
        """Cache-key text of a GPU: what measured times are valid for."""
        return f"cuda {self.name} {self.capability[0]}.{self.capability[1]} x{self.sms}"


def describe(device: Any) -> Gpu:
    """A JAX device as data. Raises UsageError for a device without a compute capability (not an NVIDIA GPU)."""
    text = str(getattr(device, "compute_capability", ""))
    found = re.fullmatch(r"(\d+)\.(\d+)", text)
    name = str(getattr(device, "device_kind", ""))
    if found is None:
        raise UsageError(f"{name or device} has no compute capability ({text!r})", device=name)
    return Gpu(name, (int(found[1]), int(found[2])), int(getattr(device, "core_count", 0) or _DEFAULT_SMS))


@functools.cache
def this() -> Gpu:
    """The GPUs of this process, which must be of one kind. Raises UsageError otherwise."""
    kinds = {describe(device) for device in jax.local_devices(backend="cuda")}
    if len(kinds) != 1:
        raise UsageError(f"GPUs of several kinds in one process: {sorted(k.name for k in kinds)}")
    return kinds.pop()


def target() -> CudaTarget:
    """The architecture to compile for."""
    return CudaTarget(this().capability)


def architecture_of(gpu: Gpu) -> tuple[GpuArch, bool]:
    """The rates of a GPU of this process (`arch.load.gpu_of_device`, or the file of ``JCUTS_ARCH``), and whether a file
    has its name.

    Raises: UsageError where ``JCUTS_ARCH`` names a GPU of another compute capability.
    """
    chosen = chosen_gpu()
    if chosen is None:
        return _detected(gpu)
    if divmod(chosen.compute_capability, 10) != gpu.capability:
        theirs, ours = (f"{major}.{minor}" for major, minor in (divmod(chosen.compute_capability, 10), gpu.capability))
        raise UsageError(
            f"JCUTS_ARCH names {chosen.name}, of compute capability {theirs}: {gpu.name} has {ours}",
            name=chosen.name,
            device=gpu.name,
        )
    return chosen, True


@functools.cache
def _detected(gpu: Gpu) -> tuple[GpuArch, bool]:
    return gpu_of_device(
        gpu.name, gpu.capability, gpu.sms, cuda_launcher.memory_bandwidth(), cuda_launcher.highest_clock()
    )


def rates_of_another() -> str:
    """'' where the rates that rank schedules are those of a file of the GPU's name, else whose they are."""
    gpu = this()
    arch, named = architecture_of(gpu)
    if chosen_gpu() is not None:
        return f"schedules are ranked by rates of {arch.name} (JCUTS_ARCH)"
    if named:
        return ""
    scaled = f"{gpu.sms} SMs, {arch.clock / 1e9:.2f} GHz and {arch.bw_global / 1e12:.2f} TB/s"
    return f"no architecture file for {gpu.name}: schedules are ranked by rates of {arch.name}, scaled to {scaled}"


def machine() -> GpuMachine:
    """The GPU's machine description for schedule enumeration."""
    gpu = this()
    return GpuMachine(gpu.sms, capability=gpu.capability, arch=architecture_of(gpu)[0])


def unusable() -> str:
    """'' if jcuts can generate and run kernels on this machine's GPUs, else the reason."""
    try:
        gpu = this()
        target()
    except (UsageError, RuntimeError) as error:  # JAX raises RuntimeError where there is no such backend
        return str(error)
    found = ".".join(map(str, gpu.capability))
    if gpu.capability < AMPERE:
        return f"compute capability {found} is older than 8.0: kernels for it are planned and assembled, but not run"
    if gpu.capability > NEWEST_CAPABILITY:  # machine code of one does not run on a newer one
        newest = ".".join(map(str, NEWEST_CAPABILITY))
        return f"{gpu.name} has compute capability {found}, kernels are made up to {newest}"
    from jcuts.codegen.cuda import compile as compiler
    from jcuts.codegen.cuda.toolchain import ptxas
    from jcuts.xla import cuda_launcher

    return (
        cuda_launcher.available()
        or compiler.available()
        or cuda_launcher.too_old(cuda_launcher.driver_version(), ptxas.toolkit())
    )


def memory_bytes(platform: str) -> int | None:
    """Bytes that a program may take on a device of a platform; None where it does not say."""
    if platform == "cpu":
        names = ("SC_PAGE_SIZE", "SC_PHYS_PAGES")
        return os.sysconf(names[0]) * os.sysconf(names[1]) if set(names) <= set(os.sysconf_names) else None
    try:
        found = jax.local_devices(backend=platform)
    except RuntimeError:  # no such device here: a program is planned for another machine
        return None
    return (found[0].memory_stats() or {}).get("bytes_limit")
