"""The protocol by which processes agree on a program, with threads for processes and a dict for the service."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from jcuts.base.errors import CacheError, JcutsError, UsageError
from jcuts.jit.decision import JCUTS, XLA, Decision
from jcuts.jit.multi_controller import process_group
from jcuts.jit.multi_controller.agreement import Participant, agree
from jcuts.jit.multi_controller.process_group import ProcessGroup
from jcuts.primitive.sharding import Placement
from jcuts.tune import agreed_store, session
from jcuts.tune.agreed_store import AgreedStore
from jcuts.tune.choice import LIBRARY, Choice
from jcuts.tune.database import Store
from jcuts.tune.row_signature import TUNED

DEVICE, VERSIONS = "a processor", "some versions"
PROCESSES = (0, 2, 5)


class Service:
    """JAX's coordination service in memory."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.changed = threading.Condition()

    def put(self, key: str, value: bytes) -> None:
        with self.changed:
            assert key not in self.values
            self.values[key] = value
            self.changed.notify_all()

    def get(self, key: str, seconds: float) -> bytes | None:
        with self.changed:
            self.changed.wait_for(lambda: key in self.values, seconds)
            return self.values.get(key)

    def delete(self, key: str) -> None:
        self.values.pop(key, None)


class Numbered(ProcessGroup):
    """A group whose exchanges are counted by itself, as those of a process are."""

    count = 0

    def _next(self) -> str:
        self.count += 1
        return str(self.count)


def together(make: Callable[[int], Participant]) -> dict[int, Any]:
    """What `agree` gives or raises in every process."""
    service: Any = Service()
    found: dict[int, Any] = {}

    def run(rank: int) -> None:
        try:
            found[rank] = agree(Numbered(PROCESSES, rank, service), make(rank))
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in PROCESSES]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert found.keys() == set(PROCESSES)
    return found


def never() -> Decision:
    raise AssertionError("only the leader decides")


def participant(
    rank: int,
    decision: Decision | None = None,
    text: Callable[[AgreedStore], str] = lambda store: "program",
    program: str = "f",
    versions: str = VERSIONS,
) -> Participant:
    """A process: the first decides, the others must not."""
    store = AgreedStore(device=DEVICE, versions=versions)
    made = decision or Decision(JCUTS, "tuned")
    return Participant(program, (lambda: made) if rank == PROCESSES[0] else never, lambda _: text(store), store)


def test_all_follow_the_leader() -> None:
    found = together(lambda rank: participant(rank, Decision(JCUTS, "tuned", deferred=True)))
    assert all(d.chosen == JCUTS and d.reason == "tuned" and not d.deferred for d in found.values())


def test_plain_xla_needs_no_hashes() -> None:
    found = together(lambda rank: participant(rank, Decision(XLA, "faster"), text=lambda _: str(rank)))
    assert all(d.chosen == XLA and d.reason == "faster" for d in found.values())


def test_different_programs_are_replaced_by_plain_xla_everywhere() -> None:
    found = together(lambda rank: participant(rank, text=lambda _: "other" if rank == 5 else "program"))
    assert all(d.chosen == XLA and "different programs" in d.reason for d in found.values())
    assert len({d.reason for d in found.values()}) == 1


def test_a_process_that_cannot_lower_the_program_stops_all() -> None:
    def text(rank: int) -> str:
        if rank == 2:
            raise JcutsError("no compiler")
        return "program"

    found = together(lambda rank: participant(rank, text=lambda _: text(rank)))
    assert all(d.chosen == XLA and "2: failed" in d.reason for d in found.values())


def test_other_versions_cannot_follow() -> None:
    found = together(lambda rank: participant(rank, versions="newer" if rank == 5 else VERSIONS))
    assert all(d.chosen == XLA and "5: failed" in d.reason for d in found.values())


def test_a_failing_leader_fails_all() -> None:
    def broken() -> Decision:
        raise ValueError("no space")

    def make(rank: int) -> Participant:
        mine = participant(rank)
        return Participant(mine.program, broken if rank == 0 else never, mine.lower, mine.store)

    found = together(make)
    assert isinstance(found[0], ValueError)
    assert all(isinstance(found[r], JcutsError) and "ValueError: no space" in str(found[r]) for r in (2, 5))


def test_different_functions_are_an_error_not_a_hang() -> None:
    found = together(lambda rank: participant(rank, Decision(XLA, ""), program="g" if rank == 2 else "f"))
    assert isinstance(found[2], UsageError)
    assert "same calls in the same order" in str(found[2])


def a_choice(problem: str) -> Choice:
    return Choice(problem=problem, winner=LIBRARY, winner_digest="", origin="measured")


def test_followers_find_what_the_leader_looked_up_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    tuned = Store(None, device=DEVICE, versions=VERSIONS)  # the leader's database
    tuned.put(a_choice("found"))
    tuned.put(a_choice("never asked for"))
    monkeypatch.setattr(session, "_store", tuned)

    def make(rank: int) -> Participant:
        def text(store: AgreedStore) -> str:
            with agreed_store.using(store):
                return str([session.store().lookup(p) is not None for p in ("found", "lacking")])

        return participant(rank, text=text)

    participants = {rank: make(rank) for rank in PROCESSES}
    found = together(lambda rank: participants[rank])
    assert all(d.chosen == JCUTS for d in found.values())
    for mine in participants.values():
        assert [(kind, key) for kind, key, _ in mine.store.rows()] == [("choice", "found")]
        assert mine.store.lookup("never asked for") is None
        assert mine.store.choice("found")[1] == TUNED
    assert len({mine.store.generation() for mine in participants.values()}) == len(PROCESSES)


def test_rows_that_are_none_are_refused() -> None:
    store = AgreedStore(device=DEVICE, versions=VERSIONS)
    with pytest.raises(CacheError):
        store.add([("kernel", "x", {})])
    with pytest.raises(CacheError):
        store.add([("choice", "x", {"winner": 3})])
    assert store.rows() == []


def test_this_thread_alone_plans_by_agreed_choices() -> None:
    store = AgreedStore(device=DEVICE, versions=VERSIONS)
    seen: list[Any] = []
    with agreed_store.using(store):
        assert session.store() is store
        thread = threading.Thread(target=lambda: seen.append(session.store()))
        thread.start()
        thread.join()
    assert session.store() is not store
    assert seen[0] is not store


def test_exchanges_of_a_group_are_numbered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group, "_exchanges", process_group.collections.Counter())
    service: Any = Service()
    alone = ProcessGroup([3], 3, service)
    assert alone.broadcast(b"a", "") == b"a"
    assert alone.all_gather(b"b", "") == {3: b"b"}
    assert list(service.values) == ["jcuts/3/2/3"]  # what was broadcast before has been read
    assert alone.leads
    waiting = ProcessGroup([1, 3], 3, service)
    threading.Timer(0.05, service.put, ("jcuts/1-3/1/1", b"c")).start()
    assert waiting.broadcast(None, "process 1") == b"c"


class Sharding:
    """What a placement asks of a sharding."""

    def __init__(self, *processes: int) -> None:
        self.device_set = [SimpleNamespace(process_index=process) for process in processes]


@pytest.mark.parametrize(
    ("shardings", "count", "processes", "spans"),
    [
        ((), 2, (), False),  # on one device
        ((Sharding(1), None), 2, (1,), False),  # several devices of this process alone
        ((Sharding(2, 0), None, Sharding(0)), 4, (0, 2), True),
        ((Sharding(0, 1),), 1, (0, 1), False),  # no job of several processes
    ],
)
def test_a_call_on_devices_of_several_processes_is_theirs(
    monkeypatch: pytest.MonkeyPatch, shardings: tuple[Any, ...], count: int, processes: tuple[int, ...], spans: bool
) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: count)
    placement = Placement(shardings)
    assert placement.processes == processes
    assert placement.spans_processes is spans
