"""Rewrites of exported ONNX models into the operators that runtimes optimise: pools, Clip, MatMul, LayerNormalization.

The converter (`onnx_export.py`) writes what JAX computes step by step; a model exported from a framework's own layers
has these operators, and without them a baseline would be slower than what its users see.
"""

from __future__ import annotations

from typing import Any

TO_NCHW = (0, 3, 1, 2)
TO_NHWC = (0, 2, 3, 1)


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
    put(model, replaced, dropped)
    return len(replaced)


def clips(model: Any) -> int:
    """Rewrites the smaller of a number and the larger of another as Clip, which runtimes fuse; gives how many."""
    from onnx import helper

    scalars = {t.name for t in model.graph.initializer if not t.dims}
    readers: dict[str, list[Any]] = {}
    for node in model.graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    replaced: dict[str, list[Any]] = {}
    dropped = set()
    for node in model.graph.node:
        found = readers.get(node.output[0], [])
        if node.op_type != "Max" or len(found) != 1 or found[0].op_type != "Min" or len(node.input) != 2:
            continue
        upper = found[0]
        low, high = ([n for n in x.input if n in scalars] for x in (node, upper))
        if len(low) == len(high) == 1:
            value = next(n for n in node.input if n != low[0])
            replaced[upper.output[0]] = [helper.make_node("Clip", [value, low[0], high[0]], [upper.output[0]])]
            dropped.add(node.output[0])
    put(model, replaced, dropped)
    return len(replaced)


def products(model: Any) -> int:
    """Rewrites Einsum of two arrays with one free dimension each as MatMul between transposes; gives how many."""
    from onnx import helper

    replaced: dict[str, list[Any]] = {}
    for node in model.graph.node:
        if node.op_type != "Einsum" or len(node.input) != 2:
            continue
        equation = next(a.s.decode() for a in node.attribute if a.name == "equation").replace(" ", "")
        made = product(equation, node, helper.make_node)
        if made:
            replaced[node.output[0]] = made
    put(model, replaced, set())
    return len(replaced)


def product(equation: str, node: Any, make: Any) -> list[Any]:
    """Nodes of one Einsum, [] where it is no plain product.

    A product with a matrix keeps all dimensions of the left operand; else both have the same batch dimensions.
    """
    (a, b), out = equation.split("->")[0].split(","), equation.split("->")[1]
    shared = [d for d in a if d in b and d not in out]
    if len(shared) != 1:
        return []
    inner = shared[0]
    if len(b) == 2 and a[-1] == inner and b[0] == inner and out == a[:-1] + b[1]:
        return [make("MatMul", list(node.input), list(node.output))]
    batch = [d for d in out if d in a and d in b]
    free = [[d for d in x if d not in batch and d != inner] for x in (a, b)]
    if len(free[0]) != 1 or len(free[1]) != 1:
        return []
    nodes, names = [], []
    for k, (have, want) in enumerate(((a, [*batch, *free[0], inner]), (b, [*batch, inner, *free[1]]))):
        names.append(f"{node.output[0]}_operand{k}")
        nodes.append(make("Transpose", [node.input[k]], names[-1:], perm=[have.index(d) for d in want]))
    order = [*batch, *free[0], *free[1]]
    if "".join(order) == out:
        return [*nodes, make("MatMul", names, list(node.output))]
    made = f"{node.output[0]}_product"
    last = make("Transpose", [made], list(node.output), perm=[order.index(d) for d in out])
    return [*nodes, make("MatMul", names, [made]), last]


def layer_norms(model: Any) -> int:
    """Rewrites (x - mean) / sqrt(variance + eps) * gain + bias over the last dimension; gives how many."""
    from onnx import helper, numpy_helper

    producers = {out: node for node in model.graph.node for out in node.output}
    readers: dict[str, list[Any]] = {}
    for node in model.graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    constants = {t.name: t for t in model.graph.initializer}
    replaced: dict[str, list[Any]] = {}
    dropped: set[str] = set()
    for root in model.graph.node:
        found = normalisation(root, producers, readers, constants) if root.op_type == "Sqrt" else None
        if found is None:
            continue
        x, epsilon, chain, size = found
        names = []
        for k, (node, rank) in enumerate(zip(chain[-2:], ("gain", "bias"), strict=True)):
            constant = next(n for n in node.input if n in constants)
            names.append(f"{root.output[0]}_{rank}")
            shape = f"{names[-1]}_shape"
            model.graph.initializer.append(numpy_helper.from_array(_integers([size]), shape))
            made = [helper.make_node("Reshape", [constant, shape], [names[-1]])]
            if len(constants[constant].dims) > 1:  # the converter repeats it for every image of the batch
                ends = [f"{names[-1]}_{n}" for n in ("from", "to", "axis")]
                for value, end in zip((0, 1, 0), ends, strict=True):
                    model.graph.initializer.append(numpy_helper.from_array(_integers([value]), end))
                made.insert(0, helper.make_node("Slice", [constant, *ends], [f"{names[-1]}_first"]))
                made[1].input[0] = f"{names[-1]}_first"
            chain[k - 2] = (node, made)
        last = chain[-1][0]
        norm = helper.make_node("LayerNormalization", [x, *names], list(last.output), axis=-1, epsilon=epsilon)
        replaced[last.output[0]] = [*chain[-2][1], *chain[-1][1], norm]
        dropped |= {n.output[0] for n in chain[:-2]} | {chain[-2][0].output[0]}
    put(model, replaced, dropped)
    return len(replaced)


def normalisation(root: Any, producers: Any, readers: Any, constants: Any) -> tuple[str, float, list[Any], int] | None:
    """(x, epsilon, nodes in the chain with gain's and bias' last, size) of the layer norm around a square root."""
    from onnx import numpy_helper

    def above(name: str, *kinds: str) -> Any:
        """The producer, looked for behind changes of shape; None where it is of another kind."""
        node = producers.get(name)
        while node is not None and node.op_type in ("Reshape", "Expand", "Unsqueeze") and "Reshape" not in kinds:
            chain.append(node)
            node = producers.get(node.input[0])
        if node is None or node.op_type not in kinds:
            return None
        chain.append(node)
        return node

    def below(node: Any, kind: str) -> Any:
        found = readers.get(node.output[0], [])
        return found[0] if len(found) == 1 and found[0].op_type == kind else None

    def number(node: Any) -> float | None:
        name = next((n for n in node.input if n in constants), None)
        values = None if name is None else constants[name]
        return float(numpy_helper.to_array(values).ravel()[0]) if values is not None and is_small(values) else None

    chain: list[Any] = [root]
    steps = []
    name = root.input[0]
    for kinds in (("Add",), ("Div",), ("ReduceSumSquare",), ("Sub",)):
        node = above(name, *kinds)
        if node is None:
            return None
        steps.append(node)
        name = next((n for n in node.input if n not in constants), "")
    add, count, _, difference = steps
    x = difference.input[0]
    mean = above(difference.input[1], "Div")
    total = None if mean is None else above(next(n for n in mean.input if n not in constants), "ReduceSum")
    scaled = below(root, "Div")
    gain = None if scaled is None else below(scaled, "Mul")
    bias = None if gain is None else below(gain, "Add")
    if total is None or total.input[0] != x or bias is None or difference.output[0] not in scaled.input:
        return None
    size, epsilon = number(count), number(add)
    if not size or epsilon is None or any(vector(n, constants) != size for n in (gain, bias)):
        return None
    return x, epsilon, [*chain, scaled, gain, bias], int(size)


def vector(node: Any, constants: Any) -> int:
    """Last dimension of the constant that a node adds or multiplies, 0 without one that is a vector per image."""
    name = next((n for n in node.input if n in constants), None)
    dims = list(constants[name].dims) if name else []
    return dims[-1] if dims and all(d == 1 for d in dims[1:-1]) else 0


def is_small(tensor: Any) -> bool:
    """Whether a constant is one number that lies in the model's file."""
    return all(d == 1 for d in tensor.dims) and not tensor.external_data


def put(model: Any, replaced: dict[str, list[Any]], dropped: set[str]) -> None:
    """Replaces and drops nodes, both by the name of their first result."""
    kept: list[Any] = []
    for node in model.graph.node:
        kept += replaced.get(node.output[0], [] if node.output[0] in dropped else [node])
    del model.graph.node[:]
    model.graph.node.extend(kept)


def kernel_shape(model: Any, name: str) -> list[int]:
    """Shape of an initializer."""
    return next(list(t.dims) for t in model.graph.initializer if t.name == name)


def _float(value: float) -> Any:
    import numpy as np

    return np.asarray(value, np.float32)


def _integers(values: list[int]) -> Any:
    import numpy as np

    return np.asarray(values, np.int64)


BEFORE = (pools_of_images, clips, products)
"""Before a runtime's constants are folded."""
AFTER = (layer_norms,)
