"""Operands of the phases in a memory, lists of phases as the kernels read them, and results against float64."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from benchmarks.gpu_kernels.persistent.phases import BODIES, INPUT, SEQUENCE, Matmul, Phase

MOST = 64
"""Positions of a list."""
ENTRY = np.dtype(
    [(name, np.uint64) for name in ("in", "side", "weights", "bias", "out", "partial")]
    + [(name, np.int32) for name in ("body", "tiles", "row_tiles", "chunks")]
    + [(name, np.int32) for name in ("ranges", "range_rows", "target", "after")]
    + [(name, np.int32) for name in ("side_after", "self", "unused0", "unused1")]
)
"""`Entry` of `phases.cuh`."""
SYNC_WORDS = 32 + MOST * 128 + MOST * 64
"""Grid barrier, error flag, counters of ranges, counters of split-K tiles."""
ERROR_WORD = 2
LIMIT = 5e-4
"""Largest difference from float64 with equally rounded operands, over the result's root mean square."""
POISON = 0xFF
"""Fills results before a checked run: not-a-numbers."""


class Memory(Protocol):
    """What a device's memory has to offer: the part of `jcuts.tune.measure.cuda_driver.Driver` that is used here."""

    def allocate(self, size: int) -> int: ...
    def upload(self, address: int, values: np.ndarray) -> None: ...
    def download(self, address: int, size: int) -> np.ndarray: ...
    def fill(self, address: int, value: int, size: int) -> None: ...


@functools.cache
def constants(number: int) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Weights and small operands of a phase of `BODIES`."""
    return BODIES[number].constants(np.random.default_rng(number))


@functools.cache
def first_input() -> np.ndarray:
    return np.random.default_rng(1000).standard_normal(INPUT, np.float32)


class Network:
    """The operands of `SEQUENCE` in a memory. Args: fine: tiles for two blocks per multiprocessor."""

    def __init__(self, memory: Memory, fine: bool) -> None:
        self.memory, self.fine = memory, fine
        self.input = self._placed(first_input())
        self.weights: dict[str, int] = {}
        self.small: dict[str, int] = {}
        self.out: dict[str, int] = {"input": self.input}
        self.partial: dict[str, int] = {}
        for number, phase in enumerate(BODIES):
            weights, small = constants(number)
            if weights is not None:
                self.weights[phase.name] = self._placed(phase.packed(weights, fine))
            if small is not None:
                self.small[phase.name] = self._placed(small)
            self.out[phase.name] = memory.allocate(4 * int(np.prod(phase.shape())))
            if isinstance(phase, Matmul) and phase.split > 1:
                size = 4 * phase.split * phase.rows * phase.channels[1]
                self.partial[phase.name] = self.out[phase.name] if phase.partial else memory.allocate(size)
        self.sync = memory.allocate(4 * SYNC_WORDS)
        memory.fill(self.sync, 0, 4 * SYNC_WORDS)
        self.lists: dict[bytes, int] = {}

    def _placed(self, values: np.ndarray) -> int:
        address = self.memory.allocate(values.nbytes)
        self.memory.upload(address, values)
        return address

    def source(self, number: int) -> str:
        """The name of what a phase of the sequence reads: another phase, or "input"."""
        return SEQUENCE[number].source or (SEQUENCE[number - 1].name if number else "input")

    def entry(self, phase: Phase, position: int, after: int = -1, side_after: int = -1) -> np.ndarray:
        """A phase as the kernels read it. Args: after, side_after: positions whose results it reads."""
        number = BODIES.index(phase)
        geometry = phase.geometry(self.fine)
        made = np.zeros((), ENTRY)
        made["in"] = self.out[self.source(number)] if number < len(SEQUENCE) else self.input
        made["side"] = self.out[phase.side] if phase.side else 0
        for field, places in (("weights", self.weights), ("bias", self.small), ("out", self.out)):
            made[field] = places.get(phase.name, 0)
        made["partial"] = self.partial.get(phase.name, 0)
        made["body"], made["self"], made["after"], made["side_after"] = number, position, after, side_after
        for field, value in geometry._asdict().items():
            made[field] = value
        return made

    def sequence(self, without: int = -1) -> np.ndarray:
        """The whole list. Args: without: the number of a phase that is left out (not for counters per tile)."""
        names = [phase.name for phase in SEQUENCE]
        found = []
        for number, phase in enumerate(SEQUENCE):
            source = self.source(number)
            after = names.index(source) if source in names else -1
            side = names.index(phase.side) if phase.side in names else -1
            if number != without:
                found.append(self.entry(phase, len(found), after, side))
        return np.stack(found)

    def repeated(self, phase: Phase, times: int) -> np.ndarray:
        """One phase again and again, each as if it read what the one before wrote."""
        return np.stack([self.entry(phase, k, k - 1) for k in range(times)])

    def list_address(self, entries: np.ndarray) -> int:
        """Where a list lies in the memory."""
        key = entries.tobytes()
        if key not in self.lists:
            self.lists[key] = self._placed(entries.view(np.uint8))
        return self.lists[key]

    def poison(self) -> None:
        """Makes all results not-a-numbers."""
        for phase in SEQUENCE:
            self.memory.fill(self.out[phase.name], POISON, 4 * int(np.prod(phase.shape())))
            if phase.name in self.partial:
                rows = phase.rows * phase.channels[1] * phase.split  # type: ignore[attr-defined]
                self.memory.fill(self.partial[phase.name], POISON, 4 * rows)

    def result(self, name: str) -> np.ndarray:
        """What is in the memory as the output of a phase."""
        if name == "input":
            return first_input()
        shape = next(p for p in SEQUENCE if p.name == name).shape()
        return self.memory.download(self.out[name], 4 * int(np.prod(shape))).view(np.float32).reshape(shape)

    def errors(self, phases: Sequence[Phase] = SEQUENCE) -> dict[str, float]:
        """By phase: the largest difference from float64 of the same operands, over the root mean square."""
        found = {}
        for phase in phases:
            number = SEQUENCE.index(phase)
            side = self.result(phase.side) if phase.side else np.zeros(0, np.float32)
            want = expected(number, self.result(self.source(number)), side)
            got = self.result(phase.name).astype(np.float64)
            found[phase.name] = float(np.abs(got - want).max() / np.sqrt(np.mean(want * want)))
        return found

    def gave_up(self) -> bool:
        """Whether a wait of the kernels gave up; clears the flag and all counters."""
        words = self.memory.download(self.sync, 4 * SYNC_WORDS).view(np.uint32)
        if words[ERROR_WORD]:
            self.memory.fill(self.sync, 0, 4 * SYNC_WORDS)
        return bool(words[ERROR_WORD])


_EXPECTED: dict[tuple[int, str], np.ndarray] = {}
"""References by phase and operands: most variants give the same bits."""


def expected(number: int, x: np.ndarray, side: np.ndarray) -> np.ndarray:
    """The float64 result of a phase of the sequence."""
    key = number, hashlib.sha256(x.tobytes() + side.tobytes()).hexdigest()
    if key not in _EXPECTED:
        weights, small = constants(number)
        none = np.zeros(0, np.float32)
        given = none if weights is None else weights, none if small is None else small
        with np.errstate(invalid="ignore"):
            _EXPECTED[key] = SEQUENCE[number].reference(x, side, *given)
    return _EXPECTED[key]


def wrong(errors: dict[str, float]) -> dict[str, float]:
    """Those that are too far off, not-a-numbers included."""
    return {name: error for name, error in errors.items() if not error <= LIMIT}


def reference_chain() -> dict[str, np.ndarray]:
    """All results of the sequence in float64, each from the rounded results before it."""
    found = {"input": first_input()}
    for number, phase in enumerate(SEQUENCE):
        source = phase.source or (SEQUENCE[number - 1].name if number else "input")
        side = found[phase.side] if phase.side else np.zeros(0, np.float32)
        found[phase.name] = expected(number, found[source], side).astype(np.float32)
    return found
