"""Bounds of addresses that guards bound by another expression than the address has."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jcuts.base.errors import IRError
from jcuts.kernel_ir import address_bounds
from jcuts.kernel_ir.index import Atom, Index
from jcuts.kernel_ir.node import Graph, Guard
from jcuts.kernel_ir.program import Axis
from jcuts.kernel_ir.verify import read
from tests import programs


def blocks_of_a_padded_transpose(x):
    """The output tiles of one transformed convolution, padded, as the input tiles of the next."""
    image = x.reshape(4, 4, 2, 3, 3, 5).transpose(2, 3, 0, 4, 1, 5).reshape(2, 12, 12, 5)
    return jnp.pad(image, ((0, 0), (1, 3), (1, 3), (0, 0))).reshape(2, 4, 4, 4, 4, 5)


def test_a_quotient_is_bounded_by_a_guard_on_what_differs_by_multiples_of_the_divisor():
    traced = programs.trace(blocks_of_a_padded_transpose, np.zeros((16, 90), np.float32))
    program = traced.program()
    assert any(node.guards for phase in program.phases for node in phase.exit.nodes)
    assert read(program.to_text()) == program


def quotients(const, divisor=4, low=0):
    """4 i + j - 1 >= low as a guard, and const + (j + 3) // divisor + i as an address, for i and j below 4."""
    i, j = Index.axis("i"), Index.axis("j")
    where = Index(const) + i + Index(0, ((Atom("div", inner=j + 3, modulus=divisor), 1),))
    return where, Guard(i * 4 + j - 1, low, 14)


@pytest.mark.parametrize(
    ("const", "divisor", "low", "is_inside"),
    [(-1, 4, 0, True), (-2, 4, 0, False), (-1, 4, -1, False), (-1, 2, 0, True), (-3, 2, 0, False)],
)
def test_no_more_is_proved_than_is_true(const, divisor, low, is_inside):
    address, guard = quotients(const, divisor, low)
    space = address_bounds._Space(
        {a.name: (0, a.extent - 1) for a in (Axis("i", 4), Axis("j", 4))}, {}, Graph(), 1 << 62
    )
    real = [const + i + (j + 3) // divisor for i in range(4) for j in range(4) if low <= 4 * i + j - 1 <= 14]
    assert (min(real) >= 0) == is_inside
    try:
        space.inside("here", "x", max(real) + 1, address, [guard])
    except IRError:
        assert not is_inside or divisor != 4
    else:
        assert is_inside
