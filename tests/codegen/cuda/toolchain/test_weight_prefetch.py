"""Weights, keys and values of which a kernel asks the L2 cache before it waits for the grid in front."""

from __future__ import annotations

import re

import jax.numpy as jnp
import numpy as np
import pytest

from jcuts.base import knobs
from jcuts.codegen.cuda import compile as compiler
from jcuts.codegen.cuda.toolchain.l2_prefetch import BULK, OperandPrefetch, prefetch_instructions
from jcuts.codegen.cuda.toolchain.programmatic_launch import LAUNCH, WAIT, insert_grid_dependency_wait
from jcuts.codegen.cuda.toolchain.target import CudaTarget
from jcuts.lower.patterns.gemm import as_gemm
from jcuts.schedule.gpu.few_row_gemm import FewRowGemm
from jcuts.schedule.gpu.gemv.schedules import GemvSchedule
from jcuts.schedule.gpu.skinny_gemm.schedules import SkinnyProblem, SkinnySchedule
from jcuts.schedule.gpu.weight_prefetch.operands import prefetched_ranges
from tests import programs

SM80, SM90 = CudaTarget((8, 0)), CudaTarget((9, 0))
compiled = pytest.mark.cuda_compilers


def product(function, *arrays):
    made = as_gemm(programs.trace(function, *arrays).program())
    assert made is not None
    return made


def gemv(split=1, columns=256, function=jnp.matmul, terms=1024, rows=1):
    x, w = np.zeros((rows, terms), jnp.bfloat16), np.zeros((terms, columns), jnp.bfloat16)
    made = product(function, x, w)
    return GemvSchedule(8, 4, 2, 8, 128, split=split).apply(made, FewRowGemm.of(made))


def kernels(program, target=SM90):
    """Lines of PTX of a program's kernels."""
    return [text.splitlines() for text in compiler.ptx_of(program, target).split(".visible .entry")[1:]]


def pieces(lines, blocks, threads):
    """Pieces (first byte, bytes) that all warps of a launch prefetch, by the instructions alone."""
    found = []
    for warp in range(blocks * -(-threads // 32)):
        registers = {"%tid.x": warp % -(-threads // 32) * 32, "%ctaid.x": warp // -(-threads // 32)}

        def value(text, registers=registers):
            return registers[text] if text in registers else int(text)

        for line in lines:
            name, _, rest = line.strip().rstrip(";").partition(" ")
            names = [x.strip() for x in rest.strip().split(",")]
            if name.startswith(".reg"):
                continue
            if name.startswith("@"):
                rest = rest.strip().partition(" ")[2]
                address, size = re.fullmatch(r"\[(\S+)\], (\S+)", rest.strip()).groups()
                if registers[name[1:]]:
                    found.append((registers[address], registers[size]))
                continue
            if name == "ld.param.u64":
                registers[names[0]] = 0
                continue
            values = [value(x) for x in names[1:]]
            registers[names[0]] = {
                "mov.u32": lambda a: a,
                "and.b32": lambda a, b: a & b,
                "shr.u32": lambda a, b: a >> b,
                "setp.eq.u32": lambda a, b: a == b,
                "setp.lt.u32": lambda a, b: a < b,
                "and.pred": lambda a, b: a and b,
                "selp.b32": lambda a, b, c: a if c else b,
                "mad.lo.u32": lambda a, b, c: a * b + c,
                "mul.wide.u32": lambda a, b: a * b,
                "add.s64": lambda a, b: a + b,
            }[name](*values)
    return sorted(found)


@pytest.mark.parametrize(
    ("first", "total", "blocks", "threads"),
    [(0, 1 << 20, 7, 96), (4096, 1_000_000, 132, 256), (34, 70_001, 3, 40), (0, 16, 5, 128), (0, 2000, 1, 32)],
)
def test_pieces_of_all_warps_are_the_operand(first, total, blocks, threads):
    lines = prefetch_instructions(["p"], [OperandPrefetch(0, first, total, total)], blocks, threads)
    found = pieces(lines, blocks, threads)
    begin, end = first // 16 * 16, found[0][0]
    for at, size in found:
        assert at == end and size > 0 and size % 16 == 0
        end = at + size
    assert found[0][0] == begin and first + total - 16 < end <= first + total


def test_of_a_large_operand_every_warp_takes_the_beginning_of_its_piece():
    operand = OperandPrefetch(0, 0, 1 << 20, 1 << 18)
    found = pieces(prefetch_instructions(["p"], [operand], 4, 128), 4, 128)
    assert found == [(k << 16, 1 << 14) for k in range(16)]


def test_nothing_is_prefetched_of_no_operand():
    assert prefetch_instructions(["p"], [], 1, 32) == []
    assert not any(BULK in line for line in prefetch_instructions(["p"], [OperandPrefetch(0, 0, 8, 8)], 1, 32))


def test_a_kernel_that_prefetches_lets_the_next_one_start_behind_its_wait():
    body = ["\tld.param.u64 \t%rd1, [k];", "\tld.global.u64 \t%rd2, [%rd1];", "\tret;"]
    lines = [line.strip() for line in insert_grid_dependency_wait(body, 0, ["\tprefetch;"])]
    assert lines[:2] == ["prefetch;", body[0].strip()]
    assert lines.index(WAIT) + 1 == lines.index(LAUNCH) < lines.index(body[1].strip())
    lines = [line.strip() for line in insert_grid_dependency_wait(body, 0)]
    assert lines[0] == LAUNCH and 0 < lines.index(WAIT) < lines.index(body[1].strip()) and lines.count(LAUNCH) == 1


def ranges(program):
    return [(one.buffer, one.first, one.bytes, one.wanted) for one in prefetched_ranges(program, program)]


def test_weights_of_few_rows_are_prefetched():
    program = gemv()
    (weights,) = [b for b in program.inputs if b.size == 1024 * 256]
    assert ranges(program) == [(weights.name, 0, weights.bytes, weights.bytes)]
    with knobs.scope(l2_prefetch_mb=0.25):
        assert ranges(program) == [(weights.name, 0, weights.bytes, 1 << 18)]
    with knobs.scope(l2_prefetch_mb=0.0):
        assert ranges(program) == []


def test_of_a_part_of_a_larger_array_only_that_part_is_prefetched():
    x, w = np.zeros((1, 1024), jnp.bfloat16), np.zeros((5, 1024, 256), jnp.bfloat16)
    made = product(lambda x, w: x @ w[3], x, w)
    program = GemvSchedule(8, 4, 2, 8, 128).apply(made, FewRowGemm.of(made))
    if all(b.size < w.size for b in program.inputs):
        pytest.skip("the slice is no part of the kernel")
    assert [one[1:3] for one in ranges(program)] == [(3 * 1024 * 256 * 2, 1024 * 256 * 2)]


@pytest.mark.parametrize("terms", [32, 100_000])
def test_small_and_huge_weights_are_not_prefetched(terms):
    program = gemv(terms=terms, columns=256 if terms < 1000 else 512)
    assert ranges(program) == []


def test_operands_of_equal_size_are_not_prefetched():
    x, w = np.zeros((4, 1024, 64), jnp.float32), np.zeros((4, 64, 1024), jnp.float32)
    made = product(lambda x, w: jnp.einsum("bmk,bkn->bmn", x[:, :4], w), x, w)
    program = GemvSchedule(4, 4, 2, 8, 128).apply(made, FewRowGemm.of(made))
    assert ranges(program)
    y = product(lambda x, w: jnp.einsum("bmk,bkn->bmn", x, w), x, w)  # 1024 rows
    assert prefetched_ranges(y, program) == []


@compiled
def test_both_kernels_of_a_split_are_launched_early_but_only_the_product_prefetches():
    first, second = kernels(gemv(split=2))
    assert [sum(BULK in line for line in k) for k in (first, second)] == [1, 0]
    places = [[k.index(f"\t{x}") for x in (WAIT, LAUNCH)] for k in (first, second)]
    assert places[0][0] < places[0][1] and places[1][1] < places[1][0]
    assert next(n for n, line in enumerate(first) if BULK in line) < places[0][0]


@compiled
def test_a_skinny_gemm_prefetches_its_weights():
    x, w = np.zeros((8, 1024), jnp.bfloat16), np.zeros((1024, 64), jnp.bfloat16)
    made = product(jnp.matmul, x, w)
    (lines,) = kernels(SkinnySchedule(64, 1, 4, 2).apply(made, SkinnyProblem.of(made)))
    assert sum(BULK in line for line in lines) == 1


@compiled
def test_without_programmatic_launch_there_is_no_prefetch():
    assert not any(BULK in line or "griddepcontrol" in line for lines in kernels(gemv(), SM80) for line in lines)


@compiled
def test_the_amount_is_part_of_a_kernel_s_key():
    program = gemv()
    with knobs.scope(l2_prefetch_mb=1.0):
        other = compiler.kernel_digest(program, SM90)
    assert other != compiler.kernel_digest(program, SM90)
