"""Measured CPUs: the loops count instructions, and what is measured goes into a file and comes out again."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from jcuts.arch.cpu import CpuArch
from jcuts.arch.cpu_cores import Core
from jcuts.arch.cpu_file import CORE_UNITS, UNITS, parse_cpu, to_toml
from jcuts.arch.detect import describe_cpu
from jcuts.base.errors import ModelError
from jcuts.schedule.cpu import time_estimate
from jcuts.tune.hardware import cpu_loops, cpu_machine
from jcuts.tune.hardware.cpu_loops import CoreRates
from jcuts.tune.hardware.cpu_machine import Measured, described

HERE = describe_cpu()
RATES = CoreRates(clock=4.0e9, fma=1.96, alu=3.9, load=2.04, store=1.5, latency=4.1)
SEEN = Measured(RATES, {"l2": 200e9, "l3": 90e9, "dram": 30e9, "copy": 30e9}, {"float32": 1e9}, 4e-7, 2e-7)


def made(seen=SEEN, arch=HERE, clock=0.0):
    return described(replace(arch, store_ports=2), seen, "2026-11-26", clock)


def test_ports_are_whole_numbers_that_were_seen():
    arch = made()
    assert (arch.fma_ports, arch.alu_ports, arch.load_ports) == (2, 4, 2)
    assert arch.store_ports == 2 and "assumed by" in arch.sources["store_ports"]  # 1.5 is no number of ports
    assert arch.core.fma_latency == 4 and arch.frequency == pytest.approx(1.1 * 4e9)
    assert (arch.call_seconds, arch.handover_seconds, arch.source) == (4e-7, 2e-7, "measured")


def test_the_clock_is_a_ceiling():
    assert made(clock=5.5e9).frequency == 5.5e9
    fast = replace(SEEN, peak={"float32": 1e13})
    arch = made(fast)
    assert arch.peak("float32") >= 1e13 and "raised by a matrix product" in arch.sources["frequency"]


def test_every_number_says_where_it_comes_from():
    sources = made().sources
    numbers = {*UNITS, *(f"core.{name}" for name in CORE_UNITS), *(f"bandwidth.{name}" for name in SEEN.bandwidth)}
    assert set(sources) == numbers | {"measured_peak.float32", "overheads.call_seconds", "overheads.handover_seconds"}
    said = f"measured by jcuts arch measure, 2026-11-26, {HERE.name}"
    assert sources["fma_ports"].startswith(said) and "1.96" in sources["fma_ports"]
    assert sources["l2"].startswith("read by jcuts arch measure") and "not measured" in sources["core.issue_width"]
    assert set(CORE_UNITS) == {f.name for f in fields(Core)}


def test_a_file_is_read_back():
    arch = made()
    found = parse_cpu(to_toml(arch, "head"), "mine.toml")
    for f in fields(CpuArch):
        if f.name in ("source", "fingerprint"):
            continue
        wanted, got = getattr(arch, f.name), getattr(found, f.name)
        assert got == (pytest.approx(wanted, rel=1e-4) if isinstance(wanted, float) else wanted), f.name
    assert found.source == "mine.toml" and found.fingerprint and found.fingerprint != HERE.fingerprint


def test_measured_overheads_are_predicted():
    assert time_estimate.call_seconds(made()) == pytest.approx(6e-7)
    assert time_estimate.call_seconds(HERE) == time_estimate.CALL_SECONDS


@pytest.mark.parametrize(
    ("old", "new", "key", "reason"),
    [
        ('name = "', 'title = "', "title", "unknown key"),
        ("features = [", "features = 3 # [", "features", "list of texts"),
        ("cores = { value = ", "cores = { value = -", "cores", "positive"),
        ("l1d = { value = ", "l1d = { value = 0.", "l1d", "whole number"),
        ("fma_latency = {", "fma_late = {", "fma_late", "unknown key of core"),
        ("[core]", "[measured_peak]\n[other]", "other", "unknown key"),
        ("copy = {", "disk = {", "disk", "unknown key of bandwidth"),
        ("call_seconds = {", "calls = {", "calls", "unknown key of overheads"),
    ],
)
def test_malformed_files_name_line_and_key(old, new, key, reason):
    text = to_toml(made(), "head")
    text = text.replace("[measured_peak]\n", "", 1) if new.startswith("[measured_peak]") else text
    assert old in text
    with pytest.raises(ModelError, match=reason) as caught:
        parse_cpu(text.replace(old, new, 1), "mine.toml")
    assert (caught.value.file, caught.value.key) == ("mine.toml", key) and caught.value.line > 0


def test_missing_numbers_are_named():
    lines = to_toml(made(), "head").splitlines()
    for gone, reason in (("line = ", "line: missing"), ("cache_ways", "cache_ways: missing from the table core")):
        with pytest.raises(ModelError, match=reason):
            parse_cpu("\n".join(line for line in lines if not line.startswith(gone)), "mine.toml")


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize("name", ["clock", *cpu_loops.EACH])
def test_loops_are_well_formed(name, machine):
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    module = llvm.parse_assembly(cpu_loops.loop_text(name, machine, 8))
    module.verify()
    text = str(module)
    count = {"fma": "@llvm.fma", "latency": "@llvm.fma", "load": "load volatile", "store": "store volatile"}.get(name)
    if count:
        body = text[text.index("body:") : text.index("end:")]
        assert body.count(count) == cpu_loops.EACH[name]


def test_an_unknown_machine_has_no_loops():
    with pytest.raises(ModelError, match="riscv64") as caught:
        cpu_loops.core_rates("riscv64", 128)
    assert caught.value.machine == "riscv64"


@pytest.mark.skipif(HERE.machine not in ("x86_64", "aarch64"), reason="no loops for this machine")
def test_this_machine(monkeypatch):
    monkeypatch.setattr(cpu_loops, "LOOP_SECONDS", 2e-4)
    monkeypatch.setattr(cpu_loops, "ROUNDS", 2)
    monkeypatch.setattr(cpu_machine, "CALLS", 3)
    monkeypatch.setattr(cpu_machine, "CLOCK_SECONDS", 0.01)
    monkeypatch.setattr(cpu_machine.measure, "measure_bandwidth", lambda arch, patience: dict(SEEN.bandwidth))
    monkeypatch.setattr(cpu_machine.measure, "measure_peak", lambda patience: {"float32": 1e9})
    told = []
    arch = cpu_machine.measure_cpu(told.append)
    assert len(told) == 4 and arch.source == "measured" and arch.frequency > 1e8
    assert min(arch.fma_ports, arch.alu_ports, arch.load_ports, arch.store_ports) >= 1 and arch.call_seconds > 0
    assert parse_cpu(to_toml(arch, "head"), "mine.toml").cores == arch.cores
