"""WR and WD on measured times, without a device: networks, and DeepBench's layers as one network.

    python benchmarks/microbatch/offline.py benchmarks/results/microbatch/gpu_microbatch_tables_h200_2026-11-22.json
    python benchmarks/microbatch/offline.py results/a/tables.json results/b/tables.json --json results/offline.json

The files are what `gpu_tables.py` writes.  A network is shown where the times of its kernels are, of nine
tenths of them at least.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from benchmarks.microbatch.conv_chains import text  # noqa: E402
from benchmarks.microbatch.gpu_tables import compared, compared_network, summary  # noqa: E402
from benchmarks.microbatch.modelled_device import training_step  # noqa: E402
from benchmarks.microbatch.table_run import BATCHES, MIB, MODES, MOST, in_mode  # noqa: E402
from jcuts.base.errors import JcutsError, UsageError  # noqa: E402
from jcuts.microbatch import batch_division_dp  # noqa: E402
from jcuts.microbatch.analysis import tables_of  # noqa: E402
from jcuts.microbatch.convolution import Convolution  # noqa: E402
from jcuts.microbatch.database import Database, Device  # noqa: E402
from jcuts.microbatch.deepbench import layers  # noqa: E402
from jcuts.microbatch.network import Network, Use  # noqa: E402
from jcuts.microbatch.timings import MicroConfig  # noqa: E402
from jcuts.xla.cudnn import call as cudnn_call  # noqa: E402
from jcuts.xla.cudnn.plan import buffer_bytes  # noqa: E402


def database_of(*files: Path) -> tuple[Database, Device]:
    """The times of files of one device; of what is in several the last one's.  XLA's own convolutions are left out."""
    found: dict[tuple[Convolution, int], dict[tuple[str, str], MicroConfig]] = {}
    devices = []
    for file in files:
        data = json.loads(file.read_text(encoding="utf-8"))
        devices.append(Device(data["device"], "", ""))
        for row in data["tables"]:
            convolution = Convolution.from_json(row["convolution"])
            for size, micros in row["sizes"].items():
                made = [MicroConfig(int(size), *micro) for micro in micros if cudnn_call.is_cudnn(micro[0])]
                found.setdefault((convolution, int(size)), {}).update({(m.algorithm, m.math): m for m in made})
    if len(set(devices)) != 1:
        raise UsageError(f"times of several devices: {', '.join(device.name for device in devices)}")
    database = Database(None)
    for (convolution, size), micros in found.items():
        database.record(devices[0], convolution, size, list(micros.values()))
    return database, devices[0]


def networks(database: Database, device: Device) -> list[tuple[str, Network]]:
    """Whatever is there whole: training steps, and the layers of DeepBench with 4 times their batch."""
    found = []
    for name, batch in BATCHES.items():
        for precision, mode in MODES.items():
            step = in_mode(training_step(name, batch, "float16" if precision == "half" else "float32"), precision)
            there = tuple(u for u in step.uses if not database.missing(device, u.convolution, (u.batch,)))
            if MOST <= len(there) / len(step.uses) < 1:
                title = f"{name}, batch {batch}, {mode}: {len(there)} of its {len(step.uses)} kernels"
                found.append((title, dataclasses.replace(step, uses=there)))
            found.append((f"{name}, batch {batch}, {mode}", step))
    for dtype, precision, mode in (
        ("float32", "float32", MODES["float32"]),
        ("float32", "tf32", MODES["tf32"]),
        ("float16", "float32", "half"),
    ):
        uses = [Use(f"{c.index}", c.convolution, 4 * c.batch, precision) for c in layers("forward", dtype)]
        there = tuple(u for u in uses if not database.missing(device, u.convolution, (u.batch,)))
        if there:
            found.append((f"DeepBench, {len(there)} layers, {mode}", Network("DeepBench", there)))
    return [
        (name, n)
        for name, n in found
        if all(not database.missing(device, use.convolution, (use.batch,)) for use in n.uses)
    ]


def memory(network: Network, database: Database, device: Device) -> dict[str, Any]:
    """What layers take, as the paper's figure 12: images, results, filters, and the largest workspace of their kernels.

    Single calls within 512 MiB against WR within 64 MiB; a layer's kernels are those of equal shapes.
    """
    layers: dict[str, dict[str, int]] = {}
    seconds = {"single": 0.0, "WR": 0.0}
    for use, table in zip(network.uses, tables_of(network, database, device), strict=True):
        single = batch_division_dp.undivided(table, use.batch, 512 * MIB, precision=use.precision)
        divided = batch_division_dp.divide(table, use.batch, 64 * MIB, precision=use.precision)
        if single is None:
            raise UsageError(f"no single call of {use.convolution} fits 512 MiB")
        row = layers.setdefault(str(dataclasses.replace(use.convolution, kind="forward")), {})
        row["data"] = sum(buffer_bytes(use.convolution, use.batch))
        for name, division in (("single", single), ("WR", divided)):
            row[name] = max(row.get(name, 0), division.workspace)
            seconds[name] += division.seconds
    ratios = {name: (row["data"] + row["single"]) / (row["data"] + row["WR"]) for name, row in layers.items()}
    slower = seconds["WR"] / seconds["single"]
    return {"layers": layers, "ratios": ratios, "most": max(ratios.values()), "slower": slower}


def lines(name: str, row: dict[str, Any]) -> list[str]:
    """One network as text."""
    free = row["no limit"]
    out = [
        f"{name}: {row['kernels']} kernels; without a limit {1e3 * free['seconds']:.2f} ms, "
        f"{text(free['sum'])} in all, {text(free['largest'])} the largest"
    ]
    for limit, entry in row.items():
        if not isinstance(entry, dict) or "WR seconds" not in entry:
            continue
        single = "-" if entry["single calls"] is None else f"{1e3 * entry['single calls']:.2f}"
        wr_ms = 1e3 * entry["WR seconds"]
        out.append(f"  {limit}: WR {wr_ms:.2f} ms, single calls {single}; {text(entry['sum'])} in all")
        for share, wd in entry.items():
            if isinstance(wd, dict):
                ms, there = 1e3 * wd["seconds"], 1e3 * wd["WR at its largest"]
                proven = "" if wd["proven"] else ", not proven"
                out.append(f"    {share}: {ms:.2f} ms, largest {text(wd['largest'])} (WR there {there:.2f} ms){proven}")
    return out


def main() -> int:
    """Prints every network."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", type=Path, nargs="+")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    database, device = database_of(*options.tables)
    found: dict[str, Any] = {"device": device.name}
    for name, network in networks(database, device):
        # Of DeepBench's layers no sizes were timed below those that fit 64 MiB.
        limits = (64 * MIB, 512 * MIB) if network.name == "DeepBench" else (8 * MIB, 64 * MIB, 512 * MIB)
        run = SimpleNamespace(database=database, device=device, limits=limits)
        if network.name == "DeepBench":
            tables = [database.table(device, use.convolution) for use in network.uses]
            pairs = zip(network.uses, tables, strict=True)
            rows = [compared(table, use.batch, 64 * MIB, str(use.precision)) for use, table in pairs]
            found[f"{name}, 64 MiB, layer by layer"] = summary(rows)
            print(f"{name}, 64 MiB, layer by layer: {json.dumps(summary(rows))}")
        try:
            found[name] = compared_network(run, network)  # type: ignore[arg-type]
        except JcutsError as error:
            print(f"{name}: {error.message[:200]}")
            continue
        print("\n".join(lines(name, found[name])), flush=True)
        if network.name != "DeepBench":
            found[name]["memory of layers"] = row = memory(network, database, device)
            print(f"  a layer takes 1/{row['most']:.2f} at best, all take {row['slower']:.2f} times as long")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
