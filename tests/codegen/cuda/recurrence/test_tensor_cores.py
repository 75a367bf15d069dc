"""Stages of recurrences on tensor cores: results on the PTX machine, registers, and which loops have such schedules.

Two references: the loop itself, and the loop with operands that are rounded as tensor cores round them.  The first is
off by roundings, bounded by ``2^-10 * sum |row| |weight|`` a step; the second by the order of additions alone, but for
values of a step that fall just beside a tie and are rounded the other way, half a TF32 step of one operand.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jcuts.base.errors import CompileRejected
from jcuts.codegen.cuda import compile as compiler
from jcuts.codegen.cuda.toolchain.image import Image
from jcuts.codegen.cuda.toolchain.target import CudaTarget
from jcuts.kernel_ir.interpret import interpret
from jcuts.kernel_ir.node import Graph, Node
from jcuts.lower.recurrence import stages
from jcuts.schedule.gpu.kernel_time import kernel_time
from jcuts.schedule.gpu.machine import GpuMachine, scheduled
from jcuts.schedule.gpu.recurrence.exchange import exchanged
from jcuts.schedule.gpu.recurrence.parameters import EXCHANGE, FLAGS, MMA
from jcuts.schedule.gpu.recurrence.schedules import FORM, MOST_SUMS, recurrence_schedules
from jcuts.schedule.gpu.recurrence.stage_product import MmaStage, mma_stages, stage_product
from tests.codegen.cuda.recurrence.test_recurrence import H200, SM80, SM90, check, compiled
from tests.lower.recurrence.cells import gru, gru_gradient, lstm, minimal_gated_unit, normal, short_floats
from tests.lower.recurrence.test_program import lowered
from tests.ptx import machine as ptx_machine

CLOSE = 2e-5
"""Of results whose operands were rounded alike: sums in another order."""
ROUNDED = 2.0**-10
"""Both operands of a product, rounded to TF32; also what one operand beside a tie may change."""
CASES = {
    "gru, 2 rows": lambda: gru(40, 2, 5),
    "gru, 3 rows": lambda: gru(40, 3, 5),
    "gru, 16 rows": lambda: gru(40, 16, 4),
    "gru, 17 rows of 77": lambda: gru(77, 17, 3),
    "gru, 40 rows": lambda: gru(40, 40, 3),
    "lstm, 2 rows": lambda: lstm(36, 2, 4),
    "lstm, 3 rows, reverse": lambda: lstm(77, 3, 3, reverse=True),
    "lstm, 16 rows": lambda: lstm(36, 16, 4),
    "lstm, 40 rows": lambda: lstm(48, 40, 3),
}
SCHEDULES = {
    "gru, 2 rows": [(1, 96), (5, 96), (14, 64)],
    "gru, 3 rows": [(1, 64), (5, 32), (40, 96)],
    "gru, 16 rows": [(2, 128), (5, 64), (20, 96)],
    "gru, 17 rows of 77": [(5, 160), (10, 64), (20, 96)],
    "gru, 40 rows": [(3, 96), (5, 64)],
    "lstm, 2 rows": [(1, 96), (5, 64), (18, 96)],
    "lstm, 3 rows, reverse": [(10, 64), (7, 96)],
    "lstm, 16 rows": [(3, 96), (9, 64)],
    "lstm, 40 rows": [(6, 96), (12, 32)],
}
"""(blocks, threads): columns of a block from 1 to all, threads with several points, warps without terms."""


@functools.cache
def case(name):
    return lowered(*CASES[name]())


def on_tensor_cores(program, blocks, threads, kind="tf32", flight=2, more=()):
    split = (("split", blocks),) if blocks > 1 else ()
    return scheduled(program, FORM, threads, ("flight", flight), *split, (MMA, kind), *more)


def rounded(program, blocks, threads):
    """The loop whose stages on tensor cores round their operands to TF32."""
    made, phases = on_tensor_cores(program, blocks, threads), list(program.phases)
    for stage in mma_stages(made, blocks, threads):
        phase, body, numbers = phases[stage.number], Graph(), list[int]()
        for node in phase.body.nodes:
            numbers.append(body.add(replace(node, args=tuple(numbers[a] for a in node.args))))
            if node.op == "load":
                numbers[-1] = body.add(Node("tf32", "float32", (numbers[-1],)))
        accs = tuple(replace(acc, values=tuple(numbers[v] for v in acc.values)) for acc in phase.accs)
        phases[stage.number] = replace(phase, body=body, accs=accs)
    return replace(program, phases=tuple(phases))


def largest_error(program, operands):
    """A bound of what rounding to TF32 changes in a step: all rows are at most 1 in these loops, or nearly so."""
    weights = {load.buffer for p in program.phases if (s := stage_product(program, p)) for _, load in s.weights}
    sums = [np.abs(operands[int(name.removeprefix("in"))]).sum(0).max() for name in weights]
    return ROUNDED * max(sums)


def found_of(program, operands, blocks, threads, target=SM90, more=()):
    made = on_tensor_cores(program, blocks, threads, more=more)
    kernel = compiler.compile_program(made, target)
    return ptx_machine.run_kernel(compiler.ptx_of(made, target), kernel, operands, limit=2_000_000)


def check_rounded(program, operands, wanted, blocks, threads, target=SM90, more=()):
    found = found_of(program, operands, blocks, threads, target, more)
    alike = interpret(rounded(program, blocks, threads), operands)
    for mine, theirs, exact in zip(found, alike, wanted, strict=True):
        apart = np.abs(np.asarray(mine, np.float64) - theirs)
        assert apart.max() <= ROUNDED and np.median(apart) <= CLOSE
        np.testing.assert_allclose(mine, exact, atol=largest_error(program, operands), rtol=0)


@compiled
@pytest.mark.parametrize("name, blocks, threads", [(name, *one) for name, every in SCHEDULES.items() for one in every])
def test_results(name, blocks, threads):
    program, (operands, wanted) = case(name)
    check_rounded(program, operands, wanted, blocks, threads)


@compiled
@pytest.mark.parametrize("name", ["gru, 3 rows", "lstm, 16 rows"])
def test_results_on_ampere(name):
    program, (operands, wanted) = case(name)
    check_rounded(program, operands, wanted, 5, 64, SM80)


@compiled
def test_two_stages_of_a_step():
    program, (operands, wanted) = lowered(*minimal_gated_unit(width=48, batch=3, steps=3))
    assert len(mma_stages(on_tensor_cores(program, 6, 96), 6, 96)) == 2
    check_rounded(program, operands, wanted, 6, 96)


@compiled
def test_products_of_different_rows_in_one_stage():
    def mixed(a, b, w, v):
        def step(carry, _):
            a, b = carry
            return (jnp.tanh(a @ w + b @ v), jax.nn.sigmoid(b)), None

        return jax.lax.scan(step, (a, b), None, length=3)[0]

    weights = normal(40, 40, scale=0.2), normal(40, 40, seed=3, scale=0.2)
    program, (operands, wanted) = lowered(mixed, (normal(3, 40), normal(3, 40, seed=1), *weights))
    stages = mma_stages(on_tensor_cores(program, 5, 96), 5, 96)
    assert max(len(stage.product.lefts) for stage in stages) == 2
    check_rounded(program, operands, wanted, 5, 96)


def test_flags_are_not_for_tensor_cores():
    program, _ = case("gru, 3 rows")
    assert exchanged(program, 5) and not exchanged(on_tensor_cores(program, 5, 64), 5)
    with pytest.raises(CompileRejected, match="grid barrier"):
        compiler.compile_program(on_tensor_cores(program, 5, 64, more=((EXCHANGE, FLAGS),)), SM90)


@compiled
@pytest.mark.parametrize("blocks, threads", [(5, 96), (10, 64)])
def test_a_backward_loop_whose_derivatives_are_kept(monkeypatch, blocks, threads):
    monkeypatch.setattr(stages, "KEPT_FROM", 1)
    program, (operands, wanted) = lowered(*gru_gradient(width=40, batch=3, steps=3))
    made = on_tensor_cores(program, blocks, threads)
    assert len(mma_stages(made, blocks, threads)) == 1 and not exchanged(made, blocks)  # two stages: a barrier each
    check_rounded(program, operands, wanted, blocks, threads)


@compiled
def test_loads_in_parts(monkeypatch):
    monkeypatch.setattr(MmaStage, "at_once", 2)
    program, (operands, wanted) = lowered(*lstm(width=70, batch=20, steps=2))
    (stage,) = mma_stages(on_tensor_cores(program, 9, 32), 9, 32)
    assert len(stage.pieces) == 6
    check_rounded(program, operands, wanted, 9, 32)


@compiled
@pytest.mark.parametrize(
    "width, rows, blocks, threads", [(36, 3, 5, 64), (77, 17, 10, 96), (64, 8, 4, 128), (77, 1, 10, 96), (64, 1, 1, 64)]
)
def test_bfloat16(width, rows, blocks, threads):
    program, (operands, wanted) = lowered(*short_floats(lstm(width, rows, 3)))
    check(on_tensor_cores(program, blocks, threads, "bf16"), operands, wanted)


@compiled
@pytest.mark.parametrize(
    "make, rows, blocks", [(lambda: gru(800, 16, 2), 16, 100), (lambda: lstm(768, 16, 2), 16, 96)], ids=["gru", "lstm"]
)
@pytest.mark.parametrize("target", [SM80, SM90], ids=["sm_80", "sm_90"])
def test_large_schedules_keep_everything_in_registers(make, rows, blocks, target):
    program, _ = lowered(*make())
    found = [made for made, _ in recurrence_schedules(program, H200) if MMA in dict(made.params)]
    mine = [made for made in found if dict(made.params)["split"] == blocks]
    assert len(mine) > 3 and MMA in dict(recurrence_schedules(program, H200)[0][0].params)
    for made in mine:
        kernel = compiler.compile_program(made, target)
        resources = Image.unpack(kernel.object_code).launches[-1].resources
        (stage,) = mma_stages(made, blocks, dict(made.params)["threads"])
        assert stage.product.rows == rows and stage.at_once
        assert resources.stack == 0 and resources.spills == 0
        assert resources.registers > stage.weight_registers + stage.sum_registers


def of_tensor_cores(program):
    return [made for made, _ in recurrence_schedules(program, H200) if MMA in dict(made.params)]


@compiled
def test_schedules_of_a_small_loop_compile():
    program, _ = case("gru, 3 rows")
    for made in of_tensor_cores(program):
        launches = Image.unpack(compiler.compile_program(made, SM80).object_code).launches
        assert all(launch.resources.stack == 0 for launch in launches)


@pytest.mark.parametrize("precision", ["high", "highest"])
def test_a_loop_that_asks_for_precision_has_none(precision):
    assert of_tensor_cores(case("gru, 17 rows of 77")[0])
    with jax.default_matmul_precision(precision):
        program, _ = lowered(*gru(77, 17, 3))
    assert recurrence_schedules(program, H200) and not of_tensor_cores(program)


def test_one_row_has_none():
    assert not of_tensor_cores(lowered(*gru(128, 1, 3))[0])


def test_a_gpu_without_them_has_none():
    program, _ = case("lstm, 16 rows")
    assert not [m for m, _ in recurrence_schedules(program, GpuMachine.named("V100")) if MMA in dict(m.params)]


def test_more_rows_than_fused_multiply_adds_have_registers_for():
    program, _ = lowered(*gru(width=128, batch=64, steps=2))
    found = recurrence_schedules(program, H200)
    assert MOST_SUMS < 3 * 64 and found and len(of_tensor_cores(program)) == len(found)


@compiled
def test_what_tensor_cores_do_not_multiply_is_rejected():
    program, _ = case("gru, 3 rows")
    with pytest.raises(CompileRejected, match=r"compute capability 8\.0"):
        compiler.compile_program(on_tensor_cores(program, 5, 64), CudaTarget((7, 5)))
    for refused in (on_tensor_cores(program, 5, 64, "bf16"), on_tensor_cores(lowered(*gru(40, 1, 2))[0], 5, 64)):
        with pytest.raises(CompileRejected, match="no stage for tensor cores"):
            compiler.compile_program(refused, SM90)


def test_what_is_no_product_of_rows_and_weights_has_no_form():
    def scores(h, xs):
        """Both operands change with the steps."""
        return jax.lax.scan(lambda h, x: (np.float32(0.1) * (h @ x), None), h, xs)[0]

    rows = np.ones((4, 64), np.float32)
    program, _ = lowered(scores, (rows, np.ones((3, 64, 64), np.float32)))
    assert all(stage_product(program, phase) is None for phase in program.phases)


def test_operands_change_places_where_that_makes_no_more_products():
    orders = {name: mma_stages(on_tensor_cores(case(name)[0], 5, 64), 5, 64)[0] for name in CASES}
    found = {name: (stage.is_turned, stage.multiplied) for name, stage in orders.items()}
    assert found["gru, 3 rows"] == (True, 2) and found["gru, 16 rows"] == (False, 3)
    assert found["lstm, 16 rows"] == (True, 4) and found["gru, 40 rows"] == (False, 9)


def test_registers_limit_what_is_under_way():
    (phase,) = (p for p in lowered(*lstm(1024, 32, 2))[0].phases if p.reds)
    product = stage_product(lowered(*lstm(1024, 32, 2))[0], phase)
    assert product is not None
    stage = MmaStage(0, product, 128, 8, 8)
    assert (stage.share, stage.at_once) == (8, 7)
    assert stage.pieces == [(range(n, n + 1), part) for n in (0, 1) for part in (range(4), range(4, 8))]
    assert MmaStage(0, product, 128, 8, 12).at_once == 0
    assert MmaStage(0, replace(product, red=replace(product.red, extent=256)), 128, 8, 8).pieces == [
        (range(2), range(2))
    ]


def test_columns_of_products_lie_side_by_side():
    program, _ = case("lstm, 2 rows")
    phase = next(p for p in program.phases if p.reds)
    product = stage_product(program, phase)
    assert product is not None and len(product.weights) == 4
    tiles = {across: MmaStage(0, product, 9, across, 4).tiles for across in (1, 2, 4, 8, 16)}
    assert tiles == {1: (1,), 2: (1,), 4: (2,), 8: (4,), 16: (8,)}


def test_the_model_counts_products_of_every_step():
    program, _ = case("lstm, 16 rows")
    machine = GpuMachine.named("H200")
    made = on_tensor_cores(program, 9, 64)
    time = kernel_time(made, machine)
    assert time.unit == "tf32_mma" and 0 < time.bound(machine.arch, resident=time.compulsory) <= time.seconds
    longer = replace(made, grid=(replace(program.grid[0], extent=10 * program.grid[0].extent),))
    assert kernel_time(longer, machine).seconds > 2 * time.seconds
