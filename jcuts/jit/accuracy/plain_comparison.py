"""Comparison of a whole program's results with those of plain ``jax.jit``: relative L2 norms, NaN at equal places."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jcuts.jit.accuracy import result_norms
from jcuts.jit.accuracy.result_norms import Norms
from jcuts.tune.verify.tolerances import GROSS_SQRT_EPS


def reference_of(result: Any) -> Any:
    """A result's numbers to compare others with (`result_norms.kept`), None for what has none."""
    leaves, tree = jax.tree.flatten(result)
    numbers = [isinstance(x, jax.Array) and jax.numpy.issubdtype(x.dtype, np.number) for x in leaves]
    kept = iter(result_norms.kept([x for x, has in zip(leaves, numbers, strict=True) if has]))
    return jax.tree.unflatten(tree, [next(kept) if has else None for has in numbers])


def wrong_result(
    name: str,
    reference: Any,
    result: Any,
    verify: Callable[[str, Any, Any], str | None] | None,
    second_opinion: Callable[[Any, Any], str | None] | None,
) -> str | None:
    """Why a program's result is not accepted, or None.

    What differs grossly from plain XLA's result may be as right as that: gradients that are zero but for rounding, and
    sums of TF32 products through many layers, differ as much between two of XLA's own programs.
    """
    found = differences(reference, result)
    if (why := nan_mismatch(found)) is not None:
        return why
    if (gross := gross_mismatch(found)) is None:
        return verify(name, reference, result) if verify is not None else None
    if second_opinion is None:
        return gross
    why = second_opinion(reference, result)
    return None if why is None else f"{gross}; {why}"


class Difference(NamedTuple):
    """Norms of an output's difference from plain XLA's. Args: number: of the output; eps: of its type."""

    number: int
    eps: float
    norms: Norms


def differences(reference: Any, result: Any) -> list[Difference]:
    """Of every floating or complex output. Args: reference: plain XLA's, None for outputs without numbers."""
    pairs = zip(jax.tree.leaves(reference, is_leaf=lambda x: x is None), jax.tree.leaves(result), strict=False)
    compared = {
        number: pair
        for number, pair in enumerate(pairs)
        if pair[0] is not None and jax.numpy.issubdtype(pair[1].dtype, np.inexact)
    }
    every = result_norms.all_norms(list(compared.values()))
    return [
        Difference(number, float(jax.numpy.finfo(got.dtype).eps), norms)
        for (number, (_, got)), norms in zip(compared.items(), every, strict=True)
    ]


def nan_mismatch(found: Sequence[Difference]) -> str | None:
    """Whether an output has NaN where plain ``jax.jit`` has none, or the reverse."""
    first = next((d.number for d in found if d.norms.nan_differs), None)
    return None if first is None else f"output {first} has NaN where plain jax.jit has none, or the reverse"


def gross_mismatch(found: Sequence[Difference]) -> str | None:
    """A last net under the per-kernel checks: a floating output that differs by more than 64 sqrt(eps) in relative L2
    norm, where both are finite.
    """
    for number, eps, apart in found:
        allowed = GROSS_SQRT_EPS * math.sqrt(eps) * apart.size
        if apart.errors[0] > allowed:
            return f"output {number} differs from plain jax.jit by {apart.errors[0]:.3g} in norm, allowed {allowed:.3g}"
    return None
