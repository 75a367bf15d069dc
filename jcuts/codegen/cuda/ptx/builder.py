"""LLVM builder for NVVM: the scalar code of `codegen.llvm.elementwise` and `codegen.vecmath`, with explicit rounding.

NVVM's IR is LLVM 7's for compute capabilities below 10, and its optimiser contracts a multiplication and an addition
into one FMA.  Code whose error bound rests on separate roundings must not be contracted, so float arithmetic is emitted
as intrinsics that round explicitly (``add.rn``, ``mul.rn``); only `lanes.fma` emits an FMA.  What LLVM 7 lacks becomes
inline PTX or a function of libdevice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir

from jcuts.base.errors import IRError
from jcuts.codegen.cuda.toolchain.target import AMPERE
from jcuts.codegen.llvm import lanes as L

_SUFFIX = {"float": "f", "double": "d"}
_PTX = {"float": "f32", "double": "f64"}
_CONSTRAINT = {"i16": "h", "i32": "r", "i64": "l", "float": "f", "double": "d"}
_LIBDEVICE = {
    "fmodf": "__nv_fmodf",
    "fmod": "__nv_fmod",
    "sin": "__nv_sin",
    "cos": "__nv_cos",
    "tan": "__nv_tan",
    "sinf": "__nv_sinf",
    "cosf": "__nv_cosf",
    "tanf": "__nv_tanf",
}
_SAME = frozenset({"fma", "sqrt", "ctpop"})


def asm(
    builder: L.Builder, text: str, result: L.Type, args: Sequence[L.Value] = (), *, out: str = "", effects: bool = False
) -> L.Value:
    """Inline PTX. ``$0`` is the result (results, of a struct type), then come the arguments.

    Args: out: constraint of the result if it is not the one of its type; effects: it must neither move nor vanish.
    """
    outs: list[str] = []
    if isinstance(result, ir.LiteralStructType):
        outs = ["=" + _CONSTRAINT[str(k)] for k in result.elements]
    elif not isinstance(result, ir.VoidType):
        outs = ["=" + (out or _CONSTRAINT[str(result)])]
    ins = [_CONSTRAINT[str(a.type)] for a in args]
    clobbers = ["~{memory}"] if effects else []
    kind = ir.FunctionType(result, [a.type for a in args])
    return builder.call(ir.InlineAsm(kind, text, ",".join([*outs, *ins, *clobbers]), side_effect=effects), list(args))


class GpuBuilder:
    """Wraps an ``ir.IRBuilder``; everything that is not redefined here is the builder's own."""

    def __init__(self, builder: L.Builder, capability: tuple[int, int] = (8, 0)) -> None:
        self.plain, self.capability = builder, capability
        self.exact_division = False
        """Round float32 quotients correctly; else they are within 2 ulp (``div.full``, which is XLA's choice too)."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plain, name)

    # -- arithmetic that is rounded where it stands -------------------------------------------------------------
    def _rounded(self, name: str, a: L.Value, b: L.Value) -> L.Value:
        return self._declared(f"llvm.nvvm.{name}.rn.{_SUFFIX[str(a.type)]}", a.type, [a, b])

    def fadd(self, a: L.Value, b: L.Value) -> L.Value:
        return self._rounded("add", a, b)

    def fmul(self, a: L.Value, b: L.Value) -> L.Value:
        return self._rounded("mul", a, b)

    def fsub(self, a: L.Value, b: L.Value) -> L.Value:
        return self._rounded("add", a, self.fneg(b))

    def fdiv(self, a: L.Value, b: L.Value) -> L.Value:
        if str(a.type) == "float" and not self.exact_division:
            return asm(self, "div.full.f32 $0, $1, $2;", a.type, [a, b])
        return self._rounded("div", a, b)

    def fneg(self, a: L.Value) -> L.Value:
        """Flips the sign bit (LLVM 7 has no such instruction)."""
        bits = ir.IntType(L.bit_width(a.type))
        word = self.plain.bitcast(a, bits)
        return self.plain.bitcast(self.plain.xor(word, bits(-1 << (bits.width - 1))), a.type)

    # -- intrinsics ---------------------------------------------------------------------------------------------
    def _declared(self, name: str, result: L.Type, args: Sequence[L.Value]) -> L.Value:
        return self.plain.call(L.declare(self, name, result, [a.type for a in args]), list(args))

    def special(self, name: str, result: L.Type, args: Sequence[L.Value]) -> L.Value:
        """The PTX or libdevice code for ``llvm.<name>`` (called by `lanes.intrinsic`)."""
        if isinstance(result, ir.VectorType):
            raise IRError(f"code for a GPU is scalar, {name} of {result} is not", function=name)
        if name in _SAME:
            return self._declared(f"llvm.{name}.{L.suffix(result)}", result, args)
        code = _SPECIAL.get(name)
        if code is None:
            raise IRError(f"llvm.{name} has no form for a GPU", function=name)
        return code(self, result, args)

    def sealed(self, value: L.Value) -> L.Value:
        """Passes an 8- or 16-bit integer through opaque PTX, value unchanged.

        NVVM (of CUDA 13) makes ``dp2a`` of two products of integers that were cut to 8 bits and widened again, and
        leaves out the cut where the operands lie side by side in a register as 16 bits.
        """
        return self.plain.trunc(asm(self, "mov.b32 $0, $1;", L.I32, [self.plain.zext(value, L.I32)]), value.type)

    @property
    def to_bfloat16(self) -> Callable[[L.Value], L.Value] | None:
        """Rounds a float32 to the bits of a bfloat16; None where the GPU cannot.

        As the lower half of a pair (``cvt.rn.bf16x2.f32``, SASS ``F2FP``): a single one (``F2F``) is as slow as an
        exponential.
        """
        if self.capability < AMPERE:
            return None
        text = "cvt.rn.bf16x2.f32 $0, 0f00000000, $1;"
        return lambda value: self.plain.trunc(asm(self, text, L.I32, [value]), L.I16)

    def libm(self, symbol: str, args: Sequence[L.Value]) -> L.Value:
        """A function of the C library, from libdevice (called by `lanes.per_lane`)."""
        if symbol not in _LIBDEVICE:
            raise IRError(f"{symbol} has no counterpart in libdevice", function=symbol)
        return self._declared(_LIBDEVICE[symbol], args[0].type, args)


def _round_away(b: GpuBuilder, result: L.Type, args: Sequence[L.Value]) -> L.Value:
    return b._declared("__nv_roundf" if str(result) == "float" else "__nv_round", result, args)


def _round_even(b: GpuBuilder, result: L.Type, args: Sequence[L.Value]) -> L.Value:
    return b.special("rint", result, args)


def _extreme(name: str) -> Callable[..., L.Value]:
    """IEEE 754-2019 maximum and minimum: NaN wins, -0 is below +0."""

    def code(b: GpuBuilder, result: L.Type, args: Sequence[L.Value]) -> L.Value:
        if str(result) == "float" and b.capability >= AMPERE:
            return asm(b, f"{name}.NaN.f32 $0, $1, $2;", result, args)
        x, y = args
        better = b.fcmp_ordered(">" if name == "max" else "<", x, y)
        best = b.select(better, x, y)
        word = ir.IntType(L.bit_width(result))
        both = (b.and_ if name == "max" else b.or_)(b.bitcast(x, word), b.bitcast(y, word))
        best = b.select(b.fcmp_ordered("==", x, y), b.bitcast(both, result), best)
        return b.select(b.fcmp_unordered("uno", x, y), b.fadd(x, y), best)

    return code


def _saturate(sign: str) -> Callable[..., L.Value]:
    """Towards zero, saturated, NaN to 0: PTX saturates by itself; NaN is 0 there for some types only."""

    def code(b: GpuBuilder, result: L.Type, args: Sequence[L.Value]) -> L.Value:
        x = args[0]
        bits = L.bit_width(result)
        made = ir.IntType(max(bits, 32))
        kind = ("u" if sign == "u" else "s") + str(made.width)
        value = asm(b, f"cvt.rzi.{kind}.{_PTX[str(x.type)]} $0, $1;", made, [x])
        value = b.select(b.fcmp_unordered("uno", x, x), made(0), value)
        if bits == made.width:
            return value
        low, high = (0, 2**bits - 1) if sign == "u" else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
        compare = b.icmp_unsigned if sign == "u" else b.icmp_signed
        value = b.select(compare(">", value, made(high)), made(high), value)
        if sign == "s":
            value = b.select(compare("<", value, made(low)), made(low), value)
        return b.trunc(value, result)

    return code


def _integral(mode: str) -> Callable[..., L.Value]:
    """Rounding to an integer value: rmi down, rpi up, rzi towards zero, rni to nearest even."""

    def code(b: GpuBuilder, result: L.Type, args: Sequence[L.Value]) -> L.Value:
        kind = _PTX[str(result)]
        return asm(b, f"cvt.{mode}.{kind}.{kind} $0, $1;", result, args)

    return code


def _float_bits(b: GpuBuilder, value: L.Value, mask: int) -> L.Value:
    word = ir.IntType(L.bit_width(value.type))
    return b.and_(b.bitcast(value, word), word(mask))


def _fabs(b: GpuBuilder, result: L.Type, args: Sequence[L.Value]) -> L.Value:
    return b.bitcast(_float_bits(b, args[0], (1 << (L.bit_width(result) - 1)) - 1), result)


def _copysign(b: GpuBuilder, result: L.Type, args: Sequence[L.Value]) -> L.Value:
    width = L.bit_width(result)
    size = _float_bits(b, args[0], (1 << (width - 1)) - 1)
    return b.bitcast(b.or_(size, _float_bits(b, args[1], -1 << (width - 1))), result)


def _absolute(b: GpuBuilder, result: L.Type, args: Sequence[L.Value]) -> L.Value:
    x = args[0]
    return b.select(b.icmp_signed("<", x, result(0)), b.sub(result(0), x), x)


def _leading_zeros(b: GpuBuilder, result: L.Type, args: Sequence[L.Value]) -> L.Value:
    return b._declared(f"llvm.ctlz.{L.suffix(result)}", result, [args[0], L.I1(0)])


def _fence(b: GpuBuilder, result: L.Type, args: Sequence[L.Value]) -> L.Value:
    """An opaque copy that NVVM cannot optimise through; ptxas removes it."""
    return asm(b, f"mov.{_PTX[str(result)]} $0, $1;", result, args)


_SPECIAL: dict[str, Callable[..., L.Value]] = {
    "fabs": _fabs,
    "copysign": _copysign,
    "floor": _integral("rmi"),
    "ceil": _integral("rpi"),
    "trunc": _integral("rzi"),
    "rint": _integral("rni"),
    "round": _round_away,
    "roundeven": _round_even,
    "maximum": _extreme("max"),
    "minimum": _extreme("min"),
    "fptosi.sat": _saturate("s"),
    "fptoui.sat": _saturate("u"),
    "abs": _absolute,
    "ctlz": _leading_zeros,
    "arithmetic.fence": _fence,
}
