"""Errors by release: errors on every shipped table, recorded per release, so that none gets worse unseen."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from jcuts.plan.calibrate import memory_table, validate
from jcuts.plan.calibrate.tables import read_csv, shipped
from jcuts.plan.cost.inference import Serving, serve
from jcuts.plan.spec import cluster as clusters
from jcuts.plan.spec import model as models

SLACK = 2.0**-6
"""Fraction of a value that may be lost to rounding of other machines."""

RECORD = "errors_by_release.csv"
"""Columns release, table, metric, value."""

HIGHER_IS_BETTER = frozenset({"spearman"})
"""Metrics that are no errors."""


def _megatron() -> dict[str, float]:
    cases = validate.read_cases(shipped("megatron_seqsel_table5.csv"))
    found = validate.score(cases, validate.Bench(cases).predict(clusters.load("dgx-a100")))
    return {"mape": found.mape, "max": found.worst}


def vtrain_overhead() -> float:
    """Seconds per step outside of the cost model, of the fit that the preset vtrain-a100 holds."""
    return float(read_csv(shipped("vtrain_overhead.csv"))[0]["overhead_s"])


def _vtrain() -> dict[str, float]:
    """The rows that calibration never saw, with the preset that holds the fit and its overhead per step."""
    named = {int(word) for line in _lines("vtrain_calibration_rows.txt") for word in line.split()}
    where = clusters.load("vtrain-a100")
    cases = [c for c in validate.read_cases(shipped("vtrain_singlenode_a100.csv")) if c.row not in named]
    found = validate.score(cases, validate.Bench(cases).predict(where, overhead=vtrain_overhead()))
    return {"mape": found.mape, "max": found.worst, "spearman": found.spearman, "regret": found.regret}


def _flexgen() -> dict[str, float]:
    errors = [predicted / measured - 1 for predicted, measured in flexgen()]
    return {"mape": float(np.abs(errors).mean()), "max": float(np.abs(errors).max())}


def _memory() -> dict[str, float]:
    cases = memory_table.read_cases(shipped("simumax_b200_llama3.csv"))
    found = memory_table.score(cases, memory_table.predict(cases))
    return {"mape": found.mape, "max": found.worst}


TABLES: dict[str, Callable[[], dict[str, float]]] = {
    "step time, megatron_seqsel_table5": _megatron,
    "step time, vtrain_singlenode_a100": _vtrain,
    "tokens/s, flexgen_t4_throughput": _flexgen,
    "memory, simumax_b200_llama3": _memory,
}
"""Every table by name, with its metrics."""


def current() -> dict[tuple[str, str], float]:
    """(table, metric) to value, as the code stands."""
    return {(table, metric): value for table, make in TABLES.items() for metric, value in make().items()}


def recorded() -> dict[str, dict[tuple[str, str], float]]:
    """Release to (table, metric) to value, oldest first."""
    made: dict[str, dict[tuple[str, str], float]] = {}
    for row in read_csv(shipped(RECORD)):
        made.setdefault(row["release"], {})[row["table"], row["metric"]] = float(row["value"])
    return made


def worse(
    now: dict[tuple[str, str], float], before: dict[tuple[str, str], float], slack: float
) -> list[tuple[str, str]]:
    """What got worse by more than ``slack`` (a fraction of the value), and what is no longer measured."""
    made = []
    for key, value in before.items():
        sign = -1 if key[1] in HIGHER_IS_BETTER else 1
        if key not in now or sign * now[key] > sign * value + slack * abs(value):
            made.append(key)
    return made


def flexgen() -> list[tuple[float, float]]:
    """(predicted, measured) tokens per second of FlexGen's uncompressed rows on a T4."""
    where = clusters.load("t4-gcp")
    made = []
    for row in read_csv(shipped("flexgen_t4_throughput.csv")):
        if row["system"] != "FlexGen":
            continue
        split = [int(word) for word in row["percent_wg_wc_cg_cc_hg_hc"].split()]
        plan = Serving(
            int(row["prompt_len"]),
            int(row["gen_len"]),
            int(row["gpu_batch"]),
            int(row["num_gpu_batches"]),
            split[0] / 100,
            cache="gpu" if split[2] == 100 else "host",
            host_attention="--cpu" in row["flags"],
        )
        made_model = models.load(row["model"].lower(), sequence=plan.prompt + plan.generate)
        made.append((serve(made_model, where, plan).tokens_per_second, float(row["tokens_per_s_measured"])))
    return made


def _lines(name: str) -> list[str]:
    return [line for line in shipped(name).read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
