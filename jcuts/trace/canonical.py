"""Canonical serialisation of a closed jaxpr: equal programs give equal text, the basis of every cache key.

No object ids, no variable names of JAX's printer, no source lines, no function names; constants by shape and dtype
(``consts="shape"``) or by content (``consts="digest"``).
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import re
import weakref
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
from jax.extend import core as _core

from jcuts.base import keys
from jcuts.base.errors import UsageError
from jcuts.base.identity_memo import IdentityMemo

_ADDRESS = re.compile(r"\s*(at )?0x[0-9a-fA-F]+")

# Parameters that name things, or hold rules that lowering never looks at.
_NOT_SEMANTIC = frozenset(
    {
        "name",
        "debug_info",
        "jvp_jaxpr_fun",
        "fwd_jaxpr_thunk",
        "bwd",
        "out_trees",
        "ctx_mesh",
        "keep_unused",
        "inline",
        "donated_invars",
        "num_consts",
        "symbolic_zeros",
        "mul_fun",
    }
)
_CALLS = frozenset({"jit", "pjit", "custom_jvp_call", "custom_vjp_call", "jcuts_call", "closed_call", "core_call"})


def canonical_text(closed: Any, *, consts: str = "shape") -> str:
    """The program as text.

    Args:
        closed: a closed jaxpr.  consts: ``shape`` (constants by type) or ``digest`` (also by content).

    Returns: one line per equation; two calls, or two processes, give the same text for the same program.
    Raises: UsageError for another value of ``consts``.
    """
    if consts not in ("shape", "digest"):
        raise UsageError(f"consts={consts!r}: choose 'shape' or 'digest'", consts=consts)
    return "\n".join(_Writer(consts).closed(closed, ""))


def canonical_digest(closed: Any, *, consts: str = "shape") -> str:
    """SHA-256 (hex) of ``canonical_text``."""
    return keys.function(canonical_text(closed, consts=consts))


class _Writer:
    def __init__(self, consts: str) -> None:
        self.digest_consts = consts == "digest"

    def closed(self, closed: Any, indent: str) -> list[str]:
        jaxpr = closed.jaxpr if hasattr(closed, "jaxpr") else closed
        consts = list(getattr(closed, "consts", ()))
        names: dict[Any, str] = {}

        def name(var: Any) -> str:
            if isinstance(var, _core.Literal):
                return f"{_array_text(var.val)}:{_aval_text(var.aval)}"
            if type(var).__name__ == "DropVar":
                return "_"
            return names.setdefault(var, f"v{len(names)}")

        def typed(var: Any) -> str:
            return f"{name(var)}:{_aval_text(var.aval)}"

        heads = [typed(v) for v in jaxpr.constvars]
        if self.digest_consts:
            heads = [f"{head}={_content_digest(c)}" for head, c in zip(heads, consts, strict=False)]
        lines = [f"{indent}consts {' '.join(heads)}", f"{indent}in {' '.join(typed(v) for v in jaxpr.invars)}"]
        meshes = sorted({str(mesh) for eqn in jaxpr.eqns if (mesh := _mesh_of(eqn)) is not None})
        if meshes:
            # Equations run under the mesh that they were traced under: the same ones under another do not type-check.
            lines.append(f"{indent}mesh {' '.join(meshes)}")
        for eqn in jaxpr.eqns:
            params = self.params(eqn, indent)
            operands = " ".join(name(v) for v in eqn.invars)
            lines.append(f"{indent}{' '.join(typed(v) for v in eqn.outvars)} = {eqn.primitive.name}{params} {operands}")
        lines.append(f"{indent}out {' '.join(name(v) for v in jaxpr.outvars)}")
        return lines

    def params(self, eqn: Any, indent: str) -> str:
        skip = _NOT_SEMANTIC if eqn.primitive.name in _CALLS else frozenset({"name", "debug_info"})
        known = _params_parts.get(eqn.params)
        if known is None:
            known = [f"{k}={self.value(eqn.params[k], indent)}" for k in sorted(eqn.params) if k not in skip]
            if all(is_immutable(value) for value in eqn.params.values()):
                _params_parts.keep(known, eqn.params)
        parts = list(known)
        context = getattr(eqn, "ctx", None)
        for key in ("compute_type", "xla_metadata"):
            if getattr(context, key, None):
                parts.append(f"@{key}={getattr(context, key)}")
        return f"[{' '.join(parts)}]" if parts else ""

    def value(self, value: Any, indent: str) -> str:
        if isinstance(value, (_core.ClosedJaxpr, _core.Jaxpr)):
            return "{\n" + "\n".join(self.closed(value, indent + "  ")) + f"\n{indent}}}"
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            items = zip(value._fields, value, strict=False)  # type: ignore[attr-defined]
            return f"{type(value).__name__}({', '.join(f'{k}={self.value(v, indent)}' for k, v in items)})"
        if isinstance(value, (tuple, list)):
            return f"({', '.join(self.value(v, indent) for v in value)})"
        if isinstance(value, (set, frozenset)):
            return f"{{{', '.join(sorted(self.value(v, indent) for v in value))}}}"
        if isinstance(value, dict):
            return self._pairs(((str(k), v) for k, v in sorted(value.items(), key=lambda kv: str(kv[0]))), indent)
        if isinstance(value, enum.Enum):
            return f"{type(value).__name__}.{value.name}"
        if isinstance(value, (np.ndarray, np.generic)) or type(value).__name__ == "ArrayImpl":
            return _array_text(value)
        if isinstance(value, functools.partial):
            inner = ", ".join(self.value(v, indent) for v in (value.func, *value.args))
            return f"partial({inner}, {self.value(dict(value.keywords), indent)})"
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = ((f.name, getattr(value, f.name)) for f in dataclasses.fields(value) if f.compare)
            return type(value).__name__ + self._pairs(fields, indent)
        if callable(value) and hasattr(value, "__qualname__"):
            return f"{value.__module__}.{value.__qualname__}"
        return _ADDRESS.sub("", repr(value))

    def _pairs(self, items: Iterable[tuple[str, Any]], indent: str) -> str:
        return "{" + ", ".join(f"{k}: {self.value(v, indent)}" for k, v in items) + "}"


MOST_PARAMS = 1 << 14
"""Equations whose parameters' text is kept: regions of all variants of a program share their equations."""
_params_parts: IdentityMemo[list[str]] = IdentityMemo(MOST_PARAMS)


def is_immutable(value: Any) -> bool:
    """Whether a parameter is a plain number, name or type, or a tuple of such: its text depends on nothing else."""
    if isinstance(value, tuple):
        return all(map(is_immutable, value))
    return value is None or isinstance(value, (bool, int, float, str, enum.Enum, np.dtype))


def _mesh_of(eqn: Any) -> Any:
    mesh = getattr(getattr(eqn, "ctx", None), "cur_abstract_mesh", None)
    return None if mesh is None or mesh.empty else mesh


MOST_AVALS = 1 << 14
"""Types whose text is kept: regions of all variants of a program share their variables."""
_aval_texts: IdentityMemo[str] = IdentityMemo(MOST_AVALS)


def _aval_text(aval: Any) -> str:
    if (known := _aval_texts.get(aval)) is not None:
        return known
    text = aval.str_short(short_dtypes=True) if hasattr(aval, "str_short") else str(aval)
    weak = "~" if getattr(aval, "weak_type", False) else ""
    # A sharding-in-types aval prints its sharding; Auto meshes print nothing, which is what lowering sees of them.
    return _aval_texts.keep(weak + text, aval)


def _array_text(value: Any) -> str:
    array = np.asarray(value)
    if array.dtype == object:
        return _ADDRESS.sub("", repr(value))
    if array.size == 1 and array.dtype.kind in "biufc":
        # repr of a float64 is exact; the bytes keep NaN payloads and -0 apart.
        return f"{array.reshape(()).item()!r}#{array.tobytes().hex()}"
    return f"array({array.dtype}{list(array.shape)}#{hashlib.sha256(_bytes(array)).hexdigest()[:16]})"


def _content_digest(value: Any) -> str:
    """SHA-256 (hex) of a constant's bytes; 'opaque' for what has no content (a tracer, a token)."""
    known = _digests.get(id(value))
    if known is not None and known[0]() is value:
        return known[1]
    try:
        dtype = getattr(value, "dtype", None)
        is_key = dtype is not None and jax.numpy.issubdtype(dtype, jax.dtypes.prng_key)
        array = np.asarray(jax.random.key_data(value) if is_key else value)
    except Exception:  # it has only a type
        return "opaque"
    found = hashlib.sha256(_bytes(array)).hexdigest()
    if isinstance(value, jax.Array) and array.nbytes >= _WORTH_KEEPING:
        # Its content never changes (a NumPy array's may): hashed once per process, forgotten with the array.
        number = id(value)
        _digests[number] = (weakref.ref(value, lambda _: _digests.pop(number, None)), found)
    return found


_WORTH_KEEPING = 1 << 16
_digests: dict[int, tuple[weakref.ref[Any], str]] = {}


def _bytes(array: np.ndarray) -> Any:
    """The array's bytes in row-major order, without a copy where they lie so."""
    if array.dtype == object or not array.flags.c_contiguous:
        return array.tobytes()
    return array.reshape(-1).view(np.uint8).data
