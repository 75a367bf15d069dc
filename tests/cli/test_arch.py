"""``jcuts arch measure``: the file that it writes, who reads it, and one clear line per error."""

from __future__ import annotations

import os
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

import jcuts
from jcuts.arch.chosen import chosen_cpu, chosen_gpu
from jcuts.arch.cpu_file import to_toml
from jcuts.arch.detect import describe_cpu
from jcuts.arch.load import load_arch, load_cpu, load_gpu
from jcuts.base import knobs
from jcuts.base.errors import ModelError, NativeError, UsageError
from jcuts.cli import arch as command
from jcuts.cli.main import main
from jcuts.schedule.cpu.bound import host_arch
from jcuts.tune.hardware import cpu_machine
from jcuts.tune.hardware.cpu_loops import CoreRates
from jcuts.tune.hardware.cpu_machine import Measured, described
from jcuts.tune.measure import cuda_driver
from jcuts.xla import devices as xla_devices

SEEN = Measured(CoreRates(3e9, 2.0, 4.0, 2.0, 1.0, 4.0), {"dram": 30e9}, {"float32": 1e9}, 4e-7, 2e-7)
assembles = pytest.mark.cuda_compilers


def measured(progress=lambda _: None):
    progress("everything")
    return described(describe_cpu(), SEEN, "2026-11-26", 0.0)


@pytest.fixture
def quick(monkeypatch, cache_dir):
    """No GPU, and a CPU that is measured at once."""
    monkeypatch.setattr(cuda_driver, "total_bytes", lambda: 0)
    monkeypatch.setattr(cpu_machine, "measure_cpu", measured)


def test_a_cpu_is_written_and_read(quick, tmp_path, capsys):
    path = tmp_path / "cpu.toml"
    assert main(["arch", "measure", "--out", str(path)]) == 0
    out, err = capsys.readouterr()
    assert f"JCUTS_ARCH={path}" in out and "measuring everything" in err
    found = load_cpu(path)
    assert found == load_arch(path) and found.bandwidth == {"dram": 30e9} and found.call_seconds == 4e-7
    with knobs.scope(arch=(str(path),)):
        assert host_arch() is chosen_cpu() and chosen_gpu() is None and host_arch().source == str(path)
        report = jcuts.optimize(lambda x: jnp.tanh(x).sum(0), mode="fusion", tune="off").explain(np.ones((64, 2048)))
        assert any(f"the numbers of {path} (JCUTS_ARCH)" in note for note in report.notes)
    assert chosen_cpu() is None and host_arch().source != str(path)


def test_explain_does_not_take_a_cpu_for_a_gpu(tmp_path, capsys):
    path = tmp_path / "cpu.toml"
    path.write_text(to_toml(measured(), "head"))
    assert main(["explain", "numpy:zeros_like", "--args", "numpy:pi", "--arch", str(path)]) == 2
    assert f"{path} is a CPU's file, --arch ranks for GPUs" in capsys.readouterr().err


@assembles
def test_a_dry_run_writes_what_says_so(tmp_path, capsys):
    path = tmp_path / "gpu.toml"
    assert main(["arch", "measure", "--out", str(path), "--dry-run", "h100"]) == 0
    found = load_arch(path)
    assert found == load_gpu(path) and found.name == "H100 (dry run, nothing was measured)" and found.num_sm == 132
    assert "measuring compute units" in capsys.readouterr().err
    gpu = xla_devices.Gpu("NVIDIA Something", (9, 0), 132)
    with knobs.scope(arch=(str(path),)):
        assert xla_devices.architecture_of(gpu) == (found, True) and chosen_cpu() is None
        with pytest.raises(UsageError, match=r"compute capability 9\.0: NVIDIA Something has 8\.0") as caught:
            xla_devices.architecture_of(replace(gpu, capability=(8, 0)))
        assert caught.value.device == "NVIDIA Something"


def test_a_note_names_the_file_of_a_gpu(monkeypatch):
    monkeypatch.setattr(xla_devices, "this", lambda: xla_devices.Gpu("NVIDIA H100 80GB HBM3", (9, 0), 132))
    assert xla_devices.rates_of_another() == ""
    with knobs.scope(arch=("H200",)):
        assert xla_devices.rates_of_another() == "schedules are ranked by rates of H200 (JCUTS_ARCH)"
    monkeypatch.setattr(xla_devices, "this", lambda: xla_devices.Gpu("NVIDIA L4", (8, 9), 58))
    assert xla_devices.rates_of_another().startswith(
        "no architecture file for NVIDIA L4: schedules are ranked by rates of "
    )
    assert "scaled to 58 SMs, 1.41 GHz and" in xla_devices.rates_of_another()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--out", "cpu.json"], "must end in .toml"),
        (["--out", "nowhere/cpu.toml"], "there is no folder nowhere"),
        (["--out", "here.toml"], "here.toml is there already: --force replaces it"),
        (["--out", "folder.toml"], "it is a folder"),
        (["--out", "new.toml", "--device", "cpu", "--dry-run", "H100"], "a CPU needs no device"),
        (["--out", "new.toml", "--dry-run", "H10"], "did you mean 'H100'"),
    ],
)
def test_wrong_use_is_one_line_and_exits_2(more, said, quick, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here.toml").write_text("kept")
    (tmp_path / "folder.toml").mkdir()
    assert main(["arch", "measure", *more]) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1
    assert (tmp_path / "here.toml").read_text() == "kept" and not (tmp_path / "new.toml").exists()


def test_force_replaces_a_file(quick, tmp_path):
    path = tmp_path / "cpu.toml"
    path.write_text("old")
    assert main(["arch", "measure", "--out", str(path), "--force"]) == 0
    assert load_cpu(path).cores == describe_cpu().cores


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anything")
def test_a_file_that_may_only_be_read_is_told_before_measuring(quick, tmp_path, capsys):
    path = tmp_path / "cpu.toml"
    path.write_text("old")
    path.chmod(0o400)
    assert main(["arch", "measure", "--out", str(path), "--force"]) == 2
    err = capsys.readouterr().err
    assert "cannot be written" in err and "measuring" not in err


def test_without_a_gpu_there_is_an_error_of_the_driver(monkeypatch, tmp_path):
    def none(_):
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(cuda_driver.ctypes, "CDLL", none)
    with pytest.raises(NativeError, match="the CUDA driver cannot be opened"):
        command._measured("cuda", None)
    assert main(["arch", "measure", "--out", str(tmp_path / "gpu.toml"), "--device", "cuda"]) == 2
    assert not (tmp_path / "gpu.toml").exists()


def test_files_that_jcuts_arch_names_must_be_good(tmp_path):
    with knobs.scope(arch=(str(tmp_path / "gone.toml"),)), pytest.raises(ModelError, match="cannot read") as caught:
        chosen_cpu()
    assert caught.value.file == str(tmp_path / "gone.toml")
    with knobs.scope(arch=("H100", "A100")), pytest.raises(UsageError, match="names 2 GPUs") as several:
        chosen_gpu()
    assert several.value.names == ("H100", "A100")
    path = tmp_path / "both.toml"
    path.write_text(to_toml(measured(), "head"))
    both = f"{path}{os.pathsep}H100"
    assert knobs.parse({"JCUTS_ARCH": both}).arch == (str(path), "H100")
    with knobs.scope(arch=knobs.parse({"JCUTS_ARCH": both}).arch):
        assert chosen_cpu() is not None and chosen_gpu() == load_gpu("H100")
