"""Data-flow analysis of kernel calls: operands seen through reshapes (no-ops), and the operand that a call overwrites
(aliasing).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jcuts.trace import jaxapi
from jcuts.xla import cpu_launcher, cuda_launcher

TARGETS = frozenset({cuda_launcher.TARGET, cpu_launcher.TARGET})
"""Custom calls of one kernel; a function's kernels are all of one device."""

VIEWS = frozenset({"reshape", "squeeze", "expand_dims"})


class Dataflow:
    """Def-use chains of a jaxpr with kernel calls.

    Attributes:
        roots: results of reshapes -> the value that was reshaped first.
        readers: value -> who reads it, reshaped or not: equations, None for the function's results.
    """

    def __init__(self, closed: jaxapi.Closed) -> None:
        eqns = list(closed.jaxpr.eqns)
        self.roots = _roots(eqns)
        self.readers = self._readers(closed, eqns)

    def operands(self, eqn: Any) -> list[Any]:
        """Operands of an equation: variables and literals; of kernels, seen through reshapes."""
        if not is_kernel(eqn):
            return list(eqn.invars)
        return [a if jaxapi.is_literal(a) else self.roots.get(a, a) for a in eqn.invars]

    def overwritten_value(self, eqn: Any) -> Any:
        """The value that a kernel overwrites with its first result, or None."""
        return next((self.operands(eqn)[k] for k in _overwritten(eqn)), None)

    def _readers(self, closed: jaxapi.Closed, eqns: Sequence[Any]) -> dict[Any, list[Any]]:
        readers: dict[Any, list[Any]] = {}
        used = {a for a in closed.jaxpr.outvars if not jaxapi.is_literal(a)}
        for a in used:
            readers.setdefault(self.roots.get(a, a), []).append(None)
        for eqn in reversed(eqns):
            if eqn.outvars and eqn.outvars[0] in self.roots and eqn.outvars[0] not in used:
                continue  # only kernels read it: they read the root
            for a in self.operands(eqn):
                if jaxapi.is_literal(a):
                    continue
                if not is_kernel(eqn):
                    used.add(a)
                readers.setdefault(self.roots.get(a, a), []).append(eqn)
        return readers


def is_kernel(eqn: Any) -> bool:
    """Whether an equation is a kernel call that can be part of a chain.

    Others also read the old value of the operand that they overwrite (XLA copies that), or overwrite several.
    """
    if jaxapi.call_target(eqn) not in TARGETS or len(_overwritten(eqn)) > 1:
        return False
    return all(sum(a is eqn.invars[k] for a in eqn.invars) == 1 for k in _overwritten(eqn))


def _overwritten(eqn: Any) -> list[int]:
    """Numbers of a call's operands that it overwrites (`cuda_launcher.call_kernel`).

    One, with its first result, or none; those of a multi-tensor update are many.
    """
    return [k for k, _ in eqn.params["input_output_aliases"] or ()]


def _is_view(eqn: Any) -> bool:
    if jaxapi.primitive_name(eqn) not in VIEWS or jaxapi.is_literal(eqn.invars[0]):
        return False
    return eqn.params.get("dimensions") is None or jaxapi.primitive_name(eqn) != "reshape"


def _roots(eqns: Sequence[Any]) -> dict[Any, Any]:
    """Results of reshapes -> the value that was reshaped first.

    What a kernel overwrites has its own shape, and a reshape of what it overwrites is another value for it.
    """
    first = _reshaped(eqns, set())
    apart: set[Any] = set()
    for eqn in filter(is_kernel, eqns):
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
