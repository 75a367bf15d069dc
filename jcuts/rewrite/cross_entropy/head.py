"""Fused linear cross-entropy: logits and their gradient in chunks of tokens, in a loop that never holds all of them.

    logits = h W;  loss_i = logsumexp(logits_i) - logits_i[y_i];  dlogits = (softmax(logits) - onehot(y)) * cotangent
    dh = dlogits W^T;  dW = h^T dlogits                                                              ->
    for a chunk of tokens: logits of the chunk, its losses, dlogits of the chunk, dh of the chunk, dW += ...

The logits of a language model [tokens, vocabulary] and their gradient are its largest arrays by far: of 8192 tokens and
128k entries 4 GB each in float32.  (Hand-written: Wijmans et al., Cut your losses in large-vocabulary language models,
2025; Hsu et al., Liger kernel, 2024.)  No spelling of the loss is looked for: `region` follows the data flow from the
product, and any loss whose equations work token by token is computed by these equations on chunks.  So rounding per
token stays as it was; sums over tokens are added up in another order, in float32.  Where the gradient depends on a sum
over the losses themselves, there are two loops and the second computes the logits again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jcuts.rewrite.cross_entropy.loop import chunk_region
from jcuts.rewrite.cross_entropy.region import Region, products, rows_of_product
from jcuts.rewrite.cross_entropy.row_slices import move_row_slices
from jcuts.rewrite.matmul_patterns import Program
from jcuts.rewrite.simplify import simplify
from jcuts.trace import jaxapi
from jcuts.trace.inline import inline

LEAST_BYTES = 64 << 20
"""Logits that are worth a loop: larger than caches (an H100's L2 cache has 50 MB), many chunks of `CHUNK_BYTES`."""
CHUNK_BYTES = 32 << 20
"""Logits of a chunk: about what a last-level cache holds, if these are at least `LEAST_ROWS` rows."""
LEAST_ROWS = 256
"""Rows of a chunk at least, as the products' efficiency asks.

A turn adds [width, vocabulary] float32 numbers to dW, 8 bytes of traffic each, beside 6 FLOP per row: at 256 rows 192
FLOP per byte, about what an H100 needs to be bound by its tensor cores (990 TFLOP/s over 3.35 TB/s are 295) and far
more than a CPU needs.
"""
GPU_ROWS = 1024
"""Rows of a chunk on a GPU, where these are no more than a `MOST_SHARE`-th of the tokens.

cuBLAS needs 8.0 ms for the weights' gradient of 4096 tokens in chunks of 256 rows, 5.3 in chunks of 1024 and 4.2 in one
(float32, width 1024, 131072 symbols; `benchmarks/results/networks/cross_entropy_chunks_h200_2026-11-28.json`).
"""
MOST_SHARE = 4


@dataclass(frozen=True)
class Sizes:
    """Limits of chunks; the defaults are measured, tests use smaller ones.

    Attributes:
        least_bytes: logits from which on they are computed in chunks [B].
        chunk_bytes: logits of a chunk [B].
        least_rows: rows of a chunk, even where they take more.
        efficient_rows: the same where there are `MOST_SHARE` times as many.
    """

    least_bytes: int = LEAST_BYTES
    chunk_bytes: int = CHUNK_BYTES
    least_rows: int = LEAST_ROWS
    efficient_rows: int = 0

    @classmethod
    def on(cls, platform: str, least_bytes: int = LEAST_BYTES) -> Sizes:
        """The limits on a platform."""
        return cls(least_bytes, efficient_rows=0 if platform == "cpu" else GPU_ROWS)

    def rows(self, row_bytes: int, count: int) -> int:
        """Rows of a chunk. Args: row_bytes: logits of one row [B]; count: of all rows."""
        return max(self.least_rows, min(self.efficient_rows, count // MOST_SHARE), self.chunk_bytes // row_bytes)


def chunk_cross_entropy(closed: jaxapi.Closed) -> tuple[jaxapi.Closed, int]:
    """Computes logits that feed a softmax loss in chunks, on a GPU; the program and the number of products."""
    closed, done, _ = chunk_heads(closed, Sizes.on("cuda"))
    return closed, done


def chunk_heads(closed: jaxapi.Closed, sizes: Sizes) -> tuple[jaxapi.Closed, int, list[str]]:
    """`chunk_cross_entropy` with limits, and the reasons why products that are exponentiated stay whole."""
    found, count, reasons = _heads(closed, sizes)
    if not reasons:
        return found, count, reasons
    moved = move_row_slices(found, sizes.least_bytes)
    if moved is not found:
        again, more, others = _heads(simplify(moved), sizes)
        if more:
            return again, count + more, others
    return found, count, reasons


def _heads(closed: jaxapi.Closed, sizes: Sizes) -> tuple[jaxapi.Closed, int, list[str]]:
    count, reasons, tried = 0, [], set()
    while (found := _next(closed, sizes, tried)) is not None:
        eqn, program = found
        tried.add(eqn.outvars[0])
        changed = _chunked(program, eqn, sizes)
        if isinstance(changed, str):
            reasons.append(changed)
        else:
            closed, count = simplify(inline(changed)), count + 1
    return closed, count, reasons


def _next(closed: jaxapi.Closed, sizes: Sizes, tried: set[Any]) -> tuple[Any, Program] | None:
    program = Program(closed)
    for eqn in products(program):
        if eqn.outvars[0] not in tried and jaxapi.nbytes(eqn.outvars[0]) >= sizes.least_bytes:
            return eqn, program
    return None


def _chunked(program: Program, eqn: Any, sizes: Sizes) -> jaxapi.Closed | str:
    """A program with a product in chunks of its left operand's rows, or else of its right operand's; or the reason."""
    reasons = []
    for side in (0, 1):
        rows = rows_of_product(eqn, side)
        region = Region.of(program, eqn, rows) if rows else None
        if region is None or region.count < 2:
            reasons.append("the product has one row")
            continue
        reason = region.reason or ("" if region.has_softmax() else "no softmax over the product's result")
        if not reason:
            row_bytes = jaxapi.nbytes(eqn.outvars[0]) // region.count
            changed = chunk_region(region, sizes.rows(row_bytes, region.count))
            if not isinstance(changed, str) and _has(changed, eqn):
                changed = "the logits are used as a whole elsewhere"
            if not isinstance(changed, str):
                return changed
            reason = changed
        reasons.append(reason)
    return reasons[0]


def _has(closed: jaxapi.Closed, eqn: Any) -> bool:
    return any(eqn.outvars[0] in other.outvars for other in closed.jaxpr.eqns)
