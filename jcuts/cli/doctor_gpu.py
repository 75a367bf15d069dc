"""GPU checks of `jcuts doctor`: driver, devices, compilers, launcher, and why GPUs are not used if they are not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jcuts.base import fingerprint

Line = tuple[str, bool, str, str]
"""What was looked at, whether it is well, what was found, and what to do about it."""
EXTRA = "pip install 'jcuts[cuda13]'"


def examine() -> Iterator[Line]:
    """One line where there is no NVIDIA GPU; else driver, devices, compilers, launcher, and one probe kernel."""
    import jax

    from jcuts.xla import cuda_launcher

    version = cuda_launcher.driver_version()
    if version is None:
        yield "GPU", True, "no NVIDIA driver: kernels for the CPU only", ""
        return
    yield "GPU driver", True, f"supports CUDA {version[0]}.{version[1]}", ""
    try:
        devices = jax.local_devices(backend="cuda")
    except RuntimeError as error:
        yield "GPU", False, f"JAX sees none: {str(error)[:200]}", "install jax[cuda13], or unset JAX_PLATFORMS"
        return
    kinds = sorted({f"{d.device_kind}, compute capability {getattr(d, 'compute_capability', '?')}" for d in devices})
    yield "GPU", True, f"{len(devices)} x {'; '.join(kinds)}", ""
    yield _rates(devices[0])
    yield _compilers()
    yield _launcher()
    yield _verdict(version)


def _rates(device: Any) -> Line:
    """Which architecture file ranks schedules."""
    from jcuts.xla import devices as xla_devices

    arch, named = xla_devices.architecture_of(xla_devices.describe(device))
    scaled = f", scaled to {arch.num_sm} SMs and {arch.clock / 1e9:.2f} GHz: there is no file of this GPU"
    found = f"those of {arch.name}" + ("" if named else scaled)
    return "GPU rates", True, f"{found}; memory {arch.bw_global / 1e12:.2f} TB/s", ""


def _compilers() -> Line:
    from jcuts.codegen.cuda import compile as compiler
    from jcuts.codegen.cuda.toolchain import ptxas

    why = compiler.available()
    if why:
        return "GPU compilers", False, why, EXTRA
    toolkit = ptxas.toolkit()
    release = f" of CUDA {toolkit[0]}.{toolkit[1]}" if toolkit else ""
    path = ptxas.assembler() or "nvJitLink"
    return "GPU compilers", True, f"numba-cuda {fingerprint.package_version('numba-cuda')}, {path}{release}", ""


def _launcher() -> Line:
    from jcuts.xla import cuda_launcher

    why = cuda_launcher.available()
    if why:
        return "GPU launcher", False, why, "rebuild the native libraries (`make native`) or reinstall jcuts"
    cuda_launcher.ensure_registered()
    return "GPU launcher", True, f"XLA accepts {cuda_launcher.TARGET!r}", ""


def _verdict(version: tuple[int, int]) -> Line:
    """Whether functions on the GPU get kernels, and if so that one does."""
    from jcuts.xla import devices as xla_devices

    why = xla_devices.unusable()
    if why:
        return "GPU kernels", False, f"functions on the GPU are left to XLA: {why}", EXTRA
    return "GPU kernels", True, _probe(), ""


def _probe() -> str:
    """Compiles and runs one kernel on the first GPU, and compares its result with NumPy's."""
    import jax
    import numpy as np

    import jcuts

    x = np.arange(4096, dtype=np.float32).reshape(64, 64)
    run = jcuts.optimize(lambda a: (a * 2 + 1).sum(1), mode="fusion", tune="off")
    on_gpu = jax.device_put(x, jax.local_devices(backend="cuda")[0])
    if not np.allclose(np.asarray(run(on_gpu)), (x * 2 + 1).sum(1), rtol=1e-5):
        raise RuntimeError("a probe kernel computes wrong results on this GPU: please report it")
    subsets = run.explain(on_gpu).subsets
    return f"one ran: {subsets[0].chosen}" if subsets else "one function ran, without a kernel"
