"""A ResNet-18 step measured by ``optimize(workspace_limit=...)``, then analysed and planned without the device.

    python benchmarks/microbatch/round_trip.py --out DIR --dry-run     # no GPU: the tests' cuDNN, a tiny network
    python benchmarks/microbatch/round_trip.py --out DIR               # on a GPU: 224x224, batch 128, TF32

One process measures and prints its divisions.  Others, which have neither cuDNN nor its cache, read the copied file by
``jcuts microbatch analyse`` and ``jcuts best-batch --db``.  The second half needs no device at all: the kernels' times
of an H200 (`benchmarks/results/microbatch`) become a database, a modelled device is added to it, and the same commands
read it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from benchmarks.microbatch.on_gpu import prepare  # noqa: E402

NETWORK = "ResNet-18"


def measure(out: Path, dry: bool, limit: int) -> dict[str, Any]:
    """The measuring process: one call, and what it chose."""
    prepare(out, dry)
    import jax

    import jcuts
    from benchmarks.microbatch.training_models import gradients, inputs_of
    from jcuts.tune.cudnn.measurer import database_path

    def resnet18_step(*arguments: Any) -> Any:
        return step(*arguments)

    step = gradients(NETWORK, "default", tiny=dry)
    arguments = inputs_of(NETWORK, 4 if dry else 128, tiny=dry)
    fast = jcuts.optimize(resnet18_step, mode="fusion", workspace_limit=limit)
    jax.block_until_ready(fast(*arguments))
    rows = fast.explain(*arguments).divisions
    shutil.copy(database_path(), out / "measured.sqlite")
    return {
        "convolutions": len(rows),
        "divided": sum(bool(row.division) and not row.division.startswith("1 x") for row in rows),
        "by cuDNN": sum(bool(row.division) for row in rows),
        "seconds": sum(row.seconds or 0.0 for row in rows),
        "chosen": {row.layer: row.division for row in rows},
    }


def recorded(path: Path) -> None:
    """A database of an H200's recorded times of ResNet-18's kernels, and of two modelled devices."""
    from benchmarks.microbatch.figures.data import TABLES
    from benchmarks.microbatch.modelled_device import Modelled, training_step
    from benchmarks.microbatch.offline import database_of
    from benchmarks.microbatch.table_run import BATCHES, in_mode
    from jcuts.microbatch.database import Database
    from jcuts.microbatch.timings import policy_sizes

    source, _ = database_of(*TABLES)
    database = Database(path)
    network = in_mode(training_step(NETWORK, BATCHES[NETWORK]), "tf32")
    wanted = {use.convolution for use in network.uses}
    for entry in source.entries():
        if entry.convolution in wanted:
            database.record(entry.device, entry.convolution, entry.batch, entry.micros)
    for modelled in (Modelled("modelled, fast"), Modelled("modelled, slow", flops=5e12, bytes_=3e11)):
        for convolution in wanted:
            for size in policy_sizes("powerOfTwo", BATCHES[NETWORK]):
                database.record(modelled.device, convolution, size, modelled(convolution, size))
    database.record_network(network)


def command(*arguments: str) -> dict[str, Any]:
    """The JSON that a ``jcuts`` command writes in a process without cuDNN, GPU and cache."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JCUTS_")}
    environment |= {"JAX_PLATFORMS": "cpu", "JCUTS_CACHE_DIR": "/nonexistent", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-m", "jcuts", *arguments], env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"jcuts {' '.join(arguments)}: {done.stderr[-800:]}")
    return json.loads(done.stdout)


def read(path: Path, limit: str, batch: int, device: str, devices: tuple[str, ...], network: str) -> dict[str, Any]:
    """WR by policy, WD under both constraints, and a split over devices, from a file alone."""
    base = ("microbatch", "analyse", str(path), "--device", device, "--network", network, "--json", "-")
    found: dict[str, Any] = {}
    for policy in ("undivided", "powerOfTwo", "all"):
        made = command(*base, "--limit", limit, "--policy", policy)
        found[f"WR {limit}, {policy}"] = {k: made[k] for k in ("seconds", "workspace_total", "workspace_peak")}
    found["chosen"] = {k["name"]: k["division"] for k in made["kernels"]}
    total = made["workspace_total"]
    for constraint in ("paper", "liveness"):
        made = command(*base, "--total", str(total), "--constraint", constraint)
        found[f"WD {total} B, {constraint}"] = {k: made[k] for k in ("seconds", "workspace_total", "workspace_peak")}
    split = command(
        *("best-batch", "--db", str(path), "--network", network, "--batch", str(batch), "--limit", limit),
        *("--json", "--devices", *devices),
    )
    found["split"] = {name: split[name] for name in ("names", "sizes", "seconds", "even")}
    return found


def main() -> int:
    """Runs both halves and writes ``round_trip.json``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dry-run", action="store_true", help="no GPU: the tests' cuDNN, a tiny network")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    limit = 64 << (10 if options.dry_run else 20)
    if options.measure:
        print(json.dumps(measure(options.out, options.dry_run, limit)))
        return 0
    child = [sys.executable, __file__, "--out", str(options.out), "--measure", *["--dry-run"] * options.dry_run]
    done = subprocess.run(child, capture_output=True, text=True)
    if done.returncode:
        print(done.stderr, file=sys.stderr)
        return 1
    mine = json.loads(done.stdout.splitlines()[-1])
    device = "host" if options.dry_run else "NVIDIA"
    text = f"{limit >> (10 if options.dry_run else 20)}{'KiB' if options.dry_run else 'MiB'}"
    batch = 4 if options.dry_run else 128
    there = read(options.out / "measured.sqlite", text, batch, device, (device, device), "resnet18_step")
    path = options.out / "recorded.sqlite"
    path.unlink(missing_ok=True)
    recorded(path)
    result = {
        "measured here": mine,
        "read elsewhere": there,
        "recorded H200": read(
            path, "64MiB", 128, "H200", ("modelled, fast", "modelled, fast", "modelled, slow"), NETWORK
        ),
    }
    (options.out / "round_trip.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for name, row in result.items():
        print(name, json.dumps({k: v for k, v in row.items() if k != "chosen"}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
