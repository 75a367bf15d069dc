"""Fixtures of the tuner's tests."""

from __future__ import annotations

import pytest

from jcuts.base import knobs


@pytest.fixture
def private_places(tmp_path, monkeypatch):
    """A cache, a lock and temporary files of a test's own: nobody waits for other processes."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", None)
    with knobs.scope(cache_dir=tmp_path / "cache"):
        yield
    monkeypatch.setattr("tempfile.tempdir", None)
