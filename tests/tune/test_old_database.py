"""A database that jcuts wrote before choices recorded schedules: every choice is kept, and tried first."""

from __future__ import annotations

import contextlib
import re
import sqlite3
from pathlib import Path

import jax
import numpy as np
import pytest

import jcuts
from jcuts.base import keys
from jcuts.base.settings import Settings
from jcuts.pipeline import computation
from jcuts.pipeline import passes as pipeline_passes
from jcuts.schedule.cpu.machine import Machine
from jcuts.tune import session
from jcuts.tune.choice import LIBRARY, Choice
from jcuts.tune.database import Store
from jcuts.tune.parent import tuning_queue
from jcuts.tune.row_signature import CHECKED, FOREIGN, OTHER_VERSIONS, RECHECKED

DATA = Path(__file__).parent / "data" / "database_before_schedule_versions.sql"
DEVICE = "cpu of the test data"
X = np.random.default_rng(0).standard_normal((24, 40)).astype(np.float32)
W = np.random.default_rng(1).standard_normal((40, 32)).astype(np.float32)


def softmax(x):
    return jax.nn.softmax(x * 2)


def dense(x, w):
    return jax.nn.relu(x @ w + 1).sum(axis=0)


def scan(x):
    return jax.numpy.cumsum(x, axis=1) * 3


FUNCTIONS = [(softmax, (X,)), (dense, (X, W)), (scan, (X,))]


@pytest.fixture
def path(cache_dir, monkeypatch):
    """The database, read by this version on the machine that wrote it."""
    cache_dir.mkdir(mode=0o700)
    made = cache_dir / "tuning.db"
    text = DATA.read_text()
    with contextlib.closing(sqlite3.connect(made)) as db, db:
        db.executescript(text)
    db.close()
    secret = cache_dir / "tuning.db.key"
    found = re.search(r"^-- secret ([0-9a-f]{64})$", text, re.MULTILINE)
    assert found is not None
    secret.write_bytes(bytes.fromhex(found[1]))
    secret.chmod(0o600)
    monkeypatch.setenv("JCUTS_MAX_CANDIDATES", "2")
    monkeypatch.setenv("JCUTS_COMPILE_WORKERS", "1")
    monkeypatch.setattr(computation, "machine", lambda: Machine(32, 16, 2))
    session.set_store(here(made))
    pipeline_passes.forget()
    yield made
    session.set_store(None)
    pipeline_passes.forget()


@pytest.fixture
def counts(monkeypatch):
    """How many checks and measurements were asked for."""
    found = {"check": 0, "measure": 0}

    def count(name, method):
        was = getattr(tuning_queue.TuningQueue, method)

        def counted(self, *more):
            found[name] += 1
            return was(self, *more)

        monkeypatch.setattr(tuning_queue.TuningQueue, method, counted)

    count("check", "_check")
    count("measure", "measure")
    return found


def here(path: Path) -> Store:
    return Store(path, device=DEVICE, versions=keys.packages())


def plan(fn, arguments, may_measure=True):
    closed = jax.make_jaxpr(fn)(*arguments)
    settings = Settings(mode="fusion")
    return pipeline_passes.optimize_jaxpr(closed, settings, platform="cpu", may_measure=may_measure).report


def unknown_problems(functions=FUNCTIONS):
    """Problems that the rows do not have: a JAX that traces a function into other equations has another problem."""
    stored = {row.key for row in session.store().ls() if row.kind == "choice"}
    found = set()
    for fn, arguments in functions:
        closed = jax.make_jaxpr(fn)(*arguments)
        started = pipeline_passes.start_planning(closed, Settings(mode="fusion"), platform="cpu", may_measure=True)
        assert started.problems is not None
        found |= {problem.digest for problem in started.problems.problems.values()} - stored
    pipeline_passes.forget()
    assert not found or jax.__version_info__ >= (0, 11)
    return found


def test_every_row_is_kept_and_read(path):
    store = here(path)
    rows = store.ls()
    assert [sum(row.kind == kind for row in rows) for kind in ("choice", "partition", "guard")] == [4, 5, 3]
    assert not any(store.has_these_versions(row) for row in rows) and store.errors == []
    for row in rows:
        if row.kind == "choice":
            assert store.choice(row.key) == (None, "")
            assert store.other_choice(row.key) == (Choice.from_json(row.value), OTHER_VERSIONS)
        elif row.kind == "partition":
            assert store.entry("partition", row.key) == (row.value, FOREIGN)
    assert not [file for file in path.parent.iterdir() if "aside" in file.name]


def test_every_choice_is_tried_first_and_checked_once(path, counts):
    stored = {row.key: row.value["winner"] for row in here(path).ls() if row.kind == "choice"}
    unknown = unknown_problems()
    for fn, arguments in FUNCTIONS:
        report = plan(fn, arguments, may_measure=False)
        assert {s.chosen for s in report.subsets if s.source} <= {"xla"}  # nothing runs before it is checked
    assert counts == {"check": 0, "measure": 0}
    pipeline_passes.forget()
    for fn, arguments in FUNCTIONS:
        plan(fn, arguments)
    kernels = sum(winner != LIBRARY for winner in stored.values())
    assert kernels >= 2 and counts["check"] >= kernels - len(unknown) and counts["measure"] <= len(unknown)
    new = [row for row in here(path).ls(all_devices=False) if row.kind == "choice" and row.key not in unknown]
    assert {row.key: row.value["winner"] for row in new}.items() <= stored.items()
    assert len(new) >= len(stored) - len(unknown)
    assert all(row.value["schedules"] == keys.schedules("cpu", "") for row in new)
    assert {here(path).choice(row.key)[1] for row in new} == {RECHECKED}
    assert len(here(path).ls()) >= 12 + len(new)  # the old rows stay
    checked = dict(counts)
    pipeline_passes.forget()
    session.set_store(here(path))
    for fn, arguments in FUNCTIONS:
        assert all(s.origin == "measured" for s in plan(fn, arguments, may_measure=False).subsets)
    assert counts == checked


def test_without_the_secret_they_are_checked_as_rows_of_others(path, counts):
    (path.parent / "tuning.db.key").unlink()
    session.set_store(here(path))
    unknown = unknown_problems([(scan, (X,))])
    plan(scan, (X,))
    assert counts["check"] >= 1 and counts["measure"] == len(unknown)
    new = [row for row in here(path).ls(all_devices=False) if row.kind == "choice" and row.key not in unknown]
    assert [here(path).choice(row.key)[1] for row in new] == [CHECKED]


def test_functions_run(path, counts):
    unknown = unknown_problems()
    for fn, arguments in FUNCTIONS:
        made = jcuts.optimize(fn, mode="fusion")(*arguments)
        np.testing.assert_allclose(made, fn(*arguments), rtol=1e-4, atol=1e-5)
    assert counts["measure"] <= len(unknown)
