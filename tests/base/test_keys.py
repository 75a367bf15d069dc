"""Keys are made in one file, and hold what they say."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from jcuts.base import fingerprint, keys, schedule_versions

PACKAGE = Path(keys.__file__).resolve().parents[1]
NO_KEYS = {
    "artifact/container.py": "whether a file is whole",
    "base/fingerprint.py": "makes hashes",
    "base/keys.py": "makes keys",
    "base/module_code.py": "hashes of syntax trees",
    "base/schedule_versions.py": "versions, which keys hold",
    "jit/multi_controller/agreement.py": "whether programs of processes are the same",
    "trace/canonical.py": "constants by content, as text",
    "tune/row_signature.py": "signatures",
    "xla/object_cache.py": "whether a file is whole",
}
"""Files that may hash."""


def test_nothing_else_makes_a_hash():
    found = set()
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
            hashes = {"hashlib", "digest", "source_hash"}.intersection(names)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                hashes |= {node.attr}.intersection({"digest", "source_hash"} if node.value.id == "fingerprint" else ())
            if hashes:
                found.add(str(file.relative_to(PACKAGE)))
    assert found == set(NO_KEYS)


def test_every_key_is_said_to_hold_something():
    tree = ast.parse(Path(keys.__file__).read_text())
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]
    assert len(functions) > 15 and all(ast.get_docstring(f) for f in functions)


def test_known_values():
    """Databases on disk have these keys: a change loses every choice."""
    assert (
        keys.kernel_program({"name": "a", "x": 1})
        == keys.kernel_program({"x": 1})
        == "5041bf1f713df204784353e82f6a4a53"
    )
    made = keys.problem(
        device="", identity="i", inputs=[[[2], "float32", "normal"]], outputs=[], space="s 4", tolerance=2.0
    )
    assert made == "7f4f39f0b45654ec56f7cde9a12a714ac17443e57b9c6e72bc36f278574cb0c8"
    assert keys.ranking("p", "Machine()", 4, 10.0) == "c679e9bc79f876463e4a7dc01802eb34"
    assert keys.candidate("program", "{}") == "d2a78be64e3b2f5129fae945d37aa1b6dc201e2e9ac4452c3b27382aa47e0d1a"
    assert keys.partition("f", "mixed", 2.0) == "20b2b2bfe55a997d0148a64d44ca2ace"


def test_rows_hold_packages_without_the_patch_number_of_python(monkeypatch):
    before = keys.packages()
    monkeypatch.setattr("platform.python_version_tuple", lambda: ("3", "11", "99"))
    assert keys.packages().startswith("python 3.11, jax ") and ".99" not in keys.packages()
    monkeypatch.setattr(fingerprint, "package_version", lambda name: "1.2.3")
    assert "jaxlib 1.2.3" in keys.packages() and keys.packages() != before


def test_rows_hold_what_they_record():
    assert keys.row_versions("p", {}) == "p"
    one, two = keys.row_versions("p", {"cpu": "1"}), keys.row_versions("p", {"cpu": "2"})
    assert one != two and one.startswith("p" + keys.CODE)


def test_families_that_are_asked():
    assert set(keys.schedules("cpu", "contraction")) == {"cpu"}
    assert set(keys.schedules("cuda", "attention")) == {"attention"}
    assert "attention" not in keys.schedules("cuda", "contraction") and "gemm" in keys.schedules("cuda", "contraction")
    assert set(keys.schedules("cuda", "of tomorrow")) == set(schedule_versions.GPU_FAMILIES)


def test_what_is_current(monkeypatch):
    recorded = keys.schedules("cuda", "contraction")
    everything = keys.partition_code("cpu") | keys.partition_code("cuda")
    assert keys.is_current({}) and keys.is_current(recorded) and keys.is_current(everything)
    assert not keys.is_current({**recorded, "gemm": "0"}) and not keys.is_current({"no family": ""})


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_a_decision_depends_on_the_families_of_its_platform(monkeypatch, platform):
    before = keys.decision(platform, "f", ("x",))
    assert before == keys.decision(platform, "f", ("x",))
    assert len({before, keys.decision(platform, "g", ("x",)), keys.decision(platform, "f", ("y",))}) == 3
    monkeypatch.setattr(schedule_versions.here(), "_versions", {})
    was = schedule_versions.ScheduleVersions.family
    edited = lambda self, name: "other" if name == "gemm" else was(self, name)  # noqa: E731
    monkeypatch.setattr(schedule_versions.ScheduleVersions, "family", edited)
    assert (keys.decision(platform, "f", ("x",)) == before) is (platform == "cpu")
