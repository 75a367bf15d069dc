"""What a kernel computes before it waits for the grid in front of it."""

from __future__ import annotations

import re

import pytest

from jcuts.codegen.cuda.toolchain import ptxas
from jcuts.codegen.cuda.toolchain.image import Resources
from jcuts.codegen.cuda.toolchain.programmatic_launch import LAUNCH, MOST, WAIT, insert_grid_dependency_wait

HEAD = ["\t.reg .b32 \t%r<9>;", ""]


def parts(body):
    """Lines between the kernel's permission to launch the next one and its wait, and those behind the wait."""
    lines = insert_grid_dependency_wait([*HEAD, *body], len(HEAD))
    place = lines.index("\t" + WAIT)
    assert lines[len(HEAD)] == "\t" + LAUNCH
    return lines[len(HEAD) + 1 : place], lines[place + 1 :]


def test_what_follows_from_parameters_comes_first_and_memory_after():
    load, use = "\tld.global.u32 \t%r3, [%rd1];", "\tadd.s32 \t%r4, %r3, %r2;"
    first = ["\tld.param.u64 \t%rd1, [k_param_0];", "\tmov.u32 \t%r1, %tid.x;"]
    body = [*first, load, "\tshl.b32 \t%r2, %r1, 2;", use, "\tret;"]
    before, after = parts(body)
    assert before[:3] == [body[0], body[1], body[3]] and after == [load, use, "\tret;"]
    # %rd1 and %r2 are used behind the wait: an instruction that ptxas leaves in front of it reads them.
    fence = "\n".join(before[3:])
    assert re.findall(r"or\.b\d\d \t%\w+, %\w+, (%\w+);", fence) == ["%rd1", "%r2"]
    assert before[-1] == "\t@%wait_p1 nanosleep.u32 0;"


def test_registers_that_memory_is_read_into_keep_their_place():
    body = ["\tmov.u32 \t%r1, 3;", "\tld.shared.u32 \t%r2, [%r1];", "\tmov.u32 \t%r1, 4;", "\tmov.u32 \t%r2, 5;"]
    before, after = parts(body)
    assert before[0] == body[0] and after == body[1:]


def test_nothing_moves_past_labels_branches_and_predicates():
    for stop in ("$L__BB0_1:", "\tbra $L__BB0_1;", "\t@%p1 mov.u32 \t%r1, 3;", "\t{ .reg .pred p;", "\tret;"):
        body = [stop, "\tmov.u32 \t%r1, %tid.x;", "\tst.global.u32 \t[%rd1], %r1;"]
        assert parts(body) == ([], body)


def test_sums_and_the_carries_that_they_leave_stay_together():
    body = [f"\t{op} \t%r{k}, %r{k + 4}, 1;" for k, op in enumerate(["add.cc.u32", "addc.u32"] * 2)]
    before, after = parts([*body, "\tret;"])
    assert before == [] and after == [*body, "\tret;"]


def test_few_numbers_are_needed_early():
    made = [f"\tmov.u32 \t%r{k}, {k};" for k in range(99)]
    before, _ = parts([*made, *(f"\tst.global.u32 \t[%rd1], %r{k};" for k in range(99))])
    assert before[:99] == made and sum("or.b32" in line for line in before) == MOST


PTX = """.version 8.0
.target sm_90
.address_size 64

.visible .entry kernel(
	.param .u64 kernel_param_0
)
{
	.reg .b32 	%r<3>;
	.reg .b64 	%rd<2>;

	ld.param.u64 	%rd1, [kernel_param_0];
	ld.global.u32 	%r1, [%rd1];
	mov.u32 	%r2, %tid.x;
	st.global.u32 	[%rd1], %r2;
	ret;
}
"""


@pytest.mark.parametrize(
    "spills, waits, early",
    [
        ([], True, True),
        (["nanosleep"], True, False),
        (["nanosleep", WAIT], False, False),
    ],
)
def test_kernels_that_lack_registers_for_it_wait_first(spills, waits, early, monkeypatch):
    """Only those that a wait alone costs local memory have none."""
    monkeypatch.setattr(ptxas, "assemble", lambda ptx, arch, overlapped: ptx.encode())
    monkeypatch.setattr(
        ptxas, "resources", lambda cubin: {"k": Resources(255, 16 * any(s.encode() in cubin for s in spills), 0)}
    )
    cubin, report, found = ptxas.assemble_best([(PTX, "k")], "sm_90", [ptxas.Grid(1, 128, 0)])
    lines = [line.strip() for line in cubin.decode().splitlines()]
    assert report["k"].stack == 0 and found == waits == (WAIT in lines)
    if waits:
        place = lines.index(WAIT)
        assert (lines.index("mov.u32 \t%r2, %tid.x;") < place) == early == (lines[place - 1] != LAUNCH)


@pytest.mark.parametrize("blocks, shared, early", [(99, 0, True), (999, 0, False), (999, 100_000, True)])
def test_what_comes_early_costs_no_block(blocks, shared, early, monkeypatch):
    """Three blocks instead of two, where there are so many and shared memory has room for them."""
    monkeypatch.setattr(ptxas, "assemble", lambda ptx, arch, overlapped: ptx.encode())
    monkeypatch.setattr(ptxas, "resources", lambda c: {"k": Resources(180 if b"nanosleep" in c else 132, 0, 1024)})
    cubin, report, found = ptxas.assemble_best([(PTX, "k")], "sm_90", [ptxas.Grid(blocks, 128, shared)])
    assert found and (report["k"].registers == 180) == early == (b"nanosleep" in cubin)
