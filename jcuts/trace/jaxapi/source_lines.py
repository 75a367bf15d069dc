"""Debug info of equations: the user's source lines and ``jax.named_scope`` paths."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import jax
from jax._src import source_info_util as _source

from jcuts.trace.jaxapi.types import Closed, Eqn


class SourceLine(NamedTuple):
    """A line of the user's program."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} ({self.function})"


def user_line(eqn: Eqn) -> SourceLine | None:
    """The innermost frame outside JAX and jcuts that made the equation, or None."""
    frame = _source.user_frame(eqn.source_info.traceback)
    return None if frame is None else SourceLine(frame.file_name, frame.start_line, frame.function_name)


def user_frame(eqn: Eqn) -> str:
    """The user's line that made the equation as ``file:line (function)``, or ``unknown``."""
    line = user_line(eqn)
    return "unknown" if line is None else str(line)


def name_stack(eqn: Eqn) -> str:
    """``jax.named_scope`` path of an equation."""
    return str(eqn.source_info.name_stack)


def is_library_function(closed: Closed) -> bool:
    """Whether a jaxpr is the body of a function of JAX itself (``jnp.where``, ``nn.relu``, ...)."""
    return _JAX_FOLDER in (closed.jaxpr.debug_info.func_src_info or "")


_JAX_FOLDER = os.path.dirname(os.path.abspath(jax.__file__)) + os.sep


def seen_from(eqn: Eqn, outer: Eqn, library: bool) -> Any:
    """Source info of ``eqn`` seen from the caller ``outer`` of the jaxpr that holds it (its scopes come first).

    JAX traces a library function once, for its first caller; ``library`` says to name this caller's line instead.
    """
    inner = eqn.source_info
    if library or _source.user_frame(inner.traceback) is None:
        inner = inner.replace(traceback=outer.source_info.traceback)
    return inner.replace(name_stack=outer.source_info.name_stack + inner.name_stack)
