"""Error and speed of the vector functions: largest error in ulp over every exponent, and ns per element beside jax.jit.

    python benchmarks/vecmath/accuracy.py                 # float32 and float64, errors and times
    python benchmarks/vecmath/accuracy.py float32 tanh    # one format, names that start so
    python benchmarks/vecmath/accuracy.py --no-jax        # without JAX beside

References: float64 (NumPy, SciPy) for float32; 80-bit long double for float64, and ``mpmath`` for erf, erfc
and erf_inv (if it is not installed: libm and SciPy, whose own error then adds).
Run it on one core (``taskset -c 0``) with XLA_FLAGS=--xla_cpu_multi_thread_eigen=false for single-thread times.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import scipy.special as special

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from jcuts.codegen.vecmath import TABLE, emit
from tests.codegen.vecmath.harness import compile_loop

NUMPY = {
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
    "erf": np.vectorize(math.erf, otypes=[float]),
    "erfc": np.vectorize(math.erfc, otypes=[float]),
    "erf_inv": special.erfinv,
}
DOMAIN = {  # where most results are finite: extra points and the timed points come from here
    "asin": (-1, 1),
    "acos": (-1, 1),
    "atanh": (-1, 1),
    "erf_inv": (-1, 1),
    "acosh": (1, 30),
    "log": (0, 30),
    "sqrt": (0, 30),
    "rsqrt": (0, 30),
    "erfc": (-6, 27),
    "log1p": (-1, 9),
    "tan": (-30, 30),
}
WIDE = {"exp", "exp2", "expm1", "sinh", "cosh", "logistic"}


def reference(name: str, dtype: str) -> Callable[..., np.ndarray]:
    """The function in a wider format."""
    if dtype == "float32":
        return lambda *args: NUMPY[name](*(a.astype(np.float64) for a in args))
    if name in ("erf", "erfc", "erf_inv"):
        try:
            import mpmath
        except ImportError:
            return lambda x: NUMPY[name](x).astype(np.longdouble)
        mpmath.mp.prec = 160
        scalar = {"erf": mpmath.erf, "erfc": mpmath.erfc, "erf_inv": mpmath.erfinv}

        def one(v: float) -> np.longdouble:
            if not np.isfinite(v) or (name == "erf_inv" and abs(v) >= 1):
                return np.longdouble(NUMPY[name](v))
            exact = scalar[name](mpmath.mpf(float(v)))
            high = float(exact)
            return np.longdouble(high) + np.longdouble(float(exact - high))

        return lambda x: np.array([one(v) for v in x], np.longdouble)
    return lambda *args: NUMPY[name](*(a.astype(np.longdouble) for a in args))


def ulps(got: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """|got - exact| in last places of the exact result; 0 where both are the same special value; inf where not.

    Results below the smallest normal count as right when they are zero or within one smallest normal.
    """
    info = np.finfo(got.dtype)
    finite = np.isfinite(exact) & (exact != 0)
    exponent = np.frexp(np.where(finite, exact, 1))[1] - 1 - info.nmant
    exponent = np.maximum(exponent, info.minexp - info.nmant)
    error = np.abs(got.astype(exact.dtype) - exact) / np.ldexp(exact.dtype.type(1), exponent)
    rounded = exact.astype(got.dtype)
    same = (got == rounded) | (np.isnan(got) & np.isnan(exact))
    tiny = (np.abs(exact) < info.tiny) & (np.abs(got) <= info.tiny)
    error = np.where(tiny | (same & ~np.isfinite(error)), 0, error)
    error = np.where(np.isinf(got) & np.isfinite(exact) & (np.abs(exact) > info.max), 0, error)
    return np.where(np.isnan(error), np.inf, error).astype(np.float64)


def samples(name: str, dtype: str, count: int, seed: int = 0) -> list[np.ndarray]:
    """Arguments: bit patterns over every exponent, dense points of the domain, neighbours of special values."""
    rng = np.random.default_rng(seed)
    unsigned, bits = (np.uint32, 32) if dtype == "float32" else (np.uint64, 64)
    low, high = DOMAIN.get(name, (-12, 12))
    if name in WIDE:
        low, high = (-150, 150) if dtype == "float32" else (-1100, 1100)
    ordinary = [0, 0.5, 1, 2, np.pi / 2, np.pi, 88.72, 709.78, 1e4, np.inf, np.nan, 1e-30, 1e30]
    ordinary += [1e-40] if dtype == "float32" else [1e-310, 1e300]
    near = np.concatenate([ordinary, np.negative(ordinary)]).astype(dtype)
    near = np.concatenate([near, np.nextafter(near, np.array(0, dtype)), np.nextafter(near, np.array(np.inf, dtype))])

    def one() -> np.ndarray:
        every = rng.integers(0, 2**bits, count, dtype=unsigned, endpoint=False).view(dtype)
        dense = rng.uniform(low, high, count).astype(dtype)
        close = rng.choice([-1, 0, 1], count) + rng.normal(size=count) * 10.0 ** rng.uniform(-8, 0, count)
        return np.concatenate([every, dense, close.astype(dtype), near])

    if TABLE[name, dtype].arity == 1:
        return [one()]
    if name == "pow":
        x, y = one(), one()
        x[count : 2 * count] = np.exp(rng.uniform(-80, 80, count))
        y[count : 2 * count] = rng.uniform(-10, 10, count)
        y[: count // 2] = rng.integers(-9, 10, count // 2)
        grid = np.meshgrid(near, near)
        return [np.concatenate([x, grid[0].ravel()]), np.concatenate([y, grid[1].ravel()])]
    grid = np.meshgrid(near, near)
    return [np.concatenate([one(), grid[k].ravel()]) for k in range(2)]


def largest_error(
    name: str, dtype: str, count: int, width: int | None
) -> tuple[float, tuple[float, ...], float, float]:
    """Largest error, the arguments where it is, what came out and what is exact."""
    arity = TABLE[name, dtype].arity
    run = compile_loop(lambda b, a: emit(b, name, a, dtype), [dtype] * arity, dtype, width)
    args = samples(name, dtype, count)
    with np.errstate(all="ignore"):
        got, exact = run(*args), reference(name, dtype)(*args)
        error = ulps(got, exact)
    worst = int(error.argmax())
    return float(error[worst]), tuple(float(a[worst]) for a in args), float(got[worst]), float(exact[worst])


def best_time(call: Callable[[], object], repeats: int = 9) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def speed(name: str, dtype: str, with_jax: bool, size: int = 1 << 20) -> tuple[float, float | None]:
    """ns per element of ours and of jax.jit on the same points."""
    low, high = DOMAIN.get(name, (-5, 5))
    arity = TABLE[name, dtype].arity
    low = 0.1 if name == "pow" else low
    args = [np.random.default_rng(k).uniform(low, high, size).astype(dtype) for k in range(arity)]
    width = 64 // np.dtype(dtype).itemsize
    run = compile_loop(lambda b, a: emit(b, name, a, dtype), [dtype] * arity, dtype, width)
    out = np.empty_like(args[0])
    ours = best_time(lambda: run.in_place(out, *args)) / size * 1e9
    if not with_jax:
        return ours, None
    import jax

    jax.config.update("jax_enable_x64", True)
    function = jax.jit(getattr(jax.lax, name))
    placed = [jax.device_put(a) for a in args]
    function(*placed).block_until_ready()
    return ours, best_time(lambda: function(*placed).block_until_ready()) / size * 1e9


def main(words: list[str]) -> None:
    with_jax = "--no-jax" not in words
    words = [w for w in words if not w.startswith("--")]
    formats = [w for w in words if w.startswith("float")] or ["float32", "float64"]
    prefixes = tuple(w for w in words if not w.startswith("float")) or ("",)
    for dtype in formats:
        print(f"{dtype:10s} {'stated':>7s} {'largest':>8s}  {'ns/el':>6s} {'XLA':>6s}   where")
        for name, kind in TABLE:
            if kind != dtype or not name.startswith(prefixes):
                continue
            slow = dtype == "float64" and name in ("erf", "erfc", "erf_inv")
            width = 64 // np.dtype(dtype).itemsize
            error, args, got, exact = largest_error(name, dtype, 3_000 if slow else 300_000, width)
            ours, theirs = speed(name, dtype, with_jax)
            mark = " <-- above its bound" if error > TABLE[name, dtype].ulp else ""
            xla = f"{theirs:6.2f}" if theirs is not None else "     -"
            left = f"{name:10s} {TABLE[name, dtype].ulp:7.1f} {error:8.2f}  {ours:6.2f} {xla}"
            print(f"{left}   {args} {got} {exact}{mark}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
