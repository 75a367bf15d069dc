"""CPU schedules follow the architecture: one number of it changed, and the ranked candidates are others."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import pytest
from jax import lax

from jcuts.arch.detect import describe_cpu
from jcuts.schedule.cpu import candidates
from jcuts.schedule.cpu.bound import machine_of
from jcuts.schedule.cpu.machine import Machine
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


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize(("number", "value"), [("vector_bytes", 32), ("registers", 16)])
def test_proposals_follow_vectors_and_registers(name, number, value):
    program, has = PROGRAMS[name]().program(), {"vector_bytes": 64, "registers": 32, "threads": 2}
    before, after = (
        candidates.candidates(program, machine_of(describe_cpu(), **h), 64) for h in (has, has | {number: value})
    )
    assert before and [p.digest for p, _ in before] != [p.digest for p, _ in after]


@pytest.mark.parametrize(
    ("number", "value"), [("fma_latency", 16), ("issue_width", 2), ("cache_ways", 1), ("predicted_iterations", 1 << 20)]
)
def test_proposals_follow_the_core(number, value):
    arch = describe_cpu()
    other = replace(arch, core=replace(arch.core, **{number: value}))
    for name in PROGRAMS:
        program = PROGRAMS[name]().program()
        before, after = (
            [(p.digest, s) for p, s in candidates.candidates(program, _machine(a), 1 << 30)] for a in (arch, other)
        )
        assert before and before != after


def test_a_machine_names_only_the_numbers_that_are_not_every_cores():
    """Its text is a part of the keys of stored rankings."""
    plain = Machine(64, 32, 2)
    assert repr(plain) == (
        "Machine(vector_bytes=64, registers=32, threads=2, l1=32768, l2=1048576, "
        "fma_ports=2, load_ports=2, store_ports=1)"
    )
    assert "line=128" in repr(replace(plain, line=128))
    assert "fma_latency=5" in repr(replace(plain, core=replace(plain.core, fma_latency=5)))


@pytest.mark.parametrize(("vector_bytes", "registers"), [(32, 16), (64, 32)])
def test_registers_limit_the_tile(vector_bytes, registers):
    program = PROGRAMS["gemm"]().program()
    wide = candidates.candidates(program, machine_of(describe_cpu(), vector_bytes, registers, 2), 64)
    narrow = candidates.candidates(program, machine_of(describe_cpu(), vector_bytes, registers // 4, 2), 64)
    assert [p.digest for p, _ in wide] != [p.digest for p, _ in narrow]


def _machine(arch):
    return machine_of(arch, 64, 32, 2)
