"""Acceptance record of a saved program: its and plain XLA's errors against float64 on seeded inputs, and limits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jcuts.base.errors import AccuracyRejected
from jcuts.jit.traced_call import TracedCall
from jcuts.trace import jaxapi


def record(traced: TracedCall, planned: jaxapi.Closed, seeds: Sequence[int]) -> list[dict[str, Any]]:
    """Errors of a planned program, by seed and output.

    Seed 0 stands for the arguments of the call; with another the elements of every floating-point argument are
    permuted, integers and booleans stay as they are.

    Returns: per seed and floating-point output: its error, XLA's, and the limit, in L2 norm and in one element
        (`jcuts.jit.accuracy.float64_check`); or why there is no float64 result.
    Raises: AccuracyRejected: an error exceeds its limit.
    """
    plain = jax.jit(lambda *xs: jaxapi.eval_closed(traced.closed, *xs))
    ours = jax.jit(lambda *xs: jaxapi.eval_closed(planned, *xs))
    judge = traced.exact
    found = []
    for seed in seeds:
        leaves = [x if seed == 0 else _permuted(x, seed) for x in traced.leaves]
        judge = judge.at(leaves)
        if judge.reference() is None:
            found.append({"seed": seed, "unchecked": judge.failure})
            continue
        for row in judge.errors(plain(*leaves), ours(*leaves)):
            if not row.error <= row.limit:
                raise AccuracyRejected(
                    f"it is not saved: output {row.output} {row} (seed {seed})", seed=seed, output=row.output
                )
            found.append({"seed": seed, **row._asdict()})
    return found


def _permuted(x: Any, seed: int) -> Any:
    array = np.asarray(x)
    if not jnp.issubdtype(array.dtype, np.floating):
        return x
    return jaxapi.constant(np.random.default_rng(seed).permutation(array.reshape(-1)).reshape(array.shape))
