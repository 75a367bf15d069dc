"""Log lines of the measuring processes' answers: times of their parts, programs compiled ahead."""

from __future__ import annotations

import logging

from jcuts.base.errors import CandidateRejected
from jcuts.tune.parent.worker_pool import Answer

_log = logging.getLogger("jcuts.tune")


def listed(parts: dict[str, float]) -> str:
    """Parts and their seconds in one line.

    >>> listed({"xla": 0.25, "float64": 1})
    'xla 0.25, float64 1.00'
    """
    return ", ".join(f"{part} {float(spent):.2f}" for part, spent in parts.items())


def told(answer: Answer | CandidateRejected) -> None:
    """Logs what came of programs that were compiled ahead."""
    if isinstance(answer, CandidateRejected):
        _log.info("compiling ahead: %s", answer)
    else:
        _log.info("%d programs ahead: %.2f s %s", answer["programs"], answer["seconds"], answer.get("told", ""))
