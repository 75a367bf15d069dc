"""The benchmark of phases in a persistent kernel as far as it needs no GPU: operands, references, lists, its sections.

A made-up driver stands for the GPU: it computes what a launched list asks for by the references, and counts
microseconds, so that all that the benchmark asks of the driver and all its sums are tried.
"""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.gpu_kernels import persistent_phases
from benchmarks.gpu_kernels.persistent import compile as compiler
from benchmarks.gpu_kernels.persistent import launches, measure, network, phases
from jcuts.base.errors import NativeError
from jcuts.tune.measure.cuda_driver import Driver

LAUNCH = 3.0
"""Made-up microseconds of a launch."""
PHASE = 1.5
"""Of each phase of a list."""
UNITS = {unit.form: unit for unit in compiler.UNITS}


class MadeUpDriver(Driver):
    """Host memory for the device's. Args: spoiled: a phase whose result is wrong; refuses: a call that fails;
    bodies: phases by the number of their code.
    """

    spoiled = ""
    refuses = ""
    bodies = phases.BODIES

    def __init__(self) -> None:
        self.lib = SimpleNamespace(cuEventElapsedTime_v2=None)
        self.handle, self.stream, self.now = ctypes.c_int(0), 1, 0.0
        self.memory: dict[int, np.ndarray] = {}
        self.names: list[str] = []
        self.events: list[float] = []
        self.graphs: list[list[tuple]] = []
        self.captured: list[tuple] | None = None
        self.done: set[int] = set()

    def call(self, name: str, *arguments: object) -> None:
        if name == self.refuses:
            raise NativeError(f"{name} failed", call=name, code=1)
        getattr(self, f"_{name}", lambda *_: None)(*arguments)

    @property
    def name(self) -> str:
        return "made up"

    def attribute(self, number: int) -> int:
        return {16: 132, 13: 2_000_000}[number]

    def _cuMemAlloc_v2(self, pointer, size):
        block = np.full(size.value + 256, 0xFF, np.uint8)
        pointer._obj.value = -(-block.ctypes.data // 128) * 128
        self.memory[pointer._obj.value] = block

    def _cuMemsetD8Async(self, pointer, value, size, stream):
        if size.value < launches.FLUSHED:
            ctypes.memset(pointer.value, value.value, size.value)
            self.done.clear()

    def _cuMemcpyHtoDAsync_v2(self, pointer, data, size, stream):
        ctypes.memmove(pointer.value, data.value, size.value)

    def _cuMemcpyDtoHAsync_v2(self, data, pointer, size, stream):
        ctypes.memmove(data.value, pointer.value, size.value)

    def _cuModuleGetFunction(self, function, module, name):
        self.names.append(name.value.decode())
        function._obj.value = len(self.names)

    def _cuEventCreate(self, event, flags):
        self.events.append(0.0)
        event._obj.value = len(self.events)

    def _cuEventRecord(self, event, stream):
        self.events[event.value - 1] = self.now

    def _cuEventElapsedTime_v2(self, milliseconds, first, second):
        milliseconds._obj.value = (self.events[second.value - 1] - self.events[first.value - 1]) / 1e3

    def _cuStreamBeginCapture_v2(self, stream, mode):
        self.captured = []

    def _cuStreamEndCapture(self, stream, graph):
        self.graphs.append(self.captured)
        self.captured = None

    def _cuGraphInstantiateWithFlags(self, made, graph, flags):
        made._obj.value = len(self.graphs)

    def _cuGraphLaunch(self, graph, stream):
        for launch in self.graphs[graph.value - 1]:
            self._run(*launch)

    def _cuFuncGetAttribute(self, value, number, function):
        value._obj.value = 0

    def _cuOccupancyMaxActiveBlocksPerMultiprocessor(self, value, function, threads, shared):
        value._obj.value = 1

    def _cuLaunchKernelEx(self, config, function, table, extra):
        name, config = self.names[function.value - 1], config._obj
        assert config.shared <= 227 << 10 and config.stream == self.stream and config.grid[1] == config.block[1] == 1
        assert bool(config.count) == (name == "persistent" or config.attributes[0].id == 6)
        if name == "persistent":
            assert config.grid[0] % 132 == 0 and config.attributes[0].id == 2 and config.attributes[0].value == 1
            address, count = (np.frombuffer((ctypes.c_byte * 8).from_address(table[k]), np.uint64)[0] for k in (0, 1))
            number = int(count) & 0xFFFFFFFF
            launch = int(address), ctypes.string_at(int(address), number * network.ENTRY.itemsize)
        else:
            launch = 0, ctypes.string_at(table[0], network.ENTRY.itemsize)
        if self.captured is None:
            self._run(*launch)
        else:
            self.captured.append(launch)

    def _run(self, address, listed):
        entries = np.frombuffer(listed, network.ENTRY)
        self.now += LAUNCH + PHASE * len(entries)
        if (listed, address) not in self.done:
            self.done.add((listed, address))
            for entry in entries:
                self._compute(entry)

    def _compute(self, entry):
        phase = self.bodies[int(entry["body"])]
        if phase is phases.NOTHING:
            return
        number = phases.SEQUENCE.index(phase)
        source = phase.source or (phases.SEQUENCE[number - 1].name if number else "input")
        side = self._read(entry["side"], self._shape(phase.side)) if phase.side else np.zeros(0, np.float32)
        got = network.expected(number, self._read(entry["in"], self._shape(source)), side).astype(np.float32)
        if phase.name == self.spoiled:
            got = got + np.float32(1)
        ctypes.memmove(int(entry["out"]), got.ctypes.data, got.nbytes)

    def _shape(self, name):
        return phases.INPUT if name == "input" else next(p for p in phases.SEQUENCE if p.name == name).shape()

    def _read(self, address, shape):
        raw = ctypes.string_at(int(address), 4 * int(np.prod(shape)))
        return np.frombuffer(raw, np.float32).reshape(shape).copy()


def measured(monkeypatch, unit, **changed):
    if unit.form == "copies":
        changed["bodies"] = [phase for phase in phases.COPIED for _ in range(phases.COPIES)]
    made = type("Changed", (MadeUpDriver,), changed)
    monkeypatch.setattr(measure, "Driver", made)
    row: dict = {}
    measure.measure(unit, b"cubin", row, lambda: None)
    return row


def test_bodies_are_distinct_and_about_as_many_tiles_as_multiprocessors():
    for fine in (False, True):
        assert len({phase.body(fine) for phase in phases.BODIES}) == len(phases.BODIES) == 22
    assert all(28 <= phase.geometry(False).tiles <= 168 for phase in phases.SEQUENCE)
    for phase in phases.BODIES:
        for geometry in (phase.geometry(False), phase.geometry(True)):
            assert geometry.ranges <= 128 and geometry.tiles > 0
            assert geometry.tiles // max(1, geometry.row_tiles) <= geometry.target * 16
    assert {phase.kind.split(",")[0] for phase in phases.BODIES} >= {
        "depthwise 3x3",
        "1x1 convolution",
        "3x3 convolution",
        "few-row GEMM",
        "GEMV",
        "layer norm",
        "global average pool",
        "residual",
    }


@pytest.mark.parametrize("fine", [False, True])
@pytest.mark.parametrize("phase", [p for p in phases.SEQUENCE if isinstance(p, phases.Matmul)], ids=lambda p: p.name)
def test_lanes_read_the_weights_of_their_fragments(phase, fine):
    """The indices of `Matmul::multiply`: kt, group of 16 columns, lane, value."""
    weights, _ = network.constants(phases.SEQUENCE.index(phase))
    columns = phase.tiled(fine)[1]
    geometry = phase.geometry(fine)
    step = phases.CHUNK // columns
    packed = phase.packed(weights, fine).reshape(-1, geometry.chunks, step // 8, columns // 16, 32, 4)
    block, chunk, kt, group, lane, value = np.indices(packed.shape, sparse=True)
    k = (block % phase.split * geometry.chunks + chunk) * step + kt * 8 + value % 2 * 4 + lane % 4
    n = block // phase.split * columns + group * 16 + value // 2 * 8 + lane // 4
    np.testing.assert_array_equal(packed, phases.rounded(weights)[k, n])
    assert packed.shape[0] * geometry.row_tiles == geometry.tiles


def test_references_are_what_a_convolution_is():
    conv = phases.Matmul("conv", size=(4, 5), channels=(2, 3), taps=9, relu=False)
    rng = np.random.default_rng(0)
    x, weights = phases.rounded(rng.standard_normal((20, 2))), phases.rounded(rng.standard_normal((18, 3)))
    got = conv.reference(x, x, weights, np.zeros(3))
    image, filters = x.reshape(4, 5, 2).astype(float), weights.reshape(3, 3, 2, 3).astype(float)
    want = sum(image[dy, dx - 1] @ filters[dy, dx] for dy in range(2) for dx in (1, 2))  # the corner (1, 0), lower taps
    np.testing.assert_allclose(got.reshape(4, 5, 3)[0, 0], sum_at(image, filters, 0, 0))
    np.testing.assert_allclose(got.reshape(4, 5, 3)[2, 4], sum_at(image, filters, 2, 4))
    assert want.shape == (3,)
    window = phases.Depthwise("window", size=(4, 4), channels=2, stride=2)
    x, small = rng.standard_normal((16, 2)).astype(np.float32), rng.standard_normal((10, 2)).astype(np.float32)
    filters = np.zeros((3, 3, 2, 2))
    filters[..., 0, 0], filters[..., 1, 1] = small[:9, 0].reshape(3, 3), small[:9, 1].reshape(3, 3)
    want = np.maximum(sum_at(x.reshape(4, 4, 2).astype(float), filters, 2, 0) + small[9], 0)
    np.testing.assert_allclose(window.reference(x, x, x, small)[2], want)


def sum_at(image, filters, y, x):
    """A 3x3 convolution with padding 1 at one pixel."""
    height, width, _ = image.shape
    found = np.zeros(filters.shape[-1])
    for dy in range(3):
        for dx in range(3):
            yy, xx = y + dy - 1, x + dx - 1
            if 0 <= yy < height and 0 <= xx < width:
                found += image[yy, xx] @ filters[dy, dx]
    return found


def test_rounding_to_tf32_is_to_the_nearest_halves_away_from_zero():
    step = 2.0**-10
    x = np.array([1 + step / 2, 1 + step * 0.49, -1 - step / 2, 3.0], np.float32)
    np.testing.assert_array_equal(phases.rounded(x), np.array([1 + step, 1, -1 - step, 3], np.float32))


def test_phases_wait_for_what_they_read():
    made = network.Network(MadeUpDriver(), fine=False)
    entries = made.sequence()
    names = [phase.name for phase in phases.SEQUENCE]
    for number, phase in enumerate(phases.SEQUENCE):
        assert entries["after"][number] < number and entries["side_after"][number] < number
        if phase.source:
            assert names[entries["after"][number]] == phase.source
    assert entries["after"][0] == -1 and entries["side_after"][names.index("residual 28x28x64")] == -1
    assert len(made.sequence(without=3)) == len(names) - 1
    assert list(made.repeated(phases.SEQUENCE[1], 3)["after"]) == [-1, 0, 1]


@pytest.mark.parametrize("form", sorted(UNITS))
def test_all_sections_are_filled(monkeypatch, form):
    row = measured(monkeypatch, UNITS[form])
    assert row["failed_sections"] == {} and row["direct_launches"] == 0
    assert all(error < network.LIMIT for error in row["errors"].values())
    steps = len(phases.SEQUENCE)
    if form == "persistent":
        assert row["sequence, grid barrier"]["back_to_back"] == pytest.approx(LAUNCH + PHASE * steps, abs=0.01)
        assert row["phases, counters per tile"]["nothing"] == pytest.approx(PHASE, abs=0.01)
        assert row["without, grid barrier, weights ahead"]["window 28x28x192"] == pytest.approx(PHASE, abs=0.01)
        assert len(row["trace, grid barrier"]["cold"]) == steps
    elif form == "chain":
        assert row["sequence, plain launches"]["back_to_back"] == pytest.approx((LAUNCH + PHASE) * steps, abs=0.01)
        assert row["phases, dependent launch"]["nothing"] == pytest.approx(LAUNCH + PHASE, abs=0.01)
    else:
        assert len(row["errors"]) == 2


def test_a_wrong_phase_is_recorded_and_the_rest_goes_on(monkeypatch):
    row = measured(monkeypatch, UNITS["chain"], spoiled="layer norm 196x1024")
    assert "WrongResultError" in row["failed_sections"]["sequence, plain launches"]
    assert "layer norm 196x1024" in row["failed_sections"]["sequence, plain launches"]
    assert "phases, plain launches" in row


def test_without_graphs_launches_are_timed_one_by_one(monkeypatch):
    row = measured(monkeypatch, UNITS["copies"], refuses="cuGraphInstantiateWithFlags")
    assert row["failed_sections"] == {} and row["direct_launches"] > 0


@pytest.mark.cuda_compilers
def test_dry_run_compiles_without_spills(tmp_path, capsys, monkeypatch):
    """Two of the programs; the command without GPU does all."""
    monkeypatch.setattr(compiler, "UNITS", (UNITS["persistent"], UNITS["chain"]))
    assert persistent_phases.main(["--dry-run", "--workers", "2", "--out", str(tmp_path / "phases.json")]) == 0
    assert "failed: nothing" in capsys.readouterr().out


def test_what_hangs_is_not_timed_phase_by_phase(monkeypatch):
    monkeypatch.setattr(measure, "VARIANTS", {"grid barrier": 0})
    monkeypatch.setattr(network.Network, "gave_up", lambda self: True)
    row = measured(monkeypatch, UNITS["persistent"])
    assert row["failed_sections"] == {"sequence, grid barrier": "GaveUpError: grid barrier"}
    assert "phases, grid barrier" not in row and "without, grid barrier, weights ahead" in row
