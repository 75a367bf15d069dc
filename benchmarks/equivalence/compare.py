"""Every difference of two records, as text."""

from __future__ import annotations

import argparse
import difflib
import gzip
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

SHOWN = 400
"""Characters of a line of differences."""


def load(path: Path) -> dict[str, Any]:
    """A record."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return json.load(file)


def compare(options: argparse.Namespace) -> int:
    """Prints every difference; the exit status."""
    before, after = options.before, options.after
    files = sorted({p.name for folder in (before, after) for p in folder.glob("*.json.gz")})
    total = 0
    for name in files:
        target = name.removesuffix(".json.gz")
        if not all((folder / name).exists() for folder in (before, after)):
            print(f"{target}: recorded in only one of the two")
            total += 1
            continue
        one, other = load(before / name), load(after / name)
        if one["header"] != other["header"]:
            print(f"{target}: not the same machine or versions:\n  {one['header']}\n  {other['header']}")
        found = list(differences(one, other, before / f"text_{target}", after / f"text_{target}"))
        for line in found:
            print(f"{target}: {line[:SHOWN]}" if "\n" not in line else f"{target}: {line}")
        total += len(found)
        same = other["counts"]
        print(
            f"{target}: {len(found)} differences in {same['functions']} functions, {same['regions']} regions, "
            f"{same['candidates']} candidates, {same['code texts']} code texts"
        )
    if not files:
        raise SystemExit("there are no records in these folders")
    return int(total > 0)


def differences(one: dict[str, Any], other: dict[str, Any], texts: Path, other_texts: Path) -> Iterator[str]:
    """Every difference of two records of a target, as text."""
    shown = {**one["programs"], **other["programs"]}
    for name, a, b in _pairs(one["functions"], other["functions"]):
        if a is None or b is None:
            yield f"function {name} is only {'before' if b is None else 'after'}"
        elif a != b:
            yield from (f"function {name}: {text}" for text in _of_function(a, b, shown))
    for key, a, b in _pairs(one["ranked"], other["ranked"]):
        if a is not None and b is not None and a != b:
            yield f"candidates of {shown[key]}: {_of_candidates(a, b, shown)}"
    for key in sorted(one["programs"].keys() & other["programs"].keys()):
        if (a := one["programs"][key]) != (b := other["programs"][key]):
            yield f"program {key} reads otherwise: {a} / {b}"
    for key, a, b in _pairs(one["code"], other["code"]):
        if a is None or b is None:
            yield f"code of {shown[key]} is only {'before' if b is None else 'after'}"
            continue
        for what in sorted(a.keys() | b.keys()):
            if a.get(what) != b.get(what):
                yield (
                    f"code of {shown[key]}: {what} {a.get(what)} / {b.get(what)}"
                    + _text_difference(texts / f"{key}.{what}.gz", other_texts / f"{key}.{what}.gz")
                )


def _pairs(one: dict[str, Any], other: dict[str, Any]) -> Iterable[tuple[str, Any, Any]]:
    return ((key, one.get(key), other.get(key)) for key in dict.fromkeys([*one, *other]))


def _of_function(a: dict[str, Any], b: dict[str, Any], shown: dict[str, str]) -> Iterator[str]:
    for what in ("refused", "identity", "program"):
        if a.get(what) != b.get(what):
            yield f"{what}: {a.get(what)} / {b.get(what)}"
    if a.get("schedules") != b.get("schedules"):
        yield f"schedules: {_of_candidates(a.get('schedules', []), b.get('schedules', []), shown)}"
    if a.get("code") != b.get("code"):
        coded = ([[key, ""] for key in x.get("code", ())] for x in (a, b))
        yield f"programs whose code is recorded: {_of_candidates(*coded, shown)}"
    for name, p, q in _pairs(a.get("plans", {}), b.get("plans", {})):
        if p is None or q is None:
            yield f"plan {name!r} is only {'before' if q is None else 'after'}"
            continue
        if p == q:
            continue
        if p.get("refused") != q.get("refused"):
            yield f"plan {name!r}: refused: {p.get('refused')} / {q.get('refused')}"
        levels, others = p.get("levels", []), q.get("levels", [])
        if len(levels) != len(others):
            yield f"plan {name!r}: {len(levels)} / {len(others)} levels"
        for k, (x, y) in enumerate(zip(levels, others, strict=False)):
            for what in ("identity", "equations", "left"):
                if x[what] != y[what]:
                    yield f"plan {name!r}, level {k}, {what}: {x[what]} / {y[what]}"
            yield from (f"plan {name!r}, level {k}, {t}" for t in _of_regions(x["regions"], y["regions"], shown))
        yield from (f"plan {name!r}, tried {t}" for t in _of_regions(p.get("asked", []), q.get("asked", []), shown))


def _of_regions(one: list[Any], other: list[Any], shown: dict[str, str]) -> Iterator[str]:
    if one == other:
        return
    rest = list(other)
    missing = []
    for region in one:
        if region in rest:
            rest.remove(region)
        else:
            missing.append(region)
    if not missing and not rest:
        yield "regions are in another order"
    for what, regions in (("before", missing), ("after", rest)):
        for members, operations, _, share, program, chosen, placed in regions:
            yield (
                f"region only {what}: equations {members} ({operations}), {share} candidates, {shown[program]}, "
                f"chosen {shown.get(chosen, 'XLA')}, placed {[shown[p] for p in placed]}"
            )


def _of_candidates(one: list[Any], other: list[Any], shown: dict[str, str]) -> str:
    """Where two rankings part."""
    k = next((k for k, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    at = [f"{shown[x[k][0]]} {x[k][1]}" if k < len(x) else "none" for x in (one, other)]
    same = Counter(x[0] for x in one) == Counter(x[0] for x in other)
    what = "the same ones in another order or with other scores" if same else "other ones"
    return f"{len(one)} / {len(other)}, {what}, the first at place {k}: {at[0]} / {at[1]}"


def _text_difference(one: Path, other: Path) -> str:
    """The first lines in which two texts differ, where both were kept."""
    if not (one.exists() and other.exists()):
        return ""
    texts = []
    for path in (one, other):
        with gzip.open(path, "rt", encoding="utf-8") as file:
            texts.append(file.read().splitlines())
    lines = list(difflib.unified_diff(*texts, "before", "after", n=1, lineterm=""))[:24]
    return "".join(f"\n    {line[:160]}" for line in lines)
