"""Cache of end-to-end decisions of one function: its keys, and reads and writes of the persistent stores."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax

from jcuts.base import keys, knobs
from jcuts.base.settings import Settings
from jcuts.jit import decision as decisions
from jcuts.jit import variant_space
from jcuts.jit.call_signature import Signature, place_text, platform_of
from jcuts.jit.decision import JCUTS, Decision, DecisionStore
from jcuts.pipeline import microbatch_convs
from jcuts.rewrite.splat_constants import numbers_of
from jcuts.trace import jaxapi
from jcuts.tune import session

_decided_here: set[str] = set()
"""Keys of the decisions that this process took: one taken in noise is measured again by a later process."""


def forget_decided_here() -> None:
    """Makes this process measure again what it decided in noise, as a later process does."""
    _decided_here.clear()


class DecisionCache:
    """The stored decisions of one function.

    Args: settings: the user's options; options: of ``jax.jit``; store: where decisions are kept, None for the default.
    """

    def __init__(self, settings: Settings, options: dict[str, Any], store: DecisionStore | None) -> None:
        self._settings = settings
        self._options = options
        self._store = store
        self._pinned: dict[str, str] = {}  # keys of decisions -> the keys under which they are pinned
        self._of_gpus: set[str] = set()  # keys of decisions about GPUs' programs

    def key(self, closed: jaxapi.Closed, signature: Signature, platform: str) -> str:
        """What a decision is kept under."""
        places = "; ".join(place_text(place) for _, place in signature.leaves)
        kinds = sorted({d.device_kind for d in jax.local_devices() if d.platform == platform})
        limits: tuple[str, ...] = ()
        if microbatch_convs.is_asked(self._settings):  # changes with what they allow
            sizes = self._settings.division_sizes
            limits = ("limits 2", *((f"sizes {sizes}",) if sizes else ()))
        numbers = numbers_of(closed)  # constants that are others in other weights, where a program is another one
        known = (f"numbers {numbers}",) if numbers else ()
        # Whoever may not measure follows what was measured.
        settings = replace(self._settings, tune="auto") if self._settings.tune == "cached" else self._settings
        changed = _changed_knobs(platform)
        more = (*limits, *changed, *known, repr(settings), ",".join(kinds), places, repr(self._options))
        text = jaxapi.canonical_text(closed)
        key = keys.decision(platform, text, more)
        self._pinned[key] = keys.pinned_decision(platform, text, more)
        if platform in variant_space.GPUS:
            self._of_gpus.add(key)
        return key

    def lookup(self, key: str, platform: str, uses_jcuts: bool = True) -> Decision | None:
        """The decision under a key, None where there is none that this process may follow.

        Args: uses_jcuts: whether the function has kernels at all.
        """
        store = self._current()
        if (pinned := self._pinned.get(key)) is not None and (data := store.guard(pinned)) is not None:
            decision = Decision.from_dict(data)
            own = decision is not None and (variant_space.is_xla(decision.chosen) or store.is_own(pinned))
            if own and decision is not None and decision.pinned:
                known = variant_space.is_known(decision.chosen, platform, uses_jcuts)
                return replace(decision, reason=f"{decision.reason}; pinned") if known else None
        data = store.guard(key)
        decision = None if data is None else Decision.from_dict(data)
        if decision is None or not variant_space.is_known(decision.chosen, platform, uses_jcuts):
            return None
        if not variant_space.is_xla(decision.chosen) and not store.is_own(key):
            return None  # nothing here has compared the program that it chose with plain XLA's
        return decision

    def may_have_any(self) -> bool:
        """False where no process has stored anything yet: then no key is needed, the first of which takes a second."""
        path = getattr(self._current(), "path", None)
        return path is None or path.exists()

    def settled(self, key: str, platform: str, uses_jcuts: bool = True) -> Decision | None:
        """The decision under a key that this process need not measure again."""
        stored = self.lookup(key, platform, uses_jcuts)
        if stored is None or (stored.partial and not stored.pinned):  # there may be more kernels now
            return None
        return stored if stored.is_final or key in _decided_here else None

    def keep(self, key: str, decision: Decision) -> None:
        """Stores what this process decided."""
        _decided_here.add(key)
        self._current().put_guard(key, decision.to_dict(), on_gpu=key in self._of_gpus)

    def keep_pinned(self, key: str, decision: Decision) -> None:
        """Stores a decision that stays, or with ``pinned=False`` that it is one like others again."""
        self._current().put_guard(self._pinned[key], decision.to_dict(), on_gpu=key in self._of_gpus)

    def of_earlier_process(self, closed: jaxapi.Closed, signature: Signature, uses_jcuts: bool) -> Decision:
        """What an earlier process decided about a function that this one has not called."""
        platform = platform_of(signature)
        kept = None
        if self._settings.mode == "mixed" and self._settings.tune != "off":
            kept = self.lookup(self.key(closed, signature, platform), platform, uses_jcuts)
        return kept or Decision(JCUTS, "not called with these arguments yet")

    def _current(self) -> DecisionStore:
        chosen = self._store if self._store is not None else decisions.default_store()
        return chosen if chosen is not None else session.store()


def _changed_knobs(platform: str) -> tuple[str, ...]:
    """Variables of the environment that change programs or kernels, where they are not what they are by default."""
    here = knobs.current()
    singly = ("single calls",) if platform in variant_space.GPUS and not here.chains else ()
    restored = () if here.restore_convs == "off" else (f"restore {here.restore_convs}",)
    prefetched = () if here.l2_prefetch_mb is None else (f"prefetch {here.l2_prefetch_mb}",)
    caches = () if here.tune_caches == "warm" else (f"{here.tune_caches} caches",)
    return (*singly, *restored, *prefetched, *caches)
