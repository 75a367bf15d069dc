"""The vector functions: stated error bounds, special values as in jax.jit, widths, flushed denormals, targets."""

from __future__ import annotations

import ctypes
import math
import platform
import re
from functools import cache

import jax
import numpy as np
import pytest
import scipy.special as special
from jax import lax
from llvmlite import binding as llvm
from llvmlite import ir

from jcuts.base.errors import IRError
from jcuts.codegen.llvm import lanes
from jcuts.codegen.vecmath import ERROR_ULP, TABLE, emit, supported
from tests.codegen.vecmath.harness import compile_loop, loop_module, target_machine

REFERENCE = {
    "exp": np.exp,
    "exp2": np.exp2,
    "expm1": np.expm1,
    "log": np.log,
    "log1p": np.log1p,
    "tanh": np.tanh,
    "sin": np.sin,
    "cos": np.cos,
    "tan": np.tan,
    "asin": np.arcsin,
    "acos": np.arccos,
    "atan": np.arctan,
    "atan2": np.arctan2,
    "sinh": np.sinh,
    "cosh": np.cosh,
    "asinh": np.arcsinh,
    "acosh": np.arccosh,
    "atanh": np.arctanh,
    "sqrt": np.sqrt,
    "cbrt": np.cbrt,
    "pow": np.power,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "logistic": lambda x: 1 / (1 + np.exp(-x)),
    "erf_inv": special.erfinv,
    "erf": np.vectorize(math.erf, otypes=[float]),
    "erfc": np.vectorize(math.erfc, otypes=[float]),
}
# exact values to 25 digits, by multiple-precision arithmetic
POINTS = {
    "erf": (
        (1e-09, "1.128379167095512643797283e-9"),
        (0.1, "0.1124629160182848984047123"),
        (0.37, "0.3992059840429992302122551"),
        (0.75, "0.7111556336535151315989378"),
        (0.999, "0.8422852702064969416389683"),
        (1.25, "0.9229001282564582301365235"),
        (2.5, "0.9995930479825550410604358"),
        (5.5, "0.999999999999992642152082"),
    ),
    "erfc": (
        (-4.0, "1.999999984582742099719981"),
        (-0.3, "1.328626759459127416189618"),
        (0.2, "0.777297410789521533823547"),
        (0.64, "0.3654141708778586761596285"),
        (0.66, "0.3506233120370457545591948"),
        (1.1, "0.1197949304259182703427405"),
        (3.3, "0.000003057709796438165198762668"),
        (9.7, "7.936107563214511746056012e-43"),
        (20.0, "5.395865611607900928934999e-176"),
        (26.2, "1.643250792438946206094224e-300"),
    ),
    "erf_inv": (
        (1e-08, "8.862269254527580553925872e-9"),
        (0.2, "0.1791434546212916866527257"),
        (-0.55, "-0.5341590877497024221811214"),
        (0.9, "1.163087153676674162844095"),
        (0.99, "1.821386367718449455872802"),
        (0.998, "2.185124219133004079183779"),
        (0.99999, "3.123413274341570864027072"),
        (0.9999999999, "4.572824958544924937847931"),
        (0.9999999999999999, "5.863584748755167927207663"),
        (0.9999999999999991, "5.686128441310390980051604"),
    ),
}
KEYS = sorted(TABLE)
FLUSH = (1 << 15) | (1 << 6)  # MXCSR: results and operands that are denormal count as zero, as in XLA's threads


@pytest.fixture(autouse=True)
def _sixty_four_bits_and_quiet_numpy():
    with jax.enable_x64(True), np.errstate(all="ignore"):
        yield


@cache
def function(name: str, dtype: str, width: int | None):
    arity = TABLE[name, dtype].arity
    return compile_loop(lambda b, a: emit(b, name, a, dtype), [dtype] * arity, dtype, width)


def full_width(dtype: str) -> int:
    return 64 // np.dtype(dtype).itemsize


def ulps(got: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """|got - exact| in last places; results below the smallest normal may be zero; unlike special values are inf."""
    info = np.finfo(got.dtype)
    finite = np.isfinite(exact) & (exact != 0)
    exponent = np.maximum(np.frexp(np.where(finite, exact, 1))[1] - 1, info.minexp) - info.nmant
    error = np.abs(got.astype(exact.dtype) - exact) / np.ldexp(exact.dtype.type(1), exponent)
    same = (got == exact.astype(got.dtype)) | (np.isnan(got) & np.isnan(exact))
    tiny = (np.abs(exact) < info.tiny) & (np.abs(got) <= info.tiny)
    return np.where(tiny | (same & ~np.isfinite(error)), 0, np.where(np.isnan(error), np.inf, error)).astype(float)


def samples(name: str, dtype: str, count: int = 3000) -> list[np.ndarray]:
    """Random bits (every exponent), ordinary numbers, numbers near -1, 0 and 1, numbers where exp is finite."""
    rng = np.random.default_rng(11)
    unsigned, bits, edge = (np.uint32, 32, 100) if dtype == "float32" else (np.uint64, 64, 740)

    def one() -> np.ndarray:
        every = rng.integers(0, 2**bits, count, dtype=unsigned).view(dtype)
        near = rng.choice([-1, 0, 1], count) + rng.normal(size=count) * 10.0 ** rng.uniform(-7, 0, count)
        parts = [rng.uniform(-8, 8, count), rng.uniform(-1, 1, count), near, rng.uniform(-edge, edge, count)]
        return np.concatenate([every, *(p.astype(dtype) for p in parts)])

    args = [one() for _ in range(TABLE[name, dtype].arity)]
    if name == "pow":
        args[0][count : 2 * count] = np.exp(rng.uniform(-60, 60, count))
        args[1][: count // 2] = rng.integers(-9, 10, count // 2)
    return args


def specials(dtype: str) -> np.ndarray:
    """Special values and arguments at the ends of domains; no denormals."""
    info = np.finfo(dtype)
    values = [0.0, 0.5, 1.0, 2.0, 3.0, 89.0, 100.0, 710.0, 750.0, 1e5, 1e30, info.tiny, info.max, np.inf, np.nan]
    values += [1 - info.epsneg, 1 + info.eps]
    return np.concatenate([values, np.negative(values)]).astype(dtype)


@pytest.mark.parametrize(("name", "dtype"), KEYS)
def test_error_is_within_the_stated_bound(name: str, dtype: str) -> None:
    args = samples(name, dtype)
    wide = np.float64 if dtype == "float32" else np.longdouble
    bound = ERROR_ULP[name, dtype]
    if dtype == "float64" and name in ("erf", "erfc", "erf_inv"):
        exact = REFERENCE[name](*args).astype(wide)
        bound += 3.0  # these references are float64 themselves
    else:
        exact = REFERENCE[name](*(a.astype(wide) for a in args))
    got = function(name, dtype, full_width(dtype))(*args)
    error = ulps(got, exact)
    worst = int(error.argmax())
    shown = [a[worst] for a in args]
    assert error[worst] <= bound, f"{error[worst]:.2f} ulp at {shown}: {got[worst]}, exact {exact[worst]}"


@pytest.mark.parametrize("name", sorted(POINTS))
def test_float64_error_functions_at_known_points(name: str) -> None:
    points = np.array([x for x, _ in POINTS[name]])
    exact = np.array([np.longdouble(text) for _, text in POINTS[name]])
    assert ulps(function(name, "float64", 8)(points), exact).max() <= ERROR_ULP[name, "float64"]


@pytest.mark.parametrize(("name", "dtype"), KEYS)
def test_special_values_are_those_of_xla(name: str, dtype: str) -> None:
    """Same NaN, infinity and sign of zero; where XLA's result is finite and not zero, so is ours, within its error."""
    x = specials(dtype)
    args = [x] if TABLE[name, dtype].arity == 1 else [g.ravel() for g in np.meshgrid(x, x)]
    ours = function(name, dtype, full_width(dtype))(*args)
    theirs = np.asarray(jax.jit(getattr(lax, name))(*args))

    def kind(v: np.ndarray) -> np.ndarray:
        flushed = np.where(np.abs(v) < np.finfo(dtype).tiny, np.copysign(0, v), v)
        finite = np.copysign(np.where(flushed == 0, 0.0, 1.0), flushed)
        return np.where(np.isnan(v), 9.0, np.where(np.isinf(v), 2 * np.sign(v), finite))

    different = kind(ours).view(np.uint64) != kind(theirs).view(np.uint64)
    different &= ~_known_differences(name, args, ours, theirs)
    shown = [(*(float(a[k]) for a in args), float(ours[k]), float(theirs[k])) for k in np.flatnonzero(different)[:6]]
    assert not shown, f"(arguments, ours, XLA): {shown}"


def _known_differences(name: str, args: list[np.ndarray], ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """Where XLA's own approximation misses and ours is right (compared with the reference in NumPy)."""
    wide = np.float64 if ours.dtype == np.float32 else np.longdouble
    exact = REFERENCE[name](*(a.astype(wide) for a in args)) if name[:3] != "erf" else REFERENCE[name](*args)
    return (ulps(ours, exact.astype(wide)) <= 4) & (ulps(theirs, exact.astype(wide)) > 4)


@pytest.mark.parametrize(("name", "dtype"), KEYS)
def test_every_width_computes_the_same(name: str, dtype: str) -> None:
    args = [a[::97] for a in samples(name, dtype)]
    expected = function(name, dtype, full_width(dtype))(*args)
    for width in (1, None) if dtype == "float64" else (8, 4, 1, None):
        got = compile_loop(lambda b, a: emit(b, name, a, dtype), [dtype] * len(args), dtype, width)(*args)
        assert np.array_equal(got, expected, equal_nan=True), width


@pytest.mark.skipif(platform.machine() != "x86_64" or platform.libc_ver()[0] != "glibc", reason="sets MXCSR by glibc")
@pytest.mark.parametrize(("name", "dtype"), KEYS)
def test_normal_results_do_not_depend_on_flushing(name: str, dtype: str) -> None:
    """XLA's threads flush denormals: for normal arguments a normal result is the same, a smaller one may be zero."""
    tiny = np.finfo(dtype).tiny
    args = [a[::7] for a in samples(name, dtype)]
    for k, a in enumerate(args):
        args[k] = np.where(np.abs(a) < tiny, a.dtype.type(0), a)
    run = function(name, dtype, full_width(dtype))
    plain = run(*args)
    libm = ctypes.CDLL("libm.so.6")
    old, new = (ctypes.c_uint8 * 32)(), (ctypes.c_uint8 * 32)()
    libm.fegetenv(old)
    ctypes.memmove(new, old, 32)
    word = ctypes.c_uint32.from_buffer(new, 28)
    word.value |= FLUSH
    libm.fesetenv(new)
    try:
        flushed = run(*args)
    finally:
        libm.fesetenv(old)
    normal = ~(np.abs(plain) < 2 * tiny)
    assert np.array_equal(plain[normal], flushed[normal], equal_nan=True)
    assert np.all(np.abs(flushed[~normal]) <= 2 * tiny)


def test_float32_logarithm_of_denormals_is_finite_when_they_are_flushed_or_not() -> None:
    x = np.array([1e-40, 1.4e-45, 1.1e-38], np.float32)
    assert np.allclose(function("log", "float32", 16)(x), np.log(x.astype(np.float64)), rtol=1e-6)


FEATURES = {
    "x86_64-unknown-linux-gnu": ("x86-64-v3", r"\bcallq?\s+([A-Za-z_]\w*)|movabsq\s+\$([A-Za-z_]\w*)"),
    "aarch64-unknown-linux-gnu": ("neoverse-n1", r"\bbl\s+(\w+)|:got:(\w+)"),
}


@pytest.mark.parametrize("triple", sorted(FEATURES))
def test_other_targets_call_nothing_but_declared_libm(triple: str) -> None:
    """One module per format with every function: assembles for AVX2 and aarch64 without runtime-library calls."""
    cpu, pattern = FEATURES[triple]
    try:
        machine = target_machine(cpu, triple)
    except RuntimeError:
        pytest.skip(f"this LLVM has no backend for {triple}")
    for dtype, width in (("float32", 8), ("float64", 4)):

        def every(builder: ir.IRBuilder, args: list[ir.Value], dtype: str = dtype) -> ir.Value:
            total = lanes.const(args[0].type, 0.0)
            for name, kind in KEYS:
                if kind == dtype:
                    value = emit(builder, name, args[: TABLE[name, dtype].arity], dtype)
                    total = builder.fadd(total, value)
            return total

        module = llvm.parse_assembly(str(loop_module(every, [dtype] * 2, dtype, width)))
        assembly = machine.emit_assembly(module)
        called = {next(filter(None, found.groups())) for found in re.finditer(pattern, assembly)}
        assert called == ({"sin", "cos", "tan"} if dtype == "float64" else set())
    assert {name for (name, _), entry in TABLE.items() if entry.scalarised} == {"sin", "cos", "tan"}


def test_the_table_answers_what_it_knows() -> None:
    assert supported("tanh", "float32") and supported("pow", "float64")
    assert not supported("tanh", "bfloat16") and not supported("digamma", "float32")
    assert max(ulp for (_, dtype), ulp in ERROR_ULP.items() if dtype == "float32") <= 4
    with pytest.raises(IRError, match="no vector code for digamma on float32") as caught:
        compile_loop(lambda b, a: emit(b, "digamma", a, "float32"), ["float32"], "float32")
    assert (caught.value.function, caught.value.dtype) == ("digamma", "float32")
    with pytest.raises(IRError, match="pow takes 2 arguments, not 1"):
        compile_loop(lambda b, a: emit(b, "pow", a, "float32"), ["float32"], "float32")
