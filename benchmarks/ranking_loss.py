"""Ranking quality of a kernel family's cost model on recorded schedules: what the best of its first few loses.

    python benchmarks/ranking_loss.py gemv                      # the recorded H200 schedules, by the H200's rates
    python benchmarks/ranking_loss.py gemv --gpu H100           # those of an H100, by its own rates
    python benchmarks/ranking_loss.py gemv --gpu H100 --rates H200

For every operation of `refit.FAMILIES` and of `OTHER_GPUS`: the time of the best of the model's first k schedules over
that of the fastest recorded, the same of k random ones (expected), and the rank correlation.  Nothing runs on a GPU.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import refit  # noqa: E402

OTHER_GPUS = {
    ("gemv", "H100"): ("gpu_kernels/gpu_gemv_h100_2026-11-25.json",),
    ("skinny_gemm", "H100"): (
        "gpu_kernels/gpu_few_rows_h100_2026-11-26.json",
        "gpu_kernels/gpu_few_rows_16_4_h100_2026-11-26.json",
        "gpu_kernels/gpu_few_rows_row_major_h100_2026-11-26.json",
    ),
}
"""Results of other GPUs than the H200, by (family, GPU); GEMV's coefficients were not fitted to them."""


def by_case(samples: Sequence[refit.Sample]) -> dict[str, list[tuple[float, float]]]:
    """(cycles, seconds) of all schedules of every operation."""
    found: dict[str, list[tuple[float, float]]] = {}
    for sample in samples:
        found.setdefault(sample.case, []).append((sample.cycles(), sample.seconds))
    return found


def loss(pairs: Sequence[tuple[float, float]], first: int) -> float:
    """Time of the best of the first by the model over that of the fastest, less one."""
    ranked = [seconds for _, seconds in sorted(pairs)]
    return min(ranked[:first]) / min(ranked) - 1.0


def random_loss(pairs: Sequence[tuple[float, float]], first: int) -> float:
    """Expected loss of so many random schedules."""
    times = sorted(seconds for _, seconds in pairs)
    all_draws, expected = math.comb(len(times), first), 0.0
    for place, seconds in enumerate(times):  # it is the fastest drawn, the others are slower
        expected += math.comb(len(times) - place - 1, first - 1) / all_draws * seconds
    return expected / times[0] - 1.0


def summary(samples: Sequence[refit.Sample], first: int) -> dict[str, float]:
    """Over all operations. Args: first: schedules that are taken."""
    from scipy.stats import spearmanr

    cases = {name: pairs for name, pairs in by_case(samples).items() if len(pairs) > first}
    losses = [loss(pairs, first) for pairs in cases.values()]
    ranks = [spearmanr(*zip(*pairs, strict=True)).statistic for pairs in cases.values()]
    return {
        "operations": len(cases),
        "schedules": sum(map(len, cases.values())),
        "within_2_percent": sum(x <= 0.02 for x in losses),
        "within_4_percent": sum(x <= 0.04 for x in losses),
        "median_loss_percent": round(100 * statistics.median(losses), 2),
        "worst_loss_percent": round(100 * max(losses), 2),
        "random_mean_loss_percent": round(100 * statistics.mean(random_loss(p, first) for p in cases.values()), 2),
        "mean_loss_percent": round(100 * statistics.mean(losses), 2),
        "median_rank_correlation": round(statistics.median(r for r in ranks if not math.isnan(r)), 3),
    }


def recorded(family: str, gpu: str) -> list[Path]:
    """Results files of a family on a GPU. Raises: SystemExit where there are none, with what is there."""
    if gpu == "H200":
        return refit.recorded(family)[1]
    if (family, gpu) not in OTHER_GPUS:
        raise SystemExit(f"{family}: nothing is recorded on {gpu!r} (recorded: {sorted(OTHER_GPUS)})")
    return [refit.RESULTS / name for name in OTHER_GPUS[family, gpu]]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", choices=sorted(refit.FAMILIES))
    parser.add_argument("--gpu", default="H200", help="where the schedules were measured (%(default)s)")
    parser.add_argument("--rates", help="GPU whose rates the model takes (default: that one)")
    parser.add_argument(
        "--first", type=int, nargs="+", default=[1, 2, 4], help="schedules that are taken (%(default)s)"
    )
    options = parser.parse_args(arguments)
    rates = options.rates or options.gpu
    samples = refit.FAMILIES[options.family].samples(recorded(options.family, options.gpu), rates)
    for first in options.first:
        found = {"family": options.family, "gpu": options.gpu, "rates": rates, "first": first}
        print(json.dumps(found | summary(samples, first)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
