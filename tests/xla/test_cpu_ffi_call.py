"""The native launcher, through ``call_kernel``: jit, scratch, threads, control flow, other pools, other processes."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys
import textwrap
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jcuts.base import knobs
from jcuts.base.errors import IRError
from jcuts.base.fingerprint import digest
from jcuts.codegen.artifact import CompiledKernel
from jcuts.xla import cpu_launcher
from jcuts.xla.cpu_ffi_call import call_kernel, pool_threads, scratch_result_bytes
from tests.xla import kernels

TILES, BLOCK = 24, 1024


def data(seed: int = 0, size: int = TILES * BLOCK) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(size), jnp.float32)


def child(code: str, **environment: str) -> str:
    """Runs Python code in a fresh process from the repository root; returns what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_jit_and_eager_agree_with_jax():
    kernel, x = kernels.affine(TILES, BLOCK), data()
    np.testing.assert_array_equal(jax.jit(lambda x: call_kernel(kernel, x)[0])(x), x * 2 + 1)
    np.testing.assert_array_equal(call_kernel(kernel, x)[0], x * 2 + 1)


def test_libm_is_resolved():
    kernel, x = kernels.tanh(TILES, BLOCK), data()
    np.testing.assert_allclose(call_kernel(kernel, x)[0], np.tanh(np.asarray(x)), rtol=1e-6)


@pytest.mark.parametrize("tiles", [1, 2, 3, 17, 1000])
def test_any_number_of_tiles(tiles):
    kernel, x = kernels.affine(tiles, 8), data(tiles, tiles * 8)
    np.testing.assert_array_equal(call_kernel(kernel, x)[0], x * 2 + 1)


def test_scratch_is_private_to_a_thread():
    # Tiles long enough that the pool's threads wake up while there is work left.
    kernel, x = kernels.through_scratch(64, 16384), data(0, 64 * 16384)
    run = jax.jit(lambda x: call_kernel(kernel, x)[0])
    for _ in range(50):
        np.testing.assert_array_equal(run(x), x * 3)


def test_a_thousand_repeats_with_other_allocations_between():
    affine, scratch = kernels.affine(TILES, BLOCK), kernels.through_scratch(TILES, BLOCK)
    run = jax.jit(lambda x: call_kernel(scratch, call_kernel(affine, x)[0] - 1)[0])
    x = data()
    expected = np.asarray((x * 2 + 1 - 1) * 3)
    kept = []
    for i in range(1000):
        kept.append(jnp.full((1 + 1237 * (i % 7),), i, jnp.float32))
        if len(kept) > 20:
            kept.pop(7 * i % 20)
        np.testing.assert_array_equal(run(x), expected)


def test_concurrent_python_threads():
    affine, scratch = kernels.affine(TILES, BLOCK), kernels.through_scratch(TILES, BLOCK)
    run = jax.jit(lambda x: call_kernel(scratch, call_kernel(affine, x)[0])[0])
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            x = data(seed)
            expected = np.asarray((x * 2 + 1) * 3)
            for _ in range(100):
                np.testing.assert_array_equal(run(x), expected)
        except BaseException as error:  # handed to the main thread
            failures.append(error)

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures, failures[0]


def test_nested_jit_and_independent_branches():
    kernel = kernels.affine(TILES, BLOCK)
    x = jnp.arange(TILES * BLOCK, dtype=jnp.float32)  # whole numbers: XLA may contract to fma as it likes
    inner = jax.jit(lambda x: call_kernel(kernel, x)[0])
    outer = jax.jit(lambda x: sum(inner(x * i) for i in range(8)))
    np.testing.assert_array_equal(outer(x), jax.jit(lambda x: sum(x * i * 2 + 1 for i in range(8)))(x))


def test_control_flow():
    kernel, x = kernels.affine(4, 16, scale=0.5, shift=1.0), data(3, 64)

    @jax.jit
    def run(x):
        def step(carry, _):
            carry = call_kernel(kernel, carry)[0]
            return carry, carry[0]

        x, firsts = jax.lax.scan(step, x, length=20)
        x = jax.lax.cond(x[0] > 100.0, lambda x: x, lambda x: call_kernel(kernel, x)[0], x)
        return jax.lax.fori_loop(0, 3, lambda i, x: call_kernel(kernel, x)[0], x), firsts

    expected = np.asarray(x)
    for _ in range(24):
        expected = expected * np.float32(0.5) + np.float32(1.0)
    out, firsts = run(x)
    np.testing.assert_array_equal(out, expected)
    assert firsts.shape == (20,)


LOOP = """
    import jax, jax.numpy as jnp, numpy as np
    from jcuts.xla.cpu_ffi_call import call_kernel
    from tests.xla import kernels

    kernel = kernels.counted(7)

    @jax.jit
    def loop(x):
        return jax.lax.while_loop(lambda c: c[0][0] < 5, lambda c: call_kernel(kernel, *c), (jnp.zeros(1), x))

    n, x = loop(jnp.arange(7.0))
    np.testing.assert_array_equal(x, 3.0**5 * np.arange(7))
    print(int(n[0]))
"""


def test_a_loop_ends_whose_carry_is_made_by_one_call():
    # XLA takes the operands of a loop body's root for its results where the root is a call (jcuts/xla/scratch.py).
    assert child(LOOP).strip() == "5"


def test_results_in_row_major_order_for_transposed_operands():
    text = kernels.affine(8, 8)
    kernel = CompiledKernel(
        digest=digest("matrix", text.digest),
        symbol=text.symbol,
        object_code=text.object_code,
        tiles=8,
        scratch_bytes=0,
        inputs=(((8, 8), "float32"),),
        outputs=(((8, 8), "float32"),),
    )
    x = data(5, 64).reshape(8, 8)
    run = jax.jit(lambda x: call_kernel(kernel, x.T)[0].T)
    np.testing.assert_array_equal(run(x), x * 2 + 1)


@pytest.mark.parametrize("operands", [1, 63, 100])
def test_many_operands(operands):
    kernel = kernels.sum_of(operands, tiles=4, block=32)
    xs = [data(i, 128) for i in range(operands)]
    expected = np.asarray(xs[0])
    for x in xs[1:]:
        expected = expected + np.asarray(x)
    np.testing.assert_array_equal(jax.jit(lambda *xs: call_kernel(kernel, *xs)[0])(*xs), expected)


def test_operands_that_do_not_fit_are_refused():
    kernel = kernels.affine(2, 8)
    with pytest.raises(IRError, match="takes") as caught:
        call_kernel(kernel, jnp.zeros((15,), jnp.float32))
    assert caught.value.expected == kernel.inputs  # type: ignore[attr-defined]
    with pytest.raises(IRError):
        call_kernel(kernel, jnp.zeros((16,), jnp.int32))
    with pytest.raises(IRError):
        call_kernel(kernel)


def test_hlo_names_the_digest_and_no_address():
    kernel = kernels.affine(3, 8)
    text = jax.jit(lambda x: call_kernel(kernel, x)[0]).lower(data(0, 24)).as_text()
    assert f'digest = "{kernel.digest}"' in text
    assert str(cpu_launcher.add_kernel(kernel)) not in text


def test_unknown_digest_is_a_clear_error():
    cpu_launcher.ensure_registered()
    call = jax.ffi.ffi_call(cpu_launcher.TARGET, jax.ShapeDtypeStruct((4,), np.float32))
    attributes = {"num_outputs": 1, "scratch_bytes": 0, "slots": 1, "tiles": 1}
    with pytest.raises(Exception, match="jcuts kernel nobody-knows-it is not known to this process"):
        call(jnp.zeros(4), digest="nobody-knows-it", **{k: np.int64(v) for k, v in attributes.items()})


def test_impossible_attributes_are_a_clear_error():
    kernel = kernels.affine(4, 1)
    cpu_launcher.ensure_registered()
    cpu_launcher.add_kernel(kernel)
    call = jax.ffi.ffi_call(cpu_launcher.TARGET, jax.ShapeDtypeStruct((4,), np.float32))
    attributes = {"num_outputs": 1, "scratch_bytes": 0, "slots": 0, "tiles": 1}
    with pytest.raises(Exception, match="impossible attributes"):
        call(jnp.zeros(4), digest=kernel.digest, **{k: np.int64(v) for k, v in attributes.items()})


def test_a_dropped_kernel_comes_back_from_the_object_cache(cache_dir):
    kernel, x = kernels.affine(5, 16, scale=4.0), data(7, 80)
    run = jax.jit(lambda x: call_kernel(kernel, x)[0])
    np.testing.assert_array_equal(run(x), x * 4 + 1)
    lowered = jax.jit(lambda x: -call_kernel(kernel, x)[0]).lower(x)
    cpu_launcher.forget(kernel.digest)
    np.testing.assert_array_equal(run(x), x * 4 + 1)  # holds the kernel
    assert not cpu_launcher.is_known(kernel.digest)
    np.testing.assert_array_equal(lowered.compile()(x), -(x * 4 + 1))
    assert cpu_launcher.is_known(kernel.digest)


PERSISTENT = """
    import jax, jax.numpy as jnp, numpy as np
    jax.config.update("jax_compilation_cache_dir", {folder!r})
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    from jcuts.xla import cpu_launcher
    from jcuts.xla.cpu_ffi_call import call_kernel
    from tests.xla import kernels
    kernel = kernels.affine(6, 16)
    x = jnp.arange(96, dtype=jnp.float32)
    lowered = jax.jit(lambda x: call_kernel(kernel, x)[0]).lower(x)
    if {forgetful}:  # lowering made the kernel known; the executable out of the cache must find it by itself
        cpu_launcher.forget(kernel.digest)
    hits = []
    jax.monitoring.register_event_listener(lambda name, **_: hits.append(name))
    out = lowered.compile()(x)
    np.testing.assert_array_equal(out, np.arange(96, dtype=np.float32) * 2 + 1)
    print("hit" if "/jax/compilation_cache/cache_hits" in hits else "miss", cpu_launcher.is_known(kernel.digest))
"""


def test_persistent_compilation_cache_of_another_process(tmp_path, cache_dir):
    folder = str(tmp_path / "xla")
    first = child(PERSISTENT.format(folder=folder, forgetful=False))
    second = child(PERSISTENT.format(folder=folder, forgetful=True))
    assert first.split()[0] == "miss"
    assert second.split() == ["hit", "True"]


POOL = """
    import threading
    import jax, jax.numpy as jnp, numpy as np
    from jcuts.xla.cpu_ffi_call import call_kernel
    from tests.xla import kernels
    affine, scratch = kernels.affine(16, 256), kernels.through_scratch(16, 256)
    run = jax.jit(lambda x: sum(call_kernel(scratch, call_kernel(affine, x * i)[0])[0] for i in range(8)))
    x = jnp.arange(4096, dtype=jnp.float32)
    expected = np.asarray(jax.jit(lambda x: sum((x * i * 2 + 1) * 3 for i in range(8)))(x))
    def work():
        for _ in range(50):
            np.testing.assert_array_equal(run(x), expected)
        good.append(1)
    good = []
    workers = [threading.Thread(target=work) for _ in range(4)]
    [w.start() for w in workers]
    [w.join() for w in workers]
    print(len(good))
"""


@pytest.mark.parametrize(
    "environment",
    [
        {"NPROC": "1"},
        {"NPROC": "2"},
        {"NPROC": "7"},
        {"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"},
        {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"},
        {"JCUTS_THREADS": "1"},
    ],
    ids=lambda e: "_".join(f"{k}{v}" for k, v in e.items()),
)
def test_other_pools_neither_deadlock_nor_err(environment):
    assert child(POOL, **environment).strip() == "4"


def test_slots_follow_the_pool_and_the_knob(monkeypatch):
    monkeypatch.setenv("NPROC", "12")
    assert pool_threads() == 12
    with knobs.scope(threads=3):
        assert pool_threads() == 3
    monkeypatch.setenv("NPROC", "nonsense")
    assert pool_threads() >= 1


def test_scratch_size():
    assert scratch_result_bytes(0, 4) == 0
    assert scratch_result_bytes(80, 3) == 3 * 128 + 64


@pytest.mark.skipif(platform.machine() != "x86_64", reason="reads MXCSR")
def test_tiles_on_pool_threads_keep_the_callers_floating_point_mode():
    kernel = kernels.floating_point_mode(tiles=64)
    run = jax.jit(lambda: call_kernel(kernel)[0])
    threads_seen = set()
    for _ in range(50):
        out = np.asarray(run())
        assert len(set(out[:, 0] & 0xFFC0)) == 1
        threads_seen.update(out[:, 1].tolist())
        if len(threads_seen) > 1:
            break
    if pool_threads() > 1:
        assert len(threads_seen) > 1, "no tile ever ran on a pool thread"


@pytest.mark.skipif(platform.machine() != "x86_64", reason="reads MXCSR")
def test_bench_keeps_the_callers_floating_point_mode():
    libm = ctypes.CDLL("libm.so.6")
    kernel = kernels.floating_point_mode(tiles=64)
    upward = 0x800  # FE_UPWARD on x86; in MXCSR it is shifted by three
    libm.fesetround(upward)
    try:
        out, _ = kernels.bench(kernel, [], threads=2, repeats=5)
    finally:
        libm.fesetround(0)
    assert set((out[0][:, 0] & 0x6000).tolist()) == {upward << 3}


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_bench_runs_every_tile_once_per_repeat(threads):
    kernel = kernels.through_scratch(TILES, BLOCK)
    x = np.asarray(data(9))
    out, seconds = kernels.bench(kernel, [x], threads=threads, repeats=20)
    np.testing.assert_array_equal(out[0], x * np.float32(3))
    assert seconds.shape == (20,)
    assert (seconds > 0).all()


def test_dispatch_cost_is_printed(capsys):
    """Not asserted: machines differ.  A chain of 100 tiny calls in one jit, in microseconds per call."""
    import time

    kernel, y = kernels.affine(1, 1, scale=1.0, shift=0.0), jnp.ones((1,), jnp.float32)

    def chain(y):
        for _ in range(100):
            y = call_kernel(kernel, y)[0]
        return y

    run = jax.jit(chain)
    run(y).block_until_ready()
    start = time.perf_counter()
    for _ in range(20):
        out = run(y)
    out.block_until_ready()
    with capsys.disabled():
        print(f" {(time.perf_counter() - start) / 2000 * 1e6:.2f} us per call ", end="")
    assert float(out[0]) == 1.0
