"""A cuDNN that computes in host memory, for every test that needs one: built once, opened once per process."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from jcuts.base import knobs

SOURCE = Path(__file__).parent / "xla" / "fake_cudnn.cc"


@pytest.fixture(scope="session")
def host_cudnn_path(tmp_path_factory):
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler for the cuDNN of the tests")
    path = tmp_path_factory.mktemp("cudnn") / "libhost_cudnn.so"
    command = [compiler, "-std=c++17", "-O1", "-Wall", "-shared", "-fPIC", str(SOURCE), "-o", str(path)]
    subprocess.run(command, check=True)
    return path


@pytest.fixture
def host_cudnn(host_cudnn_path):
    """The library, in use: `calls` empties and gives its record."""
    with knobs.scope(cudnn=host_cudnn_path):
        fake = HostCudnn(host_cudnn_path)
        fake.fail("")
        fake.calls()
        yield fake
        fake.fail("")


class HostCudnn:
    """What a test sees of it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lib = ctypes.CDLL(str(path))
        self.lib.fake_log.restype = ctypes.c_char_p

    def calls(self) -> list[str]:
        """What was called since the last time."""
        text = self.lib.fake_log().decode()
        self.lib.fake_clear()
        return [call for call in text.split(";") if call]

    def fail(self, name: str) -> None:
        """From now on this function fails ('': none)."""
        self.lib.fake_fail(name.encode())

    def alive(self) -> int:
        """Descriptors that were made and not destroyed."""
        return int(self.lib.fake_alive())
