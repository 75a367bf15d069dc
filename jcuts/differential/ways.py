"""Registry of the ways in which `jcuts.verify` runs a program: as XLA ships it, without fusion, op by op, by jcuts.

A way is a function of a closed jaxpr and what a run needs to know (`Run`); it gives a function of flat arrays.  A new
way is one entry of `WAYS`.  They run in a process of their own (`differential/child.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from jcuts.base.settings import Settings
from jcuts.differential import options as xla_options
from jcuts.trace import jaxapi

Program = Callable[..., Sequence[Any]]


@dataclass(frozen=True)
class Run:
    """How a program is to be run.

    Attributes:
        platform: ``cpu`` or ``cuda``.
        options: compiler options beside those of the way (an option or a pass that is tried alone).
        refused: names of options that the installed jaxlib does not know.
        tune: of jcuts' program: ``off`` takes a kernel wherever there is one, by estimate; ``cached`` and ``auto`` what
            a call of the function would run.
        notes: what a way says of its run, by name.
    """

    platform: str
    options: Mapping[str, Any] = field(default_factory=dict)
    refused: frozenset[str] = frozenset()
    tune: str = "off"
    notes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Way:
    """One way to run a program. Attributes: is_xla: whether compiler options can be tried in it."""

    name: str
    about: str
    build: Callable[[jaxapi.Closed, Run], Program]
    is_xla: bool = False


def _compiled(*groups: str) -> Callable[[jaxapi.Closed, Run], Program]:
    """The program as one executable of XLA, with the options of these groups."""

    def build(closed: jaxapi.Closed, run: Run) -> Program:
        chosen = xla_options.compiler_options(xla_options.of_group(run.platform, *groups), run.refused)
        passes = ",".join(o[name] for o in (chosen, run.options) if (name := "xla_disable_hlo_passes") in o)
        chosen = {**chosen, **run.options, **({"xla_disable_hlo_passes": passes} if passes else {})}
        return jax.jit(lambda *xs: jaxapi.eval_closed(closed, *xs), compiler_options=chosen or None)

    return build


def _op_by_op(closed: jaxapi.Closed, run: Run) -> Program:
    """The jaxpr evaluated equation by equation; each is an executable of its own."""
    return lambda *xs: jaxapi.eval_closed(closed, *xs)


def _jcuts(closed: jaxapi.Closed, run: Run) -> Program:
    """The program that `jcuts.optimize` makes of it."""
    from jcuts.jit.optimized import Optimized

    settings = Settings(mode="fusion" if run.tune == "off" else "mixed", tune=run.tune)
    optimised = Optimized(lambda *xs: jaxapi.eval_closed(closed, *xs), settings, {})

    def program(*xs: Any) -> Sequence[Any]:
        found = optimised(*xs)
        run.notes["kernels"] = optimised.explain(*xs).kernels
        return found

    return program


XLA = "xla"
OP_BY_OP = "op by op"
WAYS: dict[str, Way] = {
    way.name: way
    for way in (
        Way(XLA, "XLA as it ships", _compiled(), is_xla=True),
        Way("no fusion", "XLA without fusions and library fusions", _compiled(xla_options.FUSION), is_xla=True),
        Way(OP_BY_OP, "every equation an executable of its own", _op_by_op),
        Way("options off", "XLA without the suspicious options", _compiled(xla_options.SUSPICIOUS), is_xla=True),
        Way("jcuts", "the program of jcuts.optimize", _jcuts),
    )
}
"""By name, in the order of the report."""
