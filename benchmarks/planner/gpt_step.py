"""A GPT training step over data x tensor x pipeline axes: what a plan means when a pipeline is in it.

    export XLA_FLAGS=--xla_force_host_platform_device_count=8
    python benchmarks/planner/gpt_step.py --data 2 --tensor 2 --pipeline 2 --layers 4 --hidden 64 --heads 4 --count 4

Shardings cannot express a pipeline, so the step is written over ``shard_map``: stages hand activations on by
``ppermute``.

GPipe: one loop over ticks runs every micro-batch forward; JAX differentiates the loop, so all backward passes follow.
1F1B: in tick k stage s runs micro-batch k - s forward and micro-batch k - (2(p-1) - s) backward (recomputed from its
input), so that a stage keeps at most 2p - 1 inputs however many micro-batches there are.  Gradients equal the
unpipelined step's.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

AXES = ("stage", "data", "tensor")


@dataclass(frozen=True)
class Config:
    """Sizes and layout.  ``micro`` is samples per micro-batch and data rank, ``count`` micro-batches per step."""

    layers: int = 4
    hidden: int = 64
    heads: int = 4
    sequence: int = 32
    vocabulary: int = 256
    micro: int = 1
    count: int = 4
    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    schedule: str = "1f1b"
    remat: bool = True
    dtype: str = "float32"

    @property
    def batch(self) -> int:
        """Samples per step."""
        return self.micro * self.count * self.data


def init(config: Config, seed: int = 0) -> dict:
    """32-bit parameters; layers are stacked on their first axis, which the stage axis divides."""
    keys = iter(jax.random.split(jax.random.key(seed), 8))
    n, h, heads = config.layers, config.hidden, config.heads
    size = h // heads

    def normal(*shape: int) -> jax.Array:
        return 0.02 * jax.random.normal(next(keys), shape, jnp.float32)

    return {
        "embed": normal(config.vocabulary, h),
        "positions": normal(config.sequence, h),
        "norm": jnp.ones(h),
        "layers": {
            "norm1": jnp.ones((n, h)),
            "qkv": normal(n, h, 3, heads, size),
            "proj": normal(n, heads, size, h),
            "norm2": jnp.ones((n, h)),
            "up": normal(n, h, 4 * h),
            "down": normal(n, 4 * h, h),
        },
    }


def specs() -> dict:
    """How the axes divide the parameters: layers over stages, heads and the feed-forward's inside over tensor."""
    return {
        "embed": PartitionSpec(),
        "positions": PartitionSpec(),
        "norm": PartitionSpec(),
        "layers": {
            "norm1": PartitionSpec("stage"),
            "qkv": PartitionSpec("stage", None, None, "tensor"),
            "proj": PartitionSpec("stage", "tensor"),
            "norm2": PartitionSpec("stage"),
            "up": PartitionSpec("stage", None, "tensor"),
            "down": PartitionSpec("stage", "tensor"),
        },
    }


def normalise(x: jax.Array, scale: jax.Array) -> jax.Array:
    """RMS norm in 32 bits."""
    wide = x.astype(jnp.float32)
    return (wide * lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-6) * scale).astype(x.dtype)


def layer(x: jax.Array, w: dict, axis: str | None) -> jax.Array:
    """One layer on the heads and columns that this GPU has; ``axis`` sums the partial results."""
    dtype = x.dtype
    total = (lambda value: lax.psum(value, axis)) if axis else (lambda value: value)
    q, k, v = jnp.moveaxis(jnp.einsum("bsh,hcnd->bscnd", normalise(x, w["norm1"]), w["qkv"].astype(dtype)), 2, 0)
    scores = jnp.einsum("bqnd,bknd->bnqk", q, k).astype(jnp.float32) / np.sqrt(q.shape[-1])
    mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(mask, scores, -1e30), -1).astype(dtype)
    mixed = jnp.einsum("bnqk,bknd->bqnd", weights, v)
    x = x + total(jnp.einsum("bqnd,ndh->bqh", mixed, w["proj"].astype(dtype)))
    inside = jax.nn.gelu(normalise(x, w["norm2"]) @ w["up"].astype(dtype))
    return x + total(inside @ w["down"].astype(dtype))


def stage(x: jax.Array, layers: dict, config: Config, axis: str | None) -> jax.Array:
    """The layers of a stage, one after another."""
    one = partial(layer, axis=axis)
    if config.remat:
        one = jax.checkpoint(one)
    return lax.scan(lambda carry, w: (one(carry, w), None), x, layers)[0]


def embed(params: dict, tokens: jax.Array, config: Config) -> jax.Array:
    """Token and position embedding of ``tokens`` [b, s + 1] without their last column."""
    return (params["embed"][tokens[:, :-1]] + params["positions"]).astype(config.dtype)


def head(params: dict, x: jax.Array, tokens: jax.Array, config: Config) -> jax.Array:
    """Summed cross-entropy of the next tokens over all tokens of the global batch."""
    logits = (normalise(x, params["norm"]) @ params["embed"].T.astype(x.dtype)).astype(jnp.float32)
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], -1)
    return -picked.sum() / (config.batch * config.sequence)


def reference_loss(params: dict, tokens: jax.Array, config: Config) -> jax.Array:
    """The loss without any axis: what every layout must reproduce."""
    x = stage(embed(params, tokens, config), params["layers"], config, None)
    return head(params, x, tokens, config)


def _axes_of(x: jax.Array) -> frozenset:
    """Mesh axes along which a value differs between devices (spelled differently by JAX 0.10 and 0.11)."""
    kind = jax.typeof(x)
    return frozenset(kind.vma if hasattr(kind, "vma") else kind.manual_axis_type.varying)


def _varying(tree: object, names: tuple[str, ...]) -> object:
    """Marks values as different per device along ``names`` (those along which they already are, stay)."""

    def mark(x: jax.Array) -> jax.Array:
        missing = tuple(name for name in names if name not in _axes_of(x))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(mark, tree)


def _shift(x: jax.Array, p: int, by: int) -> jax.Array:
    return lax.ppermute(x, "stage", [(i, i + by) for i in range(p) if 0 <= i + by < p])


def gpipe_loss(params: dict, tokens: jax.Array, config: Config) -> jax.Array:
    """Inside ``shard_map``: all micro-batches forward through the stages; tick t feeds micro-batch t."""
    p, count = config.pipeline, config.count
    micro = tokens.reshape(count, config.micro, -1)
    me = lax.axis_index("stage")
    axis = "tensor"
    # Marked as different per device here, outside of loop and branches: the transpose is one reduction of their
    # gradients
    # (inside the branch that only the last stage takes, it would wait for the others for ever).
    params = _varying(params, ("stage", "data"))

    def tick(carry: tuple, t: jax.Array) -> tuple:
        received, loss = carry
        fed = embed(params, micro[jnp.clip(t, 0, count - 1)], config)
        y = stage(jnp.where(me == 0, fed, received), params["layers"], config, axis)
        out = t - (p - 1)
        target = micro[jnp.clip(out, 0, count - 1)]
        here = (me == p - 1) & (out >= 0)
        loss += lax.cond(
            here,
            lambda: _varying(head(params, y, target, config), ("stage", "data")),
            lambda: _varying(jnp.zeros(()), ("stage", "data")),
        )
        return (_shift(y, p, 1), loss), None

    shape = (config.micro, config.sequence, config.hidden)
    start = _varying((jnp.zeros(shape, config.dtype), jnp.zeros(())), ("stage", "data"))
    (_, loss), _ = lax.scan(tick, start, jnp.arange(count + p - 1))
    return lax.psum(loss, ("stage", "data"))


def one_f_one_b(params: dict, tokens: jax.Array, config: Config) -> tuple[jax.Array, dict]:
    """Inside ``shard_map``: (loss, gradients), one forward and one backward per tick."""
    p, count = config.pipeline, config.count
    micro = tokens.reshape(count, config.micro, -1)
    me = lax.axis_index("stage")
    last = me == p - 1
    slots = 2 * p - 1
    # Parameters that the data and stage axes share are marked as different per device, so that their gradients add up
    # locally and are reduced once at the end, not once per micro-batch.
    mine = _varying(params, ("stage", "data"))
    shape = (config.micro, config.sequence, config.hidden)

    def local(params: dict, received: jax.Array, data: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = jnp.where(me == 0, embed(params, data, config), received)
        y = stage(x, params["layers"], config, "tensor")
        loss = lax.cond(last, lambda: head(params, y, data, config), lambda: _varying(jnp.zeros(()), ("stage", "data")))
        return y, loss

    def tick(carry: tuple, k: jax.Array) -> tuple:
        ahead, behind, stash, gradients, loss = carry
        f, b = k - me, k - (2 * (p - 1) - me)
        x = ahead
        stash = stash.at[jnp.where((f >= 0) & (f < count), f % slots, slots)].set(x, mode="drop")
        fed = jnp.where(me == 0, embed(mine, micro[jnp.clip(f, 0, count - 1)], config), x)
        y = stage(fed, mine["layers"], config, "tensor")
        data = micro[jnp.clip(b, 0, count - 1)]
        (_, part), back = jax.vjp(partial(local, data=data), mine, stash[jnp.clip(b, 0, None) % slots])
        valid = (b >= 0) & (b < count)
        cotangent = jnp.where(last | ~valid, jnp.zeros_like(behind), behind)
        got, dx = back((cotangent, _varying(jnp.where(valid, 1.0, 0.0), ("stage", "data"))))
        gradients = jax.tree.map(lambda total, g: total + jnp.where(valid, g, jnp.zeros_like(g)), gradients, got)
        loss += jnp.where(valid, part, 0.0)
        return (_shift(y, p, 1), _shift(dx, p, -1), stash, gradients, loss), None

    zeros = jax.tree.map(jnp.zeros_like, mine)
    nothing = _varying(jnp.zeros(shape, config.dtype), ("stage", "data"))
    stash = _varying(jnp.zeros((slots, *shape), config.dtype), ("stage", "data"))
    start = (nothing, nothing, stash, zeros, _varying(jnp.zeros(()), ("stage", "data")))
    (_, _, _, gradients, loss), _ = lax.scan(tick, start, jnp.arange(count + 2 * (p - 1)))

    def reduce(g: jax.Array, spec: PartitionSpec) -> jax.Array:
        names = tuple(name for name in ("stage", "data") if name not in spec)
        return lax.psum(g, names)

    gradients = jax.tree.map(reduce, gradients, specs())
    return lax.psum(loss, ("stage", "data")), gradients


def make_mesh(config: Config, devices: list | None = None) -> Mesh:
    """Stages outermost, tensor innermost: the axis that talks most has the nearest neighbours."""
    shape = (config.pipeline, config.data, config.tensor)
    devices = (devices or jax.devices())[: int(np.prod(shape))]
    return Mesh(np.array(devices).reshape(shape), AXES)


def loss_and_gradients(config: Config, mesh: Mesh):
    """``(params, tokens [batch, sequence + 1]) -> (loss, gradients)`` over the mesh."""
    batch = PartitionSpec("data")
    if config.schedule == "gpipe":
        inside = jax.shard_map(
            partial(gpipe_loss, config=config), mesh=mesh, in_specs=(specs(), batch), out_specs=PartitionSpec()
        )
        return jax.value_and_grad(inside)
    return jax.shard_map(
        partial(one_f_one_b, config=config), mesh=mesh, in_specs=(specs(), batch), out_specs=(PartitionSpec(), specs())
    )


def train_step(config: Config, mesh: Mesh):
    """``(params, moments, tokens) -> (loss, params, moments)``: Adam on 32-bit parameters; state is donated."""
    gradients_of = loss_and_gradients(config, mesh)

    def step(params: dict, moments: tuple, tokens: jax.Array) -> tuple:
        loss, gradients = gradients_of(params, tokens)
        first, second = moments
        first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, gradients)
        second = jax.tree.map(lambda v, g: 0.95 * v + 0.05 * g * g, second, gradients)
        params = jax.tree.map(lambda w, m, v: w - 1e-4 * m / (jnp.sqrt(v) + 1e-8), params, first, second)
        return loss, params, (first, second)

    shardings = jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), specs(), is_leaf=lambda s: isinstance(s, PartitionSpec)
    )
    batch = NamedSharding(mesh, PartitionSpec("data"))
    everything = (shardings, (shardings, shardings), batch)
    out = (NamedSharding(mesh, PartitionSpec()), shardings, (shardings, shardings))
    return jax.jit(step, in_shardings=everything, out_shardings=out, donate_argnums=(0, 1))


def main() -> None:
    """Runs a few steps and prints one JSON line: sizes, seconds per step (median), losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, field in Config.__dataclass_fields__.items():
        if field.type == "bool":
            parser.add_argument(f"--no-{name}", dest=name, action="store_false")
        else:
            parser.add_argument(f"--{name}", type={"int": int, "str": str}[str(field.type)], default=field.default)
    parser.add_argument("--steps", type=int, default=5)
    values = vars(parser.parse_args())
    steps = values.pop("steps")
    config = Config(**values)
    mesh = make_mesh(config)
    step = train_step(config, mesh)
    params = init(config)
    moments = (jax.tree.map(jnp.zeros_like, params), jax.tree.map(jnp.zeros_like, params))
    tokens = jax.random.randint(jax.random.key(1), (config.batch, config.sequence + 1), 0, config.vocabulary)
    placed = [jax.tree.map(lambda s: NamedSharding(mesh, s), specs(), is_leaf=lambda s: isinstance(s, PartitionSpec))]
    params = jax.device_put(params, placed[0])
    moments = jax.device_put(moments, (placed[0], placed[0]))
    seconds, losses = [], []
    for _ in range(steps + 1):
        begun = time.perf_counter()
        loss, params, moments = step(params, moments, tokens)
        losses.append(float(loss))  # waits for the step
        seconds.append(time.perf_counter() - begun)
    print(json.dumps({"config": config.__dict__, "median_s": float(np.median(seconds[1:])), "losses": losses}))


if __name__ == "__main__":
    main()
