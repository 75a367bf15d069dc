"""Numbers of CPU cores as data: the shipped file, which row a core takes, malformed files."""

from __future__ import annotations

from dataclasses import fields
from importlib import resources

import pytest

from jcuts.arch.cpu_cores import CORE, MEMORY, TABLE, Core, MemoryRates, Ports, parse_cores, ports_of
from jcuts.base.errors import ModelError

SHIPPED = (resources.files("jcuts.arch") / "cpu_cores.toml").read_text()
AMD = {"vendor_id": "AuthenticAMD"}
INTEL = {"vendor_id": "GenuineIntel", "cpu family": "6"}


def test_every_number_has_a_source():
    named = {f"core.{f.name}" for f in fields(Core)} | {f"memory.{f.name}" for f in fields(MemoryRates)}
    assert set(TABLE.sources) == named | {"clock.assumed", "clock.turbo_ratio"}
    assert all(len(source) > 10 for source in TABLE.sources.values())
    assert all(row.source and row.name for row in TABLE.ports)


def test_defaults_are_those_of_the_fit():
    """The coefficients of the cycle model were fitted beside them: another number is another ranking."""
    assert Core(4, 6, 12, 24, 8, 4096) == CORE
    assert MemoryRates(128, 64, 16, 32, 12, 4, 1.5, 1.1) == MEMORY


@pytest.mark.parametrize(
    ("machine", "info", "bits", "ports"),
    [
        ("x86_64", AMD | {"cpu family": "25"}, 512, Ports(1, 2, 1, 1)),
        ("x86_64", AMD | {"cpu family": "25"}, 256, Ports(2, 4, 2, 2)),
        ("x86_64", AMD | {"cpu family": "23"}, 256, Ports(2, 4, 2, 1)),
        ("x86_64", AMD | {"cpu family": "26"}, 512, Ports(2, 4, 2, 1)),
        ("x86_64", AMD | {"cpu family": "what"}, 256, Ports(2, 4, 3, 2)),
        ("x86_64", INTEL, 512, Ports(2, 2, 2, 2)),
        ("x86_64", INTEL, 256, Ports(2, 4, 3, 2)),
        ("x86_64", {}, 128, Ports(2, 4, 3, 2)),
        ("aarch64", {"CPU implementer": "0x41", "CPU part": "0xd49"}, 128, Ports(2, 2, 2, 2)),
        ("aarch64", {"CPU implementer": "0x41", "CPU part": "0xd4f"}, 128, Ports(4, 4, 3, 2)),
        ("aarch64", {}, 128, Ports(4, 4, 3, 2)),
    ],
)
def test_ports_are_those_of_the_first_row_that_fits(machine, info, bits, ports):
    assert ports_of(machine, info, bits) == ports


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("[core]", "[cores]", "core.: must be a table"),
        ("fma_latency = { value = 4", "fma_latency = { value = 4.5", "core.fma_latency: .* whole number"),
        ("fma_latency = { value = 4", "fma_latency = { value = 0", "core.fma_latency: .* positive"),
        ("fma_latency = { value = 4", "latency = { value = 4", "core.fma_latency: missing"),
        (
            'value = 1.5, unit = "ratio", source = "a',
            'value = 1.5, unit = "ratio", from = "a',
            "memory.copy_traffic: must be",
        ),
        ("value = 4.5e9, unit", "value = true, unit", "clock.assumed: value True"),
        ("fma = 1, alu", "fpu = 1, alu", "ports of 'Zen 3, Zen 4 with 512 bits'"),
        ("[core]", "[core", "not valid TOML"),
    ],
)
def test_malformed_files_are_refused(old, new, reason):
    assert old in SHIPPED
    with pytest.raises(ModelError, match=reason) as caught:
        parse_cores(SHIPPED.replace(old, new, 1), "mine.toml")
    assert caught.value.file == "mine.toml"


def test_a_number_needs_a_source():
    line = next(x for x in SHIPPED.splitlines() if x.startswith("issue_width"))
    with pytest.raises(ModelError, match="issue_width: has no source"):
        parse_cores(SHIPPED.replace(line, 'issue_width = { value = 6, source = " " }'), "mine.toml")
