"""Partial sorts of schedules are the first ones of complete sorts, with fewer digests."""

from __future__ import annotations

import random
from typing import Any

import pytest

from jcuts.schedule.gpu.ranking import best_first, distinct_best_first


class _Program:
    def __init__(self, digest: str) -> None:
        self.known, self.asked = digest, 0

    @property
    def digest(self) -> str:
        self.asked += 1
        return self.known


def _found(seed: int) -> list[Any]:
    draw = random.Random(seed)
    return [(_Program(f"{draw.randrange(30):02}"), draw.choice((1.0, 0.9, 0.5, 0.2))) for _ in range(60)]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("most", [0, 1, 5, 1000])
def test_as_complete_sorts(seed, most):
    found = _found(seed)
    whole = sorted(found, key=lambda item: (-item[1], item[0].known))
    assert [(p.known, s) for p, s in best_first(found, most)] == [(p.known, s) for p, s in whole[:most]]
    best: dict[str, float] = {}
    for program, score in found:
        best[program.known] = max(score, best.get(program.known, 0.0))
    once = sorted(best.items(), key=lambda item: (-item[1], item[0]))[:most]
    assert [(p.known, s) for p, s in distinct_best_first(found, most)] == once


def test_digests_of_the_best_only():
    found: list[Any] = [(_Program(f"{n}"), 1.0 / (1 + n)) for n in range(50)]
    assert len(distinct_best_first(found, 4)) == len(best_first(found, 4)) == 4
    assert sum(program.asked for program, _ in found) == 4
