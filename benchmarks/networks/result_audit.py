"""Audit of a timed program: is what was timed what the function computes, anew at every call?

Programs that are fast because they cheat pass a comparison on the arguments that they were built with: they return a
result that they have kept, leave a tenth of the tiles out, compute in a lower precision, or write into their arguments
(KernelBench's adversarial tests turned on this harness).  The audit calls them on fresh arguments and holds them to the
acceptance rule of whole programs (`jit.accuracy.float64_check`): against float64, beside plain `jax.jit`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

SETS = 2
"""Sets of fresh arguments: a result that is kept from the first is wrong for the second."""


def fresh(arguments: Sequence[Any], seed: int) -> tuple[Any, ...]:
    """Arguments of the same structure and types: floats scaled by 7/8 to 9/8 and mixed up, all others as they are."""
    import jax
    import numpy as np

    rng = np.random.default_rng(seed)

    def other(x: Any) -> Any:
        x = jax.numpy.asarray(x)
        if not jax.numpy.issubdtype(x.dtype, jax.numpy.floating):
            return jax.numpy.copy(x)
        values = np.asarray(x).astype(np.float32 if x.dtype.itemsize < 4 else x.dtype)
        values = rng.permutation(values.reshape(-1)) * rng.uniform(7 / 8, 9 / 8, values.size)
        return jax.numpy.asarray(values.reshape(x.shape), x.dtype)

    return tuple(jax.tree.map(other, tuple(arguments)))


def audit(
    program: Callable[..., Any],
    function: Callable[..., Any],
    arguments: Sequence[Any],
    *,
    tolerance: float = 2.0,
    donates: bool = False,
) -> list[str]:
    """What is wrong with a program, nothing where it is honest.

    Args: program: what was timed; function: what it has to compute; arguments: of the benchmark; tolerance: allowed
        error as a multiple of plain `jax.jit`'s; donates: whether a call may use its arguments up.
    """
    import jax
    import numpy as np

    from jcuts.jit.accuracy.float64_check import Float64Judge
    from jcuts.jit.accuracy.plain_comparison import differences, nan_mismatch
    from jcuts.trace import jaxapi

    faults: dict[str, None] = {}
    plain = jax.jit(function)
    closed = jaxapi.closed_jaxpr_of(function, *arguments)
    judge: Float64Judge | None = None
    for seed in range(SETS):
        given = fresh(arguments, seed)
        leaves = jax.tree.leaves(given)
        kept = [np.array(x) for x in leaves]
        wanted = jax.block_until_ready(plain(*given))
        got = jax.block_until_ready(program(*jax.tree.map(jax.numpy.copy, given) if donates else given))
        if not donates and any(a.tobytes() != np.asarray(b).tobytes() for a, b in zip(kept, leaves, strict=True)):
            faults["it writes into its arguments"] = None
            continue
        shapes = [[(x.shape, x.dtype) for x in jax.tree.leaves(side)] for side in (wanted, got)]
        if shapes[0] != shapes[1]:
            faults[f"its results are {shapes[1]}, not {shapes[0]}"] = None
            continue
        judge = Float64Judge(closed, leaves, tolerance, jax.default_backend()) if judge is None else judge.at(leaves)
        for why in (nan_mismatch(differences(wanted, got)), judge.compare(wanted, got), _unequal(wanted, got)):
            if why is not None:
                faults[f"on fresh arguments: {why}"] = None
    if not donates and _kept_between_calls(program, fresh(arguments, SETS)):
        faults["it returns the array of an earlier call"] = None
    return list(faults)


def _unequal(wanted: Any, got: Any) -> str | None:
    """Whether integers or booleans differ: argmax of equal numbers aside, they may not."""
    import jax
    import numpy as np

    for number, (a, b) in enumerate(zip(jax.tree.leaves(wanted), jax.tree.leaves(got), strict=True)):
        if a.dtype.kind in "biu":
            count = int(np.count_nonzero(np.asarray(a) != np.asarray(b)))
            if count > a.size // 100:
                return f"output {number} differs in {count} of {a.size} elements"
    return None


def _kept_between_calls(program: Callable[..., Any], given: tuple[Any, ...]) -> bool:
    """Whether two calls share memory while the first result is alive, that of arguments aside."""
    import jax

    def places(tree: Any) -> set[int]:
        return {x.unsafe_buffer_pointer() for x in jax.tree.leaves(tree) if isinstance(x, jax.Array) and x.size}

    first = program(*given)
    second = program(*given)
    jax.block_until_ready((first, second))
    return bool((places(first) & places(second)) - places(given))
