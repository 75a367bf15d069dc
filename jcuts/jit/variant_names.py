"""Names of program variants, as the database and reports have them (`jit.variant_space` enumerates them)."""

from __future__ import annotations

from collections.abc import Mapping

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


def shown_form(chosen: str, speed: Mapping[str, tuple[float, float, float]]) -> Variant | None:
    """The form that a report is about: the chosen one, or where XLA won the fastest that lost.

    Args: speed: how many times as fast as plain XLA the programs are (`jit.decision.Decision`).
    """
    if not is_xla(chosen):
        return form_of(chosen)
    lost = [name for name in speed if not is_xla(name)]
    return form_of(max(lost, key=lambda name: speed[name][0])) if lost else None
