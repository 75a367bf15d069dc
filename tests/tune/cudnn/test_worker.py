"""What the measuring process does for a convolution, on the host and on a device that only records."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from jcuts.base.errors import NativeError, WorkerFailed
from jcuts.microbatch.convolution import KINDS, Convolution
from jcuts.tune.cudnn import devices as cudnn_devices
from jcuts.tune.cudnn import worker as cudnn_worker
from jcuts.tune.measure import cuda_driver
from jcuts.xla.cudnn import call as cudnn_call
from jcuts.xla.cudnn.match import LIBRARY
from jcuts.xla.cudnn.plan import HOST, Plan, buffer_bytes

SPACE = 4096


def request(c: Convolution, batch: int = 3, **more):
    return {"convolution": c.to_json(), "batch": batch, "seconds": 0.02, **more}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_every_algorithm_has_a_time_and_a_workspace_or_a_reason(host_cudnn, kind, dtype):
    c = Convolution(kind, 2, 4, (6, 5), (3, 3), padding=((1, 1), (1, 1)), groups=2, dtype=dtype)
    labels = []
    found = cudnn_worker.measure_cudnn_algorithms(request(c), labels.append)
    maths = {"float32": 2, "float64": 1, "float16": 4}[dtype]
    names = cudnn_call.algorithms(kind)
    assert len(found["micros"]) + len(found["left_out"]) == len(names) * maths
    assert len(labels) == len(names) * maths + 1 and labels[-1] == ""
    for micro in found["micros"]:
        assert micro["workspace"] == SPACE * 3 * names.index(micro["algorithm"]) and micro["seconds"] > 0
    assert all("CUDNN_STATUS_NOT_SUPPORTED" in why for _, why in found["left_out"])
    assert bool(found["left_out"]) == (kind == "forward")  # DIRECT


def test_a_limit_and_a_list_of_crashed_ones(host_cudnn):
    c = Convolution("backward_data", 2, 4, (6, 5), (3, 3), dtype="float64")
    found = cudnn_worker.measure_cudnn_algorithms(
        request(c, limit=SPACE * 3, skip=["cudnn/ALGO_0 float64"]), lambda _: None
    )
    assert [m["algorithm"] for m in found["micros"]] == ["cudnn/ALGO_1"]
    reasons = dict(found["left_out"])
    assert "crashed" in reasons["cudnn/ALGO_0 float64"] and "bytes" not in reasons["cudnn/FFT float64"]
    assert f"needs {2 * 3 * SPACE} B of workspace, {3 * SPACE} B are allowed" in reasons["cudnn/FFT float64"]


def test_a_wrong_result_is_out(host_cudnn, monkeypatch):
    c = Convolution("forward", 2, 3, (5, 5), (3, 3), dtype="float64")
    run = Plan.run

    def spoilt(self, stream, a, b, out, space):
        run(self, stream, a, b, out, space)
        if self.needed == 2 * 3 * SPACE:  # GEMM
            np.ctypeslib.as_array((np.ctypeslib.ctypes.c_double * 3).from_address(out))[:] += 1e3

    monkeypatch.setattr(Plan, "run", spoilt)
    found = cudnn_worker.measure_cudnn_algorithms(request(c), lambda _: None)
    assert "cudnn/GEMM" not in [m["algorithm"] for m in found["micros"]]
    assert "is off by" in dict(found["left_out"])["cudnn/GEMM float64"]


@pytest.mark.parametrize(
    "accuracy, off, admitted",
    [
        ("exact", 5e-5, True),
        ("exact", 1e-3, False),
        ("vendor", 5e-3, True),
        ("vendor", 5e-2, False),
    ],
)
def test_how_exact_float32_must_be(host_cudnn, monkeypatch, accuracy, off, admitted):
    c = Convolution("forward", 2, 3, (5, 5), (3, 3))
    run = Plan.run

    def spoilt(self, stream, a, b, out, space):
        run(self, stream, a, b, out, space)
        if self.needed == 2 * 3 * SPACE:  # GEMM
            np.ctypeslib.as_array((np.ctypeslib.ctypes.c_float * (3 * 3 * 9)).from_address(out))[:] *= 1 + off

    monkeypatch.setattr(Plan, "run", spoilt)
    micros = cudnn_worker.measure_cudnn_algorithms(request(c, accuracy=accuracy), lambda _: None)["micros"]
    assert (("cudnn/GEMM", "float32") in [(m["algorithm"], m["math"]) for m in micros]) == admitted


@pytest.mark.parametrize("kind", KINDS)
def test_slices_of_the_outputs(host_cudnn, monkeypatch, kind):
    monkeypatch.setenv("FAKE_CUDNN_OUTPUTS", "48")
    c = Convolution(kind, 2, 48, (4, 4), (3, 3), padding=((1, 1), (1, 1)))
    names = cudnn_call.algorithms(kind)
    at = names.index("cudnn/FFT")
    limit = SPACE * at + 3 * c.result_bytes // 3  # a third of the whole, and the copy of a third of the result
    wanted = [
        ("cudnn/FFT", "float32", (2, 3, 6), limit),
        ("cudnn/FFT", "float32", (3, 6), limit),
        (names[1], "tf32", (2,), 100),
    ]
    labels = []
    found = cudnn_worker.measure_cudnn_algorithms(request(c, slices=wanted), labels.append)
    (micro,) = found["micros"]  # the first number that fits, once
    assert micro["algorithm"] == "cudnn/FFT/slices=3" and micro["workspace"] == limit and micro["seconds"] > 0
    assert labels == [
        f"{names[0]} float32",
        "cudnn/FFT/slices=2 float32",
        "cudnn/FFT/slices=3 float32",
        f"{names[1]}/slices=2 tf32",
        "",
    ]
    assert [label for label, why in found["left_out"] if "are allowed" in why] == [labels[1], labels[3]]


def test_slices_are_compared_with_a_whole_call(host_cudnn, monkeypatch):
    c = Convolution("forward", 2, 16, (4, 4), (3, 3))
    run, spoilt = Plan.run, []

    def wrong(self, stream, a, b, out, space):
        run(self, stream, a, b, out, space)
        if self.needed:  # the first algorithm, which is the reference, needs none
            spoilt.append(np.ctypeslib.as_array((np.ctypeslib.ctypes.c_float * 3).from_address(out)))
            spoilt[-1][:] += 1e3

    monkeypatch.setattr(Plan, "run", wrong)
    found = cudnn_worker.measure_cudnn_algorithms(
        request(c, slices=[("cudnn/FFT", "float32", (2,), None)]), lambda _: None
    )
    assert not found["micros"] and spoilt and "is off by" in dict(found["left_out"])["cudnn/FFT/slices=2 float32"]
    host_cudnn.fail("Forward")
    with pytest.raises(ValueError, match="no algorithm runs"):
        cudnn_worker.measure_cudnn_algorithms(request(c, slices=[("cudnn/FFT", "float32", (2,), None)]), lambda _: None)


def test_xla_s_own(host_cudnn):
    c = Convolution("backward_filter", 2, 3, (5, 5), (3, 3), layout="NHWC")
    micros = cudnn_worker.convolve_xla(request(c), lambda _: None)["micros"]
    assert [(m["algorithm"], m["math"]) for m in micros] == [(LIBRARY, "float32"), (LIBRARY, "tf32")]
    assert all(m["seconds"] > 0 and m["workspace"] >= 0 for m in micros)


@pytest.mark.parametrize("kind", KINDS)
def test_sizes_are_those_of_the_library(host_cudnn, kind):
    c = Convolution(kind, 4, 6, (5, 7), (3, 2), strides=(2, 1), groups=2, dtype="float16")
    x, y, w = 2 * 3 * 4 * 35, 2 * 3 * 6 * 2 * 6, 2 * 6 * 2 * 6
    expected = {"forward": (x, w, y), "backward_data": (y, w, x), "backward_filter": (x, y, w)}[kind]
    assert buffer_bytes(c, 3) == expected
    with pytest.raises(NativeError, match="out of range"):
        Plan(c, _one(c), 99)
    Plan(c, _one(c), HOST).close()


def _one(c: Convolution):
    from jcuts.microbatch.timings import Division, MicroConfig

    return Division((MicroConfig(3, cudnn_call.algorithms(c.kind)[0], "float32", 1.0, 0),))


class Recorder:
    """What `GpuBench` needs of a driver."""

    ordinal, stream = 0, 7

    def __init__(self, room: int = 1 << 30) -> None:
        self.room, self.alive, self.events, self.broken = room, {}, 0, False
        self.graphs, self.captures = 0, True
        self.lib = object()

    def call(self, name, *arguments):
        if self.broken and name == "cuEventRecord":
            raise NativeError("lost", call=name, code=700)
        if name == "cuEventCreate":
            self.events += 1
        if name == "cuEventDestroy_v2":
            self.events -= 1
        if name == "cuEventElapsedTime":
            arguments[0]._obj.value = 2.0

    def free_bytes(self):
        return self.room

    def total_bytes(self):
        return 1 << 30

    def graph(self, work):
        work()
        if not self.captures:
            raise NativeError("cuStreamEndCapture failed", call="cuStreamEndCapture", code=901)
        self.graphs += 1
        return RecordedGraph(self)

    def allocate(self, size):
        if sum(self.alive.values()) + size > self.room:
            raise NativeError("cuMemAlloc_v2 failed: CUDA_ERROR_OUT_OF_MEMORY (2)", call="cuMemAlloc_v2", code=2)
        address = 1000 * (len(self.alive) + 1)
        self.alive[address] = size
        return address

    def release(self, address):
        del self.alive[address]

    def fill(self, address, value, size): ...
    def upload(self, address, values): ...
    def copy(self, to, source, size): ...

    def download(self, address, size):
        return np.zeros(size, np.uint8)


class RecordedGraph:
    def __init__(self, recorder):
        self.recorder = recorder

    def seconds(self):
        return 4e-3

    def close(self):
        self.recorder.graphs -= 1


class FakePlan:
    """Of a library that knows one algorithm."""

    ran = 0

    def __init__(self, convolution, division, device):
        (part,) = division.parts
        if part.algorithm != "cudnn/GEMM":
            raise NativeError("CUDNN_STATUS_NOT_SUPPORTED (3000)")
        self.needed = 512

    def run(self, stream, a, b, out, space):
        assert stream == 7
        FakePlan.ran += 1

    def close(self): ...


def on_a_gpu(monkeypatch, recorder: Recorder):
    monkeypatch.setattr(cuda_driver, "device", lambda: recorder)
    monkeypatch.setattr(cudnn_worker, "Plan", FakePlan)
    monkeypatch.setattr(cudnn_call, "computes_on_host", lambda: False)
    FakePlan.ran = 0


def test_on_a_gpu_times_are_those_between_events_and_memory_is_given_back(monkeypatch):
    recorder = Recorder()
    on_a_gpu(monkeypatch, recorder)
    c = Convolution("forward", 2, 3, (5, 5), (3, 3), dtype="float64")
    found = cudnn_worker.measure_cudnn_algorithms(request(c), lambda _: None)
    (micro,) = found["micros"]
    assert micro == {
        "algorithm": "cudnn/GEMM",
        "math": "float64",
        "seconds": 2e-3 / cudnn_worker.MOST_SETS,
        "workspace": 512,
    }
    assert FakePlan.ran > 3 * cudnn_worker.MOST_SETS and not recorder.alive and recorder.events == 0


@pytest.mark.parametrize("captures", [True, False])
def test_in_graphs_the_processor_launches_once(monkeypatch, captures):
    recorder = Recorder()
    recorder.captures = captures
    on_a_gpu(monkeypatch, recorder)
    c = Convolution("forward", 2, 3, (5, 5), (3, 3), dtype="float64")
    (micro,) = cudnn_worker.measure_cudnn_algorithms(request(c, graphs=True), lambda _: None)["micros"]
    seconds = (4e-3 if captures else 2e-3) / cudnn_worker.MOST_SETS
    name = "cudnn/GEMM" if captures else "cudnn/GEMM/launched"
    assert (micro["algorithm"], micro["seconds"]) == (name, seconds) and not recorder.graphs and not recorder.events


def test_short_calls_are_repeated_in_a_chain():
    recorder = Recorder()
    passes = []
    made = object.__new__(cudnn_devices.GpuBench)
    made.driver, made.events = recorder, SimpleNamespace(seconds=lambda work: work() or 1.0)
    chain = made.chain(lambda: passes.append(1), cudnn_devices.CHAIN_SECONDS / 3.5, graphs=True)
    assert chain.repeats == len(passes) == 4 and made.chain(lambda: None, 1.0, graphs=False).repeats == 1


def test_what_lacks_memory_now_is_said(monkeypatch):
    recorder = Recorder(room=1 << 28)
    on_a_gpu(monkeypatch, recorder)
    c = Convolution("forward", 2, 3, (5, 5), (3, 3), dtype="float64")
    needs = {"cudnn/GEMM": 1 << 28, "cudnn/FFT": 1 << 29, "cudnn/DIRECT": 1 << 40}

    def init(self, convolution, division, device):
        self.needed = needs.get(division.parts[0].algorithm, 512)

    monkeypatch.setattr(FakePlan, "__init__", init)
    found = cudnn_worker.measure_cudnn_algorithms(request(c), lambda _: None)
    assert found["lacking"] == 1 << 28 and len(found["micros"]) == 5
    assert sorted(label.split()[0] for label, _ in found["left_out"]) == ["cudnn/DIRECT", "cudnn/FFT", "cudnn/GEMM"]
    # More than the device can ever give, and what the limit forbids, are no shortage.
    assert cudnn_worker.measure_cudnn_algorithms(request(c, limit=1 << 20), lambda _: None)["lacking"] is None

    def refuse(self, *_):
        raise NativeError("CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED (4005)")

    monkeypatch.setattr(FakePlan, "run", refuse)
    assert cudnn_worker.measure_cudnn_algorithms(request(c), lambda _: None)["lacking"] == 512


def test_a_full_gpu_is_nobody_s_fault(monkeypatch):
    recorder = Recorder(room=10)
    on_a_gpu(monkeypatch, recorder)
    monkeypatch.setattr(recorder, "free_bytes", lambda: 1 << 30)
    c = Convolution("forward", 2, 3, (5, 5), (3, 3))
    with pytest.raises(WorkerFailed) as caught:
        cudnn_worker.measure_cudnn_algorithms(request(c), lambda _: None)
    assert caught.value.values["reason"] == "memory"


def test_a_lost_device_ends_the_process(monkeypatch):
    recorder = Recorder()
    on_a_gpu(monkeypatch, recorder)
    ended = []

    def run(self, *_):
        recorder.broken = True
        raise NativeError("CUDNN_STATUS_EXECUTION_FAILED (5000)")

    def end(code):
        ended.append(code)
        raise SystemExit(code)

    monkeypatch.setattr(FakePlan, "run", run)
    monkeypatch.setattr(cudnn_worker.os, "_exit", end)
    with pytest.raises(SystemExit):
        cudnn_worker.measure_cudnn_algorithms(request(Convolution("forward", 2, 3, (5, 5), (3, 3))), lambda _: None)
    assert ended == [70]


def arena_of(size: int) -> cudnn_worker._Arena:
    arena = object.__new__(cudnn_worker._Arena)
    arena.convolution, arena.expected = Convolution("forward", 1, 1, (3, 3), (3, 3)), None
    arena.tolerance = cudnn_worker.CONVOLUTION_L2
    arena.runs = cudnn_worker._runs(size)
    return arena


def test_results_of_a_few_bytes_are_compared_too():
    arena = arena_of(4)
    arena._check(np.ones(1, np.float32).view(np.uint8), "float32")
    with pytest.raises(ValueError, match="off by"):
        arena._check(np.full(1, 2.0, np.float32).view(np.uint8), "float32")


def test_large_results_are_compared_everywhere_and_to_the_end():
    size = cudnn_worker.RUN_BYTES * 5000 + 4
    runs = cudnn_worker._runs(size)
    starts = [start for start, _ in runs]
    assert len(runs) == cudnn_worker.RUNS and starts == sorted(starts) and starts[0] == 0
    assert runs[-1] == (size - cudnn_worker.RUN_BYTES, cudnn_worker.RUN_BYTES)
    assert max(np.diff(starts)) < size / 20  # everywhere
    arena = arena_of(size)
    device = cudnn_devices.HostBench()
    arena.device, out = device, device.allocate(size)
    values = np.random.default_rng(1).standard_normal(size // 4).astype(np.float32)
    device.kept[out][:] = values.view(np.uint8)
    arena._check(arena._read(out), "float32")
    arena._check(arena._read(out), "float32")
    values[-16:] += 0.1  # of all that is compared 7e-4 in L2 norm, more than TF32 may have: in its run it shows
    device.kept[out][:] = values.view(np.uint8)
    with pytest.raises(ValueError, match="off by"):
        arena._check(arena._read(out), "float32")
    values[-16:] -= 0.1
    values[-1] += 0.5
    device.kept[out][:] = values.view(np.uint8)
    arena.tolerance = {"float32": 1e-3}
    with pytest.raises(ValueError, match=f"from byte {size - cudnn_worker.RUN_BYTES} on"):
        arena._check(arena._read(out), "float32")


def test_operands_have_nothing_in_common():
    """Equal images and gradients would add up squares: more than float16 holds where there are many pixels."""
    size = 2 * 128 * 28 * 28 * 16
    first, second = (cudnn_devices.noise("float16", size, seed).view(np.float16).astype(np.float32) for seed in (0, 1))
    assert first.size == second.size == size // 2
    assert abs(np.dot(first, second)) < 6 * np.sqrt(first.size) and np.dot(first, first) > np.finfo(np.float16).max
    again = cudnn_devices.noise("float16", size, 0).view(np.float16)
    np.testing.assert_array_equal(again, first.astype(np.float16))


def test_only_requests_that_need_jax_import_it():
    program = "import sys, jcuts.tune.worker.main; print('jax' in sys.modules, 'numba' in sys.modules)"
    made = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert made.stdout.split() == ["False", "False"]
