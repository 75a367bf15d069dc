"""Pretty-printer of jaxprs: Python-like source, each line annotated with the user's source line."""

from __future__ import annotations

import itertools
import os
import string
from collections.abc import Iterator
from typing import Any

from jcuts.trace import jaxapi

_HIDDEN = frozenset({"jaxpr", "call_jaxpr", "body_jaxpr", "cond_jaxpr", "branches", "name", "settings", "placement"})


def short_line(eqn: jaxapi.Eqn) -> str:
    """``file.py:12 (function)`` without the folders, or an empty string when the line is unknown."""
    line = jaxapi.user_line(eqn)
    return "" if line is None else f"{os.path.basename(line.file)}:{line.line} ({line.function})"


def place(eqn: jaxapi.Eqn) -> str:
    """``folder/file.py:12 (function)``: short enough for a table, and the same on every machine; '' when unknown."""
    line = jaxapi.user_line(eqn)
    if line is None:
        return ""
    return f"{'/'.join(line.file.split(os.sep)[-2:])}:{line.line} ({line.function})"


def as_source(closed: jaxapi.Closed, name: str = "program") -> str:
    """The program as Python-like source.

    >>> import jax.numpy as jnp
    >>> print(as_source(jaxapi.closed_jaxpr_of(lambda x: jnp.sin(x) * 2, jnp.zeros(3))))  # doctest: +ELLIPSIS
    def program(a: f32[3]):
        b: f32[3] = sin(a)  # ...
        c: f32[3] = mul(b, 2.0)  # ...
        return c
    """
    return "\n".join(_lines(closed, name, ""))


def _names() -> Iterator[str]:
    for size in itertools.count(1):
        for letters in itertools.product(string.ascii_lowercase, repeat=size):
            word = "".join(letters)
            if word not in ("as", "if", "in", "is", "or", "def", "and", "not", "for", "try", "del", "from", "else"):
                yield word


def _lines(closed: jaxapi.Closed, name: str, indent: str) -> list[str]:
    jaxpr, fresh = closed.jaxpr, _names()
    names: dict[Any, str] = {}

    def ref(atom: Any) -> str:
        if jaxapi.is_literal(atom):
            value = atom.val
            return str(value.item() if getattr(value, "ndim", 1) == 0 else value)
        if jaxapi.is_dropvar(atom):
            return "_"
        if atom not in names:
            names[atom] = next(fresh)
        return names[atom]

    def typed(var: Any) -> str:
        return ref(var) if jaxapi.is_dropvar(var) else f"{ref(var)}: {var.aval.str_short(short_dtypes=True)}"

    inner = indent + "    "
    lines = [f"{indent}def {name}({', '.join(typed(v) for v in jaxpr.invars)}):"]
    lines += [f"{inner}{typed(v)} = constant()" for v in jaxpr.constvars]
    for eqn in jaxpr.eqns:
        bodies = []
        for i, (parameter, index, body) in enumerate(jaxapi.inner_jaxprs(eqn)):
            body_name = f"{parameter}_{index}" if parameter == "branches" else f"{parameter}{i or ''}"
            bodies.append(body_name)
            lines += _lines(body, body_name, inner)
        shown = [f"{k}={v}" for k, v in eqn.params.items() if k not in _HIDDEN and v is not None and not callable(v)]
        text = ", ".join([*bodies, *(ref(v) for v in eqn.invars), *shown]).replace("\n", " ")
        target = ", ".join(typed(v) for v in eqn.outvars)
        where = short_line(eqn)
        call = f"{inner}{target + ' = ' if target else ''}{jaxapi.primitive_name(eqn)}({text})"
        lines.append(call + (f"  # {where}" if where else ""))
    lines.append(f"{inner}return {', '.join(ref(v) for v in jaxpr.outvars)}")
    return lines
