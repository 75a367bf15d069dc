"""Ahead-of-time compilation of a workload under XLA compiler options: first call, memory, calls with donation."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

AUTOTUNE_CACHE = "xla_gpu_per_fusion_autotune_cache_dir"
"""Folder in which XLA keeps what autotuning chose for a fusion; it reads and writes it (its documentation,
`persisted_autotuning.md`). The key is the device and the fusion, not the options: see `compiler_flags.AUTOTUNING`."""
CHECKED_CALLS = 3
"""Calls after which results are compared: a command buffer that is not updated gives wrong ones from the second on."""


@dataclass
class Stepped:
    """A function with the arguments of its next call."""

    call: Callable[..., Any]
    form: Any
    arguments: tuple[Any, ...]

    def step(self) -> Any:
        """One call; carried (donated) arguments of the next one are its results."""
        result = self.call(*self.arguments)
        self.arguments = self.form.following(self.arguments, result)
        return result


@dataclass
class Compiled(Stepped):
    """A program compiled under some options; its results after `CHECKED_CALLS` calls."""

    options: dict[str, object]
    first_call: dict[str, float]
    memory: dict[str, int]
    cost: dict[str, float]
    results: list[Any]

    def difference(self, other: Compiled) -> float:
        """Relative L2 difference of floating-point results from another program's, after as many calls."""
        import jax
        import jax.numpy as jnp

        worst = 0.0
        for a, b in zip(jax.tree.leaves(self.results), jax.tree.leaves(other.results), strict=True):
            if jnp.issubdtype(a.dtype, jnp.floating) and a.size:
                x, y = a.astype(jnp.float32), b.astype(jnp.float32)
                found = float(jnp.linalg.norm((x - y).ravel())) / (float(jnp.linalg.norm(y.ravel())) or 1.0)
                worst = max(worst, found if found == found else float("inf"))
        return worst


def own_arguments(form: Any) -> tuple[Any, ...]:
    """Arguments of a first call; carried ones are copied, so that the workload's own stay alive."""
    import jax
    import jax.numpy as jnp

    end = form.first + form.carried
    carried = jax.tree.map(jnp.copy, form.arguments[form.first : end])
    arguments = (*form.arguments[: form.first], *carried, *form.arguments[end:])
    jax.block_until_ready(arguments)
    return arguments


def compiled(form: Any, options: dict[str, object], autotune_cache: Path | None = None) -> Compiled:
    """Compiles and calls.

    Args: autotune_cache: folder that compilations share what autotuning found in; None: each finds it anew.
    """
    import jax

    arguments = own_arguments(form)
    shared = {} if autotune_cache is None else {AUTOTUNE_CACHE: str(autotune_cache)}
    start = time.perf_counter()
    lowered = jax.jit(form.function, donate_argnums=form.donated).lower(*arguments)
    traced = time.perf_counter()
    try:
        executable = lowered.compile(compiler_options={**options, **shared} or None)
    except Exception as error:
        if AUTOTUNE_CACHE not in str(error):
            raise
        executable = lowered.compile(compiler_options=options or None)  # this jaxlib has no such folder
    ready = time.perf_counter()
    made = Compiled(executable, form, arguments, options, {}, memory_of(executable), cost_of(executable), [])
    jax.block_until_ready(made.step())
    finish = time.perf_counter()
    made.first_call = {"trace": traced - start, "compile": ready - traced, "total": finish - start}
    result = None
    for _ in range(CHECKED_CALLS - 1):
        result = made.step()
    jax.block_until_ready(result)
    made.results = list(result[form.carried :]) if form.carried else [result]
    return made


def memory_of(executable: Any) -> dict[str, int]:
    """Bytes by `memory_analysis`; ``peak`` counts a donated argument and the result in its place once."""
    analysis = executable.memory_analysis()
    names = ("argument", "output", "temp", "alias", "generated_code")
    found = {n: int(getattr(analysis, f"{n}_size_in_bytes", 0)) for n in names}
    reported = int(getattr(analysis, "peak_memory_in_bytes", 0) or 0)
    total = found["argument"] + found["output"] + found["temp"] - found["alias"]
    return found | {"peak_reported": reported, "peak": total}


def cost_of(executable: Any) -> dict[str, float]:
    """FLOP and bytes by XLA's `cost_analysis`: bytes are of every fusion's operands and results."""
    try:
        found = executable.cost_analysis() or {}
    except Exception:  # not every backend has one
        return {}
    found = found[0] if isinstance(found, list) else found
    return {name: float(found[key]) for name, key in (("flop", "flops"), ("bytes", "bytes accessed")) if key in found}
