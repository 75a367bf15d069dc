"""Validation of the memory model against measured peaks of training steps: the most that a GPU's allocator held."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from jcuts.base.errors import UsageError
from jcuts.plan.calibrate.tables import read_csv
from jcuts.plan.search.plan import Plan
from jcuts.plan.search.ranked import cost_plans
from jcuts.plan.spec import cluster as clusters
from jcuts.plan.spec.cluster import GIB
from jcuts.plan.spec.model import Transformer
from jcuts.plan.spec.workload import MEGATRON_TRAFFIC, Training

COLUMN = "allocated_gib_measured"
"""The column that makes a table one of memory."""


@dataclass(frozen=True)
class MemoryCase:
    """One measured layout: ``measured`` bytes per GPU, without what the context takes."""

    row: int
    network: Transformer
    plan: Plan
    work: Training
    measured: float


@dataclass(frozen=True)
class MemoryScore:
    """Errors of predicted peaks as fractions: mean absolute, largest absolute, mean; ``rows`` distinct layouts."""

    rows: int
    mape: float
    worst: float
    bias: float


def is_memory_table(path: str | Path) -> bool:
    """Whether a table holds measured memory.  Raises: UsageError if it cannot be read."""
    return COLUMN in read_csv(path)[0]


def read_cases(path: str | Path) -> list[MemoryCase]:
    """Rows of a table in the format of ``simumax_b200_llama3.csv``; of rows that differ in the number of micro-batches
    alone, whose peaks are one measurement, the first.

    Raises: UsageError for a field that is missing or not a number (with file and row).
    """
    made: dict[tuple, MemoryCase] = {}
    for number, row in enumerate(read_csv(path), 1):
        try:
            case = _case(number, row)
        except (KeyError, ValueError) as error:
            raise UsageError(f"{path}, row {number}: {error}", path=str(path), row=number) from error
        made.setdefault((case.network, case.plan), case)
    return list(made.values())


def _case(number: int, row: dict[str, str]) -> MemoryCase:
    size = {name: int(row[name]) for name in row if row[name].isdigit()}
    network = Transformer(
        row["model"],
        *(size[name] for name in ("layers", "hidden", "heads", "seq", "vocabulary")),
        ffn=size["ffn"],
        kv_heads=size["kv_heads"],
        gated=True,
        flash=True,
        dropout=False,
        tied=False,
        positions=False,
    )
    plan = Plan(
        data=size["dp"],
        tensor=size["tp"],
        pipeline=size["pp"],
        context=size["cp"],
        micro=size["micro_batch"],
        zero=1,
        sequence_parallel=size["tp"] > 1,
    )
    batch = size["micro_batches"] * plan.data * plan.micro
    return MemoryCase(
        number, network, plan, Training(batch, optimizer_traffic=MEGATRON_TRAFFIC), float(row[COLUMN]) * GIB
    )


def predict(cases: list[MemoryCase]) -> NDArray[np.float64]:
    """Peak bytes per GPU of every case, without what the context takes (the cluster only gives the node's size)."""
    where = clusters.load("dgx-h200")
    made = []
    for case in cases:
        (ranked,) = cost_plans(case.network.build(), where.resized(case.plan.gpus), [case.plan], case.work)
        made.append(ranked.memory["gpu"] - where.gpu.reserved)
    return np.array(made)


def score(cases: list[MemoryCase], predicted: NDArray[np.float64]) -> MemoryScore:
    """Errors of predictions over all cases."""
    relative = predicted / np.array([case.measured for case in cases]) - 1
    return MemoryScore(
        len(cases), float(np.abs(relative).mean()), float(np.abs(relative).max()), float(relative.mean())
    )
