"""The same function on several GPUs: one by one, on a mesh, inside shard_map, from several threads.

    python benchmarks/gpu_checks/multi_gpu.py --out results                    # all GPUs of this machine, at least two
    python benchmarks/gpu_checks/multi_gpu.py --out results --platform cpu     # the same on four pretended CPU devices

Shown for each way: kernels run (the launcher's target is in the program), results equal those of one device, and how
many measuring processes were started: tuning belongs to the kind of device, so a second equal GPU needs none.
``OUT/gpu_mesh.json`` has one row per check.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
CALLS = 100


def network(x: Any, w: Any, g: Any, k: Any) -> Any:
    """Depthwise convolution, a product, layer norm and softmax: kernels of several forms, and code of XLA's."""
    import jax
    import jax.numpy as jnp

    y = jax.lax.conv_general_dilated(
        x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=x.shape[-1]
    )
    y = jnp.clip(y, 0.0, 6.0).mean((1, 2))
    y = (y - y.mean(-1, keepdims=True)) * jax.lax.rsqrt(y.var(-1, keepdims=True) + 1e-5) * g
    return jax.nn.softmax(jnp.tanh(y @ w), axis=-1)


class Study:
    """What all checks share: devices, arguments, and how many measuring processes this process has started."""

    def __init__(self, platform: str) -> None:
        import jax
        import numpy as np

        from jcuts.tune.parent import worker_pool

        try:
            self.devices = jax.devices(platform)
        except RuntimeError:  # no such backend
            self.devices = []
            return
        self.target = "jcuts_cpu_launch" if platform == "cpu" else "jcuts_cuda_launch"
        rng = np.random.default_rng(0)
        batch, channels = 32 * len(self.devices), 64
        self.arguments = [
            rng.standard_normal(shape).astype(np.float32)
            for shape in ((batch, 28, 28, channels), (channels, 512), (channels,), (3, 3, 1, channels))
        ]
        self.started = 0
        started = worker_pool.Worker.__init__

        def counted(worker: Any, *args: Any, **kwargs: Any) -> None:
            self.started += 1
            started(worker, *args, **kwargs)

        worker_pool.Worker.__init__ = counted  # type: ignore[method-assign]
        self.plain = np.asarray(jax.jit(network)(*jax.device_put(self.arguments, self.devices[0])))

    def fresh(self, **more: Any) -> Any:
        """The function as a new process would have it: no plan, only the tuning database."""
        import jcuts
        from jcuts.pipeline import passes as pipeline_passes

        pipeline_passes.forget()
        return jcuts.optimize(network, **{"mode": "fusion", **more})

    def mesh(self) -> Any:
        """A mesh of all devices with one axis that the partitioner handles."""
        import jax
        import numpy as np

        return jax.sharding.Mesh(np.array(self.devices), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def sharded(self) -> list[Any]:
        """The arguments, the batch split over the mesh."""
        import jax
        from jax.sharding import NamedSharding, PartitionSpec

        mesh = self.mesh()
        return [
            jax.device_put(x, NamedSharding(mesh, PartitionSpec("data") if k == 0 else PartitionSpec()))
            for k, x in enumerate(self.arguments)
        ]

    def close(self, got: Any) -> bool:
        """Whether results agree with `jax.jit` on one device."""
        import numpy as np

        return bool(np.allclose(np.asarray(got), self.plain, rtol=2e-3, atol=1e-6))


def one_by_one(study: Study) -> dict[str, Any]:
    """The same call on every device: tuned on the first, equal bits on all."""
    import jax
    import numpy as np

    found, started = [], []
    for device in study.devices:
        run = study.fresh(tune="auto")
        arguments = jax.device_put(study.arguments, device)
        before = study.started
        out = run(*arguments)
        found.append(np.asarray(out).tobytes())
        started.append(study.started - before)
        assert out.devices() == {device}, out.devices()
        assert study.target in run.lower(*arguments).compile().as_text()
    return {
        "measuring_processes": started,
        "equal_bits": len(set(found)) == 1,
        "right": study.close(out),
        "ok": started[0] > 0 and not any(started[1:]) and len(set(found)) == 1 and study.close(out),
    }


def on_a_mesh(study: Study) -> dict[str, Any]:
    """Arguments with `NamedSharding`: planned and tuned per shard; nothing is gathered."""
    arguments = study.sharded()
    run = study.fresh(tune="auto")
    before = study.started
    out = run(*arguments)
    first = study.started - before
    again = study.fresh(tune="auto")
    out = again(*arguments)
    text = str(again.lower(*arguments).compile().as_text())
    row = {
        "measuring_processes": first,
        "at_the_second_time": study.started - before - first,
        "calls": text.count(f'"{study.target}"'),
        "all_gather": "all-gather" in text,
        "devices": len(out.sharding.device_set),
        "right": study.close(out),
    }
    return {**row, "ok": row["right"] and row["calls"] > 0 and not row["all_gather"] and not row["at_the_second_time"]}


def in_shard_map(study: Study) -> dict[str, Any]:
    """Inside a jitted `shard_map`, where nothing may be measured: the choices of the mesh are used."""
    import jax
    from jax.sharding import PartitionSpec

    run = study.fresh(tune="cached")
    specs = (PartitionSpec("data"), PartitionSpec(), PartitionSpec(), PartitionSpec())
    mapped = jax.jit(jax.shard_map(run, mesh=study.mesh(), in_specs=specs, out_specs=PartitionSpec("data")))
    arguments, before = study.sharded(), study.started
    out = mapped(*arguments)
    calls = str(mapped.lower(*arguments).compile().as_text()).count(f'"{study.target}"')
    row = {"measuring_processes": study.started - before, "calls": calls, "right": study.close(out)}
    return {**row, "ok": row["right"] and calls > 0 and row["measuring_processes"] == 0}


def gradient_on_a_mesh(study: Study) -> dict[str, Any]:
    """A training step's gradient: kernels per shard, the reduction over the devices is XLA's."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    def loss(w: Any, g: Any, k: Any, x: Any) -> Any:
        return jnp.square(network(x, w, g, k)).sum()

    import jcuts

    x, *weights = study.sharded()
    want = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*study.arguments[1:], study.arguments[0])
    run = jcuts.optimize(jax.grad(loss, argnums=(0, 1, 2)), mode="fusion", tune="off")
    got = run(*weights, x)
    text = run.lower(*weights, x).compile().as_text()
    worst = max(
        float(np.abs(np.asarray(a) - np.asarray(b)).max() / (np.abs(np.asarray(b)).max() + 1e-30))
        for a, b in zip(got, want, strict=True)
    )
    calls = text.count(f'"{study.target}"')
    return {
        "error": worst,
        "calls": calls,
        "all_reduce": "all-reduce" in text,
        "all_gather": "all-gather" in text,
        "ok": worst < 5e-3 and calls > 0 and "all-reduce" in text and "all-gather" not in text,
    }


def from_threads(study: Study) -> dict[str, Any]:
    """A thread per device, all at once: equal bits in every call."""
    import jax
    import numpy as np

    run = study.fresh(tune="cached")
    wanted = np.asarray(run(*jax.device_put(study.arguments, study.devices[0]))).tobytes()
    different: list[int] = []

    def work(number: int) -> None:
        arguments = jax.device_put(study.arguments, study.devices[number])
        for _ in range(CALLS):
            if np.asarray(run(*arguments)).tobytes() != wanted:
                different.append(number)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(len(study.devices))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {"calls": CALLS * len(threads), "different": len(different), "ok": not different}


def replayed_on_each(study: Study) -> dict[str, Any]:
    """CUDA graphs on every device: replays do not come back to the launcher, and give equal bits."""
    import jax
    import numpy as np

    from jcuts.xla import cuda_launcher

    if study.target == "jcuts_cpu_launch":
        return {"skipped": "no CUDA graphs on CPUs", "ok": True}
    run = study.fresh(tune="cached")
    bits, launched = set(), []
    for device in study.devices:
        arguments = jax.device_put(study.arguments, device)
        options: dict[str, Any] = {"xla_gpu_graph_min_graph_size": 1}
        compiled = jax.jit(lambda *xs: run(*xs)).lower(*arguments).compile(options)
        for _ in range(5):
            jax.block_until_ready(compiled(*arguments))
        before = cuda_launcher.executions()
        for _ in range(CALLS):
            out = compiled(*arguments)
        bits.add(np.asarray(out).tobytes())
        launched.append(cuda_launcher.executions() - before)
    return {
        "launcher_calls_in_100_replays": launched,
        "equal_bits": len(bits) == 1,
        "ok": len(bits) == 1 and max(launched) < CALLS // 2,
    }


CHECKS: dict[str, Callable[[Study], dict[str, Any]]] = {
    check.__name__: check
    for check in (one_by_one, on_a_mesh, in_shard_map, gradient_on_a_mesh, from_threads, replayed_on_each)
}


def main() -> int:
    """Runs all checks; status 1 if one fails, 2 where there are fewer than two devices."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu_results"))
    parser.add_argument("--platform", default="cuda", choices=("cuda", "cpu"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    os.environ.setdefault("JCUTS_CACHE_DIR", str((options.out / "cache").resolve()))
    os.environ.setdefault("JCUTS_MAX_CANDIDATES", "4")
    os.environ.setdefault("JCUTS_TUNE_SECONDS", "inf")
    if options.platform == "cpu":
        os.environ["JAX_PLATFORMS"] = "cpu"
        os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
    import jax

    jax.config.update("jax_default_matmul_precision", "highest")
    study = Study(options.platform)
    if len(study.devices) < 2:
        print(f"{len(study.devices)} device: at least two are needed")
        return 2
    rows = {}
    for name, check in CHECKS.items():
        start = time.perf_counter()
        try:
            rows[name] = check(study)
        except Exception as error:  # the others still say something
            rows[name] = {"ok": False, "error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
        rows[name]["seconds"] = round(time.perf_counter() - start, 1)
        print(name, json.dumps(rows[name])[:2000], flush=True)
    found = {"devices": [str(d.device_kind) for d in study.devices], "checks": rows}
    (options.out / "gpu_mesh.json").write_text(json.dumps(found, indent=1) + "\n")
    return int(not all(row["ok"] for row in rows.values()))


if __name__ == "__main__":
    raise SystemExit(main())
