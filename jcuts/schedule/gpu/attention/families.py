"""Scheduling halves of the attention families: flash attention, and its backward pass."""

from __future__ import annotations

from jcuts.lower.attention.backward import TEMPLATE as ATTENTION_BACKWARD
from jcuts.lower.attention.forward import TEMPLATE as ATTENTION
from jcuts.schedule.gpu import family_statistics as stats
from jcuts.schedule.gpu import tensor_core_times as times
from jcuts.schedule.gpu.attention import backward_schedules, backward_tile, schedules, tile
from jcuts.schedule.gpu.family import TENSOR_CORES, ScheduleFamily

FAMILIES = (
    ScheduleFamily(
        "flash_attention",
        "attention",
        "Attention with an online softmax (FlashAttention) by `mma.sync`.",
        "docs/kernels/attention.md",
        (ATTENTION,),
        lambda p: schedules.products(p.program, p.machine) if p.is_attention else (),
        capability=TENSOR_CORES,
        tile_of=tile.shape_of,
        statistics=stats.ATTENTION,
        time=times.attention_time,
    ),
    ScheduleFamily(
        "attention_backward",
        backward_tile.FORM,
        "Backward pass of attention with recomputed weights (FlashAttention-2) by `mma.sync`.",
        "docs/kernels/attention.md",
        (ATTENTION_BACKWARD,),
        lambda p: backward_schedules.backward_schedules(p.program, p.machine) if p.is_attention_backward else (),
        capability=TENSOR_CORES,
        tile_of=backward_tile.backward_tile,
        statistics=stats.ATTENTION_BACKWARD,
        time=times.attention_backward_time,
    ),
)
"""Entries of `schedule.gpu.families.FAMILIES`."""
