"""Peak memory of a training step under a layout: predicted from the jaxpr, and by XLA's ``memory_analysis``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import jax

from benchmarks.planner import gpt_step as gpt
from jcuts.plan.cost.program_memory import jaxpr_liveness

LAYOUTS: tuple[dict[str, Any], ...] = (
    {"micro": 2, "count": 1},
    {"micro": 4, "count": 1, "data": 4},
    {"micro": 4, "count": 1, "tensor": 4},
    {"micro": 2, "count": 2, "data": 2, "tensor": 2},
    {"micro": 2, "count": 4, "pipeline": 4},
    {"micro": 2, "count": 4, "pipeline": 2, "data": 2, "schedule": "gpipe"},
    {"micro": 4, "count": 1, "data": 2, "remat": False},
    {"micro": 2, "count": 4, "pipeline": 2, "tensor": 2, "schedule": "gpipe"},
    {"micro": 2, "count": 4, "pipeline": 2, "data": 2, "schedule": "gpipe", "remat": False},
    {"micro": 2, "count": 4, "data": 4, "schedule": "gpipe", "remat": False},
    {"micro": 2, "count": 4, "pipeline": 2, "data": 2},
    {"micro": 4, "count": 2, "tensor": 2, "pipeline": 2},
)
"""Twelve layouts of `gpt_step.py` over up to four devices."""


def traced(config: gpt.Config, devices: Sequence[Any] | None = None) -> tuple[Any, tuple[Any, ...]]:
    """The step of a layout and its arguments as shapes: parameters, both moments of Adam, tokens."""
    step = gpt.train_step(config, gpt.make_mesh(config, list(devices) if devices else None))
    params = jax.eval_shape(lambda: gpt.init(config))
    return step, (params, (params, params), jax.ShapeDtypeStruct((config.batch, config.sequence + 1), "int32"))


def predicted(step: Any, state: tuple[Any, ...], backend: Literal["gpu", "cpu"] = "gpu") -> float:
    """Bytes per device of a step whose parameters and moments are donated, from its jaxpr alone."""
    shapes = jax.eval_shape(lambda *xs: xs, *state)
    return jaxpr_liveness.footprint(step, *shapes, donated=(0, 1), backend=backend).peak


def compiled_bytes(compiled: Any) -> int:
    """Bytes per device of a compiled program: arguments + results - donated + temporaries."""
    said = compiled.memory_analysis()
    held = said.argument_size_in_bytes + said.output_size_in_bytes - said.alias_size_in_bytes
    return held + said.temp_size_in_bytes
