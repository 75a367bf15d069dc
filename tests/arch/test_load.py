"""Architecture data files: shipped numbers, and every way a file can be malformed."""

from __future__ import annotations

from dataclasses import fields
from importlib import resources

import pytest

from jcuts.arch.gpu import GpuArch
from jcuts.arch.load import gpu_of_device, list_gpus, load_gpu, nearest_gpu, parse_gpu
from jcuts.base.errors import ModelError

SHIPPED = (resources.files("jcuts.arch") / "data" / "v100.toml").read_text()


def test_lists_the_five_machines():
    assert list_gpus() == ["A100", "H100", "H200", "RTX 2080", "V100"]


@pytest.mark.parametrize("name", ["RTX 2080", "rtx2080", "rtx-2080", "Rtx_2080"])
def test_name_ignores_case_and_punctuation(name):
    assert load_gpu(name).num_sm == 46


@pytest.mark.parametrize("name", list_gpus())
def test_every_number_has_a_source(name):
    arch = load_gpu(name)
    numbers = [f.name for f in fields(GpuArch) if f.type in ("int", "float")]
    assert set(arch.sources) == {*numbers, *(f"flop_per_clock_sm.{unit}" for unit in arch.flop_per_clock_sm)}
    assert all(len(source) > 3 for source in arch.sources.values())


@pytest.mark.parametrize("name", list_gpus())
def test_ceiling_is_near_and_not_below_the_vendor_figure(name):
    arch = load_gpu(name)
    # data sheets round to three digits
    assert 0.999 * arch.perf_peak <= arch.peak("ffma") <= 1.02 * arch.perf_peak
    assert arch.bw_l2 > arch.bw_global


@pytest.mark.parametrize(
    ("name", "unit", "tera"),
    [
        ("V100", "fp16_mma", 112),
        ("V100", "fp64", 7.0),
        ("A100", "tf32_mma", 156),
        ("A100", "bf16_mma", 312),
        ("H100", "tf32_mma", 494.7 * 1.98 / 1.83),
        ("H200", "bf16_mma", 989.4 * 1.98 / 1.83),
    ],
)
def test_peaks_against_published_numbers(name, unit, tera):
    assert load_gpu(name).peak(unit) == pytest.approx(tera * 1e12, rel=0.01)


def test_v100_roofline_knee_of_figure_3_2():
    arch = load_gpu("V100")
    assert round(arch.perf_peak / arch.bw_global, 1) == 15.6
    assert arch.trans_global() == 32 and arch.trans_global(2) == 64 and arch.shared_bytes_per_clock == 128


def test_unknown_name_suggests_the_nearest():
    with pytest.raises(ModelError, match="did you mean 'H100'") as caught:
        load_gpu("H10")
    assert caught.value.suggestion == "H100" and caught.value.name == "H10"


def test_unknown_unit_is_named():
    with pytest.raises(ModelError, match="tf32_mma") as caught:
        load_gpu("V100").peak("tf32_mma")
    assert caught.value.unit == "tf32_mma"


def test_element_that_does_not_divide_a_transaction():
    with pytest.raises(ModelError, match="3 bytes"):
        load_gpu("V100").trans_global(3)


def _line(key: str) -> int:
    return next(i for i, line in enumerate(SHIPPED.splitlines(), 1) if line.startswith(key))


@pytest.mark.parametrize(
    ("old", "new", "key", "reason"),
    [
        ("num_sm = { value = 80", 'num_sm = { value = "80"', "num_sm", "must be a number"),
        ("num_sm = { value = 80", "num_sm = { value = -80", "num_sm", "positive"),
        ("num_sm = { value = 80", "num_sm = { value = 80.5", "num_sm", "whole number"),
        ("num_sm = { value = 80", "num_sm = { value = true", "num_sm", "must be a number"),
        ("bw_global = { value = 9e+11", "bw_global = { value = inf", "bw_global", "finite"),
        ("num_sm = { value = 80", "num_sm = { valu = 80", "num_sm", "unknown part 'valu'"),
        ("max_shared = { value = 98304", "max_shared = { value = 98305", "max_shared", "exceeds shared_per_sm"),
        ("max_thread = { value = 1024", "max_thread = { value = 4096", "max_thread", "exceeds max_threads_per_sm"),
        ("fp64 = {", "fp65 = {", "fp65", "unknown compute unit"),
    ],
)
def test_malformed_entry_names_file_line_and_key(old, new, key, reason):
    assert old in SHIPPED
    with pytest.raises(ModelError, match=reason) as caught:
        parse_gpu(SHIPPED.replace(old, new), "mine.toml")
    error = caught.value
    assert (error.file, error.key) == ("mine.toml", key)
    assert error.line == _line(old.split(" ")[0])
    assert str(error).startswith(f"mine.toml:{error.line}: {key}")


def test_missing_key_and_source_and_name():
    lines = SHIPPED.splitlines()
    without = "\n".join(line for line in lines if not line.startswith("l2_bytes"))
    with pytest.raises(ModelError, match="l2_bytes: missing"):
        parse_gpu(without, "f")
    bare = "\n".join("num_sm = { value = 80 }" if line.startswith("num_sm") else line for line in lines)
    with pytest.raises(ModelError, match="num_sm: has no source"):
        parse_gpu(bare, "f")
    with pytest.raises(ModelError, match="name: must be"):
        parse_gpu(SHIPPED.replace('name = "V100"', "name = 3"), "f")
    with pytest.raises(ModelError, match="at least 'ffma'"):
        parse_gpu(SHIPPED.split("[flop_per_clock_sm]")[0], "f")
    plain = "\n".join("num_sm = 80" if line.startswith("num_sm") else line for line in lines)
    with pytest.raises(ModelError, match="num_sm: must be a table"):
        parse_gpu(plain, "f")


def test_unknown_key_suggests():
    with pytest.raises(ModelError, match="num_smm: unknown key, did you mean 'num_sm'") as caught:
        parse_gpu(SHIPPED.replace("num_sm = ", "num_smm = "), "f")
    assert caught.value.line == _line("num_sm")


def test_not_toml_names_the_line():
    with pytest.raises(ModelError, match="not valid TOML") as caught:
        parse_gpu('name = "x"\nnum_sm = = 3\n', "bad.toml")
    assert (caught.value.file, caught.value.line) == ("bad.toml", 2)


def test_user_file(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(SHIPPED.replace('"V100"', '"Mine"'))
    assert load_gpu(path).name == "Mine"
    with pytest.raises(ModelError, match="cannot read"):
        load_gpu(tmp_path / "absent.toml")


@pytest.mark.parametrize(
    ("device", "capability", "sms", "name"),
    [
        ("NVIDIA H100 80GB HBM3", (9, 0), 132, "H100"),
        ("NVIDIA H200", (9, 0), 132, "H200"),
        ("NVIDIA A100-SXM4-80GB", (8, 0), 108, "A100"),
        ("NVIDIA GeForce RTX 2080", (7, 5), 46, "RTX 2080"),
    ],
)
def test_devices_take_the_file_of_their_name(device, capability, sms, name):
    assert gpu_of_device(device, capability, sms, load_gpu(name).bw_global) == (load_gpu(name), True)


@pytest.mark.parametrize(
    ("capability", "name"),
    [((10, 0), "H200"), ((9, 0), "H200"), ((8, 9), "A100"), ((8, 0), "A100"), ((7, 0), "V100"), ((6, 1), "V100")],
)
def test_other_devices_take_the_nearest_file_scaled(capability, name):
    arch, named = gpu_of_device("NVIDIA Something", capability, 64, 5e11)
    near = load_gpu(name)
    assert nearest_gpu(capability) == near and not named and (arch.num_sm, arch.bw_global) == (64, 5e11)
    assert arch.bw_l2 == pytest.approx(near.bw_l2 * 64 / near.num_sm)
    assert arch.rate("shared") / near.rate("shared") == pytest.approx(64 / near.num_sm)


def test_a_board_with_other_memory_has_its_own_bandwidth():
    pcie, named = gpu_of_device("NVIDIA H100 PCIe", (9, 0), 114, 2.04e12)
    assert named and (pcie.num_sm, pcie.bw_global) == (114, 2.04e12)
    assert gpu_of_device("NVIDIA H100 PCIe", (9, 0), 114)[0].bw_global == load_gpu("H100").bw_global
    near = gpu_of_device("NVIDIA H200", (9, 0), 132, 0.999 * load_gpu("H200").bw_global)
    assert near == (load_gpu("H200"), True)


def test_a_board_with_another_clock_scales_rates_per_cycle():
    h100 = load_gpu("H100")
    pcie, _ = gpu_of_device("NVIDIA H100 PCIe", (9, 0), 114, 2.04e12, 1.755e9)
    assert pcie.clock == 1.755e9 and pcie.peak("bf16_mma") == pytest.approx(114 * 4096 * 1.755e9)
    assert pcie.bw_l2 == pytest.approx(h100.bw_l2 * 114 / 132 * 1.755 / 1.98)
    assert pcie.perf_peak == pytest.approx(h100.perf_peak * 114 / 132 * 1.755 / 1.98)
    assert gpu_of_device("NVIDIA H100", (9, 0), 132, 0.0, 1.95e9)[0] == h100
    other, named = gpu_of_device("NVIDIA Something", (8, 9), 58, 3e11, 2.04e9)
    assert not named and (other.clock, other.bw_global, other.num_sm) == (2.04e9, 3e11, 58)


def test_a_name_of_another_capability_is_another_gpu():
    assert gpu_of_device("Not an A100", (9, 0), 132)[1] is False
