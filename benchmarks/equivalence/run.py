"""Proof that a change of the code base changes nothing that jcuts does: regions, candidates and code, recorded.

    python benchmarks/equivalence/run.py record --out BEFORE   # before the change: CPU, sm_90, sm_80; no GPU needed
    python benchmarks/equivalence/run.py record --out AFTER    # after it, on the same machine
    python benchmarks/equivalence/run.py compare BEFORE AFTER  # every difference; exit status 1 if there is any

For every function of `corpus` and every target the record has

    regions      which equations form each region, for each mode and each form that a first call would plan, and the
                 regions that the search tries on its way; nothing is measured: times are made up from programs
    candidates   the schedules of each region's program in order, with their scores
    code         of the first candidates, and for cases of templates of schedules from best to last: what the code
                 generators write, and what numba's compilers make of it (LLVM IR; PTX)

Programs are known by a digest of their JSON, code by a digest of its text in which names that say nothing are numbered
(`normal_form`).  ``OUT/cpu.json.gz`` and so on are the records; with ``--keep-text`` the texts stay in
``OUT/text_cpu`` and so on, and `compare` shows where they part.  Records of different machines or versions of the
compilers differ, and `compare` says so.  Names of jcuts are in `seams` alone.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.equivalence.compare import compare
from benchmarks.equivalence.record import record

TARGETS = ("cpu", "sm_90", "sm_80")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("record", help="record what jcuts does")
    one.add_argument("--out", type=Path, required=True)
    one.add_argument("--only", default="", help="entries whose names contain one of these (with commas)")
    one.add_argument("--jobs", type=int, default=2)
    one.add_argument("--parts", default=",".join(TARGETS), help="targets (with commas)")
    one.add_argument("--keep-text", action="store_true", help="keep the texts of code, to see where they differ")
    other = commands.add_parser("compare", help="every difference of two records")
    other.add_argument("before", type=Path)
    other.add_argument("after", type=Path)
    options = parser.parse_args(arguments)
    return record(options) if options.command == "record" else compare(options)


if __name__ == "__main__":
    sys.exit(main())
