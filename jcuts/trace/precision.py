"""The ``precision`` parameter of contractions and convolutions (DEFAULT, HIGH, HIGHEST)."""

from __future__ import annotations

EXACT = {"BF16_BF16_F32": "bfloat16", "F16_F16_F32": "float16"}
"""Algorithms whose products are exact and whose sums are float32, and the type that operands are rounded to."""


def rounded_type(precision: object) -> str:
    """The type that an algorithm rounds operands to, '' for none, or for an algorithm of other sums."""
    return EXACT.get(str(getattr(precision, "name", "")), "")


def asked(precision: object) -> str:
    """The requested precision beyond the default ('high' or 'highest'), '' if none: less precise algorithms are ruled
    out.
    """
    parts = precision if isinstance(precision, tuple) else (precision,)
    names = [str(getattr(p, "name", p)).lower() for p in parts if p is not None]
    return next((n for n in names if n in ("high", "highest")), "")
