"""The CUDA launcher without a GPU: a driver that records calls, a missing driver, and the fallback to XLA."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from jcuts.base.errors import NativeError
from jcuts.base.settings import Settings
from jcuts.codegen.artifact import CompiledKernel
from jcuts.codegen.cuda.toolchain.image import SYMBOL, Image, Launch
from jcuts.pipeline import passes as pipeline_passes
from jcuts.xla import cuda_launcher
from jcuts.xla.devices import Gpu

ROOT = Path(__file__).resolve().parents[2]
AVAL = ((64,), "float32")

SCRIPT = """
import ctypes, json, sys
from tests.xla.test_cuda_launcher import kernel
from jcuts.base.errors import NativeError
from jcuts.xla import cuda_launcher as cuda

fake = ctypes.CDLL(sys.argv[1])
fake.fake_log.restype = ctypes.c_char_p
lib = cuda.load()
found = {"set": lib.jcuts_cuda_set_driver(sys.argv[1].encode()), "available": cuda.available()}
found["late"] = lib.jcuts_cuda_set_driver(b"libcuda.so.1")

def launch(k, device=0):
    fake.fake_clear()
    try:
        cuda.launch(k, device, 7, [0x1000, 0x2000], 0x3000)
        error = ""
    except NativeError as failure:
        error = failure.message
    return [fake.fake_log().decode().split(";")[:-1], error]

if not found["available"]:
    found["first"] = launch(kernel("a"))
    found["again"] = launch(kernel("a"))
    found["second device"] = launch(kernel("a"), 1)
    found["far device"] = launch(kernel("a"), 99)
    found["large"] = launch(kernel("b", shared=100_000, cluster=(16, 1, 1), cooperative=True))
    found["small"] = launch(kernel("d", shared=30_000))
    found["early"] = launch(kernel("c", waits=True, second={"waits": True}))
    for name in ("cuLibraryLoadData", "cuLibraryGetKernel", "cuLaunchKernelEx"):
        fake.fake_fail(name.encode())
        found[name] = launch(kernel("fails " + name))
    fake.fake_fail(b"")
    found["afterwards"] = launch(kernel("fails cuLibraryLoadData"))
    fake.fake_clear()
    cuda.forget("a")
    found["forgotten"] = fake.fake_log().decode()
print(json.dumps(found))
"""


def kernel(digest: str, second=None, **launch) -> CompiledKernel:
    """Two launches; the second reads what the first left in scratch memory."""
    launches = (
        Launch("first", (8, 1, 1), (128, 1, 1), ((0, 0), (-1, 256), (1, 0)), **launch),
        Launch("second", (1, 1, 1), (32, 1, 1), ((-1, 256), (1, 0), (0, 0)), **(second or {})),
    )
    image = Image("sm_90", "softmax", launches, b"cubin of " + digest.encode() + b"\0")
    return CompiledKernel(digest, SYMBOL, image.pack(), 9, 512, (AVAL,), (AVAL,))


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler for the recording driver")
    path = tmp_path_factory.mktemp("driver") / "libfake.so"
    source = Path(__file__).with_name("fake_cuda.cc")
    subprocess.run([compiler, "-std=c++17", "-shared", "-fPIC", str(source), "-o", str(path)], check=True)
    return path


def run(driver: Path, **more: str) -> dict:
    env = {**os.environ, "PYTHONPATH": str(ROOT), **more}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(driver)], capture_output=True, text=True, env=env, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_launcher_drives_a_driver(driver):
    found = run(driver)
    assert (found["set"], found["available"], found["late"]) == (0, "", 1)
    calls, error = found["first"]
    assert error == ""
    assert calls == [
        "cuLibraryLoadData cubin of a",
        "cuLibraryGetKernel first",
        "cuKernelGetFunction",
        "cuLibraryGetKernel second",
        "cuKernelGetFunction",
        "cuLaunchKernelEx first grid 8 block 128 shared 0 attributes 0: 1000 3100 2000",
        "cuLaunchKernelEx second grid 1 block 32 shared 0 attributes 0: 3100 2000 1000",
    ]
    assert [c.split()[0] for c in found["again"][0]] == ["cuLaunchKernelEx"] * 2  # the hit path loads nothing
    on_second = [c.split()[0] for c in found["second device"][0]]
    assert "cuLibraryLoadData" not in on_second and on_second.count("cuKernelGetFunction") == 2
    assert "out of range" in found["far device"][1]
    large, error = found["large"]
    assert "cuKernelSetAttribute 8=100000 on 0" in large and "cuKernelSetAttribute 14=1 on 0" in large
    assert any("shared 100000 attributes 2" in c for c in large)
    assert "cuKernelSetAttribute 8=30000 on 0" in found["small"][0]  # static memory counts, too: 48 KiB without it


def test_only_a_kernel_that_waits_may_start_early_and_never_the_first(driver):
    calls, error = run(driver)["early"]
    assert error == "" and [c.split(" attributes ")[1][0] for c in calls[-2:]] == ["0", "1"]
    calls, _ = run(driver, FAKE_DRIVER_VERSION="12020")["early"]
    assert [c.split(" attributes ")[1][0] for c in calls[-2:]] == ["0", "0"]  # graphs do not know it yet


def test_driver_errors_name_the_kernel_and_the_region(driver):
    found = run(driver)
    for name, what in (
        ("cuLibraryLoadData", "loading the cubin"),
        ("cuLibraryGetKernel", "preparing first"),
        ("cuLaunchKernelEx", "launching first"),
    ):
        text = found[name][1]
        assert f"fails {name}" in text and "(softmax)" in text and what in text, text
        assert "CUDA_ERROR_ILLEGAL_ADDRESS (700)" in text
    assert found["afterwards"][1] == ""  # a failed load is tried again
    assert found["forgotten"] == "cuLibraryUnload;"


def test_a_driver_without_a_device(driver):
    assert "CUDA_ERROR_NO_DEVICE" in run(driver, FAKE_NO_DEVICE="1")["available"]


def test_a_missing_driver_is_a_reason():
    code = (
        "from jcuts.xla import cuda_launcher as cuda; cuda.load().jcuts_cuda_set_driver(b'libno-such-cuda.so'); "
        "print(cuda.available())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert "cannot be opened" in done.stdout and "libno-such-cuda.so" in done.stdout


@pytest.mark.parametrize("platform", ["cuda", "gpu"])
def test_without_a_gpu_functions_are_left_to_xla(platform):
    if any(d.platform == "gpu" for d in jax.devices()):
        pytest.skip("there is a GPU")
    closed = jax.make_jaxpr(jax.nn.softmax)(np.zeros((64, 64), np.float32))
    outcome = pipeline_passes.optimize_jaxpr(closed, Settings(tune="off"), platform=platform, may_measure=False)
    assert outcome.closed is closed
    (note,) = outcome.report.notes
    assert note.startswith("left to XLA:") and "cuda" in note


def test_an_object_file_is_no_image():
    wrong = CompiledKernel("elf", "kernel", b"\x7fELF", 1, 0, (AVAL,), (AVAL,))
    with pytest.raises(NativeError, match="elf: not a CUDA kernel image"):
        cuda_launcher.add_kernel(wrong, persist=False)


def test_a_gpu_names_its_times():
    assert Gpu("NVIDIA H200", (9, 0), 132).identity() == "cuda NVIDIA H200 9.0 x132"


def test_a_launcher_of_an_older_version_is_refused(monkeypatch):
    class Older:
        def __getattr__(self, name):
            if name == cuda_launcher.KEEP:
                raise AttributeError(f"undefined symbol: {name}")
            return lambda: 0

    monkeypatch.setattr(cuda_launcher.ctypes, "CDLL", lambda _: Older())
    with pytest.raises(NativeError, match=r"jcuts_keep. Rebuild it with `make native`"):
        cuda_launcher.load.__wrapped__()
