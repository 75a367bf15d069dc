"""One function on two GPUs, alone and on a mesh (``-m gpu``; needs two): `gpu_checks/multi_gpu.py` in a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from jcuts.xla import devices as xla_devices

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).resolve().parents[2]
NAMES = ("one_by_one", "on_a_mesh", "in_shard_map", "gradient_on_a_mesh", "from_threads", "replayed_on_each")


@pytest.fixture(scope="module")
def checks(tmp_path_factory):
    why = xla_devices.unusable()
    if why:
        pytest.skip(why)
    if len(jax.local_devices(backend="cuda")) < 2:
        pytest.skip("one GPU")
    out = tmp_path_factory.mktemp("mesh")
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "JCUTS_CACHE_DIR": str(out / "cache")}
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu_checks" / "multi_gpu.py"), "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, check=False)
    assert (out / "gpu_mesh.json").exists(), done.stdout[-2000:] + done.stderr[-2000:]
    return json.loads((out / "gpu_mesh.json").read_text())["checks"]


@pytest.mark.parametrize("name", NAMES)
def test_check(checks, name):
    assert checks[name]["ok"], checks[name]
