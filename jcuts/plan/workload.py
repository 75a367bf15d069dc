"""What is to be done with a model: one training step, and how its software keeps numbers."""

from __future__ import annotations

from dataclasses import dataclass

from jcuts.base.errors import UsageError


@dataclass(frozen=True)
class Training:
    """One optimiser step over ``batch`` samples.

    Attributes:
        batch: samples of the global batch.
        gradient_bytes: bytes per gradient value that are kept and reduced (4: 32-bit accumulation as in Megatron).
        state_bytes: optimiser state per parameter (12: 32-bit master copy and two Adam moments).
        optimizer_traffic: bytes of GPU memory moved per parameter in the optimiser stage. 30: a fused Adam reads
            gradient (4), master and moments (12) and writes them (12) and the 16-bit parameter (2).  58: Megatron's
            separate passes besides: unscale and check (8), norm (4), clip (8), copy to the model (4 more), clear
            gradients (4).
        overhead: seconds per step outside of the model (data, logging, loss scaling).
    """

    batch: int
    gradient_bytes: int = 4
    state_bytes: int = 12
    optimizer_traffic: float = 30.0
    overhead: float = 0.0

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise UsageError(f"batch={self.batch} must be at least 1", batch=self.batch)


MEGATRON_TRAFFIC = 58.0
