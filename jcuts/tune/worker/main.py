"""Main loop of the measuring process (``python -P -m jcuts.tune.worker.main``): JSON requests on stdin, answers on
stdout.

One JSON object per line each way; arrays and kernels travel as files in a private folder of the parent. A request is
``{"id", "op", ...}``, its answer ``{"id", "ok": true, ...}`` or ``{"id", "ok": false, "error", "message", "values"}``;
``{"id", "event": "running", "label"}`` says which candidate is about to run, for the parent to blame.

Where a request is ``sliced``, measurements ask for the device by ``{"id", "event": "slice"}``, wait for
``{"op": "slice", "seconds"}``, and give it back by ``{"id", "event": "slice end"}``.

It is neither a fork of the user's process (which deadlocks JAX) nor a `multiprocessing` child (which would run the
user's ``__main__`` again).  JAX is imported only by requests that need XLA.  It dies with its parent: the kernel
kills it (Linux), and a thread that watches stdin ends it at end of file, even while a candidate loops for ever.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import os
import queue
import signal
import sys
import threading
import time
import traceback
from typing import Any

from jcuts.base.errors import CandidateRejected, WorkerFailed
from jcuts.tune import device_slices
from jcuts.tune.choice import plain
from jcuts.tune.malloc import Heap
from jcuts.tune.resource_errors import is_disk, is_memory, no_backend
from jcuts.tune.worker.parent_slices import ParentSlices
from jcuts.tune.worker.requests import REQUESTS


def _die_with_parent() -> None:
    parent = int(os.environ.get("JCUTS_WORKER_PARENT", "0"))
    with contextlib.suppress(OSError, AttributeError):  # Linux only; elsewhere the watching thread alone does it
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    if parent and os.getppid() != parent:
        os._exit(3)  # it died before the line above


def _watch(requests: queue.SimpleQueue[dict[str, Any]], slices: queue.SimpleQueue[dict[str, Any]]) -> None:
    try:
        for line in sys.stdin:
            message = json.loads(line)
            (slices if message.get("op") == "slice" else requests).put(message)
    finally:
        os._exit(0)


def serve() -> None:
    """Answers requests until stdin ends."""
    _die_with_parent()
    os.nice(int(os.environ.get("JCUTS_WORKER_NICE", "0")))
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Whatever prints (compilers, C libraries) goes to stderr; answers have a descriptor of their own.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    requests: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    granted: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_watch, args=(requests, granted), daemon=True).start()
    heap = Heap()
    while True:
        request = requests.get()

        def announce(label: str, number: int = request["id"]) -> None:
            answers.write(json.dumps({"id": number, "event": "running", "label": label}) + "\n")

        def tell(event: str, number: int = request["id"]) -> None:
            answers.write(json.dumps({"id": number, "event": event}) + "\n")

        start, before = time.perf_counter(), os.times()
        slices = ParentSlices(tell, granted) if request.get("sliced") else device_slices.OpenDevice()
        try:
            with device_slices.using(slices):
                answer = {"id": request["id"], "ok": True, **REQUESTS[request["op"]](request, announce)}
            answer.setdefault("seconds", time.perf_counter() - start)
            after = os.times()  # of all threads, and of children that ended
            answer["cores"] = {
                "user": after[0] + after[2] - before[0] - before[2],
                "system": after[1] + after[3] - before[1] - before[3],
            }
        except CandidateRejected as error:
            answer = _failure(request, type(error).__name__, error.message, error.values)
        except Exception as error:  # a bug in one candidate's code path must not cost the others
            where = traceback.format_exc(limit=-3)
            message = f"{request['op']}: {type(error).__name__}: {error}"
            reasons = {"memory": is_memory, "start": no_backend, "disk": is_disk}
            more = {"reason": reason} if (reason := next((r for r, is_ in reasons.items() if is_(error)), "")) else {}
            answer = _failure(request, WorkerFailed.__name__, message, {"traceback": where, **more})
        answers.write(json.dumps(answer) + "\n")
        del answer, request
        heap.trim()  # nobody waits for that


def _failure(request: dict[str, Any], kind: str, message: str, values: dict[str, object]) -> dict[str, Any]:
    return {"id": request["id"], "ok": False, "error": kind, "message": message, "values": plain(values)}


if __name__ == "__main__":
    serve()
