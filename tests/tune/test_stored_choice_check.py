"""Rows that this cache has not written: checked once, signed where they are right, dropped where they are not."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sqlite3
import stat
import subprocess
import sys
import threading
from pathlib import Path

import jax
import numpy as np
import pytest

from jcuts.base.settings import Settings
from jcuts.kernel_ir.program import Program
from jcuts.pipeline import computation, report_rows
from jcuts.report.report_data import NOT_CHECKED
from jcuts.rewrite.simplify import simplify
from jcuts.trace.inline import inline
from jcuts.tune import row_signature, session
from jcuts.tune.database import Store
from jcuts.tune.parent import tuner as parent_tuner
from jcuts.tune.parent import tuning_queue
from jcuts.tune.problem import label_of
from jcuts.tune.row_signature import CHECKED, FOREIGN, TUNED, Signer

ROOT = Path(__file__).resolve().parents[2]
FUSION = Settings(mode="fusion")
X = np.random.default_rng(0).standard_normal((24, 40)).astype(np.float32)


@pytest.fixture(autouse=True)
def quick(cache_dir, monkeypatch):
    """A cache of its own, and short measurements."""
    cache_dir.mkdir()
    monkeypatch.setenv("JCUTS_MAX_CANDIDATES", "2")
    monkeypatch.setenv("JCUTS_COMPILE_WORKERS", "1")
    yield
    session.set_store(None)


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


def chosen(path, settings=FUSION, may_measure=True):
    """The one subset of a softmax, with its choice from a database as another process would have it."""
    session.set_store(Store(path, device="here", versions="v"))
    closed = jax.make_jaxpr(lambda x: jax.nn.softmax(x * 2))(X)
    top = computation.group(simplify(inline(closed)), FUSION, computation.Fuel())
    computation.add_candidates(top.subsets)
    session.resolve_choices(top.subsets, settings, may_measure=may_measure)
    (subset,) = top.subsets
    return subset


def scaled(text: str, factor: float) -> str:
    """A program whose results are multiplied by a number."""
    data = json.loads(text)
    phase = data["phases"][-1]
    for store in phase["stores"]:
        dtype = phase["exit"][store[2]]["dtype"]
        phase["exit"] += [
            {"op": "const", "dtype": dtype, "value": factor.hex()},
            {"op": "mul", "dtype": dtype, "args": [store[2], len(phase["exit"])]},
        ]
        store[2] = len(phase["exit"]) - 1
    return json.dumps(data, sort_keys=True, separators=(",", ":"))


def relabelled(choice: dict, change) -> dict:
    """A choice whose programs are others, with labels that fit."""
    text = json.dumps({**choice, "programs": {}})
    programs = {}
    for label, program in choice["programs"].items():
        changed = change(program)
        made = label_of(Program.from_json(changed))
        text, programs[made] = text.replace(label, made), changed
    return {**json.loads(text), "programs": programs}


def edit(path, change):
    """Edits every choice of a database as a person would."""
    with contextlib.closing(sqlite3.connect(path)) as db, db:
        for problem, text in db.execute("SELECT problem, choice FROM choices").fetchall():
            changed = json.dumps(change(json.loads(text)), sort_keys=True)
            db.execute("UPDATE choices SET choice = ? WHERE problem = ?", (changed, problem))
    db.close()


def sources(path):
    store = Store(path, device="here", versions="v")
    return [store.entry("choice", row.key)[1] for row in store.ls() if row.kind == "choice"]


def test_what_was_tuned_here_is_signed_and_not_checked_again(tmp_path, counts):
    path = tmp_path / "tuning.db"
    first = chosen(path)
    assert first.chosen is not None and first.source == TUNED and counts["measure"] == 1
    assert sources(path) == [TUNED]
    before = dict(counts)
    again = chosen(path)
    assert (again.chosen, again.source, counts) == (first.chosen, TUNED, before)
    assert chosen(path, may_measure=False).chosen == first.chosen


def test_a_row_that_was_edited_to_be_wrong_does_not_run(tmp_path, counts, caplog):
    path = tmp_path / "tuning.db"
    first = chosen(path)
    edit(path, lambda choice: relabelled(choice, lambda text: scaled(text, 1 + 1e-4)))
    counts.update(check=0, measure=0)
    again = chosen(path)
    assert counts["measure"] == 1 and again.source == TUNED  # tuned anew
    assert again.chosen is not None
    assert len(again.chosen.phases[-1].exit.nodes) == len(first.chosen.phases[-1].exit.nodes)
    assert "is not used, and was removed" in caplog.text and "AccuracyRejected" in caplog.text
    assert sources(path) == [TUNED]


def test_a_row_that_was_edited_and_is_right_is_checked_once(tmp_path, counts):
    path = tmp_path / "tuning.db"
    first = chosen(path)
    edit(path, lambda choice: relabelled(choice, lambda text: scaled(text, 1.0)))
    counts.update(check=0, measure=0)
    again = chosen(path)
    kernels = counts["check"]  # the fastest, and another one where two are as fast
    assert (again.source, again.origin, counts["measure"]) == (CHECKED, "measured", 0) and kernels in (1, 2)
    assert again.chosen is not None and again.chosen != first.chosen
    third = chosen(path)  # signed now
    assert (third.chosen, third.source, counts["check"]) == (again.chosen, CHECKED, kernels)
    assert chosen(path, may_measure=False).chosen == again.chosen


def test_imported_rows_are_checked_once_and_not_used_before(tmp_path, counts):
    first = chosen(tmp_path / "one.db")
    Store(tmp_path / "one.db", device="here", versions="v").export(tmp_path / "export.json")
    secret = (tmp_path / "one.db.key").read_bytes()
    exported = (tmp_path / "export.json").read_bytes()
    assert secret not in exported and secret.hex().encode() not in exported and b"signature" not in exported
    two = tmp_path / "two.db"
    assert Store(two, device="here", versions="v").import_(tmp_path / "export.json") >= 1
    assert sources(two) == [FOREIGN]
    counts.update(check=0, measure=0)
    mixed = chosen(two, Settings(), may_measure=False)  # inside a trace
    assert mixed.chosen is None and counts["check"] == 0
    assert mixed.choice.is_unverified and report_rows.why_lost(mixed) == (None, NOT_CHECKED)
    assert chosen(two, Settings(tune="cached"), may_measure=True).chosen is None and counts["check"] == 0
    again = chosen(two)
    assert (again.chosen, again.source, counts["measure"]) == (first.chosen, CHECKED, 0)
    checked = counts["check"]
    assert checked == len(first.choice.programs) in (1, 2)
    assert chosen(two).source == CHECKED and counts["check"] == checked


def test_a_database_without_signatures_is_read_and_checked_once(tmp_path, counts):
    path = tmp_path / "tuning.db"
    first = chosen(path)
    with contextlib.closing(sqlite3.connect(path)) as db, db:
        db.execute("DROP TABLE signatures")  # as older versions write it
    db.close()
    (tmp_path / "tuning.db.key").unlink()
    counts.update(check=0, measure=0)
    again = chosen(path)
    assert (again.chosen, again.source, counts["measure"]) == (first.chosen, CHECKED, 0)
    assert sources(path) == [CHECKED] and not [p for p in tmp_path.iterdir() if "aside" in p.name]


def test_a_lost_secret_costs_one_check(tmp_path, counts):
    path = tmp_path / "tuning.db"
    first = chosen(path)
    (tmp_path / "tuning.db.key").unlink()
    counts.update(check=0, measure=0)
    assert chosen(path).source == CHECKED and counts["measure"] == 0 and counts["check"] >= 1
    checked = counts["check"]
    assert (chosen(path).chosen, counts["check"]) == (first.chosen, checked)


def test_a_row_of_another_problem_is_ignored(tmp_path, counts):
    path = tmp_path / "tuning.db"
    chosen(path)
    edit(path, lambda choice: {**choice, "problem": hashlib.sha256(b"other").hexdigest()})
    counts.update(check=0, measure=0)
    assert chosen(path).source == TUNED and counts["measure"] == 1


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, "2", None, [], True])
@pytest.mark.parametrize("field", ["margin", "seconds", "low"])
def test_odd_numbers_of_a_choice_are_refused(tmp_path, field, value):
    store = Store(tmp_path / "t.db", device="here", versions="v")
    times = [{"label": "xla", "seconds": 1.0, "low": 1.0, "high": 1.0, "runs": 3, "method": "loop"}]
    row = {"problem": "p", "winner": "xla", "winner_digest": "", "origin": "measured", "measurements": times}
    store._put("choice", "p", row)
    assert store.lookup("p") is not None
    (times[0] if field != "margin" else row)[field] = value
    edit(tmp_path / "t.db", lambda _: row)
    assert store.lookup("p") is None and "not a tuning choice" in store.errors[0].message


def test_unknown_fields_of_a_choice_are_refused(tmp_path):
    store = Store(tmp_path / "t.db", device="here", versions="v")
    store._put("choice", "p", {"problem": "p", "winner": "xla", "winner_digest": "", "origin": "library", "more": 1})
    assert store.lookup("p") is None


# -- the secret -------------------------------------------------------------------------------------------------------
ROW = ("choice", "p", "here", "v", "{}")


def test_the_secret_is_private_and_stays(tmp_path):
    made = Signer(tmp_path / "key").sign(ROW, TUNED)
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600 and len((tmp_path / "key").read_bytes()) == 32
    other = Signer(tmp_path / "key")
    assert other.is_signed(ROW, TUNED, made) and other.sign(ROW, TUNED) == made
    assert not other.is_signed(ROW, CHECKED, made) and not other.is_signed((*ROW[:-1], "[]"), TUNED, made)
    assert not Signer(tmp_path / "none").is_signed(ROW, TUNED, made) and not (tmp_path / "none").exists()
    assert [p.name for p in tmp_path.iterdir() if p.is_file()] == ["key"]


@pytest.mark.parametrize("damage", ["short", "readable", "link"])
def test_a_secret_that_is_none_is_replaced(tmp_path, damage):
    path = tmp_path / "key"
    made = Signer(path).sign(ROW, TUNED)
    if damage == "short":
        path.write_bytes(b"x")
    elif damage == "readable":
        path.chmod(0o644)
    else:
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    assert not Signer(path).is_signed(ROW, TUNED, made)
    again = Signer(path).sign(ROW, TUNED)
    assert again and again != made and Signer(path).is_signed(ROW, TUNED, again)


def test_processes_that_make_the_secret_at_once_agree(tmp_path):
    code = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from jcuts.tune.row_signature import Signer
sys.stdin.readline()
print(Signer(Path({str(tmp_path / "key")!r})).sign(("a",), "b"))
"""
    running = [
        subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    found = []
    threads = [threading.Thread(target=lambda p=p: found.append(p.communicate("\n")[0])) for p in running]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and len(set(found)) == 1 and len(found[0]) == 65
    assert [p.name for p in tmp_path.iterdir() if p.is_file()] == ["key"]


def test_without_a_secret_nothing_is_lost(tmp_path, monkeypatch, counts):
    monkeypatch.setattr(row_signature, "_made", lambda path: None)  # a full disk
    path = tmp_path / "tuning.db"
    first = chosen(path)
    assert first.source == TUNED and sources(path) == [FOREIGN] and not (tmp_path / "tuning.db.key").exists()
    session.store().put_guard("f", {"chosen": "jcuts"})
    assert session.store().is_own("f")  # this process knows what it wrote
    counts.update(check=0, measure=0)
    assert chosen(path).source == CHECKED and counts["measure"] == 0


def test_where_no_process_can_check_the_row_stays_and_is_not_used(tmp_path, monkeypatch):
    path = tmp_path / "tuning.db"
    chosen(path)
    (tmp_path / "tuning.db.key").unlink()

    def full(*more):
        raise OSError("no space left")

    monkeypatch.setattr(parent_tuner, "make_job", full)
    monkeypatch.setattr(parent_tuner.stored_choice_check, "make_job", full)
    assert chosen(path).source == "" and sources(path) == [FOREIGN]


SCRIPT = """
import sys
import jax, numpy as np
import jcuts
x = np.random.default_rng(0).standard_normal((24, 40)).astype(np.float32)
f = jcuts.optimize(jax.nn.softmax, mode="fusion")
y = np.asarray(f(x))
wide = np.exp(x.astype(np.float64))
print("error", np.abs(y / (wide / wide.sum(-1, keepdims=True)) - 1).max() < 1e-5)
print(f.explain(x))
"""


def test_another_process_runs_what_is_right_and_says_where_it_comes_from(cache_dir, with_module_code):
    with_module_code(cache_dir)

    def run():
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run([sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, check=True)
        assert "error True" in done.stdout
        return done.stdout + done.stderr

    assert "choices of kernels: 1 tuned here" in run()
    path = cache_dir / "tuning.db"
    edit(path, lambda choice: relabelled(choice, lambda text: scaled(text, 1 + 1e-4)))
    found = run()
    assert "choices of kernels: 1 tuned here" in found and "was removed" in found
    (cache_dir / "tuning.db.key").unlink()
    assert "choices of kernels: 1 imported, checked here" in run()
    assert "choices of kernels: 1 imported, checked here" in run()
