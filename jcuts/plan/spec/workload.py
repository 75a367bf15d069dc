"""Workload specification: one training step (batch, sequence length) and its numeric formats."""

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
        micro_traffic: bytes of GPU memory moved per parameter and micro-batch, besides what layers do.  0: 16-bit
            parameters, gradients added up by the products themselves, as Megatron does.  34: 32-bit parameters of a JAX
            step, cast to 16 bits for the forward pass (6), again for recomputation and backward (6), gradients cast
            back (6) into a stack that zeros fill first (4), and added to 32-bit sums (12).
        cast_traffic: what of it are casts (18 of the 34), not moved for parameters that a user's function leaves as is.
        autodiff: activations are kept as JAX differentiates equations and stacks results up in loops over layers and
            micro-batches: ``Block.autodiff_*`` instead of ``saved_*``, moved as ``cost`` says; with GPipe for every
            tick, idle ones too, and once more where a tick hands its layers' stack to the loop over ticks.
        pruned: recomputation leaves out what the backward pass does not need, as compilers do: a layer's last product
            and its reduction.
        overhead: seconds per step outside of the model (data, logging, loss scaling).
    """

    batch: int
    gradient_bytes: int = 4
    state_bytes: int = 12
    optimizer_traffic: float = 30.0
    micro_traffic: float = 0.0
    cast_traffic: float = 0.0
    autodiff: bool = False
    pruned: bool = False
    overhead: float = 0.0

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise UsageError(f"batch={self.batch} must be at least 1", batch=self.batch)


MEGATRON_TRAFFIC = 58.0

SOFTWARE: dict[str, dict[str, float]] = {
    "jax": {"micro_traffic": 34.0, "cast_traffic": 18.0, "autodiff": True, "pruned": True},
    "megatron": {"optimizer_traffic": MEGATRON_TRAFFIC},
    "lean": {},
}
"""What software does with numbers, as keywords of ``Training``: a JAX step with 32-bit parameters under ``jax.jit``;
Megatron; 16-bit parameters with fused accumulation and a fused Adam."""
