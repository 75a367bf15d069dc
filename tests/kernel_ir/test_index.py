"""Index algebra against Python integers: whatever the simplifier does, the value stays."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jcuts.base.errors import IRError
from jcuts.kernel_ir.index import Index, flatten, unflatten

RANGES = {"i": 5, "j": 8, "k": 3}
NAMES = tuple(RANGES)

checked = settings(max_examples=80, deadline=None, derandomize=True)


@st.composite
def expressions(draw, depth=3):
    """(index, function of a point) pairs, built by the same operations on both sides."""
    if depth == 0 or draw(st.integers(0, 3)) == 0:
        if draw(st.booleans()):
            name = draw(st.sampled_from(NAMES))
            return Index.axis(name), lambda p, name=name: p[name]
        number = draw(st.integers(-40, 40))
        return Index(number), lambda p: number
    a, fa = draw(expressions(depth=depth - 1))
    how = draw(st.sampled_from(["add", "sub", "mul", "neg", "div", "mod", "const", "split"]))
    n = draw(st.integers(1, 12))
    if how in ("add", "sub"):
        b, fb = draw(expressions(depth=depth - 1))
        return (a + b, lambda p: fa(p) + fb(p)) if how == "add" else (a - b, lambda p: fa(p) - fb(p))
    if how == "mul":
        return a * (n - 6), lambda p: fa(p) * (n - 6)
    if how == "neg":
        return -a, lambda p: -fa(p)
    if how == "div":
        return a.floordiv(n, RANGES), lambda p: fa(p) // n
    if how == "mod":
        return a.mod(n, RANGES), lambda p: fa(p) % n
    if how == "split":  # what a reshape and its inverse leave behind
        return a.floordiv(n, RANGES) * n + a.mod(n, RANGES), fa
    return n - a, lambda p: n - fa(p)


def points(ranges):
    names = list(ranges)
    for numbers in np.ndindex(*ranges.values()):
        yield dict(zip(names, map(int, numbers), strict=True))


def value(index: Index, point: dict[str, int]) -> int:
    """An index at a point, straight from its definition."""
    total = index.const
    for atom, coef in index.terms:
        if atom.kind == "axis":
            part = point[atom.name]
        else:
            inner = value(atom.inner, point)
            part = inner // atom.modulus if atom.kind == "div" else inner % atom.modulus
        total += coef * part
    return total


@checked
@given(expressions())
def test_every_operation_keeps_the_value(pair):
    index, function = pair
    for point in points(RANGES):
        assert value(index, point) == function(point)


@checked
@given(expressions())
def test_bounds_hold_every_value(pair):
    index, function = pair
    low, high = index.bounds(RANGES)
    assert low is not None and high is not None
    assert all(low <= function(point) <= high for point in points(RANGES))


@checked
@given(expressions(), expressions(depth=2))
def test_substitution_is_composition(pair, inner):
    index, function = pair
    new, fn = inner
    changed = index.substitute({"i": new.mod(RANGES["i"], RANGES)}, RANGES)  # inside the range that was used before
    for point in points(RANGES):
        assert value(changed, point) == function({**point, "i": fn(point) % RANGES["i"]})


@checked
@given(expressions())
def test_stride_is_the_change_per_step(pair):
    index, function = pair
    for name in NAMES:
        stride = index.stride(name)
        if stride is not None:
            for point in points({**RANGES, name: RANGES[name] - 1}):
                assert function({**point, name: point[name] + 1}) - function(point) == stride


@checked
@given(expressions())
def test_json_round_trip(pair):
    index, _ = pair
    again = Index.from_json(json.loads(json.dumps(index.to_json())))
    assert again == index and hash(again) == hash(index) and str(again) == str(index)


@checked
@given(expressions(), expressions())
def test_equal_sums_are_equal_objects(one, two):
    """Merging loads of one address relies on it: the order of a sum does not show."""
    assert one[0] + two[0] == two[0] + one[0]
    assert (one[0] + two[0]) - two[0] == one[0]


@checked
@given(st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple))
def test_unflatten_inverts_flatten(shape):
    ranges = {f"d{k}": extent for k, extent in enumerate(shape)}
    index = tuple(Index.axis(n) if e > 1 else Index() for n, e in zip(ranges, shape, strict=True))
    assert unflatten(flatten(index, shape), shape, ranges) == index


@checked
@given(st.permutations([2, 3, 4]), st.permutations([2, 3, 4]))
def test_flatten_is_row_major(shape, other):
    shape, other = tuple(shape), tuple(other)
    ranges = {f"d{k}": extent for k, extent in enumerate(shape)}
    place = tuple(map(Index.axis, ranges))
    parts = unflatten(flatten(place, shape), other, ranges)
    for point in points(ranges):
        here = int(np.ravel_multi_index(tuple(point.values()), shape))
        assert value(flatten(place, shape), point) == here
        assert tuple(value(p, point) for p in parts) == np.unravel_index(here, other)


def test_a_split_rejoins_to_the_axis_itself():
    i = Index.axis("i")
    assert i.floordiv(2, RANGES) * 2 + i.mod(2, RANGES) == i
    assert i.floordiv(2, RANGES) * 6 + i.mod(2, RANGES) * 3 + 1 == i * 3 + 1


def test_ranges_remove_divisions():
    i, j = Index.axis("i"), Index.axis("j")
    assert (i * 8 + j).floordiv(8, RANGES) == i
    assert (i * 8 + j).mod(8, RANGES) == j
    assert (i * 8 + j).floordiv(4, RANGES) == i * 2 + j.floordiv(4, RANGES)
    assert (i + 100).mod(50, RANGES) == i


def test_axes_and_values():
    index = (Index.axis("i") + Index.value(3) * 2).floordiv(7, RANGES) + Index.axis("j")
    assert index.axes() == {"i", "j"}
    assert index.values() == {3}
    assert index.renumber({3: 9}).values() == {9}
    assert index.bounds(RANGES) == (None, None)


@pytest.mark.parametrize("divisor", [0, -3])
def test_impossible_divisors(divisor):
    with pytest.raises(IRError, match="by"):
        Index.axis("i").floordiv(divisor, RANGES)
    with pytest.raises(IRError, match="by"):
        Index.axis("i").mod(divisor, RANGES)


@pytest.mark.parametrize("data", [None, "i", [], {}, [0, [1, ["mod", 3]]]])
def test_malformed_json(data):
    with pytest.raises(IRError):
        Index.from_json(data)


def test_flatten_of_another_rank():
    with pytest.raises(IRError, match="rank"):
        flatten((Index(),), (2, 3))


def test_sizes_multiply():
    shape = (3, 4, 5)
    top = flatten(tuple(Index(e - 1) for e in shape), shape)
    assert top == Index(math.prod(shape) - 1)
