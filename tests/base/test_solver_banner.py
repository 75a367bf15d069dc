"""Standard output is the user's: HiGHS's banner does not appear there."""

from __future__ import annotations

import os
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


FIRST_CALL = """
import jax, jax.numpy as jnp, numpy as np, jcuts
from jcuts.fusion import exact_cover
solved = []
was = exact_cover._linear_program
exact_cover._linear_program = lambda *a, **k: solved.append(1) or was(*a, **k)
exactly = exact_cover._topological_dp
exact_cover._topological_dp = lambda *a: (exactly(*a)[0], False)  # as where a partition is too large for it

def net(x, w):
    for _ in range(3):
        x = jax.nn.softmax(jnp.tanh(x @ w), axis=1) * 2 + x
    return x.sum(0), x

x = np.linspace(-1, 1, 256 * 256, dtype=np.float32).reshape(256, 256)
f = jcuts.optimize(net)
jax.block_until_ready(f(x, x))
assert solved, "the test's function has no partition that is solved"
"""


def test_a_first_call_prints_nothing_on_standard_output(tmp_path, with_module_code):
    pytest.importorskip("highspy")
    environment = {**os.environ, "JCUTS_CACHE_DIR": str(with_module_code(tmp_path)), "JCUTS_MAX_CANDIDATES": "1"}
    done = subprocess.run(
        [sys.executable, "-c", FIRST_CALL], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
