"""What the measured tables of micro-batching share: a run's time, database and files, and how a table is filled.

Sizes are B, B/2, B/4, ... until the fastest algorithm of a size fits the smallest limit: smaller ones take longer and
need no less.  Algorithms that take four times as long as the fastest of a size are not measured for smaller ones.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Sequence
from typing import Any

from benchmarks import microbatch_chains
from benchmarks.microbatch_models import gradients, inputs_of
from benchmarks.microbatch_networks import training_step

MIB = 1 << 20
BATCHES = {"ResNet-18": 128, "AlexNet": 256, "ResNet-50": 64, "DenseNet-40": 256}
MODES = {"float32": "float32 HIGHEST", "tf32": "TF32"}
FAR = 4.0
"""An algorithm that takes this many times as long as the fastest of a size is not measured for smaller ones."""


class Run:
    """What the items share: time left, the database, what is written."""

    def __init__(self, options: argparse.Namespace) -> None:
        from jcuts.microbatch.database import Database
        from jcuts.tune.convolutions import database_path, this_device

        self.options, self.start, self.out = options, time.monotonic(), options.out
        self.dry: bool = options.dry_run
        self.platform = "cpu" if self.dry else "cuda"
        self.limits = (8 << 10, 64 << 10, 512 << 10) if self.dry else (8 * MIB, 64 * MIB, 512 * MIB)
        self.database, self.device = Database(database_path()), this_device(self.platform)
        self.kernels: dict[str, Any] = {}
        self.left_out: list[Any] = []
        if options.start:
            self.take(json.loads(options.start.read_text(encoding="utf-8")))
        for entry in self.database.entries():
            if entry.device == self.device and entry.convolution.key not in self.kernels:
                self.note(entry.convolution)

    @property
    def left(self) -> float:
        """Seconds until the budget is spent."""
        return self.options.budget - (time.monotonic() - self.start)

    def save(self, name: str, found: Any) -> None:
        """Writes one item as it is."""
        head = {"device": str(self.device), "dry_run": self.dry, "seconds": round(time.monotonic() - self.start, 1)}
        partial = self.out / f"{name}.json.new"
        indent = None if name == "tables" else 1
        partial.write_text(json.dumps({**head, name: found}, indent=indent, default=str) + "\n", encoding="utf-8")
        partial.replace(self.out / f"{name}.json")

    def say(self, text: str) -> None:
        """One line of progress."""
        print(f"[{time.monotonic() - self.start:6.1f} s] {text}", flush=True)

    def save_tables(self) -> None:
        """Writes every time of this run, and those of earlier runs with the same --out."""
        self.save("tables", list(self.kernels.values()))

    def take(self, data: dict[str, Any]) -> None:
        """Times of an earlier run on the same device and libraries."""
        from jcuts.microbatch.convolution import Convolution
        from jcuts.microbatch.table import Micro

        if data["device"] != str(self.device):
            self.say(f"times of {data['device']} are not used on {self.device}")
            return
        for row in data["tables"]:
            convolution = Convolution.from_json(row["convolution"])
            for size, micros in row["sizes"].items():
                made = [Micro(int(size), *micro) for micro in micros]
                remarks = row.get("remarks", {}).get(size, {})
                self.database.record(self.device, convolution, int(size), made, remarks=remarks)
            self.note(convolution)

    def fill(
        self, measurer: Any, convolution: Any, batch: int, limits: Sequence[int], precisions: Sequence[str]
    ) -> Any:
        """The table of a convolution with every size that can matter."""
        from jcuts.microbatch import wr
        from jcuts.microbatch.refine import sizes_between
        from jcuts.tune.convolutions import measured, measured_in_slices

        size, measurer.unwanted = batch, frozenset()
        while size:
            table = measured(convolution, size, self.database, measurer, policy="undivided", library=False)
            best = [wr.undivided(table, size, precision=p) for p in precisions]
            if all(one is None or one.workspace <= min(limits) for one in best) and any(best):
                break
            lacking = self.database.remarks(self.device, convolution, size)
            measurer.unwanted = frozenset() if lacking else slow(table, size, precisions)
            size = size // 2 // convolution.unit * convolution.unit
        for limit in limits if size < batch else ():
            for precision in precisions:
                for size in sizes_between(table, batch, limit, precision=precision)[:1]:
                    table = measured(convolution, size, self.database, measurer, policy="undivided", library=False)
        measurer.unwanted = frozenset()
        most = min(self.options.slices, 3 if len(limits) == 1 else 1)
        table = measured_in_slices(convolution, batch, limits, precisions, self.database, measurer, most=most)
        self.note(convolution)
        return table

    def note(self, convolution: Any) -> None:
        """Keeps a convolution's times for ``tables.json``."""
        sizes: dict[int, list[Any]] = {}
        for m in self.database.table(self.device, convolution).micros:
            sizes.setdefault(m.batch, []).append([m.algorithm, m.math, m.seconds, m.workspace])
        remarks = {size: dict(self.database.remarks(self.device, convolution, size)) for size in sizes}
        self.kernels[convolution.key] = {"convolution": convolution.to_json(), "sizes": sizes, "remarks": remarks}

    def measurer(self) -> Any:
        """One measuring process."""
        from jcuts.tune.convolutions import Measurer

        # Whoever looks for larger workspaces than the largest limit looks for a bound, not for a division.
        return Measurer(self.device, self.platform, asked=max(self.limits), seconds=self.options.seconds)


def slow(table: Any, size: int, precisions: Sequence[str]) -> frozenset[str]:
    """Algorithms that are far from the fastest of a size at every precision, or do not run: not measured for less."""
    from jcuts.microbatch.convolution import MATHS
    from jcuts.xla import cudnn

    kept: set[str] = set()
    for precision in precisions:
        mine = [m for m in table.candidates(size, precision=precision) if m.batch == size]
        best = min((m.seconds for m in mine), default=0.0)
        kept |= {f"{m.algorithm.removesuffix(cudnn.LAUNCHED)} {m.math}" for m in mine if m.seconds <= FAR * best}
    every = {f"{a} {m}" for a in cudnn.algorithms(table.convolution.kind) for m in MATHS[table.convolution.dtype]}
    return frozenset(every - kept)


def kernels_of(run: Run, name: str) -> Any:
    """The network, and its distinct convolutions."""
    network = training_step(name, BATCHES[name])
    if run.dry:
        network = traced(name, 4)
    return network, list({use.convolution.key: use for use in network.uses}.values())


def traced(name: str, batch: int, *, tiny: bool = True) -> Any:
    """The convolutions of a step, from its jaxpr."""
    import jax

    from jcuts import divide
    from jcuts.trace.inline import inline
    from jcuts.trace.simplify import simplify

    arguments = inputs_of(name, batch, tiny=tiny)
    step = gradients(name, "highest", tiny=tiny)
    return divide.network_of(simplify(inline(jax.make_jaxpr(step)(*arguments))), name)


def fill_network(run: Run, name: str, *, library: bool = False, spare: float = 20.0) -> tuple[Any, str]:
    """A network with all its times, or why not."""
    from jcuts.tune.convolutions import measured

    network, uses = kernels_of(run, name)
    with run.measurer() as measurer:
        for done, use in enumerate(uses):
            if run.left < spare:
                run.save_tables()
                return network, f"the budget was spent after {done} of {len(uses)} kernels"
            run.fill(measurer, use.convolution, use.batch, run.limits, tuple(MODES))
            if library:
                measured(use.convolution, use.batch, run.database, measurer, policy="undivided")
        run.left_out += measurer.left_out
    run.save_tables()
    run.say(f"{name}: {len(uses)} distinct kernels are timed")
    return network, ""


def chained(run: Run, name: str, network: Any, found: dict[str, Any]) -> None:
    """One network, whose kernels are timed, in every precision."""
    for precision in run.options.precisions:
        if run.left < 15:
            break
        uses = tuple(dataclasses.replace(use, precision=precision) for use in network.uses)
        key = f"{name}, batch {network.uses[0].batch}, {MODES[precision]}"
        found[key] = microbatch_chains.chains(run, dataclasses.replace(network, uses=uses), run.left - 10)
        run.say("\n".join(microbatch_chains.lines(key, found[key])))
        run.save("chains", found)


def description(division: Any) -> list[Any] | None:
    """A division as JSON: its parts, seconds, workspace."""
    return None if division is None else [str(division), division.seconds, division.workspace]
