"""Computes reference files: XLA's results and the float64 ones, with their range under rounding, for every set of
inputs.

Imports JAX only where it is called: the measuring process is to start fast.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from jcuts.base.stopwatch import timed
from jcuts.tune.baseline import autotune_cache
from jcuts.tune.problem import Problem
from jcuts.tune.verify import blocked_numpy
from jcuts.tune.verify import sampling as verify_sampling
from jcuts.tune.verify.expected import classes
from jcuts.tune.verify.inputs import SPECIALS, dtype_of, flushed, is_float, make_inputs, save, seed_kinds, whole
from jcuts.tune.verify.tolerances import FINER, NOISE_ULP, TRUST_ULP

NOISE_RUNS = 6
"""Runs with simulated rounding, of `NOISE_ULP`: XLA's own transcendental functions stay within a few ulp."""
THREADS = 3
"""Beside the one that waits for XLA."""
CONVOLUTION = "stablehlo.convolution"
"""The operation; functions through which it was traced may have the word in their names, which are in the text, too."""


def make(
    jax: Any,
    problem: Problem,
    library: Callable[..., Any],
    folder: Path,
    seed: int,
    options: Mapping[str, Any] | None = None,
    parts: dict[str, float] | None = None,
) -> list[str]:
    """Writes inputs, results and references of a problem, one number per set.

    Args:
        jax: the module, with 64-bit types.
        problem: with its float64 form.
        library: XLA's side of it, jitted.
        folder: gets ``N.inK.npy``, ``N.xlaK.npy``, ``N.refK.npy``; ``lowK``, ``highK``, ``unsureK`` and ``roundedK``
            where they matter; ``0.wholeK.npy``: XLA's whole result where only a sample of an output is kept.
        seed: of the first set of inputs.
        options: of the compiler, for XLA's side (on a GPU: `autotuned.reading`).
        parts: gets what both sides took, with their compilation, and everything together [s].
    Returns: the kinds of the sets (see `tune.verify.inputs`).
    """
    if options:
        library = jax.jit(library, compiler_options=dict(options))
    seen = [verify_sampling.sample_positions(problem, o) for o in problem.outputs]
    placed = [None if s is None else jax.device_put(s) for s in seen]
    look = functools.partial(leaves, jax, seen=placed)
    kinds, rounds = seed_kinds(problem), False
    with timed("all", parts), _Background(folder) as background:
        with timed("lowered", parts):
            wide = _wide(jax, problem, placed, background.pool)
        ahead = [background.pool.submit(make_inputs, problem, kinds[0], seed, short=True)]
        for number, kind in enumerate(kinds):
            inputs = ahead.pop().result()
            if number + 1 < len(kinds):
                ahead = [background.pool.submit(make_inputs, problem, kinds[number + 1], seed + number + 1, short=True)]
            keep = functools.partial(background.save, number)
            keep("in", inputs)
            operands = _operands(jax, problem, inputs)
            with timed("xla", parts):
                results = library(*operands)
            if number == 0:
                keep("whole", [None if s is None else x for x, s in zip(jax.tree.leaves(results), seen, strict=True)])
            xla = look(results)
            del results
            with timed("float64", parts):
                exact = _on_host(wide(np.uint64(0), np.zeros(3), *operands))
            if number == 0:
                rounds = problem.rounds and (problem.unsure or any(map(is_finer_than_tf32, xla, exact)))
            keep("xla", xla)
            keep("ref", exact)

            def runs(*amplitudes: float, both: Sequence[list[Any]] = (operands,)) -> list[list[Any]]:
                noise = np.array([*amplitudes, 0.0])
                return [wide(np.uint64(n + 1), noise, *both[n % len(both)]) for n in range(NOISE_RUNS)]

            if problem.perturb:  # every other run takes denormals for zeros
                zeroed = [flushed(x) for x in inputs]
                same = all(a is b for a, b in zip(zeroed, inputs, strict=True))
                other = operands if same else _operands(jax, problem, zeroed)
                noisy = map(_on_host, runs(NOISE_ULP, NOISE_ULP, both=(operands, other)))
                for name, values in zip(("low", "high"), _value_ranges([exact, *noisy]), strict=True):
                    keep(name, values)
            unsure = [*map(_on_host, runs(0.0, TRUST_ULP))] if problem.unsure and not problem.rounds else []
            special = problem.rounds and kind in SPECIALS
            cut = _on_host(wide(np.uint64(0), np.array([0.0, 0.0, 1.0]), *operands)) if rounds or special else []
            unsure += [cut] if rounds else []
            if unsure:
                keep("unsure", [distance(r, [n[i] for n in unsure]) for i, r in enumerate(exact)])
            if kind in SPECIALS and cut:
                other_class = map(is_of_other_class, [x.dtype for x in xla], exact, cut)
                keep("rounded", [c if o else None for o, c in zip(other_class, cut, strict=True)])
    return kinds


class _Background:
    """Threads beside the one that waits for XLA: the next set of inputs is made, results are written.

    Its exit waits for them, and raises what went wrong with a file.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pool = ThreadPoolExecutor(THREADS, thread_name_prefix="jcuts-reference")
        self.writes: list[Future[None]] = []

    def __enter__(self) -> _Background:
        return self

    def save(self, number: int, name: str, values: Sequence[Any]) -> None:
        """Writes arrays of a set, each to a file of its own; None: there is none."""
        for i, value in enumerate(values):
            if value is not None:
                path = self.folder / f"{number}.{name}{i}.npy"
                self.writes.append(self.pool.submit(save, path, np.asarray(value)))

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.pool.shutdown(cancel_futures=kind is not None)
        if kind is None:
            for write in self.writes:
                write.result()


def _operands(jax: Any, problem: Problem, inputs: Sequence[np.ndarray]) -> list[Any]:
    """Inputs on the device; large ones are repeated there, but on a CPU: its copies may take denormals for zeros."""
    shapes = [tuple(i.shape) for i in problem.inputs]
    if not problem.device:
        return jax.device_put([whole(x, shape) for x, shape in zip(inputs, shapes, strict=True)])
    placed = jax.device_put(list(inputs))
    short = [k for k, (x, shape) in enumerate(zip(placed, shapes, strict=True)) if x.shape != shape]
    made = _repeat(jax)([placed[k] for k in short], tuple(shapes[k] for k in short)) if short else []
    for k, x in zip(short, made, strict=True):
        placed[k] = x
    return placed


@functools.cache
def _repeat(jax: Any) -> Callable[[list[Any], tuple[tuple[int, ...], ...]], list[Any]]:
    """`values.whole` of several arrays, jitted."""

    def repeated(x: Any, shape: tuple[int, ...]) -> Any:
        size = math.prod(shape)
        copies = jax.numpy.broadcast_to(x, (-(-size // x.size), x.size))
        return copies.reshape(-1)[:size].reshape(shape)

    return jax.jit(lambda xs, shapes: [repeated(x, s) for x, s in zip(xs, shapes, strict=True)], static_argnums=1)


def is_finer_than_tf32(xla: np.ndarray, exact: np.ndarray) -> bool:
    """Whether XLA took an algorithm of more precision than asked for; the next time it may take another.

    By what is finite of both: scores of an attention are minus infinity where a mask is.
    """
    if not is_float(xla.dtype):
        return False
    found, wanted = xla.astype(np.float64).reshape(-1), exact.reshape(-1)
    finite = np.isfinite(found) & np.isfinite(wanted)
    with np.errstate(over="ignore"):
        error = np.linalg.norm(found[finite] - wanted[finite])
        return bool(error <= FINER * np.linalg.norm(wanted[finite]))


def is_of_other_class(dtype: np.dtype, exact: np.ndarray, rounded: np.ndarray) -> bool:
    """Whether rounded operands change which elements are NaN, infinite or finite in the output's type (floats)."""
    if not is_float(dtype):
        return False
    with np.errstate(invalid="ignore", over="ignore"):
        one, other = (classes(a.astype(dtype).astype(np.float64)) for a in (exact, rounded))
    return not np.array_equal(one, other)


def leaves(jax: Any, tree: Any, seen: Sequence[Any] = ()) -> list[np.ndarray]:
    """Results as arrays; of those that are sampled the positions seen."""
    found = jax.tree.leaves(tree)
    if any(s is not None for s in seen):
        found = _taken(jax)(found, list(seen))
    return [np.asarray(x) for x in found]


@functools.cache
def _taken(jax: Any) -> Callable[[Any, list[Any]], list[Any]]:
    """The positions seen of several arrays, as one program."""

    def taken(x: Any, where: Any) -> Any:
        return x if where is None else jax.numpy.take(jax.numpy.reshape(x, -1), where)

    return jax.jit(lambda tree, seen: [taken(x, s) for x, s in zip(jax.tree.leaves(tree), seen, strict=True)])


def _wide(jax: Any, problem: Problem, seen: Sequence[Any], pool: ThreadPoolExecutor) -> Callable[..., list[Any]]:
    """The float64 form, of operands as they are: wide ones are made where it runs, except on a CPU.

    A CPU's conversions may take denormals for zeros; a GPU's do not.

    Args: seen: positions of every result, on the device; None: all; pool: compiles a GPU's program beside XLA's side.
    Returns: a function whose results are on the GPU, perhaps not there yet; on a CPU arrays.
    """
    from jcuts.tune.verify.float64_eval import widened_dtype

    assert problem.reference is not None  # the caller looked
    export = jax.export.deserialize(bytearray(problem.reference))
    call = export.call
    # All of a library's float64 products are as good.  Its convolutions differ: some spread infinities.
    options = {} if not problem.device or CONVOLUTION in export.mlir_module() else autotune_cache.without_autotuning()
    if problem.device and all(
        dtype_of(i.dtype).itemsize > 1 or dtype_of(i.dtype).kind in "biu" for i in problem.inputs
    ):

        def program(seed: Any, noise: Any, where: list[Any], *xs: Any) -> list[Any]:
            return _taken(jax)(call(seed, noise, *[x.astype(widened_dtype(x.dtype)) for x in xs]), where)

        where = list(seen)
        specs = [jax.ShapeDtypeStruct(i.shape, dtype_of(i.dtype)) for i in problem.inputs]
        lowered = jax.jit(program, compiler_options=options).lower(np.uint64(0), np.zeros(3), where, *specs)
        compiled = pool.submit(lowered.compile)
        return lambda seed, noise, *xs: compiled.result()(seed, noise, where, *xs)
    inner = jax.jit(call)
    return lambda seed, noise, *xs: leaves(jax, inner(seed, noise, *[widen(np.asarray(x)) for x in xs]), seen)


def widen(x: np.ndarray) -> np.ndarray:
    """The array in the type of its reference: float64, complex128; integers and booleans as they are."""
    from jcuts.tune.verify.float64_eval import widened_dtype

    return x.astype(widened_dtype(x.dtype), copy=False)


def _on_host(results: Sequence[Any]) -> list[np.ndarray]:
    return [np.asarray(x) for x in results]


def _value_ranges(runs: Sequence[Sequence[np.ndarray]]) -> list[list[np.ndarray]]:
    """The least values of every output, and the largest ones."""
    ranges = [value_range(values) for values in zip(*runs, strict=True)]
    return [[low for low, _ in ranges], [high for _, high in ranges]]


def value_range(values: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Least and largest of each element; (-inf, inf) where even NaN, inf and finite alternate."""
    if values[0].dtype.kind == "c":
        real, imag = (value_range([part(v) for v in values]) for part in (np.real, np.imag))
        return _complex(real[0], imag[0]), _complex(real[1], imag[1])
    flat = [v.reshape(-1) for v in values]
    low, high = (np.empty(flat[0].shape, flat[0].dtype) for _ in range(2))

    def fill(slab: slice) -> None:
        some = [v[slab] for v in flat]
        least, most = functools.reduce(np.minimum, some), functools.reduce(np.maximum, some)
        low[slab], high[slab] = least, most
        odd = ~(np.isfinite(least) & np.isfinite(most))  # a NaN wins in both
        if odd.any():
            kinds = [classes(v[odd]) for v in some]
            varied = functools.reduce(np.logical_or, [k != kinds[0] for k in kinds])
            low[slab][odd], high[slab][odd] = (
                np.where(varied, limit, found[odd]) for limit, found in ((-np.inf, least), (np.inf, most))
            )

    with np.errstate(invalid="ignore"):
        blocked_numpy.parallel_blocks(low.size, fill)
    return low.reshape(values[0].shape), high.reshape(values[0].shape)


def _complex(real: np.ndarray, imag: np.ndarray) -> np.ndarray:
    """Both parts as they are: ``real + 1j * imag`` makes NaN of a real part beside an infinite imaginary one."""
    found = np.empty(np.shape(real), np.complex128)
    found.real, found.imag = real, imag
    return found


def distance(exact: np.ndarray, runs: Sequence[np.ndarray]) -> np.ndarray:
    """How far runs get from the exact one in each element; 0 where they are not all finite, or not floats."""
    if exact.dtype.kind in "biu":
        return np.zeros(exact.shape)
    if exact.dtype.kind == "c":
        real, imag = (distance(part(exact), [part(r) for r in runs]) for part in (np.real, np.imag))
        return _complex(real, imag)
    with np.errstate(invalid="ignore", over="ignore"):
        most = np.maximum.reduce([np.abs(r - exact) for r in runs])
    return np.where(np.isfinite(most), most, 0.0)
