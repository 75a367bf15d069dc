"""Float literals in the package: none in schedules, only named ones in lowering and fusion, ever fewer elsewhere."""

from __future__ import annotations

from scripts.float_literals import literals, literals_of

MOST = 357
MOST_INLINE = 194
"""They only shrink: hardware numbers belong to `jcuts/arch`, fitted ones to a ``fit_*.toml``, all others get names."""


def test_float_literals_do_not_grow():
    found = list(literals())
    assert len(found) <= MOST
    assert sum(not one.constant for one in found) <= MOST_INLINE


def test_schedules_lowering_and_fusion_have_no_unnamed_numbers():
    found = list(literals())
    assert [one for one in found if one.folder == "schedule"] == []
    assert [one for one in found if one.folder in ("lower", "fusion", "rewrite") and not one.constant] == []


def test_what_counts():
    text = "A = 1.5\nB: float = 2e9\nC = 0.5\ndef f(x, y=3.0):\n    return x * 1.0 - 4 + 0.25\nclass D:\n    e = -7.5\n"
    assert [(one.value, one.constant, one.line) for one in literals_of(text)] == [
        (1.5, "A", 1),
        (2e9, "B", 2),
        (3.0, "", 4),
        (0.25, "", 5),
        (7.5, "", 7),
    ]
