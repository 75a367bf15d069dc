"""All ``JCUTS_*`` environment variables as one typed record, with a scope for tests.

    >>> with scope(fuel=3):
    ...     current().fuel
    3

``current()`` reads the environment each time (it is cheap: the parsed result is kept until a variable changes);
``scope`` overrides fields for tests.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from jcuts.base.errors import UsageError

LOG_LEVELS = ("debug", "info", "warning", "error")


def _boolean(text: str) -> bool:
    lowered = text.strip().lower()
    if lowered in ("1", "true", "yes", "on"):
        return True
    if lowered in ("0", "false", "no", "off"):
        return False
    raise ValueError("expected one of 1, 0, true, false, yes, no, on, off")


def _integer(minimum: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise ValueError(f"expected an integer >= {minimum}") from None
        if value < minimum:
            raise ValueError(f"expected an integer >= {minimum}")
        return value

    return parse


def _number(low: float, high: float, *, with_low: bool = False) -> Callable[[str], float]:
    """Parses a number in (low, high], or in [low, high]."""
    expected = f"expected a number in {'[' if with_low else '('}{low:g}, {high:g}]"

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise ValueError(expected) from None
        if not (low < value <= high or (with_low and value == low)):
            raise ValueError(expected)
        return value

    return parse


def _path(text: str) -> Path:
    return Path(text).expanduser()


def _one_of(*words: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        lowered = text.strip().lower()
        if lowered not in words:
            raise ValueError(f"expected one of {', '.join(words)}")
        return lowered

    return parse


def _policy(text: str) -> str:
    """A policy of micro-batch sizes, by its printed name."""
    known = {word.lower(): word for word in ("all", "powerOfTwo", "undivided")}
    if text.strip().lower() not in known:
        raise ValueError(f"expected one of {', '.join(known.values())}")
    return known[text.strip().lower()]


def _names(text: str) -> tuple[str, ...]:
    """Names or paths, separated as in PATH."""
    return tuple(one.strip() for one in text.split(os.pathsep) if one.strip())


def _default_cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    if base and os.path.isabs(base):
        return Path(base) / "jcuts"
    try:
        return Path.home() / ".cache" / "jcuts"
    except RuntimeError:  # no HOME and no passwd entry (some containers): a directory of this user all the same
        return Path("/tmp") / f"jcuts-{os.getuid()}"


def _knob(parse: Callable[[str], Any], doc: str, **kwargs: Any) -> Any:
    return field(metadata={"parse": parse, "doc": doc}, **kwargs)


@dataclass(frozen=True)
class Knobs:
    """The variables; field ``x`` is read from ``JCUTS_X``.  An empty variable counts as unset."""

    cache_dir: Path = _knob(_path, "tuning database and object cache", default_factory=_default_cache_dir)
    arch: tuple[str, ...] = _knob(
        _names,
        "architecture files (`jcuts arch measure`) or GPU names whose rates replace what is detected, separated by ':'",
        default=(),
    )
    databases: tuple[str, ...] = _knob(
        _names,
        "folders of checked-in tuning results (`jcuts tune --out`), which are read beside the database, separated by "
        "':'",
        default=(),
    )
    database_key: Path | None = _knob(
        _path, "key with which files of these folders are signed: those are followed without a check", default=None
    )
    shipped: bool = _knob(_boolean, "read the tuning results that jcuts comes with, beside the database", default=True)
    dump: Path | None = _knob(_path, "write every stage of every function below this directory", default=None)
    fuel: int | None = _knob(_integer(0), "stop after this many fusions (bisects a miscompile)", default=None)
    chunk: int | None = _knob(
        _integer(0), "run the batch in pieces of this size, 0: never (default: where it promises to pay)", default=None
    )
    raise_errors: bool = _knob(
        _boolean, "raise errors of jcuts' own planning, which otherwise leave the program to XLA", default=False
    )
    verify: bool = _knob(_boolean, "check programs and partitions after every pass", default=False)
    chains: bool = _knob(_boolean, "one call for kernels that can follow each other", default=True)
    l2_prefetch_mb: float | None = _knob(
        _number(0.0, math.inf, with_low=True),
        "MiB of weights, keys and values that a kernel of a chain prefetches into the GPU's L2 cache before the kernel "
        "in front is complete; 0: none (default: by its operands)",
        default=None,
    )
    restore_convs: str = _knob(
        _one_of("auto", "all", "off"),
        "products of 1x1 convolutions without a kernel are convolutions again: by a rule of their size, all, or none",
        default="off",
    )
    disable: bool = _knob(_boolean, "leave every function to XLA as it is", default=False)
    native: Path | None = _knob(_path, "native library to load instead of the installed one", default=None)
    cudnn: Path | None = _knob(_path, "cuDNN library to open instead of the one that JAX uses", default=None)
    cudnn_graphs: bool = _knob(_boolean, "let XLA capture cuDNN's calls into CUDA graphs", default=True)
    microbatch_policy: str | None = _knob(
        _policy,
        "micro-batch sizes of convolutions under a workspace limit: all, powerOfTwo or undivided (default: powers of "
        "two, and what the limit makes worth it)",
        default=None,
    )
    threads: int | None = _knob(_integer(1), "most threads that one kernel uses (default: XLA's pool)", default=None)
    compile_workers: int | None = _knob(
        _integer(1), "processes that compile kernels (default: one per core)", default=None
    )
    tune_timeout_s: float = _knob(
        _number(0.0, 86400.0), "seconds that one candidate may take in the measuring process", default=30.0
    )
    tune_seconds: float | None = _knob(
        _number(0.0, math.inf, with_low=True),
        "wall time that tuning may take at a first call, beyond jax.jit's own; inf: no limit (default: 60)",
        default=None,
    )
    first_call_seconds: float | None = _knob(
        _number(0, math.inf, with_low=True),
        "seconds that a first call on a CPU waits for tuning; then it runs XLA's program, and tuning goes on beside "
        "the calls that follow; inf: it waits for the end (default: 3; inf where tune_seconds is set)",
        default=None,
    )
    memory_over: float = _knob(
        _number(0.0, math.inf, with_low=True),
        "share by which a program's peak memory may exceed that of plain jax.jit where it needs more than a quarter of "
        "the GPU's (default: 0.03)",
        default=3 / 100,
    )
    tune_caches: str = _knob(
        _one_of("warm", "cold"),
        "caches of a CPU while its kernels are timed: warm, or evicted before every sample (GPUs: always cold)",
        default="warm",
    )
    online_share: float = _knob(
        _number(0.0, 1.0),
        'share of a run\'s wall time that tune="online" may take (default: 0.05)',
        default=1 / 20,
    )
    serve_share: float = _knob(
        _number(0.0, 1.0, with_low=True),
        'share of the wall time in which calls may wait for measurements with tune="serve"; 0: measured where nobody '
        "calls (default: 0.05)",
        default=1 / 20,
    )
    lock_patience_s: float = _knob(
        _number(0.0, 86400.0, with_low=True),
        "seconds to wait while another process measures; then XLA, until a later call",
        default=60.0,
    )
    progress: bool = _knob(_boolean, "show how far tuning is, where it takes long", default=True)
    top_percent: float = _knob(
        _number(0.0, 100.0), "share of the estimator's ranking that is measured (T%)", default=10.0
    )
    max_candidates: int = _knob(_integer(1), "most kernel candidates measured per subset", default=16)
    cache_max_mb: float = _knob(
        _number(0.0, 1e9), "size of the object cache; the least recently used are dropped", default=512.0
    )
    log: str = _knob(
        _one_of(*LOG_LEVELS), "level of the `jcuts` logger: debug, info, warning or error", default="warning"
    )
    seed: int = _knob(_integer(0), "seed of every random choice while tuning", default=0)


def variable(name: str) -> str:
    """The environment variable of a field: ``variable("cache_dir") == "JCUTS_CACHE_DIR"``."""
    return f"JCUTS_{name.upper()}"


_FIELDS = fields(Knobs)
_VARIABLES = tuple(variable(f.name) for f in _FIELDS)
_INPUTS = (*_VARIABLES, "XDG_CACHE_HOME", "HOME")

_lock = threading.Lock()
_parsed: tuple[tuple[str | None, ...], Knobs] | None = None
_overrides: list[dict[str, Any]] = []


def parse(environment: Mapping[str, str]) -> Knobs:
    """Reads the knobs from a mapping of environment variables.

    Raises:
        UsageError: a value cannot be understood; attributes ``variable`` and ``value``.
    """
    values: dict[str, Any] = {}
    for f in _FIELDS:
        name = variable(f.name)
        text = environment.get(name, "")
        if not text.strip():
            continue
        try:
            values[f.name] = f.metadata["parse"](text)
        except ValueError as error:
            raise UsageError(f"{name}={text!r}: {error} ({f.metadata['doc']})", variable=name, value=text) from None
    return Knobs(**values)


def current() -> Knobs:
    """The knobs of this moment: the environment, with the overrides of every open ``scope`` on top."""
    global _parsed
    key = tuple(os.environ.get(name) for name in _INPUTS)
    with _lock:
        if _parsed is None or _parsed[0] != key:
            _parsed = (key, parse(os.environ))
        knobs = _parsed[1]
        for override in _overrides:
            knobs = replace(knobs, **override)
    return knobs


@contextlib.contextmanager
def scope(**overrides: Any) -> Iterator[Knobs]:
    """Overrides fields while the ``with`` block runs, for the whole process (worker threads see them too).

    Raises:
        UsageError: an unknown field.
    """
    known = {f.name for f in _FIELDS}
    unknown = sorted(set(overrides) - known)
    if unknown:
        raise UsageError(f"unknown knobs {unknown}: choose from {sorted(known)}", unknown=unknown)
    with _lock:
        _overrides.append(overrides)
    try:
        yield current()
    finally:
        with _lock:
            # By identity: two scopes may hold equal overrides.
            for position in reversed(range(len(_overrides))):
                if _overrides[position] is overrides:
                    del _overrides[position]
                    break


def unknown_variables(environment: Mapping[str, str] | None = None) -> list[str]:
    """``JCUTS_*`` variables that no knob reads (a misspelling, most likely), sorted."""
    names = os.environ if environment is None else environment
    return sorted(name for name in names if name.startswith("JCUTS_") and name not in _VARIABLES)


def variables() -> tuple[str, ...]:
    """Every variable that a knob reads."""
    return _VARIABLES


def describe() -> list[tuple[str, str, str]]:
    """``(variable, value now, meaning)`` of every knob, for ``jcuts doctor`` and the documentation."""
    knobs = current()
    return [(variable(f.name), str(getattr(knobs, f.name)), f.metadata["doc"]) for f in _FIELDS]
