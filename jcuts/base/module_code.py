"""Content hash of a source module's code: of its syntax tree without comments, layout and docstrings.

Equal code has equal hashes in every Python that jcuts runs on; an edit of prose changes none.  Parsing all modules
takes about a second: `ModuleFiles` keeps the hashes of files that it has seen in ``<cache>/module_code.json``.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jcuts.base import collector

FORMAT = 1
_COEFFICIENTS = frozenset({"coefficients", "record", "read_tables"})
"""Functions of `jcuts.schedule.fit` whose first two arguments name a table of fitted coefficients."""


@dataclass(frozen=True)
class ModuleCode:
    """What a module is, as far as versions of schedules ask.

    Attributes:
        code: hash of the syntax tree.
        imports: (module, names) of every import statement, at whatever place; names are () for ``import module``.
            There are no relative ones in jcuts.
        tables: (family, table) of the fitted coefficients that it reads; the table is '' where no constant names it.
    """

    code: str
    imports: tuple[tuple[str, tuple[str, ...]], ...] = ()
    tables: tuple[tuple[str, str], ...] = ()


def read_code(source: bytes) -> ModuleCode:
    """The code of a module's text. Raises SyntaxError, ValueError where it is no Python."""
    parts: list[str] = []
    asked: list[ast.AST] = []
    _write(ast.parse(source), parts, asked)
    imports: set[tuple[str, tuple[str, ...]]] = set()
    tables: set[tuple[str, str]] = set()
    for node in asked:
        if isinstance(node, ast.Import):
            imports |= {(alias.name, ()) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imports.add((node.module or "", tuple(sorted(alias.name for alias in node.names))))
        elif isinstance(node, ast.Call) and node.args and _called(node.func) in _COEFFICIENTS:
            family, table = (*map(_text, node.args[:2]), "", "")[:2]
            tables |= {(family, table)} if family else set()
    code = hashlib.sha256("\0".join(parts).encode("utf-8", "surrogatepass")).hexdigest()[:32]
    return ModuleCode(code, tuple(sorted(imports)), tuple(sorted(tables)))


def _called(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _text(node: ast.expr) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


_ASKED = frozenset({ast.Import, ast.ImportFrom, ast.Call})
"""Kinds of nodes that imports and tables are read from."""


@functools.cache
def _fields(kind: type[ast.AST]) -> tuple[str, ...]:
    return tuple(name for name in kind._fields if name not in ("ctx", "type_comment"))


def _write(value: object, parts: list[str], asked: list[ast.AST]) -> None:
    """Appends a syntax tree as text; absent and empty fields are left out, as each Python adds some of its own.

    Args: asked: the nodes of kinds in `_ASKED` are appended to it.
    """
    kind = type(value)
    if isinstance(value, ast.Constant):
        parts.append(f"{type(value.value).__name__} {value.value!r}")
    elif isinstance(value, ast.AST):
        if kind in _ASKED:
            asked.append(value)
        parts.append(kind.__name__)
        for name in _fields(kind):
            inner = _joined(value) if isinstance(value, ast.JoinedStr) else getattr(value, name, None)
            if inner is None or inner == []:
                continue
            parts.append(name)
            if isinstance(inner, str):
                parts.append(repr(inner))
            else:
                _write(inner, parts, asked)
        parts.append(")")
    elif isinstance(value, list):
        for item in value:
            if not (type(item) is ast.Expr and _text(item.value)):  # a docstring, of a module or of a constant
                _write(item, parts, asked)
        parts.append("]")
    else:
        parts.append(repr(value))


def _joined(value: ast.JoinedStr) -> list[ast.expr]:
    """Parts of an f-string; neighbouring constants as one, as Pythons of one version even split them differently."""
    found: list[ast.expr] = []
    for part in value.values:
        if isinstance(part, ast.Constant) and found and isinstance(found[-1], ast.Constant):
            found[-1] = ast.Constant(str(found[-1].value) + str(part.value))
        elif not (isinstance(part, ast.Constant) and part.value == ""):
            found.append(part)
    return found


class ModuleFiles:
    """The modules of one package folder.

    Args: root: the folder of the package; cache: where hashes are kept between processes, None for nowhere.
    """

    def __init__(self, root: Path, cache: Path | None = None) -> None:
        self.root = root
        self.cache = cache
        self._files: dict[str, Path] = {}
        self._known: dict[str, Any] | None = None
        self._found: dict[Path, ModuleCode] = {}
        self._new = False

    def file(self, module: str) -> Path | None:
        """The file of a module or package, by its dotted name; None for a name inside a module."""
        return self._all().get(module)

    def inside(self, package: str) -> list[str]:
        """Dotted names of a module, or of all modules of a package, it included."""
        return [name for name in self._all() if name == package or name.startswith(package + ".")]

    def _all(self) -> dict[str, Path]:
        """Every module by its dotted name."""
        if not self._files:
            for file in sorted(self.root.rglob("*.py")):
                parts = file.relative_to(self.root.parent).with_suffix("").parts
                self._files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
        return self._files

    def code(self, file: Path) -> ModuleCode:
        """The code of a file."""
        if file not in self._found:
            source = file.read_bytes()
            key = hashlib.sha256(source).hexdigest()[:32]
            known = self._stored().get(key, {})
            try:
                found = ModuleCode(
                    str(known["code"]),
                    tuple((str(module), tuple(map(str, names))) for module, names in known["imports"]),
                    tuple((str(family), str(table)) for family, table in known["tables"]),
                )
            except (KeyError, TypeError, ValueError):  # not seen yet, or damaged
                with collector.paused():  # a tree is many objects, and all of them are freed at once
                    found, self._new = read_code(source), True
                self._stored()[key] = {"code": found.code, "imports": found.imports, "tables": found.tables}
            self._found[file] = found
        return self._found[file]

    def keep(self) -> None:
        """Writes what is new to the cache, if that can be written; other processes may do so at the same time."""
        if self.cache is None or not self._new:
            return
        scratch = self.cache.with_name(f".{self.cache.name}.{os.getpid()}")
        try:
            self.cache.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            scratch.write_text(json.dumps({"format": FORMAT, "modules": self._stored()}))
            os.replace(scratch, self.cache)
            self._new = False
        except OSError:  # a full disk, a read-only folder: every process parses for itself
            with contextlib.suppress(OSError):
                scratch.unlink()

    def _stored(self) -> dict[str, Any]:
        if self._known is None:
            self._known = {}
            with contextlib.suppress(OSError, ValueError):
                data = json.loads(self.cache.read_text()) if self.cache is not None else None
                kept = data.get("modules") if isinstance(data, dict) and data.get("format") == FORMAT else None
                # Of many installations that share a cache, the last ones stay.
                self._known = dict(list(kept.items())[-4096:]) if isinstance(kept, dict) else {}
        return self._known
