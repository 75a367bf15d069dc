"""ONNX export of a workload by jax2onnx, with what that converter lacks: loops backwards, pooling of NHWC images.

Used by the CPU baselines (`cpu_workers.py`): OpenVINO and ONNX Runtime read the file that `export` writes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.networks import onnx_rewrites

NEEDS = ("jax2onnx", "onnx")
OPSET = 21


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
    rewritten = {f.__name__: f(model) for f in onnx_rewrites.BEFORE}
    onnx.save(model, path)  # the names of external data are kept
    simplified = simplify(path)
    model = onnx.load(path, load_external_data=False)
    rewritten |= {f.__name__: f(model) for f in onnx_rewrites.AFTER}
    onnx.save(model, path)
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
