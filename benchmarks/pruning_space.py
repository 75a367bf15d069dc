"""What the pruning study measures: operations, and schedules drawn without the model.

The pool of an operation is everything that the product could enumerate for it, kept or not, and draws from the whole
space of legal schedules: any lane axis, half and double vectors, any register tile, reduction unrolling and
independent accumulators, any loop order, any packing.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jcuts.base import knobs
from jcuts.dfg.program import Axis, Phase, Program, Red
from jcuts.region import choose, pack, plans, schedule
from jcuts.region.bound import host_arch
from jcuts.region.build import build
from jcuts.region.graph import build_graph
from jcuts.trace.inline import inline
from jcuts.trace.simplify import simplify

Shape = tuple[int, ...]
Operation = tuple[Callable[..., Any], tuple[Shape, ...]]

NHWC = ("NHWC", "HWIO", "NHWC")
EVERYTHING = 100_000
COUNTS = (1, 1, 1, 2, 2, 3, 4, 4, 5, 6, 7, 8, 10, 12, 14, 16)
MOST_TERMS = 600  # contributions written out in one loop body: more takes the compiler seconds


def conv(x: Shape, w: Shape, stride: int = 1, groups: int = 1, layout: tuple[str, str, str] = NHWC) -> Operation:
    """A convolution with bias and ReLU."""

    def run(a: jax.Array, b: jax.Array, c: jax.Array) -> jax.Array:
        y = jax.lax.conv_general_dilated(
            a, b, (stride, stride), "SAME", dimension_numbers=layout, feature_group_count=groups
        )
        return jnp.maximum(y + c, 0)

    channels = w[layout[1].index("O")]
    return run, (x, w, (channels,) if layout is NHWC else (channels, 1, 1))


def pool(x: Shape) -> Operation:
    """Max pooling 3x3, stride 2."""

    def run(a: jax.Array) -> jax.Array:
        return jax.lax.reduce_window(a, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")

    return run, (x,)


def dense(m: int, k: int, n: int) -> Operation:
    """A dense layer with GELU."""
    return (lambda a, b, c: jax.nn.gelu(a @ b + c)), ((m, k), (k, n), (n,))


OPERATIONS: dict[str, Operation] = {
    "conv3x3 56x56x64": conv((1, 56, 56, 64), (3, 3, 64, 64)),
    "conv3x3 14x14x256": conv((1, 14, 14, 256), (3, 3, 256, 256)),
    "conv7x7/2 first layer": conv((1, 224, 224, 3), (7, 7, 3, 64), 2),
    "conv1x1 56x56 24->144": conv((1, 56, 56, 24), (1, 1, 24, 144)),
    "conv1x1 14x14 576->96": conv((1, 14, 14, 576), (1, 1, 576, 96)),
    "conv1x1 7x7 960->320": conv((1, 7, 7, 960), (1, 1, 960, 320)),
    "depthwise 112x112x32": conv((1, 112, 112, 32), (3, 3, 1, 32), 1, 32),
    "depthwise 14x14x576": conv((1, 14, 14, 576), (3, 3, 1, 576), 1, 576),
    "depthwise/2 56x56x144": conv((1, 56, 56, 144), (3, 3, 1, 144), 2, 144),
    "max pool 112x112x64": pool((1, 112, 112, 64)),
    "matmul 512x512x512": (lambda a, b: a @ b, ((512, 512), (512, 512))),
    "matmul x.T y 784x1000x800": (lambda a, b: a.T @ b, ((800, 784), (800, 1000))),
    "row sum 1000x1003": (lambda a: a.sum(-1), ((1000, 1003),)),
    "column sum 1000x1003": (lambda a: a.sum(0), ((1000, 1003),)),
    # Not looked at while the model was made
    "conv3x3/2 113x113 32->48": conv((1, 113, 113, 32), (3, 3, 32, 48), 2),
    "conv3x3 NCHW 28x28x96": conv((1, 96, 28, 28), (128, 96, 3, 3), 1, 1, ("NCHW", "OIHW", "NCHW")),
    "conv3x3 groups 28x28x128": conv((1, 28, 28, 128), (3, 3, 8, 128), 1, 16),
    "depthwise5x5 28x28x240": conv((1, 28, 28, 240), (5, 5, 1, 240), 1, 240),
    "depthwise 7x7x960 b8": conv((8, 7, 7, 960), (3, 3, 1, 960), 1, 960),
    "dense gelu 128x768x3072": dense(128, 768, 3072),
    "dense 1x2048x1000": (lambda a, b, c: a @ b + c, ((1, 2048), (2048, 1000), (1000,))),
    "attention q k.T 12x128x64": (
        lambda q, k: jnp.einsum("hqd,hkd->hqk", q, k) * 0.125,
        ((12, 128, 64), (12, 128, 64)),
    ),
    "mean 8x49x1280": (lambda a: a.mean(1), ((8, 49, 1280),)),
    "transpose add 1000x1003": (lambda a, b: a.T + b, ((1000, 1003), (1003, 1000))),
}


@dataclass(frozen=True)
class Candidate:
    """One schedule: ``source`` is 'enumerated' or 'drawn'; ``score`` is the model's, ``kept`` the place (from 0) among
    those that the product would measure, -1 where it was pruned."""

    program: Program
    source: str
    score: float
    kept: int


def machine() -> choose.Machine:
    """This CPU on one core."""
    arch = host_arch()
    return choose.Machine(arch.simd_bits // 8, arch.vector_registers, 1)


def unscheduled(operation: Operation) -> tuple[Program, list[np.ndarray], Callable[..., Any]]:
    """The operation's program, its operands, and the function of these operands."""
    fn, shapes = operation
    rng = np.random.default_rng(0)
    args = [rng.standard_normal(s).astype(np.float32) for s in shapes]
    flat = simplify(inline(jax.make_jaxpr(fn)(*args)))
    graph = build_graph(flat.jaxpr)
    everything = frozenset(n.number for n in graph.nodes)
    program = build(graph, everything)
    if not isinstance(program, Program):
        raise SystemExit(f"not one kernel: {program}")
    if len(program.phases) != 1:
        raise SystemExit(f"{program.name} has several phases: their schedules are not drawn here")
    places = {graph.of_var[v]: k for k, v in enumerate(flat.jaxpr.invars)}
    order = [places[t] for t in graph.subset_inputs(everything)]

    def reference(*operands: np.ndarray) -> Any:
        given = dict(zip(order, operands, strict=True))
        return jax.jit(fn)(*(given[k] for k in range(len(args))))

    return schedule.collapsed(program), [args[k] for k in order], reference


def candidates(plain: Program, machine: choose.Machine, count: int, seed: str) -> list[Candidate]:
    """The pool: all that is enumerated, and draws: up to ``count`` candidates in all, at least half as many drawn."""
    here = knobs.current()
    kept = [p for p, _ in plans.candidates(plain, machine, here.max_candidates, here.top_percent)]
    place = {p.digest: k for k, p in enumerate(p for p in kept if not _is_winograd(p))}
    found: dict[str, Candidate] = {}
    for program, score in plans.candidates(plain, machine, EVERYTHING):
        if not _is_winograd(program):
            found[program.digest] = Candidate(program, "enumerated", score, place.get(program.digest, -1))
    rng = random.Random(seed)
    wanted = max(count, len(found) + count // 2)
    lanes = choose.lanes_of(plain, machine)
    for _ in range(60 * count):
        if len(found) >= wanted:
            break
        program = draw(plain, rng, lanes, machine.registers)
        if program is not None and program.digest not in found:
            found[program.digest] = Candidate(program, "drawn", plans.score(program, machine), -1)
    return list(found.values())


def _is_winograd(program: Program) -> bool:
    """Another algorithm: its schedules are another space."""
    return len(program.phases) > 2


def draw(plain: Program, rng: random.Random, lanes: int, registers: int) -> Program | None:
    """A schedule drawn without the model; None where the draw is no legal one."""
    phase = plain.phases[0]
    if rng.random() < 0.2:
        options = [p for p, _ in pack.packings(plain, lanes, registers)]
        if options:
            return pack.apply(plain, rng.choice(options), 1)
    lane: Axis | Red = rng.choice([*phase.axes, *phase.reds])
    if rng.random() < 0.6:  # most draws run lanes along the results' innermost axis, as any compiler would
        lane = phase.axes[-1] if phase.axes else lane
    width = rng.choice([lanes, lanes, lanes, lanes // 2, 2 * lanes])
    while width > 2 and width // 2 >= lane.extent:
        width //= 2
    tile = {a.name: rng.choice(COUNTS) for a in phase.axes if rng.random() < 0.6}
    unroll = {r.name: rng.choice([1, 1, 2, 3, 4, 5, 7, 8, 16]) for r in phase.reds}
    order = [a.name for a in phase.axes]
    if rng.random() < 0.6:
        rng.shuffle(order)
    chains = {r.name: n for r in phase.reds if (n := rng.choice([1, 1, 1, 2, 4, 8])) > 1 and unroll[r.name] % n == 0}
    drawn = schedule.Schedule(
        width, lane.name, tuple(sorted(tile.items())), tuple(order), tuple(sorted(unroll.items())),
        tuple(sorted(chains.items())),
    )  # fmt: skip
    program = schedule.apply(plain, drawn)
    return program if _is_fair(program.phases[0], registers) else None


def _is_fair(phase: Phase, registers: int) -> bool:
    """Not so large that compiling takes seconds, nor so many accumulators that most are spilled."""
    size = math.prod(a.unroll for a in phase.axes)
    terms = math.prod(r.unroll for r in phase.reds) * max(1, len(phase.body.nodes))
    chains = math.prod(r.chains for r in phase.reds)
    return size * chains <= 2 * registers and size * terms <= MOST_TERMS * 2
