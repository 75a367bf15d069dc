"""Timeline of data-parallel training steps by phase and process, as Figure 1 of the course report.

    python benchmarks/mlp/timeline.py --out DIR [--processes 2] [--hidden 1000] [--batch 800] [--steps 6] [--dry]
    python benchmarks/mlp/timeline.py --draw benchmarks/results/mlp/timeline_epyc_2026-11-29.json --svg FILE

Every step is four programs, each waited for: the rows of the mini-batch are put on the device, gradients of these rows,
their sum over the processes (`jax.lax.psum`, gloo), the update.  Times are of the machine's monotonic clock, which all
processes share.  A step that is one program (`training.py`) has no such borders; this one is to see where time goes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

from benchmarks.mlp import network  # noqa: E402
from benchmarks.mlp.digits import draw_digits  # noqa: E402
from benchmarks.mlp.machine import described, written  # noqa: E402
from benchmarks.mlp.network import Params, Training, initial  # noqa: E402
from benchmarks.mlp.training import LONGEST, free_port  # noqa: E402
from benchmarks.networks.bar_chart import COLOURS, svg_head  # noqa: E402

PHASES = ("batch to the device", "gradients", "all-reduce", "update")
LABEL = 70
PLOT = 860
ROW = 34
HEAD = 46


def one_process(job: dict[str, Any], rank: int) -> None:
    """Trains this rank's rows, writes the start and end of every phase, and its weights."""
    from benchmarks.mlp.training_process import pin

    pin(rank, job["processes"])
    import jax
    from jax.flatten_util import ravel_pytree
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from benchmarks.mlp.jax_network import AXIS, data_loss, update, weighted_batches

    jax.config.update("jax_enable_x64", True)
    if job["processes"] > 1:
        jax.distributed.initialize(f"localhost:{job['port']}", job["processes"], rank)
    mesh, here = Mesh(np.array(jax.devices()), (AXIS,)), jax.local_devices()[0]
    how, digits = Training(**job["training"]), digits_of(job)
    start = Params(*(jax.device_put(p, here) for p in initial(how.hidden, digits[0].shape[1])))
    restored = ravel_pytree(start)[1]
    gradients = jax.jit(lambda p, x, y, w: ravel_pytree(jax.grad(data_loss)(p, x, y, w))[0][None])
    rows = NamedSharding(mesh, PartitionSpec(AXIS, None))
    summed = jax.jit(lambda flat: flat.sum(0), out_shardings=NamedSharding(mesh, PartitionSpec()))
    updated = jax.jit(lambda p, flat: update(p, restored(flat), how))
    parts = weighted_batches(*digits, how.batch, job["processes"])[: job["steps"]]
    events: list[tuple[int, str, float, float]] = []

    def timed(step: int, phase: str, make: Any) -> Any:
        begin = time.monotonic()
        made = jax.block_until_ready(make())
        events.append((step, phase, begin, time.monotonic()))
        return made

    params = start
    for _ in range(2):  # everything is compiled in the first
        params = start
        events.clear()
        for step, part in enumerate(parts):
            mine = [a[rank * len(a) // job["processes"] : (rank + 1) * len(a) // job["processes"]] for a in part]
            batch = timed(step, PHASES[0], lambda mine=mine: jax.device_put(mine, here))
            flat = timed(step, PHASES[1], lambda p=params, b=batch: gradients(p, *b))
            shape = (job["processes"], flat.shape[1])
            whole = jax.make_array_from_single_device_arrays(shape, rows, [flat])
            total = timed(step, PHASES[2], lambda whole=whole: summed(whole))
            local = total.addressable_data(0)
            params = timed(step, PHASES[3], lambda p=params, g=local: updated(p, g))
    folder = Path(job["folder"])
    np.savez(folder / f"timeline_{rank}.npz", *map(np.asarray, params))
    (folder / f"timeline_{rank}.json").write_text(json.dumps(events), encoding="utf-8")


def digits_of(job: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Generated digits and their labels as rows of ten, equal in every process."""
    pixels, labels = draw_digits(job["count"], seed=1)
    return pixels.reshape(len(pixels), -1).astype(np.float64), np.eye(10)[labels]


def measured(job: dict[str, Any]) -> dict[str, Any]:
    """Starts the processes and collects their events; beside them how far the weights are from NumPy's.

    Raises: RuntimeError: a process failed; subprocess.TimeoutExpired.
    """
    folder = Path(job["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "timeline.json").write_text(json.dumps(job | {"port": free_port()}), encoding="utf-8")
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    environment.pop("XLA_FLAGS", None)  # one device per process
    command = [sys.executable, __file__, "--job", str(folder / "timeline.json"), "--rank"]
    ranks = range(job["processes"])
    started = [
        subprocess.Popen([*command, str(rank)], env=environment, stderr=subprocess.PIPE, text=True) for rank in ranks
    ]
    try:
        errors = [process.communicate(timeout=LONGEST)[1] for process in started]
    finally:
        for process in started:
            process.kill()
    for rank, process in enumerate(started):
        if process.returncode:
            raise RuntimeError(f"rank {rank} ended with {process.returncode}: {errors[rank][-2000:]}")
    how = Training(**job["training"])
    x, y = digits_of(job)
    used = how.batch * job["steps"]
    reference = network.train(x[:used], y[:used], how)
    events, apart = [], []
    for rank in ranks:
        with np.load(folder / f"timeline_{rank}.npz") as saved:
            apart.append(network.largest(network.differences(Params(*saved.values()), reference)))
        events.append(json.loads((folder / f"timeline_{rank}.json").read_text(encoding="utf-8")))
    first = min(event[2] for mine in events for event in mine)
    return {
        "events": [
            [[s, phase, round(a - first, 6), round(b - first, 6)] for s, phase, a, b in mine] for mine in events
        ],
        "shares": shares(events),
        "difference from NumPy": max(apart),
    }


def shares(events: Sequence[Sequence[Sequence[Any]]]) -> dict[str, float]:
    """Percent of all processes' time per phase, and between phases (waiting, dispatch, Python)."""
    spent = dict.fromkeys(PHASES, 0.0)
    whole = 0.0
    for mine in events:
        whole += mine[-1][3] - mine[0][2]
        for _, phase, begin, end in mine:
            spent[phase] += end - begin
    found = {phase: 100 * seconds / whole for phase, seconds in spent.items()}
    return found | {"between": 100 - sum(found.values())}


def drawn(found: dict[str, Any], *, most: int = 4) -> str:
    """The last steps as SVG: a row per process, a colour per phase."""
    events = found["events"]
    last = max(event[0] for event in events[0])
    shown = [[e for e in mine if e[0] > last - most] for mine in events]
    begin, end = min(mine[0][2] for mine in shown), max(mine[-1][3] for mine in shown)
    title = f"{min(most, last + 1)} training steps of {len(events)} processes on a CPU, {1e3 * (end - begin):.0f} ms"
    lines = svg_head(title, LABEL + PLOT + 20, HEAD + ROW * len(events) + 28)
    colours = dict(zip(PHASES, COLOURS[1:], strict=False))
    for k, phase in enumerate(PHASES):
        lines.append(f'<rect x="{LABEL + 170 * k}" y="28" width="11" height="11" fill="{colours[phase]}"/>')
        text = f"{phase} ({found['shares'][phase]:.0f} %)"
        lines.append(f'<text x="{LABEL + 170 * k + 16}" y="38">{text}</text>')
    for rank, mine in enumerate(shown):
        y = HEAD + ROW * rank
        lines.append(f'<text x="{LABEL - 8}" y="{y + 18}" text-anchor="end">rank {rank}</text>')
        lines.append(f'<rect x="{LABEL}" y="{y}" width="{PLOT}" height="{ROW - 8}" fill="#f0f2f4"/>')
        for _, phase, a, b in mine:
            x, width = LABEL + PLOT * (a - begin) / (end - begin), PLOT * (b - a) / (end - begin)
            box = f'x="{x:.1f}" y="{y}" width="{max(width, 0.4):.1f}" height="{ROW - 8}"'
            lines.append(f'<rect {box} fill="{colours[phase]}"/>')
    base = HEAD + ROW * len(events)
    for k in range(5):
        x = LABEL + PLOT * k / 4
        text = f"{1e3 * (end - begin) * k / 4:.0f} ms"
        lines.append(f'<text x="{x:.0f}" y="{base + 14}" text-anchor="middle" font-size="9">{text}</text>')
    return "\n".join([*lines, "</svg>", ""])


def main() -> int:
    """Measures, or draws a stored measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=800)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--dry", action="store_true", help="tiny")
    parser.add_argument("--draw", type=Path, help="a stored measurement")
    parser.add_argument("--svg", type=Path, help="where it is drawn")
    parser.add_argument("--job", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job is not None:
        one_process(json.loads(args.job.read_text(encoding="utf-8")), args.rank)
        return 0
    if args.draw is not None:
        args.svg.write_text(drawn(json.loads(args.draw.read_text(encoding="utf-8"))), encoding="utf-8")
        return 0
    hidden, batch, steps = (20, 50, 3) if args.dry else (args.hidden, args.batch, args.steps)
    training = {"hidden": hidden, "batch": batch, "learning_rate": 0.01, "epochs": 1}
    job = {"training": training, "processes": args.processes, "steps": steps, "count": batch * steps}
    found = measured(job | {"folder": str(args.out / "work")})
    written(args.out / "timeline.json", described() | job | found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
