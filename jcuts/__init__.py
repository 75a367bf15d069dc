"""jcuts: makes JAX functions faster, with one decorator.

>>> import jax.numpy as jnp
>>> import jcuts
>>> @jcuts.optimize(tune="off")
... def double(x):
...     return x + x
>>> float(double(jnp.float32(2)))
4.0
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jcuts.api import Optimized, optimize
    from jcuts.artifact.load import load, register_targets
    from jcuts.base.run_statistics import stats
    from jcuts.differential.run import verify
    from jcuts.microbatch.best_batch import best_batch_size

__all__ = ["Optimized", "best_batch_size", "load", "optimize", "register_targets", "stats", "verify"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # JAX is imported only when it is needed: the floors without it (and `jcuts.base`) stay light.
    if name == "best_batch_size":
        from jcuts.microbatch.best_batch import best_batch_size

        return best_batch_size
    if name in ("load", "register_targets"):
        from jcuts.artifact import load as loading  # needs neither the planner nor its packages

        return getattr(loading, name)
    if name == "verify":
        from jcuts.differential.run import verify

        return verify
    if name == "stats":
        from jcuts.base.run_statistics import stats

        return stats
    if name in __all__:
        from jcuts import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
