"""Partial sort of scored schedules, best first: ties are broken by digest, computed only where it decides.

A digest hashes the whole program, which takes as long as scoring it several times.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from jcuts.schedule.gpu.machine import Candidate


def best_first(found: Iterable[Candidate], most: int) -> list[Candidate]:
    """The first ``most`` schedules by falling score, of equal scores by digest."""
    kept: list[Candidate] = []
    for _, group in itertools.groupby(sorted(found, key=_falling), _falling):
        if len(kept) >= most:
            break
        alike = list(group)
        kept += alike if len(alike) == 1 else sorted(alike, key=lambda item: item[0].digest)
    return kept[:most]


def distinct_best_first(found: Iterable[Candidate], most: int) -> list[Candidate]:
    """The same of different schedules: of equal ones the best score counts."""
    kept: list[Candidate] = []
    seen: set[str] = set()
    for _, group in itertools.groupby(sorted(found, key=_falling), _falling):
        if len(kept) >= most:
            break
        alike = {item[0].digest: item for item in group}
        kept += [alike[digest] for digest in sorted(alike.keys() - seen)]
        seen |= alike.keys()
    return kept[:most]


def _falling(item: Candidate) -> float:
    return -item[1]
