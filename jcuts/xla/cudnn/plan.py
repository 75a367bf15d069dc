"""Standalone execution of a micro-batched cuDNN convolution on raw device addresses (no JAX), for measuring."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from jcuts.base.errors import NativeError
from jcuts.microbatch.convolution import Convolution
from jcuts.microbatch.timings import Division
from jcuts.xla.cudnn import call as cudnn_call

HOST = -1
"""Number of the device for a cuDNN that computes in host memory."""
_TEXT = 2048


class Plan:
    """Descriptors of a divided convolution on one device (a plan of ``custom_calls/cudnn_plan.h``).

    Attributes: needed: workspace of the largest part [B], as this cuDNN says; the division's own figures do not count.
    Raises: NativeError: cuDNN refuses it; its sentence names layer, kernel, algorithm and status.
    """

    def __init__(self, convolution: Convolution, division: Division, device: int, *, layer: str = "") -> None:
        self._lib, self.device = cudnn_call.load(), device
        shape = _numbers(cudnn_call.shape_numbers(convolution, division.batch))
        parts = _numbers(cudnn_call.part_numbers(convolution, division))
        needed, text = ctypes.c_int64(), ctypes.create_string_buffer(_TEXT)
        self._plan = self._lib.jcuts_cudnn_plan(
            (layer or str(convolution)).encode(),
            shape,
            len(shape),
            parts,
            len(parts),
            device,
            ctypes.byref(needed),
            text,
            _TEXT,
        )
        if not self._plan:
            raise NativeError(text.value.decode(errors="replace"))
        self.needed = int(needed.value)

    def run(self, stream: int, a: int, b: int, out: int, space: int) -> None:
        """Launches it.  Args: addresses, in the order of `cudnn.call`'s operands.  Raises: NativeError."""
        text = ctypes.create_string_buffer(_TEXT)
        if self._lib.jcuts_cudnn_run(self._plan, self.device, stream, a, b, out, space, text, _TEXT):
            raise NativeError(text.value.decode(errors="replace"))

    def close(self) -> None:
        """Frees the descriptors."""
        if self._plan:
            self._lib.jcuts_cudnn_plan_free(self._plan)
            self._plan = None


def buffer_bytes(convolution: Convolution, batch: int) -> tuple[int, int, int]:
    """Sizes of the two operands and of the result, in the order of `cudnn.call` [B]."""
    item = {"float64": 8, "float32": 4}.get(convolution.dtype, 2)
    image, result, window = item * convolution.channels, item * convolution.outputs, item
    for extent in convolution.spatial:
        image *= extent
    for extent in convolution.result:
        result *= extent
    for extent in (convolution.outputs, convolution.channels // convolution.groups, *convolution.window):
        window *= extent
    x, y = batch * image, batch * result
    return {"forward": (x, window, y), "backward_data": (y, window, x), "backward_filter": (x, y, window)}[
        convolution.kind
    ]


def _numbers(values: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(values))(*values)
