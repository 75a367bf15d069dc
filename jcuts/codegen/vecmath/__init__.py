"""Vectorised mathematical functions as LLVM IR, with stated error bounds.

``emit`` appends the code of one ``jax.lax`` function on float lanes; ``exact.emit_exact`` that of operations with an
exact answer (integer arithmetic, comparisons, conversions, rounding).

    >>> supported("tanh", "float32")
    True
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llvmlite import ir

from jcuts.base.errors import IRError
from jcuts.codegen.vecmath import f32
from jcuts.codegen.vecmath.expr import Num


@dataclass(frozen=True)
class Function:
    """One entry of the table.

    Attributes:
        code: from ``Num`` arguments to the ``Num`` result.
        ulp: bound of the error against the exact value, in units in the last place of the result.
        arity: number of arguments.
        scalarised: some or all lanes go through a scalar libm call.
    """

    code: Callable[..., Num]
    ulp: float
    arity: int = 1
    scalarised: bool = False


TABLE: dict[tuple[str, str], Function] = {
    ("exp", "float32"): Function(f32.exp, 1.5),
    ("log", "float32"): Function(f32.log, 1.5),
    ("tanh", "float32"): Function(f32.tanh, 3.0),
    ("logistic", "float32"): Function(f32.logistic, 3.0),
}

ERROR_ULP: dict[tuple[str, str], float] = {key: entry.ulp for key, entry in TABLE.items()}


def supported(name: str, dtype: str) -> bool:
    """Does ``emit`` know this function of ``jax.lax`` on this dtype?"""
    return (name, dtype) in TABLE


def emit(builder: ir.IRBuilder, name: str, args: Sequence[ir.Value], dtype: str) -> ir.Value:
    """Appends the code of ``jax.lax.<name>`` on vectors (or scalars) of lanes.

    Args:
        builder: positioned where the code goes; some functions add basic blocks and leave it at the end of the last.
        name: a ``jax.lax`` primitive name.
        args: values ``<N x float>`` / ``<N x double>`` (any N) or scalars, all of one type.
        dtype: ``float32`` or ``float64``.

    Returns: the value, of the arguments' type; its error is at most ``ERROR_ULP[name, dtype]``.
    Raises: IRError if the function is unknown or the number of arguments is wrong.
    """
    entry = TABLE.get((name, dtype))
    if entry is None:
        raise IRError(f"no vector code for {name} on {dtype}", function=name, dtype=dtype)
    if len(args) != entry.arity:
        raise IRError(f"{name} takes {entry.arity} arguments, not {len(args)}", function=name, got=len(args))
    return entry.code(*(Num(builder, value) for value in args)).value
