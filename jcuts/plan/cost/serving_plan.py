"""A serving plan (mesh axes, micro-batches in flight, tiers of weights and cache) as a record, and many of them as a
struct of arrays.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from jcuts.base.errors import UsageError
from jcuts.plan.search.plan import TIERS


@dataclass(frozen=True)
class Serving:
    """A serving configuration on data x tensor x pipeline GPUs.

    Attributes:
        prompt, generate: tokens in and out per sequence (generate 0: a forward pass alone, without a cache).
        micro: sequences that run through a layer together; count: micro-batches in flight per data-parallel replica.
        weights_on_gpu: fraction of the weights that stays; the rest streams from ``weights``.
        cache: tier of the key-value cache; host_attention: the host computes attention over a cache that it keeps, so
            that the cache never crosses the link.
        group: micro-batches that share a visit to a layer (0: all, parameter-resident; 1: activation-resident; between:
            mixed). activations: tier where hidden states wait between layers when micro-batches share a visit.
    """

    prompt: int
    generate: int
    micro: int
    count: int = 1
    weights_on_gpu: float = 1.0
    weights: str = "host"
    cache: str = "gpu"
    host_attention: bool = False
    tensor: int = 1
    data: int = 1
    pipeline: int = 1
    group: int = 0
    activations: str = "gpu"

    def __post_init__(self) -> None:
        for name in ("prompt", "micro", "count", "tensor", "data", "pipeline"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name}={getattr(self, name)} must be at least 1", **{name: getattr(self, name)})
        if self.generate < 0 or not 0 <= self.group <= self.count:
            raise UsageError(
                f"generate={self.generate} must be at least 0 and group={self.group} at most count={self.count}"
            )
        if not 0 <= self.weights_on_gpu <= 1:
            raise UsageError(f"weights_on_gpu={self.weights_on_gpu} must be in [0, 1]", value=self.weights_on_gpu)
        for name, known in (("weights", TIERS[1:]), ("cache", TIERS), ("activations", TIERS)):
            if getattr(self, name) not in known:
                raise UsageError(f"{name}={getattr(self, name)!r} is unknown: choose one of {known}", name=name)

    @property
    def batch(self) -> int:
        """Sequences in flight on all GPUs."""
        return self.micro * self.count * self.data

    @property
    def gpus(self) -> int:
        """GPUs that the plan takes."""
        return self.data * self.tensor * self.pipeline

    def short(self) -> str:
        """A few words: the axes (d data, t tensor, p pipeline), and how weights are streamed.

        >>> Serving(64, 8, 4, data=2, tensor=4, weights_on_gpu=0.5, count=3).short()
        'd2 t4 PR'
        """
        axes = zip("dtp", (self.data, self.tensor, self.pipeline), strict=True)
        mesh = " ".join(f"{name}{size}" for name, size in axes if size > 1) or "1 GPU"
        return mesh + ("" if self.policy == "resident" else f" {self.policy}")

    def places(self, *, generates: bool) -> str:
        """Where weights and, if there is one, the cache are."""
        kept = self.weights_on_gpu
        said = "GPU" if kept == 1 else self.weights if not kept else f"{kept:.0%} GPU, {self.weights}"
        return said + (f"; cache {self.cache}" if generates and self.cache != "gpu" else "")

    @property
    def policy(self) -> str:
        """Scheduling policy: parameter-resident (PR), activation-resident (AR), between them, or all resident."""
        if self.weights_on_gpu == 1 and self.activations == "gpu":
            return "resident"
        if self.count == 1 or self.group == 1:
            return "AR"
        return "PR" if self.group in (0, self.count) else f"PR by {self.group}"


CODED = {"weights": TIERS, "cache": TIERS, "activations": TIERS}
"""Fields of ``Serving`` that are coded by position."""


class Servings:
    """Many serving configurations as a struct of arrays: one array per field of ``Serving``; tiers are coded by their
    position.  ``group`` 0 is replaced by ``count``."""

    def __init__(self, columns: dict[str, NDArray]) -> None:
        self.columns = columns
        self.columns["group"] = np.where(columns["group"] == 0, columns["count"], columns["group"])

    def __getitem__(self, name: str) -> NDArray:
        return self.columns[name]

    def __len__(self) -> int:
        return len(self.columns["micro"])

    @classmethod
    def of(cls, plans: Iterable[Serving]) -> Servings:
        """From single configurations."""
        plans = list(plans)
        made: dict[str, NDArray] = {}
        for field in fields(Serving):
            values = [getattr(plan, field.name) for plan in plans]
            known = CODED.get(field.name)
            made[field.name] = np.array([known.index(value) for value in values] if known else values)
        return cls(made)

    def plan(self, index: int) -> Serving:
        """One of them."""
        values: dict[str, object] = {}
        for field in fields(Serving):
            value = self.columns[field.name][index].item()
            known = CODED.get(field.name)
            values[field.name] = known[value] if known else value
        return Serving(**values)  # type: ignore[arg-type]
