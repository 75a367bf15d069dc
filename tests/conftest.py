"""What every test shares: a cache directory of its own, never the user's."""

from __future__ import annotations

import os
import shutil
import tempfile

import pytest
from hypothesis import settings

# The same examples in every run: a failure is reproducible, and a run cannot fail by luck.  Explore new ones with
# `pytest --hypothesis-profile=explore`.
settings.register_profile("repeatable", derandomize=True, deadline=None, print_blob=True)
settings.register_profile("explore", deadline=None, print_blob=True)
settings.load_profile("repeatable")

pytest_plugins = ("tests.golden_files", "tests.host_cudnn", "tests.ptx.compile_once", "tests.quick_xla")


def pytest_configure(config: pytest.Config) -> None:
    # Before any test module is imported, and through the environment so that child processes see it too.
    for name in [name for name in os.environ if name.startswith("JCUTS_") and name != "JCUTS_NATIVE"]:
        del os.environ[name]
    os.environ["KERAS_BACKEND"] = "jax"
    folder = tempfile.mkdtemp(prefix="jcuts-tests-")
    os.environ["JCUTS_CACHE_DIR"] = folder
    os.environ["JCUTS_RAISE_ERRORS"] = "1"  # nothing that fails in jcuts itself may pass as XLA's
    os.environ["JCUTS_VERIFY"] = "1"
    os.environ["JCUTS_TUNE_SECONDS"] = "inf"  # how busy the machine is must not decide what is measured
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


@pytest.fixture
def cache_dir(tmp_path, monkeypatch):
    """An empty cache directory for one test."""
    path = tmp_path / "cache"
    monkeypatch.setenv("JCUTS_CACHE_DIR", str(path))
    return path


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    compiled = [item for item in items if item.get_closest_marker("cuda_compilers") is not None]
    if compiled:
        from jcuts.codegen.cuda import compile as compiler

        why = compiler.available()
        for item in compiled if why else ():
            item.add_marker(pytest.mark.skip(reason=why))
    # Marked slow or gpu: left out unless a -m expression speaks of them, or one test is asked for by name.
    if any("::" in arg for arg in config.args):
        return
    for name in ("slow", "gpu"):
        if name in config.getoption("-m"):
            continue
        for item in items:
            if item.get_closest_marker(name) is not None:
                item.add_marker(pytest.mark.skip(reason=f"{name}: run with -m {name}"))
