"""DeepBench's 94 convolution shapes, and published times of two DeepSpeech layers at four batch sizes on four GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from jcuts.base.csv_file import read_csv
from jcuts.base.errors import UsageError
from jcuts.microbatch.best_batch import DeviceTimes
from jcuts.microbatch.convolution import Convolution

DEEPSPEECH = {
    **dict.fromkeys((0, 1, 2, 3), ("fwd_ms", "bwd_filter_ms")),
    **dict.fromkeys((4, 5, 6, 7), ("fwd_ms", "bwd_data_ms", "bwd_filter_ms")),
}
"""Rows of the only two layers that were measured at four batch sizes (4, 8, 16, 32); the kernels of a training step.

The first layer's input needs no gradient, and some sheets have no backward-data times of it.
"""


@dataclass(frozen=True)
class Layer:
    """One row of DeepBench: a convolution at its batch size."""

    index: int
    application: str
    convolution: Convolution
    batch: int


def layers(kind: str = "forward", dtype: str = "float32", layout: str = "NCHW") -> tuple[Layer, ...]:
    """The 94 shapes for one of the three kernel kinds."""
    made = []
    for row in read_csv(_shipped("deepbench_conv.csv")):
        n = {name: int(row[name]) for name in row if name != "application"}
        high, wide = n["pad_h"], n["pad_w"]
        convolution = Convolution(
            kind,
            n["C"],
            n["K"],
            (n["H"], n["W"]),
            (n["R"], n["S"]),
            strides=(n["hstride"], n["wstride"]),
            padding=((high, high), (wide, wide)),
            dtype=dtype,
            layout=layout,
        )
        made.append(Layer(n["idx"], row["application"], convolution, n["N"]))
    return tuple(made)


def gpus(precision: str = "float32") -> tuple[str, ...]:
    """GPUs with published times in a precision ("float32", "pseudo_float16", "float16_mixed")."""
    rows = read_csv(_shipped("deepbench_conv_measured.csv"))
    return tuple(sorted({row["gpu"] for row in rows if row["precision"] == precision}))


def times(gpu: str, precision: str = "float32") -> DeviceTimes:
    """A GPU's seconds for a training step of the two DeepSpeech convolutions at batch 4, 8, 16 and 32.

    Raises: UsageError if there are no times for this GPU in this precision.
    """
    if gpu not in gpus(precision):
        known = ", ".join(gpus(precision)) or "none"
        raise UsageError(f"DeepBench has no {precision} times of {gpu!r}; it has: {known}", gpu=gpu)
    seconds: dict[int, float] = {}
    for row in read_csv(_shipped("deepbench_conv_measured.csv")):
        if (row["gpu"], row["precision"]) == (gpu, precision):
            batch = int(row["batch"])
            for kernel in DEEPSPEECH.get(int(row["idx"]), ()):
                seconds[batch] = seconds.get(batch, 0.0) + float(row[kernel]) * 1e-3
    return DeviceTimes(gpu, seconds)


def _shipped(name: str) -> Path:
    return Path(str(resources.files("jcuts.microbatch") / "data" / name))
