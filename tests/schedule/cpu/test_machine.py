"""CPU schedules follow the architecture: one number of it changed, and the ranked candidates are others."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import pytest
from jax import lax

from jcuts.arch.detect import describe_cpu
from jcuts.schedule.cpu import candidates
from jcuts.schedule.cpu.bound import machine_of
from tests import programs


def _conv(x, w):
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


PROGRAMS = {
    "gemm": lambda: programs.trace(lambda x, w: x @ w, jnp.zeros((512, 384)), jnp.zeros((384, 640))),
    "conv": lambda: programs.trace(_conv, jnp.zeros((1, 28, 28, 64)), jnp.zeros((3, 3, 64, 96))),
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize(
    ("number", "factor"), [("l1d", 0.125), ("l2", 0.0625), ("fma_ports", 2), ("load_ports", 2), ("store_ports", 4)]
)
def test_proposals_follow_the_architecture(name, number, factor):
    program, arch = PROGRAMS[name]().program(), replace(describe_cpu(), fma_ports=2, load_ports=2, store_ports=1)
    other = replace(arch, **{number: int(getattr(arch, number) * factor)})
    before, after = ([(p.digest, s) for p, s in candidates.candidates(program, _machine(a), 64)] for a in (arch, other))
    assert before and before != after


@pytest.mark.parametrize(("vector_bytes", "registers"), [(32, 16), (64, 32)])
def test_registers_limit_the_tile(vector_bytes, registers):
    program = PROGRAMS["gemm"]().program()
    wide = candidates.candidates(program, machine_of(describe_cpu(), vector_bytes, registers, 2), 64)
    narrow = candidates.candidates(program, machine_of(describe_cpu(), vector_bytes, registers // 4, 2), 64)
    assert [p.digest for p, _ in wide] != [p.digest for p, _ in narrow]


def _machine(arch):
    return machine_of(arch, 64, 32, 2)
