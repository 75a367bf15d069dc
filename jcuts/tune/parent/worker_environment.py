"""Environment variables of a measuring process: the user's, less what would change a measurement."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

from jcuts.base import errors, knobs

NICE = "JCUTS_WORKER_NICE"
"""Variable that lowers a process's priority by so much."""
BESIDE = "10"
"""... while the user's program runs: nine times less of a core than that asks for."""
AFTER_WAIT = 5
"""... of processes whose work the user's program has waited for in vain: a third of what that gets."""


def yield_processor(pid: int) -> None:
    """Lowers a process's priority (`os.setpriority`): the user's program waits for it no longer."""
    with contextlib.suppress(OSError, AttributeError):  # it has ended; not a POSIX system
        os.setpriority(os.PRIO_PROCESS, pid, AFTER_WAIT)


# They would raise on purpose-made NaNs, run without compilation, or fill the user's compilation cache.
_DROPPED = frozenset(
    {
        "JAX_DEBUG_NANS",
        "JAX_DEBUG_INFS",
        "JAX_DISABLE_JIT",
        "JAX_CHECK_TRACER_LEAKS",
        "JAX_COMPILATION_CACHE_DIR",
        "JAX_NUMPY_RANK_PROMOTION",
        "JAX_NUMPY_DTYPE_PROMOTION",
        "JAX_TRANSFER_GUARD",
        "JAX_LOG_COMPILES",
    }
)
WARM_BUFFERS = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40), "MALLOC_TOP_PAD_": str(64 << 20)}
"""glibc in a measuring process keeps large results: kernels are timed on warm memory, as in a chain's arena."""
ONE_BLAS_THREAD = {"OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""NumPy's BLAS starts a thread per core, which all spin for 0.1 s after every product: on 16 cores one norm of a vector
costs a second and a half of the processors that other measuring processes wait for."""


def environment(platform: str = "cpu") -> dict[str, str]:
    """The user's environment, less what would change a measurement, plus what the child must know."""
    env = {name: value for name, value in os.environ.items() if name not in _DROPPED}
    env["JAX_PLATFORMS"] = platform
    env["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # the parent holds most of a GPU's memory
    env["JCUTS_WORKER_PARENT"] = str(os.getpid())
    env.update(ONE_BLAS_THREAD)
    if platform == "cpu":
        env.update({name: value for name, value in WARM_BUFFERS.items() if name not in env})
    current = knobs.current()
    # A `knobs.scope` of the parent is not in its environment.
    for name in ("threads", "native", "cache_dir", "cudnn", "tune_caches"):
        value = getattr(current, name)
        if value is not None:
            env[knobs.variable(name)] = str(value)
    # The same packages in the same order as here, but not the folder of the user's script, whose ./queue.py or
    # ./select.py the child may meet although the parent did not.
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    script = os.path.dirname(os.path.abspath(main)) if main else None
    root = str(Path(errors.__file__).resolve().parents[2])
    paths = [path for path in sys.path if path and os.path.abspath(path) != script]
    env["PYTHONPATH"] = os.pathsep.join([*paths, root] if root not in paths else paths)
    return env
