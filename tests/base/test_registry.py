"""Registry: names are given once, and a missing one is loud."""

from __future__ import annotations

import pytest

from jcuts.base.errors import UsageError
from jcuts.base.registry import Registry


def test_names_are_sorted_and_looked_up():
    table: Registry[int] = Registry("number")
    table.register("two")(2)
    table.register("one")(1)
    assert table["two"] == 2
    assert list(table) == ["one", "two"]
    assert len(table) == 2
    assert "one" in table
    assert "three" not in table


def test_a_second_registration_is_refused():
    table: Registry[int] = Registry("number")
    table.register("one")(1)
    with pytest.raises(UsageError, match="registered twice"):
        table.register("one")(1)


def test_a_missing_name_lists_what_there_is():
    table: Registry[int] = Registry("number")
    with pytest.raises(UsageError, match=r"unknown number 'x': choose one of \(none\)"):
        table["x"]
    table.register("one")(1)
    with pytest.raises(UsageError, match="one") as caught:
        table["x"]
    assert caught.value.known == ("one",)  # type: ignore[attr-defined]
