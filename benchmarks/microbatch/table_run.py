"""What the measured tables of micro-batching share: a run's time, database and files, and how a table is filled.

Sizes are B, B/2, B/4, ... until the fastest algorithm of a size fits the smallest limit: smaller ones take longer and
need no less.  Algorithms that take four times as long as the fastest of a size are not measured for smaller ones.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import tempfile
import time
from collections.abc import Sequence
from typing import Any

MIB = 1 << 20
BATCHES = {"ResNet-18": 128, "AlexNet": 256, "ResNet-50": 64, "DenseNet-40": 256}
MODES = {"float32": "float32 HIGHEST", "tf32": "TF32", "half": "half"}
"""Precisions by name; half: sums in float32."""
LIKE = 8
"""So many convolutions of a kind say which algorithms no other one of it needs."""
MOST = 0.9
"""Networks of which this share of the kernels is timed are shown without the others."""
FAR = 4.0
"""An algorithm that takes this many times as long as the fastest of a size is not measured for smaller ones."""


class BudgetSpent(Exception):
    """Something would have to be timed, and there is no time for it."""


class ByCudnn:
    """A database without XLA's own convolutions."""

    def __init__(self, database: Any) -> None:
        self._database = database

    def __getattr__(self, name: str) -> Any:
        return getattr(self._database, name)

    def table(self, device: Any, convolution: Any) -> Any:
        """As of the database, less XLA's own."""
        from jcuts.tune.cudnn.tables import only_cudnn

        return only_cudnn(self._database.table(device, convolution))


class Run:
    """What the items share: time left, the database, what is written."""

    def __init__(self, options: argparse.Namespace) -> None:
        from jcuts.microbatch.database import Database
        from jcuts.tune.cudnn.measurer import database_path, this_device

        self.options, self.start, self.out = options, time.monotonic(), options.out
        self.dry: bool = options.dry_run
        self.platform = "cpu" if self.dry else "cuda"
        self.limits = (8 << 10, 64 << 10, 512 << 10) if self.dry else (8 * MIB, 64 * MIB, 512 * MIB)
        self.database, self.device = Database(database_path()), this_device(self.platform)
        self.by_cudnn: Any = ByCudnn(self.database)
        self.folder = tempfile.TemporaryDirectory()
        self.ran: list[dict[str, Any]] = []
        """Programs whose gradients are in the folder."""
        self.kernels: dict[str, Any] = {}
        self.left_out: list[Any] = []
        self.lacking: set[str] = set()
        """Convolutions that the budget was spent before."""
        entries = [entry for entry in self.database.entries() if entry.device == self.device]
        self.known = {(entry.convolution.key, entry.batch): entry for entry in entries}
        """What earlier runs with the same --out have measured."""
        for file in options.start:
            self.take(json.loads(file.read_text(encoding="utf-8")))
        for entry in entries:
            if entry.convolution.key not in self.kernels:
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
        """Times of an earlier run on the same device and libraries; what --out knows already stays as it is."""
        from jcuts.microbatch.convolution import Convolution
        from jcuts.microbatch.timings import MicroConfig
        from jcuts.xla.cudnn import call as cudnn_call
        from jcuts.xla.cudnn.match import LIBRARY

        if data["device"] != str(self.device):
            self.say(f"times of {data['device']} are not used on {self.device}")
            return
        for row in data["tables"]:
            convolution = Convolution.from_json(row["convolution"])
            for size, micros in row["sizes"].items():
                made = [MicroConfig(int(size), *m) for m in micros if cudnn_call.is_cudnn(m[0]) or m[0] == LIBRARY]
                remarks = row.get("remarks", {}).get(size, {})
                if convolution.key in self.kernels:  # of an earlier file
                    names = {(m.algorithm, m.math) for m in made}
                    known = self.database.table(self.device, convolution).micros
                    made += [m for m in known if m.batch == int(size) and (m.algorithm, m.math) not in names]
                    remarks = {**self.database.remarks(self.device, convolution, int(size)), **remarks}
                if (entry := self.known.get((convolution.key, int(size)))) is not None:
                    names = {(m.algorithm, m.math) for m in entry.micros}
                    made = [*(m for m in made if (m.algorithm, m.math) not in names), *entry.micros]
                    remarks = {**remarks, **entry.remarks}
                self.database.record(self.device, convolution, int(size), made, remarks=remarks)
            self.note(convolution)

    def fill(
        self, measurer: Any, convolution: Any, batch: int, limits: Sequence[int], precisions: Sequence[str]
    ) -> Any:
        """The table of a convolution with every size that can matter."""
        from jcuts.microbatch import batch_division_dp
        from jcuts.microbatch.sampling_plan import sizes_between
        from jcuts.tune.cudnn.measurer import measured, measured_in_slices

        size, measurer.unwanted = batch, self.never(convolution)
        while size:
            table = measured(convolution, size, self.database, measurer, policy="undivided", library=False)
            best = [batch_division_dp.undivided(table, size, precision=p) for p in precisions]
            if all(one is None or one.workspace <= min(limits) for one in best) and any(best):
                break
            lacking = self.database.remarks(self.device, convolution, size)
            measurer.unwanted = frozenset() if lacking else slow(table, size, precisions) | measurer.unwanted
            size = half(size, convolution.unit)
        # Of an earlier run, which would otherwise be refined again by every run.
        between = set(table.sizes) - set(halves(batch, convolution.unit))
        for limit in limits if size < batch and not between else ():
            for precision in precisions:
                for size in sizes_between(table, batch, limit, precision=precision)[:1]:
                    table = measured(convolution, size, self.database, measurer, policy="undivided", library=False)
        measurer.unwanted = frozenset()
        most = min(self.options.slices, 3 if len(limits) == 1 else 1)
        table = measured_in_slices(convolution, batch, limits, precisions, self.database, measurer, most=most)
        self.note(convolution)
        return table

    def never(self, convolution: Any) -> frozenset[str]:
        """Algorithms that were no candidate for any of many like convolutions: faster ones needed no more workspace."""
        like = [row for row in self.kernels.values() if _alike(row["convolution"], convolution.to_json())]
        if len(like) < LIKE:
            return frozenset()
        every: set[str] = set()
        kept: set[str] = set()
        for row in like:
            for micros in row["sizes"].values():
                every |= {f"{a} {m}" for a, m, _, _ in micros}
                for kind in {m for _, m, _, _ in micros}:
                    mine = [micro for micro in micros if micro[1] == kind]
                    kept |= {
                        f"{a} {m}"
                        for a, m, seconds, space in mine
                        if not any(s < seconds and w <= space for _, _, s, w in mine)
                    }
        return frozenset(every - kept)

    def note(self, convolution: Any) -> None:
        """Keeps a convolution's times for ``tables.json``."""
        sizes: dict[int, list[Any]] = {}
        for m in self.database.table(self.device, convolution).micros:
            sizes.setdefault(m.batch, []).append([m.algorithm, m.math, m.seconds, m.workspace])
        remarks = {size: dict(self.database.remarks(self.device, convolution, size)) for size in sizes}
        self.kernels[convolution.key] = {"convolution": convolution.to_json(), "sizes": sizes, "remarks": remarks}

    def measurer(self, spare: float = -math.inf) -> Any:
        """One measuring process, which raises `BudgetSpent` when asked with less than `spare` seconds left."""
        from jcuts.tune.cudnn.measurer import Measurer

        run = self

        class Timed(Measurer):
            def _ask(self, *request: Any) -> Any:
                if run.left < spare:
                    raise BudgetSpent
                return super()._ask(*request)

        # Whoever looks for larger workspaces than the largest limit looks for a bound, not for a division.
        return Timed(self.device, self.platform, asked=max(self.limits), seconds=self.options.seconds)


def half(size: int, unit: int) -> int:
    """The largest number of whole units in half of a batch."""
    return size // 2 // unit * unit


def halves(batch: int, unit: int) -> list[int]:
    """A batch, its `half`, half of that, and so on.

    >>> halves(20, 1), halves(20, 8)
    ([20, 10, 5, 2, 1], [20, 8])
    """
    found = [batch]
    while size := half(found[-1], unit):
        found.append(size)
    return found


def _alike(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(one[name] == other[name] for name in ("kind", "dtype", "window", "strides"))


def precisions_of(run: Run, dtype: str) -> list[str]:
    """Of the precisions that were asked for those of networks in a type."""
    return [p for p in run.options.precisions if (p == "half") == (dtype == "float16")]


def in_mode(network: Any, mode: str) -> Any:
    """A network, whose type is the mode's, asked for in a precision."""
    precision = "float32" if mode == "half" else mode
    return dataclasses.replace(
        network, uses=tuple(dataclasses.replace(use, precision=precision) for use in network.uses)
    )


def slow(table: Any, size: int, precisions: Sequence[str]) -> frozenset[str]:
    """Algorithms that are far from the fastest of a size at every precision, or do not run: not measured for less."""
    from jcuts.microbatch.convolution import MATHS
    from jcuts.xla.cudnn import call as cudnn_call

    kept: set[str] = set()
    for precision in precisions:
        mine = [m for m in table.candidates(size, precision=precision) if m.batch == size]
        best = min((m.seconds for m in mine), default=0.0)
        kept |= {f"{m.algorithm.removesuffix(cudnn_call.LAUNCHED)} {m.math}" for m in mine if m.seconds <= FAR * best}
    every = {f"{a} {m}" for a in cudnn_call.algorithms(table.convolution.kind) for m in MATHS[table.convolution.dtype]}
    return frozenset(every - kept)


def description(division: Any) -> list[Any] | None:
    """A division as JSON: its parts, seconds, workspace."""
    return None if division is None else [str(division), division.seconds, division.workspace]
