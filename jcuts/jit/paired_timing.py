"""Interleaved (paired) timing of whole programs on the user's arguments, so that a disturbance slows all alike."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from jcuts.tune import device_slices
from jcuts.tune.measure import statistics as measure_statistics


def run_once(call: Callable[..., Any], fresh_args: Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]) -> Any:
    """The result of one call, waited for."""
    with device_slices.measuring():
        args, kwargs = fresh_args()
        return jax.block_until_ready(call(*args, **kwargs))


def timed(run: Callable[[], Any], clock: Callable[[], float]) -> float:
    """Time of one run [s]."""
    with device_slices.measuring():
        start = clock()
        run()
        return clock() - start


def warm(runs: Mapping[str, Callable[[], Any]], clock: Callable[[], float]) -> dict[str, tuple[float, ...]]:
    """A few interleaved runs of each: noise only makes a run longer, so the shortest says most."""
    found = measure_statistics.interleave(dict(runs), seconds=0.0, least=2, most=2, clock=clock)
    times = {name: s.seconds for name, s in found.items()}
    best = min(min(t) for t in times.values())
    more = 4 if best < 0.01 else 1 if best < 0.1 else 0
    if more:
        found = measure_statistics.interleave(dict(runs), seconds=0.0, least=more, most=more, clock=clock)
        times = {name: (*times[name], *s.seconds) for name, s in found.items()}
    return times


class SampleSize(NamedTuple):
    """Size of one sample: so many executions in a row, of which only the last is waited for.

    Attributes: seconds: wall time that it takes at least; executions: at least, however long they take: of one alone
        the host's part is not hidden.
    """

    seconds: float = 3e-4
    executions: int = 1


SHORT = SampleSize()
"""Of programs whose calls the host does not run ahead of."""


def executions(seconds: float, size: SampleSize) -> int:
    """Executions per sample. Args: seconds: of one."""
    return max(size.executions, min(200, math.ceil(size.seconds / max(seconds, 1e-7))))


def sample(
    calls: Mapping[str, Callable[..., Any]],
    fresh_args: Callable[[], Any],
    inner: int,
    donates: bool,
    seconds: float,
    rounds: int,
    clock: Callable[[], float],
    waited: bool = False,
) -> dict[str, measure_statistics.Samples]:
    """Samples of programs that take turns.

    Args:
        fresh_args: arguments for one call (copies where they are donated, as ``donates`` says).
        inner: executions in a row per sample, of which only the last is waited for.  Where arguments are donated each
            takes what the one before returned in their place, as a training loop does; 1 where that cannot be.
        seconds: wall time to spend; rounds: least samples of each, whatever they cost.
        waited: whether each execution is waited for, not the last of a sample alone.
    """
    if donates:
        return _sample_donated(calls, fresh_args, inner, seconds, rounds, clock, waited)
    args, kwargs = fresh_args()
    # Several executions per sample, so that a fast function is not timed by the clock's resolution.

    def repeated(call: Callable[..., Any]) -> Callable[[], None]:
        def go() -> None:
            for _ in range(inner - 1):
                if waited:
                    jax.block_until_ready(call(*args, **kwargs))
                else:
                    call(*args, **kwargs)  # no result outlives its call
            jax.block_until_ready(call(*args, **kwargs))

        return go

    return measure_statistics.interleave(
        {n: repeated(c) for n, c in calls.items()},
        seconds=seconds,
        least=rounds,
        most=60,
        inner=dict.fromkeys(calls, inner),
        clock=clock,
    )


@dataclasses.dataclass(frozen=True)
class InputOutputAlias:
    """Input-output aliasing of donated buffers: the results that take the place of donated arguments in the next call.

    Attributes: places: (position among the arguments' leaves, position among the results'); structure: of arguments.
    """

    places: tuple[tuple[int, int], ...]
    structure: Any

    @classmethod
    def of(cls, before: Sequence[Any], arguments: Any, results: Any) -> InputOutputAlias | None:
        """The pairs of a call that has been made; None where a donated argument has no result of its type.

        Args: before: types of the arguments' leaves; arguments: (args, kwargs), some of them deleted by the call.
        """
        leaves, structure = jax.tree.flatten(arguments)
        free: dict[Any, list[int]] = {}
        for number, result in enumerate(jax.tree.leaves(results)):
            free.setdefault(kind_of(result), []).append(number)
        places = []
        for number, leaf in enumerate(leaves):
            if not (isinstance(leaf, jax.Array) and leaf.is_deleted()):
                continue
            if not (fits := free.get(before[number])):
                return None
            places.append((number, fits.pop(0)))
        return cls(tuple(places), structure)

    def arguments(self, leaves: list[Any], results: Any) -> Any:
        """(args, kwargs) of the next call. Args: leaves: those of this one, in which they are replaced."""
        if self.places:
            found = jax.tree.leaves(results)
            for number, place in self.places:
                leaves[number] = found[place]
        return jax.tree.unflatten(self.structure, leaves)


def kind_of(value: Any) -> Any:
    """What a donated buffer and the result that takes it over have in common."""
    return (value.aval, value.sharding) if isinstance(value, jax.Array) else None


def _sample_donated(
    calls: Mapping[str, Callable[..., Any]],
    fresh_args: Callable[[], Any],
    inner: int,
    seconds: float,
    rounds: int,
    clock: Callable[[], float],
    waited: bool,
) -> dict[str, measure_statistics.Samples]:
    """Samples of programs that use arguments up: the state goes from call to call, or each call has copies of its own.

    A program may leave other arguments behind than plain XLA (what could not be donated): each has its own pairs.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    aliases: dict[str, InputOutputAlias | None] = {}
    with device_slices.measuring():
        arguments = jax.block_until_ready(fresh_args())
        for name, call in calls.items():
            device_slices.pause()
            before = [kind_of(leaf) for leaf in jax.tree.leaves(arguments)]
            results = jax.block_until_ready(call(*arguments[0], **arguments[1]))
            aliases[name] = InputOutputAlias.of(before, arguments, results)
            arguments = jax.block_until_ready(fresh_args())
        end, order = clock() + seconds, list(calls)
        for count in range(60):
            if count >= rounds and clock() > end:
                break
            end += device_slices.pause()
            for name in order:
                pairs = aliases[name]
                start = clock()
                results = None
                for _ in range(inner if pairs is not None else 1):
                    leaves = jax.tree.leaves(arguments) if pairs is not None else []
                    results = calls[name](*arguments[0], **arguments[1])
                    if pairs is not None:
                        arguments = pairs.arguments(leaves, results)
                    if waited:
                        jax.block_until_ready(results)
                jax.block_until_ready(results)
                times[name].append((clock() - start) / (inner if pairs is not None else 1))
                if pairs is None:
                    arguments = jax.block_until_ready(fresh_args())
            order.reverse()
    return {name: measure_statistics.Samples(tuple(ts)) for name, ts in times.items()}


def paired_ratio(times: measure_statistics.Samples, base: measure_statistics.Samples) -> measure_statistics.Samples:
    """``base / times`` of neighbouring runs: what slows both down cancels."""
    return measure_statistics.Samples(
        tuple(b / max(t, 1e-12) for t, b in zip(times.seconds, base.seconds, strict=True))
    )


def error(ratios: measure_statistics.Samples) -> float:
    """Two relative standard errors of a median of ratios."""
    return 2.0 * measure_statistics.standard_error(ratios.median, *ratios.quartiles, len(ratios.seconds))


def ms(seconds: float) -> str:
    """A time in milliseconds, as text."""
    return f"{seconds * 1e3:.3g} ms"
