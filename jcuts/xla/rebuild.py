"""Rebuilds a jaxpr with custom calls in place of the regions whose kernels were chosen."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from jcuts.base.errors import IRError
from jcuts.codegen.artifact import CompiledKernel
from jcuts.trace import jaxapi
from jcuts.xla.cpu_ffi_call import call_kernel


def subset_closed(
    closed: jaxapi.Closed, members: Sequence[int], inputs: Sequence[Any], outputs: Sequence[Any]
) -> jaxapi.Closed:
    """A region's equations as a function of its own: the XLA candidate, and what is exported."""
    eqns = [closed.jaxpr.eqns[m] for m in sorted(members)]
    return jaxapi.make_closed((), list(inputs), list(outputs), eqns, (), like=closed)


def kernel_eqns(
    kernel: CompiledKernel,
    inputs: Sequence[Any],
    outputs: Sequence[Any],
    like: Any,
    place: tuple[int | None, int] | None = None,
    aliases: Mapping[int, int] = MappingProxyType({}),
) -> list[Any]:
    """Equations that call a kernel on variables of the surrounding jaxpr. Args: place, aliases: see `call_kernel`."""
    return traced_eqns(lambda *xs: call_kernel(kernel, *xs, place=place, aliases=aliases), inputs, outputs, like)


def traced_eqns(
    call: Callable[..., Sequence[Any]], inputs: Sequence[Any], outputs: Sequence[Any], like: Any
) -> list[Any]:
    """Equations of a traceable call, on variables of the surrounding jaxpr.

    Raises: IRError: it closes over an array.
    """
    traced = jaxapi.new_closed_jaxpr(call, [v.aval for v in inputs])
    if traced.consts:
        raise IRError("a kernel call closed over a constant")
    names: dict[Any, Any] = dict(zip(traced.jaxpr.invars, inputs, strict=True))
    for inner, outer in zip(traced.jaxpr.outvars, outputs, strict=True):
        names[inner] = outer

    def rename(atom: Any) -> Any:
        if jaxapi.is_literal(atom):
            return atom
        if atom not in names:
            names[atom] = jaxapi.new_var(atom.aval)
        return names[atom]

    result = []
    for eqn in traced.jaxpr.eqns:
        outs = [v if jaxapi.is_dropvar(v) else rename(v) for v in eqn.outvars]
        result.append(eqn.replace(invars=[rename(a) for a in eqn.invars], outvars=outs, source_info=like.source_info))
    return result


def in_order(
    closed: jaxapi.Closed, units: Mapping[int, Sequence[int]], replacement: Mapping[int, Sequence[Any]]
) -> jaxapi.Closed:
    """The jaxpr with groups of equations replaced.

    Args: units: group number -> its equations (groups are disjoint, acyclic together); replacement: group number ->
        what stands in their place. Equations in no group stay. Order: by data dependence, then by program order;
        equations with effects keep their order.
    """
    eqns = closed.jaxpr.eqns
    group_of = {member: g for g, members in units.items() for member in members}
    unit = {k: ("g", group_of[k]) if k in group_of else ("e", k) for k in range(len(eqns))}
    made: dict[Any, tuple[str, int]] = {}
    for k, eqn in enumerate(eqns):
        for v in eqn.outvars:
            if not jaxapi.is_dropvar(v):
                made[v] = unit[k]
    needs: dict[tuple[str, int], set[tuple[str, int]]] = {u: set() for u in unit.values()}
    place: dict[tuple[str, int], int] = {}
    last_effect: tuple[str, int] | None = None
    for k, eqn in enumerate(eqns):
        mine = unit[k]
        place[mine] = max(place.get(mine, k), k)
        for atom in eqn.invars:
            if not jaxapi.is_literal(atom) and atom in made and made[atom] != mine:
                needs[mine].add(made[atom])
        if eqn.effects:
            if last_effect is not None and last_effect != mine:
                needs[mine].add(last_effect)
            last_effect = mine
    result: list[Any] = []
    done: set[tuple[str, int]] = set()
    for start in sorted(place, key=lambda u: place[u]):
        stack = [(start, False)]
        active: set[tuple[str, int]] = set()
        while stack:
            current, expanded = stack.pop()
            if current in done:
                continue
            if expanded:
                done.add(current)
                active.discard(current)
                kind, number = current
                result.extend(replacement[number] if kind == "g" else [eqns[number]])
                continue
            if current in active:
                raise IRError("subsets depend on each other in a cycle")
            active.add(current)
            stack.append((current, True))
            stack.extend((n, False) for n in sorted(needs[current], key=lambda u: -place[u]) if n not in done)
    return jaxapi.with_eqns(closed, result)
