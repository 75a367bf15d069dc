"""Generated code: golden numba source per template, and what the assembly of inner loops looks like."""

from __future__ import annotations

import re

import jax
import llvmlite.binding as llvm
import numpy as np
import pytest

from jcuts.codegen.cpu.compile import assembly_of, compile_program, kernel_digest, llvm_of
from jcuts.codegen.cpu.emit import emit_source
from jcuts.codegen.cpu.target import CpuTarget, host_target
from jcuts.schedule.cpu import loop_candidates
from tests import programs
from tests.ops.cases import conv

FEATURES = llvm.get_host_cpu_features()
WIDTH = 64 if FEATURES.get("avx512f") else 32 if FEATURES.get("avx2") and FEATURES.get("fma") else 0
wide = pytest.mark.skipif(WIDTH == 0, reason="no AVX2 with FMA here")


def zeros(*shape):
    return np.zeros(shape, np.float32)


TEMPLATES = {
    "map": (lambda x, b: jax.nn.relu(x) * b, (zeros(9, 50), zeros(50))),
    "contraction": (lambda a, b, c: jax.nn.relu(a @ b + c), (zeros(50, 40), zeros(40, 70), zeros(70))),
    "convolution": (lambda x, w: conv(x, w, strides=(2, 2)), (zeros(1, 17, 17, 8), zeros(3, 3, 8, 24))),
    "depthwise": (lambda x, w: jax.nn.relu6(conv(x, w, groups=20)), (zeros(1, 12, 12, 20), zeros(3, 3, 1, 20))),
    "reduction": (lambda x: x.sum(1), (zeros(7, 100),)),
    "window": (
        lambda x: jax.lax.reduce_window(x, -np.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"),
        (zeros(1, 8, 8, 20),),
    ),
    "rows": (lambda x: jax.nn.softmax(x), (zeros(64, 100),)),
    "columns": (lambda x: jax.nn.softmax(x, axis=0), (zeros(12, 40),)),
}


def best(name, machine=programs.MACHINE):
    fn, arguments = TEMPLATES[name]
    return programs.schedules(programs.trace(fn, *arguments).program(), 1, machine)[0]


@pytest.mark.parametrize("name", TEMPLATES)
def test_golden_source(name, golden):
    source = emit_source(best(name))
    compile(source.text, name, "exec")
    called = set(re.findall(r"\btile_\w+(?=\()", source.text))
    assert called == set(source.variants)
    golden(f"source/{name}.txt", source.text)


def test_tasks_cover_the_grid():
    program = best("contraction", loop_candidates.Machine(64, 32, 4))
    text = emit_source(program).text
    assert program.tiles > 1
    for grid in program.grid:
        assert f"{grid.axis}_lo = " in text and f"min({grid.axis}_lo + {grid.block}, {grid.extent})" in text


# -- assembly ---------------------------------------------------------------------------------------------------------
SPILLED = {
    ("emeraldrapids", "depthwise"): 3,
    ("rocketlake", "depthwise"): 4,
    ("znver3", "contraction"): 1,  # 16 registers
    ("znver3", "depthwise"): 5,
}
"""Operands that LLVM's scheduling model of a CPU spills in a loop of 216 products."""
VECTOR_FMA = r"vfn?m(add|sub)\d+ps.*%[yz]mm"


def inner_loops(text: str) -> list[list[str]]:
    """Instructions between a label and the jump back to it, innermost loops only."""
    lines = [
        line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith(("#", ".p2", ".cfi"))
    ]
    place = {line[:-1]: k for k, line in enumerate(lines) if line.endswith(":")}
    spans = []
    for k, line in enumerate(lines):
        jump = re.match(r"j\w+\s+(\.L\w+)$", line)
        if jump and place.get(jump[1], k) < k:
            spans.append((place[jump[1]], k))
    innermost = [s for s in spans if not any(s != o and s[0] <= o[0] and o[1] <= s[1] for o in spans)]
    return [lines[a : b + 1] for a, b in innermost]


def host_program(name):
    target = host_target()
    return best(name, loop_candidates.Machine(target.vector_bytes, target.registers, 1))


@wide
@pytest.mark.parametrize("name", ["contraction", "depthwise", "convolution"])
def test_products_are_fused_multiply_adds_on_vectors(name):
    text = assembly_of(host_program(name))
    assert len(re.findall(VECTOR_FMA, text)) >= 8
    assert not re.search(r"\bvmulps\b.*%[yz]mm", text)


@wide
@pytest.mark.parametrize(
    "name",
    [
        "contraction",
        "depthwise",
        pytest.param(
            "convolution",
            marks=pytest.mark.xfail(
                reason="all loads of an unrolled channel loop are emitted before its first product", strict=False
            ),
        ),
    ],
)
def test_inner_loops_do_not_spill(name):
    """Accumulators are stack slots in the IR: LLVM must have promoted every one of them."""
    allowed = SPILLED.get((host_target().name, name), 0)
    for loop in inner_loops(assembly_of(host_program(name))):
        if any(re.search(VECTOR_FMA, x) for x in loop):
            spills = [x for x in loop if re.search(r"vmov[au]p[sd]\s+%[yz]mm\d+,\s*-?\d*\(%r[sb]p", x)]
            assert len(spills) <= allowed, spills


@wide
def test_the_gemm_has_an_inner_loop_of_its_own():
    loops = [
        loop
        for loop in inner_loops(assembly_of(host_program("contraction")))
        if any(re.search(VECTOR_FMA, x) for x in loop)
    ]
    assert loops
    most = max(loops, key=len)
    products = sum(bool(re.search(VECTOR_FMA, x)) for x in most)
    assert products >= len(most) / 3, most


def test_the_kernel_is_self_contained():
    kernel = compile_program(best("rows", loop_candidates.Machine(64, 32, 1)))
    assert kernel.object_code[:4] == b"\x7fELF"
    assert kernel.scratch_bytes > 0
    assert [len(kernel.inputs), len(kernel.outputs)] == [1, 1]


def test_llvm_text_has_no_calls_into_python():
    text = llvm_of(best("contraction"))
    called = set(re.findall(r"call [^@\n]*@\"?([\w.$]+)", text))
    assert not [name for name in called if name.startswith(("Py", "NRT", "numba_"))]


def test_the_digest_names_program_and_target():
    program, other = best("map"), best("reduction")
    target = host_target()
    assert kernel_digest(program, target) == kernel_digest(program.renamed("x"), target)
    assert kernel_digest(program, target) != kernel_digest(other, target)
    assert kernel_digest(program, target) != kernel_digest(program, CpuTarget("other", target.features, 32, 16))


def test_lanes_of_types():
    target = CpuTarget("any", "", 64, 32)
    assert [target.lanes(d) for d in ("float32", "float64", "bfloat16", "int8", "bool")] == [16, 8, 16, 64, 64]
