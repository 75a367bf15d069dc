"""Figures of mu-cuDNN as numbers, from times of kernels that were measured on an H200 and from published ones.

Each function has one figure's numbers as plain data; `draw.py` draws them.  No device is needed.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.microbatch.conv_chains import whole
from benchmarks.microbatch.modelled_device import training_step
from benchmarks.microbatch.offline import database_of, memory
from benchmarks.microbatch.table_run import BATCHES, MIB, in_mode
from jcuts.microbatch import batch_division_dp, deepbench
from jcuts.microbatch.analysis import analyse, half_divisions
from jcuts.microbatch.best_batch import best_batch_size
from jcuts.microbatch.convolution import Convolution
from jcuts.microbatch.database import Database, Device
from jcuts.microbatch.network import Network
from jcuts.microbatch.pareto import desirable
from jcuts.microbatch.timings import POLICIES, Table

RESULTS = Path(__file__).resolve().parents[2] / "results" / "microbatch"
TABLES = tuple(
    RESULTS / f"gpu_microbatch_{name}.json"
    for name in (
        "networks_tables_h200_2026-11-22b",
        "networks_tables_h200_2026-11-22c",
        "networks_tables_h200_2026-11-23",
        "tables_h200_2026-11-22",
    )
)
LIMITS = (8, 64, 512)
"""MiB for each kernel, of both papers."""
MODES = {"float32": "float32 HIGHEST", "tf32": "TF32"}
TOTALS = {"AlexNet": ((8, 120), (64, 960), (512, 7680)), "ResNet-50": ((16, 2544), (32, 5088))}
"""(MiB for each kernel, MiB for all) side by side, as printed (003, figure 13)."""
HETEROGENEOUS = (("V100",), ("V100", "T4"), ("V100", "P100"), ("V100", "P100", "T4"), ("V100", "P100", "T4", "1080Ti"))


class Times:
    """Measured times, with slices of outputs and without (the papers have none)."""

    def __init__(self) -> None:
        self.database, self.device = database_of(*TABLES)
        self.unsliced: Any = _Unsliced(self.database)

    def table(self, convolution: Convolution, *, sliced: bool = False) -> Table:
        """All times of a convolution."""
        return (self.database if sliced else self.unsliced).table(self.device, convolution)


class _Unsliced:
    def __init__(self, database: Database) -> None:
        self._database = database

    def __getattr__(self, name: str) -> Any:
        return getattr(self._database, name)

    def table(self, device: Device, convolution: Convolution) -> Table:
        return whole(self._database.table(device, convolution))


def step(name: str, mode: str) -> Network:
    """A network's kernels at the papers' batch."""
    return in_mode(training_step(name, BATCHES[name], "float16" if mode == "half" else "float32"), mode)


def one_byte_less(times: Times) -> dict[str, Any]:
    """003, figure 1: AlexNet's forward convolutions; the fastest single call, one with a byte less, the division."""
    found: dict[str, Any] = {}
    for mode, title in MODES.items():
        for use in (u for u in step("AlexNet", mode).uses if u.convolution.kind == "forward"):
            table = times.table(use.convolution)
            best = batch_division_dp.undivided(table, use.batch, precision=mode)
            assert best is not None
            less = max(0, best.workspace - 1)
            single = batch_division_dp.undivided(table, use.batch, less, precision=mode)
            assert single is not None
            divided = batch_division_dp.divide(table, use.batch, less, precision=mode)
            found.setdefault(title, {})[use.name.split()[0]] = {
                "best ms": 1e3 * best.seconds,
                "one byte less ms": 1e3 * single.seconds,
                "divided, one byte less ms": 1e3 * divided.seconds,
                "workspace MiB": best.workspace / MIB,
                "division": str(divided),
            }
    return found


def layers(times: Times, mode: str = "float32") -> dict[str, Any]:
    """004, figure 1: memory and time of AlexNet's layers, forward and backward, at 8, 64 and 512 MiB each."""
    from jcuts.xla.cudnn.plan import buffer_bytes

    found: dict[str, Any] = {}
    for limit in LIMITS:
        for use in step("AlexNet", mode).uses:
            table = times.table(use.convolution)
            row = found.setdefault(use.name.split()[0], {})
            row["data MiB"] = sum(buffer_bytes(use.convolution, use.batch)) / MIB
            single = batch_division_dp.undivided(table, use.batch, limit * MIB, precision=mode)
            assert single is not None
            chosen = {"single": single, "WR": batch_division_dp.divide(table, use.batch, limit * MIB, precision=mode)}
            for name, division in chosen.items():
                mine = row.setdefault(f"{name}, {limit} MiB", {"ms": 0.0, "workspace MiB": 0.0})
                mine["ms"] += 1e3 * division.seconds
                mine["workspace MiB"] = max(mine["workspace MiB"], division.workspace / MIB)
    return found


def layer_memory(times: Times, mode: str = "float32") -> dict[str, Any]:
    """003, figure 12: memory of unique layers, single calls within 512 MiB against WR within 64 MiB."""
    return {name: memory(step(name, mode), times.unsliced, times.device) for name in ("AlexNet", "ResNet-18")}


def conv2(times: Times) -> dict[str, Any]:
    """003, figures 8 and 9: the desirable set of AlexNet's conv2 forward within 120 MiB, and its policies at 64 MiB."""
    found: dict[str, Any] = {}
    for mode, title in MODES.items():
        use = step("AlexNet", mode).uses[1]
        table = times.table(use.convolution)
        rows = desirable(table, use.batch, 120 * MIB, precision=mode)
        points = [[d.workspace / MIB, 1e3 * d.seconds, str(d)] for d in rows]
        policies = {}
        for policy in ("undivided", "powerOfTwo", "all"):
            (*_, best) = desirable(table, use.batch, 64 * MIB, policy=policy, precision=mode)
            parts = [[str(m.batch), m.seconds, m.algorithm.removeprefix("cudnn/")] for m in best.parts]
            policies[policy] = {"ms": 1e3 * best.seconds, "workspace MiB": best.workspace / MIB, "parts": parts}
        found[title] = {"front": points, "policies": policies}
    return found


def policies(times: Times) -> dict[str, Any]:
    """003, figures 10 and 11: sums of kernels' times by policy (u, p, a) at 8, 64 and 512 MiB for each kernel."""
    found: dict[str, Any] = {}
    for mode, title in MODES.items():
        for name in BATCHES:
            for limit in LIMITS:
                key = f"{name}, batch {BATCHES[name]}, {limit} MiB"
                row = found.setdefault(title, {}).setdefault(key, {})
                for policy in reversed(POLICIES):
                    made = analyse(
                        step(name, mode),
                        times.unsliced,
                        times.device,
                        limit=limit * MIB,
                        policy=policy,
                    )
                    row[policy] = {"ms": 1e3 * made.seconds, "workspace MiB": made.total / MIB}
    return found


def totals(times: Times) -> dict[str, Any]:
    """003, figure 13: WR with single calls and divided, and WD with as much memory in all."""
    found: dict[str, Any] = {}
    for mode, title in MODES.items():
        for name, pairs in TOTALS.items():
            network = step(name, mode)
            for limit, total in pairs:
                one = analyse(network, times.unsliced, times.device, limit=limit * MIB)
                two = analyse(network, times.unsliced, times.device, total=total * MIB)
                found.setdefault(title, {})[f"{name}, {limit} MiB each, {total} in all"] = {
                    "WR undivided ms": None if one.undivided is None else 1e3 * one.undivided,
                    "WR ms": 1e3 * one.seconds,
                    "WD ms": 1e3 * two.seconds,
                    "WD MiB": two.total / MIB,
                    "proven": two.proven,
                }
    return found


def division(times: Times, total: int = 120, limit: int = 8) -> dict[str, Any]:
    """003, figure 14: what WD gives each of AlexNet's kernels, and the share of conv2 and conv3."""
    found: dict[str, Any] = {}
    for mode, title in MODES.items():
        network = step("AlexNet", mode)
        one = analyse(network, times.unsliced, times.device, limit=limit * MIB, policy="undivided")
        two = analyse(network, times.unsliced, times.device, total=total * MIB)
        rows = {
            a.use.name: {"WR MiB": a.division.workspace / MIB, "WD MiB": b.division.workspace / MIB}
            | {"WR ms": 1e3 * a.division.seconds, "WD ms": 1e3 * b.division.seconds, "division": str(b.division)}
            for a, b in zip(one.rows, two.rows, strict=True)
        }
        large = sum(row["WD MiB"] for name, row in rows.items() if name.split()[0] in ("conv2", "conv3"))
        found[title] = {"kernels": rows, "of conv2 and conv3": large / (two.total / MIB)}
        found[title] |= {"WR ms": 1e3 * one.seconds, "WD ms": 1e3 * two.seconds}
    return found


def activations(times: Times) -> dict[str, Any]:
    """003, section VI: memory that is assigned to activations and workspaces together, against equal limits.

    What is live at each convolution is that of the traced step by `plan.cost.program_memory`; the memory is its peak
    and 8 or 64 MiB more, which is also the equal limit of every convolution.
    """
    from benchmarks.microbatch.fill_database import traced_step
    from jcuts.pipeline.microbatch_convs import named_network

    found: dict[str, Any] = {}
    for name in ("AlexNet", "ResNet-18"):
        network = named_network(traced_step(name, BATCHES[name], tiny=False), name)
        for mode, title in MODES.items():
            uses = in_mode(network, mode)
            for spare in (8, 64):
                one = analyse(uses, times.unsliced, times.device, limit=spare * MIB)
                two = analyse(uses, times.unsliced, times.device, memory=max(network.held) + spare * MIB)
                found.setdefault(title, {})[f"{name}, batch {BATCHES[name]}, peak + {spare} MiB"] = {
                    "peak of what is held MiB": max(network.held) / MIB,
                    "equal limits, undivided ms": None if one.undivided is None else 1e3 * one.undivided,
                    "equal limits ms": 1e3 * one.seconds,
                    "together ms": 1e3 * two.seconds,
                    "largest workspace MiB": two.peak / MIB,
                    "proven": two.proven,
                }
    return found


def by_filter(times: Times) -> dict[str, Any]:
    """004, figure 8: gains of DeepBench's 94 layers by filter, at 4 times the batch within 64 MiB."""
    found: dict[str, Any] = {}
    for dtype, precision, title in (("float32", "float32", MODES["float32"]), ("float32", "tf32", "TF32"), *HALF):
        for layer in deepbench.layers("forward", dtype):
            table, batch = times.table(layer.convolution), 4 * layer.batch
            single = batch_division_dp.undivided(table, batch, 64 * MIB, precision=precision)
            if single is not None:
                divided = batch_division_dp.divide(table, batch, 64 * MIB, precision=precision)
                size = "x".join(map(str, reversed(layer.convolution.window)))
                found.setdefault(title, {}).setdefault(size, []).append(single.seconds / divided.seconds)
    return found


HALF = (("float16", "float32", "half, sums in float32"),)


def half_arithmetic(times: Times) -> dict[str, Any]:
    """004, table I and section IV-A: TRUE_HALF against PSEUDO_HALF on DeepBench's layers, divided within 64 MiB."""
    rows = []
    for layer in deepbench.layers("forward", "float16"):
        table, batch = times.table(layer.convolution), 4 * layer.batch
        row: dict[str, Any] = {"layer": str(layer.convolution), "batch": batch}
        either = batch_division_dp.divide(table, batch, 64 * MIB, precision="float16")
        for name, one in zip(("TRUE_HALF", "PSEUDO_HALF"), half_divisions(table, batch, 64 * MIB), strict=True):
            row[name] = None if one is None else one.seconds
        rows.append({**row, "either": either.seconds})
    both = [row for row in rows if row["TRUE_HALF"] and row["PSEUDO_HALF"]]
    ratios = sorted(row["TRUE_HALF"] / row["PSEUDO_HALF"] for row in both)
    better = sum(row["PSEUDO_HALF"] is not None and row["either"] == row["PSEUDO_HALF"] for row in rows)
    return {
        "layers": len(rows),
        "with both": len(both),
        "PSEUDO_HALF is as fast as either": better,
        "TRUE_HALF over PSEUDO_HALF, least, median, largest": [ratios[0], ratios[len(ratios) // 2], ratios[-1]],
        "rows": rows,
    }


def heterogeneous(batch: int = 32, combinations: Iterable[tuple[str, ...]] = HETEROGENEOUS) -> dict[str, Any]:
    """004, figure 13, on GPUs with published times: a step of two DeepSpeech convolutions, uneven against even."""
    found: dict[str, Any] = {}
    for names in combinations:
        known = [deepbench.times(name) for name in names]
        split = best_batch_size(batch, known, interpolate=True)
        even = None if split.even is None else 1e3 * split.even
        found[" + ".join(names)] = {"sizes": list(split.sizes), "ms": 1e3 * split.seconds, "even ms": even}
    return found
