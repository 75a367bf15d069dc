"""Matches back-to-back GEMMs (fused MLP) in a partition: two GEMM regions, of which the second alone reads the first.

{ dot, add, gelu } -> { dot, add, mul, add }     becomes     one subset
"""

from __future__ import annotations

from collections.abc import Sequence

from jcuts.base.errors import Refusal
from jcuts.fusion.move_epilogue import CHEAP, is_library_contraction
from jcuts.fusion.region_group import HasForm, Part, RegionGroup, only_reader
from jcuts.kernel_ir.program import Program
from jcuts.lower.patterns.b2b_gemm import lower_b2b_gemm
from jcuts.lower.region import MAX_RECOMPUTED_OPS, lower_region
from jcuts.lower.tensor_graph import TensorGraph
from jcuts.schedule.gpu.families import FAMILIES
from jcuts.schedule.gpu.machine import GpuMachine


def b2b_gemm_groups(graph: TensorGraph, cover: Sequence[Part], has_form: HasForm) -> list[RegionGroup]:
    """The back-to-back GEMMs in a partition; no region is in two of them.

    Args: has_form: whether a program can be a kernel here.
    """
    programs = dict(cover)
    found: list[RegionGroup] = []
    taken: set[frozenset[int]] = set()
    for members in sorted(programs, key=max):
        if members in taken or not is_library_contraction(graph, members):
            continue
        reader = only_reader(graph, members, programs)
        if reader is None or reader in taken or not is_library_contraction(graph, reader):
            continue
        program = lower_b2b_gemm(graph, members | reader, CHEAP)
        if isinstance(program, Program) and has_form(program):
            found.append(RegionGroup(program, tuple((part, programs[part]) for part in (members, reader))))
            taken |= {members, reader}
    return found


def lower_region_or_b2b_gemm(
    graph: TensorGraph, subset: frozenset[int], cheap: float = MAX_RECOMPUTED_OPS, *, machine: GpuMachine
) -> Program | Refusal:
    """The program of a region; of a back-to-back GEMM where `lower.region` refuses it and a GPU has a kernel for it.

    Returns: the refusal of `lower.region` where neither is one.
    """
    found = lower_region(graph, subset, cheap=cheap)
    if isinstance(found, Program):
        return found
    pair = lower_b2b_gemm(graph, subset, cheap)
    return pair if isinstance(pair, Program) and _has_schedule(pair, machine) else found


def _has_schedule(program: Program, machine: GpuMachine) -> bool:
    """Whether a GPU has a kernel for a back-to-back GEMM."""
    return next(iter(FAMILIES["b2b_gemm"].schedules(program, machine)), None) is not None
