"""Cycles, scores and order of CPU schedules as they were recorded before the model became an expression of terms."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jcuts.kernel_ir.loop_transforms import collapse_program
from jcuts.schedule.cpu import candidates, loop_candidates, packing
from jcuts.schedule.cpu.cycle_model import cycles
from jcuts.schedule.cpu.machine import Machine
from tests import programs

MACHINES = {
    "avx512": Machine(64, 32, 2),
    "split": Machine(64, 32, 1, 32 << 10, 1 << 20, 1, 1, 1),
    "avx2": Machine(32, 16, 2, 48 << 10, 512 << 10, 2, 3, 2),
    "neon": Machine(16, 32, 4, 64 << 10, 1 << 20, 4, 3, 2),
}
EACH = 4
"""Schedules of an operation and machine that are recorded: every so many, best first."""


def _conv(x, w, stride=1, groups=1, padding="SAME"):
    return lax.conv_general_dilated(
        x, w, (stride, stride), padding, dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=groups
    )


def _pool(x):
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")


def _zeros(*shape, dtype=jnp.float32):
    return jnp.zeros(shape, dtype)


OPERATIONS = {
    "gemm": (lambda x, w: jax.nn.relu(x @ w), _zeros(192, 256), _zeros(256, 320)),
    "gemm float64": (lambda x, w: jnp.einsum("ij,jk->ik", x, w), _zeros(100, 67), _zeros(67, 130)),
    "gemm bfloat16": (lambda x, w: x @ w, _zeros(64, 128, dtype=jnp.bfloat16), _zeros(128, 96, dtype=jnp.bfloat16)),
    "few rows": (lambda x, w: x @ w, _zeros(1, 2048), _zeros(2048, 1000)),
    "conv 3x3": (_conv, _zeros(1, 28, 28, 64), _zeros(3, 3, 64, 96)),
    "conv 7x7/2": (lambda x, w: _conv(x, w, 2), _zeros(1, 64, 64, 3), _zeros(7, 7, 3, 64)),
    "depthwise": (lambda x, w: _conv(x, w, 1, 96), _zeros(1, 14, 14, 96), _zeros(3, 3, 1, 96)),
    "max pool": (_pool, _zeros(1, 56, 56, 64)),
    "row sum": (lambda x: x.sum(1), _zeros(200, 1003)),
    "column sum": (lambda x: x.sum(0), _zeros(1000, 203)),
    "argmax": (lambda x: jnp.argmax(x, 1), _zeros(64, 300)),
    "map": (lambda x: jnp.tanh(x) * 2 + 1, _zeros(300, 1000)),
    "transpose add": (lambda x, y: x.T + y, _zeros(500, 303), _zeros(303, 500)),
    "integers": (lambda x, y: x * y + 3, _zeros(1000, 7, dtype=jnp.int32), _zeros(1000, 7, dtype=jnp.int32)),
    "padded": (lambda x: jnp.exp(jnp.pad(x, 3)), _zeros(100, 50)),
    "softmax": (lambda x: jax.nn.softmax(x), _zeros(64, 500)),
    "batch statistics": (lambda x: (x - x.mean(0)) / jnp.sqrt(x.var(0) + 1e-3), _zeros(256, 96)),
    "cumsum": (lambda x: jnp.cumsum(x, 0), _zeros(100, 96)),
}


def _schedules(program, machine):
    """Every scheduled program whose cycles are recorded: best, then evenly through the ranking; packed and Winograd."""
    ranked = [p for p, _ in candidates.candidates(program, machine, 1 << 30)]
    step = max(1, len(ranked) // EACH)
    plain = collapse_program(program)
    packed = []
    if len(plain.phases) == 1:
        lanes = loop_candidates.lanes_of(plain, machine)
        packed = [packing.apply(plain, p, 1) for p in list(packing.packings(plain, lanes, machine.registers))[:2]]
    return [*ranked[::step], *packed]


def recorded(name: str) -> list[str]:
    """A line per schedule: machine, digest, cycles as an exact number; and the digests of the first proposals."""
    function, *arguments = OPERATIONS[name]
    program = programs.trace(function, *arguments).program()
    lines = []
    for label, machine in MACHINES.items():
        first = candidates.candidates(program, machine, 16, 10.0)
        lines.append(f"{name}: {label}: first {' '.join(f'{p.digest[:8]}={s.hex()}' for p, s in first)}")
        for made in _schedules(program, machine):
            lines.append(f"{name}: {label}: {made.digest[:12]} {cycles(made, machine).hex()}")
    return lines


@pytest.mark.parametrize("name", OPERATIONS)
def test_cycles_are_those_that_were_recorded(name, golden):
    golden(f"cpu_cycles/{name.replace('/', '_').replace(' ', '_')}.txt", "\n".join(recorded(name)) + "\n")
