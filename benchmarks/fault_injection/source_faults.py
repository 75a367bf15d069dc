"""Mutation testing: 50 one-line faults are seeded into the sources, one at a time; which of them do the tests catch?

    python benchmarks/fault_injection/source_faults.py             # all of them, ten minutes on one core
    python benchmarks/fault_injection/source_faults.py --only 3,17
    python benchmarks/fault_injection/source_faults.py --tree ../other --data other_faults.toml

`source_faults.toml` says for each fault its file, the text before and after, what breaks, and the tests that should
notice.  The tree is copied, and faults are made in the copy alone.  A fault is caught by the first test that fails with
it and passes without it.  Status 1 if any fault is missed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TIMEOUT_S = 300.0
SKIPPED = shutil.ignore_patterns(".git", ".venv", ".whl", "build", "dist", "__pycache__", ".*_cache")

# An editable install puts its own finder before the path: without it, the copy is what is imported, by children too.
SITE = """
import sys
sys.meta_path[:] = [f for f in sys.meta_path if "jcuts" not in getattr(f, "known_source_files", ())]
"""
IMPORTED = "import jcuts; print(jcuts.__file__)"


@dataclass(frozen=True)
class Fault:
    """One seeded fault: ``old`` occurs once in the file."""

    file: str
    old: str
    new: str
    breaks: str
    tests: tuple[str, ...]


class FaultError(Exception):
    """The faults do not fit the tree, or its tests cannot be run."""


class MutatedCopy:
    """A copy of a source tree whose tests run with one fault at a time. Args: folder: an empty one."""

    def __init__(self, tree: Path, folder: Path) -> None:
        self.tree = shutil.copytree(tree, folder / "tree", ignore=SKIPPED)
        site = folder / "site"
        site.mkdir()
        (site / "sitecustomize.py").write_text(SITE, encoding="utf-8")
        paths = os.pathsep.join((str(site), str(self.tree)))
        self.environment = {**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
        found = self._python("-c", IMPORTED, timeout=TIMEOUT_S).stdout.strip()
        if Path(found).resolve() != self.tree.resolve() / "jcuts" / "__init__.py":
            raise FaultError(f"the tests would import {found}, not the copy in {self.tree}")

    def _python(self, *arguments: str, timeout: float) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *arguments]
        return subprocess.run(
            command, cwd=self.tree, env=self.environment, capture_output=True, text=True, timeout=timeout, check=False
        )

    def first_failure(self, tests: tuple[str, ...], timeout: float) -> str | None:
        """The first test that fails; None if all pass. Raises: TimeoutExpired, FaultError."""
        options = ("-x", "-q", "-rf", "--tb=no", "-p", "no:cacheprovider", "-m", "not gpu and not slow")
        ended = self._python("-m", "pytest", *options, *tests, timeout=timeout)
        if ended.returncode == 0:
            return None
        failed = [line for line in ended.stdout.splitlines() if line.startswith("FAILED ")]
        if ended.returncode != 1 or not failed:
            raise FaultError(f"pytest ends with status {ended.returncode}:\n{(ended.stdout + ended.stderr)[-2000:]}")
        return failed[0].removeprefix("FAILED ").split(" - ")[0]

    def caught_by(self, fault: Fault, timeout: float) -> str | None:
        """The test that notices a fault; None if none does. Raises: FaultError, also for tests that take too long."""
        path = self.tree / fault.file
        text = path.read_text(encoding="utf-8")
        if text.count(fault.old) != 1:
            raise FaultError(f"{fault.file} has {fault.old!r} {text.count(fault.old)} times, not once")
        path.write_text(text.replace(fault.old, fault.new), encoding="utf-8")
        try:
            found = self.first_failure(fault.tests, timeout)
        except subprocess.TimeoutExpired:
            raise FaultError(f"no test fails in {timeout:.0f} s") from None
        finally:
            path.write_text(text, encoding="utf-8")
        if found is not None and self.first_failure((found,), timeout) is not None:
            raise FaultError(f"{found} fails without the fault, too")
        return found


def read_faults(path: Path) -> list[Fault]:
    """The faults of a data file, in order."""
    with path.open("rb") as file:
        rows = tomllib.load(file)["faults"]
    return [Fault(**{**row, "tests": tuple(row["tests"])}) for row in rows]


def main() -> int:
    """Tries the faults that were asked for; status 1 if one is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="numbers of faults, with commas between")
    parser.add_argument("--tree", type=Path, default=ROOT, help="source tree with its tests")
    parser.add_argument("--data", type=Path, default=HERE / "source_faults.toml", help="the faults of that tree")
    parser.add_argument("--timeout", type=float, default=TIMEOUT_S, help="seconds for the tests of one fault")
    arguments = parser.parse_args()
    faults = dict(enumerate(read_faults(arguments.data), 1))
    wanted = [int(n) for n in arguments.only.split(",") if n] or list(faults)
    caught = 0
    with tempfile.TemporaryDirectory(prefix="jcuts-mutants-") as folder:
        copy = MutatedCopy(arguments.tree.resolve(), Path(folder))
        for number in wanted:
            fault, start = faults[number], time.monotonic()
            try:
                found = copy.caught_by(fault, arguments.timeout)
                caught += found is not None
                verdict = "MISSED" if found is None else f"caught by {found}"
            except FaultError as error:
                verdict = f"NOT TRIED: {error}"
            seconds = time.monotonic() - start
            print(f"{number:3d} {fault.file}: {fault.breaks}\n    {seconds:.0f} s, {verdict}", flush=True)
    print(f"caught {caught} of {len(wanted)}")
    return int(caught < len(wanted))


if __name__ == "__main__":
    sys.exit(main())
