"""The architecture files that ``JCUTS_ARCH`` names: they take the place of what is detected."""

from __future__ import annotations

import functools

from jcuts.arch.cpu import CpuArch
from jcuts.arch.gpu import GpuArch
from jcuts.arch.load import load_arch
from jcuts.base import knobs
from jcuts.base.errors import UsageError


def chosen_cpu() -> CpuArch | None:
    """The CPU of a file that ``JCUTS_ARCH`` names, None where it names none.  Raises: as `load_arch`; UsageError."""
    return _chosen(knobs.current().arch)[0]


def chosen_gpu() -> GpuArch | None:
    """The same of a GPU."""
    return _chosen(knobs.current().arch)[1]


@functools.cache
def _chosen(names: tuple[str, ...]) -> tuple[CpuArch | None, GpuArch | None]:
    found = [load_arch(name) for name in names]
    cpus = [arch for arch in found if isinstance(arch, CpuArch)]
    gpus = [arch for arch in found if isinstance(arch, GpuArch)]
    for kind, several in (("CPU", cpus), ("GPU", gpus)):
        if len(several) > 1:
            named = [arch.name for arch in several]
            raise UsageError(f"JCUTS_ARCH names {len(several)} {kind}s, {named}: one of a kind", names=names)
    return (cpus[0] if cpus else None), (gpus[0] if gpus else None)
