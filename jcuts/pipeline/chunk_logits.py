"""Decides where logits are computed in chunks (fused linear cross-entropy, `rewrite.cross_entropy`) before all else.

What is gained is memory, which no race of programs by time sees.  So it is done, without a race, where the user asks
(``chunk_logits=True``), and where a device would have to hold logits of more than one `MEMORY_SHARE`-th of its
memory: these, their exponentials and their gradient are then most of what a step needs.  On GPUs smaller ones, from
`rewrite.cross_entropy.head.LEAST_BYTES` on, race as the rewrite ``logits`` where tuning time is not limited.
"""

from __future__ import annotations

from dataclasses import dataclass

from jcuts.base.settings import Settings
from jcuts.rewrite.cross_entropy.head import CHUNK_BYTES, Sizes, chunk_heads
from jcuts.rewrite.matmul_patterns import DOT
from jcuts.rewrite.registry import REMAT, everywhere
from jcuts.rewrite.simplify import CONTROL_FLOW, simplify
from jcuts.trace import jaxapi
from jcuts.trace.inline import inline
from jcuts.xla import devices as xla_devices

MEMORY_SHARE = 8
"""Logits of more than one part in so many of a device's memory are chunked without a race."""


@dataclass(frozen=True)
class ChunkedLogits:
    """What was done to a program's logits, as a note.

    Attributes:
        count: products in chunks. reasons: of those that stay whole.
    """

    count: int
    reasons: tuple[str, ...] = ()

    def __str__(self) -> str:
        done = f"logits of {self.count} product{'s' if self.count > 1 else ''} in chunks" if self.count else ""
        whole = f"logits stay whole: {'; '.join(self.reasons)}" if self.reasons else ""
        return ", ".join(part for part in (done, whole) if part)


def chunk_logits(flat: jaxapi.Closed, settings: Settings, platform: str) -> tuple[jaxapi.Closed, ChunkedLogits | None]:
    """A flat program with its logits in chunks, where that is asked for or needs no race; and a note about it."""
    least = _least_bytes(settings, platform)
    if least is None or (settings.mode == "no_fusion" and not settings.chunk_logits):
        return flat, None
    changed, count, reasons = _chunked(flat, least, platform)
    told = dict.fromkeys(reasons) if settings.chunk_logits else ()
    return changed, ChunkedLogits(count, tuple(told)) if count or told else None


def is_settled(closed: jaxapi.Closed, settings: Settings, platform: str) -> bool:
    """Whether a function's logits are computed in chunks whatever that takes: it is not raced against whole ones."""
    if settings.mode == "no_fusion" and not settings.chunk_logits:
        return False
    least = _least_bytes(settings, platform)
    if least is None or largest_product(closed) < least:
        return False
    return _chunked(simplify(inline(closed)), least, platform)[1] > 0


def _chunked(flat: jaxapi.Closed, least: int, platform: str) -> tuple[jaxapi.Closed, int, list[str]]:
    reasons: list[str] = []

    def rule(body: jaxapi.Closed) -> tuple[jaxapi.Closed, int]:
        changed, count, why = chunk_heads(body, Sizes.on(platform, least))
        reasons.extend(why)
        return changed, count

    return *everywhere(flat, rule, (*CONTROL_FLOW, *REMAT)), reasons


def largest_product(closed: jaxapi.Closed) -> int:
    """Bytes of the largest result of a matrix product, in called functions and bodies, too."""
    found = 0
    for eqn in closed.jaxpr.eqns:
        if jaxapi.primitive_name(eqn) == DOT:
            found = max(found, jaxapi.nbytes(eqn.outvars[0]))
        for _, _, body in jaxapi.inner_jaxprs(eqn):
            found = max(found, largest_product(body))
    return found


def _least_bytes(settings: Settings, platform: str) -> int | None:
    """Logits from which on they are in chunks whatever that takes; None where they never are."""
    if settings.chunk_logits is not None:
        return CHUNK_BYTES if settings.chunk_logits else None
    memory = xla_devices.memory_bytes(platform)
    return None if memory is None else memory // MEMORY_SHARE
