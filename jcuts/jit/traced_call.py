"""A concrete call with its traced jaxpr: the record that the steps of variant selection share."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

from jcuts.base.settings import Settings, Variant
from jcuts.jit import end_to_end_benchmark, variant_space
from jcuts.jit.call_signature import CallSignature, Signature
from jcuts.jit.variant_compiler import VariantCompiler
from jcuts.pipeline import chunk_logits
from jcuts.pipeline.outcome import Outcome
from jcuts.primitive.lowering import Started, plan, start_planning
from jcuts.primitive.sharding import Placement
from jcuts.trace import jaxapi


class Call(NamedTuple):
    """One call to decide about: the arguments, and what is derived from them."""

    signature: Signature
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    placement: Placement
    platform: str


@dataclass(frozen=True, eq=False)
class TracedCall:
    """A call, its function's jaxpr, and the compiler and accuracy check of its programs.

    Attributes:
        leaves: the concrete arguments, flat. compiler: the programs of the function.
        arguments: which arguments are static or donated. settings: the user's options.
        roles: of its outputs (`jit.accuracy.float64_check.output_roles`).
    """

    call: Call
    closed: jaxapi.Closed
    leaves: tuple[Any, ...]
    compiler: VariantCompiler
    arguments: CallSignature
    settings: Settings
    roles: tuple[str, ...] = ()

    @property
    def platform(self) -> str:
        """'cpu', or JAX's name of a GPU."""
        return self.call.platform

    @property
    def on_gpu(self) -> bool:
        """Whether the call runs on a GPU."""
        return self.call.platform in variant_space.GPUS

    @functools.cached_property
    def exact(self) -> variant_space.Float64Judge:
        """Checks rewritten programs against float64."""
        tolerance = self.settings.tolerance
        return variant_space.Float64Judge(self.closed, self.leaves, tolerance, self.platform, self.roles)

    def plan(self, form: Variant | None, *, may_measure: bool) -> Outcome:
        """The pipeline's outcome for a variant."""
        settings = self.compiler.settings_for(form)
        return plan(self.closed, settings, self.platform, may_measure=may_measure, examples=self.leaves)

    def start_planning(self, form: Variant | None) -> Started:
        """`plan` up to where the variant's tuning problems are known."""
        settings = self.compiler.settings_for(form)
        return start_planning(self.closed, settings, self.platform, may_measure=True, examples=self.leaves)

    def copies(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments for one more call: copies of those that a call uses up."""
        return self.arguments.copies(self.call.args, self.call.kwargs)

    def has_chunked_logits(self) -> bool:
        """Whether logits are computed in chunks whatever that takes."""
        return chunk_logits.is_settled(self.closed, self.settings, self.platform)

    def why_not_benchmarked(self) -> str | None:
        """Why whole programs of this function cannot be timed, or None."""
        if jaxapi.has_effects(self.closed):
            return f"the function has effects ({', '.join(jaxapi.effects_of(self.closed))}): it is never run twice"
        if self.call.placement.spans_processes:
            return "several processes: each must compile the same program, so whole functions are not timed"
        if self.has_chunked_logits():
            return "its logits are computed in chunks to save memory: not compared with whole ones"
        if self.arguments.donates and not end_to_end_benchmark.copies_fit(self.leaves):
            return "donated arguments do not fit twice into memory: not timed as a whole"
        return None
