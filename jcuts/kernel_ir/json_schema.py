"""JSON schema of kernel programs: types, ranges, keys, and which strings may be identifiers.

A program may come from a file that anybody wrote (a database, an export).  Names end up in generated source text, so
every string is checked to be an identifier of its kind first, and unknown keys are refused.
"""

from __future__ import annotations

import json
import keyword
import re
from collections.abc import Callable
from typing import Any

from jcuts.base.errors import SchemaError

FORMAT = 1
ITEM_SIZE = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "bool": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "uint8": 1,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
}
ROLES = ("in", "out", "local")
COMBINES = ("add", "mul", "max", "min", "and", "or", "xor", "argmax", "argmin")
ATTRIBUTES: dict[str, tuple[type, ...]] = {
    "number": (int,),
    "source": (str,),
    "declared": (bool,),
    "method": (int,),
    "y": (int,),
}
"""Attributes of nodes, with their types; ``source`` is the name of an element type."""

MOST_TEXT = 1 << 26
"""Characters of one program."""
MOST_SIZE = 1 << 48
"""Elements of a buffer, points of an axis."""
MOST_NUMBER = 1 << 53
"""Largest number in an index expression or a guard."""
MOST_UNROLL = 1 << 12
"""Points of an axis that are unrolled."""
MOST_LANES = 64
"""Lanes of a vector."""
MOST_BUFFERS = 4096
MOST_PHASES = 4096
MOST_AXES = 24
MOST_NODES = 1 << 14
MOST_TERMS = 64
MOST_DEPTH = 16

_AXIS = re.compile(r"[a-z][a-z0-9_]{0,31}")
_LABEL = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,95}")
_WORD = re.compile(r"[a-z][a-z0-9_]{0,31}")
_FLOAT = re.compile(r"-?0x[01]\.[0-9a-f]{1,13}p[+-]\d{1,4}|-?inf|nan")
_GENERATED = re.compile(
    r"(tile|flag|div|mod|row|scan|product|patch|block|attention|columns|column|moments|transposed|fed|window|weights"
    r"|combined)(_.*)?|.*_(lo|hi)|rest\d*|kernel|buffers|scratch|lane|thread|cuda|min|max|range|tile_begin|tile_end"
)
"""Names that generated source text has for itself."""


def is_axis(name: object) -> bool:
    """Whether a string can name an axis: it becomes a variable of generated source text."""
    if not isinstance(name, str) or _AXIS.fullmatch(name) is None:
        return False
    return not keyword.iskeyword(name) and _GENERATED.fullmatch(name) is None


def is_buffer(name: object) -> bool:
    """Whether a string can name a buffer, which becomes a parameter of generated source text."""
    return is_axis(name)


def is_label(name: object) -> bool:
    """Whether a string can name a program or a phase."""
    return isinstance(name, str) and _LABEL.fullmatch(name) is not None


def is_word(name: object) -> bool:
    """Whether a string can name an operation, a template, a parameter, or a parameter's value."""
    return isinstance(name, str) and _WORD.fullmatch(name) is not None


def parsed(text: str) -> Any:
    """Parses JSON text.  Raises SchemaError if it is invalid, or too long or too deep to be a program."""
    if len(text) > MOST_TEXT:
        raise SchemaError(f"kernel program of {len(text)} characters: at most {MOST_TEXT} are read")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SchemaError(f"kernel program that is no JSON: {type(error).__name__}: {str(error)[:80]}") from None


def check(data: Any) -> dict[str, Any]:
    """Validates the data of a program and returns it unchanged.  Raises SchemaError with the path of the first
    fault.
    """
    if not isinstance(data, dict) or data.get("format") != FORMAT or type(data["format"]) is not int:
        found = data.get("format") if isinstance(data, dict) else type(data).__name__
        raise SchemaError(f"kernel program of format {repr(found)[:40]}; this version reads {FORMAT}")
    _keys("program", data, _PROGRAM, frozenset())
    _that(is_label(data["name"]), "program name", data["name"])
    _that(data["template"] == "" or is_word(data["template"]), "template", data["template"])
    _integer("lanes", data["lanes"], 1, MOST_LANES)
    for param in _list("params", data["params"], 64):
        name, value = _row("parameter", param, 2)
        _that(is_word(name), "parameter", name)
        _parameter(value, 0)
    for buffer in _list("buffers", data["buffers"], MOST_BUFFERS):
        _buffer(buffer)
    for grid in _list("grid", data["grid"], MOST_AXES):
        axis, extent, block = _row("grid", grid, 3)
        _that(is_axis(axis), "axis", axis)
        _integer("extent", extent, 1, MOST_SIZE)
        _integer("block", block, 1, MOST_SIZE)
    _names("serial", data["serial"])
    for phase in _list("phases", data["phases"], MOST_PHASES):
        _phase(phase)
    return data


_PROGRAM = frozenset({"format", "name", "template", "params", "lanes", "buffers", "grid", "serial", "phases"})
_PHASE = frozenset({"name", "axes", "reds", "accs", "body", "exit", "stores"})
_NODE = frozenset({"op", "dtype"})


def _buffer(row: Any) -> None:
    name, dtype, shape, role, *more = _row("buffer", row, 4, 5, 6)
    _that(is_buffer(name), "buffer", name)
    _dtype(dtype)
    size = 1
    for extent in _list("shape", shape, MOST_AXES):
        size *= _integer("extent", extent, 1, MOST_SIZE)
    _that(size <= MOST_SIZE, "buffer size", size)
    _that(role in ROLES, "role", role)
    _that(all(type(flag) is bool and (flag or more[1:]) for flag in more[:1]), "TF32 mark", more)
    for offset in more[1:]:
        start, limit, stride = _row("offset", offset, 3)
        _that(is_buffer(start), "buffer", start)
        _integer("limit", limit, 1, MOST_SIZE)
        _integer("stride", stride, 1, MOST_SIZE)


def _phase(data: Any) -> None:
    _keys("phase", data, _PHASE, frozenset({"once", "last", "when"}))
    _that(is_label(data["name"]), "phase name", data["name"])
    for kind, length in (("axes", 4), ("reds", 5)):
        for row in _list(kind, data[kind], MOST_AXES):
            name, extent, unroll, vector, *chains = _row(kind, row, length)
            _that(is_axis(name), "axis", name)
            _integer("extent", extent, 1, MOST_SIZE)
            _integer("unroll", unroll, 1, MOST_UNROLL)
            _that(type(vector) is bool, "vector mark", vector)
            for count in chains:
                _integer("chains", count, 1, MOST_UNROLL)
    for row in _list("accumulators", data["accs"], MOST_AXES):
        combine, dtype, values, index_dtype = _row("accumulator", row, 4)
        _that(combine in COMBINES, "accumulator", combine)
        _dtype(dtype)
        _numbers("contributions", values)
        if index_dtype != "":
            _dtype(index_dtype)
        _that((index_dtype != "") == (combine in ("argmax", "argmin")), "position type", index_dtype)
    _graph(data["body"])
    _graph(data["exit"])
    for row in _list("stores", data["stores"], MOST_NODES):
        buffer, address, value, *guards = _row("store", row, 3, 4)
        _that(is_buffer(buffer), "buffer", buffer)
        _index(address, 0)
        _integer("value", value, 0, MOST_NODES)
        for more in guards:
            _guards(more)
    for kind in ("once", "last"):
        _names(kind, data.get(kind, []))
    _that(data.get("when", "") == "" or is_buffer(data["when"]), "buffer", data.get("when"))


def _graph(rows: Any) -> None:
    for row in _list("graph", rows, MOST_NODES):
        _keys("node", row, _NODE, _OPTIONAL)
        op = row["op"]
        _that(is_word(op), "operation", op)
        _dtype(row["dtype"])
        for key, found in row.items():
            if (reader := _PARTS.get(key)) is not None:
                reader(found)


def _value(value: Any) -> None:
    if isinstance(value, str):
        _that(_FLOAT.fullmatch(value) is not None, "value", value)
    elif type(value) is not bool:
        _integer("value", value, -(1 << 63), (1 << 64) - 1)


def _load_buffer(name: Any) -> None:
    _that(is_buffer(name), "buffer", name)


def _attributes(rows: Any) -> None:
    for row in _list("attributes", rows, 8):
        name, value = _row("attribute", row, 2)
        _that(isinstance(name, str) and name in ATTRIBUTES and type(value) in ATTRIBUTES[name], "attribute", row)
        if name == "source":
            _dtype(value)
        elif type(value) is int:
            _integer("attribute", value, -4096, 4096)


def _guards(rows: Any) -> None:
    for row in _list("guards", rows, MOST_TERMS):
        index, low, high = _row("guard", row, 3)
        _index(index, 0)
        for bound in (low, high):
            if bound is not None:
                _integer("bound", bound, -MOST_NUMBER, MOST_NUMBER)


def _index(data: Any, depth: int) -> None:
    if type(data) is int:
        _integer("index", data, -MOST_NUMBER, MOST_NUMBER)
        return
    _that(depth < MOST_DEPTH, "depth of an index", depth)
    rows = _list("index", data, MOST_TERMS)
    _that(len(rows) > 1, "index", rows)
    _integer("index", rows[0], -MOST_NUMBER, MOST_NUMBER)
    for term in rows[1:]:
        coef, atom = _row("term", term, 2)
        _that(_integer("factor", coef, -MOST_NUMBER, MOST_NUMBER) != 0, "factor", coef)
        if isinstance(atom, str):
            _that(is_axis(atom[:-3] if atom.endswith("_lo") else atom), "axis", atom)
        elif isinstance(atom, list):
            kind, inner, modulus = _row("atom", atom, 3)
            _that(kind in ("div", "mod"), "atom", kind)
            _index(inner, depth + 1)
            _integer("modulus", modulus, 1, MOST_NUMBER)
        else:
            _integer("value", atom, 0, MOST_NODES)
    if len(rows) > 2:
        _that(len({repr(term[1]) for term in rows[1:]}) == len(rows) - 1, "index with a term twice", rows)


def _parameter(value: Any, depth: int) -> None:
    if isinstance(value, list) and depth < 4:
        for item in _list("parameter", value, MOST_TERMS):
            _parameter(item, depth + 1)
    elif isinstance(value, str):
        _that(value == "" or is_word(value), "parameter", value)
    elif type(value) is not bool:
        _integer("parameter", value, 0, 1 << 31)


def _dtype(name: Any) -> None:
    _that(isinstance(name, str) and name in ITEM_SIZE, "element type", name)


def _names(what: str, rows: Any) -> None:
    for name in _list(what, rows, MOST_AXES):
        _that(is_axis(name), "axis", name)


def _numbers(what: str, rows: Any) -> None:
    for number in _list(what, rows, MOST_TERMS):
        _integer(what, number, 0, MOST_NODES)


def _keys(what: str, data: Any, needed: frozenset[str], more: frozenset[str]) -> None:
    _that(isinstance(data, dict), what, data)
    if not needed <= data.keys() <= needed | more:
        odd = sorted(str(key)[:40] for key in (data.keys() ^ needed) - (more & data.keys()))
        raise SchemaError(f"{what} of a stored program: fields {odd} are missing or unknown", fields=odd)


def _list(what: str, data: Any, most: int) -> list[Any]:
    _that(isinstance(data, list) and len(data) <= most, what, data)
    return data


def _row(what: str, data: Any, *lengths: int) -> list[Any]:
    _that(isinstance(data, list) and len(data) in lengths, what, data)
    return data


def _integer(what: str, value: Any, low: int, high: int) -> int:
    _that(type(value) is int and low <= value <= high, what, value)
    return value


def _that(holds: bool, what: str, found: Any) -> None:
    if not holds:
        raise SchemaError(f"{what} of a stored program is {repr(found)[:80]}", what=what)


_PARTS: dict[str, Callable[[Any], None]] = {
    "args": lambda rows: _numbers("arguments", rows),
    "buffer": _load_buffer,
    "index": lambda data: _index(data, 0),
    "guards": _guards,
    "value": _value,
    "attrs": _attributes,
}
_OPTIONAL = frozenset(_PARTS)
