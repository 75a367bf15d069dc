"""Memoisation by identity: equal objects are different ones, and no more values are kept than asked for."""

from __future__ import annotations

from jcuts.base.identity_memo import IdentityMemo


def test_values_belong_to_one_object_and_what_they_depend_on_besides():
    memo: IdentityMemo[str] = IdentityMemo(8)
    first, second = {"a": 1}, {"a": 1}
    assert memo.get(first) is None and memo.keep("one", first) == "one"
    assert memo.get(first) == "one" and memo.get(second) is None and memo.get(first, 2) is None
    memo.keep("two", first, 2)
    assert (memo.get(first), memo.get(first, 2)) == ("one", "two")


def test_one_value_too_many_drops_all():
    memo: IdentityMemo[int] = IdentityMemo(3)
    owners = [[n] for n in range(4)]
    for number, owner in enumerate(owners):
        memo.keep(number, owner)
    assert [memo.get(owner) for owner in owners] == [None, None, None, 3]


def test_an_object_in_the_place_of_a_dropped_one_has_no_value():
    memo: IdentityMemo[int] = IdentityMemo(1000)
    for number in range(500):  # the memo keeps each alive: no two have one number
        owner = [number]
        assert memo.get(owner) is None
        memo.keep(number, owner)
