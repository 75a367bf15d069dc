"""Plans batch chunking (cache blocking across operations): whether, where and in which chunk sizes
(`rewrite.chunk_batch`).

A kernel that reads what the one before it wrote finds it in a cache only if the batch's intermediate values fit.  Where
they do not, running chunks of the batch through several kernels one after another trades kernel calls and repeated
reading of weights for memory traffic.  Early layers of a network, with large activations and small weights, want small
chunks; late ones the whole batch.  So the program is cut into segments, each with a size of its own:

    time(cuts, sizes) = sum over segments of  (batch / size) * (loop + sum over kernels of seconds at that size)
                        + bytes of the values that cross a cut, copied twice

minimised by dynamic programming over cuts (between fused groups) and sizes (divisors of the batch).  Estimates decide,
as measuring every size would multiply the time of tuning; the predicted gain must be at least `GAIN`, and the
end-to-end benchmark compares the whole program with XLA's.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from jcuts.base import knobs
from jcuts.fusion import greedy
from jcuts.kernel_ir.program import ITEM_SIZE
from jcuts.lower.tensor_graph import TensorGraph, build_graph
from jcuts.rewrite.chunk_batch import Batch, Segment, find_batch_dimension
from jcuts.schedule.cpu.bound import host_arch
from jcuts.schedule.cpu.time_estimate import cached_traffic_seconds, streamed_seconds, traffic_seconds
from jcuts.trace import jaxapi

log = logging.getLogger("jcuts.pipeline.batch_chunking")

GAIN = 0.9
"""Largest predicted time, as a share of the time without pieces, for which a plan with pieces is taken."""

LOOP_SECONDS = 5e-6  # one turn of XLA's while loop with its slices
MOST_SIZES = 4
MOST_CROSSING = 3  # values along the batch that may cross a cut


@dataclass(frozen=True)
class Plan:
    """Chunked segments of the program's batch part, and the predicted times with and without them [s]."""

    segments: tuple[Segment, ...]
    extent: int
    seconds: float = 0.0
    whole_seconds: float = 0.0

    def __str__(self) -> str:
        parts = ", ".join(f"{s.end - s.begin} equations by {s.size}" for s in self.segments)
        return (
            f"batch of {self.extent} in pieces: {parts}; estimated {self.whole_seconds * 1e3:.2f} -> "
            f"{self.seconds * 1e3:.2f} ms"
        )


def chunk_batch(flat: jaxapi.Closed) -> tuple[jaxapi.Closed, Plan | None]:
    """A flat program, in pieces along its batch if that promises to pay, and the plan."""
    forced = knobs.current().chunk
    if forced == 0:
        return flat, None
    batch = find_batch_dimension(flat)
    if isinstance(batch, str):
        return flat, None
    if forced is not None:
        if batch.extent % forced or forced == batch.extent:
            return flat, None
        everything = Segment(0, len(batch.eqns), forced)
        return batch.looped([everything]), Plan((everything,), batch.extent)
    found = plan(batch)
    if found is None or found.seconds > GAIN * found.whole_seconds:
        return flat, None
    log.info("%s", found)
    return batch.looped(found.segments), found


def plan(batch: Batch) -> Plan | None:
    """The best segments by estimate; None if the batch fits the caches as it is or cannot be divided."""
    sizes = sizes_of(batch.extent)
    whole = _Costs(batch, batch.extent)
    arch = host_arch()
    largest = arch.l3 or arch.l2 * arch.cores
    if len(sizes) < 2 or 2 * whole.largest <= largest:
        return None
    costs = {size: whole if size == batch.extent else _Costs(batch, size) for size in sizes}
    cuts = [p for p in whole.cuts if all(p in c.cuts for c in costs.values())]
    crossing = {p: batch.crossing(p) for p in cuts}
    cuts = [p for p in cuts if p in (0, len(batch.eqns)) or len(crossing[p]) <= MOST_CROSSING]
    best: dict[int, tuple[float, tuple[Segment, ...]]] = {0: (0.0, ())}
    for place, end in enumerate(cuts):
        if end == 0:
            continue
        options = []
        for begin in cuts[:place]:
            moved = sum(jaxapi.nbytes(v) for v in (*crossing[begin], *crossing[end]))
            for size in sizes:
                turns = batch.extent // size
                seconds = best[begin][0] + turns * costs[size].between(begin, end)
                if turns > 1:
                    seconds += turns * LOOP_SECONDS + cached_traffic_seconds(2 * moved)
                options.append((seconds, len(best[begin][1]), (*best[begin][1], Segment(begin, end, size))))
        options.sort(key=lambda o: (o[0], o[1], [(s.begin, s.size) for s in o[2]]))
        best[end] = (options[0][0], options[0][2])
    seconds, segments = best[len(batch.eqns)]
    return Plan(_joined(segments), batch.extent, seconds, whole.between(0, len(batch.eqns)))


def sizes_of(extent: int) -> list[int]:
    """Sizes of pieces that are tried: at most `MOST_SIZES` divisors, smallest and whole batch among them."""
    divisors = [n for n in range(1, extent + 1) if extent % n == 0]
    smallest, *rest = divisors
    inner = [n for n in rest if n < extent][: MOST_SIZES - 2]
    return sorted({smallest, *inner, extent})


def _joined(segments: Sequence[Segment]) -> tuple[Segment, ...]:
    """Neighbours of the same size as one."""
    result: list[Segment] = []
    for segment in segments:
        if result and result[-1].size == segment.size:
            result[-1] = Segment(result[-1].begin, segment.end, segment.size)
        else:
            result.append(segment)
    return tuple(result)


class _Costs:
    """Estimated seconds of the batch part at one chunk size, by position; where it may be cut."""

    def __init__(self, batch: Batch, size: int) -> None:
        closed, _, _ = batch.local(0, len(batch.eqns), size)
        graph = build_graph(closed.jaxpr)
        grouping = greedy.group(graph)
        count = len(batch.eqns)
        self.at = [0.0] * count
        self.largest = 0.0
        spanned = [False] * (count + 1)
        for members, program in grouping.subsets:
            first, last = min(members), max(members)
            self.at[last] += streamed_seconds(program)
            self.largest = max(self.largest, float(sum(b.bytes for b in program.buffers if b.role != "local")))
            for p in range(first + 1, last + 1):
                spanned[p] = True
        for number in grouping.left_out:
            self.at[number] += traffic_seconds(_node_bytes(graph, number))
        self.cuts = [p for p in range(count + 1) if not spanned[p]]
        self._sums = [0.0]
        for seconds in self.at:
            self._sums.append(self._sums[-1] + seconds)

    def between(self, begin: int, end: int) -> float:
        """Seconds of one piece through ``eqns[begin:end]``."""
        return self._sums[end] - self._sums[begin]


def _node_bytes(graph: TensorGraph, number: int) -> float:
    node = graph.nodes[number]
    types = [graph.tensors[t].type for t in (*node.inputs, *node.outputs)]
    return float(sum(t.size * ITEM_SIZE.get(t.dtype, 4) for t in types))
