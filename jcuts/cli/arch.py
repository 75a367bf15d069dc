"""Measure this machine's CPU or GPU as an architecture file, whose rates rank schedules and bound kernels."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from jcuts.arch import cpu_file, gpu_file
from jcuts.arch.cpu import CpuArch
from jcuts.arch.gpu import GpuArch
from jcuts.arch.load import load_arch, load_gpu
from jcuts.base.errors import UsageError
from jcuts.cli.output_files import check_writable, write_text

HELP = "measure this CPU or GPU as an architecture file"
DEVICES = ("auto", "cpu", "cuda")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``jcuts arch``."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="action")
    one = actions.add_parser("measure", help="measure this machine and write its architecture file")
    one.add_argument("--out", metavar="FILE.toml", required=True, help="file to write")
    one.add_argument("--device", choices=DEVICES, default="auto", help="auto: the GPU, if there is one (%(default)s)")
    one.add_argument("--force", action="store_true", help="replace a file that is there")
    one.add_argument(
        "--dry-run",
        metavar="GPU",
        help="no device: assemble the kernels for this GPU (a name or a file), and take their times from its numbers",
    )


def run(arguments: argparse.Namespace) -> int:
    """Runs ``jcuts arch``."""
    _check(arguments.out, arguments.force)
    arch = _measured(arguments.device, arguments.dry_run)
    head = "Written by jcuts arch measure; use it with JCUTS_ARCH, or with jcuts explain --arch if it is a GPU's."
    text = cpu_file.to_toml(arch, head) if isinstance(arch, CpuArch) else gpu_file.to_toml(arch, head)
    write_text(arguments.out, text)
    load_arch(arguments.out)  # what cannot be read again must not be left unnoticed
    print(f"{arguments.out}: {arch.name}")
    print(f"JCUTS_ARCH={arguments.out} ranks schedules and bounds kernels by it")
    return 0


def _check(out: str, force: bool) -> None:
    """Can the file be written?  Asked before anything is measured.

    Raises:
        UsageError: it cannot, or it is there and ``force`` is not given.
    """
    if not out.endswith(".toml"):
        raise UsageError(f"{out}: an architecture file must end in .toml", path=out)
    check_writable(out)
    if Path(out).exists():
        if not force:
            raise UsageError(f"{out} is there already: --force replaces it", path=out)
        write_text(out, Path(out).read_text(encoding="utf-8"))  # a file that may be read only


def _measured(device: str, dry_run: str | None) -> CpuArch | GpuArch:
    """The device, measured.  Raises: NativeError where there is none."""
    if dry_run is not None:
        from jcuts.tune.hardware.gpu_dry_run import ModelledDevice
        from jcuts.tune.hardware.gpu_machine import measure_gpu

        if device == "cpu":
            raise UsageError("--dry-run is of a GPU: a CPU needs no device", device=device)
        return measure_gpu(ModelledDevice(load_gpu(dry_run)), _tell)
    from jcuts.tune.measure import cuda_driver

    if device == "cuda" or (device == "auto" and cuda_driver.total_bytes()):
        from jcuts.tune.hardware.gpu_machine import measure_gpu

        return measure_gpu(cuda_driver.Driver(), _tell)
    from jcuts.tune.hardware.cpu_machine import measure_cpu

    return measure_cpu(_tell)


def _tell(what: str) -> None:
    print(f"measuring {what} ...", file=sys.stderr)
