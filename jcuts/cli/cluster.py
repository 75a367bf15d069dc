"""Measure this machine as a cluster file, fit stored measurements again, or list clusters and models."""

from __future__ import annotations

import argparse

from rich.progress import BarColumn, Progress, TextColumn

from jcuts.cli.output_files import write_text
from jcuts.cli.plan import list_presets
from jcuts.plan.calibrate import fit

HELP = "measure this machine as a cluster file; list presets"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``jcuts cluster``."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="action")
    one = actions.add_parser("measure", help="measure this machine and write its cluster file")
    one.add_argument("--out", metavar="FILE", help="TOML file to write (default: standard output)")
    one.add_argument("--name", default="measured", help="name of the cluster")
    one.add_argument("--storage", default=".", metavar="FOLDER", help="folder whose disk is measured")
    one.add_argument("--quick", action="store_true", help="small sizes")
    again = actions.add_parser("refit", help="fit the constants again from the curves of kept measurements")
    again.add_argument("files", nargs="+", metavar="FILE", help="cluster files of one machine, the newest last")
    again.add_argument("--out", metavar="FILE", help="TOML file to write (default: standard output)")
    again.add_argument("--name", default="measured", help="name of the cluster")
    actions.add_parser("list", help="clusters and models that come with jcuts")


def run(arguments: argparse.Namespace) -> int:
    """Runs ``jcuts cluster``."""
    if arguments.action == "list":
        list_presets()
        return 0
    if arguments.action == "refit":
        return _write(fit.refit(arguments.files), arguments)
    from jcuts.plan.calibrate import measure

    with Progress(TextColumn("{task.description}"), BarColumn(), transient=True) as progress:
        task = progress.add_task("starting", total=1)
        found = measure.measure(
            arguments.storage,
            quick=arguments.quick,
            progress=lambda what, done, total: progress.update(task, description=what, completed=done, total=total),
        )
    return _write(found, arguments)


def _write(found: fit.Measured, arguments: argparse.Namespace) -> int:
    text = fit.to_toml(found, arguments.name)
    if arguments.out:
        write_text(arguments.out, text)
    else:
        print(text)
    return 0
