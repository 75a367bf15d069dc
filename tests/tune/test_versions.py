"""Other packages: a choice is verified once, not tuned. Other schedules: only choices whose families were asked."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from jcuts.base import keys, schedule_versions
from jcuts.base.module_code import ModuleFiles
from jcuts.base.schedule_versions import FAMILIES, ScheduleVersions
from jcuts.base.settings import Settings
from jcuts.pipeline import computation
from jcuts.rewrite.simplify import simplify
from jcuts.trace.inline import inline
from jcuts.tune import session
from jcuts.tune.choice import LIBRARY, Choice
from jcuts.tune.database import Store
from jcuts.tune.row_signature import FOREIGN, OTHER_VERSIONS, RECHECKED, TUNED
from tests.tune.test_old_database import counts  # noqa: F401
from tests.tune.test_stored_choice_check import edit, relabelled, scaled

X = np.random.default_rng(0).standard_normal((24, 40)).astype(np.float32)
FUSION = Settings(mode="fusion")
OLD, NEW = "python 3.11, jaxlib 1.0", "python 3.12, jaxlib 2.0"


@pytest.fixture(autouse=True)
def quick(cache_dir, monkeypatch):
    """A cache of its own, and short measurements."""
    cache_dir.mkdir()
    monkeypatch.setenv("JCUTS_MAX_CANDIDATES", "2")
    monkeypatch.setenv("JCUTS_COMPILE_WORKERS", "1")
    yield
    session.set_store(None)


def edited(monkeypatch, family: str) -> None:
    """Another version of one family, as after an edit of its schedules."""
    was = ScheduleVersions.family
    monkeypatch.setattr(ScheduleVersions, "family", lambda self, name: "new" if name == family else was(self, name))


def store_of(path, versions=OLD) -> Store:
    return Store(path, device="here", versions=versions)


def chosen(path, versions=OLD, settings=FUSION, may_measure=True):
    """The one region of a softmax, with its choice from a database as another process would have it."""
    session.set_store(store_of(path, versions))
    closed = jax.make_jaxpr(lambda x: jax.nn.softmax(x * 2))(X)
    top = computation.group(simplify(inline(closed)), FUSION, computation.Fuel())
    computation.add_candidates(top.subsets)
    problems = session.collect_problems(top.subsets, settings)
    session.resolve(problems, session.tune_problems(problems, may_measure=may_measure))
    (region,) = top.subsets
    return region


def test_other_packages_verify_once_and_tune_nothing(tmp_path, counts):  # noqa: F811
    path = tmp_path / "tuning.db"
    first = chosen(path)
    assert (first.source, counts["measure"]) == (TUNED, 1)
    counts.update(check=0, measure=0)
    waiting = chosen(path, NEW, Settings(), may_measure=False)  # inside a trace
    assert waiting.chosen is None and waiting.choice.is_unverified and counts == {"check": 0, "measure": 0}
    again = chosen(path, NEW)
    assert (again.chosen, again.source, counts["measure"]) == (first.chosen, RECHECKED, 0)
    checks = counts["check"]
    assert checks == len(first.choice.programs)
    assert chosen(path, NEW).source == RECHECKED and chosen(path, NEW, may_measure=False).chosen == first.chosen
    assert chosen(path).source == TUNED and counts == {"check": checks, "measure": 0}  # both installations go on


def test_what_is_wrong_with_other_packages_is_tuned_anew_there_and_stays_here(tmp_path, counts, caplog):  # noqa: F811
    path = tmp_path / "tuning.db"
    chosen(path)
    (row,) = store_of(path).ls()
    wrong = relabelled(row.value, lambda text: scaled(text, 1 + 1e-4))
    store_of(path).put(Choice.from_json(wrong))  # signed
    counts.update(check=0, measure=0)
    again = chosen(path, NEW)
    assert (again.source, counts["measure"]) == (TUNED, 1) and "is not used" in caplog.text
    assert store_of(path).lookup(row.key) == Choice.from_json(wrong)


def test_an_edited_row_of_other_packages_is_one_of_another_cache(tmp_path):
    path = tmp_path / "tuning.db"
    chosen(path)
    edit(path, lambda choice: relabelled(choice, lambda text: scaled(text, 1.0)))
    (row,) = store_of(path).ls()
    assert store_of(path, NEW).other_choice(row.key)[1] == FOREIGN


def test_an_edit_of_the_schedules_tunes_anew(tmp_path, counts, monkeypatch):  # noqa: F811
    path = tmp_path / "tuning.db"
    chosen(path)
    counts.update(check=0, measure=0)
    with monkeypatch.context() as patch:
        edited(patch, "cpu")
        assert chosen(path).source == TUNED and counts["measure"] == 1
        assert chosen(path, NEW).source == RECHECKED and counts["measure"] == 1
    assert chosen(path).source == TUNED and counts["measure"] == 1  # both versions go on
    with monkeypatch.context() as patch:
        edited(patch, "gemm")  # of GPUs
        assert chosen(path).source == TUNED and counts["measure"] == 1


def test_an_edit_of_one_family_loses_its_problems_alone(tmp_path, monkeypatch):
    path = tmp_path / "tuning.db"
    templates = ("attention", "contraction", "convolution", "map", "scan", "block")
    for template in templates:
        schedules = keys.schedules("cuda", template)
        store_of(path).put(Choice(template, LIBRARY, "", "measured", schedules=schedules))

    def kept(versions=OLD):
        store = store_of(path, versions)
        return {t for t in templates if (store.choice(t)[0] or store.other_choice(t)[0]) is not None}

    assert kept() == kept(NEW) == set(templates)
    for family, lost in {
        "attention": {"attention"},
        "conv": {"contraction", "convolution"},
        "warp_specialized": {"contraction", "convolution"},
        "elementwise": {"map"},
        "cpu": set(),
    }.items():
        with monkeypatch.context() as patch:
            edited(patch, family)
            assert kept() == kept(NEW) == set(templates) - lost


def test_choices_of_xla_are_taken_over(tmp_path, counts):  # noqa: F811
    path = tmp_path / "tuning.db"
    region = chosen(path)
    store_of(path).put(Choice(region.choice.problem, LIBRARY, "", "measured", schedules=keys.schedules("cpu", "")))
    counts.update(check=0, measure=0)
    again = chosen(path, NEW, Settings())
    assert again.chosen is None and counts == {"check": 0, "measure": 0}
    assert store_of(path, NEW).choice(region.choice.problem)[1] == RECHECKED


def test_the_newest_row_of_other_versions_is_tried(tmp_path):
    path = tmp_path / "tuning.db"
    for number, versions in enumerate(("a", "b", "c")):
        store_of(path, versions).put(Choice("p", LIBRARY, "", "measured", margin=float(number)))
    store_of(path, "d").put(Choice("p", LIBRARY, "", "measured", margin=9.0, schedules={"cpu": "of long ago"}))
    found, source = store_of(path, NEW).other_choice("p")
    assert found is not None and (found.margin, source) == (2.0, OTHER_VERSIONS)


def test_partitions_of_other_versions(tmp_path, monkeypatch):
    path = tmp_path / "tuning.db"
    cover = {"levels": [[[0]]], "shares": {}, "schedules": keys.partition_code("cpu")}
    store_of(path).put_partition("f", cover)
    assert store_of(path).entry("partition", "f") == (cover, TUNED)
    assert store_of(path, NEW).entry("partition", "f") == (cover, OTHER_VERSIONS)
    store_of(path, NEW).adopt_partition("f", keys.partition_code("cpu"))
    assert store_of(path, NEW).entry("partition", "f") == (cover, TUNED)
    before = len(store_of(path, NEW).ls())
    store_of(path, NEW).adopt_partition("f", keys.partition_code("cpu"))
    assert len(store_of(path, NEW).ls()) == before == 2
    edited(monkeypatch, "cpu")
    assert store_of(path).partition("f") is None


def test_installations_that_write_at_once_keep_both_rows(tmp_path):
    code = """
import sys
from jcuts.tune.choice import Choice
from jcuts.tune.database import Store
for number in range(20):
    store = Store(sys.argv[1], device="here", versions=sys.argv[2])
    store.put(Choice(f"p{number}", "xla", "", "measured", name=sys.argv[2], schedules={"cpu": sys.argv[3]}))
assert store.errors == []
"""
    places = [(versions, code_) for versions in (OLD, NEW) for code_ in ("1", "2")]
    path = tmp_path / "tuning.db"
    running = [subprocess.Popen([sys.executable, "-c", code, str(path), *place]) for place in places]
    assert [process.wait() for process in running] == [0] * 4
    rows = store_of(path).ls()
    assert len(rows) == 80 and len({(row.key, row.versions) for row in rows}) == 80


def test_a_docs_commit_and_a_patch_of_python_keep_the_database(tmp_path, counts, monkeypatch):  # noqa: F811
    monkeypatch.setattr("platform.python_version_tuple", lambda: ("3", "11", "7"))
    path, before = tmp_path / "tuning.db", keys.packages()
    first = chosen(path, before)
    assert (first.source, counts["measure"]) == (TUNED, 1)
    counts.update(check=0, measure=0)
    # A commit of docs: other Markdown files, docstrings and comments in all modules that the choice depends on.
    root = Path(keys.__file__).resolve().parents[1]
    copy = shutil.copytree(root, tmp_path / "jcuts", ignore=shutil.ignore_patterns("__pycache__", "*.so", "*.json"))
    for name, file in schedule_versions.here().reached(FAMILIES["cpu"], ()).items():
        mine = copy / file.relative_to(root)
        mine.write_text(f'"""Other prose about {name}."""\n# A comment.\n\n' + without_docstring(mine.read_text()))
    (copy / "more.md").write_text("# More to read\n")
    after = ScheduleVersions(ModuleFiles(copy))
    monkeypatch.setattr(schedule_versions, "here", lambda: after)
    # A new patch of Python.
    monkeypatch.setattr("platform.python_version_tuple", lambda: ("3", "11", "8"))
    again = chosen(path, keys.packages())
    assert (again.chosen, again.source) == (first.chosen, TUNED)
    assert counts == {"check": 0, "measure": 0}
    module = copy / "schedule" / "cpu" / "candidates.py"
    module.write_text(module.read_text() + "\n_MORE = 1\n")
    edited_tree = ScheduleVersions(ModuleFiles(copy))
    monkeypatch.setattr(schedule_versions, "here", lambda: edited_tree)
    (row,) = store_of(path, keys.packages()).ls()
    assert store_of(path, keys.packages()).lookup(row.key) is None  # an edit of schedules does not keep it


def without_docstring(text: str) -> str:
    """The text of a module without its first string."""
    first = ast.parse(text).body[0]
    return "\n".join(text.splitlines()[first.end_lineno :]) + "\n"
