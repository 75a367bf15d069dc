"""Static import graph of a package: strongly connected components, folder sizes, long files and functions.

Every import counts, whether at module level, in a function or under ``TYPE_CHECKING``: a circle that is tied by a local
or a type-only import is a circle.  Run as ``python scripts/import_graph.py``; `tests/test_import_graph.py` asserts.
"""

from __future__ import annotations

import argparse
import ast
import functools
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LONG_FILE = 400
LONG_FUNCTION = 80
"""Lines above which a file and a function are reported."""

KINDS = ("module", "function", "type")


@dataclass(frozen=True)
class Import:
    """One import statement's target. Attributes: kind: where it stands, one of `KINDS`."""

    source: str
    target: str
    kind: str
    line: int


@dataclass
class ImportGraph:
    """Modules (name to file) and every import between them."""

    files: dict[str, Path]
    imports: list[Import] = field(default_factory=list)

    def module_edges(self, kinds: tuple[str, ...] = KINDS) -> dict[str, set[str]]:
        """Module to the modules that it imports."""
        edges: dict[str, set[str]] = {name: set() for name in self.files}
        for found in self.imports:
            if found.kind in kinds:
                edges[found.source].add(found.target)
        return edges

    def folder_of(self, module: str) -> str:
        """The package that a module lies in; a package's ``__init__`` lies in itself."""
        return module if self.files[module].name == "__init__.py" else module.rpartition(".")[0]

    def folder_edges(self) -> dict[str, set[str]]:
        """Folder to the other folders that its modules import from."""
        edges: dict[str, set[str]] = defaultdict(set)
        for name in self.files:
            edges[self.folder_of(name)]
        for found in self.imports:
            source, target = self.folder_of(found.source), self.folder_of(found.target)
            if source != target:
                edges[source].add(target)
        return dict(edges)

    def folder_sizes(self) -> Counter[str]:
        """Python files in each folder, not counting deeper folders."""
        return Counter(self.folder_of(name) for name in self.files)

    def between(self, group: set[str], by_folder: bool = False) -> list[Import]:
        """The imports that tie a circle of modules (or of folders) together."""
        place = self.folder_of if by_folder else str
        return [
            found
            for found in self.imports
            if place(found.source) != place(found.target)
            and place(found.source) in group
            and place(found.target) in group
        ]


@functools.cache
def read_graph(root: Path = ROOT, package: str = "jcuts") -> ImportGraph:
    """Parses all files of ``package`` under ``root``; imports of other packages are left out."""
    files = {}
    for path in sorted((root / package).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    graph = ImportGraph(files)
    for name, path in files.items():
        tree = ast.parse(path.read_text(), str(path))
        found = {
            Import(name, target, kind, line)
            for node, kind in _import_statements(tree, "module")
            for target, line in _targets(node, name, path, files)
            if target != name
        }
        graph.imports += sorted(found, key=lambda i: (i.line, i.target))
    return graph


def _import_statements(node: ast.AST, kind: str) -> Iterator[tuple[ast.Import | ast.ImportFrom, str]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, kind
        elif isinstance(child, ast.expr):
            continue  # holds no statement
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _import_statements(child, "function")
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for inner in child.body:
                yield from _import_statements(ast.Module([inner], []), "type")
            for inner in child.orelse:
                yield from _import_statements(ast.Module([inner], []), kind)
        else:
            yield from _import_statements(child, kind)


def _targets(
    node: ast.Import | ast.ImportFrom, name: str, path: Path, files: dict[str, Path]
) -> Iterator[tuple[str, int]]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            if alias.name in files:
                yield alias.name, node.lineno
        return
    base = node.module or ""
    if node.level:
        parts = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
        parts = parts[: len(parts) - node.level + 1]
        base = ".".join([*parts, *([node.module] if node.module else [])])
    for alias in node.names:
        full = f"{base}.{alias.name}"
        if full in files:
            yield full, node.lineno
        elif base in files:
            yield base, node.lineno


def circles(edges: dict[str, set[str]]) -> list[set[str]]:
    """Strongly connected components of more than one vertex, largest first (Tarjan's algorithm, iterative)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    on_stack: set[str] = set()
    found: list[set[str]] = []
    for root in sorted(edges):
        if root in order:
            continue
        work = [(root, iter(sorted(edges[root])))]
        order[root] = low[root] = len(order)
        stack.append(root)
        on_stack.add(root)
        while work:
            vertex, targets = work[-1]
            for target in targets:
                if target not in order:
                    order[target] = low[target] = len(order)
                    stack.append(target)
                    on_stack.add(target)
                    work.append((target, iter(sorted(edges.get(target, ())))))
                    break
                if target in on_stack:
                    low[vertex] = min(low[vertex], order[target])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[vertex])
                if low[vertex] == order[vertex]:
                    group: set[str] = set()
                    while vertex not in group:
                        group.add(stack.pop())
                    on_stack -= group
                    if len(group) > 1:
                        found.append(group)
    return sorted(found, key=lambda g: (-len(g), sorted(g)))


def long_files(graph: ImportGraph, limit: int = LONG_FILE) -> list[tuple[str, int]]:
    """Modules of more than ``limit`` lines, longest first."""
    sizes = [(name, len(path.read_text().splitlines())) for name, path in graph.files.items()]
    return sorted([s for s in sizes if s[1] > limit], key=lambda s: -s[1])


def long_functions(graph: ImportGraph, limit: int = LONG_FUNCTION) -> list[tuple[str, int]]:
    """Functions of more than ``limit`` lines (decorators and docstring included), longest first."""
    found = []
    for name, path in graph.files.items():
        for node in _functions(ast.parse(path.read_text())):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > limit:
                found.append((f"{name}.{node.name}", length))
    return sorted(found, key=lambda f: -f[1])


def _functions(node: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Functions at any depth below a node."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.expr):  # which holds no statement
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield child
            yield from _functions(child)


def describe(graph: ImportGraph) -> str:
    """The report as text."""
    kinds = Counter(found.kind for found in graph.imports)
    lines = [
        f"{len(graph.files)} modules, {len(graph.imports)} imports "
        f"({kinds['module']} at module level, {kinds['function']} in functions, {kinds['type']} for types only)"
    ]
    for title, edges, by_folder in (
        ("modules", graph.module_edges(), False),
        ("modules, module-level imports only", graph.module_edges(("module",)), False),
        ("folders", graph.folder_edges(), True),
    ):
        groups = circles(edges)
        arrows = sum(len(t) for t in edges.values())
        lines.append(f"{title}: {len(edges)} vertices, {arrows} arrows, {len(groups)} circles")
        for group in groups:
            lines.append("  " + ", ".join(sorted(group)))
            lines += [f"    {i.source}:{i.line} -> {i.target} ({i.kind})" for i in graph.between(group, by_folder)]
    lines.append("largest folders: " + ", ".join(f"{n} {name}" for name, n in graph.folder_sizes().most_common(3)))
    lines.append(f"files over {LONG_FILE} lines: " + ", ".join(f"{name} {n}" for name, n in long_files(graph)))
    lines.append(
        f"functions over {LONG_FUNCTION} lines: " + ", ".join(f"{name} {n}" for name, n in long_functions(graph))
    )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--root", type=Path, default=ROOT, help="folder that holds the package")
    parser.add_argument("--package", default="jcuts")
    given = parser.parse_args()
    print(describe(read_graph(given.root, given.package)))


if __name__ == "__main__":
    main()
