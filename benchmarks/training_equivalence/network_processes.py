"""Resumable command of a benchmark that measures each network in a child process of its own, one JSON file per network.

The tuning database is a folder of the output; ``JCUTS_TUNE_SECONDS`` is 60 unless it is set.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.networks.baseline import environment
from benchmarks.networks.row_driver import Driver, read, write
from benchmarks.training_equivalence.training_networks import GPUS, SMALL, Network

Measure = Callable[[Network, argparse.Namespace], dict[str, Any]]
BUDGET = 1800.0
"""Seconds of a child."""


def parser_of(documentation: str | None, *, tune: bool = True) -> argparse.ArgumentParser:
    """Options that these benchmarks share. Args: tune: whether how jcuts tunes is one of them."""
    parser = argparse.ArgumentParser(description=documentation, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = f"{', '.join(SMALL)}, or NAME:BATCH of a training step; by default these, on a GPU {', '.join(GPUS)}"
    parser.add_argument("--network", nargs="+", metavar="NAME", help=names)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    said = "of jcuts.optimize (%(default)s: kernels also where XLA's program would win the race)"
    parser.add_argument("--mode", choices=("mixed", "fusion"), default="fusion", help=said)
    if tune:
        said = "of jcuts.optimize (%(default)s); off: kernels by the estimator alone, also where none was measured"
        parser.add_argument("--tune", choices=("auto", "cached", "off"), default="auto", help=said)
    parser.add_argument("--budget", type=float, default=BUDGET, help="seconds per network (%(default).0f)")
    parser.add_argument("--retry", action="store_true", help="networks again that failed")
    parser.add_argument(
        "--dry", action="store_true", help="tiny sizes on the CPU, kernels that are not measured: finds typos"
    )
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser


def names(options: argparse.Namespace) -> Sequence[str]:
    """The networks that are asked for, by default those for this machine."""
    gpu = Path("/dev/nvidiactl").exists() and os.environ.get("JAX_PLATFORMS", "cuda") != "cpu"
    return options.network or (GPUS if gpu else tuple(SMALL))


def file_of(script: str, network: Network, options: argparse.Namespace) -> Path:
    """The file of a network's results."""
    return options.out / f"{Path(script).stem}_{network.stem}.json"


def run(script: str, parser: argparse.ArgumentParser, measure: Measure, argv: Sequence[str] | None) -> dict[str, Any]:
    """Measures the networks that have no results yet; all results by the networks' names.

    In a child, only the one that it is started for. Args: script: the file of the command.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    options = parser.parse_args(words)
    options.out = options.out.resolve()
    if options.dry:
        os.environ["JAX_PLATFORMS"] = "cpu"
    if options.child:
        network = Network.parse(options.child)
        made = {"network": network.name, "batch": network.batch, "dry": options.dry, "mode": options.mode}
        made |= {"tune": options.tune} if "tune" in options else {}
        made |= measure(network, options)
        write(file_of(script, network, options), made | environment())
        return {}
    options.out.mkdir(parents=True, exist_ok=True)
    driver = Driver(
        options.out,
        1e9,
        options.budget,
        {
            "JCUTS_CACHE_DIR": str(options.out / "tuning"),
            "JCUTS_TUNE_SECONDS": "0" if options.dry else os.environ.get("JCUTS_TUNE_SECONDS", "60"),
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        },
    )
    found = {}
    for name in names(options):
        network = Network.parse(name)
        target = file_of(script, network, options)
        known = read(target)
        if not known or ("failed" in known and options.retry):
            driver.run_row(target, [sys.executable, script, *words, "--child", name], 0.0)
        found[name] = read(target)
    return found
