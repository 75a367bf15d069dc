"""What a program runs on the device: instructions of its module, launches, kernels that the profiler saw, graphs."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jcuts.tune.baseline import xla_profile, xplane

_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = \(?[\w\[\],{}:()/*= ]*?\)? ?([a-z][\w\-]*)\(")
_FREE = frozenset({"parameter", "constant", "bitcast", "tuple", "get-tuple-element", "after-all"})


def hlo_counts(text: str) -> dict[str, int]:
    """Instructions of an optimised module that do something: of the entry and of the computations it calls."""
    counts: Counter[str] = Counter()
    for block in re.split(r"\n(?=\S)", text):
        head = block.split("\n", 1)[0]
        if not (head.startswith("ENTRY") or "command_buffer" in head.split("(", 1)[0]):
            continue
        for line in block.split("\n")[1:]:
            found = _INSTRUCTION.match(line)
            if found and found[1] not in _FREE:
                target = re.search(r'custom_call_target="([^"]+)"', line)
                counts[f"{found[1]} {target[1]}" if target else found[1]] += 1
    return dict(counts)


def launches(call: Callable[[], Any], steps: int = 50) -> dict[str, int]:
    """How often the launcher ran in so many calls: 0 where its kernels are replayed inside CUDA graphs."""
    import jax

    from jcuts.base.errors import NativeError
    from jcuts.xla import cuda_launcher

    try:
        lib = cuda_launcher.load()
    except NativeError:
        return {}
    for _ in range(5):
        jax.block_until_ready(call())
    before = int(lib.jcuts_cuda_executions())
    for _ in range(steps):
        jax.block_until_ready(call())
    return {"steps": steps, "launcher_runs": int(lib.jcuts_cuda_executions()) - before}


def profiled(call: Callable[[], Any], folder: Path, steps: int = 10, most: int = 25) -> dict[str, Any]:
    """Kernels per step and their time [s], as the profiler saw them on the GPU's streams; the largest by name."""
    import jax

    shutil.rmtree(folder, ignore_errors=True)
    jax.block_until_ready(call())
    with jax.profiler.trace(str(folder)):
        for _ in range(steps):
            jax.block_until_ready(call())
    path = max(folder.rglob("*.xplane.pb"), key=lambda p: p.stat().st_mtime)
    kernels: Counter[str] = Counter()
    busy: Counter[str] = Counter()
    for event in xplane.events(path, xla_profile.is_gpu, xla_profile.is_stream):
        kernels[event.name] += 1
        busy[event.name] += event.picoseconds
    shutil.rmtree(folder, ignore_errors=True)
    top = sorted(busy, key=lambda name: -busy[name])[:most]
    return {
        "per_step": sum(kernels.values()) / steps,
        "busy_seconds": sum(busy.values()) * 1e-12 / steps,
        "jcuts": sum(n for name, n in kernels.items() if "jcuts" in name) / steps,
        "largest": [[name[:80], kernels[name] / steps, busy[name] * 1e-12 / steps] for name in top],
    }


_BUFFER = re.compile(r"kCommandBuffer|command[_ ]buffer", re.IGNORECASE)
_CALL = re.compile(r"kCustomCall|custom[-_ ]call", re.IGNORECASE)


def thunks(folder: Path) -> dict[str, Any]:
    """Counts from the newest dump of thunks: command buffers, and custom calls inside and outside of them."""
    files = sorted(folder.rglob("*thunk*"), key=lambda p: p.name)
    if not files:
        return {}
    counts = {"command_buffers": 0, "custom_calls_inside": 0, "custom_calls_outside": 0, "others_outside": 0}
    inside_at: int | None = None
    for line in files[-1].read_text(errors="replace").splitlines():
        depth = len(line) - len(line.lstrip())
        if not line.strip():
            continue
        if inside_at is not None and depth <= inside_at:
            inside_at = None
        if inside_at is None and _BUFFER.search(line):
            counts["command_buffers"] += 1
            inside_at = depth
        elif _CALL.search(line):
            counts["custom_calls_inside" if inside_at is not None else "custom_calls_outside"] += 1
        elif inside_at is None:
            counts["others_outside"] += 1
    return {**counts, "file": files[-1].name}
