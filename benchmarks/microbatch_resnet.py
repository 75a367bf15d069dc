"""A ResNet-18 training step in plain JAX, and the same step with its convolutions divided under a workspace limit."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

BLOCKS = ((64, 1), (64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), (512, 1))


def initial(width: int, classes: int, seed: int = 0) -> dict[str, Any]:
    """Weights; ``width`` scales the channels (1 is ResNet-18)."""
    import numpy as np

    rng = np.random.default_rng(seed)
    made: dict[str, Any] = {}

    def conv(name: str, inputs: int, outputs: int, window: int) -> None:
        scale = (2.0 / (inputs * window * window)) ** 0.5
        made[name] = (scale * rng.standard_normal((outputs, inputs, window, window))).astype(np.float32)
        made[f"{name} scale"] = np.ones((outputs, 1, 1), np.float32)
        made[f"{name} shift"] = np.zeros((outputs, 1, 1), np.float32)

    before = max(1, 64 // width)
    conv("stem", 3, before, 7)
    for k, (channels, stride) in enumerate(BLOCKS):
        channels = max(1, channels // width)
        conv(f"{k} a", before, channels, 3)
        conv(f"{k} b", channels, channels, 3)
        if stride != 1 or before != channels:
            conv(f"{k} skip", before, channels, 1)
        before = channels
    made["out"] = (0.01 * rng.standard_normal((before, classes))).astype(np.float32)
    return made


def loss(weights: dict[str, Any], images: Any, labels: Any) -> Any:
    """Mean cross entropy of a batch (N C H W), statistics of the batch itself in the normalisations."""
    import jax
    import jax.numpy as jnp
    from jax import lax

    def conv(name: str, x: Any, stride: int) -> Any:
        w = weights[name]
        pad = w.shape[-1] // 2
        y = lax.conv_general_dilated(
            x, w, (stride, stride), ((pad, pad), (pad, pad)), dimension_numbers=("NCHW", "OIHW", "NCHW"),
            precision="highest",
        )  # fmt: skip
        mean = y.mean((0, 2, 3), keepdims=True)
        variance = ((y - mean) ** 2).mean((0, 2, 3), keepdims=True)
        return (y - mean) * lax.rsqrt(variance + 1e-5) * weights[f"{name} scale"] + weights[f"{name} shift"]

    x = jax.nn.relu(conv("stem", images, 2))
    x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 1, 3, 3), (1, 1, 2, 2), ((0, 0), (0, 0), (1, 1), (1, 1)))
    for k, (_, stride) in enumerate(BLOCKS):
        y = jax.nn.relu(conv(f"{k} a", x, stride))
        y = conv(f"{k} b", y, 1)
        x = jax.nn.relu(y + (conv(f"{k} skip", x, stride) if f"{k} skip" in weights else x))
    scores = jnp.dot(x.mean((2, 3)), weights["out"], precision="highest")
    return -jnp.take_along_axis(jax.nn.log_softmax(scores), labels[:, None], 1).mean()


def step(weights: dict[str, Any], images: Any, labels: Any) -> tuple[Any, dict[str, Any]]:
    """One step of gradient descent: the loss, and the new weights."""
    import jax

    value, gradient = jax.value_and_grad(loss)(weights, images, labels)
    return value, jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradient)


def resnet(run: Any) -> dict[str, Any]:
    """The step by plain jit and with every convolution divided: distance, time, memory, and the division per layer."""
    import jax
    import numpy as np

    from jcuts import divide
    from jcuts.base.settings import Settings
    from jcuts.trace import jaxapi
    from jcuts.trace.inline import inline
    from jcuts.trace.simplify import simplify
    from jcuts.tune.convolutions import Measurer, measured
    from jcuts.xla.convolutions import Site

    tiny = run.options.dry_run
    batch, extent, width, limit = (4, 32, 32, 16 << 10) if tiny else (run.options.resnet_batch, 224, 1, 64 << 20)
    weights = initial(width, 10 if tiny else 1000)
    rng = np.random.default_rng(1)
    images = rng.standard_normal((batch, 3, extent, extent)).astype(np.float32)
    labels = rng.integers(0, 10, batch).astype(np.int32)
    leaves, tree = jax.tree.flatten((weights, images, labels))
    closed = jax.make_jaxpr(lambda *xs: jax.tree.leaves(step(*jax.tree.unflatten(tree, xs))))(*leaves)
    flat = simplify(inline(closed))

    sites = {(s.convolution, s.batch) for s in divide.sites(flat) if isinstance(s, Site)}
    done = 0
    with Measurer(run.device, run.platform, seconds=run.options.seconds) as measurer:
        for convolution, samples in sorted(sites, key=str):
            if run.left < 90 and not tiny:
                return {"batch": batch, "stopped": f"the budget was spent after {done} of {len(sites)} kernels"}
            measured(convolution, samples, run.database, measurer, library=False)
            done += 1
    run.database.record_network(divide.network_of(flat, f"ResNet-18 step, batch {batch}"))
    run.say(f"resnet: {done} distinct kernels are timed")

    found: dict[str, Any] = {"batch": batch, "limit": limit}
    programs: dict[str, Callable[..., Any]] = {"xla": lambda *xs: jaxapi.eval_closed(closed, *xs)}
    for name, options in {
        "WR": {"workspace_limit": limit}, "WR 8 MiB": {"workspace_limit": limit // 8},
        "WD": {"total_workspace": limit},
    }.items():  # fmt: skip
        settings = Settings(mode="fusion", tune="cached", **options)
        outcome = divide.divided(flat, settings, run.platform, may_measure=False)
        found[name] = {
            "note": outcome.note, "divided": outcome.count, "convolutions": len(outcome.rows),
            "workspaces in all": sum(row.workspace for row in outcome.rows if row.division),
            "workspaces at once": max((row.workspace for row in outcome.rows if row.division), default=0),
            "seconds of convolutions": sum(row.seconds or 0.0 for row in outcome.rows),
            "undivided seconds": sum(row.undivided or row.seconds or 0.0 for row in outcome.rows),
            "layers": [[r.layer, r.kernel, r.division or r.why, r.seconds, r.undivided, r.workspace]
                       for r in outcome.rows],
        }  # fmt: skip
        programs[name] = lambda *xs, program=outcome.closed: jaxapi.eval_closed(program, *xs)
        run.report["items"]["resnet"] = found
        run.save()
    inputs = [jax.device_put(leaf) for leaf in leaves]
    found["xla"] = {}
    expected: list[Any] = []
    for name, program in programs.items():
        if run.left < 20 and not tiny:
            found["stopped"] = f"the budget was spent before {name} ran"
            break
        start = time.monotonic()
        compiled = jax.jit(program).lower(*inputs).compile()
        compiling = time.monotonic() - start
        result = [np.asarray(x, np.float64) for x in compiled(*inputs)]
        expected = expected or result
        times = []
        for _ in range(3 if tiny else 10):
            start = time.perf_counter()
            jax.block_until_ready(compiled(*inputs))
            times.append(time.perf_counter() - start)
        analysis = compiled.memory_analysis()
        changes = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(weights)]
        found[name].update({
            "loss": float(result[0]),
            "worst distance of a weight's change": max(
                float(np.linalg.norm(r - e) / (np.linalg.norm(e - w) or 1.0))
                for r, e, w in zip(result[1:], expected[1:], changes, strict=True)
            ),
            "seconds": float(np.median(times)), "compile seconds": compiling,
            "temporary bytes": int(analysis.temp_size_in_bytes) if analysis is not None else None,
        })  # fmt: skip
        run.say(f"resnet {name}: {found[name]['seconds'] * 1e3:.2f} ms, loss {found[name]['loss']:.6f}")
        run.save()
    return found
