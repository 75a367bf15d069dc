"""WR and desirable sets against enumeration and against the paper's recursion."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jcuts.base.errors import UsageError
from jcuts.microbatch import batch_division_dp
from jcuts.microbatch.convolution import Convolution
from jcuts.microbatch.errors import NoDivisionError
from jcuts.microbatch.pareto import BLOCK, desirable
from jcuts.microbatch.timings import Division, MicroConfig, Table, policy_sizes, usable_sizes
from tests.microbatch import reference
from tests.microbatch.cases import convolution, random_limit, random_table

MIB = 1 << 20


def table_of(*rows: tuple[int, str, float, int]) -> Table:
    """A table of (batch, algorithm, microseconds, MiB)."""
    return Table(convolution(), tuple(MicroConfig(b, a, "float32", us / 1e6, mib * MIB) for b, a, us, mib in rows))


def test_hand_count():
    # FFT is fast, and too large undivided: two halves in 64 MiB.
    table = table_of((8, "GEMM", 30, 0), (8, "FFT", 6, 120), (4, "FFT", 4, 60), (4, "GEMM", 15, 0), (2, "FFT", 3, 30))
    found = batch_division_dp.divide(table, 8, 64 * MIB)
    assert found.runs == ((2, MicroConfig(4, "FFT", "float32", 4e-6, 60 * MIB)),)
    assert found.seconds == pytest.approx(8e-6) and found.workspace == 60 * MIB and found.batch == 8
    assert [start for start, _ in found.offsets] == [0, 4]
    assert str(found) == "2 x 4 FFT:float32"
    assert batch_division_dp.divide(table, 8).parts == (MicroConfig(8, "FFT", "float32", 6e-6, 120 * MIB),)
    assert batch_division_dp.divide(table, 8, 0).parts == (MicroConfig(8, "GEMM", "float32", 30e-6, 0),)
    assert batch_division_dp.undivided(table, 8, 64 * MIB) == batch_division_dp.divide(table, 8, 0)
    assert [(round(d.seconds * 1e6), d.workspace // MIB) for d in desirable(table, 8)] == [
        (30, 0),
        (12, 30),
        (8, 60),
        (6, 120),
    ]


def test_of_equal_times_the_least_workspace_is_desirable():
    table = table_of((1, "GEMM", 1, 0), (2, "FFT", 2, 10), (2, "WINOGRAD", 1, 20))
    assert [(round(d.seconds * 1e6), d.workspace // MIB) for d in desirable(table, 2)] == [(2, 0), (1, 20)]


@pytest.mark.parametrize("seed", range(60))
def test_micro_batches_begin_at_multiples_of_the_unit(seed):
    rng = np.random.default_rng(seed)
    batch, unit = int(rng.integers(1, 12)), int(rng.choice((1, 2, 4, 8)))
    table = replace(random_table(rng, batch, missing=0.2), unit=unit)
    limit = random_limit(rng, table)
    best: dict[int, int] = {}
    for micro in table.candidates(batch, limit=limit):
        best[micro.batch] = min(micro.ticks, best.get(micro.batch, micro.ticks))
    sums = [
        sum(best[part] for part in parts)
        for parts in reference.compositions(batch)
        if all(part in best for part in parts) and all(start % unit == 0 for start in itertools.accumulate(parts[:-1]))
    ]
    if not sums:
        with pytest.raises(NoDivisionError):
            batch_division_dp.divide(table, batch, limit)
        return
    for found in (batch_division_dp.divide(table, batch, limit), desirable(table, batch, limit)[-1]):
        assert found.ticks == min(sums) and found.batch == batch
        assert all(start % unit == 0 for start, _ in found.offsets)


def test_units_of_16_bytes():
    assert convolution(dtype="float16").unit == 1  # 14 x 14 x 8 and 14 x 14 x 16 numbers
    for channels, dtype, unit in ((3, "float16", 8), (3, "float32", 4), (3, "float64", 2), (2, "bfloat16", 4)):
        c = Convolution("backward_filter", channels, 4 * channels, (3, 5), (1, 1), dtype=dtype)
        assert c.unit == unit
    assert usable_sizes(policy_sizes("powerOfTwo", 13), 13, 8) == (5, 8, 13)
    assert usable_sizes((1, 2, 4, 8, 16), 16, 4) == (4, 8, 16)


@pytest.mark.parametrize("seed", range(150))
def test_wr_equals_every_composition(seed):
    rng = np.random.default_rng(seed)
    batch = int(rng.integers(1, 10))
    table = random_table(rng, batch, missing=rng.choice((0.0, 0.2, 0.6)))
    limit = random_limit(rng, table)
    expected = reference.wr(table, batch, limit)
    if expected is None:
        with pytest.raises(NoDivisionError) as caught:
            batch_division_dp.divide(table, batch, limit)
        least = caught.value.least
        if least is not None:  # the error's advice works, and nothing less would
            assert least > limit and batch_division_dp.divide(table, batch, least)
            assert reference.wr(table, batch, least - 1) is None
        else:
            assert reference.wr(table, batch, None) is None
        return
    found = batch_division_dp.divide(table, batch, limit)
    assert found.ticks == expected
    assert found.batch == batch and found.workspace <= limit
    assert set(found.parts) <= set(table.micros)
    assert batch_division_dp.times(table, batch, limit)[batch] == pytest.approx(found.seconds, rel=1e-12)


@pytest.mark.parametrize("seed", range(60))
def test_desirable_set_is_the_papers(seed):
    rng = np.random.default_rng(1000 + seed)
    batch = int(rng.integers(1, 7))
    table = random_table(rng, batch, algorithms=int(rng.integers(1, 4)), missing=rng.choice((0.0, 0.3)))
    points = [(d.ticks, d.workspace) for d in reference.desirable(table, batch)]
    if not points:
        with pytest.raises(NoDivisionError):
            desirable(table, batch)
        return
    found = desirable(table, batch)
    assert [(d.ticks, d.workspace) for d in found] == points
    assert points == [(d.ticks, d.workspace) for d in reference.prune(reference.configurations(table, batch))]
    assert all(d.batch == batch and set(d.parts) <= set(table.micros) for d in found)
    assert found[-1].ticks == batch_division_dp.divide(table, batch).ticks  # WR's answer is an element
    limit = random_limit(rng, table)
    if limit >= found[0].workspace:
        inside = [d for d in found if d.workspace <= limit]
        assert [d.ticks for d in desirable(table, batch, limit)] == [d.ticks for d in inside]
        assert batch_division_dp.divide(table, batch, limit).ticks == inside[-1].ticks


def test_more_workspaces_than_a_block():
    rng = np.random.default_rng(5)
    micros = [
        MicroConfig(b, f"A{a}", "float32", float(rng.uniform(1, 2)) / (a + 1), 1000 * b * (a + 1) + a)
        for b in range(1, 41)
        for a in range(20)
    ]
    table = Table(convolution(), tuple(micros))
    found = desirable(table, 40)
    assert len({m.workspace for m in micros}) > BLOCK
    for division in found:
        assert batch_division_dp.divide(table, 40, division.workspace).ticks == division.ticks
    spaces = [d.workspace for d in found]
    assert spaces == sorted(set(spaces))


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 50), st.integers(0, 9)), min_size=1, max_size=12))
def test_no_element_beats_another(rows):
    rows = {(b, f"A{t}"): (b, f"A{t}", t, w) for b, t, w in rows}.values()
    table = table_of(*rows, (1, "one", 99, 3))
    found = desirable(table, 5)
    for first, second in itertools.pairwise(found):
        assert first.workspace < second.workspace and first.ticks > second.ticks


def test_of_equal_times_the_fewest_parts():
    table = table_of((1, "A", 1, 0), (2, "A", 2, 0), (4, "A", 4, 0))
    assert len(batch_division_dp.divide(table, 7).parts) == 3
    assert [len(d.parts) for d in desirable(table, 7)] == [3]


def test_policies():
    assert policy_sizes("all", 5) == (1, 2, 3, 4, 5)
    assert policy_sizes("powerOfTwo", 12) == (1, 2, 4, 8, 12)
    assert policy_sizes("powerOfTwo", 8) == (1, 2, 4, 8)
    assert policy_sizes("undivided", 12) == (12,)
    table = table_of((3, "A", 1, 0), (4, "A", 9, 0), (12, "A", 40, 0))
    assert [
        batch_division_dp.divide(table, 12, policy=p).seconds * 1e6 for p in ("all", "powerOfTwo", "undivided")
    ] == pytest.approx([4, 27, 40])
    with pytest.raises(UsageError, match="choose one of"):
        policy_sizes("some", 12)


def test_more_exact_arithmetic_is_welcome_less_is_not():
    half = convolution(dtype="float16")
    table = Table(half, (MicroConfig(4, "GEMM", "float16", 3e-6, 0), MicroConfig(4, "FFT", "float32", 2e-6, MIB)))
    assert batch_division_dp.divide(table, 4).parts[0].math == "float32"
    assert batch_division_dp.divide(table, 4, 0).parts[0].math == "float16"
    with pytest.raises(NoDivisionError):
        batch_division_dp.divide(table, 4, 0, precision="float32")
    single = Table(convolution(), (MicroConfig(4, "GEMM", "tf32", 1e-6, 0), MicroConfig(4, "GEMM", "float32", 3e-6, 0)))
    assert batch_division_dp.divide(single, 4).parts[0].math == "float32"
    assert batch_division_dp.divide(single, 4, precision="tf32").parts[0].math == "tf32"


@pytest.mark.parametrize(
    "make",
    [
        lambda: MicroConfig(0, "A", "float32", 1e-6, 0),
        lambda: MicroConfig(1, "A", "float32", float("nan"), 0),
        lambda: MicroConfig(1, "A", "float32", -1.0, 0),
        lambda: MicroConfig(1, "A", "float32", 1e-6, -1),
        lambda: MicroConfig(1, "A", "float32", 1e-6, 2**64),
        lambda: Table(convolution(), (MicroConfig(1, "A", "float16", 1e-6, 0),)),
        lambda: Table(convolution(), (MicroConfig(1, "A", "float32", 1e-6, 0),) * 2),
        lambda: batch_division_dp.divide(table_of((1, "A", 1, 0)), 0),
        lambda: batch_division_dp.divide(table_of((1, "A", 1, 0)), 2, -1),
        lambda: batch_division_dp.divide(table_of((1, "A", 1, 0)), 2, precision="float8"),
        lambda: desirable(table_of((1, "A", 1, 0)), 2, policy="none"),
    ],
)
def test_bad_input_is_a_usage_error(make):
    with pytest.raises(UsageError):
        make()


def test_nothing_adds_up():
    table = table_of((4, "A", 1, 0), (6, "A", 1, 8))
    with pytest.raises(NoDivisionError, match="measured sizes are") as caught:
        batch_division_dp.divide(table, 9)
    assert caught.value.least is None
    with pytest.raises(NoDivisionError) as caught:
        desirable(table, 10, MIB)
    assert caught.value.least == 8 * MIB and caught.value.limit == MIB


def test_an_empty_division():
    assert Division(()).workspace == 0 and Division(()).batch == 0
