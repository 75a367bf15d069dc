"""JAX's own classes under stable names, and the registration of this package's frames as not the user's."""

from __future__ import annotations

import os
from typing import Any

from jax._src import ad_util as _ad_util
from jax._src import core as _core
from jax._src import sharding_impls as _sharding_impls
from jax._src import source_info_util as _source
from jax._src import traceback_util as _traceback_util
from jax._src.util import weakref_lru_cache as _weakref_lru_cache

Closed = _core.ClosedJaxpr
Jaxpr = _core.Jaxpr
Eqn = _core.JaxprEqn
Var = _core.Var
Literal = _core.Literal
DropVar = _core.DropVar
Tracer = _core.Tracer
ShapedArray = _core.ShapedArray
Primitive = _core.Primitive
Zero = _ad_util.Zero


ONE_JAXPR_CLASS: bool = Closed is Jaxpr

# Frames of jcuts are never "the user's line", and are cut out of the tracebacks that users see, as JAX's own are.
_HERE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_source.register_exclusion(_HERE)
_traceback_util.register_exclusion(_HERE)

UNSPECIFIED: Any = type(getattr(_sharding_impls, "UNSPECIFIED"))  # noqa: B009  (not exported by name)

api_boundary = _traceback_util.api_boundary
cached_by_jaxpr = _weakref_lru_cache  # of a function whose first argument is a jaxpr: kept as long as the jaxpr lives
