"""Explains what jcuts does to a function: what was fused, why, how fast, and what was refused."""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from jcuts.base.errors import JcutsError, UsageError
from jcuts.base.settings import MODES, TUNE, Settings
from jcuts.cli import explain_arch
from jcuts.cli.output_files import check_writable
from jcuts.cli.printing import console

HELP = "what jcuts does to a function, and why"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_function(parser)
    parser.add_argument("--mode", choices=MODES, help=f"mode for a plain function; default: {Settings().mode}")
    parser.add_argument("--tune", choices=TUNE, default="cached", help="auto measures first; default: %(default)s")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the report as one HTML file")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report as JSON")
    explain_arch.add_arguments(parser)


def add_function(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of commands about one call of a function."""
    parser.add_argument("function", metavar="pkg.mod:fn", help="the function, plain or already optimised")
    parser.add_argument(
        "--args",
        metavar="pkg.mod:example",
        help="a tuple of arguments, a dict of keyword arguments, or a function without arguments that returns either",
    )


def add_signatures(parser: argparse.ArgumentParser, note: str = "") -> None:
    """Adds the arguments of commands about several signatures of a function. Args: note: on further ones."""
    parser.add_argument("function", metavar="pkg.mod:fn", help="the function, plain or already optimised")
    parser.add_argument(
        "--args",
        metavar="pkg.mod:example",
        action="append",
        required=True,
        help="a tuple of arguments, a dict of keyword arguments, or a function without arguments that returns either; "
        f"again for each further signature{note}",
    )


def run(arguments: argparse.Namespace) -> int:
    """Prints the report of the function for the example arguments."""
    import jcuts

    for target in (arguments.html, arguments.json):
        check_writable(None if target is None else str(target))
    fn = load(arguments.function)
    positional, keywords = example_arguments(arguments.args)
    if arguments.arch is not None:
        check_arguments(fn, positional, keywords, arguments)
        return explain_arch.run(fn, positional, keywords, arguments)
    if not isinstance(fn, jcuts.Optimized):
        fn = jcuts.optimize(fn, mode=arguments.mode or Settings().mode, tune=arguments.tune)
    else:
        _check_options(fn.settings, arguments)
    check_arguments(fn, positional, keywords, arguments)
    explain = fn.tune if arguments.tune == "auto" else fn.explain
    try:
        report = explain(*positional, **keywords)
    except JcutsError:
        raise
    except Exception as error:
        raise _of_the_user(arguments.function, error) from error
    from jcuts.report.report_data import NOT_CHECKED, NOT_MEASURED
    from jcuts.report.rich_tables import report_tables

    console().print(report_tables(report))
    if arguments.tune == "cached" and any(s.why in (NOT_MEASURED, NOT_CHECKED) for s in report.subsets):
        console().print("What is not measured yet is measured by --tune auto, or when the function is first called.")
    if arguments.html is not None:
        report.to_html(arguments.html)
    if arguments.json is not None:
        try:
            _write_json(arguments.json, report.to_dict())
        except OSError as error:
            raise UsageError(f"cannot write {arguments.json}: {error}", path=str(arguments.json)) from error
    return 0


def _check_options(settings: Settings, given: argparse.Namespace) -> None:
    """Do the options agree with those that the function was optimised with, which hold?

    Raises:
        UsageError: they do not.
    """
    asked = {"mode": given.mode, "tune": "off" if given.tune == "off" else None}
    for name, value in asked.items():
        if value is not None and value != getattr(settings, name):
            raise UsageError(
                f"{given.function} is optimised already, with {name}={getattr(settings, name)!r}: name the plain "
                f"function for --{name} {value}, or its __wrapped__",
                function=given.function,
            )


def check_arguments(fn: Any, positional: tuple[Any, ...], keywords: dict[str, Any], given: argparse.Namespace) -> None:
    """Do the example arguments fit the function?  (A function without a signature is tried as it is.)

    Raises:
        UsageError: they do not.
    """
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*positional, **keywords)
    except TypeError as error:
        name = given.function
        hint = (
            f"--args {given.args} does not fit"
            if given.args
            else "say what to call it with: --args pkg.mod:example, a tuple of arguments, a dict of keyword arguments, "
            "or a function that returns either"
        )
        raise UsageError(f"{name}{signature} cannot be called: {error}; {hint}", function=name) from error


def _of_the_user(name: str, error: Exception) -> UsageError:
    """An error of the user's own function as one line with the line of their source."""
    ours = str(Path(__file__).parents[1])
    place = ""
    for frame in traceback.extract_tb(error.__traceback__):
        if not frame.filename.startswith((ours, "<")) and "site-packages" not in frame.filename:
            place = f"{frame.filename}:{frame.lineno}: "
    text = (str(error).splitlines() or [""])[0]
    return UsageError(
        f"{place}{name} raised {type(error).__name__}: {text} (jcuts --traceback explain ... shows all of it)",
        function=name,
    )


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
        try:
            value = value()
        except Exception as error:
            raise _of_the_user(reference, error) from error
    if isinstance(value, dict):
        return (), value
    if isinstance(value, (tuple, list)):
        return tuple(value), {}
    return (value,), {}
