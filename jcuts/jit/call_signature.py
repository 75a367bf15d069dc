"""Call signature: static, donated and dynamic arguments of a call, and the key under which a decision is stored."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from jcuts.base.errors import NotJaxError, UsageError
from jcuts.primitive.sharding import Placement
from jcuts.trace import jaxapi
from jcuts.trace.capture import function_name

_DEFAULT_MEMORY = (None, "device")
"""Kinds of memory that arrays live in where nobody asks for another one."""


class Signature(NamedTuple):
    """Key of a decision: structure, types and placements of the dynamic arguments, values of the static ones."""

    tree: Any
    leaves: tuple[Any, ...]
    statics: tuple[Any, ...]


class CallSignature:
    """Argument options of a function (static, donated), as given to ``jax.jit``.

    Args: fn: the user's function; options: of ``jax.jit``.
    Attributes: donates: whether any argument is donated.
    """

    def __init__(self, fn: Callable[..., Any], options: dict[str, Any]) -> None:
        self._fn = fn
        self._static = jaxapi.static_positions(fn, options.get("static_argnums"), options.get("static_argnames"))
        self._donated = jaxapi.static_positions(fn, options.get("donate_argnums"), None)
        self.donates = bool(self._donated[0])

    def split(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, tuple[Any, ...]]:
        """The dynamic arguments, and position or name and value of the static ones."""
        nums, names = self._static
        where = {n % len(args) for n in nums if -len(args) <= n < len(args)}
        dynamic = (
            tuple(a for i, a in enumerate(args) if i not in where),
            {k: v for k, v in kwargs.items() if k not in names},
        )
        statics = (*((i, args[i]) for i in sorted(where)), *((k, kwargs[k]) for k in sorted(kwargs) if k in names))
        return dynamic, statics

    def signature(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Signature:
        """Raises: UsageError for an unhashable static argument, NotJaxError for what is no array."""
        dynamic, statics = self.split(args, kwargs)
        for name, value in statics:
            try:
                hash(value)
            except TypeError as error:
                raise UsageError(
                    f"static argument {name!r} of {function_name(self._fn)} has the unhashable type "
                    f"{type(value).__name__}: pass a hashable value (a tuple for a list), or make it dynamic",
                    argument=name,
                    value=value,
                ) from error
        leaves, tree = jax.tree.flatten(dynamic)
        described = tuple(self._leaf(x, args, kwargs) for x in leaves)
        return Signature((tree, len(args), tuple(sorted(kwargs))), described, statics)

    def _leaf(self, x: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        try:
            aval = jaxapi.aval_of(x)
        except TypeError as error:
            raise NotJaxError(
                f"argument {self._name_of(x, args, kwargs)} of {function_name(self._fn)} has the type "
                f"{type(x).__name__}{_of_numbers(x)}, which JAX takes for no array: pass "
                "arrays and numbers, or name the argument in static_argnums or static_argnames",
                type=type(x).__name__,
                function=function_name(self._fn),
            ) from error
        place = x.sharding if isinstance(x, jax.Array) and (x.committed or len(x.sharding.device_set) > 1) else None
        return aval, place

    def _name_of(self, leaf: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """The parameter that holds a leaf, with the path inside it: ``params['w'][0]``."""
        try:
            named = inspect.signature(self._fn).bind(*args, **kwargs).arguments
        except (TypeError, ValueError):  # no signature, or a call that does not fit it
            named = {**{str(i): a for i, a in enumerate(args)}, **kwargs}
        for name, value in named.items():
            for path, x in jax.tree_util.tree_leaves_with_path(value):
                if x is leaf:
                    return name + jax.tree_util.keystr(path)
        return "?"

    def explain(self, args: Any, kwargs: Any, error: Exception) -> None:
        """Turn JAX's complaint about an argument into ours; errors of the user's own code pass by."""
        try:
            self.signature(args, kwargs)
        except (UsageError, NotJaxError) as ours:
            raise ours from error

    def leaves(self, args: Any, kwargs: Any) -> list[Any]:
        """The dynamic arguments' arrays and numbers."""
        return jax.tree.leaves(self.split(args, kwargs)[0])

    def placement(self, args: Any, kwargs: Any) -> Placement:
        """Where the dynamic arguments lie."""
        return Placement.of(self.leaves(args, kwargs))

    def donated_leaves(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The dynamic arguments with a boolean for every array: whether it is donated."""
        nums, names = self._donated
        positions = {n % len(args) for n in nums if -len(args) <= n < len(args)}
        flags = (
            tuple(jax.tree.map(lambda _, i=i: i in positions, a) for i, a in enumerate(args)),
            {k: jax.tree.map(lambda _, k=k: k in names, v) for k, v in kwargs.items()},
        )
        static = self._static
        where = {n % len(args) for n in static[0] if -len(args) <= n < len(args)}
        return (
            tuple(a for i, a in enumerate(flags[0]) if i not in where),
            {k: v for k, v in flags[1].items() if k not in static[1]},
        )

    def copies(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with copies in place of donated arrays, for a call that may spoil them."""

        def copy(tree: Any) -> Any:
            return jax.tree.map(lambda x: x.copy() if isinstance(x, jax.Array) else x, tree)

        nums, names = self._donated
        positions = {n % len(args) for n in nums if -len(args) <= n < len(args)}
        return (
            tuple(copy(a) if i in positions else a for i, a in enumerate(args)),
            {k: copy(v) if k in names else v for k, v in kwargs.items()},
        )


def platform_of(signature: Signature) -> str:
    """Where a call runs: its arguments' platform, or the default one."""
    for _, place in signature.leaves:
        if place is not None:
            return next(iter(place.device_set)).platform
    default = jax.config.values["jax_default_device"]
    if default is not None and not isinstance(default, str):
        return default.platform
    return jax.default_backend() if default is None else default


def place_text(place: Any) -> str:
    """A placement for keys: devices of one kind are equal, so a decision for one of them holds on the others."""
    if place is None or (len(place.device_set) == 1 and place.memory_kind in _DEFAULT_MEMORY):
        return ""
    return str(place)


def _of_numbers(x: Any) -> str:
    """`` of dtype ...`` of an array whose elements JAX does not know."""
    return f" of dtype {x.dtype}" if hasattr(x, "dtype") else ""
