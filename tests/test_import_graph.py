"""The import graph of the package has no circle, whether tied by module-level, function-local or type-only imports."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.import_graph import circles, long_functions, read_graph


def test_no_module_imports_itself_through_others():
    graph = read_graph()
    found = circles(graph.module_edges())
    assert found == [], [graph.between(group) for group in found]


def test_folders_are_small():
    name, count = read_graph().folder_sizes().most_common(1)[0]
    assert count <= 20, f"{name} has {count} files"


@pytest.mark.parametrize(
    "second, kind",
    [
        ("import pack.a", "module"),
        ("def f():\n    from pack import a", "function"),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .a import g", "type"),
    ],
)
def test_circles_of_every_kind_are_found(tmp_path: Path, second: str, kind: str):
    folder = tmp_path / "pack"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "a.py").write_text("from pack.b import f\n" + "def g():\n" + "    pass\n" * 90)
    (folder / "b.py").write_text(second)
    graph = read_graph(tmp_path, "pack")
    (group,) = circles(graph.module_edges())
    assert group == {"pack.a", "pack.b"}
    assert {i.kind for i in graph.between(group)} == {"module", kind}
    assert long_functions(graph) == [("pack.a.g", 91)]
