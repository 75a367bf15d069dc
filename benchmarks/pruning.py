"""Is pruning by the estimate safe?  Candidates sampled without the model, all measured; rank and loss of the choice.

    python benchmarks/pruning.py [--candidates 120] [--json out.json] [OPERATION ...]

For each operation, schedules are drawn at random from the whole space (lane axis, register tile, reduction unrolling,
loop order, packing) and the enumeration's own candidates are added.  All are compiled and timed on one thread (least of
several runs).  Reported: where the estimate's first choice, and the best of its top T%, stand among everything
measured, and how often a measured time was shorter than its bound (never, or the model is wrong).
"""

from __future__ import annotations

import argparse
import ctypes
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jcuts.base.errors import JcutsError
from jcuts.base.fingerprint import versions
from jcuts.codegen.compile import compile_program
from jcuts.dfg.program import Program
from jcuts.region import choose, pack, plans, schedule
from jcuts.region.bound import bound, host_arch
from jcuts.region.build import build
from jcuts.region.graph import build_graph
from jcuts.trace.inline import inline
from jcuts.trace.simplify import simplify
from jcuts.xla import linker, native

NHWC = ("NHWC", "HWIO", "NHWC")


def conv(x: tuple[int, ...], w: tuple[int, ...], stride: int = 1, groups: int = 1, padding: str = "SAME") -> Any:
    """A convolution with bias and ReLU."""

    def run(a: jax.Array, b: jax.Array, c: jax.Array) -> jax.Array:
        y = jax.lax.conv_general_dilated(
            a, b, (stride, stride), padding, dimension_numbers=NHWC, feature_group_count=groups
        )
        return jnp.maximum(y + c, 0)

    return run, (x, w, (w[-1],))


def pool(x: tuple[int, ...]) -> Any:
    """Max pooling 3x3, stride 2."""

    def run(a: jax.Array) -> jax.Array:
        return jax.lax.reduce_window(a, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")

    return run, (x,)


OPERATIONS: dict[str, Any] = {
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
}


def unscheduled(fn: Any, shapes: tuple[tuple[int, ...], ...]) -> tuple[Program, list[np.ndarray]]:
    """The operation's program and operands."""
    rng = np.random.default_rng(0)
    args = [rng.standard_normal(s).astype(np.float32) for s in shapes]
    flat = simplify(inline(jax.make_jaxpr(fn)(*args)))
    graph = build_graph(flat.jaxpr)
    everything = frozenset(n.number for n in graph.nodes)
    program = build(graph, everything)
    if not isinstance(program, Program):
        raise SystemExit(f"not one kernel: {program}")
    places = {graph.of_var[v]: a for v, a in zip(flat.jaxpr.invars, args, strict=True)}
    return schedule.collapsed(program), [places[t] for t in graph.subset_inputs(everything)]


def random_candidate(plain: Program, rng: random.Random, lanes: int, registers: int) -> Program | None:
    """A schedule drawn without the model."""
    phase = plain.phases[0]
    if rng.random() < 0.25:
        options = [p for p, _ in pack.packings(plain, lanes, registers)]
        if options:
            return pack.apply(plain, rng.choice(options), 1)
    everything = [*phase.axes, *phase.reds]
    lane = rng.choice(everything)
    width = lanes
    while width > 2 and width // 2 >= lane.extent:
        width //= 2
    tile: dict[str, int] = {}
    for axis in phase.axes:
        if rng.random() < 0.6:
            tile[axis.name] = rng.choice([1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14])
    size = 1
    for name, count in tile.items():
        size *= min(count, next(a.extent for a in phase.axes if a.name == name))
    if size > 2 * registers:
        return None
    reds = {r.name: rng.choice([1, 2, 3, 4, 7]) for r in phase.reds}
    order = [a.name for a in phase.axes]
    rng.shuffle(order)
    chains = ((lane.name, reds[lane.name]),) if lane.name in reds else ()
    drawn = schedule.Schedule(
        width, lane.name, tuple(sorted(tile.items())), tuple(order), tuple(sorted(reds.items())), chains
    )
    return schedule.apply(plain, drawn)


def seconds(program: Program, operands: list[np.ndarray], runs: int = 7) -> float:
    """Least time of several runs on one thread [s]."""
    kernel = compile_program(program)
    address = linker.link(kernel.object_code, kernel.symbol)
    buffers = [np.ascontiguousarray(a) for a in operands] + [np.zeros(s, d) for s, d in kernel.outputs]
    pointers = (ctypes.c_void_p * len(buffers))(*[b.ctypes.data for b in buffers])
    scratch = np.zeros(kernel.scratch_bytes + 192, np.uint8)
    aligned = (scratch.ctypes.data + 63) // 64 * 64
    out = (ctypes.c_double * runs)()
    native.load().jcuts_bench(
        address, pointers, kernel.tiles, aligned, kernel.scratch_bytes, 1, runs, out
    )
    return min(out)


def study(name: str, count: int, seed: int) -> dict[str, Any]:
    """Everything measured for one operation."""
    fn, shapes = OPERATIONS[name]
    plain, operands = unscheduled(fn, shapes)
    machine = choose.Machine(host_arch().simd_bits // 8, host_arch().vector_registers, 1)
    ranked = plans.candidates(plain, machine, 10_000)
    rng = random.Random(seed)
    pool_of: dict[str, tuple[Program, float | None]] = {p.digest: (p, s) for p, s in ranked[:count]}
    lanes = choose.lanes_of(plain, machine)
    tries = 0
    sampled = 0
    while sampled < count and tries < 40 * count:
        tries += 1
        program = random_candidate(plain, rng, lanes, machine.registers)
        if program is not None and program.digest not in pool_of:
            pool_of[program.digest] = (program, None)
            sampled += 1
    times: dict[str, float] = {}
    violations = 0
    for digest, (program, _) in pool_of.items():
        try:
            times[digest] = seconds(program, operands)
        except JcutsError:
            continue
        violations += times[digest] < bound(program).seconds
    best = min(times.values())
    chosen = [p.digest for p, _ in ranked[:count] if p.digest in times]
    keep = max(1, min(len(chosen), round(0.01 * len(ranked)) or 1, 16))
    order = sorted(times.values())
    top = min(times[d] for d in chosen[:keep])
    few = min(times[d] for d in chosen[:8])
    return {
        "operation": name, "measured": len(times), "sampled_without_model": sampled, "enumerated": len(ranked),
        "best_us": best * 1e6, "first_us": times[chosen[0]] * 1e6, "first_rank": order.index(times[chosen[0]]) + 1,
        "loss_top_1_percent": top / best - 1, "kept_top_1_percent": keep, "loss_top_8": few / best - 1,
        "worst_us": order[-1] * 1e6, "bound_violations": violations,
    }  # fmt: skip


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("operations", nargs="*", default=list(OPERATIONS))
    parser.add_argument("--candidates", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    for name in options.operations:
        row = study(name, options.candidates, options.seed)
        rows.append(row)
        print(
            f"{name:26} measured {row['measured']:4} best {row['best_us']:8.1f} us"
            f"  worst {row['worst_us']:9.1f}  first choice {row['first_us']:8.1f} (rank {row['first_rank']:3})"
            f"  loss top 1% ({row['kept_top_1_percent']}) {row['loss_top_1_percent']:6.1%}"
            f"  top 8 {row['loss_top_8']:6.1%}"
            f"  bound violations {row['bound_violations']}",
            flush=True,
        )
        if options.json:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            data = {"date": time.strftime("%Y-%m-%d"), "cpu": host_arch().name, "versions": versions(), "rows": rows}
            options.json.write_text(json.dumps(data, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
