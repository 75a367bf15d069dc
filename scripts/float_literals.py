"""Float literals of the package: how many numbers stand in the code instead of in data files, and where.

0, 0.5, 1 and 2 are not counted, nor are the polynomials of `jcuts/codegen/vecmath`, which a program has fitted.  A
literal is named where a module's constant is made of it, and inline everywhere else: nothing says what it means.
Run as ``python scripts/float_literals.py``; `tests/test_float_literals.py` has the limits.
"""

from __future__ import annotations

import argparse
import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PLAIN = (0.0, 0.5, 1.0, 2.0)
"""Numbers that mean nothing but themselves."""
POLYNOMIALS = "codegen/vecmath/"


@dataclass(frozen=True)
class Literal:
    """One float literal. Attributes: file: its path in the package; constant: what it is a part of, '' where inline."""

    file: str
    line: int
    value: float
    constant: str

    @property
    def folder(self) -> str:
        """The package's folder (or file) that it is in."""
        return self.file.partition("/")[0]


def literals(root: Path = ROOT, package: str = "jcuts") -> Iterator[Literal]:
    """Every float literal that counts, by file and line."""
    for path in sorted((root / package).rglob("*.py")):
        name = path.relative_to(root / package).as_posix()
        if not name.startswith(POLYNOMIALS):
            yield from literals_of(path.read_text(encoding="utf-8"), name)


def literals_of(text: str, file: str = "") -> Iterator[Literal]:
    """Every float literal of a module that counts."""
    for statement in ast.parse(text).body:
        constant = _constant(statement)
        for node in ast.walk(statement):
            if isinstance(node, ast.Constant) and isinstance(node.value, float) and node.value not in PLAIN:
                yield Literal(file, node.lineno, node.value, constant)


def _constant(statement: ast.stmt) -> str:
    """The names that a module's statement assigns; '' where it is no assignment."""
    if isinstance(statement, ast.AnnAssign):
        return ast.unparse(statement.target)
    return ", ".join(map(ast.unparse, statement.targets)) if isinstance(statement, ast.Assign) else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=ROOT, help="a checkout")
    parser.add_argument("--each", default=None, metavar="PREFIX", help="also list those of files that begin so")
    options = parser.parse_args()
    found = list(literals(options.root))
    if options.each is not None:
        for one in found:
            if one.file.startswith(options.each):
                print(f"{one.file}:{one.line}: {one.value!r} {one.constant or 'inline'}")
    every, inline = Counter(x.folder for x in found), Counter(x.folder for x in found if not x.constant)
    print(f"{len(found)} float literals, {inline.total()} of them inline")
    for folder, count in every.most_common():
        print(f"{folder:<16} {count:>4} {inline[folder]:>4} inline")


if __name__ == "__main__":
    main()
