"""``optimize(..., batch_buckets=...)``: batches of any size run the programs of a few sizes, padded."""

from __future__ import annotations

import functools
import logging
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jcuts.base.errors import UsageError
from jcuts.base.settings import SERVE
from jcuts.jit.dispatch.bound_method import BoundOptimized
from jcuts.jit.serving import background_compiler
from jcuts.jit.serving.batch_buckets import BatchBuckets, Kind, joined, padded
from jcuts.trace import jaxapi

log = logging.getLogger("jcuts")


class BucketedOptimized:
    """An ``Optimized`` whose batches run at a few sizes; the user says that its rows do not depend on each other.

    A batch is padded to the next size, one that is larger than all runs in pieces.  With ``tune="serve"`` a batch whose
    size is not compiled yet runs at one that is, and its own is compiled beside the calls.  Inside another trace
    nothing is padded.

    Args: optimized: the function; buckets: sizes, and which arguments are batches.
    Attributes: __wrapped__: the user's function. optimized: what the padded calls call.
    """

    def __init__(self, optimized: Any, buckets: BatchBuckets) -> None:
        functools.update_wrapper(self, optimized.__wrapped__)
        self.optimized, self.buckets = optimized, buckets
        self._serves = optimized.settings.tune == SERVE
        self._lock = threading.Lock()
        self._ready: dict[Kind, set[int]] = {}
        self._asked: set[tuple[Kind, int]] = set()
        self._failed: set[tuple[Kind, int]] = set()
        self._calls: Counter[int] = Counter()
        self._rows = self._padding = self._neighbours = 0
        optimized.more_stats["buckets"] = self.bucket_stats

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else BoundOptimized(self, instance)

    def __repr__(self) -> str:
        return f"<jcuts.BucketedOptimized {self.buckets.sizes} of {self.optimized!r}>"

    # ------------------------------------------------------------ calling

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not jaxapi.trace_state_clean():
            return self.optimized(*args, **kwargs)
        count, kind = self.buckets.measure(args)
        if not count:
            return self.optimized(*args, **kwargs)
        size = self._size_for(kind, count, args, kwargs)
        starts = range(0, count, size)
        counts = [min(size, count - start) for start in starts]
        results = [
            self.optimized(*self.buckets.rows(args, start, start + rows, size), **kwargs)
            for start, rows in zip(starts, counts, strict=True)
        ]
        self._note(kind, size, counts)
        if len(results) == 1 and counts[0] == size:
            return results[0]
        return jax.tree.map(lambda *pieces: joined(pieces, counts), *results)

    def _size_for(self, kind: Kind, count: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """The size that a batch runs at now."""
        wanted = self.buckets.size_of(count)
        if kind not in self._ready:
            self._check_results(args, kwargs)
            with self._lock:
                self._ready.setdefault(kind, set())
        ready = self._ready[kind]
        if wanted in ready or not self._serves or (kind, wanted) in self._failed:
            return wanted
        with self._lock:
            near = self.buckets.neighbour(count, ready)
        if near is None:
            return wanted
        self._compile_behind(kind, wanted, count, args, kwargs)
        self._neighbours += 1
        return near

    def _compile_behind(self, kind: Kind, size: int, count: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        with self._lock:
            if (kind, size) in self._asked:
                return
            self._asked.add((kind, size))
        sized = self.buckets.rows(args, 0, min(count, size), size)
        log.info("%s: batches of %d are compiled beside the calls", self.__wrapped__.__name__, size)  # type: ignore[attr-defined]

        def work() -> None:
            try:
                self.optimized.prepare(*sized, **kwargs)
                self._note(kind, size, ())
            except Exception:
                with self._lock:
                    self._failed.add((kind, size))  # the next call meets the error
                raise

        background_compiler.shared().submit(work)

    def _note(self, kind: Kind, size: int, counts: Any) -> None:
        with self._lock:
            self._ready[kind].add(size)
            self._calls[size] += len(counts)
            self._rows += sum(counts)
            self._padding += sum(size - rows for rows in counts)

    def _check_results(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raises: UsageError: a result has no row for each row of the batch."""
        first, *others = self.buckets.sizes
        pair = (others[-1] if others else 2 * first, first)
        shapes = [jax.tree.leaves(self.optimized.eval_shape(*self.buckets.described(args, n), **kwargs)) for n in pair]
        for one, other in zip(*shapes, strict=True):
            found = tuple(x.shape[:1] for x in (one, other))
            if found != ((pair[0],), (pair[1],)) or one.shape[1:] != other.shape[1:]:
                raise UsageError(
                    f"a result has the shape {one.shape} for a batch of {pair[0]} and {other.shape} for one of "
                    f"{pair[1]}: batch_buckets needs results with a row for each row of the batch, which depends on "
                    "that row alone",
                    shapes=(one.shape, other.shape),
                    batches=pair,
                )

    # ------------------------------------------------------------ ahead of calls

    def warm_up(self, *args: Any, **kwargs: Any) -> None:
        """Decides and compiles for every size, so that no call does. Args: of a call, its batch of any size >= 1."""
        count, kind = self.buckets.measure(args)
        self._check_results(args, kwargs)
        with self._lock:
            self._ready.setdefault(kind, set())
        for size in self.buckets.sizes:
            self.optimized.prepare(*self.buckets.rows(args, 0, min(count, size), size), **kwargs)
            self._note(kind, size, ())

    def check_rows(self, *args: Any, **kwargs: Any) -> None:
        """Runs half of a bucket beside two different other halves, and compares the bits of its results.

        Args: of a call, its batch of two rows at least, which should differ.
        Raises: UsageError: a row's result depends on other rows.
        """
        count, _ = self.buckets.measure(args)
        size = self.buckets.size_of(count)
        half = max(1, min(count, size) // 2)
        if size < 2 or count < 2:
            raise UsageError(f"a batch of {count} rows in a bucket of {size}: there are no other rows", rows=count)

        def beside(x: Any, others: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
            rows = np.array(padded(x, 0, min(count, size), size))
            rows[half:] = others(rows[half:])
            return rows

        results = [
            jax.tree.leaves(self.optimized(*self.buckets._mapped(args, functools.partial(beside, others=o)), **kwargs))
            for o in (lambda rows: rows, lambda rows: np.broadcast_to(rows[:1], rows.shape))
        ]
        for one, other in zip(*results, strict=True):
            if np.asarray(one)[:half].tobytes() != np.asarray(other)[:half].tobytes():
                raise UsageError(
                    f"results of the first {half} rows change with the others (in an output of shape {one.shape}): "
                    "this function cannot run in buckets",
                    rows=half,
                    shape=one.shape,
                )

    def finish_tuning(self, timeout: float | None = None) -> bool:
        """Waits until nothing is compiled or tuned beside calls; whether that is so within so many seconds."""
        return background_compiler.shared().wait(timeout) and self.optimized.finish_tuning(timeout)

    # ------------------------------------------------------------ telling

    def bucket_stats(self) -> dict[str, Any]:
        """``sizes``, those ``ready``, ``calls`` per size, ``rows``, ``padding`` rows, calls at ``neighbours``."""
        with self._lock:
            return {
                "sizes": list(self.buckets.sizes),
                "ready": sorted({size for ready in self._ready.values() for size in ready}),
                "calls": dict(sorted((k, v) for k, v in self._calls.items() if v)),
                "rows": self._rows,
                "padding": self._padding,
                "neighbours": self._neighbours,
            }

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "optimized":
            raise AttributeError(name)
        value = getattr(self.optimized, name)
        return self._at_its_size(value) if name in _OF_CALLS else value

    def _at_its_size(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """A method of the function that is asked about a call: about the padded one."""

        def asked(*args: Any, **kwargs: Any) -> Any:
            count, _ = self.buckets.measure(args)
            size = self.buckets.size_of(count)
            return method(*self.buckets.rows(args, 0, min(count, size), size), **kwargs)

        return asked

    def save(self, path: Any, *args: Any, **kwargs: Any) -> str:
        """Writes the programs of all sizes as one artefact (`Optimized.save`); who loads it pads the batches."""
        count, _ = self.buckets.measure(args)
        calls = [self.buckets.rows(args, 0, min(count, size), size) for size in self.buckets.sizes]
        return self.optimized.save(path, *calls[0], signatures=calls[1:], **kwargs)


_OF_CALLS = ("chosen", "decision", "explain", "lower", "prepare", "programs", "trace", "tune")
