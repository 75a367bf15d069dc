"""Every key of a cache or database, one function each; its docstring says what enters the key, and why.

Four kinds: what is stored in the tuning database (problems, partitions, decisions, and the versions that their rows
belong to), compiled kernels, benchmark times of convolutions, and plans that a process remembers.

No key of a stored choice holds the sources of jcuts as a whole or Python's patch number: a choice records the versions
of the kernel families that were asked (`jcuts.base.schedule_versions`), and the packages that it was measured with are
the row's ``versions``.  A row of other packages is tried first: checked once, then stored under the new ones.
"""

from __future__ import annotations

import functools
import hashlib
import json
import platform as _platform
from collections.abc import Mapping, Sequence
from typing import Any

from jcuts.base import fingerprint, knobs, schedule_versions
from jcuts.base.fingerprint import digest

PROBLEM_FORMAT = 1
GPU_TIMING = 4
"""How kernels are timed on GPUs: times of another way are not compared with these."""
CODE = "; code "
"""What separates the packages and the versions of schedules in the ``versions`` of a row."""
REGIME = "; regime "
"""What separates these and the tuning regime, where that is not the usual one."""


# -- content ----------------------------------------------------------------------------------------------------------
def function(text: str) -> str:
    """A function, by its canonical text (`jcuts.trace.canonical`): no names, no source lines, no object ids."""
    return hashlib.sha256(text.encode()).hexdigest()


def kernel_program(data: Mapping[str, object]) -> str:
    """A kernel program, by all of its JSON form but the name: equal programs have equal keys in every process."""
    text = json.dumps(
        {name: value for name, value in data.items() if name != "name"}, sort_keys=True, separators=(",", ":")
    )
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def candidate(kind: str, payload: str) -> str:
    """A candidate of a tuning problem, by its kind and payload; breaks ties between equal times alike everywhere."""
    return hashlib.sha256(f"{kind}\0{payload}".encode()).hexdigest()


# -- tuning database --------------------------------------------------------------------------------------------------
def ranking(program: str, machine: str, limit: int, percent: float) -> str:
    """The ranked schedules of an unscheduled program, as data.

    Args: program: its key; machine: of the enumeration (cores, caches, vector width; SMs, capability), since another
    machine has other schedules; limit, percent: knobs that prune them.
    """
    return digest(program, machine, str(limit), str(percent))


def problem(
    *,
    device: str,
    identity: str,
    inputs: Sequence[Sequence[Any]],
    outputs: Sequence[Sequence[Any]],
    space: str | list[str],
    tolerance: float,
) -> str:
    """A tuning problem: what is computed, on what, from which candidates, to which tolerance.

    Args: device: kind of GPU (the row's ``device`` is `GPU_DEVICE`), '' for a CPU (whose kind is the row's ``device``);
    identity: the region's canonical digest; inputs, outputs: shapes, dtypes, how operands are drawn, and what decides
    tolerances; space: `ranking` and the number of candidates, or the candidates' own keys.  Versions of schedules are
    no part of it: a choice records them (`schedules`), so that databases of all versions of jcuts have the same keys.
    """
    text = json.dumps(
        {
            **({"device": device, "timing": GPU_TIMING} if device else {}),
            "format": PROBLEM_FORMAT,
            "identity": identity,
            "inputs": inputs,
            "outputs": outputs,
            "space": space,
            "tolerance": tolerance,
        },
        sort_keys=True,
    )
    return hashlib.sha256(text.encode()).hexdigest()


def schedules(platform: str, template: str) -> dict[str, str]:
    """Versions of the kernel families that are asked for schedules of a program: what a choice records.

    The rule: a choice counts while every family that was asked, whether it proposed a candidate or not, has the version
    that it had.  So a change of one family's schedules loses the choices that it might change, those where it would
    propose now for the first time among them, and no others.

    Args: platform: 'cpu' or 'cuda'; template: of the unscheduled program (`jcuts.kernel_ir`).
    """
    asked = schedule_versions.ASKED.get(template, schedule_versions.GPU_FAMILIES)
    versions = schedule_versions.here()
    return {name: versions.family(name) for name in (("cpu",) if platform == "cpu" else asked)}


def partition_code(platform: str) -> dict[str, str]:
    """Versions that a stored partition records: of the code that groups equations, and of the platform's families."""
    versions = schedule_versions.here()
    families = ("cpu",) if platform == "cpu" else schedule_versions.GPU_FAMILIES
    return {"partition": versions.packages(schedule_versions.PARTITION)} | {f: versions.family(f) for f in families}


def is_current(recorded: Mapping[str, str]) -> bool:
    """Whether everything that a row records has the version that it has here."""
    versions = schedule_versions.here()

    def version(name: str) -> str | None:
        if name == "partition":
            return versions.packages(schedule_versions.PARTITION)
        return versions.family(name) if name in schedule_versions.FAMILIES else None

    return all(version(name) == known for name, known in recorded.items())


def packages() -> str:
    """What a process may differ in from the one that measured, though the schedules are the same.

    Versions of jax, jaxlib, numba, llvmlite and NumPy, and of Python without the patch number.  As text: people read it
    in ``jcuts cache ls``.
    """
    known = {"python": ".".join(_platform.python_version_tuple()[:2])}
    known |= {name: fingerprint.package_version(name) for name in fingerprint.PACKAGES}
    return ", ".join(f"{name} {version}" for name, version in known.items())


def row_versions(packages: str, recorded: Mapping[str, str], regime: str = "") -> str:
    """The ``versions`` of a database row: packages, versions of schedules that its value records, tuning regime.

    Both, so that installations with different schedules share a database without overwriting each other's rows.  Args:
    regime: what differs from the usual one (`tune.measure.regime`), so that rows of earlier versions keep their keys.
    """
    code = CODE + digest(dict(recorded))[:16] if recorded else ""
    return packages + code + (REGIME + regime if regime else "")


def cpu_device() -> str:
    """The ``device`` of a database row: model, features and cores of this CPU, for which measured times are valid."""
    return digest(fingerprint.cpu())


GPU_DEVICE = "gpu"
"""The ``device`` of rows about GPUs: the kind of GPU is part of their keys, and the host's CPU of nothing."""


def partition(function: str, mode: str, tolerance: float, more: Sequence[str] = ()) -> str:
    """A stored partition: the function, and every setting and knob that decides which kernels may win.

    Args: function: canonical digest; more: on a GPU its kind, the machine, the variant, which operands are rounded.
    """
    here = knobs.current()
    return digest(function, mode, str(tolerance), str(here.max_candidates), str(here.top_percent), *more)


def decision(platform: str, function: str, more: Sequence[str]) -> str:
    """A stored decision between whole programs.

    Args: function: canonical text; more: settings, options of ``jax.jit``, where arguments lie, kinds of devices,
    numbers that choose other programs, knobs that do.  Besides, all that makes the programs: the packages, and the code
    of every stage, without prose, and of one platform's families.  Other versions time the programs again,
    which tunes no kernel.
    """
    versions = schedule_versions.here()
    families = ("cpu",) if platform == "cpu" else schedule_versions.GPU_FAMILIES
    code = versions.packages(schedule_versions.PROGRAM), *map(versions.family, families)
    return digest("guard", platform, function, *more, packages(), code)


def pinned_decision(platform: str, function: str, more: Sequence[str]) -> str:
    """The same decision where it is pinned: without versions, since it is to outlive them.  Args: see `decision`."""
    return digest("pinned guard", platform, function, *more)


def row_file(key: str, device: str, versions: str) -> str:
    """Part of the name of a row's file: equal rows of equal devices and versions have one file."""
    return digest(key, device, versions)[:12]


def row_files(rows: Sequence[Sequence[Any]]) -> int:
    """The contents of folders of such files: plans that are remembered hold for these.  Args: rows: sorted."""
    return int(digest(rows)[:12], 16) if rows else 0


# -- compiled kernels -------------------------------------------------------------------------------------------------
@functools.cache
def _compilers(platform: str) -> str:
    return digest(packages(), schedule_versions.here().emitter(platform))


def cpu_kernel(program: str, target: Sequence[str | int]) -> str:
    """A kernel for a CPU, in HLO and on disk: program, LLVM's target, this CPU, compilers and emitter."""
    return digest(program, *target, _compilers("cpu"), fingerprint.cpu())


def cuda_kernel(program: str, arch: str, toolchain: str, prefetches: str) -> str:
    """A kernel for a GPU, in HLO and on disk: program, architecture, compilers, emitter, `cuda_toolchain`, and
    the limits of what it prefetches into the L2 cache.
    """
    return digest("cuda", program, arch, _compilers("cuda"), toolchain, prefetches)


def cuda_toolchain(distributions: Sequence[str], assembler: str) -> str:
    """What turns emitted code into machine code for a GPU: versions of the distributions, and the assembler."""
    return digest({name: fingerprint.package_version(name) for name in distributions}, assembler)


@functools.cache
def object_folder() -> str:
    """The folder of compiled kernels: compilers, emitters and CPU features, so that installations share a cache.

    Cores are not part of it: object code does not depend on them.
    """
    cpu = fingerprint.cpu()
    return digest("object code 2", _compilers("cpu"), _compilers("cuda"), cpu["machine"], cpu["model"], cpu["features"])


def smoke_kernel(source: str) -> str:
    """The kernel that ``jcuts doctor`` compiles and runs."""
    return digest("smoke", source)


# -- measurements of hardware -----------------------------------------------------------------------------------------
def cpu_arch(fields: Sequence[Any]) -> str:
    """A description of a CPU with measured bandwidths: what was detected, and the version of the measurement."""
    return hashlib.sha256(json.dumps(list(fields)).encode()).hexdigest()[:16]


def convolution(layer: Mapping[str, Any]) -> str:
    """A convolution in the benchmark database: everything that a time depends on, but device and batch size."""
    return digest("convolution 1", dict(layer))


def convolution_network(uses: Sequence[Mapping[str, Any]]) -> str:
    """The convolutions of a network in program order, each with its batch and precision: short, for its name."""
    return digest(json.dumps(uses, sort_keys=True))[:8]


def convolution_library(cudnn: str, jaxlib: str, timing: str, tolerance: str) -> str:
    """The library of a device in the benchmark database: versions, how times are taken, how exact results must be."""
    return f"cuDNN {cudnn}, jaxlib {jaxlib}, timing {timing}, {tolerance}"


# -- what a process remembers -----------------------------------------------------------------------------------------
def plan(function: str, settings: str, platform: str) -> str:
    """A planned function, but for the state of databases: program, options, platform, knobs that change plans."""
    here = knobs.current()
    caches = () if here.tune_caches == "warm" else (here.tune_caches,)
    changing = (here.fuel, here.chunk, here.chains, here.restore_convs, here.l2_prefetch_mb, *caches)
    return digest(function, settings, platform, *changing)


def remembered_plan(plan: str, tuning: str, convolutions: Any) -> str:
    """A plan under the state of the tuning and the benchmark database. Args: their generations, '' where not read."""
    return digest(plan, tuning, convolutions)


def wrapper(settings: Any, options: Mapping[str, Any], surroundings: Sequence[Any]) -> tuple[Any, ...]:
    """One ``Optimized`` of a function: options of ``jcuts.optimize`` and ``jax.jit``, and the state when it is made."""
    return settings, tuple(repr(value) for value in options.values()), tuple(surroundings)
