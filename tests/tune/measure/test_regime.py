"""Tuning regimes: what is as usual, rows of several regimes side by side, and which of them are measured again."""

from __future__ import annotations

import dataclasses
import json

import jax
import numpy as np
import pytest

from jcuts.base import keys, knobs
from jcuts.base.settings import Settings
from jcuts.pipeline.passes import optimize_jaxpr
from jcuts.tune import device_slices, session, time_budget
from jcuts.tune.choice import LIBRARY, Choice, Measurement
from jcuts.tune.database import Store
from jcuts.tune.measure import regime
from jcuts.tune.measure.cpu_timing import Eviction
from jcuts.tune.measure.statistics import MOST_MARGIN
from jcuts.tune.parent.remeasure import is_measured_anew, is_noisy
from tests.tune.test_old_database import counts  # noqa: F401

X = np.random.default_rng(0).standard_normal((24, 40)).astype(np.float32)
FUSION = Settings(mode="fusion")
COLD = {regime.CACHES: regime.COLD}
BESIDE = {regime.BESIDE: regime.CALLS}


class Beside(device_slices.OpenDevice):
    """Calls of the user's go on."""

    beside = True


def measured(problem="p", margin=0.01, seconds=(1.0, 0.5), **more):
    times = tuple(Measurement(label, s, s, s, 9, "loop") for label, s in zip((LIBRARY, "k"), seconds, strict=True))
    more = {"schedules": keys.schedules("cpu", "map"), **more}
    return Choice(problem, LIBRARY, "", "measured", times, margin=margin, **more)


def store_of(path) -> Store:
    return Store(path, device="here", versions="python 3.11")


def test_the_usual_regime_is_left_out(monkeypatch):
    monkeypatch.setattr(regime, "share_of_cores", lambda: "")
    monkeypatch.setattr(regime, "power_cap", lambda: "")
    assert regime.now("cpu") == regime.now("cuda") == {}
    assert regime.key_text({}) == ""
    assert (regime.described({}, "cpu"), regime.described({}, "cuda")) == ("warm caches, alone", "cold caches, alone")
    with knobs.scope(tune_caches="cold"), device_slices.using(Beside()):
        assert regime.now("cpu") == COLD | BESIDE
        assert regime.now("cuda") == BESIDE
    assert "regime" not in measured().to_json()
    assert keys.row_versions("p", {}) == keys.row_versions("p", {}, "") == "p"


def test_what_limits_the_machine_is_part_of_it(tmp_path, monkeypatch):
    group = tmp_path / "cpu.max"
    monkeypatch.setattr(regime.fingerprint, "usable_cores", lambda: 2)
    for text, told in (("150000 100000", "1.5 of 2"), ("200000 100000", ""), ("max 100000", ""), ("1 0", "")):
        group.write_text(text)
        assert regime.share_of_cores(group) == told
    assert regime.share_of_cores(tmp_path / "none") == ""
    monkeypatch.setattr(regime, "power_cap", lambda: "450 of 700 W")
    monkeypatch.setattr(regime, "share_of_cores", lambda: "1.5 of 2")
    assert regime.key_text(regime.now("cuda")) == "power 450 of 700 W"
    assert regime.key_text(regime.now("cpu")) == "cores 1.5 of 2"
    assert regime.described(regime.now("cuda"), "cuda") == "cold caches, alone, power 450 of 700 W"


@pytest.mark.parametrize(("limit", "fails", "told"), [(450_000, 0, "450 of 700 W"), (700_000, 0, ""), (450_000, 1, "")])
def test_a_power_cap_is_read_from_nvml(limit, fails, told):
    class Library:
        """The functions of NVML that are called, with pointers made by ``ctypes.byref``."""

        closed = False

        def nvmlInit_v2(self):
            return 0

        def nvmlDeviceGetHandleByIndex_v2(self, index, device):
            return 0

        def nvmlDeviceGetPowerManagementLimit(self, device, found):
            found._obj.value = limit
            return fails

        def nvmlDeviceGetPowerManagementDefaultLimit(self, device, found):
            found._obj.value = 700_000
            return 0

        def nvmlShutdown(self):
            self.closed = True

    library = Library()
    assert regime.cap_of(library) == told
    assert library.closed


def test_rows_of_several_regimes_stay_side_by_side(tmp_path):
    store = store_of(tmp_path / "tuning.db")
    for how in ({}, COLD, BESIDE):
        store.put(measured(name=str(how), regime=how))
    assert len(store.ls()) == 3
    assert len(store.ls(all_devices=False)) == 3
    again = store_of(tmp_path / "tuning.db")
    assert again.lookup("p").regime == {}
    with knobs.scope(tune_caches="cold"):
        assert again.lookup("p").regime == COLD
    with device_slices.using(Beside()):
        assert again.lookup("p").regime == {}  # better than what was measured between calls
    (row,) = (row for row in again.ls() if row.value.get("regime") == COLD)
    assert row.versions.endswith("; regime caches cold")
    assert Choice.from_json(json.loads(json.dumps(row.value))).regime == COLD


def test_a_row_of_another_regime_counts_until_somebody_measures(tmp_path):
    store = store_of(tmp_path / "tuning.db")
    store.put(measured(regime=BESIDE))
    choice = store.lookup("p")
    assert choice.regime == BESIDE  # in first calls, and where nothing may be measured
    problem = type("P", (), {"platform": "cpu"})
    assert not is_measured_anew(choice, problem, again=False)
    assert is_measured_anew(choice, problem, again=True)
    with knobs.scope(tune_caches="cold"):
        assert is_measured_anew(choice, problem, again=False)  # asked for


def test_what_was_chosen_on_a_busy_machine_is_measured_again_in_tuning_only():
    problem = type("P", (), {"platform": "cpu"})
    busy = measured(margin=MOST_MARGIN, seconds=(1.0, 1.05))
    assert is_noisy(busy)
    assert not is_noisy(measured(margin=MOST_MARGIN, seconds=(1.0, 1.5)))  # clear all the same
    assert not is_noisy(measured(margin=0.02, seconds=(1.0, 1.01)))
    assert is_measured_anew(busy, problem, again=True)
    assert not is_measured_anew(busy, problem, again=False)


def test_a_session_that_was_asked_for_measures_other_regimes_anew(cache_dir, counts, monkeypatch):  # noqa: F811
    cache_dir.mkdir()
    monkeypatch.setenv("JCUTS_MAX_CANDIDATES", "2")
    monkeypatch.setattr(session, "_store", store_of(cache_dir / "tuning.db"))
    closed = jax.make_jaxpr(lambda x: jax.nn.softmax(x * 2))(X)

    def planned():
        return optimize_jaxpr(closed, FUSION, platform="cpu", may_measure=True).report

    with knobs.scope(tune_caches="cold"):
        report = planned()
        assert report.subsets[0].regime.startswith("cold caches")
        assert "measured: 1 with cold caches" in str(report)
        (row,) = (row for row in session.store().ls() if row.kind == "choice")
        assert {m["method"] for m in row.value["measurements"]} == {"cold call"}
        assert counts["measure"] == 1
        planned()
        assert counts["measure"] == 1
    assert planned().subsets[0].regime.startswith("warm caches")  # asked for: measured anew
    assert counts["measure"] == 2
    choices = [Choice.from_json(row.value) for row in session.store().ls() if row.kind == "choice"]
    assert [choice.regime.get(regime.CACHES, "") for choice in choices] == [regime.COLD, ""]
    session.store().drop(choices[0].problem)
    session.store().put(dataclasses.replace(choices[1], regime=BESIDE))
    assert planned().subsets[0].regime == "warm caches, between calls"  # good enough
    budget = time_budget.TimeBudget()
    budget.again = True
    with time_budget.spending(budget):  # as in `.tune()`
        assert planned().subsets[0].regime.startswith("warm caches, alone")
    assert counts["measure"] == 3


def test_eviction_touches_more_than_the_caches_hold():
    evict = Eviction(1 << 16)
    evict()
    assert evict._words.nbytes >= 1 << 16
    assert (evict._words == 1).all()
