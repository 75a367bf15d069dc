"""Programs by call signature, found by the few arguments in which the known signatures differ.

A whole signature costs microseconds per hundred leaves, as much as ``jax.jit``'s own dispatch.  Known signatures mostly
differ in one shape: the table looks at that, and JAX's own dispatch compares the rest, since a program was compiled
for the signatures that run it.  Whatever does not fit is looked up by its whole signature.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from jcuts.jit.call_signature import CallSignature, Signature
from jcuts.jit.trace_token import UnseenSignature

Getter = Callable[[tuple[Any, ...], dict[str, Any]], Any]
"""Arguments of a call -> the value of a probe."""


class Probe(NamedTuple):
    """One look at the arguments of a call.

    Attributes: get: its value in a call; known: its value in a known signature.
    """

    get: Getter
    known: Callable[[Signature], Any]


class Entry:
    """A program of a known signature. Attributes: run: calls it; calls: how often it was found."""

    __slots__ = ("calls", "run")

    def __init__(self, run: Callable[..., Any]) -> None:
        self.run, self.calls = run, 0


class SignatureTable:
    """Runs the program of a call's signature.

    Args: arguments: which arguments of the function are static.
    """

    def __init__(self, arguments: CallSignature) -> None:
        self._arguments = arguments
        self._entries: dict[Signature, Entry] = {}
        self._probes: list[Probe] | None = []
        self._key: Getter = _no_key
        self._by_key: dict[Any, Entry] = {}

    def update(self, runs: Mapping[Signature, Callable[..., Any]]) -> None:
        """The programs from now on. Args: runs: what calls of every known signature call."""
        fresh = {signature: run for signature, run in runs.items() if signature not in self._entries}
        gone = self._entries.keys() - runs.keys()
        for signature, run in runs.items():
            if signature in self._entries:
                self._entries[signature].run = run
        if fresh or gone:
            entries = {s: self._entries.get(s) or Entry(run) for s, run in runs.items()}
            if gone or not self._extend(entries, fresh):
                self._rebuild(entries)
            self._entries = entries

    def calls(self, signature: Signature) -> int:
        """How often the table has run a signature."""
        entry = self._entries.get(signature)
        return 0 if entry is None else entry.calls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            entry = self._by_key[self._key(args, kwargs)]
        except (LookupError, AttributeError, TypeError):
            entry = self._find(args, kwargs)
        entry.calls += 1
        return entry.run(*args, **kwargs)

    def _find(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Entry:
        entry = self._entries.get(self._arguments.signature(args, kwargs))
        if entry is None:
            raise UnseenSignature
        return entry

    def _extend(self, entries: Mapping[Signature, Entry], fresh: Mapping[Signature, Any]) -> bool:
        """Adds signatures that the probes tell from all others already; whether that is so."""
        if self._probes is None or not self._entries:
            return False
        first = next(iter(self._entries))
        by_key = dict(self._by_key)
        for signature in fresh:
            key = _known_key(self._probes, signature)
            if not _alike(first, signature) or key in by_key:
                return False
            by_key[key] = entries[signature]
        self._by_key = by_key
        return True

    def _rebuild(self, entries: Mapping[Signature, Entry]) -> None:
        probes = self._probes = choose_probes(list(entries))
        self._by_key = {}  # a call in between is looked up by its whole signature
        if probes is None:
            self._key = _no_key
            return
        gets = [probe.get for probe in probes]
        if len(gets) == 1:
            self._key = gets[0]
        else:
            self._key = lambda args, kwargs: tuple([get(args, kwargs) for get in gets])
        self._by_key = {_known_key(probes, signature): entry for signature, entry in entries.items()}


def choose_probes(signatures: Sequence[Signature]) -> list[Probe] | None:
    """The fewest looks, found greedily, that tell all these signatures apart; None where shapes and dtypes do not."""
    if len(signatures) < 2 or not all(_alike(signatures[0], other) for other in signatures):
        return None
    first = signatures[0]
    chosen: list[Probe] = []
    groups = [list(signatures)]
    for probe in _all_probes(first):
        if all(len(group) == 1 for group in groups):
            break
        split = [part for group in groups for part in _split(group, probe)]
        if len(split) > len(groups):
            chosen.append(probe)
            groups = split
    return chosen if all(len(group) == 1 for group in groups) else None


def _split(group: Sequence[Signature], probe: Probe) -> list[list[Signature]]:
    parts: dict[Any, list[Signature]] = {}
    for signature in group:
        parts.setdefault(probe.known(signature), []).append(signature)
    return list(parts.values())


def _alike(one: Signature, other: Signature) -> bool:
    """Whether two signatures have the same structure, and the same static arguments whatever their values."""
    return one.tree == other.tree and [name for name, _ in one.statics] == [name for name, _ in other.statics]


def _known_key(probes: Sequence[Probe], signature: Signature) -> Any:
    values = [probe.known(signature) for probe in probes]
    return values[0] if len(values) == 1 else tuple(values)


def _all_probes(signature: Signature) -> list[Probe]:
    """Looks at the static arguments, then at shapes, then at dtypes."""
    statics = [Probe(_argument(name), lambda s, i=i: s.statics[i][1]) for i, (name, _) in enumerate(signature.statics)]
    getters = leaf_getters(signature)
    shapes = [Probe(_attribute(get, "shape"), lambda s, i=i: s.leaves[i][0].shape) for i, get in enumerate(getters)]
    dtypes = [Probe(_attribute(get, "dtype"), lambda s, i=i: s.leaves[i][0].dtype) for i, get in enumerate(getters)]
    return [*statics, *shapes, *dtypes]


def leaf_getters(signature: Signature) -> list[Getter]:
    """For every leaf of the dynamic arguments what finds it in a call; empty for containers that have no paths."""
    tree, count, _ = signature.tree
    static = {name for name, _ in signature.statics}
    positions = [i for i in range(count) if i not in static]
    try:
        numbered = jax.tree.unflatten(tree, range(tree.num_leaves))
        paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(numbered)[0]]
    except Exception:  # a container of the user's that takes no numbers for its parts
        return []
    found = [_leaf(path, positions) for path in paths]
    return [] if any(get is None for get in found) else [get for get in found if get is not None]


def _leaf(path: Sequence[Any], positions: Sequence[int]) -> Getter | None:
    steps = []
    for key in path[1:]:
        if isinstance(key, jax.tree_util.SequenceKey):
            steps.append((False, key.idx))
        elif isinstance(key, jax.tree_util.DictKey):
            steps.append((False, key.key))
        elif isinstance(key, jax.tree_util.GetAttrKey):
            steps.append((True, key.name))
        else:
            return None
    named = path[0].idx == 1
    start = steps[0][1] if named else positions[steps[0][1]]
    return _walk(_argument(start), steps[1:])


def _argument(name: Any) -> Getter:
    """A positional argument by its number, or one by its name."""
    if isinstance(name, str):
        return lambda args, kwargs: kwargs[name]
    return lambda args, kwargs: args[name]


def _walk(start: Getter, steps: Sequence[tuple[bool, Any]]) -> Getter:
    if not steps:
        return start
    if len(steps) == 1 and not steps[0][0]:
        key = steps[0][1]
        return lambda args, kwargs: start(args, kwargs)[key]

    def get(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found = start(args, kwargs)
        for by_name, key in steps:
            found = getattr(found, key) if by_name else found[key]
        return found

    return get


def _attribute(get: Getter, name: str) -> Getter:
    if name == "shape":
        return lambda args, kwargs: get(args, kwargs).shape
    return functools.partial(_dtype, get)


def _dtype(get: Getter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return get(args, kwargs).dtype


def _no_key(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    raise LookupError
