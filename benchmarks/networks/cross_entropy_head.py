"""Peak memory, time and gradients of a language model's head: logits whole (jax.jit), and in chunks of tokens (jcuts).

    python benchmarks/networks/cross_entropy_head.py [--tokens 1024] [--width 256] [--vocabulary 131072]
        [--dtype float32] [--repeats 7] [--kernels] [--json out.json]

The step is loss, gradient of the hidden state and gradient of the weights, of the mean cross-entropy with integer
labels.  ``chunked`` is the program with the rewrite alone, compiled by XLA; with ``--kernels`` also what
``jcuts.optimize(step, chunk_logits=True)`` makes of it.  Programs run in turns; times are medians with quartiles.
Memory is XLA's own account (``memory_analysis``).  Errors are relative to the largest entry of the float64 result.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jcuts
from jcuts.rewrite.cross_entropy.head import Sizes, chunk_heads
from jcuts.rewrite.simplify import simplify
from jcuts.trace import jaxapi
from jcuts.trace.inline import inline

MIB = 1 << 20
NAMES = ("loss", "dh", "dW")


def loss(h: Any, w: Any, labels: Any) -> Any:
    """Mean cross-entropy of ``h @ w``, in float32 from the logits on."""
    logits = (h @ w).astype(jnp.float32)
    chosen = jnp.take_along_axis(logits, labels[:, None], -1)[:, 0]
    return (jax.nn.logsumexp(logits, -1) - chosen).mean()


STEP = jax.value_and_grad(loss, argnums=(0, 1))


def chunked_step(*args: Any) -> Any:
    """The compiled step with its logits in chunks."""
    sizes = Sizes.on(jax.default_backend())
    closed, count, reasons = chunk_heads(simplify(inline(jaxapi.closed_jaxpr_of(STEP, *args))), sizes)
    if not count:
        raise SystemExit(f"these logits are not computed in chunks: {', '.join(reasons) or 'they are too small'}")
    return jax.jit(lambda *args: jaxapi.eval_closed(closed, *args)).lower(*args).compile()


def float64_step(h: Any, w: Any, labels: Any, rows: int = 64) -> list[np.ndarray]:
    """Loss and gradients in float64 by NumPy, ``rows`` tokens at a time."""
    wide_h, wide_w, labels = np.asarray(h, np.float64), np.asarray(w, np.float64), np.asarray(labels)
    total, dh, dw = np.zeros(()), np.zeros_like(wide_h), np.zeros_like(wide_w)
    for start in range(0, len(wide_h), rows):
        part, mine = wide_h[start : start + rows], labels[start : start + rows]
        logits = part @ wide_w
        at = np.arange(len(part)), mine
        largest = logits.max(1, keepdims=True)
        chosen = logits[at]
        np.exp(logits - largest, out=logits)
        sums = logits.sum(1, keepdims=True)
        total += (np.log(sums[:, 0]) + largest[:, 0] - chosen).sum()
        logits /= sums
        logits[at] -= 1
        logits /= len(wide_h)
        dh[start : start + rows] = logits @ wide_w.T
        dw += part.T @ logits
    return [total / len(wide_h), dh, dw]


def errors(results: Any, exact: list[np.ndarray]) -> dict[str, float]:
    """Largest error of every result, as a share of the largest entry."""
    pairs = zip(NAMES, jax.tree.leaves(results), exact, strict=True)
    return {name: float(np.abs(np.asarray(x, np.float64) - e).max() / np.abs(e).max()) for name, x, e in pairs}


def measured(programs: dict[str, Any], args: tuple[Any, ...], repeats: int) -> dict[str, list[float]]:
    """Seconds of every program, which run in turns."""
    times: dict[str, list[float]] = {name: [] for name in programs}
    for turn in range(repeats + 1):
        for name, program in programs.items():
            start = time.perf_counter()
            jax.block_until_ready(program(*args))
            if turn:  # the first run of each touches its memory for the first time
                times[name].append(time.perf_counter() - start)
    return times


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=131072)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--kernels", action="store_true", help="also jcuts.optimize, with its first call's tuning")
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    h = jnp.asarray(rng.normal(size=(options.tokens, options.width)), options.dtype)
    w = jnp.asarray(rng.normal(size=(options.width, options.vocabulary)) / options.width**0.5, options.dtype)
    args = h, w, jnp.asarray(rng.integers(0, options.vocabulary, options.tokens), jnp.int32)
    programs: dict[str, Any] = {"jax.jit": jax.jit(STEP).lower(*args).compile(), "chunked": chunked_step(*args)}
    memory = {name: program.memory_analysis() for name, program in programs.items()}
    if options.kernels:
        programs["jcuts"] = jcuts.optimize(STEP, chunk_logits=True)
        programs["jcuts"](*args)
        memory["jcuts"] = programs["jcuts"].chosen(*args).compile().memory_analysis()
    exact = float64_step(*args)
    times = measured(programs, args, options.repeats)
    rows: dict[str, Any] = {}
    for name, program in programs.items():
        low, middle, high = (float(q) for q in np.quantile(times[name], (0.25, 0.5, 0.75)))
        temporary = memory[name].temp_size_in_bytes
        peak = temporary + memory[name].output_size_in_bytes + memory[name].argument_size_in_bytes
        error = errors(program(*args), exact)
        rows[name] = {
            "seconds": {"low": low, "median": middle, "high": high},
            "temporary_bytes": temporary,
            "peak_bytes": peak,
            "errors_to_float64": error,
        }
        texts = ", ".join(f"{key} {value:.1e}" for key, value in error.items())
        print(
            f"{name:8} temporary {temporary / MIB:8.1f} MiB, with arguments and results {peak / MIB:8.1f} MiB; "
            f"{middle * 1e3:9.1f} ms ({low * 1e3:.1f} to {high * 1e3:.1f}); errors {texts}"
        )
    shape = {key: getattr(options, key) for key in ("tokens", "width", "vocabulary", "dtype", "repeats")}
    if options.json:
        device = jax.devices()[0].device_kind
        options.json.write_text(
            json.dumps({**shape, "device": device, "jax": jax.__version__, "programs": rows}, indent=2)
        )


if __name__ == "__main__":
    main()
