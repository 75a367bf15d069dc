"""Measuring processes are forks of one that has imported JAX, numba and jcuts, which each would do for a second.

A process that the tests start to measure is else as it is for users: a child of this process with its own environment
and its own standard streams, whose main module is the measuring process's.  Tests of how a process is started and of
what it imports ask for `workers_from_scratch`; so are those of scripts, which run in processes of their own.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import inspect
import json
import os
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

_TEMPLATE = Path(__file__).with_name("fork_template.py")
_SUBREAPER = 36
"""``PR_SET_CHILD_SUBREAPER`` of prctl(2): orphans among the descendants become children."""
_OF_A_TEST = frozenset({"HOME", "TMPDIR", "PYTEST_CURRENT_TEST", "PYTEST_XDIST_TESTRUNUID"})
"""Variables that may differ between a template and its forks, as may all of jcuts': nothing reads them in an import."""
_ARGUMENTS = inspect.signature(subprocess.Popen._execute_child)
_PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
"""Arguments of that: the ends of the pipes of stdin, stdout and stderr."""
_PYTHON = sys.executable
_MODULE = "jcuts.tune.worker.main"
_lock = threading.Lock()
_templates: dict[frozenset[tuple[str, str]], socket.socket] = {}


def _takes_in_orphans(whether: bool) -> bool:
    try:
        return ctypes.CDLL(None).prctl(_SUBREAPER, int(whether), 0, 0, 0) == 0
    except (OSError, AttributeError):
        return False


def _template(env: Mapping[str, str]) -> socket.socket:
    """The socket of a process for this environment, which is started if there is none."""
    key = frozenset((k, v) for k, v in env.items() if k not in _OF_A_TEST and not k.startswith("JCUTS_"))
    if key not in _templates:
        mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its:
            process = subprocess.Popen(
                [sys.executable, "-P", str(_TEMPLATE), str(its.fileno())],
                env=dict(key) | {"JCUTS_CACHE_DIR": os.environ["JCUTS_CACHE_DIR"]},
                pass_fds=[its.fileno()],
                stdin=subprocess.DEVNULL,
            )
        _templates[key] = mine
        atexit.register(_end, mine, process)
    return _templates[key]


def _end(channel: socket.socket, process: subprocess.Popen) -> None:
    channel.close()
    process.wait()


class _Fork(subprocess.Popen):
    """A measuring process that a template made; a child of this process, as another is."""

    def _execute_child(self, *given: Any) -> None:
        asked = _ARGUMENTS.bind(self, *given).arguments
        env, pipes = asked["env"], [asked[name] for name in _PIPES]
        message = json.dumps({"env": dict(env), "cwd": os.getcwd()}).encode()
        with _lock:
            channel = _template(env)
            _takes_in_orphans(True)
            try:
                socket.send_fds(channel, [message], [pipes[0], pipes[3], pipes[5]])
                self.pid = int(channel.recv(32))
            finally:
                _takes_in_orphans(False)
        self._child_created = True
        self._close_pipe_fds(*pipes)


def _start(command: list[str], **options: Any) -> subprocess.Popen:
    usual = command == [_PYTHON, "-P", "-m", _MODULE] and options["env"].get("JAX_PLATFORMS") == "cpu"
    return (_Fork if usual and _forking else subprocess.Popen)(command, **options)


_forking = True


def pytest_collection_finish() -> None:
    if "jax" in sys.modules and sys.platform == "linux" and _takes_in_orphans(False):
        from jcuts.tune.parent import worker_pool

        stands_in = types.SimpleNamespace(**{name: getattr(subprocess, name) for name in subprocess.__all__})
        stands_in.Popen = _start
        worker_pool.subprocess = stands_in


@contextlib.contextmanager
def _from_scratch() -> Iterator[None]:
    global _forking
    _forking = False
    try:
        yield
    finally:
        _forking = True


@pytest.fixture
def workers_from_scratch():
    """Measuring processes start as they do for users."""
    with _from_scratch():
        yield
