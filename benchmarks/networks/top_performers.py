"""Counts the fastest compiler per workload, as Tables 5.3 and 5.4 of the thesis do, from recorded baselines.

    python benchmarks/networks/top_performers.py            # float32, weights as arguments, the thesis' eight networks

Competitors are the best XLA program of the row, `torch.compile` where it was measured, and jcuts.  Where jcuts runs an
XLA program the row is XLA's.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from benchmarks.networks.baseline_tables import RESULTS  # noqa: E402
from benchmarks.networks.joined_rows import Joined, joined, median  # noqa: E402
from benchmarks.networks.markdown_table import table  # noqa: E402

TYPES = {
    **dict.fromkeys(("ResNet50", "DenseNet121", "InceptionV3", "MobileNetV2"), "CNN"),
    **dict.fromkeys(("DeepSpeech2", "AttentionRNN"), "RNN"),
    **dict.fromkeys(("DLRM", "BERT_large"), "MLP"),
}
COMPETITORS = ("XLA", "torch.compile", "jcuts")


def fastest(row: Joined) -> str:
    """The competitor with the least time back to back."""
    times = {"XLA": row.best.seconds}
    if row.torch:
        times["torch.compile"] = median(row.torch)
    if row.ours is not None and not row.chosen.startswith("xla"):
        times["jcuts"] = row.ours
    return min(times, key=times.__getitem__)


def counts(rows: list[Joined], dtype: str, form: str) -> dict[str, Counter[str]]:
    """By type of model: rows in which each competitor is the fastest; rows without a time of jcuts are left out."""
    found: dict[str, Counter[str]] = {kind: Counter() for kind in ("CNN", "RNN", "MLP")}
    for row in rows:
        name = row.baseline["row"].split(":")[0].removesuffix("_training")
        wanted = (row.baseline["dtype"], row.baseline["form"], row.baseline["statistics"]) == (dtype, form, "trained")
        if wanted and name in TYPES and row.ours is not None:
            found[TYPES[name]][fastest(row)] += 1
    return found


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=RESULTS / "baselines")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--form", default="args", choices=("args", "closed"))
    options = parser.parse_args()
    found = counts(joined(options.folder, RESULTS), options.dtype, options.form)
    body = [[kind, *(found[kind][name] for name in COMPETITORS), sum(found[kind].values())] for kind in found]
    sums = [sum(column) for column in zip(*(row[1:] for row in body), strict=True)]
    print(table(("model type", *COMPETITORS, "rows"), [*body, ["total", *sums]]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
