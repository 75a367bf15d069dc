"""Norms of results and of their differences by float64 reductions: cache-blocked and multi-threaded on the host, or on
the device that holds a result (`jax.jit`).

A training step returns weights and the optimiser's states, of dozens of shapes: on a device a fused reduction reads
them once, but each shape is a program of its own.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jcuts.tune.verify import blocked_numpy

LARGE = 2**25
"""Elements from which on the device reduces: below, compiling a reduction takes longer than the host's threads do."""
LARGE_RESIDENT = 2**20
"""The same where all operands are on the device: nothing is copied to the host, and shapes repeat in layers."""
ROOM = 4
"""Times the bytes of results that a device must have left beyond its peak, for results to stay there."""
COMPILERS = 16
"""Most reductions that compile at once."""
MOST_REDUCTIONS = 256
"""Compiled reductions that are kept; with more, those of earlier calls are dropped."""


class Norms(NamedTuple):
    """Norms over the elements that are finite in the wanted values and in all results.

    Args:
        count: number of these elements; size: L2 norm of the wanted values.
        errors: L2 norm of every result's difference from the wanted values; largest: its largest magnitude.
        nan_differs: whether one of the results has NaN where the wanted values have none, or the reverse.
    """

    count: int
    size: float
    errors: tuple[float, ...]
    largest: tuple[float, ...]
    nan_differs: bool

    @property
    def rms(self) -> float:
        """Root mean square of the wanted values, 0 of none."""
        return self.size / math.sqrt(self.count) if self.count else 0.0


def norms(want: Any, *results: Any) -> Norms:
    """Norms of ``results``, arrays of the shape and kind (real or complex) of ``want``.

    Large arrays are reduced on the device that holds one of them, the others are copied there one output at a time;
    where that fails for want of memory, and for arrays over several devices, on the host.
    """
    return all_norms([(want, *results)])[0]


def all_norms(groups: Sequence[Sequence[Any]]) -> list[Norms]:
    """`norms` of every group of wanted values and results; those that are on a device wait for it once."""
    found: dict[int, Norms] = {}
    resident = [n for n, group in enumerate(groups) if _is_resident(group)]
    with contextlib.suppress(jax.errors.JaxRuntimeError), jax.enable_x64(True):
        programs = _compiled([groups[n] for n in resident])
        begun = {n: program(*groups[n]) for n, program in zip(resident, programs, strict=True)}
        found = {n: _read(result) for n, result in zip(begun, jax.device_get(list(begun.values())), strict=True)}
    return [found[n] if n in found else _norms(*group) for n, group in enumerate(groups)]


def _norms(want: Any, *results: Any) -> Norms:
    device = next((d for d in map(_device, (want, *results)) if d is not None), None)
    if device is not None and want.size >= LARGE:
        with contextlib.suppress(jax.errors.JaxRuntimeError), jax.enable_x64(True):
            return _read(_on_device(*(jax.device_put(x, device) for x in (want, *results))))
    return _read(_on_host(*map(np.asarray, (want, *results))))


def kept(results: Sequence[Any]) -> list[Any]:
    """Results that others will be compared with: where they are if that device has room (`ROOM`), else on the host."""
    arrays = [x for x in results if isinstance(x, jax.Array)]
    devices = {_device(x) for x in arrays}
    device = next(iter(devices)) if len(devices) == 1 else None
    stats = (device.memory_stats() or {}) if device is not None else {}
    room = stats.get("bytes_limit", 0) - stats.get("peak_bytes_in_use", 0)
    if stats and room >= ROOM * sum(x.nbytes for x in arrays):
        return list(results)
    return [np.asarray(x) for x in results]


def _is_resident(group: Sequence[Any]) -> bool:
    """Whether all arrays of a group are large and on one device."""
    devices = {_device(x) for x in group}
    return len(devices) == 1 and None not in devices and group[0].size >= LARGE_RESIDENT


def _compiled(groups: Sequence[Sequence[Any]]) -> list[Any]:
    """The reductions of groups of arrays on a device, each signature compiled once, several at a time."""
    structs = [tuple(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for x in group) for group in groups]
    known = {each: _reductions[each] for each in dict.fromkeys(structs) if each in _reductions}
    missing = [each for each in dict.fromkeys(structs) if each not in known]

    def compiled(each: tuple[Any, ...]) -> Any:
        with jax.enable_x64(True):  # a setting of this thread
            return _on_device.lower(*each).compile()

    if missing:
        with ThreadPoolExecutor(min(len(missing), COMPILERS)) as pool:
            known.update(zip(missing, pool.map(compiled, missing), strict=True))
        if len(_reductions) > MOST_REDUCTIONS:
            _reductions.clear()
        _reductions.update(known)
    return [known[each] for each in structs]


_reductions: dict[tuple[Any, ...], Any] = {}
"""Compiled reductions by the types and places of their operands."""


def _device(x: Any) -> Any:
    """The device of an array that is whole on one, else None."""
    devices = x.devices() if isinstance(x, jax.Array) else ()
    return next(iter(devices)) if len(devices) == 1 else None


def _reduce(xp: Any, want: Any, *results: Any) -> tuple[Any, Any, list[Any], list[Any], Any]:
    """Count, L2 norm of the wanted values, L2 norms and maxima of differences, whether NaN differ."""
    is_complex = jnp.issubdtype(want.dtype, jnp.complexfloating)
    wide = xp.complex128 if is_complex else xp.float64
    want, found = want.astype(wide), [x.astype(wide) for x in results]
    finite = xp.isfinite(want)
    nan_differs = xp.zeros((), bool)
    for x in found:
        nan_differs = nan_differs | (xp.isnan(x) != xp.isnan(want)).any()
        finite = finite & xp.isfinite(x)
    apart = [xp.where(finite, abs(x - want), 0.0) for x in found]
    size = xp.sqrt((xp.where(finite, abs(want), 0.0) ** 2).sum())
    return finite.sum(), size, [xp.sqrt((a**2).sum()) for a in apart], [a.max(initial=0.0) for a in apart], nan_differs


def _on_host(*arrays: np.ndarray) -> tuple[Any, Any, list[Any], list[Any], Any]:
    """`_reduce` slab by slab, in parallel."""
    flat = [x.reshape(-1) for x in arrays]

    def reduced(slab: slice) -> tuple[Any, Any, list[Any], list[Any], Any]:
        with np.errstate(over="ignore", invalid="ignore"):
            return _reduce(np, *(x[slab] for x in flat))

    slabs = blocked_numpy.parallel_blocks(flat[0].size, reduced) or [reduced(slice(0))]
    counts, sizes, errors, largest, nan_differs = zip(*slabs, strict=True)
    norms_of = [float(np.linalg.norm(each)) for each in zip(*errors, strict=True)]
    return (
        sum(counts),
        np.linalg.norm(sizes),
        norms_of,
        [max(each) for each in zip(*largest, strict=True)],
        any(nan_differs),
    )


@jax.jit
def _on_device(*arrays: Any) -> tuple[Any, Any, list[Any], list[Any], Any]:
    return _reduce(jnp, *arrays)


def _read(found: tuple[Any, Any, list[Any], list[Any], Any]) -> Norms:
    count, size, errors, largest, nan_differs = jax.device_get(found)
    return Norms(int(count), float(size), tuple(map(float, errors)), tuple(map(float, largest)), bool(nan_differs))
