"""What processes keep of memory that they have used."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from jcuts.tune import malloc

PROGRAM = """
import numpy as np
from jcuts.tune.malloc import MOST, Heap, resident
mine, before, kept = Heap(), resident(), []
# 1.2 times as much, and in use behind it something too large for any gap before it.
one, two = [np.ones(MOST // 40) for _ in range(6)], np.ones(4 << 20)
del one
grown = resident() - before
gave = mine.trim()
print(grown > MOST, gave, resident() - before < MOST // 4, mine.trim(), two.sum() == 4 << 20)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's settings")
@pytest.mark.parametrize("keeps", [True, False])
def test_a_process_keeps_a_gigabyte_at_most(keeps):
    env = {**os.environ, **(malloc.KEEPING if keeps else {})}
    made = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, check=True)
    assert made.stdout.split() == [str(keeps), str(keeps), "True", "False", "True"]


def test_nothing_is_told_of_memory_where_there_is_no_such_file(monkeypatch):
    monkeypatch.setattr("builtins.open", lambda *_: (_ for _ in ()).throw(FileNotFoundError()))
    assert malloc.resident() == 0
