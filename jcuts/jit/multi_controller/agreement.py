"""Agreement on one program: the leader tunes and decides, every process lowers that program, and hashes are compared.

All processes of a multi-controller program must run the same program: collectives that one of them lacks, or has in
another order, would wait for ever, and XLA shares autotuning among processes by the program's fingerprint.

    leader      tunes and decides as a single process would; records what planning looks up
    broadcast   the decision, and those rows of its tuning database
    all         lower the program by these rows alone (`tune.agreed_store`); SHA-256 of its StableHLO
    all-gather  the hashes; where they differ, or a process failed, all run plain XLA's program

No process measures but the leader, and none reads its own database for such a call.
"""

from __future__ import annotations

import hashlib
import json
import logging
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from jcuts.base.errors import JcutsError, UsageError, summary
from jcuts.jit.decision import XLA, Decision
from jcuts.jit.multi_controller.process_group import ProcessGroup
from jcuts.tune import session
from jcuts.tune.agreed_store import AgreedStore

log = logging.getLogger("jcuts")


@dataclass(frozen=True)
class Participant:
    """What agreeing asks of the caller.

    Attributes:
        program: identity of the user's function and arguments, the same in all processes.
        decide: what runs, tuned in this process (the leader calls it).
        lower: text of the program that a decision runs, lowered by ``store``.
        store: the choices that the function's calls have agreed on so far.
    """

    program: str
    decide: Callable[[], Decision]
    lower: Callable[[Decision], str]
    store: AgreedStore


def agree(group: ProcessGroup, mine: Participant) -> Decision:
    """The decision of all processes of a group; the choices by which they lower its program are added to their stores.

    Raises:
        UsageError: the processes call different functions.  JcutsError: the leader could not decide.
    """
    message = _lead(group, mine) if group.leads else None
    got = json.loads(zlib.decompress(group.broadcast(message, f"process {group.leader}, which tunes")))
    if got["program"] != mine.program:
        raise UsageError(
            f"process {group.leader} calls another function, or other shapes, than process {group.me}: processes that "
            "share arrays must make the same calls in the same order",
            process=group.me,
        )
    if "failed" in got:
        raise JcutsError(f"process {group.leader}, which tunes for all, failed: {got['failed']}")
    decision = Decision.from_dict(got["decision"]) or Decision(XLA, "a decision of another version of jcuts")
    if decision.chosen == XLA:
        return decision
    hashes = group.all_gather(_hash(group, mine, decision, got).encode(), "the others' programs")
    if len(set(hashes.values())) == 1 and not hashes[group.me].startswith(b"failed"):
        return decision
    told = ", ".join(f"{rank}: {text.decode()[:16]}" for rank, text in hashes.items())
    log.warning("processes would run different programs (%s): all of them run plain XLA's", told)
    return Decision(XLA, f"processes would run different programs ({told})")


def _lead(group: ProcessGroup, mine: Participant) -> bytes:
    """The leader's message, sent even where it fails: the others wait for it."""
    try:
        decision = replace(mine.decide(), deferred=False)  # a later call would decide at another time in each process
        content: dict[str, Any] = {"decision": decision.to_dict()}
        if decision.chosen != XLA:
            with mine.store.recording(session.store()):
                content["hash"] = _sha256(mine.lower(decision))
            about = {"device": mine.store.device, "versions": mine.store.versions}
            content |= {"rows": mine.store.rows(), **about}
    except BaseException as error:
        group.broadcast(_packed({"program": mine.program, "failed": summary(error)}), "")
        raise
    return _packed({"program": mine.program, **content})


def _packed(content: dict[str, Any]) -> bytes:
    return zlib.compress(json.dumps(content).encode())


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _hash(group: ProcessGroup, mine: Participant, decision: Decision, got: dict[str, Any]) -> str:
    """SHA-256 of this process' program for a decision, or ``failed: `` and why there is none."""
    if group.leads:
        return got["hash"]
    try:
        if (got["device"], got["versions"]) != (mine.store.device, mine.store.versions):
            return f"failed: process {group.me} has another processor or other versions than the leader"
        mine.store.add([(kind, key, value) for kind, key, value in got["rows"]])
        return _sha256(mine.lower(decision))
    except Exception as error:
        log.warning("process %d cannot lower the agreed program: %s", group.me, summary(error))
        return f"failed: {summary(error)}"
