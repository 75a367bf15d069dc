"""Liveness of convolution workspaces: a network's convolutions in program order, each workspace's live range."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from jcuts.base.errors import UsageError
from jcuts.microbatch.convolution import Convolution, admitted
from jcuts.microbatch.timings import check_batch


@dataclass(frozen=True)
class Use:
    """One use of a convolution in a network.

    Attributes:
        name: unique in the network, e.g. ``conv2 forward``.
        precision: least exactness that the program asks for; None: the dtype's own.
        begin: first step of the program at which the workspace is live; None: its own step only.
        end: last step; None: its own step only.
    """

    name: str
    convolution: Convolution
    batch: int
    precision: str | None = None
    begin: int | None = None
    end: int | None = None

    def __post_init__(self) -> None:
        check_batch(self.batch)
        admitted(self.convolution.dtype, self.precision or self.convolution.dtype)


@dataclass(frozen=True)
class Network:
    """Convolutions of a network in program order.

    Attributes:
        uses: each with its life; uses without one run alone, at the step of their position.
        held: bytes that are live anyway at each step (activations, weights); empty: none.
    Raises: UsageError for equal names, a life that ends before it begins, or negative bytes.
    """

    name: str
    uses: tuple[Use, ...]
    held: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        made = []
        for position, use in enumerate(self.uses):
            begin = position if use.begin is None else use.begin
            end = begin if use.end is None else use.end
            if not 0 <= begin <= end:
                raise UsageError(f"{use.name} is live from step {begin} to {end}", name=use.name, begin=begin, end=end)
            made.append(replace(use, begin=begin, end=end))
        object.__setattr__(self, "uses", tuple(made))
        names = [use.name for use in made]
        if len(set(names)) != len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise UsageError(f"network {self.name}: names must be unique, {twice} are not", names=twice)
        if any(not isinstance(n, int) or n < 0 for n in self.held):
            raise UsageError(f"network {self.name}: held bytes must be >= 0", held=self.held)

    @property
    def lives(self) -> tuple[tuple[int, int], ...]:
        """Live range (first, last step) of every use's workspace."""
        return tuple((use.begin or 0, use.end or 0) for use in self.uses)

    def at_batch(self, batch: int) -> Network:
        """The same network with another batch size; its other live bytes are dropped, as they are known for the old
        size only.
        """
        return replace(self, uses=tuple(replace(use, batch=batch) for use in self.uses), held=())

    def to_json(self) -> dict[str, Any]:
        """Plain data; `from_json` makes an equal object of it."""
        uses = [
            {
                "name": use.name,
                "convolution": use.convolution.to_json(),
                "batch": use.batch,
                "precision": use.precision,
                "begin": use.begin,
                "end": use.end,
            }
            for use in self.uses
        ]
        return {"name": self.name, "uses": uses, "held": list(self.held)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Network:
        """Raises: UsageError if the data is not a network's."""
        try:
            made = ({**use, "convolution": Convolution.from_json(use["convolution"])} for use in data["uses"])
            return cls(data["name"], tuple(Use(**use) for use in made), tuple(data["held"]))
        except (KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"{json.dumps(data, default=str)[:200]} is not a network: {error!r}") from None


@dataclass(frozen=True)
class Clique:
    """Uses whose workspaces are live together (a clique of the interference graph), and their joint limit in bytes."""

    members: tuple[int, ...]
    room: int


def cliques(lives: Iterable[tuple[int, int]], held: tuple[int, ...], total: int) -> list[Clique]:
    """The workspace limits that liveness implies, in program order, without redundant ones.

        at every step:  sum of workspaces live there <= total - held(step)

    >>> cliques([(0, 0), (1, 2), (2, 2)], (), 100)
    [Clique(members=(0,), room=100), Clique(members=(1, 2), room=100)]
    """
    lives = tuple(lives)
    steps = sorted({begin for begin, _ in lives} | {step for step in range(len(held)) if held[step]})
    made: list[Clique] = []
    for step in steps:
        members = tuple(k for k, (begin, end) in enumerate(lives) if begin <= step <= end)
        if members:
            made.append(Clique(members, total - (held[step] if step < len(held) else 0)))
    sets = [frozenset(clique.members) for clique in made]

    def implied(i: int, j: int) -> bool:
        tighter = made[j].room < made[i].room or (made[j].room == made[i].room and (sets[i] != sets[j] or j < i))
        return i != j and tighter and sets[i] <= sets[j]

    return [clique for i, clique in enumerate(made) if not any(implied(i, j) for j in range(len(made)))]


def peak(workspaces: Iterable[int], lives: Iterable[tuple[int, int]], held: tuple[int, ...] = ()) -> int:
    """Peak of live bytes, workspaces and others."""
    workspaces, lives = tuple(workspaces), tuple(lives)
    steps = {begin for begin, _ in lives} | set(range(len(held)))
    return max(
        (
            sum(size for size, (begin, end) in zip(workspaces, lives, strict=True) if begin <= step <= end)
            + (held[step] if step < len(held) else 0)
            for step in steps
        ),
        default=0,
    )
