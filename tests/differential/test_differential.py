"""Random programs against `jax.jit`, a part under grad and vmap: 50, with ``-m slow`` 60 others.

`benchmarks/differential/cpu.py` runs thousands.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from benchmarks.random_programs import draw, generator, runner

pytestmark = pytest.mark.usefixtures("xla_as_shipped")
SEED = 7_000_000
CHUNK = 5


def _chunks(first: int, count: int, quick: int) -> list[Any]:
    """First seeds of chunks; those behind the first ``quick`` programs are for ``-m slow``."""
    starts = range(first, first + count, CHUNK)
    return [pytest.param(n, marks=() if n < first + quick else pytest.mark.slow) for n in starts]


def _failures(start: int, count: int, transform: str) -> list[str]:
    verdicts = [runner.run(seed, transform, small=True) for seed in range(start, start + count)]
    jax.clear_caches()
    ran = [v for v in verdicts if v.status != "unsuitable"]
    assert len(ran) >= count // 2, [v.reason for v in verdicts if v.status == "unsuitable"]
    assert sum(v.kernels for v in ran) > 0
    return [f"seed {v.seed} {transform}: {v.status}: {v.reason}" for v in ran if v.status != "ok"]


@pytest.mark.parametrize("start", _chunks(SEED, 80, 30))
def test_programs_match_xla(start):
    assert _failures(start, CHUNK, "plain") == []


@pytest.mark.parametrize("start", _chunks(SEED + 1000, 10, 5))
def test_gradients_match_xla(start):
    assert _failures(start, CHUNK, "grad") == []


@pytest.mark.parametrize("start", _chunks(SEED + 2000, 10, 5))
def test_batched_programs_match_xla(start):
    assert _failures(start, CHUNK, "vmap") == []


def test_programs_of_the_newer_families_match_xla():
    assert _failures(generator.MORE_FROM + SEED, 8, "plain") == []


def test_gradients_of_the_newer_families_match_xla():
    assert _failures(generator.MORE_FROM + SEED + 100, 2, "grad") == []


def test_loops_match_xla():
    assert _failures(generator.LOOPS_FROM + SEED, 3, "plain") == []
    assert _failures(generator.LOOPS_FROM + SEED + 100, 1, "grad") == []


def test_every_step_makes_a_program():
    """Each step alone, on two small arrays: it applies to at least one of a few attempts."""
    for family in (*generator.MORE, *generator.LOOPS):
        for _, rule in draw._STEPS[family]:

            def program(*values, rule=rule):
                drawn = draw.Draw(np.random.default_rng(5), draw.Kind(), "float32", list(values))
                rule(drawn)
                return tuple(drawn.pool[len(values) :])

            closed = jax.make_jaxpr(program)(np.ones((5, 7), np.float32), np.ones(3, np.float32))
            assert closed.jaxpr.eqns, rule.__name__


def test_smaller_seeds_keep_their_programs():
    draws = [generator.program(seed) for seed in (SEED, generator.MORE_FROM + SEED, generator.LOOPS_FROM + SEED)]
    for of in draws:
        with jax.enable_x64(of.kind.x64):
            assert jax.make_jaxpr(of.function)(*generator.signature(of)).jaxpr.eqns
    assert draw.families() == sorted({*generator.WEIGHTS, *generator.MORE, *generator.LOOPS})


def test_a_seed_is_a_program():
    of = generator.program(SEED)
    with jax.enable_x64(of.kind.x64):
        one, two = (str(jax.make_jaxpr(of.function)(*generator.signature(of))) for _ in range(2))
    assert one == two
    assert generator.program(SEED) == of
    assert generator.program(SEED + 1) != of


def test_a_wrong_kernel_is_found(monkeypatch, cache_dir):
    """The harness itself: a code generator that adds where it should multiply must not pass."""
    from jcuts.codegen.llvm import elementwise as llvm_elementwise
    from jcuts.xla import kernel_cache

    monkeypatch.setitem(llvm_elementwise._FLOAT, "mul", "fadd")
    monkeypatch.setattr(kernel_cache, "_kernels", {})  # neither found here nor left behind
    found = []
    for seed in range(SEED + 3000, SEED + 3030):
        found.append(runner.run(seed, small=True))
        if found[-1].status == "mismatch":
            return
    pytest.fail(f"no mismatch among {[v.status for v in found]}")
