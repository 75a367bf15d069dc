"""Automatic collections stop inside, and go on after the last one has left."""

from __future__ import annotations

import gc

import pytest

from jcuts.base import collector


@pytest.fixture(autouse=True)
def _as_it_was():
    was = gc.isenabled()
    yield
    (gc.enable if was else gc.disable)()


def test_nested_pauses():
    gc.enable()
    with collector.paused():
        with collector.paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_an_error_ends_the_pause():
    gc.enable()
    with pytest.raises(ValueError, match="inside"), collector.paused():
        raise ValueError("inside")
    assert gc.isenabled()


def test_a_collector_that_is_off_stays_off():
    gc.disable()
    with collector.paused():
        assert not gc.isenabled()
    assert not gc.isenabled()
