"""An optimised function looked up as a method: its object is the first argument of every call."""

from __future__ import annotations

import functools
from typing import Any


class BoundOptimized:
    """An ``Optimized`` bound as a method to its object, the first argument of every call."""

    def __init__(self, optimized: Any, instance: Any) -> None:
        # Made at every look-up of the method: what describes the function is asked of it when it is wanted.
        self.__func__ = optimized
        self.__self__ = instance
        self.__doc__ = optimized.__doc__
        self.__module__ = optimized.__module__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__func__(self.__self__, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.__func__, name)
        if name in ("lower", "trace", "eval_shape", "tune", "explain", "decision"):
            return functools.partial(value, self.__self__)
        if name == "save":
            return lambda path, *args, **kwargs: value(path, self.__self__, *args, **kwargs)
        return value

    def __repr__(self) -> str:
        return f"<bound {self.__func__!r} of {self.__self__!r}>"
