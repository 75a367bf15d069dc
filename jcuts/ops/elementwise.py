"""Op rules of element-wise operations: an output point is a function of the operands at the same index."""

from __future__ import annotations

import math

from jcuts.base.errors import Refusal
from jcuts.kernel_ir.index import Index
from jcuts.ops.registry import (
    FLOATS,
    SIGNED,
    UNSIGNED,
    Context,
    Equation,
    IndexTuple,
    Op,
    elementwise_push,
    op_rule,
)

INTEGERS = SIGNED | UNSIGNED

# primitive -> (types it is supported for, cost in element operations)
UNARY = {
    "neg": (FLOATS | INTEGERS, 1),
    "abs": (FLOATS | SIGNED, 1),
    "sign": (FLOATS | INTEGERS, 2),
    "floor": (FLOATS, 1),
    "ceil": (FLOATS, 1),
    "is_finite": (FLOATS, 2),
    "not": (INTEGERS | {"bool"}, 1),
    "exp": (FLOATS, 12),
    "exp2": (FLOATS, 12),
    "expm1": (FLOATS, 20),
    "log": (FLOATS, 20),
    "log1p": (FLOATS, 24),
    "tanh": (FLOATS, 20),
    "logistic": (FLOATS, 18),
    "erf": (FLOATS, 20),
    "erfc": (FLOATS, 30),
    "erf_inv": (FLOATS, 40),
    "sin": (FLOATS, 30),
    "cos": (FLOATS, 30),
    "tan": (FLOATS, 50),
    "asin": (FLOATS, 30),
    "acos": (FLOATS, 30),
    "atan": (FLOATS, 30),
    "sinh": (FLOATS, 30),
    "cosh": (FLOATS, 30),
    "asinh": (FLOATS, 40),
    "acosh": (FLOATS, 40),
    "atanh": (FLOATS, 40),
    "sqrt": (FLOATS, 8),
    "rsqrt": (FLOATS, 12),
    "cbrt": (FLOATS, 30),
    "square": (FLOATS | INTEGERS, 1),
    "population_count": (INTEGERS, 4),
    "clz": (INTEGERS, 4),
}
BINARY = {
    "add": (FLOATS | INTEGERS, 1),
    "sub": (FLOATS | INTEGERS, 1),
    "mul": (FLOATS | INTEGERS, 1),
    "div": (FLOATS | INTEGERS, 8),
    "rem": (FLOATS | INTEGERS, 20),
    "max": (FLOATS | INTEGERS | {"bool"}, 2),
    "min": (FLOATS | INTEGERS | {"bool"}, 2),
    "pow": (FLOATS, 60),
    "atan2": (FLOATS, 40),
    "nextafter": (FLOATS - {"bfloat16", "float16"}, 6),
    "and": (INTEGERS | {"bool"}, 1),
    "or": (INTEGERS | {"bool"}, 1),
    "xor": (INTEGERS | {"bool"}, 1),
    "shift_left": (INTEGERS, 2),
    "shift_right_logical": (INTEGERS, 2),
    "shift_right_arithmetic": (INTEGERS, 2),
}
COMPARE = ("eq", "ne", "lt", "le", "gt", "ge")


def broadcast_index(shape: tuple[int, ...], out: tuple[int, ...], index: IndexTuple) -> IndexTuple:
    """Index at which an operand is read: rank 0 anywhere, dimensions of extent 1 at 0 (JAX broadcasts both)."""
    if not shape:
        return ()
    return tuple(
        Index() if own == 1 and extent != 1 else part for own, extent, part in zip(shape, out, index, strict=True)
    )


def _same(eqn: Equation, compute_name: str, attrs: dict[str, object], cost: float) -> Op:
    """An op whose operands are all read at the output's index, repeated where they are smaller."""
    dtype = eqn.outputs[0].dtype
    out = eqn.outputs[0].shape

    def pull(ctx: Context, index: IndexTuple) -> int:
        args = [ctx.input(k, broadcast_index(t.shape, out, index)) for k, t in enumerate(eqn.inputs)]
        return ctx.apply(compute_name, dtype, *args, **attrs)

    return Op(eqn.prim, "elementwise", eqn.inputs, eqn.outputs, pull=pull, push=elementwise_push, cost=cost)


def _typed(eqn: Equation, table: dict[str, tuple[frozenset[str], int]]) -> Op | Refusal:
    kinds, cost = table[eqn.prim]
    dtype = eqn.inputs[0].dtype
    if dtype not in kinds:
        return Refusal(eqn.prim, f"not implemented for {dtype}")
    return _same(eqn, eqn.prim, {}, cost)


@op_rule(*UNARY)
def unary(eqn: Equation) -> Op | Refusal:
    """Unary operations of `jax.lax`."""
    if eqn.params.get("accuracy") is not None and eqn.params["accuracy"] is not None:
        return Refusal(eqn.prim, f"accuracy={eqn.params['accuracy']} was asked for; only XLA honours it")
    return _typed(eqn, UNARY)


@op_rule(*BINARY)
def binary(eqn: Equation) -> Op | Refusal:
    """Binary operations of `jax.lax`."""
    if eqn.prim == "pow" and eqn.inputs[1].dtype != eqn.inputs[0].dtype:
        return _power_of_integers(eqn)
    return _typed(eqn, BINARY)


def _power_of_integers(eqn: Equation) -> Op | Refusal:
    """``pow`` with exponents of another type (a step count), which JAX converts to the type of the base."""
    kinds, cost = BINARY["pow"]
    base, exponent = eqn.inputs
    if base.dtype not in kinds:
        return Refusal(eqn.prim, f"not implemented for {base.dtype}")

    def pull(ctx: Context, index: IndexTuple) -> int:
        x, y = (ctx.input(k, broadcast_index(t.shape, eqn.outputs[0].shape, index)) for k, t in enumerate(eqn.inputs))
        y = ctx.apply("convert", base.dtype, y, source=exponent.dtype)
        return ctx.apply("pow", base.dtype, x, y)

    return Op(eqn.prim, "elementwise", eqn.inputs, eqn.outputs, pull=pull, push=elementwise_push, cost=cost)


@op_rule("add_any")
def add_any(eqn: Equation) -> Op | Refusal:
    """Sum of cotangents, as autodiff inserts it."""
    return _same(eqn, "add", {}, 1)


@op_rule(*COMPARE)
def compare(eqn: Equation) -> Op | Refusal:
    """Comparisons: bool results."""
    return _same(eqn, eqn.prim, {}, 1)


@op_rule("integer_pow")
def integer_pow(eqn: Equation) -> Op | Refusal:
    """x ** y for a Python integer y."""
    exponent = int(eqn.params["y"])
    if eqn.inputs[0].dtype in INTEGERS and exponent < 0:
        return Refusal(eqn.prim, "negative power of an integer")
    if abs(exponent) > 1024:
        return Refusal(eqn.prim, f"exponent {exponent} would unroll too far")
    return _same(eqn, "integer_pow", {"y": exponent}, 2 + abs(exponent).bit_length())


@op_rule("round")
def round_(eqn: Equation) -> Op | Refusal:
    """Rounding to an integer value: half away from zero (0) or half to even (1)."""
    return _same(eqn, "round", {"method": int(eqn.params["rounding_method"])}, 3)


@op_rule("select_n")
def select_n(eqn: Equation) -> Op | Refusal:
    """select_n(which, *cases): ``which`` is bool (two cases) or int32 (clamped to the number of cases)."""
    which, cases = eqn.inputs[0], eqn.inputs[1:]
    dtype, out = eqn.outputs[0].dtype, eqn.outputs[0].shape

    def pull(ctx: Context, index: IndexTuple) -> int:
        pick = ctx.input(0, broadcast_index(which.shape, out, index))
        values = [ctx.input(k + 1, broadcast_index(t.shape, out, index)) for k, t in enumerate(cases)]
        if which.dtype == "bool":
            return ctx.apply("select", dtype, pick, values[1], values[0]) if len(values) == 2 else values[0]
        result = values[-1]
        for number in range(len(values) - 2, -1, -1):
            smaller = ctx.apply("le", "bool", pick, ctx.const(number, which.dtype))
            result = ctx.apply("select", dtype, smaller, values[number], result)
        return result

    return Op(eqn.prim, "elementwise", eqn.inputs, eqn.outputs, pull=pull, push=elementwise_push, cost=len(cases) - 1)


@op_rule("clamp")
def clamp(eqn: Equation) -> Op | Refusal:
    """clamp(low, x, high); low and high may be scalars."""
    return _same(eqn, "clamp", {}, 2)


@op_rule("convert_element_type")
def convert(eqn: Equation) -> Op | Refusal:
    """Change of element type."""
    source, target = eqn.inputs[0].dtype, eqn.outputs[0].dtype
    if source == target:
        return _same(eqn, "copy", {}, 0)
    return _same(eqn, "convert", {"source": source}, 1)


@op_rule("copy", "copy_p", "stop_gradient", "optimization_barrier_value")
def copy(eqn: Equation) -> Op | Refusal:
    """The same value."""
    return _same(eqn, "copy", {}, 0)


def _narrowed(ctx: Context, value: int, dtype: str, narrow: str) -> int:
    """The value through a narrower type and back, which nothing may leave out."""
    return ctx.apply("convert", dtype, ctx.apply("convert", narrow, value, source=dtype), source=narrow, declared=True)


def _nearer(ctx: Context, value: int, candidate: int, narrow: str) -> int:
    """``candidate``, or its other neighbour in a 16-bit format if that is nearer to a float64 ``value``.

    Conversions from float64 to 16 bits round twice, by way of float32.  That is once too often where the first rounding
    meets a tie of the second: the float32 number on the other side of the value is then rounded to the right neighbour.
    """
    single = ctx.apply("convert", "float32", value, source="float64")
    back = ctx.apply("convert", "float64", single, source="float32")
    above, below = ctx.apply("lt", "bool", back, value), ctx.apply("lt", "bool", value, back)
    towards = ctx.apply("select", "float32", above, ctx.const(math.inf, "float32"), single)
    beyond = ctx.apply("select", "float32", below, ctx.const(-math.inf, "float32"), towards)  # itself where it is exact
    beside = ctx.apply("nextafter", "float32", single, beyond)
    small = ctx.apply("convert", narrow, beside, source="float32")
    other = ctx.apply("convert", "float64", small, source=narrow)

    def distance(found: int) -> int:
        return ctx.apply("abs", "float64", ctx.apply("sub", "float64", value, found))

    better = ctx.apply("lt", "bool", distance(other), distance(candidate))
    return ctx.apply("select", "float64", better, other, candidate)


@op_rule("reduce_precision")
def reduce_precision(eqn: Equation) -> Op | Refusal:
    """Rounding to fewer exponent or mantissa bits: only the storage formats."""
    bits = (int(eqn.params["exponent_bits"]), int(eqn.params["mantissa_bits"]))
    formats = {(8, 7): "bfloat16", (5, 10): "float16", (8, 23): "float32", (11, 52): "float64"}
    dtype = eqn.inputs[0].dtype
    if bits not in formats:
        return Refusal(eqn.prim, f"no storage format with {bits} exponent and mantissa bits")
    narrow = formats[bits]
    if narrow == dtype or (narrow, dtype) in {("float64", "float32"), ("float32", "bfloat16"), ("float64", "bfloat16")}:
        return _same(eqn, "copy", {}, 0)
    if (narrow == "float32" and dtype == "float16") or (narrow == "float64" and dtype == "float16"):
        return _same(eqn, "copy", {}, 0)
    if dtype in {"bfloat16", "float16"}:
        return Refusal(eqn.prim, f"rounding {dtype} to {narrow}")

    def pull(ctx: Context, index: IndexTuple) -> int:
        value = ctx.input(0, index)
        wide = _narrowed(ctx, value, dtype, narrow)
        if dtype == "float64" and narrow != "float32":
            wide = _nearer(ctx, value, wide, narrow)
        if narrow == "bfloat16" and dtype == "float32":
            return wide  # the same exponents
        # XLA flushes what is still below the normal numbers after rounding to the short mantissa.
        exponent, mantissa = bits
        least = 2.0 ** (2 - 2 ** (exponent - 1)) * (1.0 - 2.0 ** -(mantissa + 2))
        below = ctx.apply("lt", "bool", ctx.apply("abs", dtype, value), ctx.const(least, dtype))
        zero = ctx.apply("mul", dtype, value, ctx.const(0.0, dtype))
        return ctx.apply("select", dtype, below, zero, wide)

    return Op(eqn.prim, "elementwise", eqn.inputs, eqn.outputs, pull=pull, push=elementwise_push, cost=2)
