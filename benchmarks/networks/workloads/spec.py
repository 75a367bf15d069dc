"""Workload registry entries: a program, what of its arguments is carried from call to call, and how it is called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["inference", "training", "decode"]


@dataclass(frozen=True)
class Program:
    """A function of weights and arguments.

    ``function(weights, *arguments)``, or ``function(*arguments)`` where ``weights`` is None.  The first ``carried``
    arguments are donated; the function gives a tuple that starts with their successors, which the next call takes.
    """

    function: Callable[..., Any]
    weights: Any
    arguments: tuple[Any, ...]
    carried: int = 0

    def form(self, *, closed: bool) -> Form:
        """The calling form with weights closed over, or with weights as the first argument."""
        function, weights = self.function, self.weights
        if weights is None:
            return Form(function, self.arguments, 0, self.carried)
        if closed:
            return Form(lambda *arguments: function(weights, *arguments), self.arguments, 0, self.carried)
        return Form(function, (weights, *self.arguments), 1, self.carried)


@dataclass(frozen=True)
class Form:
    """What `jax.jit` gets: a function, arguments, and which ones are donated (``carried`` ones after ``first``)."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    first: int
    carried: int

    @property
    def donated(self) -> tuple[int, ...]:
        """``donate_argnums`` of `jax.jit`."""
        return tuple(range(self.first, self.first + self.carried))

    def following(self, arguments: tuple[Any, ...], result: Any) -> tuple[Any, ...]:
        """Arguments of the next call: carried ones are the results of this one."""
        if not self.carried:
            return arguments
        end = self.first + self.carried
        return (*arguments[: self.first], *result[: self.carried], *arguments[end:])


@dataclass(frozen=True)
class WorkloadSpec:
    """A workload of the benchmarks.

    Args: builder: called with ``batch``, ``dtype`` (a name) and ``tiny``; those with batch norms also take ``fresh``,
    which leaves the statistics as freshly made.
    """

    name: str
    group: str
    batches: tuple[int, ...]
    kind: Kind
    builder: Callable[..., Program]
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    has_statistics: bool = False

    @property
    def forms(self) -> tuple[str, ...]:
        """Calling forms: a training step takes its weights, it cannot close over what it changes."""
        return ("args",) if self.kind == "training" else ("closed", "args")

    def build(
        self, batch: int | None = None, *, dtype: str = "float32", tiny: bool = False, fresh: bool = False
    ) -> Program:
        """The program at a batch (by default the smallest one)."""
        more = {"fresh": fresh} if self.has_statistics else {}
        return self.builder(batch=batch or self.batches[0], dtype=dtype, tiny=tiny, **more)
