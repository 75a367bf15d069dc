"""Sizes between powers of two that a limit makes worth measuring."""

from __future__ import annotations

from dataclasses import replace

from jcuts.microbatch import batch_division_dp
from jcuts.microbatch.convolution import Convolution
from jcuts.microbatch.sampling_plan import MOST, sizes_between, worth_slicing
from jcuts.microbatch.timings import MicroConfig, Table, sliced

LAYER = Convolution("forward", 64, 192, (27, 27), (5, 5), padding=((2, 2), (2, 2)))
SLOW = [MicroConfig(n, "slow", "float32", n * 1e-5, 0) for n in (1, 2, 4, 8, 16, 32)]


def table(*micros: MicroConfig) -> Table:
    return Table(LAYER, (*SLOW, *micros))


def fft(n: int, space: float, seconds: float) -> MicroConfig:
    return MicroConfig(n, "fft", "float32", seconds, int(space * 2**20))


def test_a_size_that_fills_the_limit():
    # AlexNet's conv2 on an H200: 59.5 MiB at 8 samples, 68 at 16.
    known = table(fft(8, 59.5, 0.0889e-3), fft(16, 68.0, 0.0922e-3))
    assert sizes_between(known, 32, 64 << 20) == (12,)
    better = Table(LAYER, (*known.micros, fft(12, 63.75, 0.091e-3)))
    assert sizes_between(better, 32, 64 << 20) == ()  # nothing is left between 12 and 16
    assert (
        batch_division_dp.divide(better, 32, 64 << 20).seconds < batch_division_dp.divide(known, 32, 64 << 20).seconds
    )


def test_nothing_is_proposed_that_cannot_pay():
    slow = table(fft(8, 10, 0.9e-3), fft(16, 100, 1.7e-3))
    assert sizes_between(slow, 32, 64 << 20) == ()
    assert sizes_between(table(fft(8, 10, 1e-5), fft(16, 100, 1e-5)), 32, None) == ()
    assert sizes_between(table(fft(16, 70, 1e-5)), 32, 64 << 20) == ()  # never fits


def test_the_fastest_come_first_and_not_too_many():
    micros = []
    for k in range(5):
        name = f"a{k}"
        micros += [
            MicroConfig(16, name, "float32", 1e-5, 10 << 20),
            MicroConfig(32, name, "float32", (5 - k) * 1e-6, (64 + 8 * (k + 1)) << 20),
        ]
    found = sizes_between(table(*micros), 32, 64 << 20)
    assert len(found) == MOST and found == tuple(sorted(found))  # the fastest needs most, so fits least


def test_a_batch_that_has_no_division_yet():
    known = Table(LAYER, (fft(8, 10, 1e-5), fft(32, 100, 1e-5)))
    assert sizes_between(known, 30, 64 << 20) == ()  # 32 is more than the batch
    assert sizes_between(known, 32, 64 << 20) == (22,)


def conv2_fft(n: int) -> MicroConfig:
    """FFT_TILING of AlexNet's conv2 as cuDNN asks for: 4352 B per channel of the filter, of an image, of a result."""
    return MicroConfig(n, "fft", "float32", 8e-5 + n * 1.7e-6, 4352 * (64 * 192 + n * (64 + 192)))


def test_what_only_slices_make_fit():
    limit = 64 << 20
    known = Table(LAYER, (*SLOW, *(conv2_fft(n) for n in (8, 16, 32, 64, 128, 256))))
    found = worth_slicing(known, 256, limit, algorithms=("fft",))
    assert [(one.micro.batch, one.slices[0]) for one in found] == [(64, 3), (32, 2), (128, 8)]
    for one in found:
        n = one.micro.batch
        fewer = [s for s in (1, *LAYER.slices) if s < one.slices[0]][-1]
        space = [
            4352 * (64 * 192 // s + n * (64 + 192 // s)) + n * LAYER.result_bytes // s for s in (one.slices[0], fewer)
        ]
        assert space[0] <= limit < space[1]
    assert found[0].slices == (3, 4, 6, 8, 12, 16, 24) and found[0].text == f"fft float32 {limit}"
    # As measured: three slices of 64 samples are worth it, and a single call has none.
    name = sliced("fft", 3)
    more = Table(LAYER, (*known.micros, MicroConfig(64, name, "float32", 2.4e-4, 60 << 20)))
    assert str(batch_division_dp.divide(more, 256, limit)) == "4 x 64 fft/slices=3:float32"
    assert (
        batch_division_dp.undivided(more, 64, limit) is None
        and batch_division_dp.undivided(known, 64, None).parts[0].algorithm == "fft"
    )


def test_slices_that_took_longer_than_promised_are_no_promise():
    known = Table(LAYER, (*SLOW, *(conv2_fft(n) for n in (8, 16, 32, 64, 128, 256))))
    one = worth_slicing(known, 256, 64 << 20, algorithms=("fft",))[0]
    promised = one.micro.seconds * (1 + 2 * 64 / (64 + 192))
    best = MicroConfig(128, "other", "float32", 128 * 1e-5, 0)  # one sample in 10 us
    slow = MicroConfig(64, sliced("fft", 3), "float32", 4 * promised, 60 << 20)
    for micros, sizes in (((best,), [64, 32, 128]), ((best, slow), [])):
        table = Table(LAYER, (*known.micros, *micros))
        found = worth_slicing(table, 256, 64 << 20, algorithms=("fft",))
        assert [one.micro.batch for one in found] == sizes


def test_slices_that_cannot_pay():
    limit = 64 << 20
    slow = Table(LAYER, (*SLOW, *(conv2_fft(n) for n in (8, 256))))
    fast = [MicroConfig(n, "fast", "float32", n * 1e-7, 0) for n in (1, 256)]
    assert worth_slicing(Table(LAYER, (*slow.micros, *fast)), 256, limit, algorithms=("fft",)) == ()
    assert worth_slicing(slow, 256, limit, algorithms=("other",)) == ()
    assert worth_slicing(slow, 256, None, algorithms=("fft",)) == ()
    for changed in ({"layout": "NHWC"}, {"groups": 2}, {"outputs": 64 * 3 + 1, "channels": 3}):
        odd = replace(LAYER, **changed)
        assert odd.slices == () and worth_slicing(Table(odd, slow.micros), 256, limit, algorithms=("fft",)) == ()


def test_slices_begin_at_sixteen_bytes():
    layer = Convolution("forward", 3, 48, (5, 5), (3, 3), dtype="float16")
    assert layer.slices == (2, 3, 6)  # of 24, 16 and 8 channels: 9 places and 27 taps of 2 B each
    assert replace(layer, outputs=36).slices == ()
    assert all(layer.outputs % s == 0 for s in layer.slices)
