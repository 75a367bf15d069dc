"""Heap simulation by hand: the most that is live, and fragmentation."""

import random

import pytest

from jcuts.plan.cost.program_memory.heap_simulation import Buffer, Timeline


def _timeline(*lifetimes):
    made = Timeline()
    for size, start, end in lifetimes:
        made.now = start
        lifetime = made.allocate(Buffer(size, "dot_general"))
        lifetime.end = end
    return made


def test_buffers_one_after_another_share_their_place():
    assert _timeline((8, 0, 3), (8, 4, 6), (8, 7, 9)).height() == 8


def test_live_lists_the_largest_instant():
    live = _timeline((8, 0, 3), (5, 2, 6), (6, 5, 9)).live()
    assert [buffer.bytes for buffer in live] == [8, 5]


def test_fragmentation_counts():
    # Both of 2 at offset 0; the 1 of 3 to 5 above the second, at 2; the 1 of 1 to 3 meets the first and that one: at 3.
    made = _timeline((2, 1, 2), (2, 4, 4), (1, 3, 5), (1, 1, 3))
    assert sum(buffer.bytes for buffer in made.live()) == 3
    assert made.height() == 4


@pytest.mark.parametrize("seed", range(20))
def test_no_two_live_buffers_overlap_in_what_is_counted(seed):
    rng = random.Random(seed)
    spans = [(rng.randrange(1, 64), a := rng.randrange(40), a + rng.randrange(20)) for _ in range(60)]
    made = _timeline(*spans)
    most = max(sum(size for size, start, end in spans if start <= now <= end) for now in range(60))
    assert sum(buffer.bytes for buffer in made.live()) == most
    assert most <= made.height() <= sum(size for size, _, _ in spans)


def test_what_is_live_at_each_convolution():
    import jax
    import numpy as np

    from jcuts.plan.cost.program_memory.jaxpr_liveness import live_at

    def net(x, w):
        y = jax.lax.conv(x, w, (1, 1), "SAME")
        z = jax.lax.conv(jax.nn.relu(y), w, (1, 1), "SAME")
        return (z + y).sum()

    x, w = np.ones((2, 4, 8, 8), np.float32), np.ones((4, 4, 3, 3), np.float32)
    first, second = live_at(jax.make_jaxpr(net)(x, w), "conv_general_dilated")
    given = x.nbytes + w.nbytes + 4
    assert first == given + x.nbytes  # its result
    assert second in (given + 2 * x.nbytes, given + 3 * x.nbytes)  # y, z, and relu(y) where that is a buffer
