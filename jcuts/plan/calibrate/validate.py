"""Calibration and validation of the step-time model: robust least-squares fit; MAPE, Spearman, regret and ablation.

Measured tables are those of vTrain and Megatron; a constant utilisation of FLOPs is the naive baseline.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from jcuts.base.errors import UsageError
from jcuts.plan.calibrate.tables import read_csv
from jcuts.plan.cost.training_step import estimate
from jcuts.plan.search.plan import Plan, Plans
from jcuts.plan.spec.cluster import Cluster, Gpu
from jcuts.plan.spec.layers import Model
from jcuts.plan.spec.model import Transformer
from jcuts.plan.spec.workload import MEGATRON_TRAFFIC, Training

Floats = NDArray[np.float64]
VOCABULARY = 51200
"""GPT-2's 50257 tokens as Megatron pads them; neither table has a column for it."""


@dataclass(frozen=True)
class Case:
    """One measured step. ``row`` is what ``--calibrate`` names it by: its ``idx``, or its place in the file from 1."""

    row: int
    network: Transformer
    plan: Plan
    batch: int
    gpus: int
    measured: float
    work: Training

    @property
    def group(self) -> tuple:
        """Equal model, GPUs and global batch."""
        return (self.network, self.gpus, self.batch)


def read_cases(path: str | Path) -> list[Case]:
    """Rows of a table in the format of ``vtrain_singlenode_a100.csv`` or ``megatron_seqsel_table5.csv``.

    Raises: UsageError for a table of neither format, or a field that is not a number (with file and row).
    """
    rows = read_csv(path)
    if "iter_time_ms" in rows[0]:
        make = _vtrain
    elif "iter_time_s_measured" in rows[0]:
        make = _megatron
    else:
        raise UsageError(f"{path}: has neither a column iter_time_ms nor iter_time_s_measured", path=str(path))
    cases = []
    for number, row in enumerate(rows, 1):
        try:
            cases.append(make(number, row))
        except (ValueError, KeyError) as error:
            raise UsageError(f"{path}, row {number}: {error}", path=str(path), row=number) from error
    return cases


def _network(row: Mapping[str, str], batch: int, name: str, ffn: int) -> Transformer:
    sizes = [int(row[key]) for key in ("layers", "hidden", "heads", "seq")]
    return Transformer(name, sizes[0], sizes[1], sizes[2], sizes[3], VOCABULARY, ffn=ffn, batch=batch)


def _vtrain(number: int, row: Mapping[str, str]) -> Case:
    batch = int(row["global_batch"])
    plan = Plan(
        data=int(row["dp"]),
        tensor=int(row["tp"]),
        pipeline=int(row["pp"]),
        micro=int(row["micro_batch"]),
        recompute="full" if row["activation_checkpoint"].startswith("true") else "none",
    )
    # DeepSpeed reduces 16-bit gradients.
    work = Training(batch, gradient_bytes=2, optimizer_traffic=MEGATRON_TRAFFIC)
    network = _network(row, batch, f"gpt-{row['hidden']}x{row['layers']}", 0)
    return Case(
        int(row.get("idx", number)), network, plan, batch, int(row["num_gpus"]), float(row["iter_time_ms"]) / 1e3, work
    )


def _megatron(number: int, row: Mapping[str, str]) -> Case:
    batch, chunks = int(row["global_batch"]), int(row["interleave_v"])
    recompute, _, extra = row["recompute"].partition("+")
    plan = Plan(
        data=int(row["dp"]),
        tensor=int(row["tp"]),
        pipeline=int(row["pp"]),
        micro=int(row["micro_batch"]),
        schedule="interleaved" if chunks > 1 else "1f1b",
        chunks=chunks,
        recompute=recompute,
        sequence_parallel=extra == "sequence_parallel",
    )
    network = _network(row, batch, row["model"], int(row["ffn"]))
    return Case(
        number,
        network,
        plan,
        batch,
        int(row["num_gpus"]),
        float(row["iter_time_s_measured"]),
        Training(batch, optimizer_traffic=MEGATRON_TRAFFIC),
    )


class Bench:
    """Cases prepared for repeated prediction with changing constants."""

    def __init__(self, cases: Sequence[Case]) -> None:
        if not cases:
            raise UsageError("no cases to predict")
        self.cases = list(cases)
        self.measured = np.array([case.measured for case in cases])
        places: dict[tuple, list[int]] = {}
        for position, case in enumerate(cases):
            places.setdefault((*case.group, case.work), []).append(position)
        self.prepared: list[tuple[list[int], Model, Plans]] = [
            (where, cases[where[0]].network.build(), Plans.of(cases[i].plan for i in where))
            for where in places.values()
        ]

    def predict(self, cluster: Cluster, overhead: float = 0.0) -> Floats:
        """Seconds per case."""
        made = np.empty(len(self.cases))
        for where, model, plans in self.prepared:
            case = self.cases[where[0]]
            work = replace(case.work, overhead=case.work.overhead + overhead)
            made[where] = estimate(model, cluster.resized(case.gpus), plans, work).time.total
        return made


@dataclass(frozen=True)
class Constant:
    """A constant of the model: how to set it, the value that switches its effect off, and the range of a fit."""

    name: str
    neutral: float
    low: float
    high: float
    put: Callable[[Cluster, float], Cluster]
    get: Callable[[Cluster], float]


def _gpu_constant(name: str, field: str, neutral: float, low: float, high: float) -> Constant:
    def put(cluster: Cluster, value: float) -> Cluster:
        def change(gpu: Gpu) -> Gpu:
            return replace(gpu, **{field: int(value) if field == "multiprocessors" else value})

        return replace(cluster, groups=tuple(replace(group, gpu=change(group.gpu)) for group in cluster.groups))

    return Constant(name, neutral, low, high, put, lambda cluster: float(getattr(cluster.gpu, field)))


def _link_constant(name: str, link: str, field: str, neutral: float, low: float, high: float) -> Constant:
    def put(cluster: Cluster, value: float) -> Cluster:
        return replace(cluster, **{link: replace(getattr(cluster, link), **{field: value})})

    return Constant(name, neutral, low, high, put, lambda cluster: float(getattr(getattr(cluster, link), field)))


CONSTANTS: dict[str, Constant] = {
    constant.name: constant
    for constant in (
        _gpu_constant("gemm_efficiency", "gemm_efficiency", 1.0, 0.5, 0.95),
        _gpu_constant("gemm_ramp", "gemm_ramp", 0.0, 8.0, 512.0),
        _gpu_constant("multiprocessors", "multiprocessors", 1, 1, 1),
        _gpu_constant("memory_efficiency", "memory_efficiency", 1.0, 0.4, 0.95),
        _gpu_constant("kernel_gap", "kernel_gap", 0.0, 5e-7, 3e-5),
        _gpu_constant("launch", "launch", 0.0, 5e-6, 2e-4),
        _link_constant("intra.efficiency", "intra", "efficiency", 1.0, 0.3, 1.0),
        _link_constant("intra.call", "intra", "call", 0.0, 5e-6, 1e-3),
        _link_constant("intra.hop", "intra", "hop", 0.0, 5e-7, 1e-3),
        _link_constant("inter.efficiency", "inter", "efficiency", 1.0, 0.3, 1.0),
        _link_constant("inter.call", "inter", "call", 0.0, 5e-6, 1e-3),
        _link_constant("inter.hop", "inter", "hop", 0.0, 5e-7, 1e-3),
    )
}

FITTED = ("gemm_efficiency", "memory_efficiency", "kernel_gap", "launch", "intra.call", "intra.hop")
"""What a calibration may change, besides a fixed overhead per step: six constants of a machine and its software."""


@dataclass(frozen=True)
class Calibration:
    """Result of a fit: the cluster with its constants, and seconds of fixed overhead per step."""

    cluster: Cluster
    overhead: float
    rows: tuple[int, ...]
    values: dict[str, float]


def calibrate(cases: Sequence[Case], cluster: Cluster, names: Sequence[str] = FITTED) -> Calibration:
    """Fits constants to measured cases: least squares of log(predicted / measured), with a soft loss.

    Args: cases: those, and only those, that may be looked at; names: of ``CONSTANTS``.
    Raises: UsageError if there are fewer cases than constants.
    """
    from scipy.optimize import least_squares

    if len(cases) <= len(names):
        raise UsageError(f"{len(cases)} rows cannot calibrate {len(names) + 1} constants", rows=len(cases))
    bench, constants = Bench(cases), [CONSTANTS[name] for name in names]
    low = np.log([constant.low for constant in constants] + [1e-5])
    high = np.log([constant.high for constant in constants] + [0.1])

    def built(x: Floats) -> tuple[Cluster, float]:
        made = cluster
        for constant, value in zip(constants, np.exp(x), strict=False):
            made = constant.put(made, float(value))
        return made, float(np.exp(x[-1]))

    # A constant whose effect the cluster leaves out starts in the middle of its range, or the fit may never see it.
    values = [(c.get(cluster), (c.low * c.high) ** 0.5, c.neutral) for c in constants]
    start = np.log([middle if value == neutral else value for value, middle, neutral in values] + [1e-3])
    start = np.clip(start, low + 1e-3, high - 1e-3)
    found = least_squares(
        lambda x: np.log(bench.predict(*built(x)) / bench.measured),
        start,
        bounds=(low, high),
        loss="soft_l1",
        f_scale=0.05,
        max_nfev=40,
        xtol=1e-4,
        ftol=1e-5,
    )
    fitted, overhead = built(found.x)
    values = dict(zip([*names, "overhead"], np.exp(found.x).tolist(), strict=True))
    return Calibration(fitted, overhead, tuple(case.row for case in cases), values)


@dataclass(frozen=True)
class GroupScore:
    """One group of equal model, GPUs and global batch."""

    name: str
    rows: int
    spearman: float
    regret: float


@dataclass(frozen=True)
class Score:
    """How good predictions are.  ``mape`` and ``worst`` are fractions; groups have at least ``least`` rows."""

    rows: int
    mape: float
    worst: float
    bias: float
    groups: tuple[GroupScore, ...]

    @property
    def spearman(self) -> float:
        """Median over groups (nan without groups)."""
        return float(np.median([group.spearman for group in self.groups])) if self.groups else float("nan")

    @property
    def regret(self) -> float:
        """Mean over groups of measured(plan we would choose) / measured(best)."""
        return float(np.mean([group.regret for group in self.groups])) if self.groups else float("nan")


def score(cases: Sequence[Case], predicted: Floats, least: int = 5) -> Score:
    """Errors over all cases, rank correlation and regret per group."""
    measured = np.array([case.measured for case in cases])
    relative = predicted / measured - 1
    places: dict[tuple, list[int]] = {}
    for position, case in enumerate(cases):
        places.setdefault(case.group, []).append(position)
    groups = []
    for key, where in places.items():
        if len(where) < least:
            continue
        ours, true = predicted[where], measured[where]
        name = f"{key[0].name} on {key[1]} GPUs, batch {key[2]}"
        groups.append(
            GroupScore(name, len(where), rank_correlation(ours, true), float(true[np.argmin(ours)] / true.min()))
        )
    return Score(
        len(cases), float(np.abs(relative).mean()), float(np.abs(relative).max()), float(relative.mean()), tuple(groups)
    )


def rank_correlation(first: Floats, second: Floats) -> float:
    """Spearman's rho: the correlation of ranks (ties share their mean rank)."""
    ranks = []
    for values in (np.asarray(first), np.asarray(second)):
        less = (values[:, None] > values[None, :]).sum(1)
        ranks.append(less + ((values[:, None] == values[None, :]).sum(1) - 1) / 2.0)
    if np.ptp(ranks[0]) == 0 or np.ptp(ranks[1]) == 0:
        return 0.0
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def constant_efficiency(cases: Sequence[Case], cluster: Cluster, fit_on: Sequence[Case]) -> Floats:
    """The naive baseline: FLOPs / (GPUs peak efficiency), times the pipeline bubble (m + p - 1)/m.

    FLOPs: 3 forward passes (4 with full recomputation); one efficiency, fitted on ``fit_on`` (median of measured
    ratios).
    """

    def ideal(case: Case) -> float:
        model, plan = case.network.build(), case.plan
        passes = 4 if plan.recompute == "full" else 3
        count = case.batch / (plan.data * plan.micro)
        bubble = (count + (plan.pipeline - 1) / plan.chunks) / count
        return passes * model.forward_flops * case.batch / (case.gpus * cluster.gpu.peak) * bubble

    efficiency = float(np.median([ideal(case) / case.measured for case in fit_on]))
    return np.array([ideal(case) / efficiency for case in cases])


def ablation(cases: Sequence[Case], cluster: Cluster, overhead: float = 0.0) -> dict[str, float]:
    """MAPE with each constant's effect switched off in turn (``none``: all on)."""
    bench = Bench(cases)

    def error(changed: Cluster, extra: float) -> float:
        return float(np.abs(bench.predict(changed, extra) / bench.measured - 1).mean())

    made = {"none": error(cluster, overhead)}
    for name, constant in CONSTANTS.items():
        if constant.get(cluster) != constant.neutral:
            made[name] = error(constant.put(cluster, constant.neutral), overhead)
    if overhead:
        made["overhead"] = error(cluster, 0.0)
    return made
