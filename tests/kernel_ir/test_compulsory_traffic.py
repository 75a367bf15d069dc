"""Compulsory traffic: whole operands and results, and of tables the rows that are looked up."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jcuts.base.settings import Settings
from jcuts.kernel_ir.compulsory_traffic import compulsory_bytes
from jcuts.pipeline import computation
from jcuts.rewrite.simplify import simplify
from jcuts.schedule.gpu import candidates as gpu_candidates
from jcuts.schedule.gpu.kernel_time import kernel_time
from jcuts.schedule.gpu.machine import fastest_memory
from jcuts.schedule.gpu.traffic import compulsory
from jcuts.trace.inline import inline
from jcuts.tune import expected_gain
from tests import programs

TABLE = np.zeros((50000, 64), np.float32)


def program_of(fn, *arguments):
    made = programs.trace(fn, *arguments)
    return made.program()


def whole(program):
    return sum(b.bytes for b in (*program.inputs, *program.outputs))


def test_everything_counts_where_addresses_follow_from_loops():
    x, y = np.zeros((64, 256), np.float32), np.zeros(256, np.float32)
    for fn in (lambda x, y: x + y, lambda x, y: (x * y).sum(1), lambda x, y: x @ y, lambda x, y: x[:, ::2] + y[::2]):
        made = program_of(fn, x, y)
        assert compulsory_bytes(made) == whole(made) == compulsory(made)


def test_a_lookup_reads_rows():
    numbers = np.zeros(8, np.int32)
    made = program_of(lambda t, n: t[n], TABLE, numbers)
    assert compulsory_bytes(made) == 2 * 8 * 64 * 4 + numbers.nbytes < whole(made) / 1000


def test_a_norm_of_rows_that_are_looked_up_reads_them_once():
    def fn(t, n):
        x = t[n]
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True))

    numbers = np.zeros(8, np.int32)
    assert compulsory_bytes(program_of(fn, TABLE, numbers)) == 2 * 8 * 64 * 4 + numbers.nbytes


def test_a_table_that_is_read_in_order_as_well_counts_whole():
    made = program_of(lambda t, n: t[n] + t[:8], TABLE[:4096], np.zeros(8, np.int32))
    assert compulsory_bytes(made) == whole(made)


def test_more_lookups_than_rows_count_no_more_than_the_table():
    made = program_of(lambda t, n: t[n].sum(0), TABLE[:100], np.zeros(4096, np.int32))
    assert compulsory_bytes(made) == whole(made)


def test_a_scheduled_lookup_takes_less_than_reading_the_table():
    made = program_of(lambda t, n: t[n] * 2, np.zeros((1 << 20, 64), np.float32), np.zeros(64, np.int32))
    machine = gpu_candidates.GpuMachine.named("H200")
    for scheduled, _ in gpu_candidates.candidates(made, machine, 4):
        assert kernel_time(scheduled, machine).seconds < whole(made) / machine.bandwidth / 10


def test_the_expected_gain_of_a_lookup_is_that_of_its_rows():
    closed = jax.make_jaxpr(lambda t, n: jnp.tanh(t[n]))(TABLE, np.zeros(8, np.int32))
    top = computation.group(simplify(inline(closed)), Settings(), computation.Fuel())
    (region,) = [r for r in top.subsets if any(e.primitive.name == "gather" for e in r.closed.jaxpr.eqns)]
    assert 0 < expected_gain.seconds(region, on_gpu=True) < 0.01 * TABLE.nbytes / fastest_memory()
