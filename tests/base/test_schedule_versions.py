"""Versions of kernel families: prose changes none, an edit of one family changes those that use it."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from jcuts.base import schedule_versions
from jcuts.base.module_code import ModuleFiles, read_code
from jcuts.base.schedule_versions import FAMILIES, GPU_FAMILIES, ScheduleVersions
from scripts.import_graph import read_graph

ROOT = Path(__file__).resolve().parents[2] / "jcuts"
SHARED = {"graph", "layout", "ptx", "toolchain", "weight_prefetch"}
"""Folders that are no family: every family that reaches them depends on them."""
DISPATCHERS = {
    "jcuts.codegen.cuda.compile",
    "jcuts.codegen.cuda.families",
    "jcuts.codegen.cuda.launch_source",
    "jcuts.codegen.cuda.layout.weight_transpose",  # its one kernel is no candidate of a tuning problem
    "jcuts.codegen.cuda.ptx.mbarrier_ring",  # whoever has a ring has the tile, too
    "jcuts.jit.variant_space",
    "jcuts.schedule.gpu.candidates",
    "jcuts.schedule.gpu.contraction",
    "jcuts.schedule.gpu.enumeration",
    "jcuts.schedule.gpu.families",
    "jcuts.schedule.gpu.launch_stats",
    "jcuts.schedule.gpu.problem",
    "jcuts.schedule.gpu.tensor_core_times",
    "jcuts.schedule.gpu.traffic",
}
"""Modules outside the families that may import a GPU family's: these imports are not followed."""


@pytest.fixture
def tree(tmp_path):
    """A copy of the sources."""
    ignore = shutil.ignore_patterns("__pycache__", "*.so", "native")
    return Path(shutil.copytree(ROOT, tmp_path / "jcuts", ignore=ignore))


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """Hashes of files that some test has parsed."""
    return tmp_path_factory.mktemp("seen") / "module_code.json"


def versions(root: Path, cache: Path | None = None) -> dict[str, str]:
    """Everything that a stored choice may depend on."""
    made = ScheduleVersions(ModuleFiles(root, cache))
    return {name: made.family(name) for name in FAMILIES} | {
        "partition": made.packages(schedule_versions.PARTITION),
        "program": made.packages(schedule_versions.PROGRAM),
        "emitter cpu": made.emitter("cpu"),
        "emitter cuda": made.emitter("cuda"),
    }


def changed(root: Path, before: dict[str, str], cache: Path) -> set[str]:
    after = versions(root, cache)
    return {name for name in after if after[name] != before[name]}


def append(file: Path, text: str) -> None:
    file.write_text(file.read_text() + text)


def test_prose_changes_nothing(tree, seen):
    before = versions(tree, seen)
    for file in tree.rglob("*.py"):
        lines = file.read_text().splitlines()
        first = '"""Another docstring."""\n\n' if not lines or not lines[0].startswith('"""') else ""
        file.write_text(
            f"# A comment.\n{first}" + "\n".join(lines) + '\n\n\n"""What nothing is said of."""  # and more\n'
        )
    for file in tree.rglob("fit_*.toml"):
        file.write_text("# A comment.\n" + file.read_text().replace('error = "', 'error = "roughly: '))
    assert changed(tree, before, seen) == set()


@pytest.mark.parametrize(
    ("file", "families"),
    [
        ("schedule/gpu/attention/schedules.py", {"attention"}),
        ("schedule/gpu/inverted_residual/tile.py", {"inverted_residual"}),
        ("schedule/gpu/b2b_gemm/pair_tile.py", {"b2b_gemm", "inverted_residual"}),
        ("schedule/gpu/reduction/column.py", {"reduction"}),
        ("codegen/cuda/scan/kernel.py", {"scan"}),
        ("codegen/cuda/elementwise/smem_transpose.py", {"elementwise"}),
        (
            "codegen/cuda/elementwise/thread_tile.py",
            {"elementwise", "gemv", "recurrence", "reduction", "skinny_gemm", "window"},
        ),
        ("codegen/cuda/conv/few_channels.py", {"conv"}),
        ("schedule/cpu/scan.py", {"cpu"}),
        ("kernel_ir/index.py", set(FAMILIES)),
        ("schedule/gpu/candidates.py", set(GPU_FAMILIES)),
        ("codegen/cuda/ptx/builder.py", set(GPU_FAMILIES)),
        ("tune/database.py", set()),
        ("jit/optimized.py", set()),
        ("cli/main.py", set()),
    ],
)
def test_an_edit_changes_the_families_that_use_it(tree, seen, file, families):
    before = versions(tree, seen)
    append(tree / file, "\n_MORE = 1\n")
    assert changed(tree, before, seen) & FAMILIES.keys() == families


def test_a_fitted_coefficient_changes_the_families_that_read_its_table(tree, seen):
    before = versions(tree, seen)
    file = tree / "schedule/gpu/attention/fit_h200.toml"
    text = file.read_text()
    value = re.search(r"\[registers\.coefficients\]\n\w+ = \{ value = ([^,]+),", text)
    assert value is not None
    file.write_text(text[: value.start(1)] + "12345.0" + text[value.end(1) :])
    assert changed(tree, before, seen) - {"emitter cuda"} == {"attention"}


def test_a_hardware_number_changes_all_that_reach_it(tree, seen):
    before = versions(tree, seen)
    file = tree / "arch" / "sm_limits.toml"
    append(file, "\n[more]\nnumber = 1\n")
    assert changed(tree, before, seen) >= set(GPU_FAMILIES)


def test_hashes_are_kept_between_processes(tree, tmp_path):
    cache = tmp_path / "new" / "module_code.json"
    first = versions(tree, cache)
    kept = json.loads(cache.read_text())
    assert len(kept["modules"]) > 100
    assert versions(tree, cache) == first == versions(tree)
    empty = json.dumps({**kept, "modules": dict.fromkeys(kept["modules"])})
    for damage in ("", "[]", '{"format": 1, "modules": 3}', empty):
        cache.write_text(damage)
        assert ScheduleVersions(ModuleFiles(tree, cache)).family("cpu") == first["cpu"]  # 100 modules: all take seconds
    cache.unlink()
    cache.mkdir()  # it cannot be written
    assert ScheduleVersions(ModuleFiles(tree, cache)).family("cpu") == first["cpu"]


def test_the_hash_is_of_code_alone():
    one = read_code(
        b'"""A."""\nimport jcuts.x\nX = 1\n"""Of X."""\n\n\ndef f(a):\n    """B."""\n    return {**a}  # c\n'
    )
    two = read_code(b"import jcuts.x\n# d\nX = 1\n\ndef f(\n    a\n):\n    return {**a}\n")
    assert one == two and one.imports == (("jcuts.x", ()),)
    others = [
        b"X = 1.0\n",
        b"X = 1\n",
        b"X = True\n",
        b"X = '1'\n",
        b"X = None\n",
        b"X = ...\n",
        b"x = 1\n",
        b"X = -1\n",
    ]
    assert len({read_code(text).code for text in others}) == len(others)
    assert read_code(b"a = fit.coefficients('cpu', 'x')\nb = record(n, 'y')\n").tables == (("cpu", "x"),)


def test_known_hash():
    """Each Python adds fields to the syntax tree; with them every stored choice would be lost."""
    code = b"class A:\n    def f(self, x=1, *a, y: int = 2, **k) -> str:\n        return f'{x!r:>{y}}'\n"
    assert read_code(code).code == "3ad16bb3837279e1b331837a7bc56d59"


def test_every_folder_is_a_family_or_shared():
    folders = {p.name for place in ("schedule/gpu", "codegen/cuda") for p in (ROOT / place).iterdir() if p.is_dir()}
    assert folders - {"__pycache__"} == set(GPU_FAMILIES) | SHARED
    assert {name for names in schedule_versions.ASKED.values() for name in names} == set(GPU_FAMILIES)


def test_only_dispatchers_import_a_family_from_outside():
    packages = [package for name in GPU_FAMILIES for package in FAMILIES[name]]

    def is_family(module: str) -> bool:
        return any(module.startswith(package + ".") for package in packages)

    edges = read_graph().module_edges()
    found = {m for m, targets in edges.items() if not is_family(m) and any(map(is_family, targets))}
    assert found <= DISPATCHERS


def test_there_are_no_relative_imports():
    """`ModuleCode.imports` would not see where they lead."""
    assert not [file for file in ROOT.rglob("*.py") if re.search(r"^\s*from \.", file.read_text(), re.MULTILINE)]


def test_tables_of_coefficients_are_named_by_constants():
    """A table whose name is computed counts as all of its file; one whose file is computed does not count."""
    versions_ = ScheduleVersions(ModuleFiles(ROOT))
    reads = {t for file in (ROOT / "schedule").rglob("*.py") for t in versions_.files.code(file).tables}
    assert len(reads) > 20 and all(family and table for family, table in reads)
