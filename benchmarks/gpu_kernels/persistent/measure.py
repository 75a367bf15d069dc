"""What is measured of one unit on a GPU: sequences, single phases, weights ahead or not, code of many bodies."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.gpu_kernels.persistent.compile import Unit
from benchmarks.gpu_kernels.persistent.launches import AHEAD, TILES, TRACE, Clock, Program
from benchmarks.gpu_kernels.persistent.network import Network, wrong
from benchmarks.gpu_kernels.persistent.phases import COPIED, COPIES, NOTHING, SEQUENCE, Phase
from jcuts.base.errors import NativeError
from jcuts.tune.measure.cuda_driver import Driver, is_lost

FEW = 12
MANY = 44
"""Positions of the two lists of a phase's slope."""
VARIANTS = {
    "grid barrier, weights ahead": AHEAD,
    "grid barrier": 0,
    "counters per tile, weights ahead": AHEAD | TILES,
    "counters per tile": TILES,
}
"""Of a persistent kernel: flags."""
CHAINS = {
    "dependent launch, weights ahead": (AHEAD, True),
    "dependent launch": (0, True),
    "plain launches": (0, False),
}
"""Of a kernel per phase: flags, and whether with programmatic dependent launch."""


class WrongResultError(Exception):
    """A phase's result differs from float64 by more than its rounding explains."""


class GaveUpError(Exception):
    """A wait of a kernel gave up after two seconds."""


class Measurement:
    """One unit on the device. Args: row: what is found; save: called after every section."""

    def __init__(self, unit: Unit, cubin: bytes, row: dict[str, Any], save: Callable[[], None]) -> None:
        self.unit, self.row, self.save = unit, row, save
        self.driver = Driver()
        self.program = Program(self.driver, unit, cubin)
        self.network = Network(self.driver, unit.fine)
        self.clock = Clock(self.driver, self.program)
        row.update(failed_sections={}, errors={}, seconds={})

    def section(self, name: str, work: Callable[[], Any]) -> None:
        """Keeps what ``work`` finds, or why it failed. Raises NativeError only where the context is lost."""
        start = time.perf_counter()
        try:
            self.row[name] = work()
        except Exception as error:
            self.row["failed_sections"][name] = f"{type(error).__name__}: {str(error)[:500]}"
            if isinstance(error, NativeError) and is_lost(error):
                raise
        finally:
            self.row["seconds"][name] = round(time.perf_counter() - start, 3)
            self.row["direct_launches"] = self.clock.direct
            self.save()

    def hangs(self, name: str) -> bool:
        """Whether a wait gave up in the sequence of a variant, which is then not timed in other sections."""
        return self.row["failed_sections"].get(f"sequence, {name}", "").startswith(GaveUpError.__name__)

    def checked(self, name: str, work: Callable[[], None]) -> None:
        """Runs the sequence once on poisoned results and compares every phase. Raises WrongResultError, GaveUpError."""
        self.network.poison()
        self.clock.once(work)
        if self.network.gave_up():
            raise GaveUpError(name)
        errors = self.network.errors()
        self.row["errors"][name] = max(errors.values())
        if wrong(errors):
            raise WrongResultError(f"{name}: {wrong(errors)}")

    def still_right(self, name: str) -> None:
        """After many launches: no wait gave up, and the results are right."""
        if self.network.gave_up():
            raise GaveUpError(f"{name}, while it was timed")
        errors = self.network.errors()
        if wrong(errors):
            raise WrongResultError(f"{name}, after it was timed: {wrong(errors)}")

    def times(self, name: str, work: Callable[[], None], check: bool = True) -> dict[str, float]:
        """Of a sequence [us]: among others, alone with a warm L2 cache, and with a cold one."""
        if check:
            self.checked(name, work)
        found = {
            "back_to_back": self.clock.back_to_back(work),
            "alone": self.clock.alone(work, cold=False),
            "cold": self.clock.alone(work, cold=True),
        }
        if check:
            self.still_right(name)
        return found

    # -- a persistent kernel --------------------------------------------------------------------------------------
    def persistent(self) -> None:
        """All sections of a persistent kernel."""
        none = np.zeros(0, self.network.sequence().dtype)
        self.section("resources", self.program.resources)
        empty = self.program.persistent(self.network, none, 0)
        self.section("no phases", lambda: self.times("no phases", empty, check=False))
        entries = self.network.sequence()
        for name, flags in VARIANTS.items():
            work = self.program.persistent(self.network, entries, flags)
            self.section(f"sequence, {name}", lambda name=name, work=work: self.times(name, work))
        ending = {name: flags for name, flags in VARIANTS.items() if not self.hangs(name)}
        for name, flags in ending.items():
            self.section(f"trace, {name}", lambda flags=flags: self.trace(flags))
        for name, flags in ending.items():
            self.section(f"phases, {name}", lambda flags=flags: self.slopes(flags))
        self.section("without, grid barrier, weights ahead", self.without)

    def trace(self, flags: int) -> dict[str, list[float]]:
        """Time of every phase in the sequence as the first block sees it [us]; not with counters: blocks run apart."""
        entries = self.network.sequence()
        work = self.program.persistent(self.network, entries, flags | TRACE)
        found = {
            name: self.clock.traced(self.program, work, len(entries), cold)
            for name, cold in (("warm", False), ("cold", True))
        }
        self.still_right("trace")
        return found

    def slopes(self, flags: int) -> dict[str, float]:
        """Time of every phase [us]: the same again and again in one launch."""
        return {phase.name: self.slope(phase, flags) for phase in (*SEQUENCE, NOTHING)}

    def slope(self, phase: Phase, flags: int) -> float:
        """Time of one more of a phase in a launch [us]."""
        few, many = (
            self.program.persistent(self.network, self.network.repeated(phase, times), flags) for times in (FEW, MANY)
        )
        found = self.clock.slope(few, many, MANY - FEW)
        if self.network.gave_up():
            raise GaveUpError(phase.name)
        return found

    def without(self) -> dict[str, float]:
        """What the sequence takes less without each phase [us]."""

        def time_of(without: int) -> float:
            return self.clock.back_to_back(
                self.program.persistent(self.network, self.network.sequence(without), AHEAD), samples=7
            )

        whole = time_of(-1)
        return {phase.name: whole - time_of(number) for number, phase in enumerate(SEQUENCE)}

    # -- a kernel per phase ---------------------------------------------------------------------------------------
    def chain(self) -> None:
        """All sections of a kernel per phase in a CUDA graph."""
        entries = self.network.sequence()
        for name, (flags, dependent) in CHAINS.items():
            work = self.program.chain(self.network, entries, flags, dependent)
            self.section(f"sequence, {name}", lambda name=name, work=work: self.times(name, work))
        for name, (flags, dependent) in CHAINS.items():
            self.section(f"phases, {name}", lambda f=flags, d=dependent: self.chain_slopes(f, d))

    def chain_slopes(self, flags: int, dependent: bool) -> dict[str, float]:
        """Time of every phase [us]: its kernel again and again in one graph."""
        found = {}
        for phase in (*SEQUENCE, NOTHING):
            few, many = (
                self.program.chain(self.network, self.network.repeated(phase, times), flags, dependent)
                for times in (FEW, MANY)
            )
            found[phase.name] = self.clock.slope(few, many, MANY - FEW)
        if self.network.gave_up():
            raise GaveUpError("a phase again and again")
        return found

    # -- the instruction cache ------------------------------------------------------------------------------------
    def copies(self) -> None:
        """Twenty bodies of equal work and distinct code, each twice, against one body forty times."""
        self.section("resources", self.program.resources)
        for number, phase in enumerate(COPIED):
            for flags in (AHEAD, 0):
                name = f"{phase.name}, {'weights ahead' if flags else 'weights in the phase'}"
                self.section(name, lambda n=number, p=phase, f=flags: self.copied(n, p, f))

    def copied(self, number: int, phase: Phase, flags: int) -> dict[str, Any]:
        """Times of both lists, and the difference per phase [us]."""
        found: dict[str, Any] = {}
        for name, distinct in (("one body", False), ("distinct bodies", True)):
            entries = self.network.repeated(phase, 2 * COPIES)
            entries["body"] = number * COPIES + (np.arange(2 * COPIES) % COPIES if distinct else 0)
            work = self.program.persistent(self.network, entries, flags)
            self.prepared(phase, work)
            found[name] = self.times(f"{phase.name}, {name}", work, check=False)
        if self.network.gave_up():
            raise GaveUpError(phase.name)
        one, many = found["one body"], found["distinct bodies"]
        return found | {"more_per_phase": {key: (many[key] - one[key]) / (2 * COPIES) for key in one}}

    def prepared(self, phase: Phase, work: Callable[[], None]) -> None:
        """Gives the phase an input, runs it, and compares its result. Raises WrongResultError."""
        source = self.network.source(SEQUENCE.index(phase))
        shape = next(p for p in SEQUENCE if p.name == source).shape()
        values = np.random.default_rng(7).standard_normal(shape, np.float32)
        self.network.poison()
        self.driver.upload(self.network.out[source], values)
        self.clock.once(work)
        errors = self.network.errors([phase])
        self.row["errors"][phase.name] = max(errors.values())
        if wrong(errors):
            raise WrongResultError(f"{phase.name}: {errors}")


def measure(unit: Unit, cubin: bytes, row: dict[str, Any], save: Callable[[], None]) -> None:
    """All sections of a unit."""
    measurement = Measurement(unit, cubin, row, save)
    row["device"] = measurement.driver.name
    row["cycles_per_microsecond"] = measurement.clock.cycles_per_microsecond()
    {"persistent": measurement.persistent, "chain": measurement.chain, "copies": measurement.copies}[unit.form]()
    save()
