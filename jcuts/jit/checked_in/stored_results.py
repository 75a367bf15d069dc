"""What outlives the process of an optimised function: artefacts and pinned choices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from jcuts.base.errors import UsageError
from jcuts.base.settings import Settings
from jcuts.jit.call_signature import CallSignature, platform_of
from jcuts.jit.trace_token import isolated_trace
from jcuts.trace import jaxapi
from jcuts.trace.capture import function_name

if TYPE_CHECKING:
    from jcuts.jit.export import saving


class StoredResults:
    """`save` and `pin` of an ``Optimized``, which has all else."""

    settings: Settings
    _fn: Callable[..., Any]
    _arguments: CallSignature
    _lock: Any
    _decisions: Any
    _deciding: Any
    _carriers: Any
    _decide: Callable[..., Any]
    _decided: Callable[..., Any]
    _refresh: Callable[[], None]
    finish_tuning: Callable[..., bool]

    def save(
        self,
        path: str | Path,
        *args: Any,
        signatures: Sequence[tuple[Any, ...]] = (),
        weights: str = "inside",
        names: Any = None,
        key: Any = None,
        seeds: Sequence[int] = (0, 1),
        **kwargs: Any,
    ) -> str:
        """Write what calls with these arguments run as an artefact, for ``jcuts.load`` (docs/artifacts.md).

        Decides, which measures, where nothing was decided yet.

        Args:
            path: the file; what was there stays until the new one is complete.
            signatures: positional arguments of further calls.
            weights: where arrays go that the function closes over: ``inside``, ``beside`` (a safetensors file of the
                same name), or ``arguments`` (the first argument of the loaded function is the dict of them).
            names: a pytree of these arrays: each is named by its path in it.
            key: bytes or path of a key for an HMAC, which ``load(..., key=...)`` demands.
            seeds: of the inputs of which errors against float64 are recorded (0: these arguments).
        Returns: the file's identity: SHA-256 of its header, which covers all of it.
        Raises: UnsupportedError: something has no form in an artefact.  AccuracyRejected: the tuned program is further
            from float64 than allowed.  ArtifactError: the file cannot be written.
        """
        from jcuts.jit.export import saving

        calls = [(args, kwargs), *((tuple(more), {}) for more in signatures)]
        if any(jaxapi.is_tracer(x) for x in jax.tree.leaves(calls)) or not jaxapi.trace_state_clean():
            raise UsageError("save needs concrete arguments, outside of jax.jit and other transformations")
        found = [self._saved(*call, seeds=seeds) for call in calls]
        return saving.write(Path(path), function_name(self._fn), found, weights=weights, names=names, key=key)

    def _saved(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, seeds: Sequence[int]) -> saving.SavedCall:
        from jcuts.jit.accuracy.float64_check import output_roles
        from jcuts.jit.export import saving
        from jcuts.jit.traced_call import Call, TracedCall

        signature = self._arguments.signature(args, kwargs)
        with self._lock, isolated_trace():
            known = self._settled(signature)
            if known is None:
                known = self._decide(signature, args, kwargs, measure=self.settings.measures, to_end=True)
                self._refresh()
            call = Call(signature, args, kwargs, self._arguments.placement(args, kwargs), platform_of(signature))
            plain = self._carriers.plain.trace(*args, **kwargs)
            leaves = tuple(self._arguments.leaves(args, kwargs))
            roles = output_roles(plain.out_info)
            traced = TracedCall(call, plain.jaxpr, leaves, self._carriers, self._arguments, self.settings, roles)
            return saving.saved_call(traced, known[1], jax.tree.structure(plain.out_info), seeds)

    def _settled(self, signature: Any) -> Any:
        """The program and decision of a signature, once what ``tune="auto"`` tunes beside its calls has ended."""
        known = self._decisions.get(signature)
        if known is not None and known[1].deferred and self.settings.tune == "auto":
            self.finish_tuning()
            known = self._decisions.get(signature)
            if known is not None and known[1].deferred:  # it failed: decided now
                del self._decisions[signature]
                return None
        return known

    def pin(self, *args: Any, pinned: bool = True, **kwargs: Any) -> int:
        """Keep what calls with these arguments run, in later versions of jcuts, too (docs/tuning.md); False ends that.

        Returns: how many rows of the database that concerns.
        Raises: UsageError: nothing was measured for these arguments.
        """
        from jcuts.jit.traced_call import Call

        signature = self._arguments.signature(args, kwargs)
        call = Call(signature, args, kwargs, self._arguments.placement(args, kwargs), platform_of(signature))
        with self._lock, isolated_trace():
            self._settled(signature)
            known = self._decided(signature) or self._deciding.of_earlier_process(call)[0]
            if known is None:
                raise UsageError(f"{function_name(self._fn)} was not tuned for these arguments: call .tune(...) first")
            return self._deciding.pin(call, known, pinned=pinned)
