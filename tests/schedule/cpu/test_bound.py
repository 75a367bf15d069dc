"""Inputs of the CPU's bound: nothing counts that a kernel may do without."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jcuts.schedule.cpu.bound import host_arch, work_of
from tests import programs


def input_bytes(function, *args):
    return work_of(programs.trace(function, *args).program(), host_arch()).input_bytes


def test_guarded_loads_are_no_part_of_it():
    x = np.ones(40, np.float32)
    assert input_bytes(jnp.tanh, x) == x.nbytes
    assert input_bytes(lambda x: jnp.tanh(jnp.pad(x, 3)), x) == 0.0  # how many of them read is not counted
    assert input_bytes(lambda x: jnp.tanh(x[:30]), x) == 30 * x.itemsize
