"""Every JCUTS_* variable: defaults, parsing, nonsense, scopes."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from jcuts.base import knobs
from jcuts.base.errors import UsageError


def test_defaults():
    k = knobs.parse({})
    assert (k.dump, k.fuel, k.disable, k.native, k.threads) == (None, None, False, None, None)
    assert (k.log, k.seed) == ("warning", 0)
    assert k.cache_dir.name.startswith("jcuts")


def test_every_variable_is_parsed():
    k = knobs.parse(
        {
            "JCUTS_CACHE_DIR": "/a/b",
            "JCUTS_ARCH": " cpu.toml :H100:",
            "JCUTS_DUMP": "~/dump",
            "JCUTS_FUEL": "0",
            "JCUTS_DISABLE": "Yes",
            "JCUTS_NATIVE": "/lib.so",
            "JCUTS_THREADS": "3",
            "JCUTS_COMPILE_WORKERS": "2",
            "JCUTS_TUNE_TIMEOUT_S": "1.5",
            "JCUTS_TOP_PERCENT": "100",
            "JCUTS_MAX_CANDIDATES": "7",
            "JCUTS_CACHE_MAX_MB": "64",
            "JCUTS_LOG": "DEBUG",
            "JCUTS_SEED": "42",
        }
    )
    assert k == knobs.Knobs(
        cache_dir=Path("/a/b"),
        arch=("cpu.toml", "H100"),
        dump=Path("~/dump").expanduser(),
        fuel=0,
        disable=True,
        native=Path("/lib.so"),
        threads=3,
        compile_workers=2,
        tune_timeout_s=1.5,
        top_percent=100.0,
        max_candidates=7,
        cache_max_mb=64.0,
        log="debug",
        seed=42,
    )


def test_an_empty_variable_is_unset():
    assert knobs.parse({"JCUTS_FUEL": "", "JCUTS_DISABLE": "  "}) == knobs.parse({})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("JCUTS_FUEL", "-1"),
        ("JCUTS_FUEL", "many"),
        ("JCUTS_DISABLE", "maybe"),
        ("JCUTS_THREADS", "0"),
        ("JCUTS_TUNE_TIMEOUT_S", "0"),
        ("JCUTS_TUNE_TIMEOUT_S", "nan"),
        ("JCUTS_TOP_PERCENT", "101"),
        ("JCUTS_MAX_CANDIDATES", "2.5"),
        ("JCUTS_CACHE_MAX_MB", "inf"),
        ("JCUTS_LOG", "loud"),
        ("JCUTS_SEED", "x"),
    ],
)
def test_nonsense_names_the_variable_and_the_value(name, value):
    with pytest.raises(UsageError, match=name) as caught:
        knobs.parse({name: value})
    assert caught.value.variable == name  # type: ignore[attr-defined]
    assert caught.value.value == value  # type: ignore[attr-defined]


def test_current_follows_the_environment(monkeypatch):
    monkeypatch.setenv("JCUTS_FUEL", "5")
    assert knobs.current().fuel == 5
    monkeypatch.setenv("JCUTS_FUEL", "6")
    assert knobs.current().fuel == 6
    monkeypatch.delenv("JCUTS_FUEL")
    assert knobs.current().fuel is None


def test_cache_dir_follows_xdg(monkeypatch, tmp_path):
    monkeypatch.delenv("JCUTS_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert knobs.current().cache_dir == tmp_path / "jcuts"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/ignored")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert knobs.current().cache_dir == tmp_path / "home" / ".cache" / "jcuts"


def test_scopes_nest_and_end():
    with knobs.scope(fuel=1, threads=2):
        with knobs.scope(fuel=3) as inner:
            assert (inner.fuel, inner.threads) == (3, 2)
        assert knobs.current().fuel == 1
    assert knobs.current().fuel is None


def test_a_scope_ends_on_an_error_and_reaches_other_threads():
    seen = []
    with pytest.raises(RuntimeError), knobs.scope(fuel=9):
        worker = threading.Thread(target=lambda: seen.append(knobs.current().fuel))
        worker.start()
        worker.join()
        raise RuntimeError
    assert seen == [9]
    assert knobs.current().fuel is None


def test_an_unknown_knob_is_refused():
    with pytest.raises(UsageError, match="fule"), knobs.scope(fule=1):
        pass


def test_misspelt_variables_are_found():
    assert knobs.unknown_variables({"JCUTS_FUEL": "1", "JCUTS_FULE": "1", "PATH": ""}) == ["JCUTS_FULE"]


def test_describe_names_every_variable():
    rows = knobs.describe()
    assert {name for name, _, _ in rows} >= {"JCUTS_CACHE_DIR", "JCUTS_TOP_PERCENT", "JCUTS_SEED"}
    assert all(doc for _, _, doc in rows)
