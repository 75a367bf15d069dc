"""``jcuts``: the command line.  One file per command; errors of jcuts are one clear line and exit status 2."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence

from jcuts import __version__
from jcuts.base import knobs
from jcuts.base.errors import JcutsError
from jcuts.cli import arch, best_batch, cache, cluster, demo, doctor, explain, microbatch, plan, validate
from jcuts.cli.artifacts import build, inspect, tune
from jcuts.cli.comparisons import diff, verify

COMMANDS = {"explain": explain, "cache": cache, "demo": demo, "doctor": doctor}
COMMANDS |= {"verify": verify, "diff": diff}
COMMANDS |= {"tune": tune, "build": build, "inspect": inspect}
COMMANDS |= {"arch": arch, "plan": plan, "cluster": cluster, "validate": validate}
COMMANDS |= {"microbatch": microbatch, "best-batch": best_batch}
"""Name to module; a module has ``HELP``, ``add_arguments(parser)`` and ``run(arguments) -> exit status``."""


def parser() -> argparse.ArgumentParser:
    """The argument parser with every command."""
    top = argparse.ArgumentParser(prog="jcuts", description="Makes JAX functions faster.")
    top.add_argument("--version", action="version", version=f"jcuts {__version__}")
    top.add_argument("--traceback", action="store_true", help="show the Python traceback of an error")
    commands = top.add_subparsers(dest="command", required=True, metavar="command")
    for name, module in COMMANDS.items():
        sub = commands.add_parser(name, help=module.HELP, description=module.__doc__)
        module.add_arguments(sub)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args: argv: arguments without the program's name; by default those of the process.
    Returns: exit status: 0 done, 1 the command found a problem, 2 wrong use or an error of jcuts.
    """
    arguments = parser().parse_args(argv)
    try:
        if arguments.command != "doctor":  # which reports a malformed variable itself
            logging.basicConfig(format="%(name)s: %(message)s")
            logging.getLogger("jcuts").setLevel(knobs.current().log.upper())
        return COMMANDS[arguments.command].run(arguments)
    except JcutsError as error:
        if arguments.traceback:
            raise
        print(f"jcuts: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `jcuts ... | head`: not an error, and Python must not complain at exit either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("jcuts: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
