"""``jcuts explain --arch``: offline ranking of a function's candidates for a GPU that this machine does not have."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from jcuts.arch.cpu import CpuArch
from jcuts.arch.load import load_arch
from jcuts.base.errors import UsageError
from jcuts.cli.printing import console, duration, table
from jcuts.report.report_data import operations_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that only ``--arch`` has."""
    group = parser.add_argument_group("for a GPU that is not here")
    group.add_argument("--arch", metavar="GPU", help="rank for this GPU: a name (V100, RTX 2080, ...) or a .toml file")
    group.add_argument("--limit", type=int, default=4, help="with --arch: candidates per operation (%(default)s)")
    group.add_argument("--ptx", type=Path, metavar="DIR", help="with --arch: write PTX of the best ones")


def run(fn: Any, positional: tuple[Any, ...], keywords: dict[str, Any], arguments: argparse.Namespace) -> int:
    """Prints the ranking."""
    from jcuts.pipeline import offline_ranking

    arch = load_arch(arguments.arch)
    if isinstance(arch, CpuArch):
        raise UsageError(
            f"{arguments.arch} is a CPU's file, --arch ranks for GPUs: JCUTS_ARCH={arguments.arch} ranks by it here",
            path=arguments.arch,
        )
    found = offline_ranking.rank(
        getattr(fn, "__wrapped__", fn), *positional, arch=arch, limit=arguments.limit, **keywords
    )
    console().print(_table(found))
    if found.why is not None:
        stand_in = f"; registers and shared memory are those of {found.target}" if found.target else ""
        console().print(f"{arch.name}: {found.why.message}{stand_in}", markup=False)
    try:
        if arguments.ptx is not None:
            print(f"{len(offline_ranking.write_ptx(found, arguments.ptx))} files in {arguments.ptx}")
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(found.to_dict(), indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {error.filename}: {error}", path=str(error.filename)) from error
    return 0


def _table(found: Any) -> Any:
    rows = []
    for operation in found.operations:
        best = operation.candidates[0] if operation.candidates else None
        text = operations_text(operation.primitives)
        if best is None:
            rows.append((str(operation.count), text, "", "", "", "", "", operation.refused.reason))
            continue
        pul = "" if best.pul is None else f"{best.pul:.3f}"
        seconds = "" if best.seconds is None else duration(best.seconds)
        bound = "" if best.bound is None else duration(best.bound)
        registers = str(best.registers or "")
        rows.append(
            (
                str(operation.count),
                text,
                pul,
                seconds,
                bound,
                registers,
                f"{best.score:.3f}",
                best.rejected or best.schedule,
            )
        )
    assembled = f"assembled for {found.target}" if found.target else "not assembled"
    title = f"{found.arch}, {assembled}: the best candidate of every operation"
    return table(
        title,
        ("n", "operations", "PUL", "predicted", "bound", "regs", "score", "schedule"),
        rows,
        right=(0, 2, 3, 4, 5, 6),
    )
