"""Names of program variants, as the database and reports have them (`jit.variant_space` enumerates them)."""

from __future__ import annotations

from jcuts.base.settings import Variant
from jcuts.jit.decision import JCUTS, XLA


def name_of(form: Variant | None, option: str = "") -> str:
    """Name of the jcuts program of a form."""
    text = "" if form is None else str(form)
    return JCUTS + (f"/{text}" if text else "") + (f":{option}" if option else "")


def form_of(name: str) -> Variant | None:
    """The form that a program's name stands for; None for the plain one, and for XLA's own.

    Raises: UsageError: an impossible form.
    """
    _, _, text = name.partition(":")[0].partition("/")
    return Variant.parse(text) if text else None


def is_xla(name: str) -> bool:
    """Whether a program is the user's own, left to XLA."""
    return name.partition(":")[0] == XLA
