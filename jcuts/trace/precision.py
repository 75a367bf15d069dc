"""The ``precision`` parameter of contractions and convolutions (DEFAULT, HIGH, HIGHEST)."""

from __future__ import annotations


def asked(precision: object) -> str:
    """The requested precision beyond the default ('high' or 'highest'), '' if none: less precise algorithms are ruled
    out.
    """
    parts = precision if isinstance(precision, tuple) else (precision,)
    names = [str(getattr(p, "name", p)).lower() for p in parts if p is not None]
    return next((n for n in names if n in ("high", "highest")), "")
