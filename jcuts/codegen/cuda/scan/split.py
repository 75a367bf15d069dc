"""Splits a scan along columns over the grid: three launches (`lower.split_scan`)."""

from __future__ import annotations

from dataclasses import replace

from jcuts.codegen.cuda.reduction.split import Split, column_program
from jcuts.kernel_ir.loop_transforms import collapse_program
from jcuts.kernel_ir.program import Program
from jcuts.lower import split_scan


def split_scan_columns(program: Program) -> Split:
    """Totals of groups of points, what comes before each group, and the walk down the groups."""
    params = dict(program.params)
    vector, unroll = int(str(params["vector"])), int(str(params["unroll"]))
    made = split_scan.split_scan(program, int(str(params["split"])), unroll)
    totals, starts, walk = made.programs
    totals = collapse_program(totals)
    phase = totals.phases[0]
    lane = phase.axes[-1]
    axes = (*phase.axes[:-1], replace(lane, unroll=vector))
    across = min(32, lane.extent // vector)
    threads = across * max(1, 256 // across)
    deep = threads // across
    flight = max(1, min(8, phase.reds[0].extent // deep))
    schedule = (("cuda", "columns"), ("threads", threads), ("across", across), ("flight", flight))
    totals = replace(totals, phases=(replace(phase, axes=axes),), params=schedule)
    plain = (("cuda", "scan_columns"), ("threads", 128))
    starts = replace(starts, params=(*plain, ("vector", 1), ("unroll", 8)))
    walk = replace(walk, params=(*plain, ("vector", vector), ("unroll", unroll), *walk.params))
    return [column_program(totals), starts, walk], list(made.scratch)
