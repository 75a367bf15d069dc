"""Shows what an artefact holds: signatures, kernels, choices, evidence, weights, versions; nothing of it is run."""

from __future__ import annotations

import argparse
import json

HELP = "what an artefact holds, and whether it runs here"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="an artefact")
    parser.add_argument("--json", action="store_true", help="all of it as JSON")
    parser.add_argument("--key", metavar="FILE", help="a key: demand a signature made with it")


def run(arguments: argparse.Namespace) -> int:
    """Prints the contents; status 1 if it cannot run on this machine."""
    from jcuts.artifact import contents

    found = contents.contents(arguments.file, arguments.key)
    if arguments.json:
        print(json.dumps(found, indent=1))
    else:
        print(contents.text(arguments.file, arguments.key))
    return 1 if found["differences"]["blocking"] else 0
