"""Prints a jaxpr as Python source that binds its primitives: it runs with JAX and NumPy alone, in any process.

A jaxpr has no stable serialised form, and an exported module (`jax.export`) cannot be run equation by equation.  Source
text can, and a person can read it: children that run a program in several ways, and reproducers, are made of it.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any

import jax
import jax.extend
import numpy as np

from jcuts.base.errors import UsageError
from jcuts.trace import jaxapi, source

PRELUDE = '''import sys

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import random as extended_random

PRNGS = {v.name: v for k, v in vars(extended_random).items() if k.endswith("_prng_impl") and hasattr(v, "name")}
PRIMITIVES = {}
for _name, _module in list(sys.modules.items()):
    if _name.split(".")[0] == "jax":
        for _value in list(vars(_module).values()):
            if isinstance(_value, jax.extend.core.Primitive):
                PRIMITIVES.setdefault(_value.name, _value)


def bind(name, *operands, **params):
    """One equation of a jaxpr: always a list of results."""
    primitive = PRIMITIVES[name]
    found = primitive.get_bind_params(params)
    functions, params = found if isinstance(found, tuple) else ((), found)
    results = primitive.bind(*functions, *operands, **params)
    return list(results) if primitive.multiple_results else [results]


def arity(*counts):
    """How many operands or results of a scan are of each kind, from jax 0.11 on."""
    from jax._src import flattree

    return flattree.pack(tuple(flattree.nones(count) for count in counts))


def closed(body, *types):
    """The closed jaxpr of a body."""
    return jax.make_jaxpr(body)(*[jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape, dtype in types])
'''
"""What the source of every program starts with; ``CONSTANTS``, a list of arrays, has to follow."""
_LARGEST_INLINE = 8
"""Elements up to which an array is printed where it is used."""


def source_of(closed: jaxapi.Closed, name: str = "program") -> tuple[str, list[np.ndarray]]:
    """The source of a function of flat arrays that returns a list of arrays, and its arrays ``CONSTANTS``.

    Args: closed: a closed jaxpr, best an inlined one: parameters that are functions or devices cannot be printed.
    Raises: UsageError: with the primitive and the parameter that has no source form.
    """
    printer = _Printer()
    text = printer.function(closed, name, "")
    return "\n".join(text) + "\n", printer.constants


def load(text: str, constants: Sequence[np.ndarray], name: str = "program") -> Any:
    """The function that `source_of` printed."""
    scope: dict[str, Any] = {"CONSTANTS": list(constants)}
    exec(compile(PRELUDE + text, "<program>", "exec"), scope)
    return scope[name]


def window(closed: jaxapi.Closed, start: int, stop: int, outputs: Sequence[Any] | None = None) -> jaxapi.Closed:
    """Equations ``start`` to ``stop`` of a jaxpr as a function of its own, of the values that they read (outlining).

    Args: outputs: the variables that it returns; None: all that is read behind the window or returned.
    """
    eqns = closed.jaxpr.eqns[start:stop]
    made = {v for eqn in eqns for v in eqn.outvars}
    read: dict[Any, None] = {}
    for eqn in eqns:
        read.update((a, None) for a in eqn.invars if not jaxapi.is_literal(a) and a not in made)
    if outputs is None:
        behind = {a for eqn in closed.jaxpr.eqns[stop:] for a in eqn.invars if not jaxapi.is_literal(a)}
        behind |= {a for a in closed.jaxpr.outvars if not jaxapi.is_literal(a)}
        outputs = [v for eqn in eqns for v in eqn.outvars if v in behind]
    held = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    constvars = [v for v in read if v in held]
    invars = [v for v in read if v not in held]
    made_closed = jaxapi.make_closed(constvars, invars, list(outputs), eqns, [held[v] for v in constvars], like=closed)
    return jaxapi.dce(made_closed)


class _Printer:
    def __init__(self) -> None:
        self.constants: list[np.ndarray] = []
        self.bodies = 0

    def function(self, closed: jaxapi.Closed, name: str, indent: str) -> list[str]:
        jaxpr, names = closed.jaxpr, {}
        inner = indent + "    "

        def ref(atom: Any) -> str:
            if jaxapi.is_literal(atom):
                return self.array(np.asarray(atom.val, atom.aval.dtype))
            return names[atom]

        def new(var: Any) -> str:
            if jaxapi.is_dropvar(var):
                return "_"
            names[var] = f"v{len(names)}"
            return names[var]

        prefix = f"{name}_" if indent else ""

        def fresh(var: Any) -> str:
            found = new(var)
            if found != "_" and prefix:
                names[var] = found = prefix + found
            return found

        lines = [f"{indent}def {name}({', '.join(fresh(v) for v in jaxpr.invars)}):"]
        for var, value in zip(jaxpr.constvars, closed.consts, strict=True):
            lines.append(f"{inner}{fresh(var)} = {self.constant(value)}")
        for eqn in jaxpr.eqns:
            lines += self.equation(eqn, ref, fresh, inner)
        lines.append(f"{inner}return [{', '.join(ref(v) for v in jaxpr.outvars)}]")
        return lines

    def equation(self, eqn: Any, ref: Any, fresh: Any, indent: str) -> list[str]:
        name = jaxapi.primitive_name(eqn)
        lines: list[str] = []
        params = []
        for key, value in eqn.params.items():
            try:
                params.append(f"{key}={self.value(value, lines, indent)}")
            except _NoSourceForm as error:
                raise UsageError(
                    f"{name} ({source.place(eqn) or 'no line known'}) has a parameter without a source form: "
                    f"{key}={error}",
                    primitive=name,
                    parameter=key,
                ) from None
        operands = [ref(v) for v in eqn.invars]
        targets = ", ".join(fresh(v) for v in eqn.outvars)
        where = source.short_line(eqn)
        types = ", ".join(v.aval.str_short(short_dtypes=True) for v in eqn.outvars)
        call = f"bind({', '.join([repr(name), *operands, *params])})"
        left = f"[{targets}] = " if targets else ""
        lines.append(f"{indent}{left}{call}  # {types}" + (f"  {where}" if where else ""))
        return lines

    def value(self, value: Any, lines: list[str], indent: str) -> str:
        """A parameter as an expression; bodies become functions in front of it."""
        if isinstance(value, enum.Enum):
            return self.named(type(value).__name__, f".{value.name}", value)
        if value is None or isinstance(value, (bool, int, str)):
            return repr(value)
        if isinstance(value, float):
            return repr(value) if np.isfinite(value) else f"float({str(value)!r})"
        if isinstance(value, np.generic):
            return repr(value.item())
        if isinstance(value, jax.extend.core.Primitive):
            return f"PRIMITIVES[{value.name!r}]"
        if isinstance(value, tuple) and type(value).__name__ == "PRNGImpl":
            return f"PRNGS[{getattr(value, 'name')!r}]"  # noqa: B009
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return self.record(value, getattr(value, "_fields"), lines, indent)  # noqa: B009
        if isinstance(value, (tuple, list)):
            items = [self.value(item, lines, indent) for item in value]
            if isinstance(value, list):
                return f"[{', '.join(items)}]"
            return f"({', '.join(items)}{',' * (len(items) == 1)})"
        if any(
            kind.__name__ == "FlatTree" for kind in type(value).__mro__
        ):  # a scan's constants, carried and scanned values in jax 0.11
            return f"arity({', '.join(str(len(part)) for part in value.unpack())})"
        if isinstance(value, frozenset) and not value:
            return "frozenset()"
        if dataclasses.is_dataclass(value) and hasattr(jax.lax, type(value).__name__):
            return self.record(value, [field.name for field in dataclasses.fields(value)], lines, indent)
        if isinstance(value, np.dtype) or (isinstance(value, type) and issubclass(value, np.generic)):
            return f"jnp.dtype({jax.numpy.dtype(value).name!r})"
        if isinstance(value, (np.ndarray, jax.Array)):
            return self.array(np.asarray(value))
        if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
            return self.body(value, lines, indent)
        raise _NoSourceForm(f"{type(value).__name__} {value!s}"[:80])

    def record(self, value: Any, names: Sequence[str], lines: list[str], indent: str) -> str:
        """A named tuple or a dataclass of `jax.lax`."""
        fields = ", ".join(f"{name}={self.value(getattr(value, name), lines, indent)}" for name in names)
        return self.named(type(value).__name__, f"({fields})", value)

    def named(self, name: str, rest: str, value: Any) -> str:
        if not hasattr(jax.lax, name):
            raise _NoSourceForm(f"{name} {value!s}"[:80])
        return f"lax.{name}{rest}"

    def body(self, value: Any, lines: list[str], indent: str) -> str:
        closed = jaxapi.close(value)
        if any(jax.numpy.issubdtype(v.aval.dtype, jax.dtypes.extended) for v in closed.jaxpr.invars):
            raise _NoSourceForm("a body with random keys as arguments")
        name = f"body{self.bodies}"
        self.bodies += 1
        lines += self.function(closed, name, indent)
        types = ", ".join(f"({tuple(v.aval.shape)}, {v.aval.dtype.name!r})" for v in closed.jaxpr.invars)
        return f"closed({name}{', ' if types else ''}{types})" + ("" if hasattr(value, "jaxpr") else ".jaxpr")

    def array(self, value: np.ndarray) -> str:
        """A small array where it is used; a large one by its number."""
        if value.dtype.kind not in "biufcV" or value.dtype.names:
            raise _NoSourceForm(f"an array of {value.dtype}")
        exact = value.dtype.kind in "biu"
        finite = exact or (value.dtype.kind != "c" and bool(np.isfinite(value.astype(np.float64)).all()))
        if value.size <= _LARGEST_INLINE and finite:
            wide = value if exact else value.astype(np.float64)
            return f"np.asarray({wide.tolist()!r}, jnp.dtype({value.dtype.name!r}))"
        return self.constant(value)

    def constant(self, value: Any) -> str:
        if not hasattr(value, "dtype") or jax.numpy.issubdtype(value.dtype, jax.dtypes.extended):
            raise UsageError(f"a constant of type {type(value).__name__} ({value!s:.40}) cannot be written as an array")
        self.constants.append(np.asarray(value))
        return f"CONSTANTS[{len(self.constants) - 1}]"


class _NoSourceForm(Exception):
    """A value that cannot be printed as source."""


def names_of(closed: jaxapi.Closed) -> list[str]:
    """What a re-traced program is compared with: its primitives in order."""
    return [jaxapi.primitive_name(eqn) for eqn in closed.jaxpr.eqns]


def retraced(text: str, constants: Sequence[np.ndarray], types: Sequence[tuple[tuple[int, ...], str]]) -> jaxapi.Closed:
    """The jaxpr of a printed program. Args: types: shape and dtype name of every argument."""
    program = load(text, constants)
    avals = [jax.ShapeDtypeStruct(shape, jax.numpy.dtype(dtype)) for shape, dtype in types]
    return jaxapi.closed_jaxpr_of(program, *avals)
