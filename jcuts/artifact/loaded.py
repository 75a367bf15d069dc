"""``Loaded``, the callable of an artefact: dispatch by structure and types, tuned program or plain-XLA fallback.

Each saved signature is a ``jax.export`` program whose first operands are the weights.  They become constants of it, as
they were where it was tuned, when it is traced into the caller's own ``jax.jit``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import export, tree_util

from jcuts.artifact import device, kernels, trees
from jcuts.artifact.container import Container
from jcuts.artifact.manifest import ARGUMENTS, ArrayType, Manifest, Program, Signature, seal, static_value
from jcuts.base import run_statistics
from jcuts.base.errors import ArtifactError, ArtifactMismatch, UnknownSignature, UnsupportedError
from jcuts.codegen.artifact import CompiledKernel
from jcuts.trace import jaxapi

_SHOWN = 16
_LONGEST_TREE = 400
"""How much of a call that nobody saved is quoted."""


class _Entry:
    """A signature with its trees, and its program once it was deserialised."""

    def __init__(self, signature: Signature, types: Sequence[type]) -> None:
        self.signature = signature
        self.in_tree = trees.decode(signature.in_tree, len(signature.inputs), types)
        self.out_tree = trees.decode(signature.out_tree, len(signature.outputs), types)
        self.statics = tuple((s.position, s.name, s.value) for s in signature.statics)
        self.exported: Any = None

    @property
    def key(self) -> Any:
        return self.in_tree, self.signature.inputs, self.statics

    def __str__(self) -> str:
        args, kwargs = jax.tree.unflatten(self.in_tree, [_Shown(str(t)) for t in self.signature.inputs])
        shown = [repr(x) for x in args] + [f"{name}={x!r}" for name, x in kwargs.items()]
        for position, name, value in self.statics:
            if position is None:
                shown.append(f"{name}={value!r}")
            else:
                shown.insert(position, repr(value))
        return f"({', '.join(shown)})"


class _Shown(str):
    def __repr__(self) -> str:
        return str(self)


class Loaded:
    """A function out of an artefact, called like the one that was saved.

    With ``weights="arguments"`` the first argument of a call is the dict of weights by name.

    Attributes:
        manifest: what the artefact says of itself. identity: SHA-256 of its header.
        differences: what is other here than where it was saved; () where nothing is.
        is_fallback: whether plain XLA runs in place of the tuned programs.
    """

    def __init__(
        self,
        manifest: Manifest,
        file: Container,
        arrays: Mapping[str, np.ndarray],
        found: Mapping[str, CompiledKernel],
        *,
        differences: Sequence[str],
        is_fallback: bool,
        types: Sequence[type] = (),
    ) -> None:
        self.manifest = manifest
        self.identity = file.identity
        self.differences = tuple(differences)
        self.is_fallback = is_fallback
        self.__name__ = manifest.name
        self._file = file
        self._arrays = arrays
        self._kernels = found
        self._lock = threading.Lock()
        self._entries = [_Entry(signature, types) for signature in manifest.signatures]
        self._by_key = {entry.key: entry for entry in self._entries}
        if len(self._by_key) != len(self._entries):
            raise ArtifactError("the artefact has a signature twice")
        statics = {(position, name) for entry in self._entries for position, name, _ in entry.statics}
        self._positions = tuple(sorted({p for p, _ in statics if p is not None}))
        self._names = tuple(sorted({n for p, n in statics if p is None}))
        groups: dict[Any, Any] = {}
        for entry in self._entries:
            group = self._group(entry)
            if group not in groups:
                groups[group] = self._jit(entry)
        self._jitted = groups
        self._only = next(iter(groups.values())) if len(groups) == 1 else None
        run_statistics.watch(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not jaxapi.trace_state_clean():
            return self._traced(*args, **kwargs)  # a nested jit takes no options of XLA
        if self._only is None:
            return self._jitted[self._group(self._find(args, kwargs)[0])](*args, **kwargs)
        try:
            return self._only(*args, **kwargs)
        except UnknownSignature:
            raise
        except TypeError:
            self._find(args, kwargs)  # says which argument is no array
            raise

    def __repr__(self) -> str:
        runs = "plain XLA" if self.is_fallback else f"{len(self.manifest.kernels)} kernels"
        return f"<jcuts.Loaded {self.__name__} {runs}, {len(self._entries)} signatures>"

    @property
    def signatures(self) -> tuple[str, ...]:
        """The calls that it was saved for, as text."""
        return tuple(map(str, self._entries))

    def stats(self) -> dict[str, Any]:
        """What runs for every saved signature; nothing is tuned."""
        reason = "; ".join(self.differences) if self.is_fallback else "as saved"
        rows = [
            {
                "arguments": [str(t) for t in entry.signature.inputs],
                "program": "xla" if self.is_fallback or not entry.signature.kernels else "jcuts",
                "reason": reason,
                "fallback": self.is_fallback,
                "tuning_seconds": 0.0,
            }
            for entry in self._entries
        ]
        return {"name": self.__name__, "kind": "load", "signatures": rows}

    def in_tree(self, number: int = 0) -> Any:
        """``PyTreeDef`` of the dynamic arguments of a signature: the pair of positional and keyword arguments."""
        return self._entries[number].in_tree

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """``jax.stages.Lowered`` of the program that these arguments run."""
        return self._jitted[self._group(self._find(args, kwargs)[0])].lower(*args, **kwargs)

    def export_bytes(self, number: int = 0) -> bytes:
        """One signature as serialised ``jax.export`` program with its weights.

        It takes and gives flat arrays, in the order of `jax.tree.leaves`. The process that runs it registers the call
        targets first: ``jcuts.register_targets(path)``.
        """
        if self.manifest.weights == ARGUMENTS:
            raise ArtifactError("the weights are arguments: export a function that calls the artefact with them")
        return bytes(self._bound(self._entries[number]).serialize())

    # ------------------------------------------------------------ dispatch

    def _jit(self, entry: _Entry) -> Any:
        shift = 1 if self.manifest.weights == ARGUMENTS else 0
        options: dict[str, Any] = {}
        if self._positions or self._names:
            options = {"static_argnums": tuple(p + shift for p in self._positions), "static_argnames": self._names}
        if donated := _donated_positions(entry):
            options["donate_argnums"] = tuple(shift + _among_all(p, self._positions) for p in donated)
        if not self.is_fallback and entry.signature.program.options:
            options["compiler_options"] = dict(entry.signature.program.options)

        def carrier(*args: Any, **kwargs: Any) -> Any:
            return self._traced(*args, **kwargs)

        carrier.__name__ = carrier.__qualname__ = self.__name__
        return jax.jit(carrier, **options)

    def _group(self, entry: _Entry) -> Any:
        options = {} if self.is_fallback else entry.signature.program.options
        return tuple(sorted(options.items())), _donated_positions(entry)

    def _program(self, entry: _Entry) -> Program:
        return entry.signature.plain if self.is_fallback else entry.signature.program

    def _find(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[_Entry, list[Any], Any]:
        """The signature of a call, its flat dynamic arguments, and the weights that it was given."""
        weights = None
        if self.manifest.weights == ARGUMENTS:
            if not args:
                raise UnknownSignature("the first argument must be the dict of weights by name")
            weights, args = args[0], args[1:]
        statics = [(p, "", _static(args[p])) for p in self._positions if p < len(args)]
        statics += [(None, n, _static(kwargs[n])) for n in self._names if n in kwargs]
        dynamic = (
            tuple(a for i, a in enumerate(args) if i not in self._positions),
            {k: v for k, v in kwargs.items() if k not in self._names},
        )
        leaves, tree = jax.tree.flatten(dynamic)
        try:
            types = tuple(_type_of(x) for x in leaves)
        except TypeError as error:
            raise UnknownSignature(f"an argument of {self.__name__} is no array: {error}") from error
        entry = self._by_key.get((tree, types, tuple(statics)))
        if entry is None:
            asked = ", ".join(map(str, types[:_SHOWN])) + (", ..." if len(types) > _SHOWN else "")
            raise UnknownSignature(
                f"{self.__name__} was not saved for a call with {asked or 'no arrays'} in the structure "
                f"{str(tree)[:_LONGEST_TREE]}; it has {'; '.join(self.signatures)} (arguments are "
                "positional, or keywords, as they were when it was saved)",
                signatures=self.signatures,
            )
        return entry, leaves, weights

    def _traced(self, *args: Any, **kwargs: Any) -> Any:
        entry, leaves, given = self._find(args, kwargs)
        xs = [jax.numpy.asarray(x, t.dtype) for x, t in zip(leaves, entry.signature.inputs, strict=True)]
        if given is None:
            results = self._opaque(self._bound(entry).call)(*xs)
        else:
            weights = self._given(given, self._program(entry))
            results = self._opaque(self._exported(entry).call)(tuple(weights), *xs)
        return jax.tree.unflatten(entry.out_tree, results)

    def _opaque(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """An exported call whose derivative and batching (`jax.custom_jvp`, `custom_vmap`) are errors that say what to
        save.
        """

        def refuse(what: str, instead: str) -> Callable[..., Any]:
            def rule(*_: Any) -> Any:
                raise UnsupportedError(f"{self.__name__} was loaded from an artefact, which has no {what}: {instead}")

            return rule

        batched = jax.custom_batching.custom_vmap(call)
        batched.def_vmap(refuse("batching rule", f"save jax.vmap({self.__name__})"))
        opaque = jax.custom_jvp(batched)
        opaque.defjvp(refuse("derivative", f"save jax.value_and_grad({self.__name__}), or whatever derivative runs"))
        return opaque

    def _bound(self, entry: _Entry) -> Any:
        """The program with its weights as constants, as it had them where it was tuned; made anew for every trace."""
        weights = [self._arrays[key] for key in self._program(entry).weights]
        return jaxapi.with_constants(self._exported(entry), weights)

    def _given(self, given: Any, program: Program) -> list[Any]:
        tensors = {tensor.key: tensor for tensor in self.manifest.tensors}
        found = []
        for tensor in (tensors[key] for key in program.weights):
            if not isinstance(given, Mapping) or tensor.name not in given:
                raise UnknownSignature(f"the first argument has no weight {tensor.name!r}", weight=tensor.name)
            if (have := _type_of(given[tensor.name])) != tensor.type:
                raise UnknownSignature(f"weight {tensor.name!r} is {have}, it must be {tensor.type}")
            found.append(given[tensor.name])
        return found

    def _exported(self, entry: _Entry) -> Any:
        """The program of a signature, deserialised once and checked against the manifest."""
        with self._lock:
            if entry.exported is None:
                entry.exported = self._deserialized(entry)
            return entry.exported

    def _deserialized(self, entry: _Entry) -> Any:
        program = self._program(entry)
        data = self._file.section(program.section)
        if self._file.digests[program.section] != program.sha256:
            raise ArtifactError(f"section {program.section!r} does not hold the program that the manifest says")
        try:
            exported = export.deserialize(bytearray(data))
            calls = kernels.calls(exported.mlir_module())
        except ArtifactError:
            raise
        except Exception as error:  # flatbuffers and MLIR have errors of their own
            raise ArtifactError(
                f"the program {program.section!r} cannot be read by jax {jax.__version__}: {error}"
            ) from error
        if exported.fun_name != seal(self.manifest, entry.signature):
            raise ArtifactError(f"the program {program.section!r} and the manifest do not belong together")
        tensors = {tensor.key: tensor.type for tensor in self.manifest.tensors}
        inputs = (*(tensors[key] for key in program.weights), *entry.signature.inputs)
        for what, avals, types in (
            ("takes", exported.in_avals, inputs),
            ("gives", exported.out_avals, entry.signature.outputs),
        ):
            if tuple(ArrayType(tuple(aval.shape), np.dtype(aval.dtype).name) for aval in avals) != types:
                raise ArtifactError(f"the program {program.section!r} {what} other arrays than the manifest says")
        if device.platform_here() not in exported.platforms:
            difference = f"platform: {self.__name__} was exported for {' and '.join(exported.platforms)}"
            raise ArtifactMismatch(f"{difference}, here {device.platform_here()}", differences=(difference,))
        used = {} if self.is_fallback else {name: self._kernels[name] for name in entry.signature.kernels}
        kernels.check_calls(calls, used, () if self.is_fallback else self.manifest.targets)
        return exported

    def prepare(self) -> None:
        """Deserialises and checks every program now, and not at its first call. Raises: ArtifactError."""
        for entry in self._entries:
            self._exported(entry)


def _static(value: Any) -> Any:
    try:
        return static_value(value)
    except TypeError as error:
        raise UnknownSignature(f"no signature was saved with this static argument: {error}") from error


def _type_of(x: Any) -> ArrayType:
    aval = x if hasattr(x, "shape") and hasattr(x, "dtype") else jax.typeof(x)
    dtype = jax.dtypes.canonicalize_dtype(aval.dtype)
    return ArrayType(tuple(int(n) for n in aval.shape), np.dtype(dtype).name)


def _donated_positions(entry: _Entry) -> tuple[int, ...]:
    """Positional dynamic arguments all of whose arrays are donated."""
    if not entry.signature.donated:
        return ()
    args, _ = jax.tree.unflatten(entry.in_tree, range(len(entry.signature.inputs)))
    donated = set(entry.signature.donated)
    return tuple(
        i for i, arg in enumerate(args) if tree_util.tree_leaves(arg) and donated.issuperset(tree_util.tree_leaves(arg))
    )


def _among_all(position: int, statics: Sequence[int]) -> int:
    """Position among all arguments of one that is counted without the static ones."""
    for static in statics:
        position += static <= position
    return position
