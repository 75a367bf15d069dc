"""cuDNN convolution as one XLA custom call (typed FFI) that runs all micro-batches of a `Division`; native library and
registration.

The library (``custom_calls/cudnn_conv.cc``) opens the cuDNN that JAX uses; ``JCUTS_CUDNN`` names another one.  On XLA's
CPU platform it accepts only a cuDNN that says it computes in host memory (the one in the tests).
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jcuts.base import knobs
from jcuts.base.errors import NativeError, UsageError
from jcuts.microbatch.convolution import KINDS, LAYOUTS, Convolution
from jcuts.microbatch.timings import Division, unsliced
from jcuts.xla import native_library
from jcuts.xla.cpu_launcher import register_launcher

LIBRARY = "libjcuts_cudnn.so"
CUDNN = "libcudnn.so.9"
TARGETS = {"cuda": "jcuts_cudnn_conv", "cpu": "jcuts_cudnn_host"}
GRAPH_TARGET = "jcuts_cudnn_conv_graph"
PREFIX = "cudnn/"
"""What the names of cuDNN's algorithms begin with in tables."""
LAUNCHED = "/launched"
"""What they end with where the algorithm cannot be captured into CUDA graphs although it was tried."""

_TEXT = 2048
_lock = threading.RLock()
_registered: set[str] = set()

_ALGORITHMS = {
    "forward": (
        "IMPLICIT_GEMM",
        "IMPLICIT_PRECOMP_GEMM",
        "GEMM",
        "DIRECT",
        "FFT",
        "FFT_TILING",
        "WINOGRAD",
        "WINOGRAD_NONFUSED",
    ),
    "backward_data": ("ALGO_0", "ALGO_1", "FFT", "FFT_TILING", "WINOGRAD", "WINOGRAD_NONFUSED"),
    "backward_filter": ("ALGO_0", "ALGO_1", "FFT", "ALGO_3", "WINOGRAD", "WINOGRAD_NONFUSED", "FFT_TILING"),
}
"""cuDNN's names, at the position of their number (cudnn_ops.h)."""
_TYPES = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 9}
_DEFAULT = 0
"""This and the next two: values of `cudnnMathType_t`."""
_TENSOR = 1
_FMA = 3
_MATHS = {
    "float64": {"float64": (_DEFAULT, 1)},
    "float32": {"float32": (_FMA, 0), "tf32": (_DEFAULT, 0)},
    "float16": {
        "float16": (_FMA, 2),
        "float16+tensor": (_TENSOR, 2),
        "float32": (_FMA, 0),
        "float32+tensor": (_TENSOR, 0),
    },
    "bfloat16": {"float32": (_FMA, 0), "float32+tensor": (_TENSOR, 0)},
}
"""Storage -> name of the math (`convolution.MATHS`) -> cuDNN's math type and compute type."""


def algorithms(kind: str) -> tuple[str, ...]:
    """Names of cuDNN's algorithms for a kind of convolution, as in tables."""
    return tuple(PREFIX + name for name in _ALGORITHMS[kind])


def transforms(kind: str) -> tuple[str, ...]:
    """Those `algorithms` that transform filters into their workspace, for which slicing the outputs pays."""
    return tuple(PREFIX + name for name in _ALGORITHMS[kind] if name in ("FFT", "FFT_TILING", "WINOGRAD_NONFUSED"))


def is_cudnn(algorithm: str) -> bool:
    """Whether a name in a table is an algorithm of cuDNN."""
    return algorithm.startswith(PREFIX)


def shape_numbers(
    convolution: Convolution, batch: int, *, flipped: bool = False, accumulate: bool = False
) -> list[int]:
    """A convolution as the library reads it (`Shape` in ``cudnn_plan.h``).

    Args: flipped: the window is reversed (a convolution in the mathematical sense); accumulate: add to what is there.
    Raises: UsageError: paddings that differ on the two sides, or more than three spatial dimensions.
    """
    if any(low != high for low, high in convolution.padding) or not 1 <= len(convolution.spatial) <= 3:
        raise UsageError(f"cuDNN cannot pad {convolution.padding} in {len(convolution.spatial)} dimensions")
    head = [
        KINDS.index(convolution.kind),
        LAYOUTS.index(convolution.layout),
        _TYPES[convolution.dtype],
        int(not flipped),
        convolution.groups,
        int(accumulate),
        batch,
        convolution.channels,
        convolution.outputs,
        max(2, len(convolution.spatial)),
    ]
    columns = (
        convolution.spatial,
        convolution.result,
        convolution.window,
        convolution.strides,
        tuple(low for low, _ in convolution.padding),
        convolution.dilation,
    )
    one = [1, 1, 1, 1, 0, 1] if len(convolution.spatial) == 1 else []
    return [*head, *one, *(n for dimension in zip(*columns, strict=True) for n in dimension)]


def part_numbers(convolution: Convolution, division: Division) -> list[int]:
    """A division as the library reads it (`Part` in ``cudnn_plan.h``).

    Raises: UsageError: a part that is not by an algorithm and a math of cuDNN.
    """
    names, maths = algorithms(convolution.kind), _MATHS[convolution.dtype]
    found: list[int] = []
    for count, part in division.runs:
        name, slices = unsliced(part.algorithm.removesuffix(LAUNCHED))
        if name not in names or part.math not in maths:
            raise UsageError(
                f"cuDNN has no {part.algorithm!r} with {part.math!r} for {convolution}", algorithm=part.algorithm
            )
        found += [count, part.batch, names.index(name), *maths[part.math], slices]
    return found


# -- the library ----------------------------------------------------------------------------------------------------
@functools.cache
def load() -> ctypes.CDLL:
    """The library, loaded once, checked, and told which cuDNN to open.

    Raises: NativeError: missing, unloadable, not jcuts' library, or built for another FFI version.
    """
    lib = native_library.opened(
        native_library.library_path(LIBRARY), "cuDNN library", _declare, "jcuts_cudnn_ffi_api_version"
    )
    chosen = knobs.current().cudnn
    lib.jcuts_cudnn_set_library(str(chosen or "").encode(), _installed().encode())
    return lib


def _declare(lib: ctypes.CDLL) -> None:
    pointer, size, text, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_char_p, ctypes.c_int
    numbers = ctypes.POINTER(size)
    signatures = {
        "jcuts_cudnn_ffi_api_version": (number, []),
        "jcuts_cudnn_state_type_id": (pointer, []),
        "jcuts_cudnn_state_type_info": (pointer, []),
        "jcuts_cudnn_host_type_id": (pointer, []),
        "jcuts_cudnn_host_type_info": (pointer, []),
        "jcuts_cudnn_set_library": (number, [text, text]),
        "jcuts_cudnn_set_driver": (number, [text]),
        "jcuts_cudnn_version": (size, [text, size]),
        "jcuts_cudnn_plan": (pointer, [text, numbers, size, numbers, size, number, numbers, text, size]),
        "jcuts_cudnn_run": (number, [pointer, number, pointer, pointer, pointer, pointer, pointer, text, size]),
        "jcuts_cudnn_plan_free": (None, [pointer]),
    }
    native_library.declare(lib, signatures)


def _installed() -> str:
    """cuDNN library of the installed Python package, '' where there is none."""
    try:
        spec = importlib.util.find_spec("nvidia.cudnn")
    except ModuleNotFoundError:
        return ""
    for folder in (spec.submodule_search_locations if spec else None) or ():
        if (path := Path(folder) / "lib" / CUDNN).is_file():
            return str(path)
    return ""


def version() -> str:
    """cuDNN's version, e.g. ``9.19.0``. Raises: NativeError with the reason where it cannot be used."""
    text = ctypes.create_string_buffer(_TEXT)
    found = int(load().jcuts_cudnn_version(text, _TEXT))
    if not found:
        raise NativeError(text.value.decode(errors="replace"))
    scale = 10_000 if found >= 90_000 else 1_000
    return f"{found // scale}.{found % scale // 100}.{found % 100}"


def computes_on_host() -> bool:
    """Whether ``JCUTS_CUDNN`` is a library that computes in host memory."""
    chosen = knobs.current().cudnn
    try:
        return chosen is not None and hasattr(ctypes.CDLL(str(chosen)), "jcuts_host_cudnn")
    except OSError:
        return False


def unusable(platform: str) -> str:
    """'' if cuDNN can be used on a platform, else the reason."""
    family = "cuda" if platform in ("cuda", "gpu") else platform
    if family not in TARGETS:
        return f"cuDNN does not compute on platform {platform}"
    if (family == "cpu") != computes_on_host():
        return f"cuDNN does not compute on platform {platform}" if family == "cpu" else "JCUTS_CUDNN is not for GPUs"
    try:
        version()
    except NativeError as error:
        return error.message
    return ""


def ensure_registered(platform: str) -> None:
    """Registers the call with XLA's platform, once per process (starts that backend: `register` says why).

    Raises: NativeError: no library, or XLA refuses it.
    """
    if platform in _registered:
        return
    lib = load()
    jax.devices(platform)
    with _lock:
        if platform in _registered:
            return
        if platform == "cpu":
            register_launcher(
                TARGETS["cpu"],
                "jcuts_cudnn_host_state",
                "cpu",
                "cuDNN calls",
                (lib.jcuts_cudnn_host_type_id(), lib.jcuts_cudnn_host_type_info()),
                {"instantiate": lib.jcuts_cudnn_host_instantiate, "execute": lib.jcuts_cudnn_host_execute},
            )
        else:
            stages = {
                "instantiate": lib.jcuts_cudnn_conv_instantiate,
                "initialize": lib.jcuts_cudnn_conv_initialize,
                "execute": lib.jcuts_cudnn_conv_execute,
            }
            types = (lib.jcuts_cudnn_state_type_id(), lib.jcuts_cudnn_state_type_info())
            register_launcher(TARGETS["cuda"], "jcuts_cudnn_conv_state", "CUDA", "cuDNN calls", types, stages)
            stages["execute"] = lib.jcuts_cudnn_conv_execute_graph
            jax.ffi.register_ffi_target(
                GRAPH_TARGET, {stage: jax.ffi.pycapsule(f) for stage, f in stages.items()}, platform="CUDA"
            )
        _registered.add(platform)


# -- the call -------------------------------------------------------------------------------------------------------
def call(
    convolution: Convolution,
    division: Division,
    operands: Sequence[Any],
    result: Any,
    *,
    layer: str,
    orders: Sequence[tuple[int, ...]],
    platform: str,
    flipped: bool = False,
    onto: Any = None,
    graph: bool = False,
) -> Any:
    """One convolution by cuDNN, in micro-batches, as one XLA custom call; works under ``jit`` and eagerly.

        forward: y = conv(x, w)    backward_data: dx from (dy, w)    backward_filter: dw from (x, dy)

    Args:
        convolution: the layer; its padding is the same on both sides.
        division: micro-batches by algorithms of cuDNN; they share one workspace, an extra result that is dropped.
        operands: the kernel's two, in the order above.  result: shape and dtype of its result.
        layer: what errors call it.
        orders: of operands and result: their dimensions from the outermost to the innermost in memory, which is
            N C ... or N ... C of images and K C ... or K ... C of filters, as ``convolution.layout`` says.
        platform: 'cuda' or 'cpu'.
        flipped: the window is reversed.
        onto: an array to add to, of the result's shape, or None.
        graph: XLA may capture the call into a CUDA graph, unless an algorithm is known to refuse that.
    Raises: UsageError: cuDNN has no such algorithm or padding; NativeError: no library.
    """
    ensure_registered(platform)
    shape = shape_numbers(convolution, division.batch, flipped=flipped, accumulate=onto is not None)
    results = [jax.ShapeDtypeStruct(tuple(result.shape[d] for d in orders[2]), result.dtype)]
    if division.workspace:
        results.append(jax.ShapeDtypeStruct((division.workspace,), np.dtype(np.uint8)))
    given = [*operands] if onto is None else [*operands, onto]
    # Row-major on both sides of the call: where arrays are in the order of memory already, nothing is left of this.
    inputs = [_transposed(x, order) for x, order in zip(given, orders, strict=False)]
    graph = graph and platform == "cuda" and not any(part.algorithm.endswith(LAUNCHED) for part in division.parts)
    ffi_call = jax.ffi.ffi_call(
        GRAPH_TARGET if graph else TARGETS[platform],
        results,
        has_side_effect=False,
        input_output_aliases=None if onto is None else {2: 0},
    )
    outputs = ffi_call(
        *inputs,
        layer=layer,
        shape=np.array(shape, np.int64),
        parts=np.array(part_numbers(convolution, division), np.int64),
        workspace=np.int64(division.workspace),
    )
    return _transposed(outputs[0], tuple(int(d) for d in np.argsort(orders[2])))


def _transposed(x: Any, order: tuple[int, ...]) -> Any:
    return x if order == tuple(range(len(order))) else jax.lax.transpose(x, order)
