"""DeepSpeech2 as an ONNX model with bidirectional GRU operators, as exports of a framework's own GRU layers have them.

The converter writes a scan as a loop of single steps, which runtimes do not put together again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.networks.workloads.deepspeech import STRIDES

EPSILON = 1e-5
OPSET = 21


class Graph:
    """Nodes and constants of a model that is built from its inputs on."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.constants: list[Any] = []

    def constant(self, value: Any, kind: Any = np.float32) -> str:
        """Name of a constant."""
        from onnx import numpy_helper

        self.constants.append(numpy_helper.from_array(np.asarray(value, kind), f"c{len(self.constants)}"))
        return self.constants[-1].name

    def add(self, operator: str, *inputs: str, **attributes: Any) -> str:
        """Name of an operator's first result."""
        from onnx import helper

        name = f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, list(inputs), [name], **attributes))
        return name


def scale_and_shift(p: Any) -> tuple[np.ndarray, np.ndarray]:
    """Batch normalisation by known statistics as a factor and an addend per channel."""
    gain, bias, mean, variance = (np.asarray(p[k], np.float32) for k in ("g", "b", "mean", "var"))
    factor = gain / np.sqrt(variance + np.float32(EPSILON))
    return factor, bias - mean * factor


def same_padding(size: int, kernel: int, stride: int) -> tuple[int, int]:
    """JAX's padding SAME of one dimension.

    >>> same_padding(161, 41, 2)
    (20, 20)
    """
    total = max((-(-size // stride) - 1) * stride + kernel - size, 0)
    return total // 2, total - total // 2


def gru(g: Graph, layer: Any, x: str) -> str:
    """Sum of both directions of a GRU over (time, batch, width); gates go from (r, z, n) to ONNX's (z, r, n)."""

    def gates(p: Any, name: str) -> np.ndarray:
        r, z, n = np.split(np.asarray(p[name], np.float32), 3, -1)
        return np.concatenate([z, r, n], -1).T

    pair = [layer["forward"], layer["backward"]]
    w, r, b = (np.stack([gates(p, name) for p in pair]) for name in "ihb")
    bias = np.concatenate([b, np.zeros_like(b)], -1)
    width = r.shape[-1]
    options = {"hidden_size": width, "direction": "bidirectional", "linear_before_reset": 1}
    made = g.add("GRU", x, g.constant(w), g.constant(r), g.constant(bias), **options)
    return g.add("ReduceSum", made, g.constant([1], np.int64), keepdims=0)


def build(weights: Any, x: Any, path: Path) -> dict[str, Any]:
    """Writes the model of DeepSpeech2's inference. Args: x: spectrograms (batch, frequencies, frames, 1)."""
    import onnx
    from onnx import TensorProto, helper

    g = Graph()
    batch, bands, frames, _ = x.shape
    value = g.add("Transpose", "x", perm=(0, 3, 1, 2))
    sizes = [bands, frames]
    for p, stride in zip(weights["convs"], STRIDES, strict=True):
        factor, shift = scale_and_shift(p)
        kernel = np.asarray(p["w"], np.float32) * factor  # the norm is a part of the convolution
        pads = [same_padding(*d) for d in zip(sizes, kernel.shape[:2], stride, strict=True)]
        options = {"strides": stride, "pads": [pads[0][0], pads[1][0], pads[0][1], pads[1][1]]}
        value = g.add("Conv", value, g.constant(kernel.transpose(3, 2, 0, 1)), g.constant(shift), **options)
        value = g.add("Clip", value, g.constant(0.0), g.constant(20.0))
        sizes = [-(-d // s) for d, s in zip(sizes, stride, strict=True)]
    value = g.add("Transpose", value, perm=(3, 0, 2, 1))
    value = g.add("Reshape", value, g.constant([sizes[1], batch, -1], np.int64))

    def norm(value: str, p: Any) -> str:
        factor, shift = scale_and_shift(p)
        return g.add("Add", g.add("Mul", value, g.constant(factor)), g.constant(shift))

    for layer in weights["layers"]:
        value = gru(g, layer, norm(value, layer["norm"]))
    value = g.add("MatMul", norm(value, weights["norm"]), g.constant(weights["out"]))
    value = g.add("LogSoftmax", value, axis=-1)
    shape = [sizes[1], batch, np.shape(weights["out"])[1]]
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in (("x", x.shape), (value, shape))]
    graph = helper.make_graph(g.nodes, "deepspeech2", ends[:1], ends[1:], g.constants)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=10), path)
    counts = {n.op_type: sum(m.op_type == n.op_type for m in g.nodes) for n in g.nodes}
    return {"opset": OPSET, "nodes": counts, "built": "onnx.helper"}
