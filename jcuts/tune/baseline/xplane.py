"""Reader of profiles (`XSpace` protobufs that `jax.profiler` writes): durations and statistics of the events on a line.

`jax.profiler.ProfileData` reads the same files in C++; on Python 3.12 it aborts the process where warnings are errors
(a warning while it creates its iterators' types cannot be raised).  A damaged file is an error here.
Only the fields that are asked for are decoded, by the wire format of protocol buffers: tags of field number and wire
type, varints, and length-delimited messages.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

_WIRE_BITS = 3
_VARINT_BITS = 7
_LONGEST_VARINT = 10


class Wire(enum.IntEnum):
    """Wire types of protocol buffers."""

    VARINT = 0
    FIXED64 = 1
    BYTES = 2
    FIXED32 = 5


class Field(enum.IntEnum):
    """Field numbers of `tsl/profiler/protobuf/xplane.proto`, and of entries of protobuf maps."""

    SPACE_PLANES = 1
    PLANE_NAME = 2
    PLANE_LINES = 3
    PLANE_EVENT_METADATA = 4
    PLANE_STAT_METADATA = 5
    LINE_NAME = 2
    LINE_EVENTS = 4
    EVENT_METADATA = 1
    EVENT_DURATION = 3
    EVENT_STATS = 4
    STAT_METADATA = 1
    STAT_TEXT = 5
    STAT_REFERENCE = 7
    METADATA_NAME = 2
    MAP_KEY = 1
    MAP_VALUE = 2


class Event(NamedTuple):
    """An event on a line. Args: name: of a kernel; picoseconds: duration; stats: those that are texts, by name."""

    name: str
    picoseconds: int
    stats: Mapping[str, str]


def events(path: Path, planes: Callable[[str], bool], lines: Callable[[str], bool]) -> Iterator[Event]:
    """Events of a profile's file. Args: planes, lines: whether those of a name are read.

    Raises: ValueError: the file is not a profile, or is damaged; OSError.
    """
    for plane in _messages(memoryview(path.read_bytes()), Field.SPACE_PLANES):
        fields = list(_fields(plane))
        if planes(_text(fields, Field.PLANE_NAME)):
            names = _names(fields, Field.PLANE_EVENT_METADATA)
            stats = _names(fields, Field.PLANE_STAT_METADATA)
            for line in (value for number, value in fields if number == Field.PLANE_LINES):
                parts = list(_fields(line))
                if lines(_text(parts, Field.LINE_NAME)):
                    yield from (_event(value, names, stats) for number, value in parts if number == Field.LINE_EVENTS)


def _event(message: int | memoryview, names: Mapping[int, str], stats: Mapping[int, str]) -> Event:
    kind = duration = 0
    found: dict[str, str] = {}
    for number, value in _fields(message):
        if number == Field.EVENT_METADATA:
            kind = _number(value)
        elif number == Field.EVENT_DURATION:
            duration = _number(value)
        elif number == Field.EVENT_STATS:
            found.update(_stat(dict(_fields(value)), stats))
    return Event(names.get(kind, ""), duration, found)


def _stat(fields: Mapping[int, int | memoryview], names: Mapping[int, str]) -> dict[str, str]:
    """A statistic that is a text, or refers to one, by its name; nothing for numbers."""
    name = names.get(_number(fields.get(Field.STAT_METADATA, 0)))
    text = names.get(_number(fields[Field.STAT_REFERENCE])) if Field.STAT_REFERENCE in fields else None
    if Field.STAT_TEXT in fields:
        text = _decoded(fields[Field.STAT_TEXT])
    return {} if name is None or text is None else {name: text}


def _names(fields: list[tuple[int, int | memoryview]], number: int) -> dict[int, str]:
    """Names by id of a map from ids to metadata."""
    found: dict[int, str] = {}
    for entry in (value for field, value in fields if field == number):
        parts = list(_fields(entry))
        key = next((_number(value) for field, value in parts if field == Field.MAP_KEY), 0)
        value = next((value for field, value in parts if field == Field.MAP_VALUE), memoryview(b""))
        found[key] = _text(list(_fields(value)), Field.METADATA_NAME)
    return found


def _text(fields: list[tuple[int, int | memoryview]], number: int) -> str:
    return next((_decoded(value) for field, value in fields if field == number), "")


def _decoded(value: int | memoryview) -> str:
    if isinstance(value, int):
        raise ValueError("a number where a profile has a text")
    return bytes(value).decode(errors="replace")


def _number(value: int | memoryview) -> int:
    if not isinstance(value, int):
        raise ValueError("a text where a profile has a number")
    return value


def _messages(message: memoryview, number: int) -> Iterator[int | memoryview]:
    return (value for field, value in _fields(message) if field == number)


def _fields(message: int | memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Number and value of every field of a message: an integer of varints, else the bytes."""
    if isinstance(message, int):
        raise ValueError("a number where a profile has a message")
    at, end = 0, len(message)
    while at < end:
        tag, at = _varint(message, at)
        wire = tag & ((1 << _WIRE_BITS) - 1)
        if wire == Wire.VARINT:
            value, at = _varint(message, at)
            yield tag >> _WIRE_BITS, value
            continue
        if wire == Wire.BYTES:
            size, at = _varint(message, at)
        elif wire in (Wire.FIXED64, Wire.FIXED32):
            size = 8 if wire == Wire.FIXED64 else 4
        else:
            raise ValueError(f"wire type {wire} in a profile")
        if at + size > end:
            raise ValueError("a profile is cut short")
        yield tag >> _WIRE_BITS, message[at : at + size]
        at += size


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    """A base-128 number, and where the next field begins."""
    found = 0
    for shift in range(_LONGEST_VARINT):
        if at >= len(message):
            raise ValueError("a profile is cut short")
        byte = message[at]
        at += 1
        found |= (byte & 0x7F) << (_VARINT_BITS * shift)
        if byte < 0x80:
            return found, at
    raise ValueError("a number of more than 64 bits in a profile")
