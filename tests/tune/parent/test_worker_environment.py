"""Environment of the measuring processes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from jcuts.tune.parent.worker_environment import environment

THREADS = """
import os
import numpy as np

np.ones((256, 256)) @ np.ones((256, 256))
print(len(os.listdir("/proc/self/task")))
"""


def test_user_settings_that_change_measurements_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_DEBUG_NANS", "1")
    monkeypatch.setenv("JCUTS_TEST_KEPT", "kept")
    found = environment("cpu")
    assert "JAX_DEBUG_NANS" not in found
    assert found["JCUTS_TEST_KEPT"] == "kept"
    assert found["JAX_PLATFORMS"] == "cpu"


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="counts threads as Linux lists them")
def test_numpy_products_run_on_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "4")
    found = subprocess.run(
        [sys.executable, "-c", THREADS], env=environment("cpu"), capture_output=True, text=True, check=True
    )
    assert int(found.stdout) == 1
