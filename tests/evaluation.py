"""Evaluates programs (closed jaxprs) as one executable, where operation by operation would compile one of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jcuts.trace import jaxapi
from jcuts.tune.verify.float64_eval import evaluate

_ROUNDED = {"xla_allow_excess_precision": False}
"""Every operation rounds to its type, as it does alone."""


def compiled(closed: Any, *args: Any) -> list[Any]:
    """Results of a program as JAX compiles it; its constants are arguments, as large ones take long to compile."""

    def results(consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        return jaxapi.eval_closed(closed.replace(consts=list(consts)), *args)

    return jax.jit(results, compiler_options=_ROUNDED)(list(closed.consts), args)


def exact(closed: Any, *args: Any) -> list[Any]:
    """Results of a program in float64."""

    def results(consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        return evaluate(closed.replace(consts=list(consts)), args)

    with jax.enable_x64(True):
        wide = [jnp.asarray(x, np.float64 if jnp.issubdtype(x.dtype, np.floating) else x.dtype) for x in args]
        return jax.jit(results)(list(closed.consts), wide)
