"""What the pruning study measures: operations, and schedules drawn without the model.

The pool of an operation is what the product would measure, some of what it enumerates but prunes, and draws from the
whole space of legal schedules: any lane axis, half and double vectors, any register tile, reduction unrolling and
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
from jcuts.kernel_ir import loop_transforms
from jcuts.kernel_ir.program import Axis, Phase, Program, Red
from jcuts.lower.region import lower_region
from jcuts.lower.tensor_graph import build_graph
from jcuts.rewrite.simplify import simplify
from jcuts.schedule.cpu import candidates as cpu_candidates
from jcuts.schedule.cpu import loop_candidates, loop_schedule, packing
from jcuts.schedule.cpu.bound import host_arch, machine_of
from jcuts.trace.inline import inline

Shape = tuple[int, ...]
Operation = tuple[Callable[..., Any], tuple[Shape, ...]]

NHWC = ("NHWC", "HWIO", "NHWC")
EVERYTHING = 100_000
COUNTS = (1, 1, 1, 2, 2, 3, 4, 4, 5, 6, 7, 8, 10, 12, 14, 16)
MOST_TERMS = 300  # contributions written out in one loop body: more takes the compiler seconds


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
    "conv3x3 28x28x64": conv((1, 28, 28, 64), (3, 3, 64, 64)),
    "conv7x7/2 112x112 3->64": conv((1, 112, 112, 3), (7, 7, 3, 64), 2),
    "conv1x1 56x56 24->144": conv((1, 56, 56, 24), (1, 1, 24, 144)),
    "conv1x1 14x14 576->96": conv((1, 14, 14, 576), (1, 1, 576, 96)),
    "conv1x1 7x7 960->320": conv((1, 7, 7, 960), (1, 1, 960, 320)),
    "depthwise 112x112x32": conv((1, 112, 112, 32), (3, 3, 1, 32), 1, 32),
    "depthwise 14x14x576": conv((1, 14, 14, 576), (3, 3, 1, 576), 1, 576),
    "depthwise/2 56x56x144": conv((1, 56, 56, 144), (3, 3, 1, 144), 2, 144),
    "max pool 112x112x64": pool((1, 112, 112, 64)),
    "matmul 256x256x256": (lambda a, b: a @ b, ((256, 256), (256, 256))),
    "matmul x.T y 392x400x500": (lambda a, b: a.T @ b, ((400, 392), (400, 500))),
    "row sum 1000x1003": (lambda a: a.sum(-1), ((1000, 1003),)),
    "column sum 1000x1003": (lambda a: a.sum(0), ((1000, 1003),)),
    "transpose add 1000x1003": (lambda a, b: a.T + b, ((1000, 1003), (1003, 1000))),
    # Not looked at while the model was made
    "conv3x3/2 57x57 32->48": conv((1, 57, 57, 32), (3, 3, 32, 48), 2),
    "conv3x3 NCHW 14x14x96": conv((1, 96, 14, 14), (128, 96, 3, 3), 1, 1, ("NCHW", "OIHW", "NCHW")),
    "depthwise5x5 28x28x240": conv((1, 28, 28, 240), (5, 5, 1, 240), 1, 240),
    "dense gelu 64x256x512": dense(64, 256, 512),
    "dense 1x2048x1000": (lambda a, b, c: a @ b + c, ((1, 2048), (2048, 1000), (1000,))),
    "attention q k.T 12x128x64": (
        lambda q, k: jnp.einsum("hqd,hkd->hqk", q, k) * 0.125,
        ((12, 128, 64), (12, 128, 64)),
    ),
}


@dataclass(frozen=True)
class Candidate:
    """One schedule: ``source`` is 'enumerated' or 'drawn'; ``score`` is the model's, ``kept`` the place (from 0) among
    those that the product would measure, -1 where it was pruned."""

    program: Program
    source: str
    score: float
    kept: int


def machine() -> loop_candidates.Machine:
    """This CPU on one core."""
    arch = host_arch()
    return machine_of(arch, arch.simd_bits // 8, arch.vector_registers, 1)


def unscheduled(operation: Operation) -> tuple[Program, list[np.ndarray], Callable[..., Any]]:
    """The operation's program, its operands, and the function of these operands."""
    fn, shapes = operation
    rng = np.random.default_rng(0)
    args = [rng.standard_normal(s).astype(np.float32) for s in shapes]
    flat = simplify(inline(jax.make_jaxpr(fn)(*args)))
    graph = build_graph(flat.jaxpr)
    everything = frozenset(n.number for n in graph.nodes)
    program = lower_region(graph, everything)
    if not isinstance(program, Program):
        raise SystemExit(f"not one kernel: {program}")
    if len(program.phases) != 1:
        raise SystemExit(f"{program.name} has several phases: their schedules are not drawn here")
    places = {graph.of_var[v]: k for k, v in enumerate(flat.jaxpr.invars)}
    order = [places[t] for t in graph.subset_inputs(everything)]

    def reference(*operands: np.ndarray) -> Any:
        given = dict(zip(order, operands, strict=True))
        return jax.jit(fn)(*(given[k] for k in range(len(args))))

    return loop_transforms.collapse_program(program), [args[k] for k in order], reference


def candidates(plain: Program, machine: loop_candidates.Machine, count: int, seed: str) -> list[Candidate]:
    """The pool: what the product would measure, a fifth of ``count`` from what it enumerates, the rest draws.

    Only the first depends on the model.
    """
    here = knobs.current()
    kept = [p for p, _ in cpu_candidates.candidates(plain, machine, here.max_candidates, here.top_percent)]
    place = {p.digest: k for k, p in enumerate(p for p in kept if not _is_winograd(p))}
    listed = {p.digest: p for p, _ in cpu_candidates.candidates(plain, machine, EVERYTHING) if not _is_winograd(p)}
    rng = random.Random(seed)
    picked = set(rng.sample(sorted(listed), min(len(listed), count // 5)))
    found: dict[str, Candidate] = {}
    for digest, program in listed.items():
        if digest in place or digest in picked:
            worth = loop_candidates.score(program, machine)
            found[digest] = Candidate(program, "enumerated", worth, place.get(digest, -1))
    lanes = loop_candidates.lanes_of(plain, machine)
    for _ in range(60 * count):
        if len(found) >= count:
            break
        program = draw(plain, rng, lanes, machine.registers)
        if program is not None and program.digest not in found:
            source = "enumerated" if program.digest in listed else "drawn"
            found[program.digest] = Candidate(program, source, loop_candidates.score(program, machine), -1)
    return list(found.values())


def _is_winograd(program: Program) -> bool:
    """Another algorithm: its schedules are another space."""
    return len(program.phases) > 2


def draw(plain: Program, rng: random.Random, lanes: int, registers: int) -> Program | None:
    """A schedule drawn without the model; None where the draw is no legal one."""
    phase = plain.phases[0]
    if rng.random() < 0.2:
        options = list(packing.packings(plain, lanes, registers))
        if options:
            return packing.apply(plain, rng.choice(options), 1)
    lane: Axis | Red = rng.choice([*phase.axes, *phase.reds])
    if rng.random() < 0.9:  # most draws run lanes along the results' innermost axis, as any compiler would
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
    drawn = loop_schedule.Schedule(
        width,
        lane.name,
        tuple(sorted(tile.items())),
        tuple(order),
        tuple(sorted(unroll.items())),
        tuple(sorted(chains.items())),
    )
    program = loop_schedule.apply(plain, drawn)
    return program if _is_fair(program.phases[0], registers) else None


def _is_fair(phase: Phase, registers: int) -> bool:
    """Not so large that compiling takes seconds, nor so many accumulators that most are spilled."""
    size = math.prod(a.unroll for a in phase.axes)
    terms = math.prod(r.unroll for r in phase.reds) * max(1, len(phase.body.nodes))
    chains = math.prod(r.chains for r in phase.reds)
    return size * chains <= 2 * registers and size * terms <= 2 * MOST_TERMS
