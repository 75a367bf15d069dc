"""The programs that benchmarks run: keras.applications networks and plain-JAX programs, random weights, no downloads.

A workload is (function, arguments); ``closed=True`` gives the form with weights closed over.  Nothing here knows jcuts.
"""

from __future__ import annotations

from .arrays import Workload, array
from .bert import bert, encoder
from .conv_modules import octave, shift_conv, shifted
from .keras_cnn import CNN, DEPTHWISE, network
from .layers import NHWC, conv, doubled, halved, layer_norm
from .mlp import mlp_step
from .recurrent import gru
from .registry import WORKLOADS
from .small_training import SMALL_TRAINING
from .spec import Form, Program, WorkloadSpec

PROGRAMS = ("encoder", "gru", "mlp_step")
CPU_WORKLOADS = WORKLOADS | SMALL_TRAINING
"""What the CPU baselines measure."""


def by_name(name: str, batch: int = 1, *, closed: bool = True, dtype: str = "float32") -> Workload:
    """A workload by its name; plain-JAX programs have their own sizes."""
    if name == "encoder":
        return encoder(dtype=dtype)
    if name == "gru":
        return gru()
    if name == "mlp_step":
        return mlp_step()
    if name == "bert":
        return bert(batch, closed=closed)
    return network(name, batch, closed=closed, dtype=dtype)


__all__ = [
    "CNN",
    "CPU_WORKLOADS",
    "DEPTHWISE",
    "NHWC",
    "PROGRAMS",
    "SMALL_TRAINING",
    "WORKLOADS",
    "Form",
    "Program",
    "Workload",
    "WorkloadSpec",
    "array",
    "bert",
    "by_name",
    "conv",
    "doubled",
    "encoder",
    "gru",
    "halved",
    "layer_norm",
    "mlp_step",
    "network",
    "octave",
    "shift_conv",
    "shifted",
]
