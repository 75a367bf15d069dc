"""First calls of twelve small programs as users write them: ``jax.jit``, ``tune="auto"``, ``tune="serve"``.

    python benchmarks/serving/first_calls.py --out first_calls.json

Every call is the first of a process with an empty cache (but for the hashes of jcuts' modules, which are made once per
version), after the imports of JAX and of jcuts' planner.  Seconds until the result is there; for ``auto`` also when the
decision was taken while the function was called all the time (the full gain), which program won, and times of later
calls of both.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jcuts

WAYS = ("jit", "auto", "serve")
CALLS = 20
LONGEST = 180.0
"""A program that is not decided by then never is [s]."""


def _random(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def softmax(x: Any) -> Any:
    """Row softmax."""
    return jax.nn.softmax(x, axis=1)


def layer_norm(x: Any, scale: Any, shift: Any) -> Any:
    """Layer norm with scale and shift."""
    return (x - x.mean(1, keepdims=True)) * jax.lax.rsqrt(x.var(1, keepdims=True) + 1e-5) * scale + shift


def mlp(x: Any, w: Any, v: Any) -> Any:
    """Two layers."""
    return jnp.tanh(x @ w) @ v


def mlp_step(params: Any, x: Any, y: Any) -> Any:
    """A step of gradient descent of two layers."""
    grads = jax.grad(lambda p: jnp.mean((mlp(x, *p) - y) ** 2))(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


def convolutions(x: Any, w: Any, v: Any) -> Any:
    """Two 3x3 convolutions and a pool."""
    for kernel in (w, v):
        x = jax.nn.relu(
            jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        )
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def attention(q: Any, k: Any, v: Any) -> Any:
    """Softmax attention of one head."""
    return jax.nn.softmax(q @ k.T / np.sqrt(q.shape[-1])) @ v


def logistic_step(w: Any, x: Any, y: Any) -> Any:
    """A step of logistic regression."""
    return w - 0.1 * jax.grad(lambda w: jnp.mean(jnp.logaddexp(0, -y * (x @ w))))(w)


def k_means(centres: Any, x: Any) -> Any:
    """A step of Lloyd's algorithm."""
    nearest = jnp.argmin(((x[:, None] - centres) ** 2).sum(-1), axis=1)
    member = jax.nn.one_hot(nearest, centres.shape[0])
    return member.T @ x / jnp.maximum(member.sum(0), 1)[:, None]


def n_body(x: Any, v: Any) -> Any:
    """A step of gravitation."""
    d = x[None] - x[:, None]
    a = (d / ((d**2).sum(-1, keepdims=True) + 1e-3) ** 1.5).sum(1)
    return x + 0.01 * v, v + 0.01 * a


def recurrence(h: Any, xs: Any, w: Any) -> Any:
    """A recurrent network over time."""
    return jax.lax.scan(lambda h, x: (jnp.tanh(h @ w + x), None), h, xs)[0]


def heat(u: Any) -> Any:
    """Ten steps of the heat equation."""
    for _ in range(10):
        u = u.at[1:-1, 1:-1].add(0.1 * (u[2:, 1:-1] + u[:-2, 1:-1] + u[1:-1, 2:] + u[1:-1, :-2] - 4 * u[1:-1, 1:-1]))
    return u


def black_scholes(s: Any, k: Any, t: Any) -> Any:
    """Prices of options."""
    d = (jnp.log(s / k) + 0.07 * t) / (0.2 * jnp.sqrt(t))
    cdf = jax.scipy.stats.norm.cdf
    return s * cdf(d) - k * jnp.exp(-0.05 * t) * cdf(d - 0.2 * jnp.sqrt(t))


PROGRAMS: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Any, ...]]]] = {
    "softmax": (softmax, lambda: (_random(1024, 1024),)),
    "layer norm": (layer_norm, lambda: (_random(1024, 768), _random(768), _random(768))),
    "mlp": (mlp, lambda: (_random(128, 256), _random(256, 256), _random(256, 10))),
    "mlp step": (mlp_step, lambda: ((_random(256, 256), _random(256, 10)), _random(128, 256), _random(128, 10))),
    "convolutions": (convolutions, lambda: (_random(8, 32, 32, 3), _random(3, 3, 3, 16), _random(3, 3, 16, 32))),
    "attention": (attention, lambda: (_random(256, 64), _random(256, 64), _random(256, 64))),
    "logistic step": (logistic_step, lambda: (_random(64), _random(4096, 64), np.sign(_random(4096)))),
    "k-means": (k_means, lambda: (_random(16, 8), _random(4096, 8))),
    "n-body": (n_body, lambda: (_random(256, 3), _random(256, 3))),
    "recurrence": (recurrence, lambda: (_random(16, 128), _random(64, 16, 128), _random(128, 128) / 12)),
    "heat": (heat, lambda: (_random(512, 512),)),
    "black-scholes": (black_scholes, lambda: tuple(np.abs(_random(100_000)) + 0.5 + i for i in range(3))),
}


def measured(name: str, way: str) -> dict[str, Any]:
    """The first call in this process, and later ones."""
    function, arguments = PROGRAMS[name]
    args = arguments()
    jax.block_until_ready(jax.jit(lambda x: x + 1)(np.float32(1)))  # JAX's own start
    if way != "jit":
        importlib.import_module("jcuts.jit.variant_selection")
    fn = jax.jit(function) if way == "jit" else jcuts.optimize(function, tune=way)
    start = time.perf_counter()
    jax.block_until_ready(fn(*args))
    first = time.perf_counter() - start
    while way == "auto" and fn.decision(*args).deferred and time.perf_counter() - start < LONGEST:
        jax.block_until_ready(fn(*args))
    decided = time.perf_counter() - start
    times = []
    for _ in range(CALLS):
        start = time.perf_counter()
        jax.block_until_ready(fn(*args))
        times.append(time.perf_counter() - start)
    program = "xla" if way == "jit" else fn.decision(*args).chosen
    found = {"program": name, "way": way, "first_s": first, "ms": 1000 * float(np.median(times)), "runs": program}
    return {**found, "decided_s": decided, "load": os.getloadavg()[0]} if way == "auto" else found


def in_process(name: str, way: str, known: Path) -> dict[str, Any]:
    """`measured` in a process of its own. Args: known: the file of hashes."""
    with tempfile.TemporaryDirectory() as folder:
        if known.exists():
            shutil.copy(known, folder)
        environment = {**os.environ, "JCUTS_CACHE_DIR": folder, "JCUTS_PROGRESS": "0"}
        command = [sys.executable, __file__, "--one", name, way]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        made = Path(folder) / known.name
        if made.exists():
            shutil.copy(made, known)
        return json.loads(done.stdout)


def main() -> None:
    """Prints a row per program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="JSON file of the numbers")
    parser.add_argument("--one", nargs=2, metavar=("PROGRAM", "WAY"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one is not None:
        print(json.dumps(measured(*arguments.one)))
        return
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        known = Path(folder) / "module_code.json"
        in_process("softmax", "auto", known)
        for name in PROGRAMS:
            found = {way: in_process(name, way, known) for way in WAYS}
            rows += found.values()
            first = ", ".join(f"{way} {row['first_s']:6.2f} s" for way, row in found.items())
            first += f" (decided after {found['auto']['decided_s']:5.1f} s)"
            later = f"{found['jit']['ms']:8.3f} ms, {found['auto']['ms']:8.3f} ms ({found['auto']['runs']})"
            print(f"{name:14} {first}; later {later}", flush=True)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
