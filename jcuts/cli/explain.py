"""Explains what jcuts does to a function: what was fused, why, how fast, and what was refused."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from jcuts.base.errors import UsageError
from jcuts.base.settings import MODES, TUNE, Settings
from jcuts.cli.tables import console

HELP = "what jcuts does to a function, and why"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("function", metavar="pkg.mod:fn", help="the function, plain or already optimised")
    parser.add_argument(
        "--args",
        metavar="pkg.mod:example",
        help="a tuple of arguments, a dict of keyword arguments, or a function without arguments that returns either",
    )
    parser.add_argument("--mode", choices=MODES, default=Settings().mode, help="default: %(default)s")
    parser.add_argument("--tune", choices=TUNE, default="cached", help="auto measures first; default: %(default)s")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the report as one HTML file")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Prints the report of the function for the example arguments."""
    import jcuts

    fn = load(arguments.function)
    positional, keywords = example_arguments(arguments.args)
    if not isinstance(fn, jcuts.Optimized):
        fn = jcuts.optimize(fn, mode=arguments.mode, tune=arguments.tune)
    explain = fn.tune if arguments.tune == "auto" else fn.explain
    report = explain(*positional, **keywords)
    console().print(report)
    for path, write in ((arguments.html, report.to_html), (arguments.json, lambda p: _write_json(p, report.to_dict()))):
        if path is not None:
            try:
                write(path)
            except OSError as error:
                raise UsageError(f"cannot write {path}: {error}", path=str(path)) from error
    return 0


def _write_json(path: Path, data: Any) -> None:
    path.write_text(json.dumps(data, indent=2, default=str) + "\n", encoding="utf-8")


def load(reference: str) -> Any:
    """The object that ``package.module:name`` (or ``name.attribute``) stands for; the current directory counts.

    Raises:
        UsageError: not of that form, no such module or no such name.
    """
    module_name, colon, path = reference.partition(":")
    if not (module_name and colon and path):
        raise UsageError(f"{reference!r} must look like package.module:name", reference=reference)
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        value: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise UsageError(f"cannot import {module_name!r} of {reference!r}: {error}", reference=reference) from error
    for name in path.split("."):
        try:
            value = getattr(value, name)
        except AttributeError:
            raise UsageError(f"{reference!r}: {module_name} has no {name!r}", reference=reference) from None
    return value


def example_arguments(reference: str | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments out of ``--args``: a tuple or list, a dict, one array, or a maker of these."""
    if reference is None:
        return (), {}
    value = load(reference)
    if callable(value):
        value = value()
    if isinstance(value, dict):
        return (), value
    if isinstance(value, (tuple, list)):
        return tuple(value), {}
    return (value,), {}
