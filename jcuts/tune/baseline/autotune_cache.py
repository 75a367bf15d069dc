"""Shares XLA's per-fusion autotune cache between the measuring process and the user's process (GPUs).

XLA times its algorithms for every matmul and convolution of a program: half a second each.  The results of the
measuring process, which has the GPU to itself, are read by the whole programs that the user's process compares
afterwards, from a folder that lives as long as that process.
"""

from __future__ import annotations

import atexit
import functools
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

from jcuts.tune.baseline import conv_relu_bound

OPTION = "xla_gpu_per_fusion_autotune_cache_dir"
MODE = "xla_gpu_experimental_autotune_cache_mode"
LEVEL: dict[str, Any] = {"xla_gpu_autotune_level": 0}
LIBRARY_PRODUCTS: dict[str, Any] = {"xla_gpu_enable_triton_gemm": False}
PREFIX = "jcuts-tune-"
"""Of folders that belong to the process whose number follows."""


@functools.cache
def folder() -> Path:
    """This process' folder; it is removed at exit (after a kill by the next process that tunes)."""
    made = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-xla-"))
    owner = os.getpid()
    atexit.register(lambda: os.getpid() == owner and shutil.rmtree(made, ignore_errors=True))  # not in a fork
    return made


def flags(*, shared: bool) -> dict[str, str]:
    """``XLA_FLAGS`` for another process.

    Args: shared: whether it may add to the folder; a process that does not have the GPU to itself may not, and not to a
        folder of the user's either.
    """
    mine = re.sub(rf"(^|\s)--{OPTION}(=|\s+)\S+", "", _own()).strip()
    return {"XLA_FLAGS": f"{mine} --{OPTION}={folder()}".strip() if shared else mine}


def options() -> dict[str, Any]:
    """Compiler options for programs of this process, none where it keeps such results itself."""
    import jax

    keeps = OPTION in _own() or getattr(jax.config, "jax_compilation_cache_dir", None)
    return {} if keeps or not folder.cache_info().currsize else {OPTION: str(folder())}


@functools.cache
def read_shared_results(place: str, timed: bool = True, narrow: bool = False) -> dict[str, Any]:
    """Compiler options for a process that runs XLA's programs beside others: it takes what was timed and adds nothing.

    What it has to time itself may come out wrong, for itself alone.  It must not go without: the algorithms that XLA
    takes untimed are others, in float32 instead of TF32 or with infinities spread over their tiles.

    Args:
        place: a process' `folder`; '' for none.
        timed: whether the measuring process has timed what the program asks for.  Where it has not, ReLUs are not left
            to the library: cuDNN would compile dozens of kernels to choose from.  Products are, timed or not: XLA's
            own kernels take seconds to compile, and round as the library's do.
        narrow: whether a product may have results narrower than float32, which the library rounds before what follows
            is computed, and XLA's kernels do not: then products that were timed are what they were.
    """
    if not place:
        return {}
    known = known_options({OPTION: place, MODE: "AUTOTUNE_CACHE_MODE_READ"})
    known |= {} if timed and narrow else known_options(LIBRARY_PRODUCTS)
    return known if timed else known | without_conv_relu_fusion()


def publish_results() -> dict[str, Any]:
    """`options` for the first program of this process, which has the GPU to itself: what it times is left to others."""
    folder()
    return options()


@functools.cache
def without_conv_relu_fusion() -> dict[str, Any]:
    """Compiler options for a program whose ReLUs are not given to cuDNN (`tune.baseline.conv_relu_bound`)."""
    return known_options(conv_relu_bound.OPTIONS)


@functools.cache
def without_autotuning() -> dict[str, Any]:
    """Compiler options for a program whose algorithms XLA takes as they come: the library's products.

    Its own kernels for products have hundreds of shapes, of which it then takes the first one.
    """
    return known_options(LEVEL) | known_options(LIBRARY_PRODUCTS)


def known_options(options: dict[str, Any]) -> dict[str, Any]:
    """The options; {} where this version of XLA does not know them."""
    import jax
    import numpy as np

    try:
        jax.jit(lambda x: x + 1, compiler_options=options).lower(np.float32(0)).compile()
    except Exception:
        return {}
    return options


def _own() -> str:
    """The user's flags: the variable holds them, or names a file that does, as XLA reads it."""
    given = os.environ.get("XLA_FLAGS", "").strip()
    if not given or given.startswith("-"):
        return given
    try:
        return Path(given).read_text(errors="replace").strip()
    except OSError:
        return ""
