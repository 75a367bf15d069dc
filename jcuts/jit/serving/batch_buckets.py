"""Buckets of batch sizes: which size a batch runs at, its rows padded to that, and the rows of results cut out again.

Padding repeats the last row: it is in the range of what the function takes, whatever that is.  Arrays of the host and
of CPUs are padded and cut with NumPy, which compiles nothing for a new size.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jcuts.base.errors import UsageError

MOST_PIECES = 8
"""A batch runs in so many pieces of a smaller bucket at most, where its own is not compiled yet."""


class Kind(NamedTuple):
    """What batches have in common that run the same program. Attributes: rows: shape and dtype of one row per array."""

    rows: tuple[tuple[tuple[int, ...], str], ...]


@dataclass(frozen=True)
class BatchBuckets:
    """Batch sizes that programs are compiled for.

    Attributes: sizes: ascending; argnums: positional arguments whose arrays have the batch as leading dimension.
    """

    sizes: tuple[int, ...]
    argnums: tuple[int, ...] = (0,)

    @classmethod
    def of(cls, sizes: Iterable[Any], argnums: Any = 0, donated: Any = None) -> BatchBuckets:
        """Checks what a user gave. Raises: UsageError: no positive whole numbers, no positions, donated arguments."""
        if donated not in (None, ()):
            raise UsageError("batch_buckets and donate_argnums exclude each other: what calls use up is a padded copy")
        try:
            numbers = tuple(sorted({operator.index(size) for size in sizes}))
            places = tuple(map(operator.index, argnums if isinstance(argnums, (tuple, list)) else (argnums,)))
        except TypeError:
            raise UsageError(
                f"batch_buckets={sizes!r} and batch_argnums={argnums!r}: give batch sizes and positions of arguments "
                "as whole numbers",
                batch_buckets=sizes,
                batch_argnums=argnums,
            ) from None
        if not numbers or numbers[0] < 1:
            raise UsageError(f"batch_buckets={sizes!r} must be batch sizes >= 1", batch_buckets=sizes)
        if not places or min(places) < 0 or len(set(places)) < len(places):
            raise UsageError(
                f"batch_argnums={argnums!r} must be different positions of arguments >= 0", batch_argnums=argnums
            )
        return cls(numbers, places)

    def size_of(self, count: int) -> int:
        """The least size that holds so many rows; the largest one where none does."""
        return next((size for size in self.sizes if size >= count), self.sizes[-1])

    def neighbour(self, count: int, ready: Collection[int]) -> int | None:
        """The compiled size that so many rows run at while their own is compiled; None where none is near.

        The least larger one, else the largest smaller one of which `MOST_PIECES` hold them.
        """
        larger = [size for size in ready if size >= count]
        if larger:
            return min(larger)
        smaller = max(ready, default=0)
        return smaller if smaller and -(-count // smaller) <= MOST_PIECES else None

    def measure(self, args: Sequence[Any]) -> tuple[int, Kind]:
        """Rows of a call's batch, and its kind. Raises: UsageError: no arrays, or arrays of different batch sizes."""
        leaves = [leaf for place in self.argnums for leaf in jax.tree.leaves(_argument(args, place))]
        shapes = [getattr(leaf, "shape", ()) for leaf in leaves]
        counts = {int(shape[0]) if shape else -1 for shape in shapes}
        if len(counts) != 1 or -1 in counts:
            raise UsageError(
                f"the arrays of the arguments {self.argnums} have the shapes {[tuple(s) for s in shapes]}: with "
                "batch_buckets their leading dimension is the batch, and the same in all of them (batch_argnums "
                "names other arguments)",
                shapes=shapes,
            )
        rows = tuple((tuple(shape[1:]), str(leaf.dtype)) for shape, leaf in zip(shapes, leaves, strict=True))
        return counts.pop(), Kind(rows)

    def rows(self, args: Sequence[Any], start: int, stop: int, size: int) -> tuple[Any, ...]:
        """The arguments with rows [start, stop) of the batch, padded to a size."""
        return self._mapped(args, lambda x: padded(x, start, stop, size))

    def described(self, args: Sequence[Any], size: int) -> tuple[Any, ...]:
        """The arguments with shapes of a size in place of the batch's arrays."""
        return self._mapped(args, lambda x: jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype))

    def _mapped(self, args: Sequence[Any], change: Any) -> tuple[Any, ...]:
        return tuple(jax.tree.map(change, arg) if i in self.argnums else arg for i, arg in enumerate(args))


def _argument(args: Sequence[Any], place: int) -> Any:
    if place >= len(args):
        raise UsageError(
            f"the call has {len(args)} positional arguments, and batch_argnums names number {place}: pass the batch by "
            "position",
            given=len(args),
            batch_argnum=place,
        )
    return args[place]


def padded(x: Any, start: int, stop: int, size: int) -> Any:
    """Rows [start, stop) of an array, and its last one of them again up to a size.

    Args: x: (rows, ...) of the host or of a device.  Returns: (size, ...), ``x`` itself where that is all of it.
    """
    if start == 0 and stop == x.shape[0] == size:
        return x
    if not _is_host(x):
        part = x[start:stop]
        more = size - (stop - start)
        return part if not more else jnp.concatenate([part, jnp.repeat(part[-1:], more, axis=0)])
    part = np.asarray(x)[start:stop]
    out = np.empty((size, *part.shape[1:]), part.dtype)
    out[: len(part)] = part
    out[len(part) :] = part[-1]
    return jax.device_put(out, x.sharding) if isinstance(x, jax.Array) and x.committed else out


def joined(pieces: Sequence[Any], counts: Sequence[int]) -> Any:
    """The first rows of results, one behind the other.

    Args: pieces: (size, ...) each; counts: rows of each that count.  Returns: (sum of counts, ...) as a ``jax.Array``.
    """
    if len(pieces) == 1 and pieces[0].shape[0] == counts[0]:
        return pieces[0]
    if not all(_is_host(piece) for piece in pieces):
        parts = [piece[:count] for piece, count in zip(pieces, counts, strict=True)]
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts)
    parts = [np.asarray(piece)[:count] for piece, count in zip(pieces, counts, strict=True)]
    whole = parts[0] if len(parts) == 1 else np.concatenate(parts)
    first = pieces[0]
    return jax.device_put(whole, first.sharding if isinstance(first, jax.Array) and first.committed else None)


def _is_host(x: Any) -> bool:
    """Whether NumPy reads an array without a copy from a device."""
    if not isinstance(x, jax.Array):
        return True
    if jnp.issubdtype(x.dtype, jax.dtypes.extended) or len(x.sharding.device_set) != 1:
        return False
    return next(iter(x.sharding.device_set)).platform == "cpu"
