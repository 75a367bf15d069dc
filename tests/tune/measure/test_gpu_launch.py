"""Running CUDA kernels on fenced device memory, with a device made of NumPy."""

from __future__ import annotations

import dataclasses
import gc
import threading
import types
import weakref
from concurrent.futures import Future

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jcuts.base.errors import AccuracyRejected, NativeError, UsageError
from jcuts.codegen.artifact import CompiledKernel
from jcuts.codegen.cuda.toolchain.image import SYMBOL, Image, Launch
from jcuts.trace.canonical import canonical_text
from jcuts.tune import resource_errors
from jcuts.tune.baseline import autotune_cache, conv_relu_bound
from jcuts.tune.measure import cuda_driver, gpu_launch, gpu_problem, gpu_timing
from jcuts.tune.problem import Input, Output, Problem
from jcuts.tune.verify import inputs as verify_inputs
from jcuts.tune.verify import reference as references
from jcuts.tune.worker import problem_files, requests

AVAL = ((64,), "float32")
IMAGE = Image("sm_90", "test", (Launch("k", (1, 1, 1), (64, 1, 1), ((0, 0), (1, 0))),), b"cubin")
KERNEL = CompiledKernel("k", SYMBOL, IMAGE.pack(), 1, 128, (AVAL,), (AVAL,))


class NumpyDevice:
    """Device memory as one array."""

    def __init__(self):
        self.memory = np.zeros(1 << 20, np.uint8)
        self.next, self.live = 256, set()
        self.ordinal, self.stream, self.l2_bytes = 0, 0, 2048

    def allocate(self, size):
        address, self.next = self.next, self.next + -(-size // 256) * 256
        self.live.add(address)
        return address

    def release(self, address):
        self.live.remove(address)

    def fill(self, address, value, size):
        self.memory[address : address + size] = value

    def upload(self, address, values):
        raw = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        self.memory[address : address + raw.size] = raw

    def copy(self, to, source, size):
        self.memory[to : to + size] = self.memory[source : source + size]

    def download(self, address, size):
        return self.memory[address : address + size].copy()

    def synchronize(self):
        pass

    def free_bytes(self):
        return 1 << 19


def launcher(body):
    device = NumpyDevice()
    made = gpu_launch.GpuLauncher(KERNEL, device)

    def launch(buffers, scratch):
        body(device.memory, *buffers, scratch)

    made.launch = launch
    return made, device


def double(memory, x, y, scratch):
    memory[y : y + 256].view(np.float32)[:] = 2 * memory[x : x + 256].view(np.float32)
    memory[scratch : scratch + 128] = 1


X = np.arange(64, dtype=np.float32)


def test_results_come_back_and_memory_is_given_back():
    made, device = launcher(double)
    (got,) = made.run([X], 0xFF)
    np.testing.assert_array_equal(got, 2 * X)
    assert not device.live


def test_what_is_not_written_stays_poisoned():
    made, _ = launcher(lambda memory, x, y, scratch: None)
    assert np.isnan(made.run([X], 0xFF)[0]).all()


@pytest.mark.parametrize(
    "what, body",
    [
        ("outside result 0", lambda m, x, y, s: m.__setitem__(y + 256, 1)),
        ("outside operand 0", lambda m, x, y, s: m.__setitem__(x - 1, 1)),
        ("outside scratch 0", lambda m, x, y, s: m.__setitem__(s + 128, 1)),
        ("changes its operand 0", lambda m, x, y, s: m.__setitem__(x + 5, 99)),
    ],
)
def test_stray_writes_are_found(what, body):
    made, device = launcher(body)
    with pytest.raises(AccuracyRejected, match=what) as caught:
        made.run([X], 0)
    assert caught.value.values["rule"] == "bounds"
    assert not device.live


def test_rotated_inputs_exceed_the_cache():
    device = NumpyDevice()
    rotation = gpu_launch.RotatedOperands(device, KERNEL, [X], 128)
    assert len(rotation.sets) * 512 > gpu_launch.COLD * device.l2_bytes
    addresses = [a for s in rotation.sets for a in s]
    assert len(set(addresses)) == len(addresses)
    for operands in rotation.sets:
        np.testing.assert_array_equal(device.download(operands[0], 256).view(np.float32), X)
    rotation.free()
    assert not device.live


class SmallDevice(NumpyDevice):
    """A device on which no more than so many bytes can be had at once."""

    def __init__(self, most):
        super().__init__()
        self.most = most

    def allocate(self, size):
        if size > self.most:
            raise NativeError("cuMemAlloc_v2 failed: CUDA_ERROR_OUT_OF_MEMORY (2)", code=2)
        return super().allocate(size)


def test_scratch_that_does_not_fit_is_the_fault_of_who_wants_it():
    device, told = SmallDevice(1024), []
    kernels = {"small": KERNEL, "greedy": dataclasses.replace(KERNEL, scratch_bytes=1 << 40)}
    made = {label: gpu_launch.GpuLauncher(kernel, device) for label, kernel in kernels.items()}
    with pytest.raises(NativeError, match="OUT_OF_MEMORY"):
        gpu_launch.screen(made, [X], announce=told.append)
    assert told == ["greedy"] and not device.live


def test_operands_that_do_not_fit_are_no_candidates_fault():
    device, told = SmallDevice(128), []
    with pytest.raises(NativeError, match="OUT_OF_MEMORY"):
        gpu_launch.screen({"only": gpu_launch.GpuLauncher(KERNEL, device)}, [X], announce=told.append)
    assert told == ["only", ""] and not device.live


def test_a_rotation_that_does_not_fit_leaves_nothing_behind():
    device = SmallDevice(256)  # operands and results fit
    with pytest.raises(NativeError, match="OUT_OF_MEMORY"):
        gpu_launch.RotatedOperands(device, KERNEL, [X], 1024)
    assert not device.live


class ClockedDevice(NumpyDevice):
    """A device whose kernels take so many seconds, each by its name; it counts their launches."""

    def __init__(self, kernels):
        super().__init__()
        self.kernels, self.clock, self.launches = kernels, 0.0, dict.fromkeys(kernels, 0)

    def launchers(self):
        made = {label: gpu_launch.GpuLauncher(KERNEL, self) for label in self.kernels}
        for label, launcher in made.items():
            launcher.launch = lambda *_, label=label: self._launched(label)
        return made

    def _launched(self, label):
        self.clock += self.kernels[label]
        self.launches[label] += 1

    def seconds(self, work):
        before = self.clock
        work()
        return self.clock - before

    def graph(self, work):
        before, launches = self.clock, dict(self.launches)
        work()  # captured: nothing runs
        self.clock, self.launches = before, launches
        return types.SimpleNamespace(seconds=lambda: self.seconds(work), close=lambda: None)


def test_a_hopeless_kernel_is_launched_twice():
    """A backward batch norm whose columns keep three multiprocessors busy took 15 ms, 113 times over."""
    device = ClockedDevice({"good": 2e-3, "slow": 15e-3, "slower": 0.2})
    found = gpu_launch.screen(device.launchers(), [X])
    assert device.launches["slow"] == 2 and device.launches["slower"] == 1 and device.launches["good"] > 100
    assert {label: len(s.seconds) for label, s in found.items()} == {"good": 7, "slow": 1, "slower": 1}
    assert {label: pytest.approx(s.median) for label, s in found.items()} == device.kernels
    device = ClockedDevice({"one": 15e-3, "two": 16e-3})  # nobody but XLA is faster
    gpu_launch.screen(device.launchers(), [X], limit=1e-3)
    assert device.launches == {"one": 2, "two": 2} and device.live == set()


def test_long_kernels_run_a_few_times_and_short_ones_as_often_as_ever():
    device = ClockedDevice({"long": 15e-3, "longer": 18e-3})
    found = gpu_launch.screen(device.launchers(), [X])
    assert all(len(s.seconds) == 7 for s in found.values()) and max(device.launches.values()) <= 40
    device = ClockedDevice({"short": 2e-6, "far": 9e-6})  # what a single launch takes says little of so short ones
    found = gpu_launch.screen(device.launchers(), [X], limit=1e-6)
    assert {label: len(s.seconds) for label, s in found.items()} == {"short": 7, "far": 1}
    assert device.launches["far"] > gpu_launch.CHAIN


def test_operands_that_are_there_are_not_copied():
    device = NumpyDevice()
    there = [[4096], [8192], [12288]]
    rotation = gpu_launch.RotatedOperands(device, KERNEL, [X], 128, there)
    assert [operands for operands, _ in rotation.sets] == [4096, 8192, 12288] and len(rotation.owned) == 4
    rotation.free()
    assert not device.live
    bench = gpu_timing.ChainBenchmark(lambda w, x: w @ x, [np.ones((64, 64), np.float32), np.ones((64, 2), np.float32)])
    first, second = bench.addresses()[:2]
    assert len(first) == 2 and first[0] != second[0] and first[1] == second[1]


def test_values_that_are_only_timed_are_made_once():
    spec = [
        Input((3, 5), "float32"),
        Input((verify_inputs.PERIOD + 7,), "float32"),
        Input((4,), "int32", "integers 0..3"),
    ]
    problem = Problem("i", tuple(spec), (Output((3, 5), "float32", 1, False),), space="s")
    small, large, whole = verify_inputs.timing_inputs(problem)
    assert small.shape == (3, 5) and large.shape == (verify_inputs.PERIOD + 7,) and whole.dtype == np.int32
    np.testing.assert_array_equal(small.reshape(-1), large[:15])
    np.testing.assert_array_equal(large[verify_inputs.PERIOD :], large[:7])
    assert set(whole) <= {0, 1, 2, 3} and abs(float(large.std()) - 1) < 0.01


def test_references_run_what_was_timed(tmp_path):
    options = autotune_cache.read_shared_results(str(tmp_path))
    assert options[autotune_cache.OPTION] == str(tmp_path) and options[autotune_cache.MODE].endswith("READ")
    assert options.items() >= autotune_cache.LIBRARY_PRODUCTS.items()
    assert autotune_cache.read_shared_results("") == {}
    jax.jit(lambda x: x @ x, compiler_options=options)(np.ones((4, 4), np.float32))
    assert not list(tmp_path.iterdir())
    less = autotune_cache.read_shared_results(str(tmp_path), timed=False)
    assert (
        less
        == options | conv_relu_bound.OPTIONS
        == autotune_cache.read_shared_results(str(tmp_path), timed=False, narrow=True)
    )
    rounded = autotune_cache.read_shared_results(str(tmp_path), narrow=True)
    assert set(rounded) == {autotune_cache.OPTION, autotune_cache.MODE}
    jax.jit(lambda x: x @ x, compiler_options=less)(np.ones((4, 4), np.float32))
    assert autotune_cache.without_autotuning() == autotune_cache.LEVEL | autotune_cache.LIBRARY_PRODUCTS


def test_products_are_what_was_timed_where_a_float_is_narrow_on_the_way(monkeypatch):
    def halves(x, w):
        return jnp.tanh((x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(jnp.float32))

    x = np.ones((4, 4), np.float32)
    asked = []
    monkeypatch.setattr(autotune_cache, "read_shared_results", lambda place, **how: asked.append(how["narrow"]) or {})
    monkeypatch.setattr(problem_files, "library_of", lambda path: None)
    monkeypatch.setattr(problem_files, "import_jax", lambda: jax)  # the real one sets x64 for the whole process
    monkeypatch.setattr(references, "make", lambda *_: [])
    for function in (halves, lambda x, w: jnp.tanh(x @ w)):
        text = canonical_text(jax.make_jaxpr(function)(x, x))
        operands = (Input((4, 4), "float32"),) * 2
        problem = Problem(
            "i", operands, (Output((4, 4), "float32", 4, False),), space="s", text=text, library=b"-", reference=b"-"
        )
        monkeypatch.setattr(problem_files, "problem_of", lambda request, problem=problem: problem)
        requests.reference({"problem": "p", "folder": ".", "seed": 0, "autotuned": "x"}, lambda _: None)
    assert asked == [True, False]


def test_only_one_process_adds_to_what_xla_has_timed(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", f"--a=1 --{autotune_cache.OPTION}=/users --b=2")
    assert autotune_cache.flags(shared=False) == {"XLA_FLAGS": "--a=1 --b=2"}
    assert autotune_cache.flags(shared=True) == {
        "XLA_FLAGS": f"--a=1 --b=2 --{autotune_cache.OPTION}={autotune_cache.folder()}"
    }
    assert autotune_cache.options() == {}  # the user's own folder is used where there is one
    monkeypatch.setenv("XLA_FLAGS", "--a=1")
    assert (
        autotune_cache.options() == {autotune_cache.OPTION: str(autotune_cache.folder())}
        and autotune_cache.folder().is_dir()
    )
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", "/cache")
    try:
        assert autotune_cache.options() == {}
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


def test_flags_in_a_file_are_the_users_too(monkeypatch, tmp_path):
    (tmp_path / "flags").write_text(f"--a=1\n--{autotune_cache.OPTION}=/users\n")
    monkeypatch.setenv("XLA_FLAGS", str(tmp_path / "flags"))
    mine = f"--{autotune_cache.OPTION}={autotune_cache.folder()}"
    assert [autotune_cache.flags(shared=s)["XLA_FLAGS"].split() for s in (False, True)] == [["--a=1"], ["--a=1", mine]]
    assert autotune_cache.options() == {}
    monkeypatch.setenv("XLA_FLAGS", str(tmp_path / "none"))  # XLA goes on without
    assert autotune_cache.flags(shared=True) == {"XLA_FLAGS": mine}


def test_compiling_ahead_tells_of_every_step(monkeypatch):
    told = []
    monkeypatch.setattr(gpu_timing, "lowered", lambda *_: told.append("lowered") or jax.jit(jnp.sin).lower(X))
    problem = Problem("i", (Input((64,), "float32"),), (Output((64,), "float32", 1, False),), space="s")
    monkeypatch.setattr(gpu_problem, "_ahead", {})
    assert gpu_problem.compile_ahead({"a": (problem, jnp.sin), "b": (problem, jnp.sin)}, told.append) == 2
    assert gpu_problem.run_ahead(told.append) == 2
    assert told[:4] == ["", "lowered", "", "lowered"] and len(told) >= 7 and set(gpu_problem._ahead) == {"a", "b"}


def test_lost_contexts_are_told_from_refusals():
    lost = NativeError("cuLaunchKernelEx failed: CUDA_ERROR_ILLEGAL_ADDRESS (700)", code=700)
    refused = NativeError("cuMemAlloc_v2 failed: CUDA_ERROR_OUT_OF_MEMORY (2)", code=2)
    assert gpu_launch.is_context_lost(lost) and cuda_driver.is_lost(lost)
    assert not gpu_launch.is_context_lost(refused) and not cuda_driver.is_lost(refused)


def test_memory_is_set_and_copied_in_the_order_of_the_stream():
    """A stream of its own does not wait for the default stream: a late fill would destroy a kernel's results."""
    calls = []

    class Recorder:
        def __getattr__(self, name):
            return lambda *arguments: calls.append((name, arguments[-1])) or 0

    device = object.__new__(cuda_driver.Driver)
    device.lib, device.stream = Recorder(), 4711
    device.fill(256, 0xFF, 16)
    device.upload(256, X)
    device.copy(512, 256, 16)
    device.download(256, 16)
    assert [name for name, _ in calls] == [
        "cuMemsetD8Async",
        "cuMemcpyHtoDAsync_v2",
        "cuStreamSynchronize",
        "cuMemcpyDtoDAsync_v2",
        "cuMemcpyDtoHAsync_v2",
        "cuStreamSynchronize",
    ]
    assert all(last.value == 4711 for _, last in calls)


def test_without_a_driver():
    assert cuda_driver.total_bytes(library="libno-such-cuda.so") == 0
    with pytest.raises(NativeError, match="cannot be opened"):
        cuda_driver.Driver(library="libno-such-cuda.so")


def test_problems_of_different_devices_are_different():
    def problem(device):
        return Problem("x", (Input((4,), "float32"),), (Output((4,), "float32"),), space="s", device=device)

    cpu, h200, a100 = problem(""), problem("cuda NVIDIA H200 9.0 x132"), problem("cuda NVIDIA A100 8.0 x108")
    assert len({cpu.digest, h200.digest, a100.digest}) == 3
    assert (cpu.platform, h200.platform) == ("cpu", "cuda")
    assert (h200.capability, a100.capability) == ((9, 0), (8, 0))
    assert Problem.from_json(h200.to_json()) == h200
    with pytest.raises(UsageError, match="compute capability"):
        _ = cpu.capability


def test_a_full_gpu_is_told_from_a_broken_one(monkeypatch):
    refused = RuntimeError("Unable to initialize backend 'cuda': INTERNAL: no supported devices found")

    def full():
        raise NativeError("cuDevicePrimaryCtxRetain failed: CUDA_ERROR_OUT_OF_MEMORY (2)", code=2)

    def broken():
        raise NativeError("the CUDA driver cannot be opened: no such file")

    monkeypatch.setattr(cuda_driver, "device", full)
    assert resource_errors.is_memory(refused) and resource_errors.no_backend(refused)
    monkeypatch.setattr(cuda_driver, "device", broken)
    assert not resource_errors.is_memory(refused)
    monkeypatch.setattr(cuda_driver, "device", NumpyDevice)
    assert resource_errors.is_memory(refused)  # it has 1 MiB
    assert resource_errors.is_memory(MemoryError()) and resource_errors.is_memory(
        RuntimeError("RESOURCE_EXHAUSTED: Out of memory")
    )
    assert not resource_errors.is_memory(RuntimeError("INTERNAL: something else"))


def test_results_that_equal_accepted_ones_need_no_second_check(monkeypatch):
    monkeypatch.setattr(requests, "_accepted", {})
    first = [[np.float32([1, np.nan, -0.0])], [np.arange(3)]]
    verdict = [object(), object()]
    assert requests._accepted_alike("p", first) is None
    requests._accepted["p"] = [(first, verdict)]
    again = [[a.copy() for a in sets] for sets in first]
    assert requests._accepted_alike("p", again) is verdict and requests._accepted_alike("q", again) is None
    again[0][0][2] = 0.0  # another sign is another result
    assert requests._accepted_alike("p", again) is None


def test_programs_are_compared_as_chains():
    programs = {"xla": (jax.jit(jnp.sin), {}), "other": (lambda x: jnp.sin(x) + 1, {})}
    bench = gpu_timing.ChainBenchmark(programs["xla"][0], [np.ones((8, 8), np.float32)])
    for label, program in bench.compiled(programs).items():
        bench.add(label, program)
    samples = bench.race(0.01)
    assert bench.compile_seconds > 0 and set(samples) == {"xla", "other"} and bench.quick("other") > 0
    assert all(s.median > 0 and len(s.seconds) >= 5 for s in samples.values())


def test_a_problem_without_kernels_is_measured_by_chains_alone():
    told = []
    other = {"other": (lambda x: jnp.sin(x) + 1, {})}
    found, parts = gpu_problem.measure(
        "p",
        jax.jit(jnp.sin),
        [np.ones((8, 8), np.float32)],
        {},
        other,
        seconds=0.01,
        finalists=3,
        mixed=True,
        announce=told.append,
    )
    assert {label: method for label, (method, _) in found.items()} == {"xla": "chain", "other": "chain"}
    assert set(parts) == {"operands", "xla", "screening", "chains", "race"} and min(parts.values()) >= 0
    assert told[-2:] == ["other", ""]


def test_xla_is_not_run_where_its_time_is_known():
    def never(x):
        raise AssertionError("compiled")

    other = {"other": (lambda x: jnp.sin(x) + 1, {})}
    shaped = jax.jit(lambda x: jax.pure_callback(never, x, x))
    for others in (other, {}):
        found, _ = gpu_problem.measure(
            "p",
            shaped,
            [np.ones((8, 8), np.float32)],
            {},
            others,
            seconds=0.01,
            finalists=3,
            mixed=True,
            announce=lambda _: None,
            expected=1e-3,
        )
        assert set(found) == set(others)


def test_programs_compile_ahead_with_options_of_their_own(monkeypatch):
    problem = Problem("i", (Input((64,), "float32"),), (Output((64,), "float32", 1, False),), space="s")
    asked = []
    lowered = gpu_timing.lowered
    monkeypatch.setattr(gpu_timing, "lowered", lambda *args: asked.append(args[-1]) or lowered(*args[:-1], {}))
    monkeypatch.setattr(gpu_problem, "_ahead", {})
    both = {"a": (problem, jnp.sin), "b": (problem, jnp.sin)}
    gpu_problem.compile_ahead(both, lambda _: None, {"b": autotune_cache.without_conv_relu_fusion()})
    gpu_problem.wait_ahead(lambda _: None)
    assert asked == [{}, conv_relu_bound.OPTIONS]


def test_chains_of_kernels_that_were_compiled_ahead_are_not_compiled_again(monkeypatch):
    problem = Problem("i", (Input((64,), "float32"),), (Output((64,), "float32", 1, False),), space="s")
    monkeypatch.setattr(gpu_problem, "_kernel_chains", {})
    monkeypatch.setattr(gpu_problem, "call_kernel", lambda kernel, *operands: (kernel(*operands),))
    fails = {"a": jnp.sin, "b": lambda x: x + jnp.ones(3)}
    assert gpu_problem.kernels_ahead("other", problem, jnp.sin, fails) == 1  # the second is left to who measures
    assert gpu_problem.kernels_ahead("p", problem, jnp.sin, {"a": jnp.sin, "b": jnp.cos}) == 2
    gpu_problem.wait_ahead(lambda _: None)
    bench = gpu_timing.ChainBenchmark(jnp.sin, [np.ones(64, np.float32)])
    compiled, asked = bench.compiled, []
    monkeypatch.setattr(bench, "compiled", lambda entries: asked.extend(entries) or compiled(entries))
    entries = {label: (function, {}) for label, function in (("c", jnp.tan), ("a", jnp.sin))}
    found = gpu_problem._chains_of("p", bench, entries)
    assert list(found) == ["c", "a"] and asked == ["c"]
    for label, program in found.items():
        bench.add(label, program)
    assert set(bench.race(0.001)) == {"a", "c"}


def test_whoever_waits_for_chains_of_kernels_says_that_it_lives(monkeypatch):
    futures = [Future() for _ in range(3)]
    monkeypatch.setattr(gpu_problem, "_kernel_chains", {("p", str(k)): f for k, f in enumerate(futures)})
    open_, told = list(futures), []

    def announce(label):
        told.append(label)
        if open_:
            open_.pop().set_result(None)

    threading.Timer(0.3, lambda: [f.done() or f.set_result(None) for f in futures]).start()
    gpu_problem.wait_ahead(announce)
    assert told == [""] * 3


def test_every_execution_of_a_chain_happens():
    x, w = np.ones((64, 64), np.float32), np.ones((64, 2), np.float32)

    def product(w, x):
        return x @ w @ w.T

    bench = gpu_timing.ChainBenchmark(product, [w, x])
    sets, shared = bench.sets, bench.shared
    assert bench.layout.rotated == (1,) and len(sets) == gpu_timing.CHAIN and len(shared) == 1
    one = jax.jit(product).lower(w, x).compile()
    # Compiled ahead from shapes alone it is the same program.
    specs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (w, x)]
    compiled = gpu_timing.lowered(product, gpu_timing.layout(product, specs), specs, {}).compile()
    assert set(bench.compiled({"a": (product, {})})) == {"a"}
    flops = [c.cost_analysis()["flops"] for c in (compiled, one)]
    assert flops[0] > (len(sets) - 0.5) * flops[1]
    assert compiled.memory_analysis().temp_size_in_bytes >= len(sets) * x.nbytes
    assert compiled(sets, shared).shape == ()


def test_operands_are_freed_as_soon_as_a_problem_is_measured():
    gc.collect()
    gc.disable()  # nothing may wait for the collector: the next problem needs the memory
    try:
        bench = gpu_timing.ChainBenchmark(jnp.sin, [np.ones((8, 8), np.float32)])
        for label, program in bench.compiled({"xla": (jnp.sin, {})}).items():
            bench.add(label, program)
        bench.race(0.0)
        operand = weakref.ref(bench.sets[0][0])
        del bench, program
        assert operand() is None
    finally:
        gc.enable()


def test_a_process_whose_device_is_lost_ends_before_the_next_problem(monkeypatch):
    def lost(*_):
        raise RuntimeError("INTERNAL: CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access was encountered")

    class Ended(BaseException):
        pass

    def end(code):
        raise Ended(code)

    monkeypatch.setattr(gpu_timing, "ChainBenchmark", lost)
    monkeypatch.setattr("jcuts.tune.measure.gpu_problem.os._exit", end)
    with pytest.raises(Ended, match="70"):
        gpu_problem.measure("p", jnp.sin, [X], {}, {}, seconds=0.0, finalists=1, mixed=True, announce=lambda _: None)


def test_the_values_that_a_large_operand_repeats_are_enough():
    made, device = launcher(double)
    few = np.arange(1, 14, dtype=np.float32)
    (got,) = made.run([few], 0xFF)
    np.testing.assert_array_equal(got, 2 * np.resize(few, 64))
    spoiled, _ = launcher(lambda m, x, y, s: m.__setitem__(x + 200, 99))
    with pytest.raises(AccuracyRejected, match="changes its operand 0"):
        spoiled.run([few], 0)
    assert not device.live
