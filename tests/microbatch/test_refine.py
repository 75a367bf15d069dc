"""Sizes between powers of two that a limit makes worth measuring."""

from __future__ import annotations

from jcuts.microbatch import wr
from jcuts.microbatch.convolution import Convolution
from jcuts.microbatch.refine import MOST, sizes_between
from jcuts.microbatch.table import Micro, Table

LAYER = Convolution("forward", 64, 192, (27, 27), (5, 5), padding=((2, 2), (2, 2)))
SLOW = [Micro(n, "slow", "float32", n * 1e-5, 0) for n in (1, 2, 4, 8, 16, 32)]


def table(*micros: Micro) -> Table:
    return Table(LAYER, (*SLOW, *micros))


def fft(n: int, space: float, seconds: float) -> Micro:
    return Micro(n, "fft", "float32", seconds, int(space * 2**20))


def test_a_size_that_fills_the_limit():
    # AlexNet's conv2 on an H200: 59.5 MiB at 8 samples, 68 at 16.
    known = table(fft(8, 59.5, 0.0889e-3), fft(16, 68.0, 0.0922e-3))
    assert sizes_between(known, 32, 64 << 20) == (12,)
    better = Table(LAYER, (*known.micros, fft(12, 63.75, 0.091e-3)))
    assert sizes_between(better, 32, 64 << 20) == ()  # nothing is left between 12 and 16
    assert wr.divide(better, 32, 64 << 20).seconds < wr.divide(known, 32, 64 << 20).seconds


def test_nothing_is_proposed_that_cannot_pay():
    slow = table(fft(8, 10, 0.9e-3), fft(16, 100, 1.7e-3))
    assert sizes_between(slow, 32, 64 << 20) == ()
    assert sizes_between(table(fft(8, 10, 1e-5), fft(16, 100, 1e-5)), 32, None) == ()
    assert sizes_between(table(fft(16, 70, 1e-5)), 32, 64 << 20) == ()  # never fits


def test_the_fastest_come_first_and_not_too_many():
    micros = []
    for k in range(5):
        name = f"a{k}"
        micros += [Micro(16, name, "float32", 1e-5, 10 << 20),
                   Micro(32, name, "float32", (5 - k) * 1e-6, (64 + 8 * (k + 1)) << 20)]  # fmt: skip
    found = sizes_between(table(*micros), 32, 64 << 20)
    assert len(found) == MOST and found == tuple(sorted(found))  # the fastest needs most, so fits least


def test_a_batch_that_has_no_division_yet():
    known = Table(LAYER, (fft(8, 10, 1e-5), fft(32, 100, 1e-5)))
    assert sizes_between(known, 30, 64 << 20) == ()  # 32 is more than the batch
    assert sizes_between(known, 32, 64 << 20) == (22,)
