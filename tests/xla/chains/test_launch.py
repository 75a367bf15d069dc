"""The launcher's chains without a GPU: where kernels find their buffers, which start early, what is refused."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from tests.xla.test_cuda_launcher import ROOT, driver  # noqa: F401  (a fixture)

SCRIPT = """
import ctypes, json, pathlib, sys
from tests.xla.test_cuda_launcher import kernel
from jcuts.xla import cuda_launcher as cuda, native_library as native

native.library_path = lambda name: pathlib.Path(sys.argv[2])
fake = ctypes.CDLL(sys.argv[1])
fake.fake_log.restype = ctypes.c_char_p
lib = cuda.load()
assert lib.jcuts_cuda_set_driver(sys.argv[1].encode()) == 0
early = {"waits": True, "second": {"waits": True}}
for made in (kernel("a", **early), kernel("b", **early), kernel("c")):
    cuda.add_kernel(made, persist=False)

def chain(digests, wiring, scratch, operands, results):
    fake.fake_clear()
    text = ctypes.create_string_buffer(300)
    numbers = (ctypes.c_int64 * len(wiring))(*wiring)
    given = [(ctypes.c_void_p * len(x))(*x) for x in (operands, results)]
    lib.host_chain(digests.encode(), numbers, ctypes.c_int64(len(wiring)), ctypes.c_int64(scratch),
                   given[0], ctypes.c_int64(len(operands)), given[1], ctypes.c_int64(len(results)),
                   text, ctypes.c_int64(300))
    calls = fake.fake_log().decode().split(";")[:-1]
    return [[c.split("attributes ")[1] for c in calls if "LaunchKernelEx" in c], text.value.decode()]

first, second = [2, 1024, 0, 0, 0, 2, 0, 512], [2, 1024, 2, 0, 512, 1, 0, 16]
both = [2048, [0x1000], [0x2000, 0x8000]]
found = {
    "two": chain("a b ", first + second, *both),
    "late": chain("a c b ", first + second + second, *both),
    "without scratch": chain("a ", [2, 0, 0, 0, 0, 1, 0, 0], 0, [0x1000], [0x2000]),
    "bad": [chain(digests, wiring, *rest) for digests, wiring, rest in (
        ("", [], both), ("a b", first + second, both), ("a b ", first, both), ("a ", first + [0], both),
        ("a ", [2, 4096, *first[2:]], both), ("a ", [0, 0], both), ("a ", [300, 0, *[0] * 900], both),
        ("a ", [2, 0, 3, 0, 0, 0, 0, 0], both), ("a ", [2, 0, 0, -1, 0, 0, 0, 0], both),
        ("a ", [2, 0, 2, 0, 4096, 0, 0, 0], both), ("a ", [2, 0, 0, 1, 0, 1, 0, 0], both),
        ("a ", [2, 0, 0, 0, 0, 1, 1, 0], both), ("a ", [1, 0, 0, 0, 0], both), ("none ", first, both),
    )],
}
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(driver, tmp_path_factory):  # noqa: F811
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    assert compiler is not None  # the driver was built
    path = tmp_path_factory.mktemp("chain") / "libhost.so"
    source = Path(__file__).parents[1] / "chain_host.cc"
    options = ["-std=c++17", "-shared", "-fPIC", "-pthread", "-isystem", jax.ffi.include_dir()]
    subprocess.run([compiler, *options, str(source), "-o", str(path), "-ldl"], check=True)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(driver), str(path)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_kernels_of_a_chain_find_their_buffers(found):
    calls, error = found["two"]
    assert error == ""
    assert calls == ["0: 1000 8500 8200", "1: 8500 8200 1000", "1: 8200 8500 2010", "1: 8500 2010 8200"]
    calls, error = found["without scratch"]
    assert error == "" and [c.split()[1:] for c in calls] == [["1000", "100", "2000"], ["100", "2000", "1000"]]


def test_only_kernels_that_wait_start_early(found):
    calls, error = found["late"]
    assert error == "" and [c[0] for c in calls] == ["0", "1", "0", "0", "1", "1"]


def test_damaged_wiring_is_refused(found):
    for calls, error in found["bad"]:
        assert error and len(calls) <= 1
