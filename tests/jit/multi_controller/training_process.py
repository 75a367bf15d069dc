"""One process of a job of several: training steps of a small network on a mesh, plain and with jcuts.

    python training_process.py RANK PROCESSES PORT FOLDER

Every process has two host devices, and its tuning database where JCUTS_CACHE_DIR says; it writes FOLDER/RANK.json.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

rank, processes, port, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import Mesh, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

CHANNELS, STEPS = 24, 4
COLLECTIVE = re.compile(r"= \S+ (all-reduce|all-gather|reduce-scatter|collective-permute|all-to-all)(?:-start)?\(")


def step(weights: dict[str, jax.Array], x: jax.Array, y: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
    """A depthwise layer and a head."""

    def loss(w: dict[str, jax.Array]) -> jax.Array:
        h = jax.lax.conv_general_dilated(
            x, w["taps"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=CHANNELS
        )
        return jnp.mean((jnp.tanh(h * w["scale"]).mean((1, 2)) @ w["head"] - y) ** 2)

    value, gradients = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda a, g: a - 0.1 * g, weights, gradients), value


def on_mesh(value: np.ndarray, mesh: Mesh, *axes: str | None) -> jax.Array:
    """A global array of which this process makes its shards."""
    return jax.make_array_from_callback(value.shape, NamedSharding(mesh, P(*axes)), lambda index: value[index])


def problem(mesh: Mesh, sharded: bool) -> tuple[Any, ...]:
    """Weights, images and targets: the batch over ``data``; with ``sharded`` the head's rows over ``model``, too."""
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32)

    weights = {"taps": draw(3, 3, 1, CHANNELS), "scale": draw(CHANNELS), "head": draw(CHANNELS, 5)}
    placed = {name: on_mesh(value, mesh) for name, value in weights.items()}
    if sharded:
        placed["head"] = on_mesh(weights["head"], mesh, "model")
    return placed, on_mesh(draw(8, 21, 19, CHANNELS), mesh, "data"), on_mesh(draw(8, 5), mesh, "data")


def losses(run: Any, weights: Any, *batch: Any) -> list[float]:
    """Losses of some steps."""
    found = []
    for _ in range(STEPS):
        weights, value = run(weights, *batch)
        found.append(float(value))
    return found


def main() -> None:
    """The process."""
    jax.distributed.initialize(f"localhost:{port}", processes, rank)
    import jcuts
    from jcuts.tune import session

    mesh = Mesh(np.array(jax.devices()).reshape(processes, 2), ("data", "model"))
    result: dict[str, Any] = {"devices": [d.id for d in jax.local_devices()]}
    for name in ("data parallel", "sharded head"):
        weights, x, y = problem(mesh, name == "sharded head")
        plain = losses(jax.jit(step), weights, x, y)
        # A function of its own, with decisions of its own; how busy the machine is does not decide what runs.
        ours = jcuts.optimize(lambda *args: step(*args), mode="fusion")
        mine = losses(ours, weights, x, y)
        decision = ours.decision(weights, x, y)
        assert decision is not None
        lowered = ours.chosen(weights, x, y)
        text = lowered.as_text()
        result[name] = {
            "plain": plain,
            "jcuts": mine,
            "chosen": decision.chosen,
            "reason": decision.reason,
            "kernels": text.count("stablehlo.custom_call @jcuts"),
            "collectives": COLLECTIVE.findall(lowered.compile().as_text()),
        }
    local = jcuts.optimize(lambda a: jnp.tanh(a) * 2)  # of this process alone: nothing waits for the others
    if rank == 0:
        np.testing.assert_allclose(local(jnp.ones(8)), np.tanh(1) * 2 * np.ones(8), rtol=1e-6)
    result["measured"] = len([row for row in session.store().ls() if row.kind == "choice"])
    (folder / f"{rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
