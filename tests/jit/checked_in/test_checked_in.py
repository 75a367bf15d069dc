"""``require="complete"`` measures nothing and lists what is missing; pinned results stay in other versions."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import jcuts
from jcuts.api import Optimized
from jcuts.base import keys
from jcuts.base.errors import IncompleteTuning, UsageError
from jcuts.base.schedule_versions import ScheduleVersions
from jcuts.cli.main import main
from jcuts.tune import session
from jcuts.tune.parent import tuning_queue
from jcuts.tune.row_signature import CHECKED, CHECKED_IN

X = np.random.default_rng(0).standard_normal((256, 512)).astype(np.float32)
MODULE = """
import jax, numpy as np
def soft(x):
    return jax.nn.softmax(x * 3.0, axis=1)
one = (np.linspace(-1, 1, 256 * 512, dtype=np.float32).reshape(256, 512),)
two = (np.linspace(-1, 1, 128 * 512, dtype=np.float32).reshape(128, 512),)
"""


def soft(x):
    return jax.nn.softmax(x * 3.0, axis=1)


def made(mode="fusion", **options):
    return Optimized(soft, jcuts.optimize(soft, mode=mode, **options).settings, {})


@pytest.fixture(autouse=True)
def quick(tmp_path, with_module_code, monkeypatch):
    monkeypatch.setenv("JCUTS_CACHE_DIR", str(with_module_code(tmp_path / "cache")))
    monkeypatch.setenv("JCUTS_MAX_CANDIDATES", "2")
    session.set_store(None)
    yield
    session.set_store(None)


@pytest.fixture
def counts(monkeypatch):
    found = {"check": 0, "measure": 0}
    for name, method in (("check", "_check"), ("measure", "measure")):
        was = getattr(tuning_queue.TuningQueue, method)

        def counted(self, *more, name=name, was=was):
            found[name] += 1
            return was(self, *more)

        monkeypatch.setattr(tuning_queue.TuningQueue, method, counted)
    return found


def another_process(monkeypatch, tmp_path, *, cache=None, folders="", key=None):
    """The database as another process, perhaps on another machine of the same kind, finds it."""
    if cache is not None:
        monkeypatch.setenv("JCUTS_CACHE_DIR", str(tmp_path / cache))
    monkeypatch.setenv("JCUTS_DATABASES", str(folders))
    if key is not None:
        monkeypatch.setenv("JCUTS_DATABASE_KEY", str(key))
    session.set_store(None)


def test_nothing_is_known_and_nothing_is_measured(counts):
    with pytest.raises(IncompleteTuning, match=r"soft.*float32\[256,512\]") as caught:
        made(require="complete")(X)
    (region,) = caught.value.missing
    assert "not measured" in region and "test_checked_in.py" in region
    with pytest.raises(IncompleteTuning) as caught:
        made(mode="mixed", require="complete")(X)
    assert "whole programs" in caught.value.missing[0] and len(caught.value.missing) == 2
    assert counts == {"check": 0, "measure": 0}


def test_what_was_measured_is_followed(counts):
    expected = made()(X)
    counts.update(check=0, measure=0)
    f = made(require="complete")
    assert np.array_equal(f(X), expected)
    assert counts["measure"] == 0
    with pytest.raises(IncompleteTuning, match="128"):
        f(X[:128])
    assert np.array_equal(f(X), expected)


def test_inside_another_trace():
    f = made(require="complete")
    outer = jax.jit(lambda x: f(x) + 1)
    with pytest.raises(IncompleteTuning, match="soft"):
        outer(X)
    made()(X)
    f = made(require="complete")
    np.testing.assert_array_equal(jax.jit(lambda x: f(x) * 2)(X), 2 * f(X))
    with pytest.raises(IncompleteTuning):
        jax.jit(jax.grad(lambda x: f(x).sum()))(X)


@pytest.mark.parametrize("options", [{"tune": "off"}, {"tune": "online"}, {"tune": "serve"}, {"require": "most"}])
def test_impossible_options(options):
    with pytest.raises(UsageError, match="require"):
        jcuts.optimize(soft, **{"require": "complete", **options})


def test_it_is_no_part_of_any_key():
    one, other = jcuts.optimize(soft).settings, jcuts.optimize(soft, require="complete").settings
    assert repr(one) == repr(other) and one != other


@pytest.fixture
def checked_in(tmp_path, monkeypatch, capsys):
    """A folder that `jcuts tune` has written, signed, and the key."""
    (tmp_path / "tuned_here.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    key = tmp_path / "key"
    key.write_bytes(b"a key of the team")
    command = ["tune", "tuned_here:soft", "--args", "tuned_here:one", "--mode", "fusion"]
    assert main([*command, "--check"]) == 1
    assert "not completely tuned" in capsys.readouterr().out
    assert main([*command, "--out", str(tmp_path / "db"), "--key", str(key)]) == 0
    assert "files written to" in capsys.readouterr().out
    assert main([*command, "--out", str(tmp_path / "db"), "--key", str(key)]) == 0
    assert "0 files written" in capsys.readouterr().out
    return tmp_path / "db", key, command


def test_a_signed_folder_is_complete_on_another_machine(checked_in, tmp_path, monkeypatch, counts, capsys):
    folder, key, command = checked_in
    counts.update(check=0, measure=0)
    another_process(monkeypatch, tmp_path, cache="elsewhere", folders=folder, key=key)
    assert main([*command, "--check"]) == 0
    assert "complete for 1 signatures" in capsys.readouterr().out
    f = made(require="complete")
    f(X)
    assert {s.source for s in f.explain(X).subsets if s.chosen != "xla"} == {CHECKED_IN}
    assert counts == {"check": 0, "measure": 0}


def test_an_unsigned_folder_is_checked_by_a_call_that_may(checked_in, tmp_path, monkeypatch, counts):
    folder, _, _ = checked_in
    another_process(monkeypatch, tmp_path, cache="elsewhere", folders=folder)
    with pytest.raises(IncompleteTuning, match="not checked here"):
        made(require="complete")(X)
    counts.update(check=0, measure=0)
    f = made()
    f(X)
    assert counts["measure"] == 0 and counts["check"] > 0
    assert {s.source for s in f.explain(X).subsets if s.chosen != "xla"} == {CHECKED}
    made(require="complete")(X)  # it is known now


def test_pinned_results_outlive_other_schedules(checked_in, tmp_path, monkeypatch, counts):
    folder, key, command = checked_in
    main([*command, "--out", str(folder), "--key", str(key), "--pin"])
    before = made()(X)
    another_process(monkeypatch, tmp_path, cache="elsewhere", folders=folder, key=key)
    was = ScheduleVersions.family
    monkeypatch.setattr(ScheduleVersions, "family", lambda self, name: "of an upgrade")
    counts.update(check=0, measure=0)
    f = made()
    assert np.array_equal(f(X), before)
    assert counts["measure"] == 0 and counts["check"] > 0
    monkeypatch.setattr(ScheduleVersions, "family", was)


def test_a_pinned_decision_outlives_other_packages(monkeypatch, counts, capsys):
    monkeypatch.setenv("COLUMNS", "300")
    f = made(mode="mixed")
    f(X)
    decided = f.decision(X)
    assert f.pin(X) >= 1
    monkeypatch.setattr(keys, "packages", lambda: "of an upgrade")
    session.set_store(None)
    again = made(mode="mixed")
    again(X)
    assert again.decision(X).pinned and again.decision(X).chosen == decided.chosen
    assert again.decision(X).reason.endswith("; pinned")
    assert main(["cache", "ls"]) == 0
    assert "guard, pinned" in capsys.readouterr().out
    assert again.pin(X, pinned=False) >= 1
    session.set_store(None)
    assert not made(mode="mixed").explain(X).guard.get("pinned", False)


def test_nothing_to_pin():
    with pytest.raises(UsageError, match="not tuned for these arguments"):
        made(mode="mixed").pin(X)


def test_a_key_without_a_folder_and_a_folder_that_is_none(tmp_path, capsys, monkeypatch):
    (tmp_path / "tuned_there.py").write_text(MODULE)
    (tmp_path / "key").write_bytes(b"a key of the team")
    monkeypatch.syspath_prepend(str(tmp_path))
    command = ["tune", "tuned_there:soft", "--args", "tuned_there:one"]
    assert main([*command, "--key", str(tmp_path / "key")]) == 2
    assert "name their folder" in capsys.readouterr().err
    assert main([*command, "--out", str(tmp_path / "key" / "db")]) == 2
    assert "cannot write to" in capsys.readouterr().err
