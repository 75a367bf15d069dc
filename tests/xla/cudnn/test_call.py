"""Divided convolutions by cuDNN as one XLA call, with a cuDNN that computes in host memory."""

from __future__ import annotations

import gc
import json
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jcuts.base.errors import NativeError, UsageError
from jcuts.microbatch.convolution import KINDS, Convolution
from jcuts.microbatch.timings import Division, MicroConfig, sliced
from jcuts.xla.cudnn import call as cudnn_call

ROOT = Path(__file__).resolve().parents[3]
SPACE = 4096  # bytes per sample and algorithm number that the library asks for

LAYERS = {
    "plain": Convolution("forward", 3, 5, (7, 6), (3, 3), padding=((1, 1), (1, 1))),
    "strided": Convolution("forward", 4, 6, (9, 8), (3, 2), strides=(2, 3), padding=((1, 1), (0, 0))),
    "dilated": Convolution("forward", 2, 4, (9, 9), (3, 2), padding=((2, 2), (1, 1)), dilation=(2, 3)),
    "groups": Convolution("forward", 6, 4, (6, 5), (3, 3), strides=(2, 1), padding=((1, 1), (1, 1)), groups=2),
    "depthwise": Convolution("forward", 4, 4, (6, 6), (3, 3), padding=((1, 1), (1, 1)), groups=4),
    "1-D": Convolution("forward", 3, 4, (11,), (4,), strides=(2,), padding=((1, 1),)),
    "3-D": Convolution("forward", 2, 3, (4, 5, 3), (2, 3, 2), padding=((1, 1), (0, 0), (1, 1))),
    "rest": Convolution("forward", 2, 3, (8, 8), (3, 3), strides=(2, 2), padding=((1, 1), (1, 1))),
}  # "rest": the last row and column of the image belong to no window


def of(name: str, kind: str, layout: str = "NCHW", dtype: str = "float32") -> Convolution:
    return Convolution.from_json({**LAYERS[name].to_json(), "kind": kind, "layout": layout, "dtype": dtype})


def division(kind: str, *sizes: int, algorithm: int = 1, math: str = "float32") -> Division:
    name = cudnn_call.algorithms(kind)[algorithm]
    return Division.of(MicroConfig(n, name, math, 1e-3, SPACE * n * algorithm) for n in sizes)


def order(convolution: Convolution) -> tuple[int, ...]:
    """Arrays of the tests are N C ..., K C ... whatever the layout in memory."""
    rank = len(convolution.spatial) + 2
    return tuple(range(rank)) if convolution.layout == "NCHW" else (0, *range(2, rank), 1)


def arrays(c: Convolution, batch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x, w, dy as small integers: sums are exact in every order."""
    rng = np.random.default_rng(3)
    shapes = (
        (batch, c.channels, *c.spatial),
        (c.outputs, c.channels // c.groups, *c.window),
        (batch, c.outputs, *c.result),
    )
    x, w, dy = (rng.integers(-3, 4, shape).astype(np.dtype(c.dtype)) for shape in shapes)
    return x, w, dy


def reference(c: Convolution, x: np.ndarray, w: np.ndarray, dy: np.ndarray) -> np.ndarray:
    """By XLA: the layer, or a gradient of it."""
    names = "NCHW"[:2] + "DHW"[3 - len(c.spatial) :], "OI" + "DHW"[3 - len(c.spatial) :]

    def layer(x, w):
        return jax.lax.conv_general_dilated(
            x,
            w,
            c.strides,
            c.padding,
            rhs_dilation=c.dilation,
            feature_group_count=c.groups,
            dimension_numbers=(names[0], names[1], names[0]),
            precision="highest",
        )

    y, gradients = jax.vjp(layer, jnp.asarray(x), jnp.asarray(w))
    if c.kind == "forward":
        return np.asarray(y)
    dx, dw = gradients(jnp.asarray(dy, y.dtype))
    return np.asarray(dx if c.kind == "backward_data" else dw)


def operands_of(c: Convolution, x: np.ndarray, w: np.ndarray, dy: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return {"forward": (x, w), "backward_data": (dy, w), "backward_filter": (x, dy)}[c.kind]


def compiled(c: Convolution, chosen: Division, result: np.ndarray, **more):
    """The jitted call on the operands, and on what is added to."""

    def run(a, b, *onto):
        return cudnn_call.call(
            c,
            chosen,
            (a, b),
            result,
            layer="conv1",
            orders=[order(c)] * 3,
            platform="cpu",
            onto=onto[0] if onto else None,
            **more,
        )

    return jax.jit(run)


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", LAYERS)
def test_divided_is_undivided(host_cudnn, name, kind, layout):
    c = of(name, kind, layout)
    x, w, dy = arrays(c, 7)
    expected = reference(c, x, w, dy)
    a, b = operands_of(c, x, w, dy)
    for sizes in ((7,), (3, 3, 1), (4, 2, 1), (1,) * 7):
        found = compiled(c, division(kind, *sizes), expected)(a, b)
        np.testing.assert_array_equal(found, expected, err_msg=str(sizes))
        launched = [
            call for call in host_cudnn.calls() if call.split()[0] in ("Forward", "BackwardData", "BackwardFilter")
        ]
        assert [int(re.search(r"n=(\d+)", call)[1]) for call in launched] == list(sizes)
        betas = [float(re.search(r"beta=(\S+)", call)[1]) for call in launched]
        # Filters' gradients of the pieces add up from the second piece on; everything else is written once.
        assert betas == [0.0] + [1.0 if kind == "backward_filter" else 0.0] * (len(sizes) - 1)


@pytest.mark.parametrize("kind", KINDS)
def test_adds_to_what_is_there(host_cudnn, kind):
    c = of("strided", kind)
    x, w, dy = arrays(c, 5)
    expected = reference(c, x, w, dy)
    onto = np.full(expected.shape, 10, np.float32)
    found = compiled(c, division(kind, 2, 2, 1), expected)(*operands_of(c, x, w, dy), onto)
    np.testing.assert_array_equal(found, expected + 10)
    assert all("beta=1" in call for call in host_cudnn.calls() if "beta" in call)


@pytest.mark.parametrize("onto", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["plain", "strided", "dilated", "1-D", "3-D", "rest"])
def test_slices_of_the_outputs_are_the_whole(host_cudnn, monkeypatch, name, kind, onto):
    monkeypatch.setenv("FAKE_CUDNN_OUTPUTS", "6")
    c = Convolution.from_json({**of(name, kind).to_json(), "outputs": 6})
    x, w, dy = arrays(c, 6)
    expected = reference(c, x, w, dy)
    operands = operands_of(c, x, w, dy) + ((np.full(expected.shape, 10, np.float32),) if onto else ())
    algorithm = cudnn_call.algorithms(kind)[2]
    for slices in (2, 3):
        # Three samples in slices, which are packed, then two at once by another algorithm, then one in slices.
        packed = -(-3 * c.result_bytes // slices // 256) * 256
        parts = [
            MicroConfig(3, sliced(algorithm, slices), "float32", 1e-3, packed + SPACE * 3 * 2 // slices),
            MicroConfig(2, cudnn_call.algorithms(kind)[0], "float32", 1e-3, 0),
            MicroConfig(1, sliced(algorithm, slices), "float32", 1e-3, SPACE * 2 // slices),
        ]
        host_cudnn.calls()
        found = compiled(c, Division.of(parts), expected)(*operands)
        np.testing.assert_array_equal(found, expected + 10 * onto)
        calls = [call for call in host_cudnn.calls() if "beta" in call]
        numbers = [int(re.search(r"k=(\d+)", call)[1]) for call in calls]
        assert numbers == [6 // slices] * slices + [6] + [6 // slices] * slices
        betas = [float(re.search(r"beta=(\S+)", call)[1]) for call in calls]
        # Slices of the gradient of an image add up, those of a filter's gradient are apart.
        later = {"forward": 0.0, "backward_data": 1.0, "backward_filter": 0.0}[kind]
        again = 1.0 if kind == "backward_filter" else 0.0
        plain = [0.0] + [later] * (slices - 1) + [again] + [again] + [max(later, again)] * (slices - 1)
        assert betas == ([1.0] * (2 * slices + 1) if onto else plain)


def test_a_slice_s_copy_counts_as_workspace(host_cudnn, monkeypatch):
    monkeypatch.setenv("FAKE_CUDNN_OUTPUTS", "6")
    c = Convolution.from_json({**of("plain", "forward").to_json(), "outputs": 6})
    x, w, dy = arrays(c, 4)
    packed = -(-4 * c.result_bytes // 2 // 256) * 256
    for short, why in ((1, "needs"), (0, "")):
        chosen = Division.of([MicroConfig(4, "cudnn/GEMM/slices=2", "float32", 1e-3, packed + SPACE * 4 - short)])
        program = compiled(c, chosen, reference(c, x, w, dy))
        if why:
            assert f"needs {packed + SPACE * 4} bytes" in failure(program, x, w)
        else:
            np.testing.assert_array_equal(program(x, w), reference(c, x, w, dy))


@pytest.mark.parametrize("name, layout", [("groups", "NCHW"), ("plain", "NHWC"), ("strided", "NCHW")])
def test_channels_that_cannot_be_cut(host_cudnn, name, layout):
    c = of(name, "forward", layout)
    x, w, dy = arrays(c, 4)
    one = Division.of(
        [MicroConfig(4, sliced("cudnn/GEMM", 4 if name == "strided" else 2), "float32", 1e-3, 4 * 2 * SPACE)]
    )
    assert "cannot be cut into" in failure(compiled(c, one, reference(c, x, w, dy)), x, w)


@pytest.mark.parametrize(
    "dtype, math, numbers",
    [
        ("float64", "float64", "math=0 compute=1"),
        ("float32", "float32", "math=3 compute=0"),
        ("float32", "tf32", "math=0 compute=0"),
        ("float16", "float16", "math=3 compute=2"),
        ("float16", "float32", "math=3 compute=0"),
        ("float16", "float32+tensor", "math=1 compute=0"),
        ("bfloat16", "float32", "math=3 compute=0"),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_storage_and_arithmetic(host_cudnn, kind, dtype, math, numbers):
    with jax.enable_x64(dtype == "float64"):
        c = of("plain", kind, dtype=dtype)
        x, w, dy = arrays(of("plain", kind, dtype="float32"), 3)
        expected = reference(of("plain", kind, dtype="float32"), x, w, dy).astype(jnp.dtype(dtype))
        a, b = (np.asarray(v).astype(jnp.dtype(dtype)) for v in operands_of(c, x, w, dy))
        found = compiled(c, division(kind, 2, 1, math=math), expected)(a, b)
        assert found.dtype == jnp.dtype(dtype)
        error = np.abs(np.asarray(found, np.float64) - expected.astype(np.float64)).max()
        assert error <= 2 * float(jnp.finfo(dtype).eps) * np.abs(expected.astype(np.float64)).max()
        assert numbers in host_cudnn.calls()[-1]


def test_a_flipped_window(host_cudnn):
    c = of("strided", "forward")
    x, w, dy = arrays(c, 4)
    expected = reference(c, x, w, dy)
    found = compiled(c, division("forward", 3, 1), expected, flipped=True)(x, w[:, :, ::-1, ::-1])
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_optimised_program_moves_nothing(host_cudnn, kind, layout):
    c = of("strided", kind, layout)
    x, w, dy = arrays(c, 7)
    a, b = operands_of(c, x, w, dy)
    where = order(c)
    back = tuple(np.argsort(where))
    result = reference(c, x, w, dy)

    # Arrays in the order of memory, as a program of that layout has them.
    def run(a, b):
        a, b = a.transpose(back), b.transpose(back)
        out = cudnn_call.call(c, division(kind, 3, 3, 1), (a, b), result, layer="l", orders=[where] * 3, platform="cpu")
        return out.transpose(where)

    text = jax.jit(run).lower(a.transpose(where), b.transpose(where)).compile().as_text()
    operations = re.findall(r"= \S+ ([\w-]+)\(", text) + re.findall(r"\) ([\w-]+)\(", text)
    assert operations.count("custom-call") == 1
    assert set(operations) <= {"custom-call", "parameter", "get-tuple-element", "bitcast", "tuple"}, text
    assert f"u8[{SPACE * 3}]" in text  # the workspace of the largest piece, a result like any other


def test_descriptors_go_with_the_executable_and_handles_stay(host_cudnn):
    c = of("plain", "forward")
    x, w, dy = arrays(c, 4)
    jax.clear_caches()
    before = host_cudnn.alive()
    program = compiled(c, division("forward", 2, 2), reference(c, x, w, dy))
    for _ in range(3):
        program(x, w).block_until_ready()
    assert host_cudnn.calls().count("Create") <= 1
    made = host_cudnn.alive() - before
    assert made == 1 + 3  # the filter; image, result and convolution of equal pieces once
    program.clear_cache()
    del program
    jax.clear_caches()
    # XLA's thread lets the executable go some time after its results are ready.
    end = time.monotonic() + 30
    while host_cudnn.alive() > before and time.monotonic() < end:
        gc.collect()
        time.sleep(0.01)
    assert host_cudnn.alive() <= before


@pytest.mark.parametrize(
    "names, graph, captured",
    [
        (["cudnn/GEMM"], True, True),
        (["cudnn/GEMM"], False, False),
        (["cudnn/GEMM", "cudnn/FFT/launched"], True, False),
        (["cudnn/FFT/slices=2"], True, True),
    ],
)
def test_what_refused_to_be_captured_is_launched(host_cudnn, monkeypatch, names, graph, captured):
    monkeypatch.setattr(cudnn_call, "ensure_registered", lambda _: None)
    c = Convolution("forward", 3, 16, (7, 6), (3, 3), padding=((1, 1), (1, 1)))
    chosen = Division.of(MicroConfig(2, name, "float32", 1e-3, 0) for name in names)
    result = np.zeros((2 * len(names), 16, 7, 6), np.float32)
    x, w = np.zeros((2 * len(names), 3, 7, 6), np.float32), np.zeros((16, 3, 3, 3), np.float32)

    def run(x, w):
        return cudnn_call.call(
            c, chosen, (x, w), result, layer="l", orders=[order(c)] * 3, platform="cuda", graph=graph
        )

    text = str(jax.make_jaxpr(run)(x, w))
    assert (cudnn_call.GRAPH_TARGET in text) == captured and cudnn_call.TARGETS["cuda"] in text


def test_threads_take_turns(host_cudnn):
    c = of("strided", "backward_filter")
    x, w, dy = arrays(c, 7)
    expected = reference(c, x, w, dy)
    program = compiled(c, division("backward_filter", 3, 3, 1), expected)
    program(x, dy)
    with ThreadPoolExecutor(8) as pool:
        for found in pool.map(lambda _: np.asarray(program(x, dy)), range(40)):
            np.testing.assert_array_equal(found, expected)


ON_A_DEVICE = """
import ctypes, json, sys
import numpy as np
from jcuts.base.errors import NativeError
from jcuts.microbatch.convolution import Convolution
from jcuts.microbatch.timings import Division, MicroConfig
from jcuts.xla.cudnn import call as cudnn
from jcuts.xla.cudnn.plan import Plan

assert cudnn.load().jcuts_cudnn_set_driver(sys.argv[1].encode()) == 0
fake = ctypes.CDLL(sys.argv[2])
fake.fake_log.restype = ctypes.c_char_p
c = Convolution("forward", 1, 1, (3, 3), (2, 2))
division = Division.of(MicroConfig(n, "cudnn/IMPLICIT_GEMM", "float32", 1.0, 0) for n in (2, 1))
found = {}
try:
    plan = Plan(c, division, 1)
    x, w, y = np.ones((3, 1, 3, 3), "f"), np.ones((1, 1, 2, 2), "f"), np.zeros((3, 1, 2, 2), "f")
    plan.run(7, x.ctypes.data, w.ctypes.data, y.ctypes.data, 0)
    found["log"], found["y"] = fake.fake_log().decode(), y.tolist()
    c = Convolution("forward", 1, 2, (4, 4), (2, 2))
    one = Division.of([MicroConfig(3, "cudnn/IMPLICIT_GEMM/slices=2", "float32", 1.0, 0)])
    plan = Plan(c, one, 1)
    x, w, y = np.ones((3, 1, 4, 4), "f"), np.ones((2, 1, 2, 2), "f"), np.zeros((3, 2, 3, 3), "f")
    w[1] = 2
    space = np.zeros(plan.needed, "u1")
    driver = ctypes.CDLL(sys.argv[1])
    driver.fake_log.restype = ctypes.c_char_p
    plan.run(7, x.ctypes.data, w.ctypes.data, y.ctypes.data, space.ctypes.data)
    found["slices"], found["copies"], found["needed"] = y[:, :, 0, 0].tolist(), driver.fake_log().decode(), plan.needed
    driver.fake_fail(b"cuMemcpy2DAsync")
    try:
        plan.run(7, x.ctypes.data, w.ctypes.data, y.ctypes.data, space.ctypes.data)
    except NativeError as error:
        found["not copied"] = error.message
    fake.fake_fail(b"SetStream")
    plan.run(7, x.ctypes.data, w.ctypes.data, y.ctypes.data, 0)
except NativeError as error:
    found["error"] = error.message
print(json.dumps(found))
"""


def on_a_device(tmp_path: Path, host_cudnn_path: Path, **more: str) -> dict:
    driver = tmp_path / "libfake_cuda.so"
    source = Path(__file__).parents[1] / "fake_cuda.cc"
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++") or "g++"
    subprocess.run([compiler, "-std=c++17", "-shared", "-fPIC", str(source), "-o", str(driver)], check=True)
    text = python(ON_A_DEVICE, str(driver), str(host_cudnn_path), JCUTS_CUDNN=str(host_cudnn_path), **more)
    return json.loads(text)


def test_on_a_device_the_stream_is_set_once_per_call(host_cudnn_path, tmp_path):
    found = on_a_device(tmp_path, host_cudnn_path)
    assert found["y"] == [[[[4.0, 4.0], [4.0, 4.0]]]] * 3
    names = [call.split()[0] for call in found["log"].split(";") if call]
    assert names == ["Create", "SetStream", "Forward", "Forward"]
    assert found["slices"] == [[4.0, 8.0]] * 3 and found["needed"] == 256  # 3 samples of 9 numbers, packed
    assert found["copies"] == "cuMemcpy2DAsync 3 x 36 B on 7;" * 2
    assert "at sample 0 failed: CUDA_ERROR_ILLEGAL_ADDRESS (700)" in found["not copied"]
    assert "cudnnSetStream failed: CUDNN_STATUS_EXECUTION_FAILED (5000)" in found["error"]


def test_a_driver_without_a_device_is_an_error(host_cudnn_path, tmp_path):
    found = on_a_device(tmp_path, host_cudnn_path, FAKE_NO_DEVICE="1")
    assert "(forward): cuInit failed: CUDA_ERROR_NO_DEVICE" in found["error"]


def failure(program, *arguments) -> str:
    with pytest.raises(Exception) as caught:  # XLA's own error type
        program(*arguments)[0].block_until_ready()
    return str(caught.value)


def test_errors_name_layer_kernel_algorithm_and_status(host_cudnn):
    for kind, what in zip(KINDS, ("Forward", "BackwardData", "BackwardFilter"), strict=True):
        c = of("plain", kind)
        x, w, dy = arrays(c, 5)
        program = compiled(c, division(kind, 3, 2, algorithm=2), reference(c, x, w, dy))
        host_cudnn.fail(what)
        text = failure(program, *operands_of(c, x, w, dy))
        assert f"convolution conv1 ({kind.replace('_', '-')})" in text
        assert f"algorithm {cudnn_call.algorithms(kind)[2].removeprefix('cudnn/')} (2)" in text
        assert "FMA_MATH for a micro-batch of 3 at sample 0 failed" in text
        assert "CUDNN_STATUS_EXECUTION_FAILED (5000): as the test asked" in text
        host_cudnn.fail("")
        program(*operands_of(c, x, w, dy))[0].block_until_ready()  # it is tried again


def test_impossible_algorithms_and_descriptors(host_cudnn):
    c = of("plain", "forward")
    x, w, dy = arrays(c, 4)
    y = reference(c, x, w, dy)
    text = failure(compiled(c, division("forward", 4, algorithm=3), y), x, w)
    assert "DIRECT (3)" in text and "is not possible: CUDNN_STATUS_NOT_SUPPORTED (3000)" in text
    host_cudnn.fail("SetConvolution")
    text = failure(compiled(c, division("forward", 4, algorithm=2), y), x, w)
    assert "describing algorithm GEMM (2)" in text and "CUDNN_STATUS_EXECUTION_FAILED" in text


def test_a_workspace_that_is_too_small(host_cudnn):
    c = of("plain", "forward")
    x, w, dy = arrays(c, 4)
    small = Division.of([MicroConfig(4, "cudnn/FFT", "float32", 1e-3, 1000)])
    text = failure(compiled(c, small, reference(c, x, w, dy)), x, w)
    assert f"needs {SPACE * 4 * 4} bytes of workspace, the call provides 1000" in text and "FFT (4)" in text


def test_wrong_shapes_are_errors(host_cudnn):
    c = of("plain", "forward")
    x, w, dy = arrays(c, 4)
    text = failure(compiled(c, division("forward", 4), reference(c, x, w, dy)), x[:3], w)
    assert "buffer 0 has" in text
    with pytest.raises(UsageError, match="cuDNN has no 'xla'"):
        cudnn_call.part_numbers(c, Division.of([MicroConfig(4, "xla", "float32", 1e-3, 0)]))
    with pytest.raises(UsageError, match="cannot pad"):
        cudnn_call.shape_numbers(Convolution("forward", 1, 1, (4,), (2,), padding=((0, 1),)), 2)


def test_which_cudnn(host_cudnn):
    assert cudnn_call.unusable("cpu") == "" and cudnn_call.version() == "9.19.0"
    assert "not for GPUs" in cudnn_call.unusable("cuda")
    assert "platform tpu" in cudnn_call.unusable("tpu")


def python(code: str, *arguments: str, **more: str) -> str:
    env = {**os.environ, "PYTHONPATH": str(ROOT), **more}
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


WHY = "from jcuts.xla.cudnn import call as cudnn\nprint(cudnn.unusable('cpu'), '|', cudnn.unusable('cuda'))"


def test_a_missing_library_is_a_reason(tmp_path):
    text = python(WHY, JCUTS_CUDNN=str(tmp_path / "none.so"))
    assert "does not compute on platform cpu" in text and "cuDNN cannot be opened" in text and "none.so" in text


def test_an_old_or_a_wrong_library_is_a_reason(host_cudnn_path):
    assert "cuDNN 7605 is too old" in python(WHY, JCUTS_CUDNN=str(host_cudnn_path), FAKE_CUDNN_VERSION="7605")
    assert "lacks cudnnGetVersion" in python(WHY, JCUTS_CUDNN="libm.so.6")


def test_without_a_choice_nothing_computes_on_the_host():
    assert "does not compute on platform cpu" in cudnn_call.unusable("cpu")


def test_a_missing_native_library_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setenv("JCUTS_NATIVE", str(tmp_path / "libjcuts_cpu.so"))
    with pytest.raises(NativeError, match=r"libjcuts_cudnn\.so is not a file"):
        cudnn_call.load.__wrapped__()
