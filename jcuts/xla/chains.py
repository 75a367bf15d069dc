"""Calls of CUDA kernels that can stand next to each other become one call: a chain.

Between two calls XLA waits until the first has ended, inside a CUDA graph too; between kernels of one call the launcher
need not (`custom_calls/launch_cuda.cc`): the next one is launched while the one in front of it still runs, and waits on
the device.  Values that only kernels of a chain read lie in the chain's scratch memory, one after the other where their
lives do not meet.

Equations are put in the order that has the fewest chains: everything else as early as it can be, then all kernels that
can run without more of it.  Reshapes between kernels cost nothing: a kernel reads what was reshaped.

A chain's operands and results are all there as long as it runs.  Where that takes much more memory than single calls in
the function's own order, equations move, and kernels join, only within parts of the function.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from jcuts.base.errors import IRError
from jcuts.trace import jaxapi
from jcuts.xla import arena, cuda, peak
from jcuts.xla.rebuild import traced_eqns

VIEWS = frozenset({"reshape", "squeeze", "expand_dims"})
EARLY = (9, 0)
"""Compute capability from which on a kernel can be launched before the one in front of it has ended."""
MORE_BYTES, MORE_SHARE = 1 << 30, 1 / 8
"""Memory that chains may take beyond what single calls take, whichever is more: bytes, a part of the calls'."""
OPERAND, RESULT, SCRATCH = range(3)
"""Kinds of places (`CudaChainState` in the launcher)."""


@dataclass
class Chain:
    """Kernel calls that become one, in order.

    Attributes: calls: equations. made: the values that they make (roots). outdated: values that a call has overwritten.
    """

    calls: list[Any] = field(default_factory=list)
    made: set[Any] = field(default_factory=set)
    outdated: set[Any] = field(default_factory=set)


def chained(closed: jaxapi.Closed) -> jaxapi.Closed:
    """The jaxpr with chains in place of kernel calls that can stand next to each other; the same values."""
    eqns = list(closed.jaxpr.eqns)
    roots = _roots(eqns)
    readers = _readers(closed, eqns, roots)
    before = peak.bytes_of(closed, VIEWS)
    most = before + max(MORE_BYTES, MORE_SHARE * before)
    size = max(1, len(eqns))
    while True:
        result: list[Any] = []
        for first in range(0, len(eqns), size):
            for step in _steps(_order(eqns[first : first + size], roots), roots, readers):
                result += _merged(step, roots, readers) if isinstance(step, Chain) else [step]
        found = jaxapi.dce(jaxapi.with_eqns(closed, result))
        if size == 1 or peak.bytes_of(found, VIEWS) <= most:
            return found
        size = -(-size // 2)


def calls(closed: jaxapi.Closed) -> int:
    """Kernel calls of a jaxpr that are not in chains."""
    return sum(_is_kernel(eqn) for eqn in closed.jaxpr.eqns)


def joined(closed: jaxapi.Closed) -> int:
    """Kernels of a program, its bodies included, that are in chains of two or more."""
    return sum(length for length in _lengths(closed) if length > 1)


def note(closed: jaxapi.Closed) -> str | None:
    """What `explain` says of the chains of a program and of its bodies; None where there are none."""
    lengths = sorted(_lengths(closed), reverse=True)
    if not lengths:
        return None
    several = f"{len(lengths)} calls" if len(lengths) > 1 else "one call"
    return f"{sum(lengths)} kernels that can follow each other run in {several} (of {', '.join(map(str, lengths))})"


def _lengths(closed: jaxapi.Closed) -> Iterator[int]:
    for eqn in closed.jaxpr.eqns:
        if jaxapi.call_target(eqn) == cuda.CHAIN:
            yield str(dict(eqn.params["attributes"])["digests"]).count(" ")
        for _, _, body in jaxapi.inner_jaxprs(eqn):
            yield from _lengths(body)


def _is_kernel(eqn: Any) -> bool:
    """Whether it is a kernel's call; not where it also reads the old value of what it overwrites, which XLA copies."""
    return jaxapi.call_target(eqn) == cuda.TARGET and all(
        sum(a is eqn.invars[k] for a in eqn.invars) == 1 for k in _overwritten(eqn)
    )


def _overwritten(eqn: Any) -> list[int]:
    """Numbers of a call's operands that it overwrites: one, with its first result, or none (`cuda.call_kernel`)."""
    return [k for k, _ in eqn.params["input_output_aliases"] or ()]


def _is_view(eqn: Any) -> bool:
    if jaxapi.primitive_name(eqn) not in VIEWS or jaxapi.is_literal(eqn.invars[0]):
        return False
    return eqn.params.get("dimensions") is None or jaxapi.primitive_name(eqn) != "reshape"


def _roots(eqns: Sequence[Any]) -> dict[Any, Any]:
    """Of results of reshapes: the value that was reshaped first.

    What a kernel overwrites has its own shape, and a reshape of what it overwrites is another value for it.
    """
    first = _reshaped(eqns, set())
    apart: set[Any] = set()
    for eqn in filter(_is_kernel, eqns):
        for k in _overwritten(eqn):
            source = first.get(eqn.invars[k], eqn.invars[k])
            others = [a for a in eqn.invars if not jaxapi.is_literal(a) and first.get(a, a) is source]
            apart |= {eqn.invars[k], *others}
    return _reshaped(eqns, apart)


def _reshaped(eqns: Sequence[Any], apart: set[Any]) -> dict[Any, Any]:
    roots: dict[Any, Any] = {}
    for eqn in eqns:
        if _is_view(eqn) and eqn.outvars[0] not in apart:
            source = eqn.invars[0]
            roots[eqn.outvars[0]] = roots.get(source, source)
    return roots


def _operands(eqn: Any, roots: dict[Any, Any]) -> list[Any]:
    """What an equation reads: variables and literals; of kernels, without the reshapes in between."""
    if not _is_kernel(eqn):
        return list(eqn.invars)
    return [a if jaxapi.is_literal(a) else roots.get(a, a) for a in eqn.invars]


def _readers(closed: jaxapi.Closed, eqns: Sequence[Any], roots: dict[Any, Any]) -> dict[Any, list[Any]]:
    """Who reads a value, reshaped or not: equations, None for the function's results."""
    readers: dict[Any, list[Any]] = {}
    used = {a for a in closed.jaxpr.outvars if not jaxapi.is_literal(a)}
    for a in used:
        readers.setdefault(roots.get(a, a), []).append(None)
    for eqn in reversed(eqns):
        if eqn.outvars and eqn.outvars[0] in roots and eqn.outvars[0] not in used:
            continue  # only kernels read it: they read the root
        for a in _operands(eqn, roots):
            if jaxapi.is_literal(a):
                continue
            if not _is_kernel(eqn):
                used.add(a)
            readers.setdefault(roots.get(a, a), []).append(eqn)
    return readers


def _order(eqns: Sequence[Any], roots: dict[Any, Any]) -> list[Any]:
    """The equations by data dependence; in turn all that are no kernels and can come, then all kernels."""
    makers = {v: k for k, e in enumerate(eqns) for v in e.outvars if not jaxapi.is_dropvar(v)}
    needs: list[set[int]] = []
    last_effect: int | None = None
    for k, eqn in enumerate(eqns):
        mine = {makers[a] for a in _operands(eqn, roots) if not jaxapi.is_literal(a) and a in makers}
        if eqn.effects:
            mine |= set() if last_effect is None else {last_effect}
            last_effect = k
        needs.append(mine)
    users: list[list[int]] = [[] for _ in eqns]
    for k, mine in enumerate(needs):
        for maker in mine:
            users[maker].append(k)
    missing = [len(mine) for mine in needs]
    kinds = [_is_kernel(eqn) for eqn in eqns]
    ready: tuple[list[int], list[int]] = ([], [])
    for k, count in enumerate(missing):
        if not count:
            ready[kinds[k]].append(k)  # ascending: a heap
    order: list[Any] = []
    kernels = False
    while any(ready):
        while ready[kernels]:
            k = heapq.heappop(ready[kernels])
            order.append(eqns[k])
            for user in users[k]:
                missing[user] -= 1
                if not missing[user]:
                    heapq.heappush(ready[kinds[user]], user)
        kernels = not kernels
    if len(order) < len(eqns):
        raise IRError("equations depend on each other in a cycle")
    return order


def _steps(order: Sequence[Any], roots: dict[Any, Any], readers: dict[Any, list[Any]]) -> list[Any]:
    """Equations and chains, in order.

    A chain ends before a kernel that overwrites a value somebody else reads, and before one that reads what has been
    overwritten: XLA makes the copies that this takes, between calls.
    """
    steps: list[Any] = []
    chain = Chain()
    for eqn in order:
        if not _is_kernel(eqn):
            chain = Chain()
            steps.append(eqn)
            continue
        operands = [a for a in _operands(eqn, roots) if not jaxapi.is_literal(a)]
        updated = _updated(eqn, roots)
        spoils = updated in chain.made and any(reader is not eqn for reader in readers.get(updated, []))
        if not chain.calls or spoils or chain.outdated & set(operands):
            chain = Chain()
            steps.append(chain)
        chain.calls.append(eqn)
        chain.made |= {v for v in eqn.outvars if not jaxapi.is_dropvar(v)}
        if updated is not None:
            chain.outdated.add(updated)
    return steps


def _updated(eqn: Any, roots: dict[Any, Any]) -> Any:
    """The value that a kernel overwrites with its first result, or None."""
    return next((_operands(eqn, roots)[k] for k in _overwritten(eqn)), None)


def _merged(chain: Chain, roots: dict[Any, Any], readers: dict[Any, list[Any]]) -> list[Any]:
    """The equations of a chain's call; the call itself where there is one only, and nothing it reads is reshaped."""
    if len(chain.calls) == 1 and _operands(chain.calls[0], roots) == list(chain.calls[0].invars):
        return chain.calls
    inside = set(map(id, chain.calls))
    attributes = [dict(e.params["attributes"]) for e in chain.calls]
    storage: dict[Any, Any] = {}  # value -> the one whose memory it has
    operands: list[Any] = []
    numbers: dict[int, int] = {}  # of operands, by identity: literals are not all hashable
    aliases: dict[Any, Any] = {}  # operand that is overwritten -> its last version
    spans: dict[Any, list[int]] = {}
    for step, eqn in enumerate(chain.calls):
        for a in _operands(eqn, roots):
            if not jaxapi.is_literal(a) and a in storage:
                spans.setdefault(storage[a], [step, step])[1] = step
            elif id(a) not in numbers:
                numbers[id(a)] = len(operands)
                operands.append(a)
        count = int(attributes[step]["num_outputs"])
        updated = _updated(eqn, roots)
        for k, v in enumerate(eqn.outvars[:count]):
            storage[v] = v if k or updated is None else storage.get(updated, updated)
            spans.setdefault(storage[v], [step, step])[1] = step
        if updated is not None and id(storage[eqn.outvars[0]]) in numbers:
            aliases[storage[eqn.outvars[0]]] = eqn.outvars[0]
    kept = [v for v in storage if not jaxapi.is_dropvar(v)
            and any(reader is None or id(reader) not in inside for reader in readers.get(v, []))]  # fmt: skip
    results = [*kept, *(v for v in aliases.values() if v not in kept)]
    places: dict[Any, tuple[int, int]] = {storage[v]: (RESULT, k) for k, v in enumerate(results)}
    places |= {a: (OPERAND, k) for k, a in enumerate(operands) if not jaxapi.is_literal(a) and a not in places}
    local = [v for v in spans if v not in places]
    sizes = [int(a["scratch_bytes"]) for a in attributes]
    lives = [*((*spans[v], jaxapi.nbytes(v)) for v in local), *((k, k, n) for k, n in enumerate(sizes))]
    offsets, size = arena.packed(lives)
    offset_of = dict(zip(local, offsets, strict=False))
    wiring: list[int] = []
    for step, eqn in enumerate(chain.calls):
        count = int(attributes[step]["num_outputs"])
        values = [*_operands(eqn, roots), *eqn.outvars[:count]]
        wiring += [len(values), offsets[len(local) + step]]
        for k, v in enumerate(values):
            start = int(attributes[step]["start"]) if k == len(eqn.invars) else 0
            if jaxapi.is_literal(v):
                wiring += [OPERAND, numbers[id(v)], start]
                continue
            memory = storage.get(v, v)
            kind, number = places.get(memory, (SCRATCH, 0))
            wiring += [kind, number, start + offset_of.get(memory, 0)]
    digests = [str(a["digest"]) for a in attributes]
    pairs = {numbers[id(source)]: results.index(v) for source, v in aliases.items()}
    shapes = [v.aval for v in results]
    return traced_eqns(
        lambda *xs: cuda.call_chain(digests, wiring, xs, shapes, scratch_bytes=size, aliases=pairs),
        operands, results, chain.calls[-1],
    )  # fmt: skip
