"""The CUDA C of the persistent phases, compiled for this CPU with `cuda_on_host.h` and compared with float64."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from benchmarks.gpu_kernels.persistent import compile as compiler
from benchmarks.gpu_kernels.persistent import launches, network, phases

COMPILER = os.environ.get("CXX") or shutil.which("g++") or ""
pytestmark = pytest.mark.skipif(not COMPILER, reason="needs a C++ compiler")
UNITS = {(u.form, u.threads, u.blocks): u for u in compiler.UNITS}
GRID = 5
"""Blocks: every block has several tiles of most phases."""
SLOW = {"3x3 convolution, split-K", "3x3 convolution, partial sums", "1x1 convolution, split-K"}
"""Kinds that are tried with one block shape only."""
ENTRY = """
static_assert(sizeof(Entry) == 96 && sizeof(Shared) <= BYTES && sizeof(Shared) > BYTES - 128, "sizes");
extern "C" void run(int number, const Entry* list, int n, int flags, unsigned* counters, u64* trace) {
"""


class HostMemory:
    """This process' memory, as `network.Memory`."""

    def __init__(self) -> None:
        self.kept: list[np.ndarray] = []

    def allocate(self, size: int) -> int:
        self.kept.append(np.full(size + 128, network.POISON, np.uint8))
        return -(-self.kept[-1].ctypes.data // 128) * 128

    def upload(self, address: int, values: np.ndarray) -> None:
        ctypes.memmove(address, np.ascontiguousarray(values).ctypes.data, values.nbytes)

    def download(self, address: int, size: int) -> np.ndarray:
        return np.frombuffer(ctypes.string_at(address, size), np.uint8)

    def fill(self, address: int, value: int, size: int) -> None:
        ctypes.memset(address, value, size)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Callable[[compiler.Unit], ctypes.CDLL]:
    """Compiles a unit, once."""
    made: dict[compiler.Unit, ctypes.CDLL] = {}

    def build(unit: compiler.Unit) -> ctypes.CDLL:
        if unit not in made:
            folder = tmp_path_factory.mktemp("host")
            if unit.form == "chain":
                kernels = (f"[=] {{ phase_{k}(list[0], flags, counters); }}" for k in range(len(unit.bodies())))
            else:
                kernels = iter(["[=] { persistent(list, n, flags, counters, trace); }"])
            cases = "".join(f"  if (number == {k}) host::launch({GRID}, BYTES, {c});\n" for k, c in enumerate(kernels))
            head = f"constexpr int BYTES = {unit.shared_bytes};\n"
            source = unit.source(Path(__file__).with_name("cuda_on_host.h")) + head + ENTRY + cases + "}\n"
            (folder / "unit.cc").write_text(source, encoding="utf-8")
            options = ["-std=c++17", "-O2", "-w", "-fno-strict-aliasing", "-shared", "-fPIC"]
            subprocess.run([COMPILER, *options, "unit.cc", "-o", "unit.so"], cwd=folder, check=True)
            made[unit] = ctypes.CDLL(str(folder / "unit.so"))
        return made[unit]

    return build


def run(library: ctypes.CDLL, made: network.Network, number: int, entries: np.ndarray, flags: int) -> np.ndarray:
    """Runs a kernel over a list; the trace. All counters must be as before."""
    trace = np.zeros(network.MOST + 1, np.uint64)
    lists, counters, traced = (ctypes.c_void_p(x) for x in (made.list_address(entries), made.sync, trace.ctypes.data))
    library.run(number, lists, len(entries), flags, counters, traced)
    assert not made.memory.download(made.sync, 4 * network.SYNC_WORDS).any()
    return trace


@pytest.mark.parametrize(
    ("unit", "flags"),
    [
        (("persistent", 256, 1), launches.AHEAD | launches.TRACE),
        (("persistent", 256, 1), 0),
        (("persistent", 512, 1), launches.AHEAD | launches.TILES),
        (("persistent", 256, 2), launches.TILES),
    ],
)
def test_first_phases_of_the_sequence(program, unit, flags):
    made = network.Network(HostMemory(), UNITS[unit].fine)
    done = phases.MOBILE
    trace = run(program(UNITS[unit]), made, 0, made.sequence()[: len(done)], flags)
    assert network.wrong(made.errors(done)) == {}
    assert bool((np.diff(trace[: len(done) + 1].astype(np.int64)) > 0).all()) == bool(flags & launches.TRACE)


@pytest.mark.parametrize(
    ("phase", "unit"),
    [(p, ("chain", 256, 2)) for p in phases.CONVOLUTIONS + phases.LAST]
    + [(p, ("chain", 512, 1)) for p in phases.LAST + phases.CONVOLUTIONS if p.kind not in SLOW],
    ids=lambda x: getattr(x, "name", None) or f"{x[1]} threads",
)
def test_one_phase(program, phase, unit):
    """Of products the first block of columns: all parts of split-K, all rows."""
    made = network.Network(HostMemory(), False)
    for name, values in network.reference_chain().items():
        if name not in ("input", phase.name):
            made.memory.upload(made.out[name], values)
    entry = made.repeated(phase, 1)
    columns = phase.shape()[-1]
    if isinstance(phase, phases.Matmul):
        columns = phase.tile[1]
        entry["tiles"] = phase.geometry(False).row_tiles * phase.split
    run(program(UNITS[unit]), made, phases.BODIES.index(phase), entry, launches.AHEAD)
    got, want = made.result(phase.name)[..., :columns], network.reference_chain()[phase.name][..., :columns]
    assert float(np.abs(got - want).max()) <= network.LIMIT * float(np.sqrt(np.mean(want.astype(np.float64) ** 2)))


def test_the_same_split_k_phase_again_with_counters_per_tile(program):
    phase = next(p for p in phases.SEQUENCE if p.name.startswith("few rows"))
    made = network.Network(HostMemory(), False)
    for name, values in network.reference_chain().items():
        if name not in ("input", phase.name):
            made.memory.upload(made.out[name], values)
    run(program(UNITS["persistent", 256, 1]), made, 0, made.repeated(phase, 3), launches.AHEAD | launches.TILES)
    assert network.wrong(made.errors([phase])) == {}


def test_a_wait_that_cannot_end_gives_up(program):
    made = network.Network(HostMemory(), False)
    entries = made.repeated(phases.MOBILE[3], 2)
    entries["target"] += 1
    trace = np.zeros(network.MOST + 1, np.uint64)
    lists, counters, traced = (ctypes.c_void_p(x) for x in (made.list_address(entries), made.sync, trace.ctypes.data))
    library = program(UNITS["persistent", 256, 1])
    ctypes.c_ulonglong.in_dll(library, "step").value = 10_000_000
    try:
        library.run(0, lists, len(entries), launches.TILES, counters, traced)
    finally:
        ctypes.c_ulonglong.in_dll(library, "step").value = 100
    assert made.gave_up() and not made.gave_up()
