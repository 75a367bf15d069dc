"""Pytree structure as JSON: dicts, lists, tuples, None and named tuples around numbered leaves.  Nothing is unpickled.

leaf            its number
None            null
list, tuple     {"list": [...]}, {"tuple": [...]}
dict            {"dict": [[key, ...], ...]}, keys are text or whole numbers
named tuple     {"named": "module:Class", "fields": [...], "items": [...]}
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jcuts.base.errors import ArtifactError, UnsupportedError

_DEEPEST = 200


def encode(tree: Any, what: str) -> Any:
    """JSON data of a structure. Args: tree: a ``PyTreeDef``; what: names it in errors.

    Raises: UnsupportedError: a container that JSON has no form for.
    """
    return _encode(jax.tree.unflatten(tree, range(tree.num_leaves)), what, 0)


def _encode(value: Any, what: str, depth: int) -> Any:
    if depth > _DEEPEST:
        raise UnsupportedError(f"{what} is nested more than {_DEEPEST} deep", depth=depth)
    kind = type(value)
    if value is None or kind is int:
        return value
    if kind in (list, tuple):
        return {kind.__name__: [_encode(item, what, depth + 1) for item in value]}
    if kind is dict:
        bad = [key for key in value if type(key) not in (str, int)]
        if bad:
            raise UnsupportedError(f"{what} holds a dict with the key {bad[0]!r}: text and numbers can be saved")
        return {"dict": [[key, _encode(item, what, depth + 1)] for key, item in value.items()]}
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        items = [_encode(item, what, depth + 1) for item in value]
        return {"named": f"{kind.__module__}:{kind.__qualname__}", "fields": list(kind._fields), "items": items}
    raise UnsupportedError(
        f"{what} holds a {kind.__module__}.{kind.__qualname__}: dicts, lists, tuples, None and named tuples can be "
        "saved; wrap the function in one that takes and gives these",
        type=kind.__name__,
    )


def decode(data: Any, leaves: int, types: Sequence[type] = ()) -> Any:
    """The ``PyTreeDef`` of JSON data.

    Args: leaves: how many leaves it must have, numbered in order. types: classes of named tuples, besides those of
        modules that are imported already (none is imported here).
    Raises: ArtifactError: not of that form, or an unknown class.
    """
    count = 0

    def next_leaf(number: int) -> int:
        nonlocal count
        if number != count:
            raise ArtifactError(f"leaf {number} of a structure is not in order", leaf=number)
        count += 1
        return number

    skeleton = _decode(data, next_leaf, types, 0)
    if count != leaves:
        raise ArtifactError(f"a structure has {count} leaves, {leaves} are described", found=count, expected=leaves)
    tree = jax.tree.structure(skeleton)
    if jax.tree.leaves(skeleton) != list(range(leaves)):  # dicts are sorted by key
        raise ArtifactError("the leaves of a structure are not in order")
    return tree


def _decode(data: Any, leaf: Callable[[int], int], types: Sequence[type], depth: int) -> Any:
    if data is None:
        return None
    if type(data) is int:
        return leaf(data)
    if not isinstance(data, dict) or depth > _DEEPEST:
        raise ArtifactError(f"{repr(data)[:60]} is no structure of arguments or results")

    def items(values: Any) -> list[Any]:
        if not isinstance(values, list):
            raise ArtifactError(f"{repr(values)[:60]} is no list of a structure")
        return [_decode(item, leaf, types, depth + 1) for item in values]

    if set(data) == {"list"}:
        return items(data["list"])
    if set(data) == {"tuple"}:
        return tuple(items(data["tuple"]))
    if set(data) == {"dict"}:
        return _dict(data["dict"], leaf, types, depth)
    if set(data) == {"named", "fields", "items"}:
        values = items(data["items"])
        made = _named(data["named"], data["fields"], types)
        if len(values) != len(data["fields"]):
            raise ArtifactError(f"the named tuple {data['named']} has {len(values)} items")
        return made(*values)
    raise ArtifactError(f"{repr(data)[:60]} is no structure of arguments or results")


def _dict(pairs: Any, leaf: Callable[[int], int], types: Sequence[type], depth: int) -> dict[Any, Any]:
    if not isinstance(pairs, list) or any(not isinstance(p, list) or len(p) != 2 for p in pairs):
        raise ArtifactError(f"{repr(pairs)[:60]} is no dict of a structure")
    if any(type(key) not in (str, int) for key, _ in pairs) or len({type(key) for key, _ in pairs}) > 1:
        raise ArtifactError("a dict of a structure has keys that are neither all text nor all numbers")
    if len({key for key, _ in pairs}) != len(pairs):
        raise ArtifactError("a dict of a structure has a key twice")
    return {key: _decode(item, leaf, types, depth + 1) for key, item in pairs}


def _named(name: Any, fields: Any, types: Sequence[type]) -> Any:
    if not isinstance(name, str) or not isinstance(fields, list) or not all(isinstance(f, str) for f in fields):
        raise ArtifactError("a named tuple of a structure has neither name nor fields")
    module, _, path = name.partition(":")
    found: Any = next((t for t in types if f"{t.__module__}:{t.__qualname__}" == name), None)
    if found is None and module in sys.modules:
        found = sys.modules[module]
        for part in path.split("."):
            found = getattr(found, part, None)
    if not isinstance(found, type) or not issubclass(found, tuple) or list(getattr(found, "_fields", ())) != fields:
        raise ArtifactError(
            f"the named tuple {name} with the fields {', '.join(fields)} is not known here: import its module first, "
            "or pass types=[...]",
            name=name,
        )
    return found
