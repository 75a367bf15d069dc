"""The last guard: the whole optimised function against plain ``jax.jit``, on the user's own arguments.

Whatever the regions gained one by one, the user never gets a program slower than the one they had.  Candidates are
whole programs: plain XLA, jcuts, and each of them with compiler options (which JAX accepts at top level only).
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax
import numpy as np

from jcuts.base.errors import JcutsError
from jcuts.tune import noise

log = logging.getLogger("jcuts")

XLA = "xla"
JCUTS = "jcuts"

# Compiler options worth trying per platform, by a short name that the database keeps.  All of them leave the
# arithmetic as it is.
OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "cpu": {
        "wide": {"xla_cpu_prefer_vector_width": 512},
    },
    "cuda": {
        "graph1": {"xla_gpu_graph_min_graph_size": 1},
        "graphs": {
            "xla_gpu_graph_min_graph_size": 1,
            "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,CONDITIONAL,WHILE,"
                                             "DYNAMIC_SLICE_FUSION,CONVOLUTION",
        },
    },
}

# A candidate that needs this many times the best time in its warm run is not timed any further.
_HOPELESS = 3.0


class GuardStore(Protocol):
    """Where decisions outlive the process (``jcuts.tune.store.Store`` is one)."""

    def guard(self, key: str) -> Mapping[str, Any] | None:
        """The decision under ``key``, or None."""
        ...

    def put_guard(self, key: str, decision: Mapping[str, Any]) -> None:
        """Keep a decision."""
        ...


class MemoryStore:
    """Decisions of this process only."""

    def __init__(self) -> None:
        self._kept: dict[str, dict[str, Any]] = {}

    def guard(self, key: str) -> Mapping[str, Any] | None:
        """The decision under ``key``, or None."""
        return self._kept.get(key)

    def put_guard(self, key: str, decision: Mapping[str, Any]) -> None:
        """Keep a decision."""
        self._kept[key] = dict(decision)


# A whole program that gains less than this is not worth leaving plain jax.jit for.
_LEAST_GAIN = 0.02


@dataclass(frozen=True)
class Decision:
    """Which whole program runs, and why.

    Attributes:
        chosen: ``xla``, ``jcuts``, or either with ``:<options name>``.
        reason: one sentence.
        seconds: median [s] per candidate; empty when nothing was timed.
        margin: relative difference below which two medians counted as equal.
        rejected: candidates that were out, with the reason.
        measured: whether it rests on a measurement (of this or an earlier process).
    """

    chosen: str
    reason: str
    seconds: dict[str, float] = field(default_factory=dict)
    margin: float = 0.0
    rejected: dict[str, str] = field(default_factory=dict)
    measured: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for the database and for ``explain``."""
        return {"chosen": self.chosen, "reason": self.reason, "seconds": dict(self.seconds), "margin": self.margin,
                "rejected": dict(self.rejected), "measured": self.measured}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Decision | None:
        """The decision, or None if the stored data has another form."""
        try:
            return cls(str(data["chosen"]), str(data["reason"]),
                       {str(k): float(v) for k, v in dict(data["seconds"]).items()}, float(data["margin"]),
                       {str(k): str(v) for k, v in dict(data["rejected"]).items()}, bool(data["measured"]))
        except (KeyError, TypeError, ValueError):
            return None


def candidate_names(platform: str, uses_jcuts: bool) -> list[str]:
    """Candidates in the fixed order that decides ties: the plainer program wins."""
    extra = list(OPTIONS.get("cuda" if platform in ("gpu", "rocm") else platform, {}))
    names = [XLA, *(f"{XLA}:{name}" for name in extra)]
    return [*names, JCUTS, *(f"{JCUTS}:{name}" for name in extra)] if uses_jcuts else names


def compiler_options(name: str, platform: str) -> dict[str, Any] | None:
    """Compiler options of a candidate (None for none, or for a name that this version does not know)."""
    _, _, option = name.partition(":")
    return OPTIONS.get("cuda" if platform in ("gpu", "rocm") else platform, {}).get(option)


def decide(calls: Mapping[str, Callable[..., Any]], fresh_args: Callable[[], tuple[tuple[Any, ...], dict[str, Any]]],
           *, donates: bool, seconds: float = 0.6) -> Decision:
    """Time whole programs on the same arguments and choose.

    Args:
        calls: candidate -> jitted callable, in tie order; the first is plain XLA and gives the reference result.
        fresh_args: arguments for one call (copies where they are donated).
        donates: whether a call uses its arguments up.
        seconds: wall time to spend beyond the warm runs.

    Returns: the fastest candidate, or the first in order within the noise margin of it.
    """
    rejected: dict[str, str] = {}
    runs: dict[str, Callable[[], Any]] = {}
    warm: dict[str, float] = {}
    reference: Any = None
    for name, call in calls.items():
        def run(call: Callable[..., Any] = call) -> Any:
            args, kwargs = fresh_args()
            return jax.block_until_ready(call(*args, **kwargs))

        try:
            result = run()
        except JcutsError:
            raise
        except Exception as error:
            if name == XLA:
                raise  # the user's own program fails: that is the user's error to see
            rejected[name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            continue
        if reference is None:
            reference = jax.tree.map(_host, result)
        elif (why := _disagrees(reference, result)) is not None:
            rejected[name] = why
            continue
        samples = noise.interleave({name: run}, least=1, most=1)[name]
        warm[name], runs[name] = samples.median, run
    best = min(warm.values())
    for name in [n for n, t in warm.items() if t > _HOPELESS * best and n != XLA]:
        rejected[name] = f"{warm[name] / best:.1f} times the best in its warm run"
        del runs[name]
    first = _choose(_sample(runs, fresh_args, calls, best, donates, seconds), rejected)
    if first.chosen == XLA or XLA not in runs:
        return first
    # A gain has to show twice: one burst of another process must not send the user away from plain jax.jit.
    final = {name: runs[name] for name in (XLA, first.chosen)}
    second = _choose(_sample(final, fresh_args, calls, best, donates, seconds / 2), rejected)
    return dataclasses.replace(second, seconds={**first.seconds, **second.seconds})


def _sample(runs: Mapping[str, Callable[[], Any]], fresh_args: Callable[[], Any],
            calls: Mapping[str, Callable[..., Any]], best: float, donates: bool,
            seconds: float) -> dict[str, noise.Samples]:
    if len(runs) == 1:
        return noise.interleave(dict(runs), least=1, most=1)
    if donates:
        # Each execution needs its own copies, made outside the timed part.
        return _sample_with_copies({n: calls[n] for n in runs}, fresh_args, seconds)
    args, kwargs = fresh_args()
    # Several executions per sample, so that a fast function is not timed by the clock's resolution.
    inner = max(1, min(200, math.ceil(3e-4 / max(best, 1e-7))))

    def repeated(call: Callable[..., Any]) -> Callable[[], None]:
        def go() -> None:
            for _ in range(inner - 1):
                call(*args, **kwargs)
            jax.block_until_ready(call(*args, **kwargs))

        return go

    return noise.interleave({n: repeated(calls[n]) for n in runs}, seconds=seconds, least=5, most=60,
                            inner=dict.fromkeys(runs, inner))


def _sample_with_copies(calls: Mapping[str, Callable[..., Any]], fresh_args: Callable[[], Any],
                        seconds: float) -> dict[str, noise.Samples]:
    times: dict[str, list[float]] = {name: [] for name in calls}
    end = time.perf_counter() + seconds
    order = list(calls)
    for count in range(30):
        if count >= 5 and time.perf_counter() > end:
            break
        for name in order:
            args, kwargs = jax.block_until_ready(fresh_args())
            start = time.perf_counter()
            jax.block_until_ready(calls[name](*args, **kwargs))
            times[name].append(time.perf_counter() - start)
        order.reverse()
    return {name: noise.Samples(tuple(ts)) for name, ts in times.items()}


def _choose(samples: Mapping[str, noise.Samples], rejected: dict[str, str]) -> Decision:
    medians = {name: s.median for name, s in samples.items()}
    errors = [noise.standard_error(s.median, *s.quartiles, len(s.seconds)) for s in samples.values()]
    margin = max(_LEAST_GAIN, noise.margin(errors))
    best = min(medians, key=lambda name: medians[name])
    low = {name: s.quartiles[0] for name, s in samples.items()}
    # Equal in either statistic counts as equal: a median alone is bimodal on a busy machine.
    chosen = next(name for name in medians
                  if medians[name] <= medians[best] * (1 + margin) or low[name] <= low[best] * (1 + margin))
    if len(medians) == 1:
        reason = "no other candidate"
    elif chosen == XLA:
        reason = "nothing was faster than plain jax.jit beyond the noise"
    else:
        reason = f"{medians[XLA] / medians[chosen]:.2f} times as fast as plain jax.jit"
    return Decision(chosen, reason, medians, margin, rejected, measured=True)


def _host(x: Any) -> Any:
    return np.asarray(x) if isinstance(x, jax.Array) and jax.numpy.issubdtype(x.dtype, np.number) else None


def _disagrees(reference: Any, result: Any) -> str | None:
    """A last net under the per-kernel checks: a grossly different result disqualifies the candidate.

    Floating outputs must have NaN at the same places and differ by less than 64 sqrt(eps) in relative L2 norm.
    """
    pairs = zip(jax.tree.leaves(reference, is_leaf=lambda x: x is None), jax.tree.leaves(result), strict=False)
    for i, (want, got) in enumerate(pairs):
        if want is None or not jax.numpy.issubdtype(got.dtype, np.inexact):
            continue
        a, b = np.asarray(want, np.complex128), np.asarray(got).astype(np.complex128)
        if (np.isnan(a) != np.isnan(b)).any():
            return f"output {i} has NaN where plain jax.jit has none, or the reverse"
        finite = np.isfinite(a) & np.isfinite(b)
        size = float(np.linalg.norm(a[finite]))
        error = float(np.linalg.norm(a[finite] - b[finite]))
        allowed = 64 * math.sqrt(float(jax.numpy.finfo(got.dtype).eps)) * size
        if error > allowed:
            return f"output {i} differs from plain jax.jit by {error:.3g} in norm, allowed {allowed:.3g}"
    return None


def copies_fit(leaves: Sequence[Any]) -> bool:
    """Whether one more copy of ``leaves`` fits into what their devices have free (with half of it to spare)."""
    need = sum(leaf.nbytes for leaf in leaves if isinstance(leaf, jax.Array))
    devices = {d for leaf in leaves if isinstance(leaf, jax.Array) for d in leaf.devices()}
    for device in devices:
        stats = device.memory_stats() or {}
        if "bytes_limit" in stats and need > 0.5 * (stats["bytes_limit"] - stats.get("bytes_in_use", 0)):
            return False
    if any(d.platform == "cpu" for d in devices):
        return need <= 0.5 * _free_host_bytes()
    return True


def _free_host_bytes() -> float:
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return 1024.0 * int(line.split()[1])
    except OSError:
        pass
    return math.inf
