"""CpuArch: hand-counted rates, levels, calibration; detection from made-up proc and sys trees."""

from __future__ import annotations

import json

import pytest

from jcuts.arch import detect, measure
from jcuts.arch.cpu import LEVELS, CpuArch
from jcuts.arch.detect import describe_cpu, detect_cpu
from jcuts.base.errors import ModelError


def make(**changes) -> CpuArch:
    values = {
        "name": "test",
        "machine": "x86_64",
        "cores": 2,
        "frequency": 3e9,
        "simd_bits": 512,
        "fma_ports": 2,
        "alu_ports": 2,
        "load_ports": 2,
        "store_ports": 1,
        "vector_registers": 32,
        "line": 64,
        "l1d": 32768,
        "l2": 1 << 20,
        "l3": 32 << 20,
        "bandwidth": {"l2": 200e9, "l3": 100e9, "dram": 30e9},
    }
    return CpuArch(**{**values, **changes})


def test_peak_by_hand():
    arch = make()
    # 2 ports * 16 lanes * 2 FLOP * 2 cores * 3 GHz
    assert arch.peak("float32") == 384e9
    assert arch.peak("float64") == 192e9
    assert arch.peak("bfloat16") == 384e9
    assert make(features=frozenset({"avx512_bf16"})).peak("bfloat16") == 768e9
    assert make(features=frozenset({"amx_bf16"})).peak("bfloat16") == 16 * 384e9
    assert make(features=frozenset({"avx512_fp16"})).peak("float16") == 768e9
    # integers: 2 ports * lanes * 1 operation
    assert arch.peak("int8") == 2 * 64 * 2 * 3e9
    assert arch.peak("int32") == 2 * 16 * 2 * 3e9
    with pytest.raises(ModelError, match="'float7'"):
        arch.peak("float7")


def test_lanes():
    assert [make().lanes(b) for b in (1, 2, 4, 8)] == [64, 32, 16, 8]
    with pytest.raises(ModelError, match="3 bytes"):
        make().lanes(3)


def test_levels():
    arch = make()
    # private caches of both cores add up
    assert arch.resident_level(2 * 32768) == "l1"
    assert arch.resident_level(2 * 32768 + 1) == "l2"
    assert arch.resident_level((2 << 20) + 1) == "l3"
    assert arch.resident_level((32 << 20) + 1) == "dram"
    assert arch.ceiling("l1") == 2 * 3e9 * 3 * 64
    assert arch.ceiling("l2") == 2 * 3e9 * 128
    assert arch.ceiling("l3") == 150e9 and arch.ceiling("dram") == 45e9
    rates = [arch.ceiling(level) for level in LEVELS]
    assert rates == sorted(rates, reverse=True)
    with pytest.raises(ModelError, match="'l4'"):
        arch.ceiling("l4")


def test_constants_without_measurement():
    arch = make(bandwidth={})
    assert arch.measured("dram") == 2 * 3e9 * 4 and arch.measured("l3") == 2 * 3e9 * 12
    assert arch.ceiling("l2") >= arch.ceiling("l3") >= arch.ceiling("dram") > 0
    # a line per cycle and core from L3; a quarter of that from DRAM
    assert arch.ceiling("l3") == 2 * 3e9 * 64 and arch.ceiling("dram") == 2 * 3e9 * 16
    # predictions stay with what kernels were seen to reach
    assert arch.likely("l3") == 1.5 * arch.measured("l3") and arch.likely("dram") == 1.5 * arch.measured("dram")
    assert arch.likely("l1") == arch.ceiling("l1") and arch.likely("l2") == arch.ceiling("l2")


def test_what_faster_levels_hold():
    arch = make()
    assert arch.above("l1") == 0 and arch.above("l2") == arch.capacity("l1")
    assert arch.above("dram") == sum(arch.capacity(level) for level in ("l1", "l2", "l3"))


def test_calibration_raises_only_a_clock_that_is_too_low():
    arch = make()
    assert arch.calibrated({}, {"float32": 300e9}, "m").frequency == 3e9
    raised = arch.calibrated({}, {"float32": 400e9}, "m")
    assert raised.peak("float32") == pytest.approx(440e9)


@pytest.mark.parametrize("field", ["cores", "frequency", "simd_bits", "l2", "vector_registers"])
def test_impossible_fields(field):
    with pytest.raises(ModelError, match=field) as caught:
        make(**{field: 0})
    assert caught.value.field == field


ZEN4 = (
    "processor\t: 0\nvendor_id\t: AuthenticAMD\ncpu family\t: 25\nmodel\t\t: 17\nmodel name\t: AMD EPYC\n"
    "stepping\t: 1\n"
    "cpu MHz\t\t: 2600.0\nflags\t\t: fpu sse4_2 avx avx2 fma f16c avx512f avx512dq avx512bw avx512vl avx512_bf16\n\n"
    "processor\t: 1\nvendor_id\t: Other\n"
)
ICE_LAKE = (
    "processor\t: 0\nvendor_id\t: GenuineIntel\ncpu family\t: 6\nmodel\t\t: 106\n"
    "model name\t: Intel(R) Xeon(R) Platinum 8370C CPU @ 2.80GHz\nflags\t\t: avx avx2 fma avx512f avx512dq avx512vl\n\n"
)
HASWELL = "vendor_id\t: GenuineIntel\ncpu family\t: 6\nmodel name\t: Core i7\nflags\t\t: avx avx2 fma\n\n"
N1 = "processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd0c\nFeatures\t: fp asimd asimdhp\n\n"


def tree(root, cpuinfo, max_khz=None, caches=(), siblings="0"):
    (root / "proc").mkdir(parents=True)
    (root / "proc/cpuinfo").write_text(cpuinfo)
    cpu = root / "sys/devices/system/cpu/cpu0"
    (cpu / "topology").mkdir(parents=True)
    (cpu / "topology/thread_siblings_list").write_text(siblings + "\n")
    if max_khz:
        (cpu / "cpufreq").mkdir()
        (cpu / "cpufreq/cpuinfo_max_freq").write_text(f"{max_khz}\n")
    for index, (level, kind, size, shared) in enumerate(caches):
        folder = cpu / f"cache/index{index}"
        folder.mkdir(parents=True)
        for name, value in {
            "level": level,
            "type": kind,
            "size": size,
            "coherency_line_size": 64,
            "shared_cpu_list": shared,
        }.items():
            (folder / name).write_text(f"{value}\n")
    return root


CACHES = (("1", "Data", "32K", "0"), ("1", "Instruction", "64K", "0"), ("2", "Unified", "1024K", "0"))


def test_zen4(tmp_path):
    arch = describe_cpu(tree(tmp_path, ZEN4, caches=(*CACHES, ("3", "Unified", "32768K", "0-7"))), cores=8)
    assert (arch.machine, arch.simd_bits, arch.vector_registers) == ("x86_64", 512, 32)
    # 512-bit instructions are split in two on this core
    assert (arch.fma_ports, arch.load_ports) == (1, 1)
    assert (arch.l1d, arch.l2, arch.l3, arch.line) == (32 << 10, 1 << 20, 32 << 20, 64)
    assert arch.frequency == 4.5e9 and arch.source == "detected"
    assert "avx512_bf16" in arch.features and "fpu" not in arch.features


def test_l3_counts_every_group_of_cores(tmp_path):
    root = tree(tmp_path, ZEN4, caches=(*CACHES, ("3", "Unified", "16M", "0-3")))
    assert [describe_cpu(root, cores=n).l3 >> 20 for n in (1, 4, 5, 16)] == [16, 16, 32, 64]


def test_shared_l2_and_smt_siblings(tmp_path):
    # 8 logical CPUs = 4 cores share 4 MiB
    root = tree(tmp_path, HASWELL, caches=(("1", "Data", "48K", "0-1"), ("2", "Unified", "4M", "0-7")), siblings="0-1")
    arch = describe_cpu(root, cores=4)
    assert (arch.l1d, arch.l2, arch.l3) == (48 << 10, 1 << 20, 0)


def test_intel(tmp_path):
    arch = describe_cpu(tree(tmp_path / "a", ICE_LAKE, max_khz=3500000), cores=4)
    assert (arch.simd_bits, arch.fma_ports, arch.load_ports, arch.frequency) == (512, 2, 2, 3.5e9)
    arch = describe_cpu(tree(tmp_path / "b", HASWELL), cores=4)
    assert (arch.simd_bits, arch.vector_registers, arch.fma_ports) == (256, 16, 2)


def test_arm(tmp_path):
    arch = describe_cpu(tree(tmp_path / "a", N1), cores=4)
    assert (arch.machine, arch.simd_bits, arch.vector_registers, arch.fma_ports) == ("aarch64", 128, 32, 2)
    assert arch.peak("float16") == 2 * arch.peak("float32")
    wide = describe_cpu(tree(tmp_path / "b", N1.replace("0xd0c", "0xd4f")), cores=4)
    assert wide.fma_ports == 4


def test_nothing_readable_falls_back(tmp_path):
    arch = describe_cpu(tmp_path, cores=3)
    assert arch.source == "fallback" and arch.cores == 3 and arch.peak() > 0 and arch.l3 > 0
    assert arch == describe_cpu(tmp_path, cores=3)


def test_container_quota(tmp_path):
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/cpu.max").write_text("50000 100000\n")
    assert describe_cpu(tmp_path).cores == 1
    (tmp_path / "sys/fs/cgroup/cpu.max").write_text("max 100000\n")
    assert describe_cpu(tmp_path).cores >= 1


def test_fingerprint_tells_processors_apart(tmp_path):
    one = describe_cpu(tree(tmp_path / "a", ZEN4), cores=2)
    other = describe_cpu(tree(tmp_path / "b", ICE_LAKE), cores=2)
    assert one.fingerprint != other.fingerprint
    assert one.fingerprint != describe_cpu(tmp_path / "a", cores=4).fingerprint


GOOD = {"bandwidth": {"copy": 20e9, "dram": 20e9, "l2": 90e9}, "peak": {"float32": 100e9}}


@pytest.fixture
def fake_measure(monkeypatch):
    calls = []
    detect._measure_once.cache_clear()
    monkeypatch.setattr(measure, "measure_bandwidth", lambda arch: calls.append(arch) or dict(GOOD["bandwidth"]))
    monkeypatch.setattr(measure, "measure_peak", lambda: dict(GOOD["peak"]))
    yield calls
    detect._measure_once.cache_clear()


def test_measurement_is_kept_and_read_back(tmp_path, fake_measure):
    first = detect_cpu(cache_dir=tmp_path / "new", root=tmp_path, cores=2)
    detect._measure_once.cache_clear()
    second = detect_cpu(cache_dir=tmp_path / "new", root=tmp_path, cores=2)
    assert first == second and len(fake_measure) == 1
    assert first.source == "measured" and first.bandwidth["dram"] == 20e9
    assert [path.name for path in (tmp_path / "new").iterdir()] == [f"cpu-{first.fingerprint}.json"]


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        "{}",
        json.dumps({"bandwidth": {"dram": -1}, "peak": {}}),
        json.dumps({**GOOD, "peak": {"x": 1}}),
        "\x00",
        json.dumps({"bandwidth": {"l2": 1e9}, "peak": {}}),
        '{"bandwidth": {"dram": NaN}, "peak": {}}',
    ],
)
def test_corrupt_measurement_is_measured_again(tmp_path, fake_measure, content, caplog):
    arch = describe_cpu(tmp_path, cores=2)
    path = tmp_path / f"cpu-{arch.fingerprint}.json"
    path.write_text(content)
    found = detect_cpu(cache_dir=tmp_path, root=tmp_path, cores=2)
    assert len(fake_measure) == 1 and found.bandwidth == GOOD["bandwidth"]
    assert "ignoring the CPU measurement" in caplog.text
    assert json.loads(path.read_text()) == GOOD


def test_unwritable_directory_is_no_error(tmp_path, fake_measure, caplog):
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    assert detect_cpu(cache_dir=blocked / "sub", root=tmp_path, cores=2).source == "measured"
    assert "nothing can be kept" in caplog.text


def test_impossible_measurement_falls_back(tmp_path, monkeypatch, caplog):
    detect._measure_once.cache_clear()

    def fail(arch):
        raise MemoryError("no memory")

    monkeypatch.setattr(measure, "measure_bandwidth", fail)
    arch = detect_cpu(root=tmp_path, cores=2)
    detect._measure_once.cache_clear()
    assert arch == describe_cpu(tmp_path, cores=2) and "no memory" in caplog.text


def test_this_machine():
    arch = detect_cpu(measured=False)
    assert arch == detect_cpu(measured=False)
    found = measure.measure_bandwidth(arch)
    assert found["copy"] == found["dram"] > 1e8 and set(found) <= {"copy", "l2", "l3", "dram"}
    peak = measure.measure_peak(large=64, small=32)
    assert set(peak) == {"float32", "float64"} and min(peak.values()) > 1e6
    better = arch.calibrated(found, peak, "measured")
    # the ceiling explains what was seen
    assert all(better.peak(kind) >= rate for kind, rate in peak.items())
