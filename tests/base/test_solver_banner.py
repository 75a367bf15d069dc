"""Standard output is the user's: HiGHS's banner does not appear there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOLVE = """
import sys
from jcuts.fusion.exact_cover import _Candidate, _linear_program
from jcuts.fusion.dag import bits
if len(sys.argv) > 1:
    import os
    os.close(1)
members = [_Candidate(mask, 1.0 + mask / 100, frozenset(bits(mask))) for mask in (1, 2, 4, 3, 6)]
picked, _ = _linear_program(members, [])
_, prices = _linear_program(members, [], relaxed=True)
assert picked and prices, (picked, prices)
"""


@pytest.mark.parametrize("arguments", [[], ["closed"]])
def test_banner_is_kept_off_standard_output(arguments):
    pytest.importorskip("highspy")
    command = [sys.executable, "-c", SOLVE, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
