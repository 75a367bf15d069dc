"""The faults that mutation testing seeds fit the sources, so that each of them can still be tried."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from benchmarks.fault_injection.source_faults import HERE, read_faults

ROOT = Path(__file__).resolve().parents[2]
FAULTS = read_faults(HERE / "source_faults.toml")


@pytest.mark.parametrize("number", range(1, len(FAULTS) + 1))
def test_it_fits(number):
    fault = FAULTS[number - 1]
    text = (ROOT / fault.file).read_text(encoding="utf-8")
    assert text.count(fault.old) == 1 and fault.old != fault.new
    ast.parse(text.replace(fault.old, fault.new))
    assert fault.breaks and fault.tests and all((ROOT / test).exists() for test in fault.tests)


def test_there_are_fifty():
    assert len({(fault.file, fault.old) for fault in FAULTS}) == len(FAULTS) == 50
