"""Split-K over the grid: a GEMM of partial results per slice of K, then a column reduction that runs the epilogue."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jcuts.codegen.cuda.graph.predication import mask_accumulators, predicate_loads
from jcuts.codegen.cuda.reduction.split import Split, combine_columns, partial_kernel, renumbered, split_phase
from jcuts.kernel_ir.index import Index
from jcuts.kernel_ir.node import Guard
from jcuts.kernel_ir.program import Axis, Program, Red
from jcuts.lower.patterns.gemm import K, S, k_tiles_per_split


def split_k(program: Program) -> Split:
    """A GEMM whose slices of K are blocks of their own; partial results lie slice by slice."""
    phase = split_phase(program)
    params: Any = dict(program.params)
    terms, total = params["tile"][2], phase.reds[0].extent
    share, groups = k_tiles_per_split(total, terms, params["split"])
    ranges = {**phase.ranges(), S: groups, K: share * terms}
    term = Index.axis(S) * (share * terms) + Index.axis(K)
    guard = Guard(term, None, total - 1)
    body, numbers = predicate_loads(phase.body, {K: term}, guard, ranges)
    accs = renumbered(phase, numbers) if guard.always(ranges) else mask_accumulators(body, phase.accs, numbers, guard)
    made = replace(phase, axes=(Axis(S, groups), *phase.axes), reds=(Red(K, share * terms),), accs=accs, body=body)
    wide = replace(program, phases=(made,), params=(*program.params, ("terms", total)))
    first, partials, place = partial_kernel(wide, phase, groups)
    return [first, combine_columns(program, partials, accs, place, groups)], partials
