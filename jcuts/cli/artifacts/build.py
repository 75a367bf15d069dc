"""Builds an artefact ahead of time: tunes a function for example arguments, writes what its calls run into a file."""

from __future__ import annotations

import argparse
import math

from jcuts.base.errors import UsageError
from jcuts.base.settings import MODES, TUNE, Settings
from jcuts.cli.explain import add_signatures, example_arguments, load
from jcuts.cli.output_files import check_writable

HELP = "tune a function and write it as an artefact"
WEIGHTS = ("inside", "beside", "arguments")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_signatures(parser, " (tuples alone)")
    parser.add_argument("--out", required=True, metavar="FILE", help="the artefact")
    parser.add_argument("--weights", choices=WEIGHTS, default="inside", help="default: %(default)s")
    parser.add_argument("--names", metavar="pkg.mod:params", help="a pytree whose paths name the weights")
    parser.add_argument("--key", metavar="FILE", help="a key of at least 16 bytes: sign with it (HMAC-SHA-256)")
    parser.add_argument("--mode", choices=MODES, help=f"mode for a plain function; default: {Settings().mode}")
    parser.add_argument("--tune", choices=TUNE, default=Settings().tune, help="default: %(default)s")
    parser.add_argument("--tune-seconds", type=float, metavar="S", help="tuning time per signature; default: no limit")


def run(arguments: argparse.Namespace) -> int:
    """Writes the artefact and prints its identity."""
    import jcuts

    check_writable(arguments.out)
    fn = load(arguments.function)
    calls = [example_arguments(reference) for reference in arguments.args]
    if any(keywords for _, keywords in calls[1:]):
        raise UsageError("a further --args must be a tuple: only the first may be a dict of keyword arguments")
    names = load(arguments.names) if arguments.names else None
    if not isinstance(fn, jcuts.Optimized):
        seconds = math.inf if arguments.tune_seconds is None else arguments.tune_seconds
        mode = arguments.mode or Settings().mode
        fn = jcuts.optimize(fn, mode=mode, tune=arguments.tune, tune_seconds=seconds)
    (args, kwargs), *more = calls
    identity = fn.save(
        arguments.out,
        *args,
        signatures=[positional for positional, _ in more],
        weights=arguments.weights,
        names=names,
        key=arguments.key,
        **kwargs,
    )
    print(f"{arguments.out}: {identity}")
    return 0
