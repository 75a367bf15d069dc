"""Records that prove that a change changes nothing: which names are numbered, and what a comparison finds."""

from __future__ import annotations

import copy

import pytest

from benchmarks.equivalence import compare, normal_form

REGION = ["0-2", "add*2 mul", "d", 4, "whole", "first", []]
RECORD = {
    "programs": {"whole": "map f32", "first": "map f32 [unroll=2]", "second": "map f32 [unroll=4]"},
    "functions": {
        "f": {
            "plans": {
                "fusion": {"levels": [{"identity": "i", "equations": "add*2 mul", "left": {}, "regions": [REGION]}]}
            },
            "code": ["first"],
        }
    },
    "ranked": {"whole": [["first", "0.5"], ["second", "0.25"]]},
    "code": {"first": {"source": "abc 3", "llvm": "def 9"}},
}


def test_names_that_say_nothing_are_numbered():
    one = normal_form.normal("; ModuleID = 'a'\ncall @_ZN5jcuts3fooB2v1E(i32 7)\n@jcuts_0123456789ab_0 /a/b.py")
    other = normal_form.normal("; ModuleID = 'b'\ncall @_ZN6cutter3barB2v9E(i32 7)\n@jcuts_ba9876543210_0 /c.py")
    assert one == other == "call @<mangled 0>(i32 7)\n@<symbol 1> <path 2>"
    assert normal_form.normal("call @_ZN1a(i32 7)") != normal_form.normal("call @_ZN1a(i32 8)")
    assert normal_form.normal("@_ZN1a @_ZN1a") != normal_form.normal("@_ZN1a @_ZN1b")


def test_numbers_and_names_in_runs():
    assert normal_form.ranges([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"
    assert normal_form.runs(["add", "add", "mul"]) == "add*2 mul"


def region_of(record):
    return record["functions"]["f"]["plans"]["fusion"]["levels"][0]["regions"]


CHANGES = {
    "a function": (lambda r: r["functions"].pop("f"), "function f is only before"),
    "a region": (lambda r: region_of(r)[0].__setitem__(0, "0-1"), "region only after: equations 0-1"),
    "a choice": (lambda r: region_of(r)[0].__setitem__(5, ""), "chosen XLA"),
    "the order of candidates": (lambda r: r["ranked"]["whole"].reverse(), "in another order or with other scores"),
    "a candidate": (lambda r: r["ranked"]["whole"].pop(), "2 / 1, other ones, the first at place 1"),
    "code": (lambda r: r["code"]["first"].update(llvm="xyz 9"), "llvm def 9 / xyz 9"),
    "a level": (lambda r: r["functions"]["f"]["plans"]["fusion"]["levels"][0].update(left={"add: why": 1}), "left: {}"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_every_difference_is_found(name, tmp_path):
    change, told = CHANGES[name]
    other = copy.deepcopy(RECORD)
    assert list(compare.differences(RECORD, other, tmp_path, tmp_path)) == []
    change(other)
    found = list(compare.differences(RECORD, other, tmp_path, tmp_path))
    assert found and any(told in line for line in found), found
