"""Checks that a loop's plan (`xla.chains.loop`) stays within the buffers of its call and its arena."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jcuts.xla.chains.loop import CARRIED, FROM_RESULT, INVARIANT, SCANNED, UNSTACKED

MEMBERS = (3, 4, 5, 3)
"""Numbers of a feed, a drain, a carried value, a copy."""


class Misfit(ValueError):
    """What of a plan leaves its buffers."""


def room_of_body(
    plan: Sequence[int], numbers: Mapping[str, int], operands: Sequence[int], results: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Bytes behind the pointers to what a loop's body reads and writes.

    Args: plan, numbers: attributes of the call; operands, results: their bytes.
    Raises: Misfit: part of it leaves a buffer or the arena.
    """
    length, arena = numbers.get("length", -1), numbers.get("arena_bytes", -1)
    feeds, drains, carries, copies = _parts(plan)
    if length < 0 or arena < 0:
        raise Misfit("it has no length or no arena")
    written = [_drain(drain, length, arena, results) for drain in drains]
    carried = [_initial(carry, operands, results) for carry in carries]
    read = [_feed(feed, length, operands, carried) for feed in feeds]
    for carry in carries:
        _, _, size, kind, place = carry
        rooms = written if kind == FROM_RESULT else read
        if kind not in (0, 1) or not 0 <= place < len(rooms) or size > rooms[place]:
            raise Misfit("a carried value beyond its memory")
    for feed, result, size in copies:
        inside = 0 <= feed < len(read) and 0 <= result < len(results) and size >= 0
        if not inside or size > read[feed] or size * length > results[result]:
            raise Misfit("a copy beyond its memory")
    return read, written


def _parts(plan: Sequence[int]) -> list[list[tuple[int, ...]]]:
    counts, rest = plan[: len(MEMBERS)], list(plan[len(MEMBERS) :])
    if (
        len(counts) < len(MEMBERS)
        or min(counts) < 0
        or sum(n * m for n, m in zip(counts, MEMBERS, strict=True)) != len(rest)
    ):
        raise Misfit("its plan has another number of buffers")
    found = []
    for count, size in zip(counts, MEMBERS, strict=True):
        found.append([tuple(rest[size * k : size * (k + 1)]) for k in range(count)])
        rest = rest[size * count :]
    return found


def _feed(feed: tuple[int, ...], length: int, operands: Sequence[int], carried: Sequence[int]) -> int:
    kind, number, stride = feed
    rooms = carried if kind == CARRIED else operands
    if kind not in (INVARIANT, CARRIED, SCANNED) or not 0 <= number < len(rooms) or stride < 0:
        raise Misfit("an operand that there is not")
    if kind != SCANNED:
        return _refuse("a stride of what is not scanned") if stride else rooms[number]
    return stride if stride * length <= operands[number] else _refuse("a scanned operand beyond its memory")


def _drain(drain: tuple[int, ...], length: int, arena: int, results: Sequence[int]) -> int:
    result, stride, first, second = drain
    if result == UNSTACKED:
        room = arena - max(first, second)
        inside = stride == 0 and min(first, second) >= 0 and room >= 0
        return room if inside else _refuse("a result beyond the arena")
    inside = 0 <= result < len(results) and stride >= 0 and first == second == 0
    if not inside or stride * length > results[result]:
        raise Misfit("a result beyond its memory")
    return stride


def _initial(carry: tuple[int, ...], operands: Sequence[int], results: Sequence[int]) -> int:
    """Bytes that every value of a carry has: as many as go into the result."""
    operand, result, size, _, _ = carry
    inside = 0 <= operand < len(operands) and 0 <= result < len(results) and size >= 0
    if not inside or size > operands[operand] or size > results[result]:
        raise Misfit("a carried value beyond its memory")
    return size


def _refuse(why: str) -> int:
    raise Misfit(why)
