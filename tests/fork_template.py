"""A process that has imported what measuring processes import, and becomes one as often as it is asked to.

``python -P tests/fork_template.py DESCRIPTOR``: a message on that socket is JSON (``env``, ``cwd``), with the standard
streams of the new process; the answer is its number.  No thread of XLA's runs here: no backend is ever started.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import socket
import sys
import tempfile
from typing import Any

_IMPORTED = (
    "jax",
    "jax.export",
    "jax.numpy",
    "jcuts.codegen.cpu.compile",
    "jcuts.tune.measure.cpu_timing",
    "jcuts.tune.verify.reference",
    "jcuts.tune.worker.parent_slices",
    "jcuts.tune.worker.requests",
    "jcuts.xla.object_cache",
)
_MODULE = "jcuts.tune.worker.main"
_MOST = 1 << 20
"""Bytes of a message, at most."""


def serve(channel: socket.socket) -> None:
    """Makes processes until the socket's other end is closed."""
    for name in _IMPORTED:
        importlib.import_module(name)
    _prepare()
    assert tempfile.tempdir is None
    gc.collect()
    gc.freeze()
    while True:
        message, streams, _, _ = socket.recv_fds(channel, _MOST, 3)
        if not message:
            return
        number = _orphan(channel, json.loads(message), streams)
        for stream in streams:
            os.close(stream)
        channel.send(str(number).encode())


def _prepare() -> None:
    """Does what a process's first kernel takes time for (jcuts' modules are read, numba's tables are made).

    Its forks read what the tests have compiled before.
    """
    import numba

    from jcuts.base import schedule_versions
    from tests import compiled_files, quick_xla

    schedule_versions.here().emitter("cpu")
    numba.cfunc("int64(int64)")(lambda number: number)
    compiled_files.memoise_kernels()
    quick_xla.memoise()


def _orphan(channel: socket.socket, asked: dict[str, Any], streams: list[int]) -> int:
    """Makes a process whose parent ends at once: the next ancestor that takes in orphans becomes its parent."""
    told, tell = os.pipe()
    wait, go = os.pipe()
    between = os.fork()
    if between == 0:
        number = os.fork()
        if number == 0:
            for descriptor in (told, tell, go):
                os.close(descriptor)
            os.read(wait, 1)
            os.close(wait)
            channel.close()
            _become(asked, streams)
        os.write(tell, str(number).encode())
        os._exit(0)
    os.close(tell)
    number = int(os.read(told, 32))
    os.waitpid(between, 0)  # now the process is an orphan
    os.write(go, b"g")
    for descriptor in (told, wait, go):
        os.close(descriptor)
    return number


def _become(asked: dict[str, Any], streams: list[int]) -> None:
    """Runs the measuring process's module as `python -m` does, and ends."""
    for stream, descriptor in enumerate(streams):
        os.dup2(descriptor, stream)
        os.close(descriptor)
    status = 1
    try:
        os.environ.clear()
        os.environ.update(asked["env"])
        os.chdir(asked["cwd"])
        runpy.run_module(_MODULE, run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(status)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
