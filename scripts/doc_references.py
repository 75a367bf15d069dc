"""Checks that files and modules which docs and docstrings name exist.

    python scripts/doc_references.py [FOLDER ...]

In docs (but for CHANGELOG.md and docs/measurements, which speak of their time): every ``path/file.ext`` and every
``jcuts.module`` or ``package.module`` in backticks.  In docstrings below the folders (default: jcuts): the same.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "jcuts"
QUOTED = re.compile(r"``?([A-Za-z_][\w./\-]*)(?::[^`]*)?``?")
FILE = re.compile(r"[\w\-]+(?:/[\w\-]+)*\.(?:py|md|cc|h|toml)")
PACKAGES = {p.name for p in PACKAGE.iterdir() if (p / "__init__.py").exists()}
ELSEWHERE = {"file.py", "folder/file.py", "microbatch.sqlite", "xla/ffi/api/c_api.h", "CHANGELOG.md"}
"""Names of other projects' files, of files that users have, and of files at the root."""
NAMES = {
    p.name
    for top in ("jcuts", "docs", "tests", "benchmarks", "custom_calls", "scripts")
    for p in (ROOT / top).rglob("*.*")
}


def resolves(name: str) -> bool:
    """Whether a dotted name begins with a module of the package and goes on with names that its file holds."""
    parts = name.removeprefix("jcuts.").split(".")
    here = PACKAGE
    for number, part in enumerate(parts):
        if (here / part).is_dir():
            here = here / part
            continue
        file = here / f"{part}.py"
        if not file.exists():
            file, number = here / "__init__.py", number - 1
        rest = parts[number + 1 :]
        return not rest or re.search(rf"\b{re.escape(rest[0])}\b", file.read_text(encoding="utf-8")) is not None
    return True


def exists(path: str) -> bool:
    """Whether a file is there, from the root, from the package, or, where only its name is given, anywhere."""
    if "/" not in path:
        return path in NAMES
    return any((base / path).exists() for base in (ROOT, PACKAGE))


def unknown(text: str) -> Iterator[str]:
    """What a text names in backticks and the tree does not have."""
    for name in QUOTED.findall(text):
        if name in ELSEWHERE:
            continue
        if FILE.fullmatch(name):
            if not exists(name):
                yield name
        elif re.fullmatch(r"\w+(\.\w+)+", name):
            first = name.split(".")[0]
            if (first == "jcuts" or first in {*PACKAGES, "region", "dfg"}) and not resolves(name):
                yield name
        elif re.fullmatch(r"[\w\-]+(/[\w\-]+)*/", name) and name.split("/")[0] in PACKAGES and not exists(name):
            yield name


def docs() -> Iterator[tuple[str, str]]:
    """(place, text) of every document that speaks of today's tree."""
    for file in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        if "measurements" not in file.parts:
            yield str(file.relative_to(ROOT)), file.read_text(encoding="utf-8")


def docstrings(folder: Path) -> Iterator[tuple[str, str]]:
    """(place, text) of every docstring below a folder."""
    for file in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                name = getattr(node, "name", "")
                yield f"{file.relative_to(ROOT)}:{name}", ast.get_docstring(node, clean=False) or ""


def faults(folders: list[Path]) -> list[str]:
    """Every name that leads nowhere, with its place."""
    places = [*docs(), *(place for folder in folders for place in docstrings(folder))]
    return [f"{place}: {name}" for place, text in places for name in unknown(text)]


if __name__ == "__main__":
    found = faults([Path(a).resolve() for a in sys.argv[1:]] or [PACKAGE])
    print("\n".join(found) or "every name leads somewhere")
    sys.exit(1 if found else 0)
