"""The ``precision`` parameter of matrix products and convolutions."""

from __future__ import annotations


def asked(precision: object) -> str:
    """The precision that the caller asked for beyond the default, '' if none: algorithms that lose some are out."""
    parts = precision if isinstance(precision, tuple) else (precision,)
    names = [str(getattr(p, "name", p)).lower() for p in parts if p is not None]
    return next((n for n in names if n in ("high", "highest")), "")
