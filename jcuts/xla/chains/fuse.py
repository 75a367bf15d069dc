"""Launch fusion: merges neighbouring kernel calls into one custom call (a *chain*).

On a GPU kernels of a chain overlap by programmatic dependent launch; on a CPU what only they read lies in an arena.

XLA serialises two calls, inside a CUDA graph too; between kernels of one call the launcher need not
(`custom_calls/launch_cuda.cc`): the next kernel is launched while the previous one still runs, and waits on the device
(``griddepcontrol.wait``).  Values that only kernels of a chain read lie in the chain's scratch memory, where values
with disjoint lifetimes share bytes.

On a CPU that memory outlives the call (`custom_calls/launch_cpu.cc`): XLA's temporary buffers are allocated in every
call, and beyond malloc's threshold (32 MiB) each of their pages is mapped and cleared anew.

    dataflow           what kernels read, through reshapes, and overwrite    xla/chains/dataflow.py
    order              the order with the fewest chains                      xla/chains/order.py
    buffer assignment  a chain's call: operands, results, scratch offsets    xla/chains/{buffer_assignment,arena}.py

All operands and results of a chain are live while it runs.  Where that takes much more memory than single calls in the
function's own order (`xla/chains/peak_memory.py`), equations are reordered and kernels merged only within parts of the
function.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from typing import Any

from jcuts.trace import jaxapi
from jcuts.xla import cpu_launcher, cuda_launcher
from jcuts.xla.chains import peak_memory
from jcuts.xla.chains.buffer_assignment import merged
from jcuts.xla.chains.dataflow import VIEWS, Dataflow, is_kernel
from jcuts.xla.chains.order import Chain, order_for_chains

CHAINS = (cuda_launcher.CHAIN, cpu_launcher.CHAIN)
"""Custom calls of several kernels."""
EARLY = (9, 0)
"""Compute capability from which on a kernel can be launched before the one in front of it has ended."""
MORE_BYTES = 1 << 30
"""Memory that chains may take beyond what single calls take, where `MORE_SHARE` of that is less."""
MORE_SHARE = 1 / 8
"""The same as a part of what the calls take."""


def fuse_calls(closed: jaxapi.Closed) -> jaxapi.Closed:
    """The jaxpr with neighbouring kernel calls merged into chains; the same values."""
    eqns = list(closed.jaxpr.eqns)
    reads = Dataflow(closed)
    before = peak_memory.bytes_of(closed, VIEWS)
    most = before + max(MORE_BYTES, MORE_SHARE * before)
    size = max(1, len(eqns))
    while True:
        result: list[Any] = []
        for first in range(0, len(eqns), size):
            for step in order_for_chains(eqns[first : first + size], reads):
                result += merged(step, reads) if isinstance(step, Chain) else [step]
        found = jaxapi.dce(jaxapi.with_eqns(closed, result))
        if size == 1 or peak_memory.bytes_of(found, VIEWS) <= most:
            return found
        size = -(-size // 2)


def calls(closed: jaxapi.Closed) -> int:
    """Kernel calls of a jaxpr that are not in chains."""
    return sum(map(is_kernel, closed.jaxpr.eqns))


def joined(closed: jaxapi.Closed) -> float:
    """Number of a GPU's kernels in chains of two or more, counted as often as they run (infinite in a while loop)."""
    return sum(length * runs for length, runs in _lengths(closed, (cuda_launcher.CHAIN,)) if length > 1)


def note(closed: jaxapi.Closed) -> str | None:
    """The line of `explain` about the chains of a program and its bodies; None where there are none."""
    found = []
    if lengths := sorted((length for length, _ in _lengths(closed)), reverse=True):
        several = f"{len(lengths)} calls" if len(lengths) > 1 else "one call"
        each = ", ".join(map(str, lengths))
        found.append(f"{sum(lengths)} kernels that can follow each other run in {several} (of {each})")
    if loops := [length for length, _ in _lengths(closed, (cpu_launcher.LOOP,))]:
        several = "a loop is one call" if len(loops) == 1 else f"{len(loops)} loops are one call each"
        found.append(f"{several} (of {', '.join(map(str, loops))} kernels)")
    return "; ".join(found) or None


def _lengths(closed: jaxapi.Closed, targets: Collection[str] = CHAINS, runs: float = 1) -> Iterator[tuple[int, float]]:
    """Kernels per chain, and how often each chain runs. Args: targets: custom calls; runs: of the jaxpr."""
    for eqn in closed.jaxpr.eqns:
        if jaxapi.call_target(eqn) in targets:
            yield len(str(dict(eqn.params["attributes"])["digests"]).split()), runs
        again = {"scan": eqn.params.get("length", 1), "while": math.inf}.get(jaxapi.primitive_name(eqn), 1)
        for _, _, body in jaxapi.inner_jaxprs(eqn) if again else ():
            yield from _lengths(body, targets, runs * again)
