"""Microbenchmarks of the machine it runs on; writes a cluster file in which every constant says how it was measured.

Imports jax (when called): matrix products by shape and type, memory, every collective, pinned host memory; storage by
direct I/O.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from jcuts.base.errors import UsageError
from jcuts.plan.calibrate.fit import RAMP, Measured, constants

PINNED = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
"""Environment variable that limits the pinned host memory of a process (64 when unset)."""

Progress = Callable[[str, int, int], None]
"""Called with (what is being measured, steps done, steps in all)."""


def seconds(call: Callable[[], Any], repeat: int = 5) -> float:
    """Median time of a call that returns arrays to wait for; one call beforehand compiles and warms up."""
    import jax

    jax.block_until_ready(call())
    times = []
    for _ in range(repeat):
        begun = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - begun)
    return statistics.median(times)


def slope(calls: Sequence[Callable[[], Any]], extra: int, repeat: int = 9) -> float:
    """Seconds per iteration, from two calls of which the second does ``extra`` iterations more: the call's overhead
    cancels.

    Median over rounds of both, one after the other, so that a clock that drifts falls on both.
    """
    import jax

    jax.block_until_ready([call() for call in calls])
    differences = []
    for _ in range(repeat):
        times = []
        for call in calls:
            begun = time.perf_counter()
            jax.block_until_ready(call())
            times.append(time.perf_counter() - begun)
        differences.append(times[1] - times[0])
    return max(statistics.median(differences) / extra, 1e-7)


def measure(folder: str | Path, *, quick: bool = False, progress: Progress | None = None) -> Measured:
    """Measures every device of this process's default backend.

    Args: folder: where storage is to be measured (a file of 256 MiB, 16 MiB when quick, is written and removed); quick:
        small sizes, for a laptop; progress: told what is done.
    """
    import jax

    tell = progress or (lambda *_: None)
    devices = jax.devices()
    platform = devices[0].platform
    small = quick or platform == "cpu"
    made = Measured(when=time.strftime("%Y-%m-%d"))
    steps: list[tuple[str, Callable[[], None]]] = [
        ("matrix products", partial(_products, made, small)),
        ("device memory", partial(_memory, made, small)),
        ("launches", partial(_launches, made)),
        ("host memory", partial(_host, made, small)),
        ("storage", partial(_storage, made, Path(folder), small)),
    ]
    if len(devices) > 1:
        steps.insert(3, ("collectives", partial(_collectives, made, small)))
    for position, (name, step) in enumerate(steps):
        tell(name, position, len(steps))
        step()
    tell("done", len(steps), len(steps))
    kind = devices[0].device_kind
    gpu = made.tables["gpu"]
    gpu["name"] = kind
    gpu["memory_gib"] = _capacity(devices[0])
    made.sources["memory"] = (
        "bytes_limit of the device" if platform != "cpu" else "half of the host's memory per device"
    )
    made.tables["nodes"] = {"count": 1, "gpus": len(devices)}
    made.tables.setdefault("intra", {"bandwidth_gbs": 1.0})
    constants(made)
    return made


def _capacity(device: Any) -> float:
    stats = device.memory_stats() or {}
    limit = stats.get("bytes_limit") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2
    return round(limit / 2**30, 2)


def _products(made: Measured, small: bool) -> None:
    """Square, layer-shaped and skinny products in 16 and 32 bits on random data (constant data draws less power and
    runs faster); ``fit.constants`` takes ``gemm_efficiency`` and ``gemm_ramp`` from the 16-bit ones.

    A row (m, n, k) is the mean of (m x k) (k x n) and of (m x n) (n x k), which alternate in a chain.
    """
    import jax

    top = 1024 if small else 8192
    shapes = [(n, n, n) for n in (256, 512, 1024, 2048, 4096, 8192) if n <= top]
    shapes += [(top // 2, top, top // 4), (top // 2, top // 4, top), (top // 4, top // 4, top // 2)]
    shapes += [(top, top // 4, top // 8), (top // 8, top, top), (16, top, top), (top, top, 64)]
    shapes += [(top // 2, top // 2, top // part) for part in (16, 8, 4)]  # with the square one: k alone differs

    def pairs(times: int) -> Callable[[Any, Any, Any], Any]:
        # Each product feeds the next, so that none is dropped; factors of unit gain keep the numbers in range.
        def run(a: Any, b: Any, d: Any) -> Any:
            for _ in range(times):
                a = (a @ b) @ d
            return a

        return jax.jit(run)

    for dtype in ("bfloat16", "float32"):
        for m, n, k in shapes:
            keys = jax.random.split(jax.random.key(m + n + k), 3)
            a = jax.random.normal(keys[0], (m, k), dtype)
            b = jax.random.normal(keys[1], (k, n), dtype) / math.sqrt(k)
            d = jax.random.normal(keys[2], (n, k), dtype) / math.sqrt(n)
            # The slope over chains leaves out a call's dispatch, which would drown a small product.
            took = slope([partial(pairs(times), a, b, d) for times in (2, 10)], 16)
            made.products.append((dtype, m, n, k, 2.0 * m * n * k / took))
    skinny = max(speed for dtype, m, _, _, speed in made.products if dtype == "bfloat16" and m == 16)
    made.tables["gpu"] = {
        "peak_tflops": max(speed for *_, speed in made.products) / 1e12,
        "gemm_efficiency": 1.0,
        "gemm_ramp": RAMP,
        "multiprocessors": int(getattr(jax.devices()[0], "core_count", 1) or 1),
        "skinny_tflops": skinny / 1e12,
    }
    made.sources["multiprocessors"] = "as the device reports them"
    made.sources["skinny_tflops"] = f"16 x {top} x {top}"


def _memory(made: Measured, small: bool) -> None:
    import jax
    import jax.numpy as jnp

    count = 2**22 if small else 2**28
    x = jnp.ones(count, jnp.float32)

    def passes(times: int) -> Callable[[Any], Any]:
        return jax.jit(lambda x: jax.lax.fori_loop(0, times, lambda _, y: y + 1, x))

    took = slope([partial(passes(times), x) for times in (4, 24)], 20)
    made.tables["gpu"] |= {"bandwidth_gbs": 8.0 * count / took / 1e9, "memory_efficiency": 1.0}
    made.sources["bandwidth_gbs"] = (
        f"x + 1 over {4 * count / 2**20:.0f} MiB, read and write, slope over loops of 4 and 24; "
        "so memory_efficiency is 1"
    )


def _launches(made: Measured) -> None:
    import jax
    import jax.numpy as jnp

    x = jnp.ones((8, 8))

    def chain(n: int) -> Callable[..., Any]:
        def body(x: Any) -> Any:
            for _ in range(n):
                x = jnp.cumsum(x @ x * 1e-3, 0)
            return x

        return jax.jit(body)

    made.tables["gpu"]["kernel_gap_us"] = slope([partial(chain(n), x) for n in (4, 24)], 40) * 1e6
    made.sources["kernel_gap_us"] = "slope of the time over chained tiny kernels within one call"


def _collectives(made: Measured, small: bool) -> None:
    """All-reduce, all-gather, reduce-scatter, all-to-all and ppermute over 2, 4, ... all devices, by size."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, PartitionSpec

    devices = jax.devices()
    members = [n for n in (2, 4, 8, 16) if n <= len(devices)]
    if len(devices) not in members:
        members.append(len(devices))
    sizes = [2**14, 2**18, 2**20] if small else [2**16, 2**20, 2**24, 2**27, 2**29]

    def kinds(n: int) -> dict[str, Callable[[Any], Any]]:
        ring = [(i, (i + 1) % n) for i in range(n)]
        return {
            "all-reduce": lambda x: jax.lax.psum(x, "x"),
            "all-gather": lambda x: jax.lax.all_gather(x[: x.shape[0] // n], "x", tiled=True),
            "reduce-scatter": lambda x: x.at[: x.shape[0] // n].set(jax.lax.psum_scatter(x, "x", tiled=True)),
            "all-to-all": lambda x: jax.lax.all_to_all(x.reshape(n, -1), "x", 0, 0).reshape(-1),
            "ppermute": lambda x: jax.lax.ppermute(x, "x", ring),
        }

    def chained(inside: Callable[[Any], Any], times: int) -> Callable[[Any], Any]:
        def run(x: Any) -> Any:
            for _ in range(times):
                x = inside(x)
            return x

        return run

    def one(inside: Callable[[Any], Any], mesh: Any, x: Any, size: int) -> float:
        """Seconds per collective within a program; short ones in longer chains."""
        spec = PartitionSpec("x")
        calls = []
        times = (2, 34) if size <= 2**20 else (2, 10)
        for count in times:
            made_of = jax.shard_map(chained(inside, count), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
            calls.append(partial(jax.jit(made_of), x))
        return slope(calls, times[1] - times[0])

    for n in members:
        mesh = Mesh(np.array(devices[:n]), ("x",))
        for size in sizes:
            count = size // 4 // n * n
            x = jax.device_put(jnp.ones((n * count,)), jax.NamedSharding(mesh, PartitionSpec("x")))
            for kind, inside in kinds(n).items():
                made.collectives.append((kind, n, 4 * count, one(inside, mesh, x, size)))


def _host(made: Measured, small: bool) -> None:
    """Copies between pinned host memory and one device, then all devices at once."""
    import jax
    import jax.numpy as jnp

    devices = jax.devices()
    if "pinned_host" not in {memory.kind for memory in devices[0].addressable_memories()}:
        return
    count = 2**20 if small else 2**27

    def both(used: list[Any]) -> tuple[float, float]:
        near = [jax.device_put(jnp.ones(count), jax.sharding.SingleDeviceSharding(d)) for d in used]
        host = [
            jax.device_put(x, jax.sharding.SingleDeviceSharding(d, memory_kind="pinned_host"))
            for x, d in zip(near, used, strict=True)
        ]
        up = seconds(
            lambda: [jax.device_put(x, jax.sharding.SingleDeviceSharding(d)) for x, d in zip(host, used, strict=True)]
        )
        down = seconds(
            lambda: [
                jax.device_put(x, jax.sharding.SingleDeviceSharding(d, memory_kind="pinned_host"))
                for x, d in zip(near, used, strict=True)
            ]
        )
        total = 4.0 * count * len(used) / 1e9
        return total / up, total / down

    read, write = both(devices[:1])
    capacity, why = _pinnable(devices[0].platform)
    made.tables["host"] = {"capacity_gib": capacity, "read_gbs": read, "write_gbs": write}
    made.sources["host"] = f"copies of {4 * count / 2**20:.0f} MiB between pinned_host and device; capacity: {why}"
    if len(devices) > 1:
        together = both(devices)
        made.tables["host"] |= {"shared_read_gbs": together[0], "shared_write_gbs": together[1]}


def _pinnable(platform: str) -> tuple[float, str]:
    """(GiB of host memory that arrays may take, why): 0.8 of what the process may use, on a GPU XLA's own limit."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
        memory = min(memory, int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii")) / 2**30)
    limit = float(os.environ.get(PINNED, "64")) if platform == "gpu" else math.inf
    if limit < 0.8 * memory:
        return limit, f"XLA's limit for pinned memory; {PINNED} raises it, this host has {memory:.0f} GiB"
    return round(0.8 * memory, 1), "0.8 of the host's memory"


def _storage(made: Measured, folder: Path, small: bool) -> None:
    """Writes and reads a file in 16 MiB pieces past the page cache (O_DIRECT); without it, through fsync and a dropped
    cache."""
    size = (16 if small else 256) * 2**20
    piece = 2**22
    if not folder.is_dir():
        raise UsageError(f"{folder} is no directory to measure storage in", folder=str(folder))
    buffer = mmap.mmap(-1, piece)  # page-aligned, as O_DIRECT wants
    buffer.write(os.urandom(piece))
    handle, name = tempfile.mkstemp(prefix="jcuts-measure-", dir=folder)
    os.close(handle)
    direct = getattr(os, "O_DIRECT", 0)
    how = "direct I/O"
    try:
        try:
            file = os.open(name, os.O_WRONLY | direct)
        except OSError:
            direct, how = 0, "buffered I/O with fsync and dropped cache (no O_DIRECT here)"
            file = os.open(name, os.O_WRONLY)
        begun = time.perf_counter()
        for _ in range(size // piece):
            os.write(file, buffer)
        os.fsync(file)
        write = size / (time.perf_counter() - begun)
        os.close(file)
        file = os.open(name, os.O_RDONLY | direct)
        if not direct and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        begun = time.perf_counter()
        for _ in range(size // piece):
            os.readv(file, [buffer])
        read = size / (time.perf_counter() - begun)
        os.close(file)
    finally:
        os.unlink(name)
    stat = os.statvfs(folder)
    made.tables["storage"] = {
        "capacity_gib": round(stat.f_bavail * stat.f_frsize / 2**30, 1),
        "read_gbs": read / 1e9,
        "write_gbs": write / 1e9,
        "shared_read_gbs": read / 1e9,
        "shared_write_gbs": write / 1e9,
    }
    made.sources["storage"] = (
        f"{size / 2**20:.0f} MiB in {folder}, pieces of {piece / 2**20:.0f} MiB, {how}; shared by all devices"
    )
