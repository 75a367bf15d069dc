"""Table 5.6 of the thesis beside the model that reproduces it.

python benchmarks/planner/thesis_table_5_6.py              table, model and residuals
python benchmarks/planner/thesis_table_5_6.py --json -     one object per cell
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from jcuts.plan.calibrate.tables import read_csv, shipped
from jcuts.plan.cost import thesis

TRANSPOSED = (((8, 1, 4), (4, 2, 4)), "Turing-NLG", "A", "AR")
"""The two cells of the table that stand in each other's place."""


def cells(*, swap: bool = False, as_tabulated: bool = True) -> list[dict]:
    """One object per printed cell: dp, wp, p, model, cluster, policy, printed, model_value."""
    made = []
    for row in read_csv(shipped("table_5_6.csv")):
        dims = (int(row["dp"]), int(row["wp"]), int(row["p"]))
        value = thesis.normalised(row["model"], row["cluster"], dims, row["policy"], as_tabulated=as_tabulated)
        column = {key: row[key] for key in ("model", "cluster", "policy")}
        place = dict(zip(("dp", "wp", "p"), dims, strict=True))
        made.append(place | column | {"printed": float(row["normalized_time"]), "model_value": value})
    if swap:
        (first, second), *column = TRANSPOSED
        pair = [
            next(
                cell
                for cell in made
                if (cell["dp"], cell["wp"], cell["p"]) == dims
                and [cell["model"], cell["cluster"], cell["policy"]] == column
            )
            for dims in (first, second)
        ]
        pair[0]["printed"], pair[1]["printed"] = pair[1]["printed"], pair[0]["printed"]
    return made


def score(made: list[dict]) -> tuple[int, int, float]:
    """Cells within 0.015, cells within the printed rounding (0.005), median relative error."""
    off = [abs(cell["model_value"] - cell["printed"]) for cell in made]
    relative = [error / cell["printed"] for error, cell in zip(off, made, strict=True)]
    return sum(o <= 0.015 for o in off), sum(o <= 0.005 + 1e-9 for o in off), statistics.median(relative)


def show(made: list[dict]) -> None:
    """The table as printed beside the model, then residuals per column."""
    columns = [(m, c, p) for m in thesis.MODELS for c in ("A", "B") for p in thesis.POLICIES]
    by = {(c["dp"], c["wp"], c["p"], c["model"], c["cluster"], c["policy"]): c for c in made}
    print("printed / model (a star: off by more than 0.015)")
    print(f"{'(d, w, p)':12}" + "".join(f"{m[:6] + ' ' + c + ' ' + p:>17}" for m, c, p in columns))
    for dims in dict.fromkeys(key[:3] for key in by):
        line = f"{dims!s:12}"
        for column in columns:
            cell = by.get(dims + column)
            if cell is None:
                line += f"{'N/A':>17}"
                continue
            star = "*" if abs(cell["printed"] - cell["model_value"]) > 0.015 else " "
            line += f"{cell['printed']:8.2f}/{cell['model_value']:7.2f}{star}"
        print(line)
    print("\ncolumn            cells  <=0.015  <=0.005  max |residual|  median relative")
    for column in columns:
        mine = [c for c in made if (c["model"], c["cluster"], c["policy"]) == column]
        near, exact, median = score(mine)
        worst = max(abs(c["printed"] - c["model_value"]) for c in mine)
        print(f"{' '.join(column):18}{len(mine):5}{near:9}{exact:9}{worst:16.3f}{median:16.3%}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write the cells as a JSON list; - is standard output")
    arguments = parser.parse_args(argv)
    made = cells()
    if arguments.json:
        text = json.dumps(made, indent=1)
        if arguments.json == "-":
            print(text)
        else:
            Path(arguments.json).write_text(text + "\n")
        return 0
    show(made)
    for label, swap in (("as the table stands", False), ("its two transposed cells swapped", True)):
        near, exact, median = score(cells(swap=swap))
        print(
            f"{label}: {near} of {len(made)} cells within 0.015, {exact} within the printed rounding, "
            f"median relative error {median:.3%}"
        )
    print("\nlabels and bandwidths put right (as_tabulated=False), shortest communication first:")
    for name, model in thesis.MODELS.items():
        for cluster in (thesis.CLUSTERS["A"], thesis.CLUSTERS["B"]):
            stages = 4 if name == "Turing-NLG" else None
            best = thesis.optima(model, cluster, as_tabulated=False, max_stages=stages)[:3]
            scale = thesis.NORMALISER[name, cluster.name]
            found = ", ".join(f"{policy} {dims} {seconds / scale:.2f}x" for seconds, dims, policy in best)
            print(f"  {name:10} on {cluster.name}: {found}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
