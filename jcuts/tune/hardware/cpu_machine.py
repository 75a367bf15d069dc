"""Measures this CPU as an architecture file: core rates, bandwidth per level, GEMM rate, cost of calls and hand-over.

What system files say is read (`arch.detect`), what they do not is measured: ports, latency and clock by loops of
machine code (`tune.hardware.cpu_loops`), bandwidths by copies on all cores, overheads as slopes over chains of custom
calls in one program.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from jcuts.arch import detect, measure
from jcuts.arch.cpu import CpuArch
from jcuts.arch.cpu_cores import CORE, TABLE
from jcuts.arch.cpu_file import UNITS
from jcuts.base.errors import IRError
from jcuts.tune.hardware import cpu_loops
from jcuts.tune.hardware.cpu_loops import TICK, CoreRates

CLEAR = 0.15
"""A rate that is no further from a whole number of ports is that number."""
CLOCK_ROOM = 1.1
"""Over the highest clock that was seen, which must be a ceiling: on a shared machine it changed by 6% between runs."""
CLOCK_SECONDS = 4
"""For which the clock is watched."""
PATIENCE = 8
"""Times the budgets of `arch.measure`, which a first call pays."""
CHAINS = (8, 72)
"""Custom calls of the two programs whose difference is timed."""
CALLS = 41
"""Runs of each of them; the median counts."""
ELEMENTS = 4096
"""Of the array that these calls work on: next to nothing."""

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Measured:
    """What was seen. Args: rates: of a core; bandwidth [byte/s], peak [FLOP/s]: of all; call, handover: [s]."""

    rates: CoreRates
    bandwidth: Mapping[str, float]
    peak: Mapping[str, float]
    call: float
    handover: float


def measure_cpu(progress: Progress = lambda _: None) -> CpuArch:
    """This CPU, measured: half a minute.

    Args: progress: is told what is measured next.
    Raises: NativeError where kernels cannot be called; ModelError for a CPU whose cycles no loop counts.
    """
    arch = detect.describe_cpu()
    progress("ports, latency, clock")
    rates = cpu_loops.core_rates(arch.machine, arch.simd_bits)
    highest = cpu_loops.highest_clock(arch.machine, arch.lanes(4), CLOCK_SECONDS)
    rates = replace(rates, clock=max(rates.clock, highest))
    progress("cache and memory bandwidth")
    bandwidth = measure.measure_bandwidth(arch, PATIENCE)
    progress("matrix products")
    peak = measure.measure_peak(patience=PATIENCE)
    progress("custom calls")
    call, handover = call_overheads(arch.cores)
    return described(arch, Measured(rates, bandwidth, peak, call, handover), time.strftime("%Y-%m-%d"))


def described(arch: CpuArch, seen: Measured, date: str, listed_clock: float | None = None) -> CpuArch:
    """The architecture with what was measured, and the source of every number.

    Args: arch: as system files describe it; listed_clock: highest clock that the system lists [Hz], 0 for none; by
        default this machine's.
    """
    by = f"by jcuts arch measure, {date}, {arch.name}"
    sources = dict.fromkeys(UNITS, f"read {by}: /proc/cpuinfo, sysfs, affinity and quota of the process")
    for name in ("simd_bits", "vector_registers"):
        sources[name] = f"read {by}: instruction sets of /proc/cpuinfo"
    ports = {}
    for name in ("fma", "alu", "load", "store"):
        rate, key = getattr(seen.rates, name), f"{name}_ports"
        near = max(1, round(rate))
        clear = abs(rate - near) <= CLEAR
        ports[key] = near if clear else getattr(arch, key)
        what = "measured" if clear else "assumed"
        sources[key] = f"{what} {by}: {rate:.2f} full-width vector instructions per cycle"
    known = detect.listed_clock() if listed_clock is None else listed_clock
    clock = known or CLOCK_ROOM * seen.rates.clock
    heard = "listed in sysfs" if known else f"that and {CLOCK_ROOM - 1:.0%}, as a ceiling"
    sources["frequency"] = f"measured {by}: {seen.rates.clock:.4g} Hz by a chain of additions; {heard}"
    latency = max(1, round(seen.rates.latency))
    sources["core.fma_latency"] = f"measured {by}: {seen.rates.latency:.2f} cycles in a chain of FMAs"
    for f in fields(CORE):
        sources.setdefault(f"core.{f.name}", f"not measured, arch/cpu_cores.toml: {TABLE.sources[f'core.{f.name}']}")
    sources |= {
        f"bandwidth.{name}": f"measured {by}: copies on {arch.cores} cores, read and written" for name in seen.bandwidth
    }
    sources |= {f"measured_peak.{name}": f"measured {by}: the better of two NumPy products" for name in seen.peak}
    chain = f"slope over {CHAINS[0]} and {CHAINS[1]} calls in one program"
    sources["overheads.call_seconds"] = f"measured {by}: a kernel of one task, {chain}"
    sources["overheads.handover_seconds"] = f"measured {by}: a task per thread over one task, {chain}"
    found = replace(
        arch,
        core=replace(arch.core, fma_latency=latency),
        frequency=clock,
        call_seconds=seen.call,
        handover_seconds=seen.handover,
        **ports,
    ).calibrated(seen.bandwidth, seen.peak, "measured")
    if found.frequency > clock:
        sources["frequency"] += "; raised by a matrix product that was faster"
    return replace(found, sources=sources)


def call_overheads(threads: int) -> tuple[float, float]:
    """(seconds of a custom call of one task within a program, what it takes longer with a task per thread).

    Raises: NativeError where kernels cannot be called.
    """
    one = _seconds_per_call(1)
    return one, max(0.0, _seconds_per_call(threads) - one) if threads > 1 else 0.0


def _seconds_per_call(tasks: int) -> float:
    """Slope over chains of calls: what a program costs besides cancels."""
    import jax
    import numpy as np

    x = np.zeros(ELEMENTS, np.float32)
    function = _kernel(tasks)

    def chained(count: int) -> Any:
        def run(y: Any) -> Any:
            for _ in range(count):
                (y,) = function(y)
            return y

        return jax.jit(run).lower(x).compile()

    programs = [chained(count) for count in CHAINS]
    for program in programs:
        program(x).block_until_ready()
    differences = []
    for _ in range(CALLS):
        times = []
        for program in programs:
            begun = time.perf_counter()
            program(x).block_until_ready()
            times.append(time.perf_counter() - begun)
        differences.append(times[1] - times[0])
    return max(TICK, statistics.median(differences) / (CHAINS[1] - CHAINS[0]))


def _kernel(tasks: int) -> Callable[..., Any]:
    """The traceable call of a kernel that adds one to `ELEMENTS` numbers, in so many tasks."""
    import jax
    import numpy as np

    from jcuts.codegen.cpu.compile import compile_program
    from jcuts.kernel_ir.loop_transforms import collapse_program
    from jcuts.kernel_ir.program import Program
    from jcuts.lower.region import lower_region
    from jcuts.lower.tensor_graph import build_graph
    from jcuts.schedule.cpu.loop_schedule import Schedule, apply
    from jcuts.trace.inline import inline
    from jcuts.tune.measure.cpu_timing import as_function

    flat = inline(jax.make_jaxpr(lambda x: x + 1)(np.zeros(ELEMENTS, np.float32)))
    graph = build_graph(flat.jaxpr)
    program = lower_region(graph, frozenset(node.number for node in graph.nodes))
    if not isinstance(program, Program):
        raise IRError(f"an addition is no kernel: {program}")
    plain = collapse_program(program)
    axis = plain.phases[0].axes[0].name
    scheduled = apply(plain, Schedule(4, axis, blocks=((axis, -(-ELEMENTS // tasks)),)))
    return as_function(compile_program(scheduled))
