"""OpenVINO and ONNX Runtime on a CPU: sessions of an exported model, and calls of them, for the CPU baselines.

Nothing here imports JAX; inputs and the model are files that `cpu_workers.convert` wrote.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

STATE_SIZE = 4096
"""Carried arrays with at least this many elements are a runtime's state; smaller ones are passed by the caller."""


class Skipped(Exception):
    """A peer that this workload or this machine does not have; the text says why."""


class Side:
    """A built program: `call` runs it once and waits, `stream` runs it several times and waits for the last."""

    def __init__(self, call: Callable[[], list[Any]], stream: Callable[[int], None] | None = None) -> None:
        self.call = call
        self.facts: dict[str, Any] = {}
        self.stream = stream or self._repeat

    def _repeat(self, count: int) -> None:
        for _ in range(count):
            self.call()


def lacking(packages: tuple[str, ...]) -> str:
    """'skipped' text of the packages that are not installed, '' where all are."""
    missing = [p for p in packages if importlib.util.find_spec(p) is None]
    return f"needs {', '.join(missing)}" if missing else ""


def stored(job: dict[str, Any]) -> list[Any]:
    """Inputs that `convert` wrote."""
    import numpy as np

    with np.load(Path(job["folder"]) / "inputs.npz") as found:
        return [found[f"arr_{k}"] for k in range(len(found.files))]


def openvino(job: dict[str, Any]) -> Side:
    """OpenVINO's CPU plugin with a performance hint; large carried arrays are state of the model."""
    import numpy as np
    import openvino as ov

    throughput = job["peer"] == "openvino_throughput"
    inputs, carried = stored(job), job["conversion"]["carried"]
    if throughput and carried:
        raise Skipped("every call waits for the one before, there is nothing to run beside it")
    start = time.perf_counter()
    core = ov.Core()
    model = core.read_model(str(Path(job["folder"]) / "model.onnx"))
    states = [k for k in range(carried) if inputs[k].size >= STATE_SIZE]
    if states:
        from openvino._offline_transformations import apply_make_stateful_transformation

        names = {model.inputs[k].any_name: model.outputs[k].any_name for k in states}
        apply_make_stateful_transformation(model, names)
    config = {
        "PERFORMANCE_HINT": "THROUGHPUT" if throughput else "LATENCY",
        "INFERENCE_PRECISION_HINT": "bf16" if job["dtype"] == "bfloat16" else "f32",
    }
    compiled = core.compile_model(model, "CPU", config)
    rest = [k for k in range(len(inputs)) if k not in states]
    assert len(compiled.inputs) == len(rest)
    request = compiled.create_infer_request()
    if states:
        order = {name: k for k, name in zip(states, names, strict=True)}
        for state in request.query_state():
            k = next(k for name, k in order.items() if name in state.name)
            state.state = ov.Tensor(inputs[k])
    feed = [inputs[k] for k in rest]
    back = [(i, k - sum(s < k for s in states)) for i, k in enumerate(rest) if k < carried]

    def call() -> list[Any]:
        results = request.infer(dict(enumerate(feed)), share_inputs=True, share_outputs=True)
        values = [results[o] for o in compiled.outputs]
        for i, k in back:
            feed[i] = np.array(values[k]).reshape(feed[i].shape)
        return values

    side = Side(call)
    if throughput:
        queue = ov.AsyncInferQueue(compiled)

        def stream(count: int) -> None:
            for _ in range(count):
                queue.start_async(dict(enumerate(feed)), share_inputs=True)
            queue.wait_all()

        side.stream = stream
        side.facts["requests"] = len(queue)
    side.facts |= {
        "compile_seconds": time.perf_counter() - start,
        "config": config,
        "threads": compiled.get_property("INFERENCE_NUM_THREADS"),
        "streams": int(compiled.get_property("NUM_STREAMS")),
        "states": len(states),
        "results_left_out": states,
    }
    return side


def onnxruntime(job: dict[str, Any]) -> Side:
    """ONNX Runtime's CPU provider: all graph optimisations, as many threads as cores, results bound to buffers."""
    import numpy as np
    import onnxruntime as ort

    if job["dtype"] == "bfloat16":
        refuse_bfloat16()
    inputs, carried = stored(job), job["conversion"]["carried"]
    start = time.perf_counter()
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.intra_op_num_threads = job["cores"]
    options.log_severity_level = 3
    session = ort.InferenceSession(str(Path(job["folder"]) / "model.onnx"), options, ["CPUExecutionProvider"])
    names, outs = ([x.name for x in g()] for g in (session.get_inputs, session.get_outputs))
    assert len(names) == len(inputs)
    binding = session.io_binding()
    held = [ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(x)) for x in inputs]

    def call() -> list[Any]:
        for name, value in zip(names, held, strict=True):
            binding.bind_ortvalue_input(name, value)
        for k, name in enumerate(outs):
            if k < len(spare):
                binding.bind_ortvalue_output(name, spare[k])
            else:
                binding.bind_output(name)
        session.run_with_iobinding(binding)
        results = binding.get_outputs()
        for k in range(carried):
            held[k], spare[k] = results[k], held[k]
        return results

    spare = [ort.OrtValue.ortvalue_from_numpy(np.empty_like(x)) for x in inputs[:carried]]
    side = Side(lambda: [r.numpy() for r in call()], lambda count: [call() for _ in range(count)] and None)
    side.facts = {"compile_seconds": time.perf_counter() - start, "threads": job["cores"], "level": "ORT_ENABLE_ALL"}
    return side


def refuse_bfloat16() -> None:
    """Says that the CPU provider has no product in bfloat16, in its own words, if it has none."""
    import onnx
    import onnxruntime as ort
    from onnx import TensorProto, helper

    kind = TensorProto.BFLOAT16
    x, y, z = (helper.make_tensor_value_info(n, kind, [4, 4]) for n in "xyz")
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "y"], ["z"])], "product", [x, y], [z])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    assert onnx.checker.check_model(model) is None
    try:
        ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    except Exception as error:
        text = " ".join(str(error).split())
        raise Skipped(f"no product in bfloat16 on the CPU: {text}"[:300]) from None
    raise Skipped("products in bfloat16 are accepted by this version, models in bfloat16 are not exported yet")
