"""ONNX export of a workload by jax2onnx, with what that converter lacks: loops backwards, pooling of NHWC images.

Used by the CPU baselines (`cpu_workers.py`): OpenVINO and ONNX Runtime read the file that `export` writes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

NEEDS = ("jax2onnx", "onnx")
OPSET = 21
TO_NCHW = (0, 3, 1, 2)
TO_NHWC = (0, 2, 3, 1)


def export(function: Any, leaves: Sequence[Any], path: Path) -> dict[str, Any]:
    """Writes the ONNX model of a function of arrays; weights lie in a file beside it, as they may exceed 2 GB.

    Args: leaves: one array per input, in the order of the model's inputs.
    Returns: number of nodes by operator.
    """
    import jax
    import jax2onnx
    import onnx

    specs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
    with loops_forward():
        jax2onnx.to_onnx(function, specs, model_name="workload", opset=OPSET, return_mode="file", output_path=str(path))
    model = onnx.load(path, load_external_data=False)
    rewritten = {"pools": pools_of_images(model), "clips": clips(model)}
    if any(rewritten.values()):
        onnx.save(model, path)  # the names of external data are kept
    simplified = simplify(path)
    model = onnx.load(path, load_external_data=False)
    counts: dict[str, int] = {}
    for node in model.graph.node:
        counts[node.op_type] = counts.get(node.op_type, 0) + 1
    return {"opset": OPSET, "nodes": counts, "rewritten": rewritten, "simplified": simplified}


@contextlib.contextmanager
def loops_forward() -> Iterator[None]:
    """`jax.lax.scan` with ``reverse=True`` as a forward scan over flipped arrays, while a program is traced."""
    import jax
    import jax.numpy as jnp

    original = jax.lax.scan

    def scan(f: Any, init: Any, xs: Any = None, length: int | None = None, reverse: bool = False, **more: Any) -> Any:
        if not reverse:
            return original(f, init, xs, length, **more)
        carry, ys = original(f, init, jax.tree.map(lambda x: jnp.flip(x, 0), xs), length, **more)
        return carry, jax.tree.map(lambda y: jnp.flip(y, 0), ys)

    jax.lax.scan = scan
    try:
        yield
    finally:
        jax.lax.scan = original


def pools_of_images(model: Any) -> int:
    """Rewrites pooling of (1, 1, N, H, W, C), which no runtime has, as pooling of NCHW images; gives their number.

    The converter unsqueezes twice, pools six dimensions (a maximum, or a convolution with ones for a sum), and
    squeezes.
    """
    from onnx import helper, numpy_helper

    producers = {out: node for node in model.graph.node for out in node.output}
    consumers = {name: node for node in model.graph.node for name in node.input}
    shapes = {
        v.name: [d.dim_value for d in v.type.tensor_type.shape.dim]
        for v in (*model.graph.value_info, *model.graph.input)
    }
    replaced: dict[str, list[Any]] = {}
    dropped = set()
    for node in model.graph.node:
        if node.op_type not in ("MaxPool", "Conv") or len(shapes.get(node.input[0], ())) != 6:
            continue
        outer = producers[node.input[0]]
        inner = producers[outer.input[0]]
        squeeze = consumers[node.output[0]]
        given = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        window = list(given.get("kernel_shape") or shapes.get(node.input[1]) or kernel_shape(model, node.input[1]))[-4:]
        assert window[0] == window[3] == 1, f"{node.name}: windows over batch or channels"
        name, pads = node.name or node.output[0], given.get("pads", [0] * 8)
        options = {"kernel_shape": window[1:3], "strides": list(given.get("strides", [1] * 4))[1:3]}
        options["pads"] = [*pads[1:3], *pads[5:7]]
        nodes = [helper.make_node("Transpose", [inner.input[0]], [f"{name}_nchw"], perm=TO_NCHW)]
        if node.op_type == "MaxPool":
            nodes.append(helper.make_node("MaxPool", [f"{name}_nchw"], [f"{name}_pooled"], **options))
        else:
            size = numpy_helper.from_array(_float(window[1] * window[2]), f"{name}_size")
            model.graph.initializer.append(size)
            nodes += [
                helper.make_node("AveragePool", [f"{name}_nchw"], [f"{name}_mean"], count_include_pad=1, **options),
                helper.make_node("Mul", [f"{name}_mean", size.name], [f"{name}_pooled"]),
            ]
        nodes.append(helper.make_node("Transpose", [f"{name}_pooled"], [squeeze.output[0]], perm=TO_NHWC))
        replaced[node.output[0]] = nodes
        dropped |= {inner.output[0], outer.output[0], squeeze.output[0]}
    kept: list[Any] = []
    for node in model.graph.node:
        kept += replaced.get(node.output[0], [] if node.output[0] in dropped else [node])
    del model.graph.node[:]
    model.graph.node.extend(kept)
    return len(replaced)


def clips(model: Any) -> int:
    """Rewrites the smaller of a number and the larger of another as Clip, which runtimes fuse; gives how many."""
    from onnx import helper

    scalars = {t.name for t in model.graph.initializer if not t.dims}
    readers: dict[str, list[Any]] = {}
    for node in model.graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    replaced: dict[str, Any] = {}
    dropped = set()
    for node in model.graph.node:
        found = readers.get(node.output[0], [])
        if node.op_type != "Max" or len(found) != 1 or found[0].op_type != "Min" or len(node.input) != 2:
            continue
        upper = found[0]
        low, high = ([n for n in x.input if n in scalars] for x in (node, upper))
        if len(low) == len(high) == 1:
            value = next(n for n in node.input if n != low[0])
            replaced[upper.output[0]] = helper.make_node("Clip", [value, low[0], high[0]], [upper.output[0]])
            dropped.add(node.output[0])
    kept = [replaced.get(n.output[0], n) for n in model.graph.node if n.output[0] not in dropped]
    del model.graph.node[:]
    model.graph.node.extend(kept)
    return len(replaced)


def simplify(path: Path) -> str:
    """ONNX Runtime's basic optimisations (constants, batch norms into convolutions, layouts), for all runtimes.

    The file is replaced by a standard ONNX model.  Gives what was done, or why not.
    """
    try:
        import onnxruntime
    except ImportError:
        return "no: needs onnxruntime"
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.log_severity_level = 3
    made = path.with_name(f"{path.stem}.basic.onnx")
    options.optimized_model_filepath = str(made)
    weights = f"{made.name}.data"
    options.add_session_config_entry("session.optimized_model_external_initializers_file_name", weights)
    options.add_session_config_entry("session.optimized_model_external_initializers_min_size_in_bytes", "1024")
    try:
        onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # the model is left as it is
        made.unlink(missing_ok=True)
        return f"no: {type(error).__name__}: {error}"[:300]
    path.with_name(f"{path.name}.data").unlink(missing_ok=True)
    made.replace(path)
    return "onnxruntime, basic"


def kernel_shape(model: Any, name: str) -> list[int]:
    """Shape of an initializer."""
    return next(list(t.dims) for t in model.graph.initializer if t.name == name)


def _float(value: float) -> Any:
    import numpy as np

    return np.asarray(value, np.float32)
