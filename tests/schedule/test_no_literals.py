"""Schedules hold no fitted numbers: these are data, with a name, a unit and a source, and every one of them is used."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from jcuts.base.errors import ModelError
from jcuts.schedule import fit
from jcuts.schedule.gpu.gemm.cost import CostCoefficients

FOLDER = fit.ROOT
SOURCES = sorted(FOLDER.rglob("*.py"))
READERS = [*SOURCES, *sorted((FOLDER.parent / "pipeline").rglob("*.py"))]
"""Files that may read fitted coefficients."""
FAMILIES = sorted(str(path.parent.relative_to(FOLDER)) for path in FOLDER.rglob("fit_*.toml"))
PLAIN = (0.0, 0.5, 1.0, 2.0)
HEADER = 'source = "unknown"\nsamples = "unknown"\nerror = "unknown"\ndate = "unknown"\n'


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(FOLDER)))
def test_schedules_have_no_float_literals(path: Path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = [
        (node.lineno, node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and type(node.value) is float and node.value not in PLAIN
    ]
    assert not found, f"{path}: (line, literal) that belong into a fit file: {found}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(FOLDER)))
def test_one_assignment_defines_one_constant(path: Path):
    found = [
        node.lineno
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple)
    ]
    assert not found, f"{path}: lines that define several constants at once: {found}"


def _tables_of(tree: ast.Module) -> dict[str, tuple[str, str]]:
    """Names that a module binds to a table of coefficients: name -> (family, table)."""
    found = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and isinstance(node.value, ast.Call):
            called = node.value.func
            if ast.unparse(called) == "fit.coefficients":
                family, table = (ast.literal_eval(a) for a in node.value.args)
                found[node.targets[0].id] = (family, table)
    return found


def _uses() -> tuple[set[tuple[str, str]], set[tuple[str, str, str]], set[str]]:
    """Tables that are read; (family, table, coefficient) that are; all attributes that are read from anything."""
    tables, entries, attributes = set(), set(), set()
    for path in READERS:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = _tables_of(tree)
        texts = {
            node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
        # a table is read from a file or from a machine, by a name that may be chosen from several
        tables |= {(f, t) for f in texts & set(FAMILIES) for t in texts & set(fit.read_tables(f))}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                attributes.add(node.attr)
                if isinstance(node.value, ast.Name) and node.value.id in names:
                    entries.add((*names[node.value.id], node.attr))
    return tables, entries, attributes


def test_every_table_and_coefficient_is_used():
    tables, _, attributes = _uses()
    there = {(family, table) for family in FAMILIES for table in fit.read_tables(family)}
    assert there == tables
    unused = [
        (family, table, name)
        for family, table in sorted(there)
        for name in fit.coefficients(family, table).as_dict()
        if name not in attributes
    ]
    assert not unused


def test_every_coefficient_that_is_read_is_there():
    missing = [
        (family, table, name)
        for family, table, name in sorted(_uses()[1])
        if name not in (*fit.coefficients(family, table).as_dict(), "provenance")
    ]
    assert not missing


def test_every_table_says_where_it_comes_from():
    for family in FAMILIES:
        for name, table in fit.read_tables(family).items():
            assert table.provenance.source and table.provenance.error and table.provenance.date, (family, name)


def test_results_files_that_are_named_as_sources_are_there():
    root = FOLDER.parents[1]
    for family in FAMILIES:
        for table in fit.read_tables(family).values():
            source = table.provenance.source.split(":")[0]
            if source.startswith(("benchmarks/", "docs/")):
                assert (root / source).is_file(), source


def test_coefficients_are_read_only_and_records_complete():
    table = fit.coefficients("gpu/gemm", "mma_tf32")
    with pytest.raises(AttributeError, match="data file is changed"):
        table.products_per_cycle = 1.0  # type: ignore[misc]
    assert fit.record("gpu/gemm", "ffma", CostCoefficients).memory_bytes_per_cycle == table.memory_bytes_per_cycle
    with pytest.raises(ModelError, match="missing or unknown coefficients"):
        fit.record("gpu/gemm", "occupancy", CostCoefficients)
    with pytest.raises(ModelError, match="no table 'nothing'"):
        fit.coefficients("gpu/gemm", "nothing")


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("[a", "not valid TOML"),
        ('[a]\nsource = "x"\n', "a.error: must say"),
        (f"[a]\n{HEADER}", "a.coefficients: must be a table"),
        (f"[a]\n{HEADER}extra = 1\n", "a.extra: unknown key"),
        (f'[a]\n{HEADER}[a.coefficients]\nb = {{ value = "1", unit = "s" }}\n', "a.b: value '1' must be"),
        (f"[a]\n{HEADER}[a.coefficients]\nb = {{ value = inf, unit = 's' }}\n", "a.b: value inf must be"),
        (f"[a]\n{HEADER}[a.coefficients]\nb = {{ value = 1 }}\n", "a.b: has no unit"),
        (f"[a]\n{HEADER}[a.coefficients]\nb = 1\n", "a.b: must be a table"),
        (f'[a]\n{HEADER}inherits = "c"\n', "a.inherits: no table 'c'"),
        ("[a]\n" + HEADER.replace('samples = "unknown"', "samples = 0"), "a.samples: 0 must be"),
    ],
)
def test_malformed_files_are_refused(text, match):
    with pytest.raises(ModelError, match=match):
        fit.parse_tables(text, "fit.toml")
