"""Functions to kernel programs, and programs run two ways: what the tests of the compiler's floors share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from jcuts.base.errors import Refusal
from jcuts.fusion import greedy
from jcuts.fusion.match_attention import fuse_attention
from jcuts.fusion.match_attention_backward import fuse_attention_backward
from jcuts.fusion.move_epilogue import CHEAP
from jcuts.kernel_ir import loop_transforms
from jcuts.kernel_ir.program import Program
from jcuts.lower.patterns.gemm import as_gemm, gemm_operands
from jcuts.lower.reduction.column_sums import lower_region_or_column_sums
from jcuts.lower.region import lower_region
from jcuts.lower.tensor_graph import TensorGraph, build_graph
from jcuts.rewrite.simplify import simplify
from jcuts.schedule.cpu import loop_candidates, loop_schedule
from jcuts.schedule.cpu.candidates import multi_phase_schedules
from jcuts.trace import jaxapi
from jcuts.trace.inline import inline
from jcuts.xla.cpu_ffi_call import call_kernel
from jcuts.xla.kernel_cache import kernel_for

MACHINE = loop_candidates.Machine(vector_bytes=64, registers=32, threads=2)
"""A fixed machine, so that schedules and golden files are the same everywhere."""


@dataclass(frozen=True)
class Traced:
    """A function as a tensor graph; ``arguments`` are the values of its jaxpr's inputs, in order."""

    closed: Any
    graph: TensorGraph
    arguments: tuple[np.ndarray, ...]

    @property
    def everything(self) -> frozenset[int]:
        """All equations."""
        return frozenset(range(len(self.graph.nodes)))

    def build(self, members: Sequence[int] | None = None) -> Program | Refusal:
        """The unscheduled program of some equations (all of them by default)."""
        return lower_region(self.graph, self.everything if members is None else frozenset(members))

    def rounded(self) -> Program:
        """The program of a product, with what stands before it, whose weights are known to be rounded to TF32."""
        built = lower_region(self.graph, self.everything, cheap=CHEAP)
        made = as_gemm(built) if isinstance(built, Program) else None
        assert isinstance(built, Program) and made is not None, str(built)
        right = gemm_operands(made)[1].buffer
        return replace(built, buffers=tuple(replace(b, tf32=b.name == right) for b in built.buffers))

    def product(self) -> Program:
        """The same as a product."""
        made = as_gemm(self.rounded())
        assert made is not None
        return made

    def program(self, members: Sequence[int] | None = None) -> Program:
        """The unscheduled program; a refusal fails the test."""
        built = self.build(members)
        assert isinstance(built, Program), str(built)
        return built

    def attention(self, template: str = "attention") -> tuple[frozenset[int], Program]:
        """The one subset that is an attention (or, of that template, its backward pass), and its program."""
        cover = fuse_attention(self.graph, greedy.group(self.graph).subsets)
        cover = fuse_attention_backward(self.graph, cover)
        ((members, program),) = [found for found in cover if found[1].template == template]
        return members, program

    def operands(self, members: frozenset[int] | None = None) -> list[np.ndarray]:
        """Operands of the program of some equations (all of them by default), in its order."""
        values = dict(zip((*self.closed.jaxpr.constvars, *self.closed.jaxpr.invars), self._values(), strict=True))
        for eqn in self.closed.jaxpr.eqns if members is not None else ():  # operands that the function computes
            found = eqn.primitive.bind(*(v.val if hasattr(v, "val") else values[v] for v in eqn.invars), **eqn.params)
            found = found if eqn.primitive.multiple_results else [found]
            values.update(zip(eqn.outvars, map(np.asarray, found), strict=True))
        names = {number: var for var, number in self.graph.of_var.items()}
        return [values[names[t]] for t in self.graph.subset_inputs(members or self.everything)]

    def _values(self) -> list[np.ndarray]:
        return [np.asarray(c) for c in self.closed.consts] + list(self.arguments)

    def names(self) -> list[str]:
        """Primitive of every equation."""
        return [node.prim for node in self.graph.nodes]


def trace(fn: Callable[..., Any], *arguments: Any) -> Traced:
    """Traces and flattens a function of arrays; simplified where it computes what nothing uses (as gradients do)."""
    closed = inline(jaxapi.closed_jaxpr_of(fn, *arguments))
    used = {id(v) for v in closed.jaxpr.outvars} | {id(v) for e in closed.jaxpr.eqns for v in e.invars}
    if any(not any(id(v) in used for v in eqn.outvars) for eqn in closed.jaxpr.eqns):
        closed = simplify(closed)
    return Traced(closed, build_graph(closed.jaxpr), tuple(np.asarray(a) for a in arguments))


def trace_sums(fn: Callable[..., Any], *arguments: Any) -> Program:
    """The unscheduled program of a contraction with column reductions; a refusal fails the test."""
    traced = trace(fn, *arguments)
    built = lower_region_or_column_sums(traced.graph, traced.everything)
    assert isinstance(built, Program), str(built)
    return built


def schedules(program: Program, limit: int = 16, machine: loop_candidates.Machine = MACHINE) -> list[Program]:
    """The scheduled candidates, best first."""
    plain = loop_transforms.collapse_program(program)
    if len(plain.phases) > 1:
        return [p for p, _ in multi_phase_schedules(program, machine, limit)]
    return [loop_schedule.apply(plain, s) for s, _ in loop_candidates.candidates(plain, machine, limit)]


def run_compiled(program: Program, operands: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Compiles a scheduled program and runs it as XLA would call it."""
    kernel = kernel_for(program)
    return [np.asarray(x) for x in jax.jit(lambda *xs: call_kernel(kernel, *xs))(*operands)]
