"""The functions that `equivalence/run.py` records: those of the tests and benchmarks, networks, random programs.

    ops/...        every case of an operation                 gpu/...         every template with a form on a GPU
    tests/...      functions of other tests                   transform/...   what the transformation matrix optimises
    random/...     random programs of fixed seeds             network/...     networks with random weights, plain JAX

An entry makes either functions (function, arguments, whether 64-bit types are on) or kernel programs.  Nothing depends
on when, or after what, an entry is made.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "jax")

Function = tuple[Callable[..., Any], Sequence[Any], bool]
"""Function, arguments, whether 64-bit types are on."""
Made = dict[str, Any]
"""What an entry makes: name behind the entry's -> a `Function`, a closed jaxpr, or a program."""
Entry = Callable[[], Made]

NETWORKS = {
    "MobileNet": 96,
    "MobileNetV2": 96,
    "MobileNetV3Small": 96,
    "EfficientNetB0": 96,
    "EfficientNetV2B0": 96,
    "NASNetMobile": 224,
    "DenseNet121": 96,
    "ResNet50": 96,
    "ResNet50V2": 96,
    "VGG16": 96,
    "InceptionV3": 128,
    "Xception": 96,
    "ConvNeXtTiny": 96,
}
"""Networks of keras, with the height and width of their images."""
LARGE = {"ResNet50": (16, 224), "MobileNetV2": (16, 224)}
"""Batch and image size of networks that are recorded a second time: as large as those that are measured."""
ARGUMENTS = ("MobileNetV2", "ResNet50")
"""Networks that are recorded with their weights as arguments, too."""
SEEDS = range(90_000_000, 90_000_060)
MORE_SEEDS = range(190_000_000, 190_000_030)
"""Random programs, and those with networks and library functions in them (`random_programs.generator.MORE_FROM`)."""
TRANSFORMED = {"grad": range(91_000_000, 91_000_012), "vmap": range(92_000_000, 92_000_012)}


def entries() -> dict[str, Entry]:
    """Every entry by its name, in a fixed order; nothing is made yet."""
    found: dict[str, Entry] = {}
    for name, entry in _all():
        if name in found:
            raise ValueError(f"two entries are called {name}")
        found[name] = entry
    return found


def _all() -> Iterator[tuple[str, Entry]]:
    for name in sorted(NETWORKS, key=lambda n: n not in ("NASNetMobile", "DenseNet121", "InceptionV3")):
        yield f"network/{name}", _network(name, 1, NETWORKS[name], True)
    for name, (batch, size) in LARGE.items():
        yield f"network/{name} b{batch}", _network(name, batch, size, True)
    for name in ARGUMENTS:
        yield f"network/{name} arguments", _network(name, 1, NETWORKS[name], False)
    yield from _plain_jax()
    yield "network/MobileNetV2 bfloat16", _network("MobileNetV2", 1, 96, True, "bfloat16")
    yield from _random()
    yield from _ops()
    yield from _gpu()
    yield from _tests()
    yield from _transforms()


def _function(fn: Callable[..., Any], arguments: Sequence[Any], x64: bool = False) -> Entry:
    return lambda: {"": (fn, arguments, x64)}


def _zeros(shapes: Sequence[Sequence[int]], dtype: str = "float32") -> list[Any]:
    """Arguments that are arrays of these shapes."""
    import jax
    import jax.numpy as jnp

    return [jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype)) for shape in shapes]


# -- networks ---------------------------------------------------------------------------------------------------------
def _network(name: str, batch: int, size: int, closed: bool, dtype: str = "float32") -> Entry:
    def make() -> Made:
        import keras

        from benchmarks.networks import workloads

        try:
            fn, arguments = workloads.network(name, batch, closed=closed, size=size, dtype=dtype)
        finally:
            keras.config.set_dtype_policy("float32")
        return {"": (fn, arguments, False)}

    return make


def _plain_jax() -> Iterator[tuple[str, Entry]]:
    def made(name: str, **options: Any) -> Entry:
        def make() -> Made:
            from benchmarks.networks import workloads

            return {"": (*getattr(workloads, name)(**options), False)}

        return make

    yield "network/encoder", made("encoder")
    yield "network/bert of two layers", made("bert", layers=2, vocabulary=1000, closed=True)
    yield "network/bert, weights as arguments", made("bert", layers=1, vocabulary=1000)
    for name in ("octave", "shift_conv", "gru", "mlp_step"):
        yield f"network/{name}", made(name)


# -- random programs --------------------------------------------------------------------------------------------------
def _random() -> Iterator[tuple[str, Entry]]:
    def made(seed: int, transform: str) -> Entry:
        def make() -> Made:
            import jax

            from benchmarks.random_programs import generator, runner

            of = generator.program(seed, smooth=transform == "grad")
            with jax.enable_x64(of.kind.x64):
                fn, arguments = runner.transformed(of, transform, lambda f: f)
            return {"": (fn, arguments, of.kind.x64)}

        return make

    for seed in (*SEEDS, *MORE_SEEDS):
        yield f"random/{seed}", made(seed, "plain")
    for transform, seeds in TRANSFORMED.items():
        for seed in seeds:
            yield f"random/{transform} {seed}", made(seed, transform)


# -- cases of operations and templates --------------------------------------------------------------------------------
def _ops() -> Iterator[tuple[str, Entry]]:
    from tests.ops import cases

    for case in cases.CASES:
        yield f"ops/{case.name}", _function(case.call, [cases.make(text) for text in case.inputs], True)


def _gpu() -> Iterator[tuple[str, Entry]]:
    """Every case of a template as a function, and with all its schedules."""
    from tests.gpu import cases

    found = dict(cases.CASES)
    for dtype in cases.DTYPES:
        found.update((f"{dtype} {name}", case) for name, case in cases.typed(dtype).items())
    for dtype in cases.MATRIX_TYPES:
        found.update((f"{dtype} {name}", case) for name, case in cases.products(dtype).items())
    for name, (fn, arguments) in found.items():
        yield f"gpu/{name}", _with_schedules(fn, arguments)
    yield "gpu/recognised", _recognised
    yield "gpu/elementary", _elementary
    module = importlib.import_module("tests.gpu.test_products")
    for name, (fn, shapes) in module.CASES.items():
        yield f"gpu/products {name}", _with_schedules(fn, _arrays(shapes))


def _arrays(shapes: Sequence[Sequence[int]]) -> list[Any]:
    import numpy as np

    return [np.zeros(shape, np.float32) for shape in shapes]


def _with_schedules(fn: Callable[..., Any], arguments: Sequence[Any], x64: bool = True) -> Entry:
    def make() -> Made:
        import jax

        from tests import programs

        with jax.enable_x64(x64):
            built = programs.trace(fn, *arguments).build()
        return {"": (fn, arguments, x64), " as one program": built}

    return make


def _recognised() -> Made:
    """Programs that are found in more than one region, or by their weights."""
    from benchmarks.gpu_checks import sanitizer

    return {f" {name}": program for name, program, _ in sanitizer.recognised()}


def _elementary() -> Made:
    from jax import lax

    from tests.gpu import cases

    return {
        f" {dtype} {name}": (getattr(lax, name), [cases.normal(601, dtype=dtype)], True)
        for name in cases.ELEMENTARY
        for dtype in ("float32", "float64", "bfloat16")
    }


# Entries keep the names under which the first record has them.
MODULES = {
    "dfg.test_interpret": "kernel_ir.test_interpret",
    "region.test_find": "fusion.test_greedy",
    "trace.test_chunks": "rewrite.test_chunk_batch",
    "gpu.test_replays": "gpu.test_replays",
    "codegen.test_emit": "codegen.cpu.test_emit",
    "codegen.test_cuda": "codegen.cuda.test_cuda",
    "region.test_winograd": "schedule.cpu.test_winograd",
    "codegen.test_block": "codegen.cuda.inverted_residual.test_kernel",
    "codegen.test_block_halves": "codegen.cuda.inverted_residual.test_bfloat16",
}


# -- functions of other tests -----------------------------------------------------------------------------------------
def _tests() -> Iterator[tuple[str, Entry]]:
    def module(name: str) -> Any:
        return importlib.import_module(f"tests.{name}")

    # Functions with their arguments.
    tables = {
        "dfg.test_interpret": "FUNCTIONS",
        "region.test_find": "FUNCTIONS",
        "trace.test_chunks": "CASES",
        "gpu.test_replays": "FUNCTIONS",
        "codegen.test_emit": "TEMPLATES",
        "codegen.test_cuda": "TEMPLATES",
        "region.test_winograd": "CONVOLUTIONS",
    }
    for name, table in tables.items():
        for key, (fn, arguments) in getattr(module(MODULES[name]), table).items():
            plain = name.startswith(("codegen", "dfg", "region.test_winograd"))
            yield f"tests/{name} {key}", (_with_schedules if plain else _function)(fn, arguments, "64" in key)
    for key, make in module("pipeline.test_passes").PROGRAMS.items():
        yield f"tests/test_pipeline {key}", lambda make=make: {"": (*make(), False)}
    # With shapes of their arguments.
    for key, (fn, shapes, *_) in module("codegen.cuda.window.test_sliding_window").WINDOWS.items():
        yield f"tests/codegen.test_walk {key}", _with_schedules(fn, _arrays(shapes))
    for name in ("codegen.test_product_groups",):
        for key, (fn, shapes) in module("codegen.cuda.gemm.test_wgmma").LAYERS.items():
            yield f"tests/{name} {key}", _function(fn, _zeros(shapes))
    for key, (fn, weights, operand, _) in module("rewrite.test_tf32_weight_args").TURNED.items():
        yield f"tests/trace.test_turning {key}", _function(fn, _zeros((weights, operand)))
    for key, (fn, shapes) in module("rewrite.test_tf32_weight_args").LEFT.items():
        yield f"tests/trace.test_turning left {key}", _function(fn, _zeros(shapes))
    for key, (fn, x, weights) in module("rewrite.test_horizontal_matmul_args").WEIGHTS.items():
        yield f"tests/trace.test_joining {key}", _function(fn, (x, *weights))
    for key, (fn, *arguments) in module("rewrite.test_horizontal_matmul_args").LEFT.items():
        yield f"tests/trace.test_joining left {key}", _function(fn, arguments)
    for key, (fn, x, *_) in module("rewrite.test_tf32_weights").WEIGHTS.items():
        yield f"tests/trace.test_rounding {key}", _function(fn, (x,))
    for key, (fn, *arguments) in module("rewrite.test_tf32_weights").LEFT.items():
        yield f"tests/trace.test_rounding left {key}", _function(fn, arguments)
    transposed = module("codegen.cuda.elementwise.test_smem_transpose")
    for key, (fn, dtype, shape, count) in transposed.CASES.items():
        arguments = [transposed.numbers(shape, dtype) for _ in range(count)]
        yield f"tests/codegen.test_transposed {key}", _with_schedules(fn, arguments)
    patch = module("codegen.cuda.conv.test_few_channels")
    for key, (image, filters, params) in patch.CONVOLUTIONS.items():
        columns = filters[0] if "layout" in params else filters[-1]
        arguments = _arrays((image, filters, (columns,)))
        yield f"tests/codegen.test_patch {key}", _with_schedules(patch.layer(params), arguments, False)
    attention = module("codegen.cuda.attention.test_flash")
    for key, (mask, shape) in attention.MASKS.items():
        sizes = _zeros(((2, 37, 3, 8), (2, 53, 3, 8), (2, 53, 3, 8)))
        arguments = [*sizes, *_zeros((shape,), "bool")]
        yield f"tests/codegen.test_attention {key}", _function(attention._masked(mask), arguments)
    for name in ("codegen.test_block", "codegen.test_block_halves"):
        for table in ("BLOCKS", "NETWORK"):
            for key, layers in getattr(module(MODULES[name]), table).items():
                yield f"tests/{name} {table} {key}", lambda layers=layers: {"": (layers, layers.arguments(), False)}


# -- the transformation matrix ----------------------------------------------------------------------------------------
def _transforms() -> Iterator[tuple[str, Entry]]:
    from tests.primitive import transform_cases

    for name, case in transform_cases.CASES.items():
        yield f"transform/{name}", lambda case=case: _recorded(case)


def _recorded(case: Callable[[Any], Any]) -> Made:
    """What is optimised in a case: its jaxprs by their canonical digests, in an order that no thread decides."""
    import jax

    from benchmarks.equivalence import seams

    found: list[Any] = []
    jax.clear_caches()  # what another case has lowered is not lowered again
    with seams.recording(found) as optimize:
        case(optimize)
    jax.clear_caches()
    return {f" {k}": closed for k, (_, closed) in enumerate(sorted({seams.identity(c): c for c in found}.items()))}
