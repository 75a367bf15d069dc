"""What every test shares: a cache directory of its own, never the user's."""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings

# The same examples in every run: a failure is reproducible, and a run cannot fail by luck.  Explore new ones with
# `pytest --hypothesis-profile=explore`.
settings.register_profile("repeatable", derandomize=True, deadline=None, print_blob=True)
settings.register_profile("explore", deadline=None, print_blob=True)
settings.load_profile("repeatable")

COLLECTED_AFTER = 50_000, 10, 10
"""Thresholds of Python's collector, most of whose work in a run finds nothing."""

pytest_plugins = (
    "tests.compiled_files",
    "tests.forked_workers",
    "tests.golden_files",
    "tests.host_cudnn",
    "tests.ptx.compile_once",
    "tests.quick_xla",
)


def pytest_configure(config: pytest.Config) -> None:
    gc.set_threshold(*COLLECTED_AFTER)
    # Before any test module is imported, and through the environment so that child processes see it too.
    for name in [name for name in os.environ if name.startswith("JCUTS_") and name != "JCUTS_NATIVE"]:
        del os.environ[name]
    os.environ["KERAS_BACKEND"] = "jax"
    folder = tempfile.mkdtemp(prefix="jcuts-tests-")
    os.environ["JCUTS_CACHE_DIR"] = folder
    os.environ["JCUTS_RAISE_ERRORS"] = "1"  # nothing that fails in jcuts itself may pass as XLA's
    os.environ["JCUTS_VERIFY"] = "1"
    os.environ["JCUTS_TUNE_SECONDS"] = "inf"  # how busy the machine is must not decide what is measured
    os.environ["JCUTS_SHIPPED"] = "0"  # what was measured before a release must not decide what is measured
    os.environ["JCUTS_COMPILE_WORKERS"] = "1"  # few kernels are tuned at a time: a second process costs more to start
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


def pytest_collection_finish() -> None:
    # The modules and tests of a session live as long as it: no collection goes through them again.
    gc.collect()
    gc.freeze()


@pytest.fixture
def cache_dir(tmp_path, monkeypatch):
    """An empty cache directory for one test."""
    path = tmp_path / "cache"
    monkeypatch.setenv("JCUTS_CACHE_DIR", str(path))
    return path


@pytest.fixture
def with_module_code():
    """Gives a cache directory the hashes of jcuts' modules, which a process with an empty one takes seconds to make."""
    from jcuts.base import schedule_versions

    versions = schedule_versions.here()
    versions.packages(schedule_versions.PROGRAM), versions.family("cpu")
    known = versions.files.cache

    def seeded(folder: Path) -> Path:
        folder.mkdir(exist_ok=True)
        if known is not None and known.exists():
            shutil.copy(known, folder)
        return folder

    return seeded


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
