"""float64 reference interpreter of a jaxpr: every float widened, optionally with simulated rounding noise.

Candidates and XLA are measured against it.

Integers, booleans and keys keep their types.  Equations whose meaning depends on the width of their operands (bit
casts, `nextafter`, foreign calls) are evaluated on operands narrowed to the original types, and widened again.

Optionally every operation that rounds is followed by a random relative error of ``amplitude`` ulp of the original
type (discrete stochastic arithmetic), a sum by one of the size of its partial sums (`tune.verify.sum_rounding`).  Where
such runs disagree about a comparison, an argmax or a cast, the float64 margin does not exceed rounding, and no
implementation can be held to one of the answers.  Noise in the operations that are float64 in the program tells how far
the reference is to be trusted: it is no wider than they are. Source of the idea: J. Vignes, "A stochastic arithmetic
for reliable scientific computation", 1993.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jcuts.trace import jaxapi
from jcuts.tune.verify import float64_math, sum_rounding
from jcuts.tune.verify.rounding_traits import EXACT, is_inexact, takes_tf32

# The value depends on the bits of the operands' own type, or the code behind it takes no other type.
_OPAQUE = frozenset(
    {
        "bitcast_convert_type",
        "nextafter",
        "ffi_call",
        "custom_call",
        "pure_callback",
        "io_callback",
        "threefry2x32",
        "random_bits",
        "random_seed",
        "random_wrap",
        "random_unwrap",
        "random_fold_in",
        "random_split",
        "rng_bit_generator",
        "rng_uniform",
        "select_and_scatter",
    }
)
_SCATTERS = {
    "scatter-add": lax.scatter_add,
    "scatter-sub": getattr(lax, "scatter_sub", None),
    "scatter-mul": lax.scatter_mul,
    "scatter-min": lax.scatter_min,
    "scatter-max": lax.scatter_max,
    "scatter": lax.scatter,
}


def widened_dtype(dtype: Any) -> Any:
    """float64 for floats, complex128 for complex numbers, anything else as it is."""
    if jnp.issubdtype(dtype, np.floating):
        return np.dtype(np.float64)
    if jnp.issubdtype(dtype, np.complexfloating):
        return np.dtype(np.complex128)
    return dtype


def evaluate(
    closed: Any,
    args: Sequence[Any],
    *,
    noise: tuple[Any, Any] | None = None,
    rounded: Any = None,
    taps: bool = False,
) -> list[Any]:
    """Evaluates ``closed`` in float64.  Call it under ``jax.enable_x64``; it can be traced.

    Args:
        closed: a closed jaxpr.
        args: its arguments, floats already widened.
        noise: (seed, amplitude in ulp) of the simulated rounding; amplitude 0, or None, is exact.  Two amplitudes, a
            vector, are those of operations narrower than float64 and of float64 ones.
        rounded: a number; where it is not 0, operands of products are rounded to TF32 if a GPU may (`takes_tf32`).
        taps: whether convolutions of few taps are sums of products (`accurate.has_few_taps`).
    Returns: the results, floats as float64.
    """
    return _Evaluator(noise, rounded, taps).closed(closed, args)


class _Evaluator:
    def __init__(self, noise: tuple[Any, Any] | None, cut: Any = None, taps: bool = False) -> None:
        self.noise, self.cut, self.taps = noise, cut, taps
        self.count = 0  # rounding operations met so far: each gets its own noise

    def closed(self, closed: Any, args: Sequence[Any]) -> list[Any]:
        env: dict[Any, Any] = {}
        jaxpr = closed.jaxpr

        def read(atom: Any) -> Any:
            return _widen(atom.val, atom.aval) if jaxapi.is_literal(atom) else env[atom]

        for var, value in zip(jaxpr.constvars, closed.consts, strict=True):
            env[var] = _widen(value, var.aval)
        for var, value in zip(jaxpr.invars, args, strict=True):
            env[var] = _widen(value, var.aval)
        for eqn in jaxpr.eqns:
            results = self.equation(eqn, [read(v) for v in eqn.invars])
            for var, value in zip(eqn.outvars, results, strict=True):
                env[var] = _widen(value, var.aval)
        return [read(v) for v in jaxpr.outvars]

    def equation(self, eqn: Any, values: list[Any]) -> list[Any]:
        name = eqn.primitive.name
        structured = _STRUCTURED.get(name)
        if structured is not None:
            return structured(self, eqn, values)
        inner = jaxapi.inner_jaxprs(eqn)
        if name in _OPAQUE:
            return _narrow_bind(eqn, values)
        # Calls (jit, checkpoint, custom_jvp_call, custom_vjp_call, ...) are one body with the call's own operands.
        bodies = [body for parameter, _, body in inner if parameter in ("jaxpr", "call_jaxpr", "fun_jaxpr")]
        if bodies and _signature(bodies[0]) == (len(values), len(eqn.outvars)):
            return self.closed(bodies[0], values)
        if inner:
            return _narrow_bind(eqn, values)
        if self.cut is not None and takes_tf32(eqn):
            values = [jnp.where(self.cut != 0, lax.reduce_precision(v, 8, 10), v) for v in values]
        own = float64_math.RULES.get(name)
        if own is not None and own.applies(eqn):
            return self.rounded(eqn, values, [own.function(eqn, *values)])
        if self.taps and name == "conv_general_dilated" and float64_math.has_few_taps(eqn):
            return self.rounded(eqn, values, [float64_math.dense_convolution(eqn, *values)])
        try:
            results = _bind(eqn, values, {key: _widen_parameter(value) for key, value in eqn.params.items()})
        except (TypeError, ValueError, NotImplementedError):
            return _narrow_bind(eqn, values)  # the primitive has no float64 form
        return self.rounded(eqn, values, results)

    def rounded(self, eqn: Any, values: list[Any], results: list[Any]) -> list[Any]:
        """The results with one simulated rounding each."""
        name = eqn.primitive.name
        narrowing = name == "convert_element_type" and _rounds(eqn)
        if self.noise is None or (name in EXACT and not narrowing):
            return results
        out = []
        for var, value in zip(eqn.outvars, results, strict=True):
            if not is_inexact(var.aval):
                out.append(value)
                continue
            self.count += 1
            of = sum_rounding.spread(eqn, values, value, lambda other: self.again(eqn, other))
            out.append(self._perturb(value, jnp.finfo(var.aval.dtype), of, sum_rounding.terms(eqn) > 1))
        return out

    def again(self, eqn: Any, values: list[Any]) -> Any:
        """The result of an equation of one result on other operands, exactly."""
        return _Evaluator(None, taps=self.taps).equation(eqn, values)[0]

    def _perturb(self, value: Any, format_: Any, of: sum_rounding.RoundingSpread, placed: bool) -> Any:
        seed, amplitude = self.noise  # type: ignore[misc]
        if jnp.ndim(amplitude):
            amplitude = amplitude[int(format_.bits == 64)]
        real = jnp.real(value) if jnp.issubdtype(value.dtype, np.complexfloating) else value
        # Noise is a function of the value: equal values rounded by one elementwise operation stay equal, as they do
        # in any implementation.  Sums of the same value in another order do not: the position takes part.
        bits = lax.bitcast_convert_type(real, np.uint64)
        if placed and real.size:
            bits = bits + lax.iota(np.uint64, real.size).reshape(real.shape) * np.uint64(0xD1342543DE82EF95)
        bits = (
            bits + jnp.uint64(seed) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(self.count * 0xBF58476D1CE4E5B9 % 2**64)
        )
        bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        bits = bits ^ (bits >> np.uint64(31))
        uniform = (bits >> np.uint64(11)).astype(np.float64) * 2.0**-52 - 1.0
        error = amplitude * float(format_.eps) * of.size * uniform
        if jnp.issubdtype(value.dtype, np.complexfloating):
            return value * (1.0 + error / jnp.maximum(jnp.abs(value), jnp.finfo(np.float64).tiny))
        noisy = jnp.where(jnp.isfinite(error) & (error != 0), value + error, value)
        most = jnp.where(amplitude > 0, float(format_.max), jnp.inf)
        return sum_rounding.overflowed(noisy, of, most, bits)


def _signature(closed: Any) -> tuple[int, int]:
    return len(closed.jaxpr.invars), len(closed.jaxpr.outvars)


def _rounds(eqn: Any) -> bool:
    """Whether a convert_element_type loses float precision."""
    old, new = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
    if not jnp.issubdtype(new, np.inexact):
        return False
    if not jnp.issubdtype(old, np.inexact):
        return jnp.iinfo(old).bits > jnp.finfo(new).nmant if jnp.issubdtype(old, np.integer) else False
    return jnp.finfo(new).nmant < jnp.finfo(old).nmant


def _widen(value: Any, aval: Any) -> Any:
    if not hasattr(aval, "dtype") or not is_inexact(aval):
        return value
    return jnp.asarray(value, widened_dtype(aval.dtype))


def _widen_parameter(value: Any) -> Any:
    if isinstance(value, np.dtype) or (isinstance(value, type) and issubclass(value, np.generic)):
        return widened_dtype(value)
    return value


def _bind(eqn: Any, values: list[Any], params: dict[str, Any]) -> list[Any]:
    if eqn.primitive.name in ("dot_general", "ragged_dot", "ragged_dot_general"):
        if is_inexact(eqn.outvars[0].aval):  # integers keep the width that they wrap around in
            params = {**params, "preferred_element_type": None}
        if "algorithm" in params:  # names the width of the operands
            params["algorithm"] = None
        params["precision"] = None
    elif eqn.primitive.name == "conv_general_dilated":
        params = {**params, "precision": None}
        if is_inexact(eqn.outvars[0].aval):
            params["preferred_element_type"] = None
    elif (
        eqn.primitive.name
        in ("exp", "exp2", "log", "log1p", "sin", "cos", "tan", "tanh", "sqrt", "rsqrt", "cbrt", "expm1", "logistic")
        and "accuracy" in params
    ):
        params = {**params, "accuracy": None}
    return _apply(eqn.primitive, values, params)


def _narrow_bind(eqn: Any, values: list[Any]) -> list[Any]:
    narrow = [
        jnp.asarray(value, var.aval.dtype) if is_inexact(var.aval) else value
        for var, value in zip(eqn.invars, values, strict=True)
    ]
    return _apply(eqn.primitive, narrow, eqn.params)


def _apply(primitive: Any, values: Sequence[Any], params: dict[str, Any]) -> list[Any]:
    found = primitive.get_bind_params(params)
    # Some versions of JAX give the functions that a call primitive runs beside the parameters, others inside them.
    subfuns, bind_params = found if isinstance(found, tuple) else ((), found)
    results = primitive.bind(*subfuns, *values, **bind_params)
    return list(results) if primitive.multiple_results else [results]


# Equations with bodies ------------------------------------------------------------------------------------------------


def _scan(self: _Evaluator, eqn: Any, values: list[Any]) -> list[Any]:
    p = eqn.params
    body_jaxpr = jaxapi.close(p["jaxpr"])
    # Versions of JAX name these counts differently; the ranks tell: what is scanned has one axis more outside.
    inside, outside = body_jaxpr.jaxpr, eqn
    n_xs = sum(len(o.aval.shape) > len(i.aval.shape) for o, i in zip(outside.invars, inside.invars, strict=True))
    n_carry = sum(len(o.aval.shape) == len(i.aval.shape) for o, i in zip(outside.outvars, inside.outvars, strict=True))
    n_consts = len(values) - n_carry - n_xs
    consts, init, xs = values[:n_consts], values[n_consts : n_consts + n_carry], values[n_consts + n_carry :]

    def body(carry: Any, x: Any) -> Any:
        out = self.closed(body_jaxpr, [*consts, *carry, *x])
        return out[:n_carry], out[n_carry:]

    carry, ys = lax.scan(body, list(init), list(xs), length=p["length"], reverse=p["reverse"])
    return [*carry, *ys]


def _while(self: _Evaluator, eqn: Any, values: list[Any]) -> list[Any]:
    p = eqn.params
    n_cond, n_body = p["cond_nconsts"], p["body_nconsts"]
    cond_consts, body_consts, init = values[:n_cond], values[n_cond : n_cond + n_body], values[n_cond + n_body :]
    return list(
        lax.while_loop(
            lambda carry: self.closed(jaxapi.close(p["cond_jaxpr"]), [*cond_consts, *carry])[0],
            lambda carry: self.closed(jaxapi.close(p["body_jaxpr"]), [*body_consts, *carry]),
            list(init),
        )
    )


def _cond(self: _Evaluator, eqn: Any, values: list[Any]) -> list[Any]:
    branches: list[Callable[..., Any]] = [
        lambda *args, branch=branch: self.closed(jaxapi.close(branch), args) for branch in eqn.params["branches"]
    ]
    return list(lax.switch(jnp.asarray(values[0], np.int32), branches, *values[1:]))


def _scatter(self: _Evaluator, eqn: Any, values: list[Any]) -> list[Any]:
    function = _SCATTERS[eqn.primitive.name]
    if function is None:
        return _narrow_bind(eqn, values)
    p = eqn.params
    result = function(
        *values,
        p["dimension_numbers"],
        indices_are_sorted=p["indices_are_sorted"],
        unique_indices=p["unique_indices"],
        mode=p["mode"],
    )
    return self.rounded(eqn, values, [result])


def _reduce(self: _Evaluator, eqn: Any, values: list[Any]) -> list[Any]:
    p = eqn.params
    half = len(values) // 2
    body = jaxapi.close(p["jaxpr"])

    def computation(a: Any, b: Any) -> Any:
        return tuple(_Evaluator(None).closed(body, [*a, *b]))

    results = lax.reduce(tuple(values[:half]), tuple(values[half:]), computation, p["dimensions"])
    return self.rounded(eqn, values[:half], list(results))


def _extreme(self: _Evaluator, eqn: Any, values: list[Any]) -> list[Any]:
    """Maximum or minimum: NaN where any element is NaN.

    XLA's CPU backend loses NaNs in reductions of more than some hundred elements (jaxlib 0.10 and 0.11); a candidate
    that keeps them must not be rejected for it.
    """
    (result,) = _bind(eqn, values, eqn.params)
    if not is_inexact(eqn.outvars[0].aval):
        return [result]
    lost = lax.reduce_or(jnp.isnan(values[0]), tuple(int(a) for a in eqn.params["axes"]))
    return [jnp.where(lost, jnp.nan, result)]


def _window_extreme(self: _Evaluator, eqn: Any, values: list[Any]) -> list[Any]:
    """The same over windows, where XLA loses NaNs too: a window has one if it has more than none of them."""
    (result,) = _bind(eqn, values, eqn.params)
    if not is_inexact(eqn.outvars[0].aval):
        return [result]
    here = jnp.isnan(values[0]).astype(np.float32)
    count = lax.reduce_window(here, np.float32(0), lax.add, **eqn.params)
    return [jnp.where(count > 0, jnp.nan, result)]


_STRUCTURED: dict[str, Callable[[_Evaluator, Any, list[Any]], list[Any]]] = {
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "reduce": _reduce,
    "reduce_max": _extreme,
    "reduce_min": _extreme,
    "reduce_window_max": _window_extreme,
    "reduce_window_min": _window_extreme,
    **dict.fromkeys(_SCATTERS, _scatter),
}
