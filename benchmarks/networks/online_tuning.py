"""A training loop that is tuned while it runs (``tune="online"``): first call, steps per second over the run, share of
the run that tuning took, speed after the switch against ``tune="auto"``, and the first call of a second process.

    python benchmarks/networks/online_tuning.py --shares 0.05 0.2 --out FILE.json
    python benchmarks/networks/online_tuning.py --dry

The step is one of gradient descent of a small depthwise-separable CNN in plain JAX (``--frozen``: of its classifier
alone), with donated weights; it is waited for by the loop, as a loop does that prints its loss.  Every row is a process
of its own, one after the other: plain ``jax.jit``; ``tune="auto"``; per share an empty cache and ``tune="online"``
until it has decided; and a second process with that cache.  Steps per second are given per window of ``--window``
seconds: median and quartiles before tuning began to measure, while it measured (the account grew) and after the switch.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))


def step_of(channels: int, layers: int, size: int, batch: int, frozen: bool) -> tuple[Any, tuple[Any, ...]]:
    """One step of gradient descent, and its arguments: weights, images, labels.

    Args: frozen: only the classifier is trained, as in fine-tuning; the blocks run forwards.
    """
    import jax
    import jax.numpy as jnp

    def block(x: Any, weights: Any) -> Any:
        scale, depthwise, pointwise = weights
        numbers = ("NHWC", "HWIO", "NHWC")
        x = jax.lax.conv_general_dilated(
            x, depthwise, (1, 1), "SAME", feature_group_count=x.shape[-1], dimension_numbers=numbers
        )
        x = jax.nn.relu(x * scale)
        return jax.nn.relu(jnp.einsum("nhwc,cd->nhwd", x, pointwise))

    def loss(weights: Any, images: Any, labels: Any) -> Any:
        blocks, head = weights
        x = images
        for one in blocks:
            x = block(x, one)
        scores = jax.nn.log_softmax(x.mean((1, 2)) @ head)
        return -jnp.take_along_axis(scores, labels[:, None], axis=1).mean()

    def step(weights: Any, images: Any, labels: Any) -> tuple[Any, Any]:
        def of_trained(trained: Any) -> Any:
            return loss((weights[0], trained) if frozen else trained, images, labels)

        before = weights[1] if frozen else weights
        value, gradients = jax.value_and_grad(of_trained)(before)
        after = jax.tree.map(lambda w, g: w - 1e-3 * g, before, gradients)
        return ((weights[0], after) if frozen else after), value

    keys = iter(jax.random.split(jax.random.key(0), 2 * layers + 3))
    blocks = [
        (
            jnp.ones((channels,)),
            jax.random.normal(next(keys), (3, 3, 1, channels)) / 3,
            jax.random.normal(next(keys), (channels, channels)) * (2 / channels) ** 0.5,
        )
        for _ in range(layers)
    ]
    weights = blocks, jax.random.normal(next(keys), (channels, 10)) / 10
    images = jax.random.normal(next(keys), (batch, size, size, channels))
    return step, (weights, images, jax.random.randint(next(keys), (batch,), 0, 10))


def child(job: dict[str, Any]) -> dict[str, Any]:
    """One process's loop: until it has decided and ran ``after`` seconds more, for ``seconds`` at most."""
    import jax

    step, (weights, images, labels) = step_of(**job["model"])
    if job["tune"] == "jit":
        call: Any = jax.jit(step, donate_argnums=0)
    else:
        import jcuts

        call = jcuts.optimize(step, tune=job["tune"], donate_argnums=0)

    def online() -> dict[str, Any]:
        return (call.stats()["signatures"][0].get("online") if job["tune"] == "online" else None) or {}

    losses, windows = [], []
    begun = time.perf_counter()
    weights, value = jax.block_until_ready(call(weights, images, labels))
    first = time.perf_counter() - begun
    losses.append(float(value))
    decided_at = None
    while True:
        start, count = time.perf_counter(), 0
        while time.perf_counter() - start < job["window"]:
            weights, value = jax.block_until_ready(call(weights, images, labels))
            losses.append(float(value))
            count += 1
        now, state = time.perf_counter(), online()
        windows.append({"at": now - begun, "steps_per_second": count / (now - start), **state})
        decided = state.get("state") != "tuning"
        decided_at = now if decided and decided_at is None else decided_at
        over = decided_at is not None and now - decided_at > job["after"] and now - begun > job["least"]
        if now - begun > job["seconds"] or over:
            break
    more = {}
    if job["tune"] != "jit":
        row = call.stats()["signatures"][0]
        more = {"program": row["program"], "reason": row["reason"]}
    return {
        "tune": job["tune"],
        "first_call_seconds": first,
        "losses": losses[:20],
        "windows": windows,
        "device": jax.devices()[0].device_kind,
        "decided_after_seconds": None if decided_at is None else decided_at - begun,
        **more,
    }


def spread(values: list[float]) -> list[float] | None:
    """Median and quartiles, None of nothing."""
    if not values:
        return None
    if len(values) == 1:
        return values * 3
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return [middle, low, high]


def phases(windows: list[dict[str, Any]]) -> dict[str, Any]:
    """Steps per second while kernels compile, while they are timed between steps, and after the switch."""
    found: dict[str, list[float]] = {"compiling": [], "measuring": [], "after": []}
    waited, shares = 0.0, []
    for window in windows:
        total = window.get("share", 0.0) * window["at"]
        if window.get("state") != "tuning":
            phase = "after"
        else:
            phase = "measuring" if total > waited + 1e-3 else "compiling"
            shares.append(window["share"])
        found[phase].append(window["steps_per_second"])
        waited = total
    after = found["after"][1:]  # the switch is in the first of them
    return {
        "compiling": spread(found["compiling"]),
        "measuring": spread(found["measuring"]),
        "after": spread(after or found["after"]),
        "largest_share": max(shares, default=0.0),
        "share_at_end": windows[-1].get("share", 0.0),
    }


def run(job: dict[str, Any], cache: str, share: float | None = None) -> dict[str, Any]:
    """A process's row, with its phases."""
    environment = {**os.environ, "JCUTS_CACHE_DIR": cache, "JCUTS_PROGRESS": "0"}
    if share is not None:
        environment["JCUTS_ONLINE_SHARE"] = str(share)
    command = [sys.executable, __file__, "--child", json.dumps(job)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    row = json.loads(done.stdout.splitlines()[-1])
    row |= {"share": share, "phases": phases(row["windows"])}
    print(json.dumps({k: v for k, v in row.items() if k not in ("windows", "losses")}), file=sys.stderr, flush=True)
    return row


def main() -> None:
    """Runs all processes, prints and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.05, 0.2])
    parser.add_argument("--seconds", type=float, default=900.0, help="most seconds of one process (%(default)s)")
    parser.add_argument("--after", type=float, default=20.0, help="seconds after the switch (%(default)s)")
    parser.add_argument("--least", type=float, default=0.0, help="least seconds of a tuned process (%(default)s)")
    parser.add_argument("--window", type=float, default=2.0, help="seconds per window (%(default)s)")
    parser.add_argument("--channels", type=int, default=64)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--size", type=int, default=28)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--frozen", action="store_true", help="only the classifier is trained")
    parser.add_argument("--dry", action="store_true", help="a tiny step for a moment: nothing is decided")
    parser.add_argument("--out", type=Path, help="JSON file")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child is not None:
        print(json.dumps(child(json.loads(asked.child))))
        return
    sizes = {name: getattr(asked, name) for name in ("channels", "layers", "size", "batch", "frozen")}
    model = {**sizes, "channels": 4, "layers": 1, "size": 6, "batch": 2} if asked.dry else sizes
    seconds, after, window = (0.0, 0.0, 1 / 4) if asked.dry else (asked.seconds, asked.after, asked.window)
    shares = asked.shares[:1] if asked.dry else asked.shares

    def job(tune: str, least: float = 0.0) -> dict[str, Any]:
        times = {"seconds": seconds, "after": after, "window": window, "least": least}
        return {"tune": tune, "model": model, **times}

    rows = {"jit": [], "auto": [], "online": [], "warm": []}
    with tempfile.TemporaryDirectory() as folder:
        rows["jit"].append(run(job("jit"), folder))
        if not asked.dry:
            rows["auto"].append(run(job("auto"), f"{folder}/auto"))
        for share in shares:
            cache = f"{folder}/online-{share}"
            rows["online"].append(run(job("online", min(seconds, asked.least)), cache, share))
            rows["warm"].append(run(job("online"), cache, share))
        rows["jit"].append(run(job("jit"), folder))
    found = {"model": model, "rows": rows}
    if asked.out is not None:
        asked.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
