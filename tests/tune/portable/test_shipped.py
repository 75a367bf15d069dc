"""Shipped rows: what is written and found, that nothing of them runs unchecked, and rows about GPUs on any host."""

from __future__ import annotations

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest

from jcuts.base import keys, knobs
from jcuts.base.settings import Settings
from jcuts.jit.decision import Decision
from jcuts.jit.decision_cache import DecisionCache
from jcuts.pipeline import passes
from jcuts.tune import session, time_budget
from jcuts.tune.choice import LIBRARY, OVER_BUDGET, Choice, Rejection
from jcuts.tune.database import Store
from jcuts.tune.database_rows import Row
from jcuts.tune.measure import regime
from jcuts.tune.portable import row_files, shipped
from jcuts.tune.portable.file_store import FileStore, default_store
from jcuts.tune.portable.shipped import ShippedRows
from jcuts.tune.row_signature import CHECKED, FOREIGN, TUNED
from tests.tune.test_database import make_choice
from tests.tune.test_old_database import counts  # noqa: F401
from tests.tune.test_stored_choice_check import relabelled, scaled

X = np.random.default_rng(0).standard_normal((24, 40)).astype(np.float32)
FUSION = Settings(mode="fusion")
MOST_BYTES = 1_000_000


@pytest.fixture(autouse=True)
def quick(cache_dir, monkeypatch):
    """A cache of its own, and short measurements."""
    cache_dir.mkdir()
    monkeypatch.setenv("JCUTS_MAX_CANDIDATES", "2")
    yield
    session.set_store(None)
    passes.forget()


def store_of(path, folder=None, versions="python 3.11, jax 1"):
    return FileStore(path, device="here", versions=versions, shipped=None if folder is None else ShippedRows(folder))


def planned(store):
    session.set_store(store)
    passes.forget()
    closed = jax.make_jaxpr(lambda x: jax.nn.softmax(x * 2))(X)
    (subset,) = passes.optimize_jaxpr(closed, FUSION, platform="cpu", may_measure=True).report.subsets
    return subset


def choices(store):
    return [row for row in store.ls() if row.kind == "choice"]


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """A folder of shipped rows of one softmax, tuned once for all tests, and what was chosen for it."""
    folder = tmp_path_factory.mktemp("tuned")
    (folder / "cache").mkdir()
    with knobs.scope(cache_dir=folder / "cache", max_candidates=2):
        store = store_of(folder / "first.db")
        first = planned(store)
    assert shipped.write(folder / "shipped", store.ls()) >= 1
    return folder / "shipped", first


@pytest.fixture
def made(tuned, tmp_path, counts):  # noqa: F811
    """The same in a folder of the test's own."""
    counts.update(check=0, measure=0)
    return shutil.copytree(tuned[0], tmp_path / "shipped"), tuned[1]


def edited(folder, change):
    """Changes the one choice of a folder, as a person would."""
    for path in folder.rglob("choice-*.json"):
        data = json.loads(path.read_text())
        data["entries"][0]["value"] = change(data["entries"][0]["value"])
        path.write_text(json.dumps(data))


def test_a_shipped_choice_is_checked_once_and_not_measured(made, tmp_path, counts):  # noqa: F811
    folder, first = made
    (path,) = folder.rglob("choice-*.json")
    assert path.parent.name == "cpu"
    store = store_of(tmp_path / "tuning.db", folder)
    assert store.choice(row_files.read_file(path).row.key)[1] == FOREIGN
    again = planned(store)
    assert (again.chosen, again.source) == (first.chosen, CHECKED)
    assert counts["measure"] == 0
    checks = counts["check"]
    assert checks >= 1
    assert planned(store_of(tmp_path / "tuning.db", folder)).source == CHECKED
    assert counts == {"check": checks, "measure": 0}


def test_a_shipped_choice_that_is_wrong_is_tuned(made, tmp_path, counts, caplog):  # noqa: F811
    folder, _ = made
    edited(folder, lambda choice: relabelled(choice, lambda text: scaled(text, 1 + 1e-4)))
    again = planned(store_of(tmp_path / "tuning.db", folder))
    assert (again.source, counts["measure"]) == (TUNED, 1)
    assert "is not used" in caplog.text


def test_other_schedules_and_packages_count_until_tuning_is_asked_for(made, tmp_path, counts):  # noqa: F811
    folder, first = made
    edited(folder, lambda choice: {**choice, "schedules": {"cpu": "before"}})
    store = store_of(tmp_path / "tuning.db", folder, versions="python 3.12, jax 2")
    again = planned(store)
    assert (again.chosen, again.source, counts["measure"]) == (first.chosen, CHECKED, 0)
    assert again.regime.endswith("code earlier")
    assert planned(store).source == CHECKED
    budget = time_budget.TimeBudget()
    budget.again = True
    with time_budget.spending(budget):  # as in `.tune()`
        anew = planned(store)
    assert (anew.source, counts["measure"]) == (TUNED, 1)
    assert "earlier" not in anew.regime


def test_what_is_measured_here_goes_first(made, tmp_path):
    folder, _ = made
    (row,) = (row_files.read_file(path).row for path in folder.rglob("choice-*.json"))
    store = store_of(None, folder)
    assert store.choice(row.key)[1] == FOREIGN
    store.put(dataclasses.replace(Choice.from_json(row.value), name="here"))
    assert store.choice(row.key)[0].name == "here"
    store.drop(row.key)
    assert store.choice(row.key)[0] is None  # it was wrong: not offered again


def test_rows_of_other_machines_and_damaged_files_are_none(made, monkeypatch):
    folder, _ = made
    (path,) = folder.rglob("choice-*.json")
    row = row_files.read_file(path).row
    assert len(ShippedRows(folder).rows("choice", row.key)) == 1
    assert ShippedRows(folder).rows("guard", row.key) == []
    assert ShippedRows(folder).rows("choice", row.key[:16] + "0" * 48) == []
    with monkeypatch.context() as patch:
        patch.setattr(shipped, "cpu_kind", lambda: "cpu of another kind")
        assert ShippedRows(folder).rows("choice", row.key) == []
    path.write_text(path.read_text()[:100])
    assert ShippedRows(folder).rows("choice", row.key) == []
    assert ShippedRows(folder / "none").rows("choice", row.key) == []


def test_only_what_decides_is_shipped(tmp_path):
    whole = make_choice("p" * 64, 1e-3)
    kept = shipped.trimmed(whole)
    assert {m.label for m in kept.measurements} == {LIBRARY, kept.winner}
    assert kept.rejections == ()
    cut = dataclasses.replace(whole, rejections=(Rejection("k", OVER_BUDGET, "no time"),))
    rows = [Row("choice", "p" * 64, "here", "v", 1.0, one.to_json()) for one in (whole, cut)]
    guard = Row("guard", "g", "here", "v", 1.0, {"chosen": "jcuts"})
    cover = Row("partition", "c" * 32, "here", "v; code x", 1.0, {"levels": [[]], "schedules": {"cpu": "1"}})
    assert shipped.write(tmp_path, [rows[0], guard, cover]) == 2
    assert shipped.write(tmp_path / "cut", [rows[1]]) == 0
    assert ShippedRows(tmp_path).rows("partition", "c" * 32)[0].value == {"levels": [[]]}
    found = store_of(None, tmp_path).entry("partition", "c" * 32)
    assert found == ({"levels": [[]]}, FOREIGN)  # a cover of equations fits, or is not taken
    shipped.remove(tmp_path)
    assert list(tmp_path.rglob("*.json")) == []


def test_rows_about_gpus_are_of_no_host(tmp_path):
    path, choice = tmp_path / "tuning.db", make_choice("p" * 64, 1e-3)
    choice = dataclasses.replace(choice, schedules=keys.schedules("cuda", "map"))
    one, other = (Store(path, device=device, versions="v") for device in ("one host", "another host"))
    one.put(choice)
    one.put_partition("c", {"covers": [], "schedules": keys.partition_code("cuda")})
    one.put_guard("g", {"chosen": "jcuts"}, on_gpu=True)
    assert {row.device for row in one.ls()} == {keys.GPU_DEVICE}
    assert other.choice(choice.problem) == (choice, TUNED)
    assert other.partition("c") is not None
    assert other.is_own("g")
    assert len(other.ls(all_devices=False)) == 3
    one.put(dataclasses.replace(choice, problem="q" * 64, schedules=keys.schedules("cpu", "map")))
    assert other.lookup("q" * 64) is None
    assert shipped.write(tmp_path / "shipped", one.ls()) == 3
    assert len(list((tmp_path / "shipped" / "gpu").iterdir())) == 2
    elsewhere = FileStore(None, device="a third host", versions="v", shipped=ShippedRows(tmp_path / "shipped"))
    assert elsewhere.choice(choice.problem)[1] == FOREIGN
    other.drop(choice.problem)
    assert one.lookup(choice.problem) is None


def test_rows_about_gpus_of_one_host_are_still_read(tmp_path):
    choice = dataclasses.replace(make_choice("p" * 64, 1e-3), schedules=keys.schedules("cuda", "map"))
    old = Store(tmp_path / "tuning.db", device="here", versions="v")
    export = tmp_path / "export.json"
    old.put(choice)
    old.export(export)
    export.write_text(export.read_text().replace(f'"device": "{keys.GPU_DEVICE}"', '"device": "here"'))
    here = Store(None, device="here", versions="v")
    here.merge([export])
    assert here.choice(choice.problem) == (choice, FOREIGN)
    assert Store(None, device="elsewhere", versions="v").merge([export]) == 1


def test_decisions_about_gpus_are_stored_for_any_host(tmp_path):
    store = Store(tmp_path / "tuning.db", device="here", versions="v")
    cache = DecisionCache(Settings(), {}, store)
    cache._of_gpus.add("of a GPU")
    for key in ("of a GPU", "of a CPU"):
        cache.keep(key, Decision("xla", "measured", measured=True))
    assert [row.device for row in store.ls()] == [keys.GPU_DEVICE, "here"]


def test_what_comes_with_jcuts(monkeypatch):
    files = sorted(shipped.FOLDER.rglob("*.json"))
    assert sum(path.stat().st_size for path in files) <= MOST_BYTES
    rows = [row_files.read_file(path).row for path in files]
    assert {row.kind for row in rows} <= set(shipped.KINDS)
    assert {row.device.split()[0] for row in rows} <= {"cpu", keys.GPU_DEVICE}
    for path, row in zip(files, rows, strict=True):
        assert path.name == row_files.file_name(row)
        assert str(shipped.FOLDER.parents[3]) not in path.read_text()
    assert default_store()._shipped is None  # as in all tests
    with knobs.scope(shipped=True):
        assert default_store()._shipped is not None
    monkeypatch.setattr(shipped, "cpu_kind", lambda: rows[0].device)
    assert all(
        row in ShippedRows().rows(row.kind, row.key)
        or regime.CODE in regime.recorded(ShippedRows().rows(row.kind, row.key)[0].value)
        for row in rows
    )
